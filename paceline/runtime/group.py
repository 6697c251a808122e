"""A group's worker and the sequences that run there: batches become messages, outputs become results."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.batching.budget import GoalBudget
from paceline.core.batch import Batch, StepResult, StepShape
from paceline.core.events import Cancel, Complete, Reset
from paceline.core.protocols import Lookahead
from paceline.core.request import NO_SLO, SLO
from paceline.core.work import EngineInfo, SliceOutput
from paceline.runtime.api import Drafted, StepRecord
from paceline.runtime.driver import Driver
from paceline.runtime.messages import Failed, FromWorker, Loading, Ready, Step, StepDone
from paceline.runtime.process import WorkerProcess
from paceline.runtime.sequence import RunningSequence

HANG_S = 10.0  # a worker that has not moved for so long is killed and started again
LOAD_HANG_S = 60.0  # one that loads has given no sign of life for so long
MAX_RESTARTS = 5  # in a row, without a step in between
MAX_CRASHES = 3  # workers that die while they run a sequence, which gets nowhere: two may be somebody else's kills

Part = list[tuple[int, RunningSequence]]  # index in the batch
Pushes = list[tuple[RunningSequence, SliceOutput, str | None]]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How to start a model's worker: arguments to the Python interpreter, and once known, the KV blocks to allocate."""

    name: str
    command: Callable[[int | None], list[str]]
    eos_ids: tuple[int, ...] = ()
    slo: SLO = NO_SLO  # `ttft` of requests that bring none of their own
    budget: GoalBudget | None = None
    predict: Callable[[StepShape], float] | None = None  # seconds of a step
    max_draft_tokens: int = 0  # of a sequence in a step; 0: nobody drafts
    lookahead: Callable[[], Lookahead] | None = None  # chooses how many
    one_shot: bool = False  # an encoder: whole prompts only, no prefix of them is kept, and no place for an answer


@dataclass(slots=True)
class Flight:
    """A batch at the worker, as one step; after a crash its suspects go one by one, so that the culprit shows."""

    batch: Batch
    parts: deque[Part]
    result: StepResult
    sent: float
    later: Pushes = field(default_factory=list)
    drafts: list[Drafted] = field(default_factory=list)
    forward_s: float = 0.0
    draft_s: float = 0.0
    sample_s: float = 0.0
    output_s: float = 0.0


class WorkerGroup:
    """One worker process, restarted when it dies; `sequences` outlive it."""

    def __init__(
        self,
        index: int,
        config: WorkerConfig,
        on_step: Callable[[StepRecord], None],
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self.index, self.config = index, config
        self.state, self.reason = "loading", ""
        self.bad_input = False  # failed because of what the user gave
        self.info: EngineInfo | None = None
        self.sequences: dict[str, RunningSequence] = {}
        self.driver: Driver | None = None  # set by the fleet when every group is loaded
        self.settled = asyncio.Event()  # loaded, or failed for good
        self._on_step, self._on_progress = on_step, on_progress
        self._process: WorkerProcess | None = None
        self._flying: dict[int, Flight] = {}
        self._held: list[Batch] = []  # composed while there was no worker
        self._dropped: list[int] = []
        self._restarts = 0
        self._cached_tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # The process

    async def start(self) -> None:
        command = self.config.command(self.info.num_blocks if self.info else None)
        self._process = WorkerProcess(command, self._on_message, self._on_exit)
        try:
            await self._process.start()
        except OSError as error:
            self._fail(f"the worker cannot be started: {error}")

    async def stop(self) -> None:
        self.state = "stopped"
        await asyncio.gather(*self._tasks)
        if self._process:
            await self._process.stop()

    @property
    def responsive(self) -> bool:
        return self.state == "ready" and self._process is not None and self._process.responsive

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else -1

    def watch(self) -> None:
        """Called several times a second: a worker that hangs is killed, which starts it again."""
        limit = HANG_S if self.state == "ready" else LOAD_HANG_S
        if self._process and self._process.silent_s > limit:
            self._process.kill()

    def _on_exit(self, code: int) -> None:
        if self.state in ("failed", "stopped"):
            return
        self._restarts += 1
        if self.info is None or self._restarts > MAX_RESTARTS:
            self._fail(f"the worker ended with code {code} {self._restarts} times in a row")
            return
        self.state = "restarting"
        self._lose_sequences()
        task = asyncio.create_task(self.start())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lose_sequences(self) -> None:
        """Nothing is at the worker any more. A sequence that ran in three that died, and got nowhere, fails."""
        if self.driver is None:  # other groups are still loading: nothing runs yet
            return
        self.driver.post(Reset(self.index))
        flights = list(self._flying.values())
        running = {seq for flight in flights for _, seq in flight.parts[0]}
        self._held.clear()
        self._dropped.clear()
        for seq in self.sequences.values():
            seq.at_worker = False
            seq.blocks_sent = 0
        self._land(flights)
        for seq in sorted(running, key=lambda seq: seq.handle):
            seq.crashes += 1
            if seq.crashes >= MAX_CRASHES and self.sequences.get(seq.id) is seq:
                self.fail(seq, "the engine failed on this request more than once")

    def _fail(self, reason: str) -> None:
        self.state, self.reason = "failed", reason
        self._flying.clear()
        self._held.clear()
        if self.driver:
            self.driver.post(Reset(self.index))
        for seq in list(self.sequences.values()):
            self.fail(seq, reason)
        self.settled.set()

    # Steps

    def execute(self, batch: Batch) -> None:
        """Sends a batch to the worker, or holds it until there is one."""
        if self.state != "ready":
            self._held.append(batch)
            return
        innocent: Part = []
        suspects: list[Part] = []
        for index, request in enumerate(batch.requests):
            seq = self.sequences.get(request)
            if seq is None:  # cancelled while the batch was held
                continue
            if seq.crashes:
                suspects.append([(index, seq)])
            else:
                innocent.append((index, seq))
        parts = deque([innocent, *suspects] if innocent or not suspects else suspects)
        result = StepResult(bytearray(len(batch.requests)))
        self._flying[batch.id] = Flight(batch, parts, result, time.perf_counter())
        self._send(batch, parts[0])

    def _send(self, batch: Batch, part: Part) -> None:
        new = [seq.introduce() for _, seq in part if not seq.at_worker]
        work = [seq.work(batch, index) for index, seq in part]
        assert self._process is not None
        self._process.send(Step(batch.id, new, work, self._dropped))
        self._dropped = []

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case StepDone():
                self._done(message)
            case Loading(done, total):
                self._on_progress(self.config.name, done, total)
            case Ready(info):
                self.info, self.state = self.info or info, "ready"
                self.settled.set()
                held, self._held = self._held, []
                for batch in held:
                    self.execute(batch)
            case Failed(reason, bad_input):
                self.bad_input = bad_input
                self._fail(reason)

    def _done(self, message: StepDone) -> None:
        """Takes a step's outputs, lets the controller decide on the next one, then tells the sinks."""
        assert self.driver is not None
        flight = self._flying[message.batch]
        received = time.perf_counter()
        self._restarts = 0
        for (index, seq), output in zip(flight.parts.popleft(), message.outputs, strict=True):
            if self.sequences.get(seq.id) is seq:
                self._take(flight, index, seq, output)
            else:  # cancelled meanwhile: it ends here, whatever the output says
                flight.result.failed.append(index)
        flight.forward_s += message.forward_s
        flight.sample_s += message.sample_s
        flight.draft_s += message.draft_s
        flight.result.draft_seconds += message.draft_s
        flight.result.seconds += message.forward_s + message.sample_s
        flight.output_s += time.perf_counter() - received
        if flight.parts:
            self._send(flight.batch, flight.parts[0])
            return
        self._land([flight])
        self._report(flight, received)

    def _land(self, flights: list[Flight]) -> None:
        """Completes batches, all in one turn; after a crash only the parts that were done have results."""
        assert self.driver is not None
        for flight in flights:
            del self._flying[flight.batch.id]
            self.driver.post(Complete(self.index, flight.batch.id, flight.result))
        self.driver.flush()
        for flight in flights:
            scheduled = time.perf_counter()
            for seq, output, finish in flight.later:
                if seq.sink.push(output, finish) and self.sequences.get(seq.id) is seq:
                    self.forget(seq)
                    self.driver.post(Cancel(seq.id))
            flight.output_s += time.perf_counter() - scheduled

    def _take(self, flight: Flight, index: int, seq: RunningSequence, output: SliceOutput) -> None:
        if output.error:
            self.fail(seq, output.error)
            seq.report(flight.result, index, output, None)
            return
        seq.crashes = 0
        batch = flight.batch
        if index < batch.num_decodes and self.config.max_draft_tokens and seq.params.max_draft_tokens != 0:
            asked = batch.drafts[index] if batch.drafts else 0
            flight.drafts.append(Drafted(asked, output.num_draft, output.num_accepted))
        if output.prompt_logprobs:
            output = seq.fresh_prompt_logprobs(output, flight.batch.starts[index])
        finish = seq.take(output)
        if seq.sink.checks_stop:
            if seq.sink.push(output, finish):
                finish = "stop"
        elif output.tokens or output.prompt_logprobs:
            flight.later.append((seq, output, finish))
        seq.report(flight.result, index, output, finish)
        if finish:
            self.forget(seq)

    def _report(self, flight: Flight, received: float) -> None:
        assert self.driver is not None
        scheduler = self.driver.controller.groups[self.index].scheduler
        batch, result = flight.batch, flight.result
        as_asked = bytes(batch.drafts or ()) == result.drafted  # a drafter may propose less, which takes less
        self._on_step(
            StepRecord(
                group=self.index,
                time=time.monotonic(),
                tokens=batch.num_tokens,
                sequences=len(batch.requests),
                cached_tokens=scheduler.cached_tokens - self._cached_tokens,
                forward_s=flight.forward_s,
                sample_s=flight.sample_s,
                schedule_s=self.driver.turn_s,
                messages_s=received - flight.sent - flight.forward_s - flight.sample_s,
                output_s=flight.output_s,
                predicted_s=batch.predicted if as_asked else None,
                draft_s=flight.draft_s,
                drafts=flight.drafts,
            )
        )
        self._cached_tokens = scheduler.cached_tokens

    # Sequences

    def forget(self, seq: RunningSequence) -> None:
        """The sequence is done or cancelled; the worker hears of it with the next step."""
        del self.sequences[seq.id]
        if seq.at_worker:
            self._dropped.append(seq.handle)

    def fail(self, seq: RunningSequence, reason: str) -> None:
        """Ends a sequence with an error, and it alone."""
        self.forget(seq)
        if self.driver:
            self.driver.post(Cancel(seq.id))
        seq.sink.fail(reason)
