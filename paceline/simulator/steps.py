"""Autoregressive requests through groups in virtual time, as one compiled loop.

What decides is what decides live: the scheduler (`batching`), the rules of `batching.sharing` for dispatch and for
groups that share a device, and those of `batching.lending` and `batching.residency` for its memory. What is new here
is only what `simulator.driver` does, too: the next instant, and at each completions first, in the order of the groups,
then models that have come, arrivals, and new steps; and that runs of nothing but decodes, in which there is nothing to
decide, go on by themselves. A test holds the two to the same tokens at the same times, for every policy; this one is a
hundred times as fast, so that planners can ask it.
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from paceline.batching.blocks import num_free, take
from paceline.batching.budget import seconds
from paceline.batching.compiled import FLOATS, FLOATS_2D, INTS, INTS_2D, Handle, entry, part, state_at, tuple_of
from paceline.batching.lending import share_out
from paceline.batching.moves import add, end, fits, num_waiting, reset
from paceline.batching.policies import compose, land, leave_first_stage, policy, wanted
from paceline.batching.prediction import first_token, turn
from paceline.batching.residency import gives_way, loading
from paceline.batching.scheduler import make_state
from paceline.batching.sharing import narrow, next_due, next_in_turn, soonest
from paceline.batching.state import (
    ARRIVAL,
    BLOCK_SIZE,
    CHUNKS_LAST,
    DRAFTING,
    ENTERING,
    GOAL,
    HEAD,
    LANDED,
    LAST,
    NEXT_BATCH,
    PIPELINE,
    PROMPTS,
    RUNNING,
    SLOT,
    TAIL,
    Floats,
    Ints,
    State,
)
from paceline.controller import GroupConfig
from paceline.core.request import ASKED, COMPUTED, HELD, KNOWN, LIMIT, PROMPT, SCHEDULED, TAG
from paceline.latency.step_time import StepTime
from paceline.placement.dispatch import enter
from paceline.simulator.drafts import Drafts, SimulatedDrafts, chance, draft, judge, of_groups, seconds_of_drafts

Bools = NDArray[np.bool_]
BOOLS = types.Array(types.boolean, 1, "C")


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """One model on the devices of one group."""

    config: GroupConfig  # one model; `device`: of groups that share theirs
    step_time: StepTime
    share: float = 1.0  # of a step's time that each stage takes
    drafts: SimulatedDrafts | None = None  # where the first of them drafts
    overhead_s: float = 0.0  # of a step in each stage, beside that
    spread: Sequence[float] = ()  # what steps take over all that, likely all alike; empty: they take what is said


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
    hosts: Ints  # [models, groups]
    rules: Ints  # [groups, 2] whether goals order prompts, and whether those that cannot be met are rejected


class Result(NamedTuple):
    """What became of them; and of each step its group, tokens, seconds in a stage and when it left each stage, those of
    a group in order."""

    owner: Ints  # group that took it when it came; -1: nobody could
    first: Floats  # time of the first token, NaN without one
    finish: Floats
    tokens: Ints
    gaps: NDArray[np.float32]  # between tokens, those of a model side by side
    gap_ends: Ints  # [models] where in `gaps` those of each end; each has room for as many as its tokens
    steps: NDArray[np.int32]  # [steps, 2]
    took: Floats  # [steps]
    drafting: Floats  # [steps]: seconds more in the first stage; empty where nobody drafts
    left: Floats  # [steps, stages]


def run(groups: Sequence[SimulatedGroup], models: Sequence[str], requests: Requests) -> Result:
    """Simulates until nothing is left to happen. Groups of one model share its requests."""
    made, places = list[Handle](), dict[object, int]()
    lanes = np.array([
        places.setdefault(i if g.config.device is None else (g.config.device,), len(places))
        for i, g in enumerate(groups)
    ], np.int64)  # fmt: skip
    hosts = np.array([[name in g.config.models for g in groups] for name in models], np.int64)
    hosts = hosts.reshape(len(models), len(groups))
    count = np.bincount(requests.models, minlength=len(models))
    linear = np.zeros((len(groups), max((len(g.step_time.linear) for g in groups), default=0)))
    for index, g in enumerate(groups):
        config, mine = g.config, hosts[requests.models, index] > 0
        limits = config.scheduler
        longest = int((requests.prompts + requests.outputs)[mine].max(initial=1))
        most = limits.most_blocks or limits.num_blocks
        table = max(1, min(most, max(longest, limits.max_model_len or 0) // limits.block_size + 1))
        slots = max(1, int(count[hosts[:, index] > 0].sum()))
        adaptive = bool(g.drafts and g.drafts.adaptive)
        state = make_state(limits, policy(config.policy), config.pipeline, config.budget, adaptive, slots, table)
        made.append(Handle(state))
        linear[index, : len(g.step_time.linear)] = g.step_time.linear
    states = np.array([handle.address for handle in made], np.int64)
    rules = np.array([(policy(g.config.policy).by_goal, g.config.admission) for g in groups], np.int64).reshape(-1, 2)
    times = Times(
        linear, np.array([len(g.step_time.linear) for g in groups], np.int64),
        np.array([g.step_time.terms for g in groups]).reshape(-1, 6), np.array([g.share for g in groups]),
        np.array([g.overhead_s for g in groups]), np.array([one for g in groups for one in g.spread], np.float64),
        np.cumsum([0, *(len(g.spread) for g in groups)]),
    )  # fmt: skip
    network = Network(states, lanes, hosts, rules)
    most = max((len(handle.state.numbers) for handle in made), default=0)
    drafts = of_groups([g.drafts for g in groups], [g.step_time for g in groups], most)
    found = _run(network, times, drafts, _lenders(groups, states, lanes), _residents(groups, lanes), requests)
    return Result(*found)


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


@part
def _take_tokens(
    s: State, at: int, now: float, gaps: NDArray[np.float32], gap_end: int, first: Floats, finish: Floats, tokens: Ints
) -> int:  # fmt: skip
    """Slices have given as many tokens as `emits` says, and some end with it. Returns where the gaps between tokens end
    now."""
    numbers, times, step, emits = s.numbers, s.times, s.steps[at], s.emits[at]
    for i in range(s.sizes[at]):
        if emits[i] == 0:
            continue
        slot = step[SLOT, i]
        known, r = numbers[slot, KNOWN], numbers[slot, TAG]
        if known == numbers[slot, ASKED] + 1:
            first[r] = times[slot, LAST] = now
        else:
            for _ in range(emits[i]):
                gaps[gap_end] = now - times[slot, LAST]
                gap_end += 1
                times[slot, LAST] = now
        if known == numbers[slot, LIMIT]:
            finish[r], tokens[r] = now, known - numbers[slot, ASKED]
            end(s, slot)
    return gap_end


@part
def _lacking(s: State, more: int) -> int:
    """Blocks that the running sequences do not hold yet for so many tokens more each."""
    count, size = 0, s.limits[BLOCK_SIZE]
    for i in range(s.now[RUNNING]):
        slot = s.running[i]
        count += max(0, (s.numbers[slot, COMPUTED] + more + size - 1) // size - s.numbers[slot, HELD])
    return count


@part
def drawn(spread: Floats, g: int, number: int) -> float:
    """What step `number` of a group takes over what steps of its shape take."""
    return spread[int(chance(number, g) * len(spread))] if len(spread) > 0 else 1.0


@part
def _decode_on(
    s: State, linear: Floats, terms: Floats, share: float, more: float, spread: Floats, g: int, number: int, now: float,
    until: float, gaps: NDArray[np.float32], gap_end: int, clocks: Floats, took: Floats, left: Floats,
) -> tuple[float, int, int]:  # fmt: skip
    """Steps of nothing but the decodes that run, which no policy composes otherwise, as long as nobody ends, there are
    blocks, and nothing else happens: those that are done by `until`, all at once. For groups with one stage. `number`:
    of steps before.

    Returns the time, where the gaps end, and how many steps there were: what they took is in `took` and `left`, as far
    as there is room.
    """
    numbers, times, size, count, running = s.numbers, s.times, s.limits[BLOCK_SIZE], 0, s.now[RUNNING]
    if running == 0 or num_waiting(s) + s.now[PROMPTS] + s.now[DRAFTING] > 0 or s.limits[PIPELINE] > 1:
        return now, gap_end, 0
    while now < until and count < len(took):
        context, most = 0, len(took) - count  # steps up to where somebody ends, or blocks are short
        for i in range(running):
            slot = s.running[i]
            context += numbers[slot, COMPUTED]
            most = min(most, numbers[slot, LIMIT] - numbers[slot, KNOWN] - 1)
        while most > 0 and _lacking(s, most) > num_free(s):
            most //= 2
        latency = share * seconds(linear, terms, (running, running, running, context, 0, 0, 0))
        latency = latency * drawn(spread, g, number + count) + more
        end_time = max(now, clocks[0]) + latency
        if most == 0 or end_time > until:
            break
        for i in range(running):
            gaps[gap_end + i] = end_time - times[s.running[i], LAST]
        made = 0
        while True:
            took[count + made], left[count + made, 0] = latency, end_time
            now, context, gap_end, made = end_time, context + running, gap_end + running, made + 1
            latency = share * seconds(linear, terms, (running, running, running, context, 0, 0, 0))
            latency = latency * drawn(spread, g, number + count + made) + more
            end_time = now + latency
            if made == most or end_time > until:
                break
            for i in range(running):
                gaps[gap_end + i] = end_time - now
        for i in range(running):
            slot = s.running[i]
            numbers[slot, SCHEDULED] = numbers[slot, COMPUTED] = numbers[slot, COMPUTED] + made
            numbers[slot, KNOWN] += made
            times[slot, LAST] = now
            lacks = (numbers[slot, COMPUTED] + size - 1) // size - numbers[slot, HELD]
            if lacks > 0:
                take(s, slot, lacks)
        count += made
        clocks[0] = s.factors[LANDED] = now
        s.now[CHUNKS_LAST] = 0
    return now, gap_end, count


@part
def _has_device(groups: Ints, lanes: Ints, g: int) -> bool:
    """Nobody else with whom the group shares its device has anything to do."""
    for other in range(len(groups)):
        if other != g and lanes[other] == lanes[g]:
            s = state_at(groups[other])
            if num_waiting(s) + s.now[RUNNING] > 0:
                return False
    return True


@part
def _host(
    network: Network, there: Residents, able: Bools, size: int, arrival: float, ttft: float, expected: Floats,
    queued: Ints,
) -> int:  # fmt: skip
    """Of the groups that are able to take a request the one that is to (`Controller.submit`); -1: none is. `expected`
    and `queued` [groups] are filled in."""
    count = len(able)
    narrow(able, there.up, there.resident)
    for g in range(count):
        queued[g], expected[g] = 0, 0.0
        if not able[g]:
            continue
        s = state_at(network.states[g])
        queued[g] = num_waiting(s) + s.now[RUNNING]
        if network.rules[g, 1] > 0:
            others = 0.0
            for other in range(count):
                if other != g and network.lanes[other] == network.lanes[g]:
                    others += turn(state_at(network.states[other]))
            expected[g] = first_token(s, size, wanted(arrival, ttft, network.rules[g, 0] > 0), others)
            if not there.up[g] and expected[g] > 0:
                expected[g] += loading(there.load_s[g], there.resident[g], there.since[g], arrival)
    return soonest(expected, queued, able)


@part
def _lose(
    network: Network, drafts: Drafts, there: Residents, requests: Requests, gone: int, able: Bools, expected: Floats,
    queued: Ints, dirty: Bools,
) -> None:  # fmt: skip
    """A group's model leaves its device: its sequences start over, at other groups that have it or when it is back."""
    s = state_at(network.states[gone])
    there.resident[gone] = there.up[gone] = False
    reset(s)
    dirty[network.lanes[gone]] = True
    waiting = s.waiting[s.now[HEAD] : s.now[TAIL]].copy()
    for slot in waiting:
        r, known = s.numbers[slot, TAG], s.numbers[slot, KNOWN]
        for g in range(len(able)):
            t = state_at(network.states[g])
            able[g] = (
                g != gone and there.up[g] and network.hosts[requests.models[r], g] > 0
                and fits(t, requests.prompts[r], requests.outputs[r])
            )  # fmt: skip
        g = _host(
            network, there, able, requests.prompts[r], requests.arrivals[r], requests.ttft[r], expected, queued
        )
        if g >= 0:
            t = state_at(network.states[g])
            taken = _add(network, drafts, requests, g, r)
            t.numbers[taken, KNOWN] = t.numbers[taken, PROMPT] = known
            t.times[taken, LAST] = s.times[slot, LAST]
            end(s, slot)
            dirty[network.lanes[g]] = True


@part
def _add(network: Network, drafts: Drafts, requests: Requests, g: int, r: int) -> int:
    """A request waits in a group from now on. Returns its slot."""
    s, place = state_at(network.states[g]), wanted(requests.arrivals[r], requests.ttft[r], network.rules[g, 0] > 0)
    most = drafts.most[g]
    slot = add(s, requests.prompts[r], requests.outputs[r], requests.arrivals[r], place, requests.tbt[r], most)
    s.numbers[slot, TAG] = r
    if most > 0:
        drafts.counts[g, slot] = 0.0
    return slot


@part
def _swap(
    network: Network, drafts: Drafts, there: Residents, requests: Requests, lane: int, now: float, able: Bools,
    expected: Floats, queued: Ints, dirty: Bools,
) -> None:  # fmt: skip
    """Has models loaded that are asked for, where the device does not hold all (`Controller._swap`)."""
    count, loaded = len(able), 0
    first, used, mine = np.full(count, np.inf), np.zeros(count), np.zeros(count, np.bool_)
    for g in range(count):
        if network.lanes[g] == lane:
            s = state_at(network.states[g])
            loaded += there.resident[g]
            for k in range(s.now[HEAD], s.now[TAIL] if not there.resident[g] else 0):
                first[g] = min(first[g], s.times[s.waiting[k], ARRIVAL])
    while True:
        i = np.argmin(first)
        if first[i] == np.inf:
            return
        if loaded >= there.slots[lane]:
            for g in range(count):
                s = state_at(network.states[g])
                mine[g] = network.lanes[g] == lane and there.resident[g] and there.up[g]
                queued[g], used[g] = num_waiting(s) + s.now[RUNNING], s.factors[LANDED]
            gone = gives_way(mine, queued, used, there.came, there.emitted, now - first[i], now)
            if gone < 0:
                return
            _lose(network, drafts, there, requests, gone, able, expected, queued, dirty)
            loaded -= 1
        there.resident[i], there.since[i], there.back[i], first[i] = True, now, now + there.load_s[i], np.inf
        loaded += 1


@entry(
    tuple_of(
        INTS, FLOATS, FLOATS, INTS, types.Array(types.float32, 1, "C"), INTS, types.Array(types.int32, 2, "C"), FLOATS,
        FLOATS, FLOATS_2D,
    ),
    *(
        types.NamedTuple(fields, kind)  # type: ignore[no-untyped-call]
        for fields, kind in (
            ((INTS, INTS, INTS_2D, INTS_2D), Network),
            ((FLOATS_2D, INTS, FLOATS_2D, FLOATS, FLOATS, FLOATS, INTS), Times),
            (
                (INTS, FLOATS, FLOATS, INTS, FLOATS_2D, types.Array(types.float64, 4, "C"),
                 types.Array(types.float64, 3, "C"), FLOATS), Drafts,
            ),
            ((INTS, INTS_2D, INTS, INTS), Lenders),
            ((INTS, FLOATS, BOOLS, BOOLS, FLOATS, FLOATS, FLOATS, FLOATS), Residents),
            ((FLOATS, INTS, INTS, INTS, FLOATS, FLOATS), Requests),
        )
    ),
)
def _run(network, times, drafts, lenders, there, requests):  # type: ignore[no-untyped-def]
    groups, lanes, hosts, rules = network
    count, num_lanes, arrivals, outputs = len(groups), len(there.slots), requests.arrivals, requests.outputs
    stages, deepest, members = 1, np.zeros(num_lanes, np.int64), np.zeros(num_lanes, np.int64)
    model_of = np.zeros(count, np.int64)
    for g in range(count):
        s = state_at(groups[g])
        stages = max(stages, s.limits[PIPELINE])
        # a device has as many batches in flight as the deepest of its groups has stages
        members[lanes[g]] += 1
        deepest[lanes[g]] = max(deepest[lanes[g]], s.limits[PIPELINE])
        for m in range(hosts.shape[0]):
            model_of[g] = m if hosts[m, g] > 0 else model_of[g]
    clocks, row = np.zeros((num_lanes, stages)), np.zeros(stages)
    # batches in flight, first in first out: a ring for each group
    head, flying = np.zeros(count, np.int64), np.zeros(count, np.int64)
    ends = np.zeros((count, stages))
    enters = np.full(count, np.inf)  # when the batch that is in the first of several stages leaves it
    total = len(arrivals)
    owner, first, finish = np.full(total, -1), np.full(total, np.nan), np.full(total, np.nan)
    tokens = np.zeros(total, np.int64)
    gap_ends = np.zeros(hosts.shape[0] + 1, np.int64)
    for i in range(total):
        gap_ends[requests.models[i] + 1] += outputs[i]
    gap_ends = np.cumsum(gap_ends)[:-1]
    gaps = np.empty(outputs.sum(), np.float32)
    room, num_steps = 1024 + outputs.sum(), 0  # pages that are never used take no memory
    steps, took, left = np.empty((room, 2), np.int32), np.empty(room), np.empty((room, stages))
    spent = np.empty(room if drafts.most.sum() > 0 else 0)  # for drafting, in the first stage
    queued, able, tried = np.zeros(count, np.int64), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    served, num_turns, numbers = np.zeros(count, np.int64), 0, np.zeros(count, np.int64)  # of steps
    expected, due = np.zeros(count), np.zeros(count)
    dirty, r = np.zeros(len(clocks), np.bool_), 0
    wakes = np.full(count, np.inf)  # up to when a group's steps are known already
    swapping = there.slots.max() > 0 if num_lanes > 0 else False
    while True:
        now = arrivals[r] if r < total else np.inf
        for g in range(count):
            if flying[g] > 0:
                now = min(now, ends[g, head[g]], enters[g])
            now = min(now, wakes[g], there.back[g])
        if now == np.inf:
            break
        for g in range(count):
            if wakes[g] == now:
                wakes[g], dirty[lanes[g]] = np.inf, True
            if flying[g] == 0 or (ends[g, head[g]] > now and enters[g] > now):
                continue
            s = state_at(groups[g])
            while flying[g] > 0 and ends[g, head[g]] == now:
                s.factors[LANDED] = now
                at = head[g]
                batch, m = s.now[NEXT_BATCH] - flying[g], model_of[g]
                place = batch % s.limits[PIPELINE]
                if drafts.most[g] > 0:
                    judge(drafts, g, s, place)
                if land(s, batch, s.emits[place]) > 0:
                    there.emitted[g] = now
                gap_ends[m] = _take_tokens(s, place, now, gaps, gap_ends[m], first, finish, tokens)
                head[g], flying[g] = (at + 1) % stages, flying[g] - 1
                dirty[lanes[g]] = True
            if enters[g] == now:
                leave_first_stage(s, s.now[ENTERING])
                dirty[lanes[g]] = True
            if s.now[ENTERING] < 0:
                enters[g] = np.inf
            if flying[g] == 0 and lenders.place[g] < 0 and not swapping and _has_device(groups, lanes, g):
                until, m, lane = arrivals[r] if r < total else np.inf, model_of[g], lanes[g]
                if num_steps + 64 > len(took):
                    steps, took = np.concatenate((steps, steps)), np.concatenate((took, took))
                    left, spent = np.concatenate((left, left)), np.concatenate((spent, spent))
                until_then, gap_ends[m], more = _decode_on(
                    s, times.linear[g, : times.lengths[g]], times.terms[g], times.shares[g], times.overheads[g],
                    times.spreads[times.ends[g] : times.ends[g + 1]], g, numbers[g], now, until, gaps, gap_ends[m],
                    clocks[lane], took[num_steps:], left[num_steps:],
                )  # fmt: skip
                numbers[g] += more
                steps[num_steps : num_steps + more, 0], steps[num_steps : num_steps + more, 1] = g, s.now[RUNNING]
                spent[num_steps : num_steps + more] = 0.0
                num_steps += more
                if more > 0:
                    wakes[g], dirty[lane] = until_then, False
        for g in range(count):
            if there.back[g] == now:
                there.up[g], there.came[g], there.back[g], dirty[lanes[g]] = True, now, np.inf, True
        while r < total and arrivals[r] == now:
            for g in range(count):
                s = state_at(groups[g])
                able[g] = hosts[requests.models[r], g] > 0 and fits(s, requests.prompts[r], outputs[r])
            g = _host(network, there, able, requests.prompts[r], now, requests.ttft[r], expected, queued)
            if g >= 0 and expected[g] > (
                requests.ttft[r] if expected[g] < np.inf else state_at(groups[g]).factors[GOAL]
            ):
                g = -1
            owner[r] = g
            if g < 0:
                finish[r] = now
            else:
                _add(network, drafts, requests, g, r)
                dirty[lanes[g]] = True
            r += 1
        lane = 0
        while lane < num_lanes:  # the first with something to do, which may have been passed already
            if not dirty[lane]:
                lane += 1
                continue
            dirty[lane], going = False, True
            if there.slots[lane] > 0:
                _swap(network, drafts, there, requests, lane, now, able, expected, queued, dirty)
                for g in range(count):
                    if not there.up[g]:  # its batches are lost
                        flying[g], enters[g] = 0, np.inf
            while going:
                in_flight, horizon, going = 0, now, False
                alone = members[lane] == 1
                for g in range(count):
                    tried[g] = lanes[g] != lane
                    if not tried[g]:
                        in_flight += flying[g]
                        if not alone:
                            due[g] = next_due(state_at(groups[g]))
                            horizon += turn(state_at(groups[g]))
                g = next_in_turn(served, due, horizon, tried) if in_flight < deepest[lane] else -1
                while g >= 0:
                    s = state_at(groups[g])
                    begin, end = lenders.begins[lane], lenders.begins[lane + 1]
                    if lenders.place[g] >= 0 and num_waiting(s) + s.now[RUNNING] > 0:
                        share_out(lenders.states[begin:end], lenders.sizes[begin:end], lenders.place[g] - begin)
                    if drafts.most[g] > 0:
                        draft(drafts, g, s)
                    width = compose(s) if there.up[g] else 0
                    if width > 0:
                        num_turns += 1
                        served[g] = num_turns
                        at = (head[g] + flying[g]) % stages
                        shape = s.shape
                        latency = times.shares[g] * seconds(
                            times.linear[g, : times.lengths[g]], times.terms[g],
                            (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]),
                        )  # fmt: skip
                        spread = times.spreads[times.ends[g] : times.ends[g + 1]]
                        latency = latency * drawn(spread, g, numbers[g]) + times.overheads[g]
                        numbers[g] += 1
                        if num_steps == len(took):
                            steps, took = np.concatenate((steps, steps)), np.concatenate((took, took))
                            left, spent = np.concatenate((left, left)), np.concatenate((spent, spent))
                        for k in range(stages):
                            row[k] = latency
                        if len(spent) > 0:
                            place = (s.now[NEXT_BATCH] - 1) % s.limits[PIPELINE]
                            spent[num_steps] = seconds_of_drafts(drafts, g, s, place, width)
                            row[0] += spent[num_steps]
                        ends[g, at] = enter(clocks[lane], row, s.limits[PIPELINE], now)
                        flying[g] += 1
                        if s.now[ENTERING] >= 0 and s.limits[PIPELINE] > 1:
                            enters[g] = clocks[lane, 0]
                        steps[num_steps, 0], steps[num_steps, 1], took[num_steps] = g, shape[0], latency
                        for k in range(stages):
                            left[num_steps, k] = clocks[lane, k]
                        num_steps += 1
                        going = True  # perhaps there is room for another
                        break
                    tried[g] = True
                    g = next_in_turn(served, due, horizon, tried)
            lane = 0
    return (
        owner, first, finish, tokens, gaps, gap_ends, steps[:num_steps], took[:num_steps], spent[:num_steps],
        left[:num_steps],
    )  # fmt: skip

