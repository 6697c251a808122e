"""Batch jobs without a server: the same controller over an engine in this process, step after step."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, cast

from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch, StepResult
from paceline.core.events import Complete, Input, Submit
from paceline.core.request import Request, SamplingParams
from paceline.core.work import Engine, Outcome, Overlapping, SliceOutput, TokenLogprobs
from paceline.runtime.sequence import BlockHasher, RunningSequence


@dataclass(slots=True)
class Output:
    """What one prompt yielded (`runtime.api.Sink`). `times`: when each token came, in seconds since the beginning."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    arrival: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    finish: str | None = None
    error: str = ""
    checks_stop: bool = False

    def push(self, output: SliceOutput, finish: str | None) -> bool:
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.times += [self.clock()] * len(output.tokens)
        self.finish = finish
        return False

    def fail(self, reason: str) -> None:
        self.error = reason


OnStep = Callable[[Batch, list[SliceOutput], float, float], None]


class Flight(NamedTuple):
    """A step that is not finished."""

    batch: Batch
    sequences: list[RunningSequence]
    finish: Callable[[], Outcome]


class Offline:
    """An engine and its running sequences. Nothing that fits is refused, whatever the group's limits on what waits."""

    def __init__(self, engine: Engine, config: GroupConfig, eos_ids: Sequence[int] = ()) -> None:
        self.engine, self.eos_ids = engine, eos_ids
        self.controller = Controller([replace(config, models=("",), max_waiting=None, admission=False)])
        # a batch, what its slices yielded, and seconds of forward pass and of sampling
        self.on_step: OnStep = lambda batch, outputs, forward_s, sample_s: None
        self._block_size = config.scheduler.block_size
        self._running: dict[str, RunningSequence] = {}
        self._dropped: list[int] = []
        self._begin = 0.0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        arrivals: Sequence[float] | None = None,
    ) -> list[Output]:
        """Runs all prompts to their ends. A sequence's error ends up in its output.

        `arrivals`: seconds from now, not falling; None: all at once. Time in which there is nothing to do is skipped,
        not waited for. Raises ValueError for a prompt that the cache can never hold.
        """
        outputs = [Output() for _ in prompts]
        for _ in self.steps(prompts, params, outputs, [0.0] * len(prompts) if arrivals is None else arrivals):
            pass
        return outputs

    def steps(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        outputs: Sequence[Output],
        arrivals: Sequence[float],
    ) -> Iterator[None]:
        """The same step by step; the clock stands while the caller does something else. Who stops leaves nothing in the
        engine, but a controller that is good for nothing."""
        scheduler = self.controller.groups[0].scheduler
        for index, (tokens, limit) in enumerate(zip(prompts, params, strict=True)):
            if not scheduler.fits(len(tokens), limit.max_tokens):
                raise ValueError(f"prompt {index}: the KV cache cannot hold it and its output even alone")
        future: deque[Submit] = deque()
        for index, (tokens, sink, arrival) in enumerate(zip(prompts, outputs, arrivals, strict=True)):
            sink.arrival, sink.clock = arrival, self._now
            hasher = BlockHasher("", self._block_size)
            seq = RunningSequence(str(index), index, tokens, params[index], sink, self.eos_ids, hasher)
            self._running[seq.id] = seq
            own = params[index]
            request = Request(
                seq.id, len(tokens), own.max_tokens, arrival, prefix=seq.prefix,
                max_draft_tokens=own.max_draft_tokens or 0, kind=own.kind,
            )  # fmt: skip
            future.append(Submit(request))
        self._begin = time.perf_counter()
        inputs: list[Input] = []
        flying: deque[Flight] = deque()
        try:
            while True:
                while future and future[0].request.arrival <= self._now():
                    inputs.append(future.popleft())
                _, batches = self.controller.turn(inputs, self._now())
                inputs = []
                flying += map(self._asked, batches)
                if flying:
                    inputs = self._finished(flying.popleft())
                    now = self._now()
                    yield
                    self._begin = time.perf_counter() - now
                elif future:
                    self._begin -= future[0].request.arrival - self._now()
                else:
                    return
        finally:
            for flight in flying:
                flight.finish()
            for seq in self._running.values():
                seq.leave_worker()
            self._running.clear()
            self.engine.step([], [], self._dropped)
            self._dropped = []

    def drop(self, handle: int) -> None:
        self._dropped.append(handle)

    def _now(self) -> float:
        """Seconds since the beginning, what was skipped included."""
        return time.perf_counter() - self._begin

    def _asked(self, batch: Batch) -> Flight:
        """The batch, which an engine that overlaps has begun with."""
        sequences = [self._running[request] for request in batch.requests]
        new = [seq.introduce(self) for seq in sequences if not seq.worker]
        work = [seq.work(batch, index) for index, seq in enumerate(sequences)]
        dropped, self._dropped = self._dropped, []
        if not self.engine.overlaps:
            return Flight(batch, sequences, partial(self.engine.step, new, work, dropped))
        engine = cast(Overlapping, self.engine)
        engine.learn(new, dropped)
        return Flight(batch, sequences, engine.begin(work).finish)

    def _finished(self, flight: Flight) -> list[Input]:
        batch, sequences = flight.batch, flight.sequences
        got, forward_s, sample_s = flight.finish()
        result = StepResult(bytearray(len(got)), seconds=forward_s + sample_s, draft_seconds=self.engine.draft_s)
        for index, (seq, output) in enumerate(zip(sequences, got, strict=True)):
            if seq.id not in self._running:  # it ended in the step before
                result.failed.append(index)
                continue
            finish = None
            if output.error:
                seq.sink.fail(output.error)
            else:
                output = seq.fresh_prompt_logprobs(output, batch.starts[index])
                finish = seq.take(output)
                seq.sink.push(output, finish)
            if finish or output.error:
                self._running.pop(seq.id).leave_worker()
            seq.report(result, index, output, finish)
        self.on_step(batch, got, forward_s, sample_s)
        return [Complete(0, batch.id, result)]
