"""What a simulation of steps works on: what groups are, how long their steps take, what is under way and what became
of requests, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.batching.policies import policy
from paceline.batching.scheduler import make_state
from paceline.batching.state import STATE, Floats, Ints
from paceline.compiled import BOOLS, F32, F64, FLOATS, FLOATS_2D, I32, INTS_2D, Handle, Pointer, array_of
from paceline.controller import GroupConfig
from paceline.latency.step_time import NO_INTERFERENCE, Interference, StepTime
from paceline.simulator.drafts import Drafts, SimulatedDrafts, of_groups

Bools = NDArray[np.bool_]
COME, STEPS, TURNS = range(3)  # `Flights.counts`


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """One model on the devices of one group."""

    config: GroupConfig  # one model; `device`: of groups that share theirs
    step_time: StepTime
    share: float = 1.0  # of a step's time that each stage takes
    drafts: SimulatedDrafts | None = None  # where the first of them drafts
    overhead_s: float = 0.0  # of a step in each stage, beside that
    spread: Sequence[float] = ()  # what steps take over all that, likely all alike; empty: they take what is said
    interference: Interference = NO_INTERFERENCE


class Requests(NamedTuple):
    """Columns, in order of arrival; goals of a request: infinity is none."""

    arrivals: Floats
    models: Ints
    prompts: Ints  # tokens
    outputs: Ints
    ttft: Floats
    tbt: Floats


class Times(NamedTuple):
    """What steps take (`StepTime`), over groups."""

    linear: Floats  # [groups, tokens]
    lengths: Ints  # of those
    terms: Floats  # [groups, 6]
    shares: Floats
    overheads: Floats
    spreads: Floats  # one behind the other
    ends: Ints  # [groups + 1] where those of each end
    interference: Floats  # [groups, that of each]


class Lenders(NamedTuple):
    """Groups whose devices' memory is lent among them, device by device."""

    states: Ints  # their addresses
    sizes: Ints  # [lenders, workers] bytes of a block
    place: Ints  # [groups] of each among the lenders; -1: it is none
    begins: Ints  # [lanes + 1] where those of each device begin


class Residents(NamedTuple):
    """Which models are loaded, over groups; it changes."""

    slots: Ints  # [lanes] how many a device holds; 0: all
    load_s: Floats
    resident: Bools  # loaded, or coming
    up: Bools  # it is there
    since: Floats  # when it was decided that it is to come
    back: Floats  # when it will be there; infinity: it is not coming
    came: Floats  # when it was there
    emitted: Floats  # when it last gave a token


class Network(NamedTuple):
    """What groups are to each other."""

    states: Ints  # addresses
    lanes: Ints  # [groups] which of the devices each has
    members: Ints  # [lanes] groups
    deepest: Ints  # [lanes] batches that a device has in flight, as the deepest of its groups has stages
    hosts: Ints  # [models, groups]
    model_of: Ints  # [groups]
    rules: Ints  # [groups, 2] whether goals order prompts, and whether those that cannot be met are rejected
    steady: Bools  # [groups] it has one stage, nobody takes its memory, and what others do is nothing to anybody


class Flights(NamedTuple):
    """Batches under way, first in first out, a ring for each group; and what comes next. It changes."""

    clocks: Floats  # [lanes, stages] when each stage is free
    head: Ints  # [groups] of the ring
    flying: Ints  # [groups]
    ends: Floats  # [groups, stages]
    tokens: Ints  # likewise
    begun: Floats  # likewise
    predicted: Floats  # likewise, seconds that the group's budget says; 0: it drafts
    took: Floats  # likewise, in the engine; 0: the group learns nothing from it
    enters: Floats  # [groups] when the batch that is in the first of several stages leaves it
    wakes: Floats  # [groups] up to when a group's steps are known already
    served: Ints  # [groups] its last turn
    latest: Ints  # [lanes] the group whose step it was; -1: none
    numbers: Ints  # [groups] steps so far
    dirty: Bools  # [lanes] there may be something to compose
    counts: Ints  # requests that have come, steps, turns


class Served(NamedTuple):
    """What became of the requests."""

    owner: Ints  # group that took it when it came; -1: nobody could
    first: Floats  # time of the first token, NaN without one
    finish: Floats
    tokens: Ints
    gaps: NDArray[np.float32]  # between tokens, those of a model side by side
    gap_ends: Ints  # [models] where in `gaps` those of each end; each has room for as many as its tokens


class Steps(NamedTuple):
    """Of each step its group, tokens, seconds in a stage and when it left each stage, those of a group in order."""

    sizes: NDArray[np.int32]  # [steps, 2]
    took: Floats  # [steps]
    drafting: Floats  # [steps]: seconds more in the first stage; empty where nobody drafts
    left: Floats  # [steps, stages]

    def first(self, count: int) -> "Steps":
        return Steps._make(column[:count] for column in self)

    def with_room(self) -> "Steps":
        """For as many again."""
        return Steps._make(np.concatenate((column, np.empty_like(column))) for column in self)


class Scratch(NamedTuple):
    row: Floats  # [stages]
    queued: Ints  # [groups]
    chunks: Ints  # likewise
    able: Bools
    tried: Bools
    expected: Floats
    due: Floats
    waits: Floats
    used: Floats


_KINDS = {
    "network": Pointer(Network, hosts=INTS_2D, rules=INTS_2D, steady=BOOLS),
    "times": Pointer(
        Times, linear=FLOATS_2D, terms=FLOATS_2D, shares=FLOATS, overheads=FLOATS, spreads=FLOATS,
        interference=FLOATS_2D,
    ),
    "drafts": Pointer(
        Drafts, acceptance=FLOATS, linear=FLOATS, more=FLOATS_2D, counts=array_of(F64, 4), group=array_of(F64, 4),
        kinds=INTS_2D, unread=INTS_2D, rest=INTS_2D, thresholds=FLOATS, verifying=FLOATS_2D, drafting=FLOATS,
    ),
    "lenders": Pointer(Lenders, sizes=INTS_2D),
    "there": Pointer(
        Residents, load_s=FLOATS, resident=BOOLS, up=BOOLS, since=FLOATS, back=FLOATS, came=FLOATS, emitted=FLOATS
    ),
    "requests": Pointer(Requests, arrivals=FLOATS, ttft=FLOATS, tbt=FLOATS),
    "flights": Pointer(
        Flights, clocks=FLOATS_2D, ends=FLOATS_2D, tokens=INTS_2D, begun=FLOATS_2D, predicted=FLOATS_2D,
        took=FLOATS_2D, enters=FLOATS, wakes=FLOATS, dirty=BOOLS,
    ),
    "outcomes": Pointer(Served, first=FLOATS, finish=FLOATS, gaps=array_of(F32, 1)),
    "steps": Pointer(Steps, sizes=array_of(I32, 2), took=FLOATS, drafting=FLOATS, left=FLOATS_2D),
    "scratch": Pointer(
        Scratch, row=FLOATS, able=BOOLS, tried=BOOLS, expected=FLOATS, due=FLOATS, waits=FLOATS, used=FLOATS
    ),
}  # fmt: skip


class World(NamedTuple):
    """All of it, as compiled code sees it: each a pointer to that."""

    network: Network
    times: Times
    drafts: Drafts
    lenders: Lenders
    there: Residents
    requests: Requests
    flights: Flights
    outcomes: Served
    steps: Steps
    scratch: Scratch


WORLD = Pointer(World, **_KINDS)


def empty_states(groups: Sequence[SimulatedGroup], models: Sequence[str], requests: Requests) -> list[Handle]:
    """Of each group, with room for all its requests; to be kept as long as a world knows their addresses."""
    count, made = np.bincount(requests.models, minlength=len(models)), list[Handle]()
    for g, mine in zip(groups, _hosts(groups, models).T > 0, strict=True):
        limits = g.config.scheduler
        longest = int((requests.prompts + requests.outputs)[mine[requests.models]].max(initial=1))
        most = limits.most_blocks or limits.num_blocks
        table = max(1, min(most, max(longest, limits.max_model_len or 0) // limits.block_size + 1))
        slots, adaptive = max(1, int(count[mine].sum())), bool(g.drafts and g.drafts.adaptive)
        rule = policy(g.config.policy)
        made.append(Handle(STATE, make_state(limits, rule, g.config.pipeline, g.config.budget, adaptive, slots, table)))
    return made


def make(
    groups: Sequence[SimulatedGroup], models: Sequence[str], requests: Requests, states: Sequence[Handle]
) -> World:  # fmt: skip
    """The world before anything happens. `states`, of `empty_states`, have to outlive it: it knows their addresses."""
    places = dict[object, int]()
    lanes = np.array([
        places.setdefault(i if g.config.device is None else (g.config.device,), len(places))
        for i, g in enumerate(groups)
    ], np.int64)  # fmt: skip
    hosts, addresses = _hosts(groups, models), np.array([state.address for state in states], np.int64)
    lenders, there = _lenders(groups, addresses, lanes), _residents(groups, lanes)
    depth = max((g.config.pipeline for g in groups), default=1)
    most = max((len(state.fields.numbers) for state in states), default=0)
    drafts = of_groups([g.drafts for g in groups], [g.step_time for g in groups], most)
    tokens = np.bincount(requests.models, requests.outputs, len(models)).astype(np.int64)
    count, total, room = len(groups), len(requests.arrivals), 1024 + int(tokens.sum())
    return World(
        _network(groups, hosts, lanes, addresses, lenders, there), _times(groups), drafts, lenders, there, requests,
        Flights._make([
            np.zeros((len(places), depth)), _zeros(count), _zeros(count), np.zeros((count, depth)),
            np.zeros((count, depth), np.int64), *np.zeros((3, count, depth)),
            np.full(count, np.inf), np.full(count, np.inf), _zeros(count), np.full(len(places), -1),
            _zeros(count), np.zeros(len(places), np.bool_), _zeros(3),
        ]),
        Served(
            np.full(total, -1), np.full(total, np.nan), np.full(total, np.nan), _zeros(total),
            np.empty(int(tokens.sum()), np.float32), np.cumsum(tokens) - tokens,
        ),
        Steps(
            np.empty((room, 2), np.int32), np.empty(room), np.empty(room if drafts.most.any() else 0),
            np.empty((room, depth)),
        ),
        Scratch._make([
            np.zeros(depth), *np.zeros((2, count), np.int64), *np.zeros((2, count), np.bool_), *np.zeros((4, count))
        ]),
    )  # fmt: skip


def handle(world: World) -> Handle:
    """As compiled code takes it."""
    return Handle(WORLD, World._make(Handle(_KINDS[name], own) for name, own in world._asdict().items()))


def _zeros(count: int) -> Ints:
    return np.zeros(count, np.int64)


def _hosts(groups: Sequence[SimulatedGroup], models: Sequence[str]) -> Ints:
    """[models, groups]"""
    hosts = np.array([[name in g.config.models for g in groups] for name in models], np.int64)
    return hosts.reshape(len(models), len(groups))


def _network(
    groups: Sequence[SimulatedGroup], hosts: Ints, lanes: Ints, addresses: Ints, lenders: Lenders, there: Residents
) -> Network:  # fmt: skip
    stages = np.array([g.config.pipeline for g in groups], np.int64)
    deepest = np.zeros(len(there.slots), np.int64)
    np.maximum.at(deepest, lanes, stages)
    rules = np.array([(policy(g.config.policy).by_goal, g.config.admission) for g in groups], np.int64).reshape(-1, 2)
    interferes = any(g.interference != NO_INTERFERENCE for g in groups)
    steady = (stages == 1) & (lenders.place < 0) & (not there.slots.any()) & (not interferes)
    return Network(
        addresses, lanes, np.bincount(lanes, minlength=len(deepest)), deepest, hosts, np.argmax(hosts, 0), rules, steady
    )


def _times(groups: Sequence[SimulatedGroup]) -> Times:
    lengths = np.array([len(g.step_time.linear) for g in groups], np.int64)
    linear = np.zeros((len(groups), lengths.max(initial=0)))
    for index, g in enumerate(groups):
        linear[index, : lengths[index]] = g.step_time.linear
    return Times(
        linear, lengths, np.array([g.step_time.terms for g in groups]).reshape(-1, 6),
        np.array([g.share for g in groups], np.float64), np.array([g.overhead_s for g in groups], np.float64),
        np.array([one for g in groups for one in g.spread], np.float64),
        np.cumsum([0, *(len(g.spread) for g in groups)]),
        np.array([g.interference for g in groups], np.float64).reshape(-1, len(NO_INTERFERENCE)),
    )  # fmt: skip


def _residents(groups: Sequence[SimulatedGroup], lanes: Ints) -> Residents:
    slots = np.zeros(lanes.max(initial=-1) + 1, np.int64)
    slots[lanes] = [g.config.slots or 0 for g in groups]
    resident = np.array([g.config.resident for g in groups], np.bool_)
    load_s, never = np.array([g.config.load_s for g in groups]), np.full(len(groups), np.inf)
    return Residents(slots, load_s, resident, resident.copy(), -never, never, -never, -never)


def _lenders(groups: Sequence[SimulatedGroup], states: Ints, lanes: Ints) -> Lenders:
    count = np.bincount(lanes, [bool(g.config.block_bytes) for g in groups], lanes.max(initial=-1) + 1)
    order = [g for g in np.argsort(lanes, kind="stable") if groups[g].config.block_bytes and count[lanes[g]] > 1]
    place = np.full(len(groups), -1)
    place[order] = range(len(order))
    width = len(groups[order[0]].config.block_bytes) if order else 1
    sizes = np.array([groups[g].config.block_bytes for g in order], np.int64).reshape(-1, width)
    return Lenders(states[order], sizes, place, np.searchsorted(lanes[order], np.arange(len(count) + 1)))
