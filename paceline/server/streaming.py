"""Writing answers: server-sent events straight into ASGI messages, or one JSON body. Watches for clients that leave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
from fastapi import Response
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from paceline.server.beside import beside
from paceline.server.errors import ApiError
from paceline.server.generation import Choice, Entry, Generation, Piece
from paceline.server.replies import CompletionDetails, Reply, Style, Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Cancellable(Protocol):
    """What a client asked for and may leave."""

    def disconnect(self) -> None: ...

    def cancel(self) -> None: ...


def usage_of(generation: Generation) -> Usage:
    """Prompts count once, whatever their number of choices."""
    prompt = sum(len(prompt.tokens) for prompt in generation.job.prompts)
    completion = sum(choice.completion_tokens for choice in generation.choices)
    drafted = sum(choice.drafted for choice in generation.choices)
    accepted = sum(choice.accepted for choice in generation.choices)
    details = CompletionDetails(accepted, drafted - accepted) if drafted else UNSET
    return Usage(prompt, completion, prompt + completion, details)


@contextlib.asynccontextmanager
async def watched(generation: Cancellable, receive: Receive) -> AsyncIterator[None]:
    """While inside, a client that leaves ends the generation; on leaving, nothing of it still runs."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.disconnect()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.cancel()


async def collect(generation: Generation, style: Style, receive: Receive) -> Response:
    """The whole answer. Raises `ApiError` when the engine failed. A client that has left gets an empty one."""
    texts: list[list[str]] = [[] for _ in generation.choices]
    entries: list[list[Entry]] = [[] for _ in generation.choices]
    async with watched(generation, receive):
        while generation.unfinished and not generation.disconnected:
            for choice in await generation.ready():
                piece = generation.take(choice)
                texts[choice.index].append(piece.text)
                entries[choice.index] += piece.entries
    if generation.disconnected:
        return Response(status_code=499)
    pieces = [
        (choice, Piece("".join(texts[i]), entries[i], choice.finish_reason))
        for i, choice in enumerate(generation.choices)
    ]
    usage = usage_of(generation)
    body = await beside(logprobs_in(generation, pieces), lambda: _encode(style.answer(pieces, usage)))
    return Response(body, media_type="application/json")


def logprobs_in(generation: Generation, pieces: list[tuple[Choice, Piece]]) -> int:
    each = generation.job.params.logprobs
    return 0 if each is None else (1 + each) * sum(len(piece.entries) for _, piece in pieces)


def _frames(chunks: Callable[[Choice, Piece], list[Reply]], pieces: list[tuple[Choice, Piece]]) -> bytes:
    return b"".join([b"data: " + _encode(chunk) + b"\n\n" for part in pieces for chunk in chunks(*part)])


class StreamReply(Response):
    """An answer as server-sent events: whatever is ready goes out in one message."""

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, style: Style, include_usage: bool, on_end: Callable[[Generation], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._generation = generation
        self._style = style
        self._include_usage = include_usage
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(receive, send)
        finally:
            self._on_end(self._generation)

    async def _send(self, receive: Receive, send: Send) -> None:
        async with watched(self._generation, receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._write(send)
                end = self._ending()
            except ApiError as error:
                end = b"data: " + error.encode() + b"\n\n"
            if not self._generation.disconnected:
                await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _write(self, send: Send) -> None:
        generation, chunks = self._generation, self._style.chunks
        while generation.unfinished and not generation.disconnected:
            pieces = [(choice, generation.take(choice)) for choice in await generation.ready()]
            body = await beside(logprobs_in(generation, pieces), lambda some=pieces: _frames(chunks, some))
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})

    def _ending(self) -> bytes:
        if not self._include_usage:
            return DONE
        return b"data: " + _encode(self._style.last_chunk(usage_of(self._generation))) + b"\n\n" + DONE
