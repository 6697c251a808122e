"""Autoregressive requests through groups in virtual time, as one compiled loop.

What decides is what decides live: the scheduler (`batching`), and the rules of `batching.sharing` for dispatch and for
groups that share a device. What is new here is only what `simulator.driver` does, too: the next instant, and at each
completions first, in the order of the groups, then arrivals, then new steps; and that runs of nothing but decodes, in
which there is nothing to decide, go on by themselves. A test holds the two to the same tokens at the same times, for
every policy; this one is a hundred times as fast, so that planners can ask it.
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
from paceline.batching.compiled import FLOATS, FLOATS_2D, I64, INTS, INTS_2D, Handle, entry, part, state_at, tuple_of
from paceline.batching.moves import add, end, fits, num_waiting
from paceline.batching.policies import compose, land, leave_first_stage, policy, wanted
from paceline.batching.prediction import first_token, turn
from paceline.batching.scheduler import make_state
from paceline.batching.sharing import next_due, next_in_turn, soonest
from paceline.batching.state import (
    BLOCK_SIZE,
    ENTERING,
    GOAL,
    LANDED,
    LAST,
    NEXT_BATCH,
    PIPELINE,
    PROMPTS,
    RUNNING,
    SLOT,
    Floats,
    Ints,
    State,
)
from paceline.controller import GroupConfig
from paceline.core.request import ASKED, COMPUTED, HELD, KNOWN, LIMIT, SCHEDULED, TAG
from paceline.latency.step_time import StepTime
from paceline.placement.dispatch import enter


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """One model on the devices of one group."""

    config: GroupConfig  # one model; `device`: of groups that share theirs
    step_time: StepTime
    share: float = 1.0  # of a step's time that each stage takes


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


class Result(NamedTuple):
    """What became of them; and of each step its group, tokens, seconds in a stage and when it left each stage, those of
    a group in order."""

    owner: Ints  # group; -1: nobody could take it
    first: Floats  # time of the first token, NaN without one
    finish: Floats
    tokens: Ints
    gaps: NDArray[np.float32]  # between tokens, those of a model side by side
    gap_ends: Ints  # [models] where in `gaps` those of each end; each has room for as many as its tokens
    steps: Ints  # [steps, 2]
    took: Floats  # [steps]
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
        table = max(1, min(limits.num_blocks, max(longest, limits.max_model_len or 0) // limits.block_size + 1))
        slots = max(1, int(count[hosts[:, index] > 0].sum()))
        state = make_state(limits, policy(config.policy), config.pipeline, config.budget, False, slots, table)
        made.append(Handle(state))
        linear[index, : len(g.step_time.linear)] = g.step_time.linear
    states = np.array([handle.address for handle in made], np.int64)
    rules = np.array([(policy(g.config.policy).by_goal, g.config.admission) for g in groups], np.int64).reshape(-1, 2)
    times = Times(
        linear, np.array([len(g.step_time.linear) for g in groups], np.int64),
        np.array([g.step_time.terms for g in groups]).reshape(-1, 6), np.array([g.share for g in groups]),
    )  # fmt: skip
    return Result(*_run(states, times, lanes, len(places), hosts, rules, requests))


@part
def _take_tokens(
    s: State, at: int, now: float, gaps: NDArray[np.float32], gap_end: int, first: Floats, finish: Floats, tokens: Ints
) -> int:  # fmt: skip
    """Slices that emit have given a token each, and some end with it. Returns where the gaps between tokens end now."""
    numbers, times, step, emits = s.numbers, s.times, s.steps[at], s.emits[at]
    for i in range(s.sizes[at]):
        if emits[i] == 0:
            continue
        slot = step[SLOT, i]
        known, r = numbers[slot, KNOWN], numbers[slot, TAG]
        if known == numbers[slot, ASKED] + 1:
            first[r] = now
        else:
            gaps[gap_end] = now - times[slot, LAST]
            gap_end += 1
        times[slot, LAST] = now
        if known == numbers[slot, LIMIT]:
            finish[r], tokens[r] = now, known - numbers[slot, ASKED]
            end(s, slot)
    return gap_end


@part
def _decode_on(
    s: State, linear: Floats, terms: Floats, share: float, now: float, until: float, gaps: NDArray[np.float32],
    gap_end: int, clocks: Floats, took: Floats, left: Floats,
) -> tuple[float, int, int]:  # fmt: skip
    """Steps of nothing but the decodes that run, which no policy composes otherwise, as long as nobody ends, there are
    blocks, and nothing else happens: those that are done by `until`, all at once. For groups with one stage.

    Returns the time, where the gaps end, and how many steps there were: what they took is in `took` and `left`, as far
    as there is room.
    """
    numbers, times, size, count, running = s.numbers, s.times, s.limits[BLOCK_SIZE], 0, s.now[RUNNING]
    if running == 0 or num_waiting(s) > 0 or s.now[PROMPTS] > 0 or s.limits[PIPELINE] > 1:
        return now, gap_end, 0
    while now < until and count < len(took):
        needed, context, ends = 0, 0, False
        for i in range(running):
            slot = s.running[i]
            context += numbers[slot, COMPUTED]
            needed += numbers[slot, COMPUTED] == numbers[slot, HELD] * size
            ends |= numbers[slot, KNOWN] + 1 == numbers[slot, LIMIT]
        latency = share * seconds(linear, terms, (running, running, running, context, 0, 0, 0))
        end_time = max(now, clocks[0]) + latency
        if ends or needed > num_free(s) or end_time > until:
            break
        for i in range(running):
            slot = s.running[i]
            if numbers[slot, COMPUTED] == numbers[slot, HELD] * size:
                take(s, slot, 1)
            numbers[slot, SCHEDULED] = numbers[slot, COMPUTED] = numbers[slot, COMPUTED] + 1
            numbers[slot, KNOWN] += 1
            gaps[gap_end] = end_time - times[slot, LAST]
            gap_end += 1
            times[slot, LAST] = end_time
        clocks[0] = now = s.factors[LANDED] = end_time
        took[count], left[count, 0] = latency, now
        count += 1
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


@entry(
    tuple_of(INTS, FLOATS, FLOATS, INTS, types.Array(types.float32, 1, "C"), INTS, INTS_2D, FLOATS, FLOATS_2D),
    INTS, types.NamedTuple((FLOATS_2D, INTS, FLOATS_2D, FLOATS), Times), INTS, I64, INTS_2D, INTS_2D,  # type: ignore[no-untyped-call]
    types.NamedTuple((FLOATS, INTS, INTS, INTS, FLOATS, FLOATS), Requests),  # type: ignore[no-untyped-call]
)  # fmt: skip
def _run(groups, times, lanes, num_lanes, hosts, rules, requests):  # type: ignore[no-untyped-def]
    """groups: addresses of their states; lanes [groups]: which of the devices each has; hosts [models, groups]; rules
    [groups, 2]: whether goals order prompts, and whether those that cannot be met are rejected."""
    count, arrivals, outputs = len(groups), requests.arrivals, requests.outputs
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
    steps, took, left = np.empty((room, 2), np.int64), np.empty(room), np.empty((room, stages))
    queued, able, tried = np.zeros(count, np.int64), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    served, num_turns = np.zeros(count, np.int64), 0
    expected, due = np.zeros(count), np.zeros(count)
    dirty, r = np.zeros(len(clocks), np.bool_), 0
    wakes = np.full(count, np.inf)  # up to when a group's steps are known already
    while True:
        now = arrivals[r] if r < total else np.inf
        for g in range(count):
            if flying[g] > 0:
                now = min(now, ends[g, head[g]], enters[g])
            now = min(now, wakes[g])
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
                land(s, batch, s.emits[place])
                gap_ends[m] = _take_tokens(s, place, now, gaps, gap_ends[m], first, finish, tokens)
                head[g], flying[g] = (at + 1) % stages, flying[g] - 1
                dirty[lanes[g]] = True
            if enters[g] == now:
                leave_first_stage(s, s.now[ENTERING])
                dirty[lanes[g]] = True
            if s.now[ENTERING] < 0:
                enters[g] = np.inf
            if flying[g] == 0 and _has_device(groups, lanes, g):
                until, m, lane = arrivals[r] if r < total else np.inf, model_of[g], lanes[g]
                if num_steps + 64 > len(took):
                    steps, took = np.concatenate((steps, steps)), np.concatenate((took, took))
                    left = np.concatenate((left, left))
                until_then, gap_ends[m], more = _decode_on(
                    s, times.linear[g, : times.lengths[g]], times.terms[g], times.shares[g], now, until, gaps,
                    gap_ends[m], clocks[lane], took[num_steps:], left[num_steps:],
                )  # fmt: skip
                steps[num_steps : num_steps + more, 0], steps[num_steps : num_steps + more, 1] = g, s.now[RUNNING]
                num_steps += more
                if more > 0:
                    wakes[g], dirty[lane] = until_then, False
        while r < total and arrivals[r] == now:
            m, size = requests.models[r], requests.prompts[r]
            for g in range(count):
                able[g] = hosts[m, g] > 0 and fits(state_at(groups[g]), size, outputs[r])
                queued[g] = num_waiting(state_at(groups[g])) + state_at(groups[g]).now[RUNNING] if able[g] else 0
                expected[g] = 0.0
                if able[g] and rules[g, 1] > 0:
                    others = 0.0
                    for other in range(count):
                        if other != g and lanes[other] == lanes[g]:
                            others += turn(state_at(groups[other]))
                    place = wanted(now, requests.ttft[r], rules[g, 0] > 0)
                    expected[g] = first_token(state_at(groups[g]), size, place, others)
            g = soonest(expected, queued, able)
            if g >= 0 and expected[g] > (
                requests.ttft[r] if expected[g] < np.inf else state_at(groups[g]).factors[GOAL]
            ):
                g = -1
            owner[r] = g
            if g < 0:
                finish[r] = now
            else:
                s = state_at(groups[g])
                slot = add(
                    s, size, outputs[r], now, wanted(now, requests.ttft[r], rules[g, 0] > 0), requests.tbt[r], 0
                )  # fmt: skip
                s.numbers[slot, TAG] = r
                dirty[lanes[g]] = True
            r += 1
        for lane in range(len(clocks)):
            while dirty[lane]:
                in_flight, horizon = 0, now
                alone = members[lane] == 1
                for g in range(count):
                    tried[g] = lanes[g] != lane
                    if not tried[g]:
                        in_flight += flying[g]
                        if not alone:
                            due[g] = next_due(state_at(groups[g]))
                            horizon += turn(state_at(groups[g]))
                dirty[lane] = False
                g = next_in_turn(served, due, horizon, tried) if in_flight < deepest[lane] else -1
                while g >= 0:
                    s = state_at(groups[g])
                    width = compose(s)
                    if width > 0:
                        num_turns += 1
                        served[g] = num_turns
                        at = (head[g] + flying[g]) % stages
                        shape = s.shape
                        latency = times.shares[g] * seconds(
                            times.linear[g, : times.lengths[g]], times.terms[g],
                            (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]),
                        )  # fmt: skip
                        for k in range(stages):
                            row[k] = latency
                        ends[g, at] = enter(clocks[lane], row, s.limits[PIPELINE], now)
                        flying[g] += 1
                        if s.now[ENTERING] >= 0 and s.limits[PIPELINE] > 1:
                            enters[g] = clocks[lane, 0]
                        if num_steps == len(took):
                            steps, took = np.concatenate((steps, steps)), np.concatenate((took, took))
                            left = np.concatenate((left, left))
                        steps[num_steps, 0], steps[num_steps, 1], took[num_steps] = g, shape[0], latency
                        for k in range(stages):
                            left[num_steps, k] = clocks[lane, k]
                        num_steps += 1
                        dirty[lane] = True  # perhaps there is room for another
                        break
                    tried[g] = True
                    g = next_in_turn(served, due, horizon, tried)
    return (
        owner, first, finish, tokens, gaps, gap_ends, steps[:num_steps], took[:num_steps], left[:num_steps],
    )  # fmt: skip

