"""What requests look like: every field of every route, bounded, in one place.

Fields that do nothing here and promise nothing (`user`, `metadata`, ...) are taken and ignored; what is not supported
is refused by name, and so is every unknown field. `null` means the default, as OpenAI's clients send it.
"""

import json
import math
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from paceline.core.request import MAX_DRAFT_TOKENS, SLO, SamplingParams
from paceline.engine.grammar import MOST_BYTES
from paceline.server.errors import bad_request
from paceline.server.fields import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_SEQUENCES,
    MAX_TOKENS,
    Content,
    Fraction,
    Inputs,
    LogitBias,
    Metadata,
    Penalty,
    Prompts,
    Seed,
    Stop,
    StopTokenIds,
    Text,
    TokenIds,
    TopLogprobs,
    fault,
    nullable,
    unsupported,
)
from paceline.server.template import MAX_CHARS

NOT_SUPPORTED = {
    "audio": "audio is not supported",
    "best_of": "ranking of several completions is not supported; use n",
    "chat_template": "templates in requests are refused; the checkpoint's own is used",
    "chat_template_kwargs": "arguments for the chat template are not supported",
    "continue_final_message": "continuing the last message is not supported",
    "function_call": "functions are not supported",
    "functions": "functions are not supported",
    "modalities": "only text is supported",
    "prompt_embeds": "embeddings as prompts are not supported",
    "prompt_logprobs": "use echo with logprobs",
    "suffix": "insertion before a suffix is not supported",
    "tools": "tools are not supported for now",
    "tool_choice": "tools are not supported for now; only 'none' and 'auto' are taken",
    "truncate_prompt_tokens": "truncation of prompts is not supported",
    "web_search_options": "web search is not supported",
}
NEUTRAL: dict[str, list[Any]] = {
    "best_of": [1],
    "chat_template_kwargs": [{}],
    "continue_final_message": [False],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "suffix": [""],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
}
_MESSAGE_EXTRAS = ("annotations", "audio", "function_call", "refusal", "tool_calls", "tool_call_id")


def _schema(schema: dict[str, Any]) -> None:
    """Says which values of the unsupported fields are taken, and that null stands for a default."""
    for name, values in NEUTRAL.items():
        schema["properties"][name] = {"enum": values, "description": NOT_SUPPORTED[name]}
    nullable(schema)


STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, json_schema_extra=nullable)
STRICT_GENERATE = STRICT | ConfigDict(json_schema_extra=_schema)


def _drop_nulls(data: Any) -> Any:
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def _drop_neutral(data: Any) -> Any:
    """Drops nulls and what asks for nothing; refuses by name what is known and not supported."""
    if not isinstance(data, dict):
        return data
    kept = _drop_nulls(data)
    if kept.get("tool_choice") == "none":
        kept.pop("tools", None)
    if kept.get("best_of") == kept.get("n"):
        kept.pop("best_of", None)
    for name in sorted(NOT_SUPPORTED.keys() & kept.keys()):
        if not any(kept[name] == value and type(kept[name]) is type(value) for value in NEUTRAL.get(name, [])):
            raise unsupported(name, NOT_SUPPORTED[name])
        del kept[name]
    return kept


class StreamOptions(BaseModel):
    """`include_usage` asks for a last chunk with the token counts; `continuous_usage_stats` in every chunk."""

    model_config = STRICT
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # taken and ignored: nothing is ever padded

    _nulls = model_validator(mode="before")(_drop_nulls)


class Speculation(BaseModel):
    """Whether tokens may be drafted for this request, and how many a step; answers do not depend on it. `smooth`: a
    stream gets what a step yields evenly."""

    model_config = STRICT
    enabled: bool = True
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] = MAX_DRAFT_TOKENS
    smooth: bool = True

    _nulls = model_validator(mode="before")(_drop_nulls)


class JsonSchema(BaseModel):
    """A schema by name, as OpenAI's clients send it. Every schema is enforced, `strict` or not."""

    model_config = STRICT | ConfigDict(populate_by_name=True)
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] = "response"
    description: Text = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool = False

    _nulls = model_validator(mode="before")(_drop_nulls)


HeldTo = tuple[str, str]  # what an answer has to be, in which form and in words: see `engine.grammar.grammar_of`
ANY_OBJECT = '{"type": "object"}'


class ResponseFormat(BaseModel):
    """Plain text, any JSON object, or JSON of a schema."""

    model_config = STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    _nulls = model_validator(mode="before")(_drop_nulls)

    @model_validator(mode="after")
    def _both(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise fault("json_schema is required with the type 'json_schema', and only with it")
        return self

    @property
    def held_to(self) -> HeldTo:
        if self.json_schema is not None:
            return "json", json.dumps(self.json_schema.schema_)
        return "json", ANY_OBJECT


def _schema_or_its_text(value: Any) -> Any:
    if isinstance(value, dict | str):
        return value
    raise fault("must be a JSON schema, or the text of one")


class StructuredOutputs(BaseModel):
    """What the answer is held to, as vLLM's clients ask for it: by exactly one of these."""

    model_config = STRICT
    schema_: Annotated[dict[str, Any] | str | None, BeforeValidator(_schema_or_its_text), Field(alias="json")] = None
    json_object: bool = False  # any
    regex: str | None = None  # that all of the answer matches
    choice: Annotated[list[str], Field(min_length=1)] | None = None

    _nulls = model_validator(mode="before")(_drop_nulls)

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        given = (self.schema_, self.json_object or None, self.regex, self.choice)
        if sum(map(len, self.choice or ())) > MOST_BYTES:
            raise fault(f"choice has more than {MOST_BYTES} characters")
        if sum(value is not None for value in given) != 1:
            raise fault("exactly one of json, json_object, regex and choice is required")
        return self

    @property
    def held_to(self) -> HeldTo:
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "regex", "|".join(map(re.escape, self.choice))
        if self.schema_ is None:
            return "json", ANY_OBJECT
        return "json", self.schema_ if isinstance(self.schema_, str) else json.dumps(self.schema_)


class Generate(BaseModel):
    """What the two generating routes have in common."""

    model_config = STRICT_GENERATE
    model: Text = ""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = 0
    min_p: Fraction = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    logit_bias: LogitBias = ()
    seed: Seed | None = None
    stop: Stop = ()
    stop_token_ids: StopTokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    speculation: Speculation = Speculation()
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs | None = None
    # taken and ignored
    user: Text = ""
    metadata: Metadata | None = None
    store: bool = False
    service_tier: Text = ""
    safety_identifier: Text = ""
    prompt_cache_key: Text = ""
    prompt_cache_retention: Text = ""

    @property
    def usage(self) -> StreamOptions:
        """Where a stream says its usage."""
        return self.stream_options or StreamOptions()

    def _check(self, max_tokens: int | None) -> None:
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "is only allowed with stream: true")
        if self.structured_outputs is not None and self.response_format.type != "text":
            raise unsupported("structured_outputs", "is given beside response_format; send one of the two")
        if max_tokens is not None and self.min_tokens > max(max_tokens, 1):
            raise unsupported("min_tokens", f"is {self.min_tokens}, more than max_tokens, {max_tokens}")


class CompletionRequest(Generate):
    """POST /v1/completions"""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 16
    logprobs: TopLogprobs | None = None
    echo: bool = False
    add_special_tokens: bool = True

    _neutral = model_validator(mode="before")(_drop_neutral)

    @model_validator(mode="after")
    def _together(self) -> "CompletionRequest":
        self._check(self.max_tokens)
        sequences = len(self.prompt) * self.n
        if sequences > MAX_SEQUENCES:
            raise unsupported("n", f"prompts times n is {sequences}; at most {MAX_SEQUENCES} are allowed")
        return self


class Message(BaseModel):
    """One message of a conversation."""

    model_config = STRICT
    role: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    content: Content | None = None
    name: Text = ""

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, data: Any) -> Any:
        """Clients send back whole answers: their empty fields are dropped, tool calls are refused."""
        if not isinstance(data, dict):
            return data
        for name in _MESSAGE_EXTRAS:
            if data.get(name):
                raise fault(f"{name} is not supported in messages")
        return {name: value for name, value in data.items() if value is not None and name not in _MESSAGE_EXTRAS}

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise fault("content is required")
        return self

    def for_template(self) -> dict[str, str]:
        named = {"name": self.name} if self.name else {}
        return {"role": self.role, "content": self.content or "", **named}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(Generate):
    """POST /v1/chat/completions"""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    # taken and ignored
    parallel_tool_calls: bool = True
    reasoning_effort: Text = ""
    verbosity: Text = ""

    _neutral = model_validator(mode="before")(_drop_neutral)

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer; None is the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _together(self) -> "ChatRequest":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise unsupported("max_completion_tokens", "differs from max_tokens, its old name; send one of the two")
        self._check(self.limit)
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", "is only allowed with logprobs: true")
        return self


class EmbeddingRequest(BaseModel):
    """POST /v1/embeddings"""

    model_config = STRICT
    model: Text = ""
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None  # -1: to the model's context
    user: Text = ""  # taken and ignored

    _nulls = model_validator(mode="before")(_drop_nulls)

    @model_validator(mode="after")
    def _some_are_left(self) -> "EmbeddingRequest":
        if self.truncate_prompt_tokens == 0:
            raise unsupported("truncate_prompt_tokens", "must be at least 1, or -1 for the model's context")
        return self


class TokenizeRequest(BaseModel):
    """POST /tokenize, of a text or of messages as the chat template writes them."""

    model_config = STRICT
    model: Text = ""
    prompt: Annotated[str, Field(max_length=MAX_CHARS)] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # with a prompt true, with messages false
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    _nulls = model_validator(mode="before")(_drop_nulls)

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise unsupported("prompt", "exactly one of prompt and messages is required")
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize"""

    model_config = STRICT
    model: Text = ""
    tokens: TokenIds
    skip_special_tokens: bool = False

    _nulls = model_validator(mode="before")(_drop_nulls)


def sampling_params(request: CompletionRequest | ChatRequest, max_tokens: int, grammar: str = "") -> SamplingParams:
    """What the engine is asked for: for choice 0, with a random seed where none was given; `grammar`: of what the
    request's answer is held to."""
    seed = secrets.randbits(63) if request.seed is None else request.seed & (2**63 - 1)
    if isinstance(request, ChatRequest):
        logprobs, prompt_logprobs = (request.top_logprobs or 0) if request.logprobs else None, None
    else:
        logprobs, prompt_logprobs = request.logprobs, request.logprobs if request.echo else None
    return SamplingParams(
        max_tokens=max(1, max_tokens),
        min_tokens=request.min_tokens,
        temperature=request.temperature if request.temperature >= 1e-5 else 0.0,
        top_p=request.top_p,
        top_k=max(0, request.top_k),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        seed=seed,
        seeded=request.seed is not None,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        max_draft_tokens=request.speculation.max_draft_tokens if request.speculation.enabled else 0,
    )


def slo(headers: Mapping[str, str]) -> SLO:
    """The request's own latency goals, from `x-slo-ttft-ms` and `x-slo-tpot-ms`: 1 ms to one hour."""

    def seconds(name: str) -> float | None:
        text = headers.get(name)
        if text is None:
            return None
        try:
            value = float(text) if len(text) <= 32 else math.nan
        except ValueError:
            value = math.nan
        if not 1 <= value <= 3_600_000:
            raise bad_request(name, "must be a number of milliseconds from 1 to 3600000")
        return value / 1000

    return SLO(ttft=seconds("x-slo-ttft-ms"), tbt=seconds("x-slo-tpot-ms"))
