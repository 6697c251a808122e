"""Composes the policies: which group takes a request, what its next step computes. No clock, no I/O, no randomness.

Both drivers, the simulator and the runtime, do nothing but `turn` at the times they know of. A log of turns is enough
to repeat every decision.
"""

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce

from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.batching.lending import lend
from paceline.batching.policies import policy
from paceline.batching.residency import gives_way, loading
from paceline.batching.scheduler import Scheduler
from paceline.batching.sharing import full, narrow, next_in_turn, soonest
from paceline.batching.state import NONE
from paceline.compiled import plain
from paceline.core.batch import Batch, StepResult, StepShape
from paceline.core.events import (
    Advance,
    Back,
    Cancel,
    Complete,
    Emitted,
    Event,
    Input,
    Lost,
    Retire,
    Submit,
    Unreachable,
)
from paceline.core.protocols import Lookahead
from paceline.core.request import Request, Sequence

FULL = "queue: full"  # why a request is refused that may find a place later


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A group as the controller sees it: what it serves, and its limits."""

    models: tuple[str, ...] = ("",)
    scheduler: SchedulerConfig = SchedulerConfig()
    policy: str = "paceline"
    pipeline: int = 1  # batches in flight at most
    ahead: int = 0  # batches beside those, composed before the last tokens of their sequences are known (`paceline`)
    max_waiting: int | None = None  # requests beyond those are rejected
    budget: GoalBudget | None = None  # chooses the width of each step; None: always `scheduler.token_budget`
    predict: Callable[[StepShape], float] | None = None  # seconds of a step on a machine at its usual pace
    lookahead: Callable[[], Lookahead] | None = None  # how many tokens to draft; None: as many as there is room for
    admission: bool = False  # requests go where they are served soonest; goals that no group can meet are rejected
    slots: int | None = None  # models that the device holds at a time, the same for all its groups; None: all
    resident: bool = True  # it is loaded at the start
    load_s: float = 0.0  # seconds that loading it takes, as far as is known
    device: int | None = None  # groups with the same one share its stages, a step at a time; None: nobody else's
    block_bytes: tuple[int, ...] = ()  # of a KV block at each of its workers, where the device's groups lend memory

    def __post_init__(self) -> None:
        if self.pipeline < 1:
            raise ValueError(f"pipeline: {self.pipeline} is not at least 1")
        if self.ahead and (self.pipeline > 1 or self.policy != "paceline"):
            raise ValueError(f"ahead: {self.ahead} is for the policy paceline and one stage; valid is 0")


@dataclass(slots=True)
class GroupState:
    config: GroupConfig
    scheduler: Scheduler
    served: int = 0  # when it had its last step, of those that share a device
    up: bool = True  # it has workers, and they have the model
    resident: bool = True  # the model is loaded, or coming
    since: float = -math.inf  # when that was decided
    came: float = -math.inf  # when it was there
    emitted: float = -math.inf  # when it last gave a token
    load_s: float = 0.0
    retires: bool = False  # it takes no more requests

    @property
    def full(self) -> bool:
        bound = self.config.max_waiting
        return bound is not None and self.scheduler.num_waiting >= bound


class Controller:
    """Decides for all groups. Every method takes the time as `now` and answers with what happened."""

    def __init__(self, groups: Iterable[GroupConfig]) -> None:
        self.groups: list[GroupState] = []
        self.sequences: dict[str, tuple[int, Sequence]] = {}  # those that are waiting or running
        self._steps = 0
        self._lanes: list[list[int]] = []  # groups by the device that they share
        self._lane_of: list[int] = []  # of each group
        self._touched: set[int] = set()  # lanes in which something has happened in this turn
        self._lenders: dict[int, list[int]] = {}  # by device: groups that lend, those that left too
        self._freed: dict[int, list[tuple[int, list[int]]]] = {}  # by device: blocks whose memory is to go back
        self._hosts: dict[str, list[int]] = {}
        for config in groups:
            self.add(config)

    def add(self, config: GroupConfig) -> int:
        """A group more. Returns its number."""
        lookahead = config.lookahead and config.lookahead()
        scheduler = Scheduler(
            config.scheduler, policy(config.policy), config.budget, config.pipeline, config.predict, lookahead,
            config.ahead,
        )  # fmt: skip
        number, resident = len(self.groups), config.resident
        self.groups.append(GroupState(config, scheduler, up=resident, resident=resident, load_s=config.load_s))
        device = config.device
        lane = next(
            (n for n, some in enumerate(self._lanes) if some and device is not None
             and self.groups[some[0]].config.device == device), len(self._lanes),
        )  # fmt: skip
        self._lanes[lane:] = self._lanes[lane:] or [[]]
        self._lanes[lane].append(number)
        self._lane_of.append(lane)
        if config.block_bytes:
            self._lenders.setdefault(lane, []).append(number)
        for model in config.models:
            self._hosts.setdefault(model, []).append(number)
        return number

    def turn(self, inputs: Iterable[Input], now: float) -> tuple[list[Event], list[Batch]]:
        """Everything that happens at one instant: inputs in their order, then as many new batches as the groups take.

        Completions come first, in the order of the groups; then lost groups, arrivals and cancellations as given. Only
        devices at which something happened can have a next step, or other models.
        """
        events: list[Event] = []
        for item in sorted(inputs, key=_rank):
            match item:
                case Complete(group, batch_id, result):
                    events += self.complete(group, batch_id, result, now)
                case Advance(group, batch_id):
                    if self.groups[group].scheduler.advance(batch_id):
                        self._touch(group)
                case Lost(group, for_good):
                    events += self.lose(group, now, for_good)
                case Retire(group):
                    events += self.retire(group, now)
                case Back(group, load_s):
                    self.groups[group].up, self.groups[group].came = True, now
                    self.groups[group].load_s = load_s or self.groups[group].load_s
                    self._touch(group)
                case Submit(request, admitted):
                    events += self.submit(request, now, admitted)
                case Cancel(request_id):
                    events += self.cancel(request_id, now)
        batches = []
        while self._touched:
            lane = min(self._touched)
            self._touched.remove(lane)
            lanes = self._lanes[lane]
            if not lanes:  # all of its groups have left
                continue
            events += self._swap(lanes, now)
            self._touched.discard(lane)  # who has just left does not come back before the next turn
            while batch := self._next_of(lanes, now):
                batches.append(batch)
                events += self._preempted(batch.group, now)
                events.append(Event("started", now, batch.group, str(batch.id), batch.num_tokens, batch))
            for index in list(lanes):
                events += self._preempted(index, now)
                if self.groups[index].retires and not self.groups[index].scheduler.num_sequences:
                    self._leave(index)
                    events.append(Event("retired", now, index))
        return events, batches

    def _touch(self, group: int) -> None:
        self._touched.add(self._lane_of[group])

    def _swap(self, lanes: list[int], now: float) -> list[Event]:
        """Has models loaded that are asked for, where the device does not hold all (`batching.residency`)."""
        slots, events = self.groups[lanes[0]].config.slots, list[Event]()
        if slots is None:
            return events
        asked = [i for i in lanes if not self.groups[i].resident and self.groups[i].scheduler.num_waiting]
        first = {i: min(sequence.request.arrival for sequence in self.groups[i].scheduler.waiting) for i in asked}
        for i in sorted(asked, key=lambda i: (first[i], i)):
            groups = [self.groups[j] for j in lanes]
            if sum(g.resident for g in groups) >= slots:
                schedulers = [g.scheduler for g in groups]
                at = plain(gives_way)(
                    [g.resident and g.up for g in groups], [one.num_sequences for one in schedulers],
                    [one.landed for one in schedulers], [g.came for g in groups], [g.emitted for g in groups],
                    now - first[i], now,
                )  # fmt: skip
                if at < 0:
                    break
                gone = lanes[at]
                self.groups[gone].resident = False
                events += [*self.lose(gone, now), Event("unload", now, gone)]
            self.groups[i].resident, self.groups[i].since = True, now
            events.append(Event("load", now, i))
        return events

    def _next_of(self, lanes: list[int], now: float) -> Batch | None:
        """The next step of the groups that share a device (`sharing.next_in_turn`)."""
        if len(lanes) == 1:
            return self.next_batch(lanes[0], now)
        groups = self.groups
        stages, schedulers = max(groups[i].config.pipeline for i in lanes), [groups[i].scheduler for i in lanes]
        entering = any(one.entering is not None for one in schedulers)
        lanes = [i for i in lanes if groups[i].scheduler.num_sequences]
        ahead = groups[lanes[0]].config.ahead if len(lanes) == 1 else 0  # else it is others' turn
        if entering or plain(full)(sum(len(one.flying) for one in schedulers), stages, ahead):
            return None
        served, tried = [groups[i].served for i in lanes], [False] * len(lanes)
        turns = [groups[i].scheduler.turn(now) for i in lanes]
        each = _total(seconds for _, seconds in turns)
        due = [groups[i].scheduler.next_due(chunk, each) for i, (chunk, _) in zip(lanes, turns, strict=True)]
        while (at := plain(next_in_turn)(served, due, now + each, tried)) >= 0:
            if batch := self.next_batch(lanes[at], now):
                self._steps += 1
                groups[lanes[at]].served = self._steps
                return batch
            tried[at] = True
        return None

    def submit(self, request: Request, now: float, admitted: bool = False) -> list[Event]:
        """Queues a request at that group of its model which serves it soonest, or rejects it: unknown model, too long
        for the group, queue full, goals that cannot be met.

        `admitted`: it belongs to one that was accepted, and a full queue does not refuse it.
        """
        hosts = self._hosts.get(request.model)
        if not hosts:
            return [Event("rejected", now, -1, request.id, detail=f"model: no group serves {request.model!r}")]
        index, reason, expected = self._host(request, hosts, now, admitted)
        group = self.groups[index]
        if request.id in self.sequences:
            reason = "id: taken by another request"
        if reason:
            return [Event("rejected", now, index, request.id, detail=reason)]
        if not admitted and (late := self._late(group, request, expected, now)):
            return [Event("rejected", now, index, request.id, detail=late)]
        self.sequences[request.id] = index, group.scheduler.add(request)
        self._touch(index)
        return [Event("accepted", now, index, request.id)]

    def _host(self, request: Request, hosts: list[int], now: float, admitted: bool) -> tuple[int, str, float]:
        """Of these groups the one to take the request, why it cannot, if none can, and the seconds until its first
        token is expected there (0: nobody knows). Lost groups only if need be."""
        groups = [self.groups[i] for i in hosts]
        reasons = [self._refusal(group, request, admitted) for group in groups]
        able = [not reason for reason in reasons]
        staying = [free and not group.retires for free, group in zip(able, groups, strict=True)]
        able = staying if any(staying) else able
        queued = [group.scheduler.num_sequences for group in groups]
        expected = [
            self._expected(i, request, now) if free and group.config.admission else 0.0
            for i, free, group in zip(hosts, able, groups, strict=True)
        ]
        plain(narrow)(able, [group.up for group in groups], [group.resident for group in groups])
        chosen = max(0, plain(soonest)(expected, queued, able))
        if FULL in reasons and not any(able):  # where it would fit, and later has a place
            chosen = reasons.index(FULL)
        return hosts[chosen], reasons[chosen], expected[chosen]

    def _late(self, group: GroupState, request: Request, expected: float, now: float) -> Unreachable | None:
        """Which goal the group cannot meet, with its first token expected in so many seconds (0: nobody knows)."""
        budget, (ttft, tbt) = group.config.budget, (request.slo.ttft, request.slo.tbt)
        if expected == NONE:
            goal = min(one for one in (budget.tbt if budget else None, tbt) if one is not None)
            return Unreachable("tbt", group.scheduler.between_tokens(request), goal)
        whole = now - request.arrival + expected
        return Unreachable("ttft", whole, ttft) if ttft is not None and expected and whole > ttft else None

    def _expected(self, group: int, request: Request, now: float) -> float:
        """Seconds until its first token, with the turns of the others on the group's device."""
        lanes, state = self._lanes[self._lane_of[group]], self.groups[group]
        ways = [self.groups[i].scheduler.in_the_way(now) for i in lanes if i != group]
        expected = state.scheduler.first_token(request, now, ways)
        if not state.up and expected:
            expected += plain(loading)(state.load_s, state.resident, state.since, now)
        return expected

    def _refusal(self, group: GroupState, request: Request, admitted: bool) -> str:
        """Why the group cannot take the request; empty: it can."""
        if not group.scheduler.fits(request.prompt_tokens, request.max_tokens):
            return "length: the KV cache cannot hold the request even alone"
        return FULL if group.full and not admitted else ""

    def full(self, model: str) -> bool:
        """Whether no group of the model has a place in its queue."""
        return all(self.groups[i].full for i in self._hosts[model])

    def next_batch(self, group: int, now: float) -> Batch | None:
        """The group's next step; None when it has nothing to do, its pipeline is full, or it has no workers."""
        state = self.groups[group]
        if not state.up:
            return None
        freed = self._lend(group)
        batch = state.scheduler.compose(group, now)
        if batch is None or not freed:
            return batch
        batch = replace(batch, given_back=tuple(freed))
        freed.clear()
        return batch

    def _lend(self, group: int) -> list[tuple[int, list[int]]]:
        """Before a step of it (`batching.lending`). Returns blocks of groups on its device whose memory is to go back
        before the device's next step."""
        lane = self._lane_of[group]
        lenders, freed = self._lenders.get(lane, []), self._freed.setdefault(lane, [])
        if group in lenders:
            schedulers = [self.groups[i].scheduler for i in lenders]
            sizes = [self.groups[i].config.block_bytes for i in lenders]
            taken = lend(schedulers, sizes, lenders.index(group))
            freed += [(i, blocks) for i, blocks in zip(lenders, taken, strict=True) if blocks]
        return freed

    def complete(self, group: int, batch_id: int, result: StepResult, now: float) -> list[Event]:
        """Takes what a batch yielded. A batch that a reset has overtaken is unknown and changes nothing."""
        self._touch(group)
        done = self.groups[group].scheduler.complete(batch_id, result, now)
        if done is None:
            return []
        batch, gone, tokens, total = done
        events = []
        for index in gone:
            sequence = batch.sequences[index]
            if not sequence.ended:
                events.append(Event("failed", now, group, sequence.id))
            self._end(sequence)
        if total:
            self.groups[group].emitted = now
            events.append(Event("tokens", now, group, str(batch_id), total, Emitted(batch.requests, tokens)))
        for index, reason in result.finished:
            if index not in gone:
                sequence = batch.sequences[index]
                events.append(Event("finished", now, group, sequence.id, sequence.generated, reason))
                self._end(sequence)
        return events

    def cancel(self, request_id: str, now: float) -> list[Event]:
        """Drops a request: at once, or when the batch that it is part of completes. Unknown ids are ignored."""
        index, sequence = self.sequences.get(request_id, (-1, None))
        if sequence is None or sequence.ended:
            return []
        self._end(sequence)
        self._touch(index)
        return [Event("cancelled", now, index, request_id)]

    def lose(self, group: int, now: float, for_good: bool = False) -> list[Event]:
        """The group lost its batches in flight and its KV cache: its sequences start over from what is known, at other
        groups of their model which are up, or at this one when it is back; or, if it is lost for good, at any other."""
        self._touch(group)
        state = self.groups[group]
        state.up, state.retires = False, state.retires or for_good
        freed = self._freed.get(self._lane_of[group], [])
        freed[:] = [one for one in freed if one[0] != group]
        for sequence in state.scheduler.reset():
            del self.sequences[sequence.id]
        events = [*self._preempted(group, now), *self._move_waiting(group, now)]
        if for_good:
            self._leave(group)
            events.append(Event("retired", now, group))
        return events

    def retire(self, group: int, now: float) -> list[Event]:
        """The group takes no more requests; when it has none it is out of the controller's sight, its number too."""
        self._touch(group)
        self.groups[group].retires = True
        return self._move_waiting(group, now)

    def _leave(self, group: int) -> None:
        self.groups[group].retires = False
        for some in (self._lanes[self._lane_of[group]], *self._hosts.values()):
            if group in some:
                some.remove(group)

    def _move_waiting(self, group: int, now: float) -> list[Event]:
        """To other groups of their model which are up; from one that does not come back to any."""
        state, events = self.groups[group], list[Event]()
        abandoned = state.retires and not state.up
        for sequence in state.scheduler.waiting:
            request = sequence.request
            hosts = [i for i in self._hosts[request.model] if i != group and (self.groups[i].up or abandoned)]
            if not hosts:
                continue
            index, reason, _ = self._host(request, hosts, now, admitted=True)
            if not reason:
                taken = self.groups[index].scheduler.take_over(sequence, state.scheduler)
                self.sequences[request.id] = index, taken
                self._touch(index)
                events.append(Event("moved", now, index, request.id))
        return events

    def _preempted(self, group: int, now: float) -> list[Event]:
        """Takes note of who lost its blocks."""
        scheduler = self.groups[group].scheduler
        lost, scheduler.preempted = scheduler.preempted, []
        return [Event("preempted", now, group, sequence.id) for sequence in lost]

    def _end(self, sequence: Sequence) -> None:
        group, _ = self.sequences[sequence.id]
        if self.groups[group].scheduler.end(sequence):
            del self.sequences[sequence.id]


def _rank(item: Input) -> tuple[int, int]:
    """Order at equal times: a pure function of the inputs, so that both drivers agree."""
    match item:
        case Complete(group, _, _):
            return 0, group
        case Advance(group, _):
            return 1, group
        case Lost(group, _) | Back(group, _):  # in the order in which they happened
            return 2, group
        case Retire(group):
            return 3, group
        case Submit():
            return 4, 0
    return 5, 0


def _total(seconds: Iterable[float]) -> float:
    """One after the other, as the simulation adds them; `sum` is more exact from Python 3.12 on."""
    return reduce(operator.add, seconds, 0.0)
