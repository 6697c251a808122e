"""A fleet without an engine: deterministic tokens from a keyed hash, given out by the event loop's clock."""

import asyncio
import hashlib
import math
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core.events import Emitted, Event
from paceline.core.request import NO_SLO, SLO, SamplingParams
from paceline.core.work import EngineInfo, SliceOutput, TokenLogprobs
from paceline.runtime.api import (
    GoalUnreachable,
    GroupLoad,
    ModelStatus,
    Observer,
    Overloaded,
    Sink,
    StepRecord,
    TooLong,
    Unavailable,
)


@dataclass(slots=True)
class Running:
    id: str
    model: str
    tokens: list[int]
    params: SamplingParams
    sink: Sink
    namespace: str
    slo: SLO
    arrival: float | None
    generated: int = 0
    prompt_sent: bool = False


def embedding(tokens: list[int]) -> bytes:
    """Four numbers that tell texts apart."""
    return struct.pack("<4f", len(tokens), tokens[0], tokens[-1], sum(tokens) / 7)


class FakeFleet:
    """Steps every `step_s` seconds; `paused` holds everything in the queue; at most `capacity` sequences."""

    def __init__(
        self,
        models: dict[str, int],
        vocab: int,
        eos: Seq[int] = (),
        step_s: float = 0.0,
        capacity: int = 10_000,
        encoders: Seq[str] = (),
    ) -> None:
        """models: the context of each, in tokens; encoders: those of them that embed. vocab: token ids from 0 to
        vocab - 1 are drawn, but no eos."""
        self.models = models
        self.encoders = encoders
        self.vocab = vocab
        self.eos = frozenset(eos)
        self.step_s = step_s
        self.capacity, self.refused = capacity, 0
        self.observers: list[Observer] = []
        self.running: dict[str, Running] = {}
        self.submitted: list[Running] = []
        self.cancelled: list[str] = []
        self.paused = False
        self.draining = False
        self.healthy = True
        self.fail_after: int | None = None  # tokens after which every sequence fails
        self.tokens_per_step = 1
        self.expected = 0.0  # seconds to a first token
        self.expected_tbt = 0.0
        self.script: list[int] | None = None  # the tokens to give, instead of random ones
        self._count = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.healthy and not self.draining

    def status(self) -> list[ModelStatus]:
        info = {name: EngineInfo(100, 16, 0, 0, 0, context, self.vocab) for name, context in self.models.items()}
        return [ModelStatus(name, "ready", "", info[name]) for name in self.models]

    def load(self) -> list[GroupLoad]:
        return [GroupLoad(0, len(self.running), len(self.running), 100)]

    def full(self, model: str) -> bool:
        return len(self.running) >= self.capacity

    def submit(
        self,
        model: str,
        tokens: Seq[int],
        params: SamplingParams,
        sink: Sink,
        *,
        namespace: str = "",
        slo: SLO = NO_SLO,
        admitted: bool = False,
        arrival: float | None = None,
    ) -> str:
        context = self.models[model]
        if self.draining and not admitted:
            raise Unavailable("the server is shutting down", 2.5)
        if self.full(model) and not admitted:
            self.refused += 1
            raise Overloaded(6.2)
        if slo.tbt is not None and self.expected_tbt > slo.tbt and not admitted:
            raise GoalUnreachable("tbt", self.expected_tbt, slo.tbt)
        if slo.ttft is not None and self.expected > slo.ttft and not admitted:
            raise GoalUnreachable("ttft", self.expected, slo.ttft)
        if len(tokens) + params.max_tokens * (model not in self.encoders) > context:
            raise TooLong("too long for the cache")
        self._count += 1
        seq = Running(f"{self._count}", model, list(tokens), params, sink, namespace, slo, arrival)
        self.running[seq.id] = seq
        self.submitted.append(seq)
        self._tell("accepted", seq)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return seq.id

    def cancel(self, id: str) -> None:
        seq = self.running.pop(id, None)
        if seq is not None:
            self.cancelled.append(id)
            self._tell("cancelled", seq)

    async def drain(self) -> None:
        self.draining = True
        while self.running:
            await asyncio.sleep(0.005)

    async def _run(self) -> None:
        while self.running:
            await asyncio.sleep(self.step_s)
            if not self.paused:
                for seq in list(self.running.values()):
                    if seq.id in self.running:
                        self._advance(seq)
                self._record()

    def _advance(self, seq: Running) -> None:
        if self.fail_after is not None and seq.generated >= self.fail_after:
            del self.running[seq.id]
            seq.sink.fail("the worker is gone")
            return
        if seq.model in self.encoders:
            del self.running[seq.id]
            self._tell("tokens", seq, 1, Emitted([seq.id], b"\x01"))
            self._tell("finished", seq, 1, "length")
            seq.sink.push(SliceOutput([0], embedding=embedding(seq.tokens)), "length")
            return
        prompt = self._prompt_logprobs(seq)
        tokens: list[int] = []
        finish = None
        while finish is None and len(tokens) < self.tokens_per_step:
            token = self.token(seq.params, seq.generated)
            tokens.append(token)
            seq.generated += 1
            if token in seq.params.stop_token_ids or (token in self.eos and not seq.params.ignore_eos):
                finish = "stop"
            elif seq.generated >= seq.params.max_tokens:
                finish = "length"
        top = seq.params.logprobs
        logprobs = [] if top is None else [self.logprob(token, top) for token in tokens]
        self._tell("tokens", seq, len(tokens), Emitted([seq.id], bytes([len(tokens)])))
        if finish:
            del self.running[seq.id]
            self._tell("finished", seq, seq.generated, finish)
        if seq.sink.push(SliceOutput(tokens, logprobs, prompt), finish) and not finish:
            del self.running[seq.id]
            self._tell("finished", seq, seq.generated, "stop")

    def _prompt_logprobs(self, seq: Running) -> list[TokenLogprobs]:
        top = seq.params.prompt_logprobs
        if top is None or seq.prompt_sent:
            return []
        seq.prompt_sent = True
        half = len(seq.tokens) // 2 + 1  # in two slices, as a chunked prefill gives them
        seq.sink.push(SliceOutput([], [], [self.logprob(token, top) for token in seq.tokens[1:half]]), None)
        return [self.logprob(token, top) for token in seq.tokens[half:]]

    def token(self, params: SamplingParams, position: int) -> int:
        if self.script is not None:
            return self.script[position % len(self.script)]
        key = f"{params.seed}/{params.choice}/{position}".encode()
        token = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") % self.vocab
        return token if token not in self.eos else (token + 1) % self.vocab

    def logprob(self, token: int, top: int) -> TokenLogprobs:
        """Log-probabilities as if token i had the weight 1 / (2 + i); the first ids are the likeliest."""
        likeliest = [(i, -math.log(2 + i)) for i in range(top)]
        chosen = -math.log(2 + token)
        return TokenLogprobs(token, chosen, token + 1, [i for i, _ in likeliest], [p for _, p in likeliest])

    def _tell(self, kind: str, seq: Running, tokens: int = 0, detail: Emitted | str = "") -> None:
        event = Event(kind, asyncio.get_running_loop().time(), 0, seq.id, tokens, detail)
        for observer in self.observers:
            observer.on_events([event])

    def _record(self) -> None:
        now, width = asyncio.get_running_loop().time(), len(self.running)
        record = StepRecord(0, now, width, width, 3, 0.01, 0.001, 0.0002, 0.0003, 0.0004)
        for observer in self.observers:
            observer.on_step(record)
