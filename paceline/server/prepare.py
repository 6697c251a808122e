"""From a valid request to what the fleet is asked for: token ids, checked against the model, and how to sample."""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core.request import SLO
from paceline.engine.grammar import schema_error
from paceline.engine.tokenizer import Tokenizer
from paceline.server.errors import bad_request
from paceline.server.generation import Job, Prompt, TextOptions
from paceline.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, Message, sampling_params
from paceline.server.template import ChatTemplate, TemplateError

INLINE_CHARS = 4096  # longer texts are encoded in a thread: the event loop goes on


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
    if sum(map(len, request.input)) <= INLINE_CHARS:
        inputs = _encode_inputs(model, request)
    else:
        inputs = await asyncio.to_thread(_encode_inputs, model, request)
    for index, tokens in enumerate(inputs):
        name = f"input.{index}" if len(inputs) > 1 else "input"
        if not tokens:
            raise bad_request(name, "it has no tokens")
        check_vocabulary(name, tokens, model)
        if len(tokens) > model.context:
            text = f"it has {len(tokens)} tokens; the model's context is {model.context}"
            raise bad_request(name, text, "context_length_exceeded")
    return inputs


def _encode_inputs(model: ServedModel, request: EmbeddingRequest) -> list[list[int]]:
    """Token ids, cut to what the request says; the special token that ends a text stays."""
    limit, inputs = request.truncate_prompt_tokens, []
    for text in request.input:
        tokens = model.tokenizer.encode(text, add_special_tokens=True) if isinstance(text, str) else text
        most = len(tokens) if limit is None else model.context if limit == -1 else limit
        if len(tokens) > most:
            ends = isinstance(text, str) and tokens[-1] in model.tokenizer.special_ids
            tokens = [*tokens[: most - 1], tokens[-1]] if ends else tokens[:most]
        inputs.append(tokens)
    return inputs


async def completion_job(model: ServedModel, request: CompletionRequest, caller: Caller) -> Job:
    """Raises `ApiError` 400."""
    check_task(model, embeds=False)
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
    check_task(model, embeds=False)
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
    for index, prompt in enumerate(prompts):
        if not prompt.tokens:
            name = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise bad_request(f"{name}.{index}" if len(prompts) > 1 else name, "it has no tokens")
    try:
        schema = request.response_format.schema_text
    except RecursionError:
        raise bad_request("response_format", "the schema is nested too deeply") from None
    if schema:
        if not model.tokenizer.eos_ids:
            raise bad_request("response_format", f"{model.name!r} has no end of sequence, so no text of it has an end")
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
    smooth = model.smooth and request.stream and request.speculation.smooth and params.max_draft_tokens != 0
    return Job(model.name, model.tokenizer, prompts, request.n, params, options, caller.namespace, caller.slo, smooth)
