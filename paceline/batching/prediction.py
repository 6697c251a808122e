"""What a group expects of itself: what its next step takes, and when a new prompt would have its first token.

AlpaServe admits a one-shot request by the time at which it would be finished, which is known when it arrives (section
4.3). Here others' outputs are of unknown length. What is known is the work before the first token: prompts that come
first, in steps that all running sequences are part of by then. It errs on the side of late.
"""

# mypy: disable-error-code=no-any-return

import math

import numpy as np

from paceline.batching.blocks import blocks_for, num_free
from paceline.batching.budget import add_chunk, seconds_at_pace, widest_of
from paceline.batching.moves import left_of, num_waiting, ring, within
from paceline.batching.pace import share_of
from paceline.batching.policies import PREFILL_FIRST, done, even_share, joins, seconds_of_whole, spreads
from paceline.batching.state import (
    BESIDE,
    FLYING,
    GOAL,
    HEAD,
    MARGIN,
    MAX_BATCH,
    MAX_PROMPT_TOKENS,
    NEXT_BATCH,
    NONE,
    PACE,
    PIPELINE,
    POLICY,
    RUNNING,
    STATE,
    TAIL,
    TOKEN_BUDGET,
    WAITS,
    WANTED,
    State,
)
from paceline.compiled import F64, I64, entry, making, part, tuple_of
from paceline.core.request import HELD, IN_FLIGHT, KNOWN, LIMIT, PROMPT, SCHEDULED

Way = tuple[float, float, float, float]
Ways = tuple[float, float, float, float, float, float]
NOBODY: Ways = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
RESERVE = 0.25  # of the time until a first token, where several models share a device that is busy all the time
WIDENS = 0.13  # by prompts that come meanwhile, and widen steps that prompts are spread over


@making
def step(s: State, decodes: int, context: int, pending: int, whole: int, behind: int) -> tuple[int, float]:
    """Prompt tokens and seconds of a step with these decodes, that read so many tokens, or its share of them in a
    pipeline, and what it takes of the prompts, of which so many tokens are left, of so many, each `behind` so many
    others on average; 0 seconds where nobody has measured steps."""
    if len(s.linear) == 0:
        return min(pending, s.limits[TOKEN_BUDGET]), 0.0
    shape, prompts, chunk, stages = np.zeros(7, np.int64), np.zeros((1, 2), np.int64), 0, s.limits[PIPELINE]
    decodes = (decodes + stages - 1) // stages
    shape[0] = shape[1] = shape[2] = decodes
    shape[3] = context // stages
    if pending > 0:
        prompts[0, 0], prompts[0, 1] = behind, pending
        goal = s.factors[GOAL] if decodes > 0 else NONE
        width = widest_of(s, within(s, goal) / s.factors[PACE], shape, prompts)
        chunk = min(pending, max(1, min(width, s.limits[TOKEN_BUDGET]) - decodes))
        if spreads(s):
            chunk = even_share(s, decodes, whole, chunk)
        add_chunk(shape, max(0, behind - chunk // 2), chunk, True)
    return chunk, seconds_at_pace(s, (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]))


@part
def whole_step(
    s: State, at: int, begin: float, free: float, tokens: int, wanted: float
) -> tuple[int, bool, float]:  # fmt: skip
    """A step of `prefill_first` that begins then (`policies.joins`), of waiting prompts from this place of the queue on
    and, in its place, one more that is `wanted` (of no tokens: there is none). Where in the queue the next step begins,
    whether that prompt is in this one, which ends with it then, and its seconds."""
    count, width, pairs, due, new = 0, 0, 0, 0.0, tokens == 0
    while not new or (tokens == 0 and at < s.now[TAIL]):
        comes = tokens > 0 and (at == s.now[TAIL] or s.times[s.waiting[at], WANTED] > wanted)
        length = tokens if comes else s.numbers[s.waiting[at], KNOWN]
        if not joins(s, count, width, pairs, length, begin, free, due):
            break
        if count == 0:
            due = wanted if comes else s.times[s.waiting[at], WANTED]
        count, width, pairs = count + 1, width + length, pairs + length * (length + 1) // 2
        new, at = new or comes, at if comes else at + 1
    return at, new, seconds_of_whole(s, count, width, pairs)


@part
def whole_steps(s: State, begin: float, free: float, tokens: int, wanted: float, others: float) -> float:
    """When the step of `prefill_first` is done that has a new prompt: the first begins then, with `others` between two.

    A pipeline takes no more steps than it has stages, so short ones follow a long one at its pace.
    """
    at, came, stages = s.now[HEAD], False, s.limits[PIPELINE]
    longest = s.clocks[stages - 1] - s.clocks[stages - 2] if stages > 1 and s.now[FLYING] > 0 else 0.0
    while not came:
        at, came, took = whole_step(s, at, begin, free, tokens, wanted)
        longest, free = max(longest, took), done(s, begin, free, took)
        begin += (took if stages == 1 else longest) + others
    return free


@part
def turn(s: State, now: float) -> tuple[int, float]:
    """Prompt tokens and seconds of the next step; 0 seconds where there is nothing to do, or nobody has measured steps.
    """
    decodes = context = pending = whole = behind = 0
    for i in range(s.now[RUNNING]):
        slot = s.running[i]
        left = s.numbers[slot, PROMPT] - s.numbers[slot, SCHEDULED]
        if left > 0:
            pending, whole = pending + left, whole + s.numbers[slot, PROMPT]
            behind += left * (s.numbers[slot, SCHEDULED] + left // 2)
        elif s.numbers[slot, LIMIT] - s.numbers[slot, KNOWN] > min(1, s.numbers[slot, IN_FLIGHT]):
            decodes += 1
            context += s.numbers[slot, KNOWN]
    if s.limits[POLICY] == PREFILL_FIRST and num_waiting(s) > 0:
        begin, free = now + left_of_flight(s, now), s.clocks[s.limits[PIPELINE] - 1]
        return s.limits[MAX_PROMPT_TOKENS], whole_step(s, s.now[HEAD], begin, free, 0, 0.0)[2]
    for i in range(s.now[HEAD], s.now[TAIL]):
        known = s.numbers[s.waiting[i], KNOWN]
        pending, whole, behind = pending + known, whole + known, behind + known * known // 2
    return step(s, decodes, context, pending, whole, behind // max(1, pending)) if decodes + pending > 0 else (0, 0.0)


@part
def left_of_flight(s: State, now: float) -> float:
    """Seconds until there may be another step."""
    if s.now[FLYING] == 0:
        return 0.0
    full = s.now[FLYING] >= ring(s)
    return max(0.0, max(s.clocks[0], s.ends[s.now[NEXT_BATCH] % ring(s)] if full else 0.0) - now)


@part
def in_the_way(s: State, now: float) -> Way:
    """Of another group on the same device: seconds until its steps in flight have left the first stage, and the last,
    those of its next one, and its share of the device's time of late."""
    left = gone = 0.0
    if s.now[FLYING] > 0:
        left, gone = max(0.0, s.clocks[0] - now), max(0.0, s.clocks[s.limits[PIPELINE] - 1] - now)
    return left, gone, turn(s, now)[1], share_of(s, now)


@part
def with_another(ways: Ways, way: Way) -> Ways:
    """What several groups on the device are to this one: `first_token`'s arguments from `ahead` on."""
    (ahead, last, before, others, longest, shares), (left, gone, seconds, share) = ways, way
    before += 0.0 if gone > 0 else seconds
    return max(ahead, left), max(last, gone), before, others + seconds, max(longest, seconds), shares + share


@part
def between_tokens(s: State, tokens: int) -> float:
    """Seconds between tokens of a prompt of so many, which comes now, when all that are here decode: in the engine, and
    for others' turns."""
    decodes, context = _together(s)
    return _between(s, decodes + 1, context + tokens)


@part
def _between(s: State, decodes: int, context: int) -> float:
    return s.limits[PIPELINE] * (step(s, decodes, context, 0, 0, 0)[1] - s.factors[BESIDE]) + s.factors[WAITS]


@part
def _together(s: State) -> tuple[int, int]:
    """All that are here as decodes beside one more, and the tokens that they read."""
    numbers, count, context = s.numbers, 0, 0
    for i in range(s.now[RUNNING] + num_waiting(s)):
        slot = s.running[i] if i < s.now[RUNNING] else s.waiting[s.now[HEAD] + i - s.now[RUNNING]]
        if numbers[slot, LIMIT] - numbers[slot, KNOWN] > 1:  # else it ends with its next token
            count += 1
            context += numbers[slot, KNOWN]
    return min(count, s.limits[MAX_BATCH] - 1), context


@part
def first_token(
    s: State, tokens: int, cached: int, wanted: float, tbt: float, now: float, ahead: float, last: float,
    before: float, others: float, longest: float, share: float,
) -> float:  # fmt: skip
    """Seconds until a prompt of so many tokens, which comes now, would have its first token; 0: nobody knows. The cache
    has so many of them.

    `wanted` is its place among prompts. Of the other groups on the device (`in_the_way`): seconds until their steps are
    done, and have left the `last` stage; those that the turns take of the ones which have none, which come `before`
    this one's; those of all of them, between two steps of this one, if that is more than of late; of the `longest`,
    behind which this one's goes through a pipeline; and their `share` of its time of late. As busy as the device has
    been with all of them, so much is kept of the time for what may come there: a busy one has a queue as long as may be
    anyway, and an idle one takes a burst whole. Infinite where the group's goal between tokens, or the prompt's own
    (`tbt`), would not be held.
    """
    if len(s.linear) == 0:
        return 0.0
    counts, numbers, others = s.now, s.numbers, max(others, s.factors[WAITS])
    decodes, context = _together(s)
    if _between(s, decodes + 1, context + tokens) > min(s.factors[GOAL], tbt):
        return np.inf
    pending, needed = tokens - cached, blocks_for(s, tokens)
    whole, behind = pending, pending * (cached + pending // 2)
    for i in range(counts[RUNNING]):
        slot = s.running[i]
        left = numbers[slot, PROMPT] - numbers[slot, SCHEDULED]
        if left > 0:
            whole += numbers[slot, PROMPT]
            if s.times[slot, WANTED] <= wanted:
                pending += left
                behind += left * (numbers[slot, SCHEDULED] + left // 2)
    for i in range(counts[HEAD], counts[TAIL]):
        slot = s.waiting[i]
        whole += numbers[slot, KNOWN]
        if s.times[slot, WANTED] <= wanted:
            found, left = left_of(s, slot)
            pending += left
            behind += left * (found + left // 2)
            needed += blocks_for(s, numbers[slot, KNOWN])
    rest = _until_room(s, counts[RUNNING] + num_waiting(s) + 1 - s.limits[MAX_BATCH], needed - num_free(s))
    stages, begin = s.limits[PIPELINE], max(left_of_flight(s, now), ahead)
    begin += others if counts[FLYING] > 0 else before
    free, steps = max(s.clocks[stages - 1] - now, last), 1
    if s.limits[POLICY] == PREFILL_FIRST:
        took = whole_steps(s, now + begin, now + free, tokens - cached, wanted, others) - now
        if rest > 0:
            took += rest * (step(s, decodes, context, 0, 0, 0)[1] + others)
    else:
        chunk, each = step(s, decodes, context, pending, whole, behind // pending)
        steps = -(-pending // chunk) + rest
        took = max(begin + (stages - 1) * max(each, longest), free) + steps * (each + others) - others
        took *= 1 + (WIDENS if spreads(s) else 0.0)
    margin = s.factors[MARGIN] / math.sqrt(steps)  # which is of one step: the sum of several varies less
    return took * (1 + margin) / (1 - RESERVE * min(1.0, share + share_of(s, now) if share > 0 else 0.0))


@making
def _until_room(s: State, places: int, blocks: int) -> int:
    """Steps until so many running sequences have ended, with so many blocks, if all become as long as they may."""
    if places <= 0 and blocks <= 0:
        return 0
    running = s.running[: s.now[RUNNING]]
    left = np.zeros(len(running), np.int64)
    for i in range(len(running)):
        left[i] = s.numbers[running[i], LIMIT] - s.numbers[running[i], KNOWN]
    longest = 0
    for i in np.argsort(left):
        longest = left[i]
        places -= 1
        blocks -= s.numbers[running[i], HELD]
        if places <= 0 and blocks <= 0:
            break
    return longest


expected_in_the_way = entry(tuple_of(F64, F64, F64, F64), STATE, F64)(in_the_way)
next_turn = entry(tuple_of(I64, F64), STATE, F64)(turn)
seconds_to_first_token = entry(F64, STATE, I64, I64, *[F64] * 9)(first_token)
seconds_between_tokens = entry(F64, STATE, I64)(between_tokens)
