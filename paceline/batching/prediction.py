"""What a group expects of itself: what its next step takes, and when a new prompt would have its first token.

AlpaServe admits a one-shot request by the time at which it would be finished, which is known when it arrives (section
4.3). Here others' outputs are of unknown length. What is known is the work before the first token: prompts that come
first, in steps that all running sequences are part of by then. It errs on the side of late.
"""

# mypy: disable-error-code=no-any-return

import numpy as np

from paceline.batching.blocks import blocks_for, num_free
from paceline.batching.budget import COMPUTES, add_chunk, seconds, widest_of
from paceline.batching.moves import num_waiting
from paceline.batching.state import (
    FLYING,
    GOAL,
    HEAD,
    MARGIN,
    MAX_BATCH,
    PACE,
    PIPELINE,
    RUNNING,
    STATE,
    TAIL,
    TOKEN_BUDGET,
    WANTED,
    WIDE,
    Ints,
    State,
)
from paceline.compiled import F64, I64, entry, making, part, tuple_of
from paceline.core.request import HELD, KNOWN, LIMIT, PROMPT, SCHEDULED


@part
def _predicted(s: State, shape: Ints) -> float:
    """Seconds of a step of this shape, at the present pace."""
    numbers = (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6])
    took = s.factors[PACE] * seconds(s.linear, s.terms, numbers)
    return took * s.factors[WIDE] if shape[0] >= COMPUTES else took


@making
def step(s: State, decodes: int, context: int, pending: int) -> tuple[int, float]:
    """Prompt tokens and seconds of a step with these decodes, that read so many tokens, and what it takes of the
    prompts; 0 seconds where nobody has measured steps."""
    if len(s.linear) == 0:
        return min(pending, s.limits[TOKEN_BUDGET]), 0.0
    shape, prompts, chunk = np.zeros(7, np.int64), np.zeros((1, 2), np.int64), 0
    shape[0] = shape[1] = shape[2] = decodes
    shape[3] = context
    if pending > 0:
        prompts[0, 1] = pending
        within = s.factors[GOAL] / (s.factors[PACE] * (1 + s.factors[MARGIN]))
        width = widest_of(s, within, shape, prompts)
        chunk = min(pending, max(1, min(width, s.limits[TOKEN_BUDGET]) - decodes))
        add_chunk(shape, pending // 2, chunk, True)
    return chunk, _predicted(s, shape)


@part
def turn(s: State) -> tuple[int, float]:
    """Prompt tokens and seconds of the next step; 0 seconds where there is nothing to do, or nobody has measured steps.
    """
    decodes = context = pending = 0
    for i in range(s.now[RUNNING]):
        slot = s.running[i]
        left = s.numbers[slot, PROMPT] - s.numbers[slot, SCHEDULED]
        pending += max(0, left)
        if left <= 0:
            decodes += 1
            context += s.numbers[slot, KNOWN]
    for i in range(s.now[HEAD], s.now[TAIL]):
        pending += s.numbers[s.waiting[i], KNOWN]
    return step(s, decodes, context, pending) if decodes + pending > 0 else (0, 0.0)


@part
def first_token(s: State, tokens: int, wanted: float, others: float) -> float:
    """Seconds until a prompt of so many tokens, which comes now, would have its first token; 0: nobody knows.

    `wanted` is its place among prompts; `others` the seconds that other groups' turns on the device take between two
    steps. Infinite where its decodes would be too many for the goal between tokens.
    """
    if len(s.linear) == 0:
        return 0.0
    now, numbers = s.now, s.numbers
    pending, context, count, needed = tokens, 0, now[RUNNING] + num_waiting(s), blocks_for(s, tokens)
    for i in range(now[RUNNING]):
        slot = s.running[i]
        context += numbers[slot, KNOWN]
        if s.times[slot, WANTED] <= wanted:
            pending += max(0, numbers[slot, PROMPT] - numbers[slot, SCHEDULED])
    for i in range(now[HEAD], now[TAIL]):
        slot = s.waiting[i]
        context += numbers[slot, KNOWN]
        if s.times[slot, WANTED] <= wanted:
            pending += numbers[slot, KNOWN]
            needed += blocks_for(s, numbers[slot, KNOWN])
    decodes = min(count, s.limits[MAX_BATCH] - 1)  # all that are here, by then
    if step(s, decodes + 1, context + tokens, 0)[1] > s.factors[GOAL]:
        return np.inf
    chunk, each = step(s, decodes, context, pending)
    each += others
    flying = _predicted(s, s.shape) + others if now[FLYING] > 0 else 0.0  # the newest
    steps = -(-pending // chunk) + _until_room(s, count + 1 - s.limits[MAX_BATCH], needed - num_free(s))
    stages = (s.limits[PIPELINE] - 1) * max(each, flying)  # behind the first; nobody overtakes what is in flight
    return (flying + steps * each + stages) * (1 + s.factors[MARGIN])


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


next_turn = entry(tuple_of(I64, F64), STATE)(turn)
seconds_to_first_token = entry(F64, STATE, I64, F64, F64)(first_token)
