"""From a valid request to what the fleet is asked for: token ids, checked against the model, and how to sample."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core.request import SLO
from paceline.engine.tokenizer import Tokenizer
from paceline.server.beside import beside
from paceline.server.errors import ApiError, bad_request
from paceline.server.generation import Job, Prompt, TextOptions
from paceline.server.grammar_check import GrammarCheck
from paceline.server.helper import NoHelper
from paceline.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, Message, sampling_params
from paceline.server.template import ChatTemplate, TemplateError

MAX_PROMPT_LOGPROBS = 2**20  # of a request: they are all kept, and then written


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it. `context`: prompt and answer, in tokens (0: not known); `created`: Unix time.

    `embeddings`: token ids that the model has a row for, where that is known; its tokenizer may have more, or fewer.
    `dimensions`: numbers of an embedding, if that is what the model gives; None: it generates. `smooth`: its steps may
    yield several tokens, and streams get them evenly.
    """

    name: str
    tokenizer: Tokenizer
    context: int
    created: int = 0
    embeddings: int | None = None
    dimensions: int | None = None
    smooth: bool = False

    @property
    def vocab_size(self) -> int:
        return min(self.tokenizer.vocab_size, self.embeddings or self.tokenizer.vocab_size)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, how fast it must be, and when all of the request had come (`time.monotonic`)."""

    namespace: str
    slo: SLO
    arrival: float


async def encode(
    model: ServedModel, name: str, inputs: Seq[str | list[int]], add_special_tokens: bool, most: int | None
) -> list[list[int]]:
    """Token ids of texts, and ids as they are. `most`: the tokens that a text may have, None for any number.

    Raises `ApiError` 400 for a text that is longer, and for an id that the model does not have.
    """
    names = [f"{name}.{index}" for index in range(len(inputs))] if len(inputs) > 1 else [name]
    for where, text in zip(names, inputs, strict=True):
        if most is not None and isinstance(text, str) and model.tokenizer.surely_more(text, most):
            reason = f"it has {len(text)} characters, which are more than {most} tokens"
            raise bad_request(where, reason, "context_length_exceeded")

    def all_of_them() -> list[list[int]]:
        known = model.tokenizer
        return [known.encode(text, add_special_tokens) if isinstance(text, str) else text for text in inputs]

    encoded = await beside(sum(len(text) for text in inputs if isinstance(text, str)), all_of_them)
    for where, tokens in zip(names, encoded, strict=True):
        check_vocabulary(where, tokens, model)
    return encoded


def check_task(model: ServedModel, embeds: bool) -> None:
    """Raises `ApiError` 400 for a model that does not do what the route is for."""
    if embeds and model.dimensions is None:
        raise bad_request("model", f"{model.name!r} gives no embeddings; use /v1/completions or /v1/chat/completions")
    if not embeds and model.dimensions is not None:
        raise bad_request("model", f"{model.name!r} gives embeddings and generates no text; use /v1/embeddings")


async def embedding_inputs(model: ServedModel, request: EmbeddingRequest) -> list[list[int]]:
    """The inputs as token ids, with the model's special tokens around texts. Raises `ApiError` 400."""
    check_task(model, embeds=True)
    if request.dimensions not in (None, model.dimensions):
        text = f"embeddings of {model.name!r} have {model.dimensions} numbers; it was not trained to have them cut"
        raise bad_request("dimensions", text)
    limit = request.truncate_prompt_tokens
    inputs = await encode(model, "input", request.input, True, model.context if limit is None else None)
    for index, (given, tokens) in enumerate(zip(request.input, inputs, strict=True)):
        name = f"input.{index}" if len(inputs) > 1 else "input"
        if not tokens:
            raise bad_request(name, "it has no tokens")
        if limit is not None:
            tokens = inputs[index] = _cut(model, given, tokens, model.context if limit == -1 else limit)
        if len(tokens) > model.context:
            text = f"it has {len(tokens)} tokens; the model's context is {model.context}"
            raise bad_request(name, text, "context_length_exceeded")
    return inputs


def _cut(model: ServedModel, given: str | list[int], tokens: list[int], most: int) -> list[int]:
    """So many tokens; the special token that ends a text stays."""
    if len(tokens) <= most:
        return tokens
    ends = isinstance(given, str) and tokens[-1] in model.tokenizer.special_ids
    return [*tokens[: most - 1], tokens[-1]] if ends else tokens[:most]


async def completion_job(model: ServedModel, check: GrammarCheck, request: CompletionRequest, caller: Caller) -> Job:
    """Raises `ApiError`: 400, and 503 where a helper process does not start."""
    check_task(model, embeds=False)
    encoded = await encode(model, "prompt", request.prompt, request.add_special_tokens, model.context)
    given = zip(request.prompt, encoded, strict=True)
    prompts = [Prompt(tokens, text if isinstance(text, str) else None) for text, tokens in given]
    asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
    if request.echo and request.logprobs is not None:
        count = (1 + request.logprobs) * request.n * sum(len(prompt.tokens) for prompt in prompts)
        if count > MAX_PROMPT_LOGPROBS:
            text = f"with echo there would be {count}; at most {MAX_PROMPT_LOGPROBS} of a request are given"
            raise bad_request("logprobs", text)
    longest = max(len(prompt.tokens) for prompt in prompts)
    max_tokens = answer_tokens(model, longest, asked, default=request.max_tokens)
    return await _job(model, check, request, prompts, max_tokens, caller)


async def chat_job(
    model: ServedModel, template: ChatTemplate | None, check: GrammarCheck, request: ChatRequest, caller: Caller
) -> Job:
    """Raises `ApiError`, as `completion_job`."""
    check_task(model, embeds=False)
    text = await chat_text(model, template, request.messages, request.add_generation_prompt)
    [tokens] = await encode(model, "messages", [text], request.add_special_tokens, model.context)
    max_tokens = answer_tokens(model, len(tokens), request.limit, default=None)
    return await _job(model, check, request, [Prompt(tokens, text)], max_tokens, caller)


async def chat_text(
    model: ServedModel, template: ChatTemplate | None, messages: Seq[Message], add_generation_prompt: bool
) -> str:
    """The conversation as the checkpoint's template writes it. Raises `ApiError`: 400, and 503 where nobody can."""
    if template is None:
        raise bad_request("messages", f"model {model.name!r} has no chat template; use /v1/completions")
    special = {name: text for name, text in model.tokenizer.special_tokens.items() if isinstance(text, str)}
    try:
        return await template.render(
            **special,
            messages=[message.for_template() for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
    except NoHelper as error:
        raise _unavailable(error) from None
    except TemplateError as error:
        text = "the chat template refuses these messages" if error.by_template else "the chat template failed"
        raise bad_request("messages", f"{text}: {error}") from None


def check_vocabulary(name: str, ids: Seq[int], model: ServedModel) -> None:
    size = model.vocab_size
    if ids and max(ids) >= size:
        raise bad_request(name, f"the token id {max(ids)} is outside the vocabulary of {size} tokens")


def answer_tokens(model: ServedModel, prompt: int, asked: int | None, default: int | None) -> int:
    """How many tokens an answer may have beside a prompt of this many; `default` None is all that fit."""
    left = model.context - prompt
    code = "context_length_exceeded"
    if left < 1:
        text = f"the model's context is {model.context} tokens; the prompt has {prompt}, which leaves none to generate"
        raise bad_request(None, text, code)
    if asked is not None and asked > left:
        text = f"the model's context is {model.context} tokens; the prompt has {prompt} and max_tokens is {asked}"
        raise bad_request(None, text, code)
    if asked is not None:
        return asked
    return left if default is None else min(default, left)


async def _grammar(model: ServedModel, check: GrammarCheck, request: CompletionRequest | ChatRequest) -> str:
    """Of what the answer is held to; empty: nothing."""
    name, asked = "structured_outputs", request.structured_outputs
    if asked is None:
        name, asked = "response_format", request.response_format
        if asked.type == "text":
            return ""
    if not model.tokenizer.eos_ids:
        raise bad_request(name, f"{model.name!r} has no end of sequence, so no text of it has an end")
    try:
        return await check.grammar_of(*asked.held_to)
    except NoHelper as error:
        raise _unavailable(error) from None
    except RecursionError:
        raise bad_request(name, "the schema is nested too deeply") from None
    except ValueError as error:
        raise bad_request(name, f"no answer can be held to it: {error}") from None


def _unavailable(error: NoHelper) -> ApiError:
    return ApiError(503, str(error), code="unavailable", headers={"retry-after": "1"})


async def _job(
    model: ServedModel, check: GrammarCheck, request: CompletionRequest | ChatRequest, prompts: list[Prompt],
    max_tokens: int, caller: Caller,
) -> Job:  # fmt: skip
    for index, prompt in enumerate(prompts):
        if not prompt.tokens:
            name = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise bad_request(f"{name}.{index}" if len(prompts) > 1 else name, "it has no tokens")
    grammar = await _grammar(model, check, request)
    check_vocabulary("logit_bias", [token for token, _ in request.logit_bias], model)
    check_vocabulary("stop_token_ids", request.stop_token_ids, model)
    options = TextOptions(
        stops=request.stop,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        echo=isinstance(request, CompletionRequest) and request.echo,
        discard=max_tokens == 0,
    )
    params = sampling_params(request, max_tokens, grammar)
    smooth = model.smooth and request.stream and request.speculation.smooth and params.max_draft_tokens != 0
    own = caller.namespace, caller.slo, smooth, caller.arrival
    return Job(model.name, model.tokenizer, prompts, request.n, params, options, *own)
