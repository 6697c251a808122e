"""A model on a group's workers, and its sequences that run there: batches become messages, outputs become results."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from paceline.batching.budget import GoalBudget
from paceline.core.batch import Batch, StepResult, StepShape
from paceline.core.drafter_name import ERROR
from paceline.core.events import Advance, Back, Cancel, Complete, Lost
from paceline.core.protocols import Lookahead
from paceline.core.request import HELD_BACK, NO_SLO, SLO
from paceline.core.work import EngineInfo, SliceOutput
from paceline.runtime.api import IDLE, Drafted, StepRecord
from paceline.runtime.driver import Driver
from paceline.runtime.messages import GiveBack, Load, Step, StepDone, Unload
from paceline.runtime.sequence import RunningSequence
from paceline.runtime.workers import Workers

MAX_CRASHES = 3  # workers that die while they run a sequence, which gets nowhere: two may be somebody else's kills

Part = list[tuple[int, RunningSequence]]  # index in the batch
Pushes = list[tuple[RunningSequence, SliceOutput, str | None]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as it is served by a group."""

    name: str
    eos_ids: tuple[int, ...] = ()
    slo: SLO = NO_SLO  # `ttft` of requests that bring none of their own
    budget: GoalBudget | None = None
    predict: Callable[[StepShape], float] | None = None  # seconds of a step
    max_draft_tokens: int = 0  # of a sequence in a step; 0: nobody drafts
    lookahead: Callable[[], Lookahead] | None = None  # chooses how many
    resident: bool = True  # it is loaded at the start
    slots: int | None = None  # models that the workers hold at a time; None: all
    one_shot: bool = False  # an encoder: whole prompts only, no prefix of them is kept, and no place for an answer


@dataclass(slots=True)
class Flight:
    """A batch at the workers, as one step; after a crash its suspects go one by one, so that the culprit shows."""

    group: "ModelGroup"
    batch: Batch
    parts: deque[Part]
    result: StepResult
    suspected: bool  # somebody in it was computed when a worker died
    others: bool  # `StepRecord.others`, and `before`
    before: bool
    sent: float = 0.0  # when; 0: not yet
    outputs: list[tuple[int, RunningSequence, SliceOutput]] = field(default_factory=list)  # of parts that are done
    later: Pushes = field(default_factory=list)
    drafts: list[Drafted] = field(default_factory=list)
    forward_s: float = 0.0
    draft_s: float = 0.0
    sample_s: float = 0.0
    output_s: float = 0.0


class ModelGroup:
    """One model on the workers of one group: a group of the controller's. Its sequences outlive its workers."""

    def __init__(
        self,
        index: int,
        number: int,
        config: ServedModel,
        workers: Workers,
        sequences: dict[str, RunningSequence],
        on_step: Callable[[StepRecord], None],
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        """`index`: the controller's; `number`: the workers'; `sequences`: of the whole fleet."""
        self.index, self.number, self.config, self.workers = index, number, config, workers
        self.sequences = sequences
        self.reason = ""  # why it failed
        self.bad_input = False  # failed because of what the user gave
        self.info: EngineInfo | None = None
        self.resident, self.load_s = config.resident, 0.0
        self.loads, self.loads_s = 0, 0.0  # since it serves, and seconds of all of them
        self.driver: Driver | None = None  # set by the fleet when every group is loaded
        self.settled = asyncio.Event()  # loaded, or failed for good
        self.retired = asyncio.Event()  # it has nothing to do and gets nothing more
        self._shares = workers.parallel.devices > 1  # there are workers that do not sample
        self._on_step, self._on_progress = on_step, on_progress
        self._left: list[Flight] = []  # when the workers went
        self._ran: dict[RunningSequence, int] = {}  # that they computed then, and up to which token
        self._dropped: list[int] = []
        self._cached_tokens = 0
        self._stepped = 0.0  # when outputs last came

    @property
    def state(self) -> str:
        """loading, ready, cold (to be loaded by need), restarting, failed or stopped."""
        if self.reason:
            return "failed"
        return "cold" if self.workers.state == "ready" and not self.resident else self.workers.state

    @property
    def undrafted(self) -> bool:
        """Its draft model cannot be had."""
        return self.info is not None and bool(self.info.undrafted)

    @property
    def under_way(self) -> int:
        """Steps that are not done."""
        return len(self._flying())

    def _flying(self) -> list[Flight]:
        """They, as composed."""
        return [flight for flight in self.workers.flying.values() if flight.group is self]

    def own(self) -> list[RunningSequence]:
        """The sequences that the controller has here, in the order in which they came."""
        if self.driver is None:
            return []
        here = (id for id, (group, _) in self.driver.controller.sequences.items() if group == self.index)
        return [self.sequences[id] for id in here if id in self.sequences]

    # What the workers tell (`workers.Guest`)

    def loading(self, done: int, total: int) -> None:
        self._on_progress(self.config.name, done, total)

    def ready(self) -> None:
        self.settled.set()
        if self.driver and self.resident:
            self.loads, self.loads_s = self.loads + 1, self.loads_s + self.load_s
            self.driver.post(Back(self.index, self.load_s))

    def leave(self, for_good: bool = False) -> None:
        """Nothing is at the workers any more. The controller's next turn, which `lost` or `failed` takes, is not to
        count on any of their models, so all leave before one of these is called."""
        self._left = self._flying()
        parts = ((one.batch, part) for one in self._left if one.sent and one.parts for part in one.parts[0])
        self._ran = {seq: batch.starts[index] + batch.lengths[index] for batch, (index, seq) in parts}
        self._dropped.clear()
        for seq in self.own():
            seq.lose_worker()
        if self.driver:
            self.driver.post(Lost(self.index, for_good))
            self._complete(self._left)

    def lost(self, killed: bool) -> bool:
        """They have left. A sequence that ran in three workers that were killed, and got nowhere, is to blame and
        fails; returns whether there is one."""
        if self.driver is None:  # other groups are still loading: nothing runs yet
            return False
        self._go_on(self._left)
        blamed = False
        for seq, end in sorted(self._ran.items() if killed else (), key=lambda one: one[0].handle):
            seq.crashes, seq.fatal = seq.crashes + 1, max(seq.fatal, end)
            if seq.crashes >= MAX_CRASHES and self.sequences.get(seq.id) is seq:
                self.fail(seq, "the engine failed on this request more than once")
                blamed = True
        return blamed

    def failed(self, reason: str, bad_input: bool) -> None:
        """It has left, for good."""
        self.reason, self.bad_input, self.resident = reason, bad_input, False
        if self.driver:
            self._go_on(self._left)
        for seq in self.own():  # no other group has taken them
            self.fail(seq, f"model {self.config.name!r} is not available: {reason}")
        self.settled.set()

    def advanced(self, batch: int) -> None:
        assert self.driver is not None
        self.driver.post(Advance(self.index, batch))

    # What the controller decides

    def load(self) -> None:
        """The model is to be loaded; where the workers are just starting, they do it then."""
        self.resident = True
        self.workers.send(Load(self.number))

    def give_back(self, blocks: Sequence[int]) -> None:
        """The memory of these blocks is another model's from now on."""
        self.workers.send(GiveBack(self.number, list(blocks)))

    def unload(self) -> None:
        """The controller has lost what was here."""
        self.resident = False
        for flight in self._flying():
            del self.workers.flying[self.number, flight.batch.id]
        self._dropped.clear()
        for seq in self.sequences.values():  # those that have moved on, too
            if seq.worker is self:
                seq.lose_worker()
        self.workers.send(Unload(self.number))
        self._send_next()  # what has waited for its suspects

    # Steps

    def execute(self, batch: Batch, others: bool) -> None:
        """Sends a batch to the workers; `others` is for its `StepRecord`."""
        innocent: Part = []
        suspects: list[Part] = []
        for index, request in enumerate(batch.requests):
            seq = self.sequences.get(request)
            if seq is None:  # cancelled in the turn that made the batch
                continue
            if seq.crashes:
                suspects.append([(index, seq)])
            else:
                innocent.append((index, seq))
        parts = deque([innocent, *suspects] if innocent or not suspects else suspects)
        result, before = StepResult(bytearray(len(batch.requests))), self.workers.latest not in (None, self.number)
        flight = Flight(self, batch, parts, result, bool(suspects), others, before)
        self.workers.flying[self.number, batch.id] = flight
        self._send_next()

    def _send_next(self) -> None:
        """Sends what may go, of all models: a batch with suspects has the workers to itself, so that nobody else is
        there when its culprit ends them."""
        suspected = False
        for number, flight in enumerate(self.workers.flying.values()):
            suspected |= flight.suspected
            if suspected and number:
                return
            if not flight.sent:
                flight.sent = time.perf_counter()
                flight.group._send(flight)

    def _send(self, flight: Flight) -> None:
        """Sends the flight's next part, without those that have ended since it was composed."""
        batch, part = flight.batch, flight.parts[0]
        flight.result.failed += [index for index, seq in part if self.sequences.get(seq.id) is not seq]
        flight.parts[0] = part = [(index, seq) for index, seq in part if self.sequences.get(seq.id) is seq]
        new = [seq.introduce(self) for _, seq in part if seq.worker is not self]
        work = [seq.work(batch, index, self._shares) for index, seq in part]
        self.workers.send(Step(self.number, batch.id, new, work, self._dropped))
        self._dropped = []

    def stepped(self, message: StepDone) -> None:
        """Takes a step's outputs, lets the controller decide on the next one, then tells the sinks."""
        flight = self.workers.flying.get((self.number, message.batch))
        if flight is None:  # the model was unloaded meanwhile
            return
        received = time.perf_counter()
        part = flight.parts.popleft()
        flight.outputs += [(*one, output) for one, output in zip(part, message.outputs, strict=True)]
        flight.forward_s += message.forward_s
        flight.sample_s += message.sample_s
        flight.draft_s += message.draft_s
        flight.result.draft_seconds += message.draft_s
        flight.result.seconds += message.forward_s + message.sample_s
        if flight.parts:
            self._send(flight)
            return
        # batches land in the order in which they were composed, as in a pipeline
        done = list(takewhile(lambda one: not one.parts, self._flying()))
        self._complete(done)
        self._go_on(done)
        for one in done:
            self._report(one, received)
        self._stepped = received

    def _complete(self, flights: list[Flight]) -> None:
        """Takes what batches yielded, for the next turn; after a crash only the parts that were done have results."""
        assert self.driver is not None
        for flight in flights:
            begin = time.perf_counter()
            for index, seq, output in flight.outputs:
                if self.sequences.get(seq.id) is seq:
                    self._take(flight, index, seq, output)
                else:  # cancelled meanwhile: it ends here, whatever the output says
                    flight.result.failed.append(index)
            flight.output_s += time.perf_counter() - begin
            del self.workers.flying[self.number, flight.batch.id]
            self.driver.post(Complete(self.index, flight.batch.id, flight.result))

    def _go_on(self, flights: list[Flight]) -> None:
        """The turn, and then the sinks of batches that are complete."""
        assert self.driver is not None
        self.driver.flush()
        self._send_next()
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
        batch = flight.batch
        if seq.crashes and batch.starts[index] + batch.lengths[index] >= seq.fatal:
            seq.crashes = 0
        if index < batch.num_decodes and self.config.max_draft_tokens:
            known = Drafted("no_drafter") if self.undrafted else _drafted(batch, index, seq, output)
            flight.drafts.append(known)
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
        predicted = batch.predicted if as_asked else None
        alone = self.workers.parallel.pipeline == 1 and not batch.drafts  # else there is more in these times
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
                messages_s=max(0.0, received - max(flight.sent, self._stepped) - flight.forward_s - flight.sample_s),
                output_s=flight.output_s,
                predicted_s=predicted,
                profiled_s=predicted / batch.pace if predicted and alone else None,
                draft_s=flight.draft_s,
                drafts=flight.drafts,
                others=flight.others,
                before=flight.before,
            )
        )
        self._cached_tokens = scheduler.cached_tokens

    # Sequences

    def drop(self, handle: int) -> None:
        self._dropped.append(handle)

    def forget(self, seq: RunningSequence) -> None:
        """The sequence is done or cancelled; its workers hear of it with the next step."""
        del self.sequences[seq.id]
        seq.leave_worker()

    def fail(self, seq: RunningSequence, reason: str) -> None:
        """Ends a sequence with an error, and it alone."""
        self.forget(seq)
        if self.driver:
            self.driver.post(Cancel(seq.id))
        seq.sink.fail(reason)


def _drafted(batch: Batch, index: int, seq: RunningSequence, output: SliceOutput) -> Drafted:
    if output.num_draft:
        return Drafted("", output.drafter, output.num_draft, output.num_accepted, len(output.tokens))
    if seq.params.max_draft_tokens == 0:
        return Drafted("opted_out")
    if batch.drafts and batch.drafts[index]:
        return Drafted("error" if output.drafter == ERROR else "nothing_found")
    return Drafted(IDLE[batch.sequences[index].row[HELD_BACK]])
