"""One request for embeddings as the fleet's sequences, one for each input, and its answer."""

import asyncio
import base64
import struct

import msgspec
from fastapi import Response
from starlette.types import Receive

from paceline.core.request import SamplingParams
from paceline.core.work import SliceOutput
from paceline.runtime.api import Fleet, Rejected
from paceline.server.beside import beside
from paceline.server.errors import ApiError, engine_error, from_rejection, model_not_found
from paceline.server.metrics import Metrics
from paceline.server.prepare import Caller
from paceline.server.streaming import watched

ONE_STEP = SamplingParams(max_tokens=1)
TURN = 64  # inputs submitted before others have their turn: about 10 ms


class Embedding(msgspec.Struct):
    object: str
    index: int
    embedding: list[float] | str  # numbers, or float32 little endian in base64


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Reply(msgspec.Struct):
    object: str
    data: list[Embedding]
    model: str
    usage: Usage


class Input:
    """The sink of one sequence."""

    checks_stop = False

    def __init__(self, tokens: list[int], owner: "Embeddings") -> None:
        self.tokens = tokens
        self.id: str | None = None  # the fleet's name for it, while it has it
        self.embedding = b""
        self._owner = owner

    def push(self, output: SliceOutput, finish: str | None) -> bool:
        self.embedding = output.embedding
        self._owner.ended(self, "stop")
        return False

    def fail(self, reason: str) -> None:
        """The engine lost this sequence: the whole request is over."""
        self._owner.ended(self, "error")
        self._owner.fail(engine_error(reason))


class Embeddings:
    """All sequences of one request, from submission to the last embedding."""

    def __init__(self, fleet: Fleet, model: str, inputs: list[list[int]], caller: Caller, metrics: Metrics) -> None:
        self.model = model
        self.inputs = [Input(tokens, self) for tokens in inputs]
        self.disconnected = False
        self._unfinished = len(inputs)
        self._caller, self._fleet, self._metrics = caller, fleet, metrics
        self._event = asyncio.Event()  # nothing is left to wait for
        self._error: ApiError | None = None

    async def start(self) -> None:
        """Submits all inputs: with the first the request is accepted, and a full queue refuses none of the others.

        Raises `ApiError`.
        """
        caller = self._caller
        options = {"namespace": caller.namespace, "slo": caller.slo, "arrival": caller.arrival}
        try:
            for n, one in enumerate(self.inputs):
                if n % TURN == TURN - 1:
                    await asyncio.sleep(0)
                if self._event.is_set():  # one has failed, or the client has left
                    return
                one.id = self._fleet.submit(self.model, one.tokens, ONE_STEP, one, admitted=n > 0, **options)
                self._metrics.admitted(one.id, self.model, len(one.tokens), caller.arrival, generates=False)
        except Rejected as error:
            raise from_rejection(error) from None
        except KeyError:
            raise model_not_found(self.model, [status.name for status in self._fleet.status()]) from None

    async def done(self) -> None:
        """Returns when every embedding is there, or the client has left. Raises `ApiError` if one has failed."""
        await self._event.wait()
        if self._error is not None and not self.disconnected:
            raise self._error

    def disconnect(self) -> None:
        """The client has left: nothing is waited for any more, so what still runs is cancelled."""
        self.disconnected = True
        self._event.set()

    def cancel(self) -> None:
        """Frees whatever still runs; does nothing after the end."""
        for one in self.inputs:
            if one.id is not None:
                self._fleet.cancel(one.id)
                one.id = None
                self._metrics.ended(self.model, "abort")

    def hurry(self) -> None:
        """Before a drain: all is submitted from the start."""

    # For the inputs. Called inside the fleet's step, so the fleet is not called back from here.

    def ended(self, one: Input, reason: str) -> None:
        one.id = None
        self._metrics.ended(self.model, reason)
        self._unfinished -= 1
        if not self._unfinished:
            self._event.set()

    def fail(self, error: ApiError) -> None:
        self._error = self._error or error
        self._event.set()


async def collect_embeddings(embeddings: Embeddings, encoding: str, receive: Receive) -> Response:
    """Submits, and gives the whole answer, numbers in `encoding`: "float" or "base64". Raises `ApiError`."""
    async with watched(embeddings, receive):
        await embeddings.start()
        await embeddings.done()
    if embeddings.disconnected:
        return Response(status_code=499)
    write = _base64 if encoding == "base64" else _floats
    tokens = sum(len(one.tokens) for one in embeddings.inputs)

    def body() -> bytes:
        data = [Embedding("embedding", n, write(one.embedding)) for n, one in enumerate(embeddings.inputs)]
        return msgspec.json.encode(Reply("list", data, embeddings.model, Usage(tokens, tokens)))

    size = sum(len(one.embedding) for one in embeddings.inputs) // 4
    return Response(await beside(size, body), media_type="application/json")


def _base64(embedding: bytes) -> str:
    return base64.b64encode(embedding).decode()


def _floats(embedding: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))
