"""Composes the policies: which group takes a request, what its next step computes. No clock, no I/O, no randomness.

Both drivers, the simulator and the runtime, do nothing but `turn` at the times they know of. A log of turns is enough
to repeat every decision.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.batching.policies import POLICIES
from paceline.batching.scheduler import Policy, Scheduler, SchedulerConfig
from paceline.core.batch import Batch, StepResult
from paceline.core.events import Cancel, Complete, Event, Input, Reset, Submit
from paceline.core.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A group as the controller sees it: what it serves, and its limits."""

    models: tuple[str, ...] = ("",)
    scheduler: SchedulerConfig = SchedulerConfig()
    policy: str = "sarathi_serve"
    pipeline: int = 1  # batches in flight at most
    max_waiting: int | None = None  # requests beyond those are rejected


@dataclass(slots=True)
class GroupState:
    config: GroupConfig
    scheduler: Scheduler
    in_flight: dict[int, Batch] = field(default_factory=dict)
    next_batch: int = 0


class Controller:
    """Decides for all groups. Every method takes the time as `now` and answers with what happened."""

    def __init__(self, groups: Iterable[GroupConfig]) -> None:
        self.groups = [GroupState(g, Scheduler(g.scheduler, _policy(g.policy))) for g in groups]
        self.sequences: dict[str, tuple[int, Sequence]] = {}  # those that are waiting or running
        self._serial = 0

    def turn(self, inputs: Iterable[Input], now: float) -> tuple[list[Event], list[Batch]]:
        """Everything that happens at one instant: inputs in their order, then as many new batches as the groups take.

        Completions come first, in the order of the groups; then lost groups, arrivals and cancellations as given.
        """
        events: list[Event] = []
        for item in sorted(inputs, key=_rank):
            match item:
                case Complete(group, batch_id, result):
                    events += self.complete(group, batch_id, result, now)
                case Reset(group):
                    events += self.reset(group, now)
                case Submit(request, admitted):
                    events += self.submit(request, now, admitted)
                case Cancel(request_id):
                    events += self.cancel(request_id, now)
        batches = []
        for index in range(len(self.groups)):
            while batch := self.next_batch(index, now):
                batches.append(batch)
                events += [Event("preempted", now, index, s.id) for s in batch.preempted]
                slices = tuple((s.sequence.id, s.start, s.length) for s in batch.slices)
                events.append(Event("started", now, index, str(batch.id), batch.num_tokens, slices))
        return events, batches

    def submit(self, request: Request, now: float, admitted: bool = False) -> list[Event]:
        """Queues a request at the group of its model, or rejects it: unknown, too long for the group, queue full.

        `admitted`: it belongs to one that was accepted, and a full queue does not refuse it.
        """
        index = next((i for i, g in enumerate(self.groups) if request.model in g.config.models), None)
        if index is None:
            return [Event("rejected", now, -1, request.id, detail=f"model: no group serves {request.model!r}")]
        group, reason = self.groups[index], ""
        scheduler, bound = group.scheduler, group.config.max_waiting
        if request.id in self.sequences:
            reason = "id: taken by another request"
        elif not scheduler.fits(request.prompt_tokens, request.max_tokens):
            reason = "length: the KV cache cannot hold the request even alone"
        elif bound is not None and len(scheduler.waiting) >= bound and not admitted:
            reason = "queue: full"
        if reason:
            return [Event("rejected", now, index, request.id, detail=reason)]
        sequence = Sequence(request, self._serial)
        self._serial += 1
        self.sequences[request.id] = index, sequence
        scheduler.add(sequence)
        return [Event("accepted", now, index, request.id)]

    def next_batch(self, group: int, now: float) -> Batch | None:
        """The group's next step; None when it has nothing to do or its pipeline is full."""
        state = self.groups[group]
        scheduler = state.scheduler
        if len(state.in_flight) >= state.config.pipeline:
            return None
        slices = scheduler.compose()
        if not slices:
            return None
        batch = Batch(state.next_batch, group, slices, tuple(scheduler.preempted))
        for item in slices:
            item.sequence.in_flight = True
        state.in_flight[batch.id] = batch
        state.next_batch += 1
        return batch

    def complete(self, group: int, batch_id: int, result: StepResult, now: float) -> list[Event]:
        """Takes what a batch yielded. A batch that a reset has overtaken is unknown and changes nothing."""
        state = self.groups[group]
        batch = state.in_flight.pop(batch_id, None)
        if batch is None:
            return []
        events = []
        for item, got in zip(batch.slices, result.slices, strict=True):
            sequence = item.sequence
            sequence.in_flight = False
            if sequence.cancelled or got.failed:
                self._remove(sequence)
                if got.failed:
                    events.append(Event("failed", now, group, sequence.id))
                continue
            state.scheduler.advance(sequence, item.end, got.tokens, got.hashes)
            if got.tokens:
                events.append(Event("tokens", now, group, sequence.id, got.tokens))
            if got.finish:
                self._remove(sequence)
                events.append(Event("finished", now, group, sequence.id, sequence.generated, got.finish))
        return events

    def cancel(self, request_id: str, now: float) -> list[Event]:
        """Drops a request: at once, or when the batch that it is part of completes. Unknown ids are ignored."""
        index, sequence = self.sequences.get(request_id, (-1, None))
        if sequence is None or sequence.cancelled:
            return []
        if sequence.in_flight:
            sequence.cancelled = True
        else:
            self._remove(sequence)
        return [Event("cancelled", now, index, request_id)]

    def reset(self, group: int, now: float) -> list[Event]:
        """The group lost its batches in flight and its KV cache; its sequences start over from what is known."""
        state = self.groups[group]
        state.in_flight.clear()
        for sequence in [s for s in state.scheduler.running if s.cancelled]:
            self._remove(sequence)
        state.scheduler.reset()
        return [Event("preempted", now, group, s.id) for s in state.scheduler.preempted]

    def _remove(self, sequence: Sequence) -> None:
        group, _ = self.sequences.pop(sequence.id)
        self.groups[group].scheduler.remove(sequence)


def _rank(item: Input) -> tuple[int, int]:
    """Order at equal times: a pure function of the inputs, so that both drivers agree."""
    match item:
        case Complete(group, _, _):
            return 0, group
        case Reset(group):
            return 1, group
        case Submit():
            return 2, 0
    return 3, 0


def _policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is not one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
