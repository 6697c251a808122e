"""From a valid request to what the fleet is asked for: token ids, checked against the model, and how to sample."""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core.request import SLO
from paceline.engine.grammar import schema_error
from paceline.engine.tokenizer import Tokenizer
from paceline.server.errors import bad_request
from paceline.server.generation import Job, Prompt, TextOptions
from paceline.server.protocol import ChatRequest, CompletionRequest, Message, sampling_params
from paceline.server.template import ChatTemplate, TemplateError

INLINE_CHARS = 4096  # longer texts are encoded in a thread: the event loop goes on


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it. `context`: prompt and answer, in tokens (0: not known); `created`: Unix time.

    `embeddings`: token ids that the model has a row for, where that is known; its tokenizer may have more, or fewer.
    """

    name: str
    tokenizer: Tokenizer
    context: int
    created: int = 0
    embeddings: int | None = None

    @property
    def vocab_size(self) -> int:
        return min(self.tokenizer.vocab_size, self.embeddings or self.tokenizer.vocab_size)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and how fast it must be."""

    namespace: str
    slo: SLO


async def encode(model: ServedModel, text: str, add_special_tokens: bool) -> list[int]:
    """Raises `ApiError` 400 where the tokenizer gives an id that the model does not have."""
    if len(text) <= INLINE_CHARS:
        tokens = model.tokenizer.encode(text, add_special_tokens)
    else:
        tokens = await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens)
    check_vocabulary("prompt", tokens, model)
    return tokens


async def completion_job(model: ServedModel, request: CompletionRequest, caller: Caller) -> Job:
    """Raises `ApiError` 400."""
    prompts = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            prompts.append(Prompt(await encode(model, prompt, request.add_special_tokens), prompt))
        else:
            check_vocabulary("prompt", prompt, model)
            prompts.append(Prompt(prompt))
    asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
    longest = max(len(prompt.tokens) for prompt in prompts)
    max_tokens = answer_tokens(model, longest, asked, default=request.max_tokens)
    return await _job(model, request, prompts, max_tokens, caller)


async def chat_job(model: ServedModel, template: ChatTemplate | None, request: ChatRequest, caller: Caller) -> Job:
    """Raises `ApiError` 400."""
    text = await chat_text(model, template, request.messages, request.add_generation_prompt)
    prompt = Prompt(await encode(model, text, request.add_special_tokens), text)
    max_tokens = answer_tokens(model, len(prompt.tokens), request.limit, default=None)
    return await _job(model, request, [prompt], max_tokens, caller)


async def chat_text(
    model: ServedModel, template: ChatTemplate | None, messages: Seq[Message], add_generation_prompt: bool
) -> str:
    """The conversation as the checkpoint's template writes it. Raises `ApiError` 400."""
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
    if prompt == 0:
        raise bad_request("prompt", "it has no tokens")
    if left < 1:
        text = f"the model's context is {model.context} tokens; the prompt has {prompt}, which leaves none to generate"
        raise bad_request(None, text, code)
    if asked is not None and asked > left:
        text = f"the model's context is {model.context} tokens; the prompt has {prompt} and max_tokens is {asked}"
        raise bad_request(None, text, code)
    if asked is not None:
        return asked
    return left if default is None else min(default, left)


async def _job(
    model: ServedModel, request: CompletionRequest | ChatRequest, prompts: list[Prompt], max_tokens: int, caller: Caller
) -> Job:
    try:
        schema = request.response_format.schema_text
    except RecursionError:
        raise bad_request("response_format", "the schema is nested too deeply") from None
    if schema:
        error = await asyncio.to_thread(schema_error, schema)
        if error:
            raise bad_request("response_format", f"no answer can be held to this schema: {error}")
    check_vocabulary("logit_bias", [token for token, _ in request.logit_bias], model)
    check_vocabulary("stop_token_ids", request.stop_token_ids, model)
    options = TextOptions(
        stops=request.stop,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        echo=isinstance(request, CompletionRequest) and request.echo,
        discard=max_tokens == 0,
    )
    params = sampling_params(request, max_tokens)
    return Job(model.name, model.tokenizer, prompts, request.n, params, options, caller.namespace, caller.slo)
