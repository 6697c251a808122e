"""What answers look like: the structs of the two generating routes, whole and in chunks. Encoded by msgspec."""

import time
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from paceline.core.work import TokenLogprobs
from paceline.engine.tokenizer import Tokenizer
from paceline.server.generation import Choice, Entry, Piece
from paceline.server.protocol import StreamOptions

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class CompletionDetails(msgspec.Struct):
    """Of drafted tokens: those that became part of the answer, and those that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None | UnsetType = UNSET


class Message(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class Reply(msgspec.Struct):
    """A whole answer or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChunkChoice] | list[ChatChoice]
    usage: Usage | None | UnsetType = UNSET


class Style(Protocol):
    """How one of the two routes says things. Holds what all chunks of an answer have in common."""

    def chunks(self, choice: Choice, piece: Piece) -> list[Reply]:
        """The chunks of a stream for what a choice has ready."""
        ...

    def last_chunk(self, usage: Usage) -> Reply:
        """The chunk with the usage."""
        ...

    def answer(self, choices: list[tuple[Choice, Piece]], usage: Usage) -> Reply:
        """The whole answer."""
        ...


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; for a part of a character its bytes in OpenAI's notation, so that no two tokens have one name."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _top(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Two ids can have one text: the likelier one stays."""
    top: dict[str, float] = {}
    pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    for token, logprob in (*pairs, (logprobs.token, logprobs.logprob)):
        name = token_name(tokenizer, token)
        top[name] = max(top.get(name, LOWEST), finite(logprob))
    return top


def _so_far(options: StreamOptions, choice: Choice) -> Usage | None | UnsetType:
    """What a chunk says of usage: that of its choice, or that there will be some."""
    if not options.include_usage:
        return UNSET
    prompt, completion = len(choice.prompt.tokens), choice.completion_tokens
    return Usage(prompt, completion, prompt + completion) if options.continuous_usage_stats else None


class CompletionStyle:
    """/v1/completions"""

    def __init__(self, id: str, model: str, tokenizer: Tokenizer, logprobs: bool, usage: StreamOptions) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._head = (id, "text_completion", int(time.time()), model)
        self._usage = usage

    def chunks(self, choice: Choice, piece: Piece) -> list[Reply]:
        if not piece.text and not piece.entries and piece.finish_reason is None:
            return []
        stop = UNSET if piece.finish_reason is None else choice.stop_reason
        part = CompletionChoice(choice.index, piece.text, self._log(piece.entries), piece.finish_reason, stop)
        return [Reply(*self._head, [part], _so_far(self._usage, choice))]

    def last_chunk(self, usage: Usage) -> Reply:
        return Reply(*self._head, [], usage)

    def answer(self, choices: list[tuple[Choice, Piece]], usage: Usage) -> Reply:
        parts = [
            CompletionChoice(c.index, piece.text, self._log(piece.entries), piece.finish_reason, c.stop_reason)
            for c, piece in choices
        ]
        return Reply(*self._head, parts, usage)

    def _log(self, entries: list[Entry]) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        return CompletionLogprobs(
            [token_name(self._tokenizer, entry.token) for entry in entries],
            [finite(entry.logprobs.logprob) if entry.logprobs else None for entry in entries],
            [_top(entry.logprobs, self._tokenizer) if entry.logprobs else None for entry in entries],
            [entry.offset for entry in entries],
        )


class ChatStyle:
    """/v1/chat/completions"""

    def __init__(self, id: str, model: str, tokenizer: Tokenizer, logprobs: bool, usage: StreamOptions) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._head = (id, "chat.completion.chunk", int(time.time()), model)
        self._usage = usage
        self._begun: set[int] = set()  # choices whose role was sent

    def chunks(self, choice: Choice, piece: Piece) -> list[Reply]:
        result, usage = [], _so_far(self._usage, choice)
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            role = ChunkChoice(choice.index, Delta("assistant", ""), None, None)
            result.append(Reply(*self._head, [role], usage))
        if piece.text or piece.entries or piece.finish_reason is not None:
            delta = Delta(content=piece.text) if piece.text or piece.entries else Delta()
            stop = UNSET if piece.finish_reason is None else choice.stop_reason
            part = ChunkChoice(choice.index, delta, self._log(piece.entries), piece.finish_reason, stop)
            result.append(Reply(*self._head, [part], usage))
        return result

    def last_chunk(self, usage: Usage) -> Reply:
        return Reply(*self._head, [], usage)

    def answer(self, choices: list[tuple[Choice, Piece]], usage: Usage) -> Reply:
        id, _, created, model = self._head
        parts = [
            ChatChoice(
                c.index, Message("assistant", piece.text), self._log(piece.entries), piece.finish_reason, c.stop_reason
            )
            for c, piece in choices
        ]
        return Reply(id, "chat.completion", created, model, parts, usage)

    def _log(self, entries: list[Entry]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs([self._token(entry.logprobs) for entry in entries if entry.logprobs is not None])

    def _token(self, logprobs: TokenLogprobs) -> ChatLogprob:
        pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        top = [TopLogprob(*self._named(token, logprob)) for token, logprob in pairs]
        return ChatLogprob(*self._named(logprobs.token, logprobs.logprob), top)

    def _named(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        tokenizer = self._tokenizer
        return tokenizer.token_text(token), finite(logprob), list(tokenizer.token_bytes(token))
