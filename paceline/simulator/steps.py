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

import numpy as np

from paceline.batching.blocks import num_free, take
from paceline.batching.budget import seconds, seconds_at_pace
from paceline.batching.lending import share_out
from paceline.batching.moves import add, end, fits, num_waiting, reset
from paceline.batching.pace import forget, learn, learn_beside, learn_share, learn_wait
from paceline.batching.policies import compose, land, leave_first_stage, wanted
from paceline.batching.prediction import NOBODY, first_token, in_the_way, turn, with_another
from paceline.batching.residency import gives_way, loading
from paceline.batching.sharing import full, narrow, next_due, next_in_turn, soonest
from paceline.batching.state import (
    ARRIVAL,
    BEGIN,
    BLOCK_SIZE,
    CHUNKS_LAST,
    DRAFT,
    DRAFTING,
    ENTERING,
    HEAD,
    LANDED,
    LAST,
    NEXT_BATCH,
    PIPELINE,
    PROMPTS,
    RUNNING,
    SLICES,
    SLOT,
    TAIL,
    Floats,
    State,
    state_at,
)
from paceline.compiled import BOOL, I64, entry, part
from paceline.core.request import ASKED, COMPUTED, HELD, KNOWN, LIMIT, PROMPT, SCHEDULED, TAG
from paceline.latency.step_time import WIDTHS
from paceline.placement.dispatch import enter
from paceline.simulator.drafts import chance, draft, judge, seconds_of_drafts
from paceline.simulator.world import (
    COME,
    STEPS,
    TURNS,
    WORLD,
    Flights,
    Requests,
    Served,
    SimulatedGroup,
    Steps,
    World,
    empty_states,
    handle,
    make,
)


def run(groups: Sequence[SimulatedGroup], models: Sequence[str], requests: Requests) -> tuple[Served, Steps]:
    """Simulates until nothing is left to happen. Groups of one model share its requests."""
    states = empty_states(groups, models, requests)
    world = make(groups, models, requests, states)
    # what an instant can bring: stages full of batches, which are lost, and others
    kept = 2 * sum(g.config.pipeline for g in groups)
    while not _run(handle(world), kept):
        world = world._replace(steps=world.steps.with_room())
    return world.outcomes, world.steps.first(int(world.flights.counts[STEPS]))


@part
def _simulate(w: World, kept: int) -> bool:
    """Everything that happens, until nothing is left to; or False: there is no room for `kept` more steps."""
    network, flights, there, counts = w.network, w.flights, w.there, w.flights.counts
    while counts[STEPS] + kept <= len(w.steps.took):
        now = _next_instant(w)
        if now == np.inf:
            return True
        for g in range(len(network.states)):
            if flights.wakes[g] == now:
                flights.wakes[g], flights.dirty[network.lanes[g]] = np.inf, True
            if flights.flying[g] > 0 and (flights.ends[g, flights.head[g]] == now or flights.enters[g] == now):
                _land(w, g, now)
                _decode_on(w, g, now, kept)
        for g in range(len(network.states)):
            if there.back[g] == now:
                there.up[g], there.came[g], there.back[g] = True, now, np.inf
                flights.dirty[network.lanes[g]] = True
        while counts[COME] < len(w.requests.arrivals) and w.requests.arrivals[counts[COME]] == now:
            _arrive(w, counts[COME], now)
            counts[COME] += 1
        lane = _first_dirty(flights)
        while lane >= 0:
            if there.slots[lane] > 0:
                _swap(w, lane, now)
            flights.dirty[lane] = False  # who has just left does not come back before the next turn
            while _compose(w, lane, now):
                pass  # perhaps there is room for another
            lane = _first_dirty(flights)
    return False


@part
def _first_dirty(flights: Flights) -> int:
    """Of the devices on which there may be something to compose the first, though it was looked at before; -1: none."""
    for lane in range(len(flights.dirty)):
        if flights.dirty[lane]:
            return lane
    return -1


# What happens at an instant, in this order


@part
def _next_instant(w: World) -> float:
    """When something happens; infinity: never again."""
    flights, there, come = w.flights, w.there, w.flights.counts[COME]
    now = w.requests.arrivals[come] if come < len(w.requests.arrivals) else np.inf
    for g in range(len(flights.flying)):
        if flights.flying[g] > 0:
            now = min(now, flights.ends[g, flights.head[g]], flights.enters[g])
        now = min(now, flights.wakes[g], there.back[g])
    return now


@part
def _land(w: World, g: int, now: float) -> None:
    """Batches of the group end now, or leave the first of several stages."""
    s, flights, drafts, outcomes = state_at(w.network.states[g]), w.flights, w.drafts, w.outcomes
    flying, ends, enters, m = flights.flying, flights.ends, flights.enters, w.network.model_of[g]
    dirty, lane = flights.dirty, w.network.lanes[g]
    while flying[g] > 0 and ends[g, flights.head[g]] == now:
        s.factors[LANDED] = now
        _learn(s, flights, g, now)
        batch = s.now[NEXT_BATCH] - flying[g]
        place = batch % s.limits[PIPELINE]
        if drafts.most[g] > 0:
            judge(drafts, g, s, place)
        if land(s, batch, s.emits[place]) > 0:
            w.there.emitted[g] = now
        outcomes.gap_ends[m] = _take_tokens(s, place, now, outcomes, outcomes.gap_ends[m])
        flights.head[g] = (flights.head[g] + 1) % ends.shape[1]
        flying[g] -= 1
        dirty[lane] = True
    if enters[g] == now:
        leave_first_stage(s, s.now[ENTERING])
        dirty[lane] = True
    if s.now[ENTERING] < 0:
        enters[g] = np.inf


@part
def _learn(s: State, flights: Flights, g: int, now: float) -> None:
    """From the group's oldest batch, which is done now (`Scheduler.complete`)."""
    at = flights.head[g]
    took = flights.took[g, at]
    if took > 0:
        if flights.predicted[g, at] > 0:
            learn(s, flights.tokens[g, at], flights.predicted[g, at], took)
        if s.limits[PIPELINE] == 1:
            learn_beside(s, now - flights.begun[g, at] - took)


@part
def _take_tokens(s: State, at: int, now: float, outcomes: Served, gap_end: int) -> int:
    """Slices have given as many tokens as `emits` says, and some end with it. Returns where the gaps between tokens end
    now."""
    numbers, times, step, emits, gaps = s.numbers, s.times, s.steps[at], s.emits[at], outcomes.gaps
    for i in range(s.sizes[at]):
        if emits[i] == 0:
            continue
        slot = step[SLOT, i]
        known, r = numbers[slot, KNOWN], numbers[slot, TAG]
        if known == numbers[slot, ASKED] + 1:
            outcomes.first[r] = times[slot, LAST] = now
        else:
            for _ in range(emits[i]):
                gaps[gap_end] = now - times[slot, LAST]
                gap_end += 1
                times[slot, LAST] = now
        if known == numbers[slot, LIMIT]:
            outcomes.finish[r], outcomes.tokens[r] = now, known - numbers[slot, ASKED]
            end(s, slot)
    return gap_end


@part
def _arrive(w: World, r: int, now: float) -> None:
    """A request comes: to the group that is to take it, or it is rejected."""
    network, requests, scratch = w.network, w.requests, w.scratch
    for g in range(len(network.states)):
        s = state_at(network.states[g])
        scratch.able[g] = network.hosts[requests.models[r], g] > 0 and fits(s, requests.prompts[r], requests.outputs[r])
    g = _host(w, r, now)
    if g >= 0 and (scratch.expected[g] > requests.ttft[r] or scratch.expected[g] == np.inf):
        g = -1
    w.outcomes.owner[r] = g
    if g < 0:
        w.outcomes.finish[r] = now
    else:
        _add(w, g, r)
        w.flights.dirty[network.lanes[g]] = True


@part
def _compose(w: World, lane: int, now: float) -> bool:
    """The next step on a device, of the group whose turn it is; False: there is no room for one, or nothing to do."""
    network, flights, scratch, lenders = w.network, w.flights, w.scratch, w.lenders
    in_flight, each, alone = 0, 0.0, network.members[lane] == 1
    for g in range(len(network.states)):
        scratch.tried[g] = network.lanes[g] != lane
        if not scratch.tried[g]:
            in_flight += flights.flying[g]
            if state_at(network.states[g]).now[ENTERING] >= 0:
                return False
    if full(in_flight, network.deepest[lane]):
        return False
    for g in range(0 if alone else len(network.states)):
        if not scratch.tried[g]:
            scratch.chunks[g], seconds_of_it = turn(state_at(network.states[g]), now)
            each += seconds_of_it
    for g in range(0 if alone else len(network.states)):
        if not scratch.tried[g]:
            scratch.due[g] = next_due(state_at(network.states[g]), scratch.chunks[g], each)
    while True:
        g = next_in_turn(flights.served, scratch.due, now + each, scratch.tried)
        if g < 0:
            return False
        s = state_at(network.states[g])
        begin, past = lenders.begins[lane], lenders.begins[lane + 1]
        if lenders.place[g] >= 0 and num_waiting(s) + s.now[RUNNING] > 0:
            share_out(lenders.states[begin:past], lenders.sizes[begin:past], lenders.place[g] - begin)
        if w.there.up[g] and num_waiting(s) + s.now[RUNNING] > 0:
            forget(s, now)
        if w.drafts.most[g] > 0:
            draft(w.drafts, g, s)
        s.factors[BEGIN] = now
        if w.there.up[g] and compose(s) > 0:
            if w.drafts.most[g] > 0:
                w.drafts.rest[g, 0] = max(0, w.drafts.rest[g, 0] - 1)
            _take_off(w, lane, g, now)
            return True
        scratch.tried[g] = True


@part
def _take_off(w: World, lane: int, g: int, now: float) -> None:
    """The step that the group has just composed enters its device."""
    s, flights, steps, times, row = state_at(w.network.states[g]), w.flights, w.steps, w.times, w.scratch.row
    clocks, counts, shape = flights.clocks[lane], flights.counts, s.shape
    counts[TURNS] += 1
    flights.served[g] = counts[TURNS]
    numbers = (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6])
    latency = times.shares[g] * seconds(times.linear[g, : times.lengths[g]], times.terms[g], numbers)
    spread = times.spreads[times.ends[g] : times.ends[g + 1]]
    engine = latency * drawn(spread, g, flights.numbers[g]) * _interference(w, g, shape[0])
    latency = engine + times.overheads[g]
    flights.numbers[g] += 1
    flights.latest[lane] = g
    for k in range(len(row)):
        row[k] = latency
    at, drafting, drafts = counts[STEPS], 0.0, False
    if len(steps.drafting) > 0:
        newest = (s.now[NEXT_BATCH] - 1) % s.limits[PIPELINE]
        drafting = steps.drafting[at] = seconds_of_drafts(w.drafts, g, s, newest, s.now[SLICES])
        drafts = bool(s.steps[newest, DRAFT, : s.now[SLICES]].any())
        row[0] += drafting
    place = (flights.head[g] + flights.flying[g]) % len(row)
    flights.tokens[g, place], flights.begun[g, place], flights.took[g, place] = shape[0], now, 0.0
    if _learns(s, spread):
        flights.took[g, place] = engine + drafting
        flights.predicted[g, place] = 0.0 if drafts else seconds(s.linear, s.terms, numbers)
    flights.ends[g, place] = enter(clocks, row, s.limits[PIPELINE], now)
    flights.flying[g] += 1
    if s.now[ENTERING] >= 0 and s.limits[PIPELINE] > 1:
        flights.enters[g] = clocks[0]
    steps.sizes[at, 0], steps.sizes[at, 1], steps.took[at] = g, shape[0], latency
    for k in range(len(row)):
        steps.left[at, k] = clocks[k]
    counts[STEPS] += 1


@part
def _learns(s: State, spread: Floats) -> bool:
    """Whether the group learns what its steps take, as live: where nothing makes them other than predicted, there is
    nothing to learn."""
    return len(spread) > 0 and len(s.linear) > 0


@part
def _interference(w: World, g: int, tokens: int) -> float:
    """What a step of a group takes over what it takes on average, for what the other devices do, the group's other
    stages included, and whose step was here last."""
    network, flying, lane = w.network, w.flights.flying, w.network.lanes[g]
    others, before, place = False, w.flights.latest[lane] not in (-1, g), -1
    for other in range(len(network.lanes)):
        if flying[other] > 0 and (network.lanes[other] != lane or network.deepest[lane] > 1):
            others = True
    for width in WIDTHS:
        place += tokens >= width
    return w.times.interference[g, (2 * others + before) * len(WIDTHS) + place]


@part
def drawn(spread: Floats, g: int, number: int) -> float:
    """What step `number` of a group takes over what steps of its shape take."""
    return spread[int(chance(number, g) * len(spread))] if len(spread) > 0 else 1.0


# Runs of nothing but decodes


@part
def _decode_on(w: World, g: int, now: float, kept: int) -> None:
    """Steps of nothing but the decodes that run, which no policy composes otherwise, as long as nobody ends, there are
    blocks, and nothing else happens: those that are done by then, all at once. For groups with one stage, which have
    their device for themselves; `kept`: steps for which there has to be room afterwards."""
    s, flights, requests, lane = state_at(w.network.states[g]), w.flights, w.requests, w.network.lanes[g]
    numbers, times, size, running = s.numbers, s.times, s.limits[BLOCK_SIZE], s.now[RUNNING]
    idle = num_waiting(s) + s.now[PROMPTS] + s.now[DRAFTING] == 0
    if not (w.network.steady[g] and flights.flying[g] == 0 and running > 0 and idle and _has_device(w, g)):
        return
    come, number, begin = flights.counts[COME], flights.numbers[g], flights.counts[STEPS]
    until = requests.arrivals[come] if come < len(requests.arrivals) else np.inf
    took, left, sizes, drafting = w.steps.took, w.steps.left, w.steps.sizes, w.steps.drafting
    gaps, gap_end, clocks = w.outcomes.gaps, w.outcomes.gap_ends[w.network.model_of[g]], flights.clocks[lane]
    spread, linear = w.times.spreads[w.times.ends[g] : w.times.ends[g + 1]], w.times.linear[g, : w.times.lengths[g]]
    terms, share, more = w.times.terms[g], w.times.shares[g], w.times.overheads[g]
    count, room, learns = 0, len(took) - kept - begin, _learns(s, spread)
    while now < until and count < room:
        context, most = 0, room - count  # steps up to where somebody ends, or blocks are short
        for i in range(running):
            slot = s.running[i]
            context += numbers[slot, COMPUTED]
            most = min(most, numbers[slot, LIMIT] - numbers[slot, KNOWN] - 1)
        while most > 0 and _lacking(s, most) > num_free(s):
            most //= 2
        engine = share * seconds(linear, terms, (running, running, running, context, 0, 0, 0))
        engine *= drawn(spread, g, number + count)
        latency = engine + more
        end_time = max(now, clocks[0]) + latency
        if most == 0 or end_time > until:
            break
        for i in range(running):
            gaps[gap_end + i] = end_time - times[s.running[i], LAST]
        made = 0
        while True:
            at = begin + count + made
            took[at], left[at, 0], sizes[at, 0], sizes[at, 1] = latency, end_time, g, running
            learn_wait(s, 0.0)
            if w.network.members[lane] > 1:
                learn_share(s, now, seconds_at_pace(s, (running, running, running, context, 0, 0, 0)))
            if learns:
                learn(s, running, seconds(s.linear, s.terms, (running, running, running, context, 0, 0, 0)), engine)
                learn_beside(s, end_time - now - engine)
            now, context, gap_end, made = end_time, context + running, gap_end + running, made + 1
            engine = share * seconds(linear, terms, (running, running, running, context, 0, 0, 0))
            engine *= drawn(spread, g, number + count + made)
            latency = engine + more
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
    if count > 0:
        for at in range(begin, begin + count if len(drafting) > 0 else 0):
            drafting[at] = 0.0
        flights.numbers[g], flights.counts[STEPS] = number + count, begin + count
        w.outcomes.gap_ends[w.network.model_of[g]] = gap_end
        flights.wakes[g], flights.dirty[lane] = now, False


@part
def _lacking(s: State, more: int) -> int:
    """Blocks that the running sequences do not hold yet for so many tokens more each."""
    count, size = 0, s.limits[BLOCK_SIZE]
    for i in range(s.now[RUNNING]):
        slot = s.running[i]
        count += max(0, (s.numbers[slot, COMPUTED] + more + size - 1) // size - s.numbers[slot, HELD])
    return count


@part
def _has_device(w: World, g: int) -> bool:
    """Nobody else with whom the group shares its device has anything to do."""
    states, lanes = w.network.states, w.network.lanes
    for other in range(len(states)):
        if other != g and lanes[other] == lanes[g]:
            s = state_at(states[other])
            if num_waiting(s) + s.now[RUNNING] > 0:
                return False
    return True


# Between groups


@part
def _host(w: World, r: int, now: float) -> int:
    """Of the groups that are `able` to take a request the one that is to (`Controller.submit`); -1: none is."""
    network, there, able, expected, queued = w.network, w.there, w.scratch.able, w.scratch.expected, w.scratch.queued
    arrival, ttft, count = w.requests.arrivals[r], w.requests.ttft[r], len(w.network.states)
    for g in range(count):
        if able[g] and network.rules[g, 1] > 0:
            forget(state_at(network.states[g]), now)
    narrow(able, there.up, there.resident)
    for g in range(count):
        queued[g], expected[g] = 0, 0.0
        if not able[g]:
            continue
        s = state_at(network.states[g])
        queued[g] = num_waiting(s) + s.now[RUNNING]
        if network.rules[g, 1] > 0:
            ways = NOBODY
            for other in range(count):
                if other != g and network.lanes[other] == network.lanes[g]:
                    ways = with_another(ways, in_the_way(state_at(network.states[other]), now))
            place = wanted(arrival, ttft, network.rules[g, 0] > 0)
            tokens = w.requests.prompts[r]
            tbt = w.requests.tbt[r]
            expected[g] = first_token(s, tokens, 0, place, tbt, now, *ways)
            if not there.up[g] and expected[g] > 0:
                expected[g] += loading(there.load_s[g], there.resident[g], there.since[g], now)
    return soonest(expected, queued, able)


@part
def _add(w: World, g: int, r: int) -> int:
    """A request waits in a group from now on. Returns its slot."""
    s, requests, most = state_at(w.network.states[g]), w.requests, w.drafts.most[g]
    place = wanted(requests.arrivals[r], requests.ttft[r], w.network.rules[g, 0] > 0)
    slot = add(s, requests.prompts[r], requests.outputs[r], requests.arrivals[r], place, requests.tbt[r], most)
    s.numbers[slot, TAG] = r
    if most > 0:
        w.drafts.counts[g, slot], w.drafts.unread[g, slot], w.drafts.rest[g, 0] = 0.0, 0, 0
    return slot


@part
def _swap(w: World, lane: int, now: float) -> None:
    """Has models loaded that are asked for, where the device does not hold all (`Controller._swap`)."""
    network, there, first, used, queued = w.network, w.there, w.scratch.waits, w.scratch.used, w.scratch.queued
    count, loaded = len(network.states), 0
    for g in range(count):
        first[g] = np.inf
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
                w.scratch.able[g] = network.lanes[g] == lane and there.resident[g] and there.up[g]
                queued[g], used[g] = num_waiting(s) + s.now[RUNNING], s.factors[LANDED]
            gone = gives_way(w.scratch.able, queued, used, there.came, there.emitted, now - first[i], now)
            if gone < 0:
                return
            _lose(w, gone, now)
            loaded -= 1
        there.resident[i], there.since[i], there.back[i], first[i] = True, now, now + there.load_s[i], np.inf
        loaded += 1


@part
def _lose(w: World, gone: int, now: float) -> None:
    """A group's model leaves its device: its batches are lost, and its sequences start over, at other groups that have
    it or when it is back."""
    network, there, requests, flights = w.network, w.there, w.requests, w.flights
    s = state_at(network.states[gone])
    there.resident[gone] = there.up[gone] = False
    reset(s)
    flights.flying[gone], flights.enters[gone], flights.dirty[network.lanes[gone]] = 0, np.inf, True
    count = num_waiting(s)
    for k in range(count):
        s.listed[k] = s.waiting[s.now[HEAD] + k]
    for k in range(count):
        slot = s.listed[k]
        r, known = s.numbers[slot, TAG], s.numbers[slot, KNOWN]
        for g in range(len(network.states)):
            w.scratch.able[g] = (
                g != gone and there.up[g] and network.hosts[requests.models[r], g] > 0
                and fits(state_at(network.states[g]), requests.prompts[r], requests.outputs[r])
            )  # fmt: skip
        g = _host(w, r, now)
        if g >= 0:
            t, taken = state_at(network.states[g]), _add(w, g, r)
            t.numbers[taken, KNOWN] = t.numbers[taken, PROMPT] = known
            t.times[taken, LAST] = s.times[slot, LAST]
            end(s, slot)
            flights.dirty[network.lanes[g]] = True


_run = entry(BOOL, WORLD, I64)(_simulate)
