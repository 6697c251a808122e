"""Who takes a request, and whose turn it is: decisions between groups, for the controller and for its simulation.

Arguments are lists or arrays over groups.
"""

# mypy: disable-error-code=no-any-return

from typing import Any

from paceline.batching.moves import next_in_line
from paceline.batching.policies import PATIENCE_S
from paceline.batching.prediction import RESERVE
from paceline.batching.state import (
    ARRIVAL,
    BY_GOAL,
    GOAL,
    HEAD,
    LANDED,
    PIPELINE,
    RUNNING,
    STATE,
    TBT,
    WANTED,
    State,
)
from paceline.compiled import F64, I64, entry, part
from paceline.core.request import PROMPT, SCHEDULED

UNHURRIED_S = 0.5  # who has no goal waits about so long for a turn, if others have


@part
def narrow(able: Any, up: Any, resident: Any) -> None:
    """Of the groups that can take a request those that are up stay `able`, else those that can be loaded, else all."""
    any_up = any_cold = False
    for g in range(len(able)):
        any_up = any_up or (able[g] and up[g])
        any_cold = any_cold or (able[g] and not resident[g])
    for g in range(len(able)):
        able[g] = able[g] and (up[g] if any_up else not (any_cold and resident[g]))


@part
def soonest(expected: Any, queued: Any, able: Any) -> int:
    """Of the groups that can take a request the one that is expected to begin with its output first, of equals the one
    with the fewest, the first of those; -1: none can."""
    best = -1
    for g in range(len(queued)):
        if able[g] and (
            best < 0
            or expected[g] < expected[best]
            or (expected[g] == expected[best] and queued[g] < queued[best])
        ):
            best = g
    return best


@part
def full(flying: int, stages: int, ahead: int = 0) -> bool:
    """Whether a device whose groups have so many steps in flight takes no more: in a pipeline one more than it has
    stages, since a short one does not fill the second while a long one is in it."""
    return flying >= ahead + (stages + 1 if stages > 1 else 1)


@part
def next_in_turn(served: Any, due: Any, horizon: float, tried: Any) -> int:
    """Of the groups that share a device the one that is to step next; -1: all tried.

    Of those whose next step is due before the `horizon`, when all have had a turn, or else of all, the one that waited
    longest: so nobody's overload takes another's turn, and nobody waits for the last moment.
    """
    best = -1
    for g in range(len(served)):
        if tried[g]:
            continue
        hurried, other = due[g] <= horizon, best >= 0 and due[best] <= horizon
        if best < 0 or (hurried and not other) or (hurried == other and served[g] < served[best]):
            best = g
    return best


@part
def next_due(s: State, chunk: int, each: float) -> float:
    """When the group's next step is to be done: of decodes a stage's part of the goal after the last one; of prompts,
    where goals order them, when a first token is wanted, and where that is a goal, earlier by the share of it that
    admission has kept, and by the rounds of turns (`each`, seconds) that it needs after this one, in steps of `chunk`
    tokens. A whole prompt that is longer counts as several.
    """
    now = s.now
    due, pace = s.factors[LANDED] + UNHURRIED_S, s.factors[GOAL]
    for i in range(now[RUNNING]):
        slot = s.running[i]
        if s.numbers[slot, SCHEDULED] >= s.numbers[slot, PROMPT]:
            pace = min(pace, s.times[slot, TBT])
    due = min(due, s.factors[LANDED] + pace / s.limits[PIPELINE])
    if s.limits[BY_GOAL] > 0:
        tokens = 0
        slot, ours, theirs = next_in_line(s, 0, now[HEAD])
        while slot >= 0:
            tokens += s.numbers[slot, PROMPT] - s.numbers[slot, SCHEDULED]
            wanted, arrival = s.times[slot, WANTED], s.times[slot, ARRIVAL]
            if wanted < arrival + PATIENCE_S:  # a goal
                wanted -= RESERVE * (wanted - arrival) + (tokens - 1) // chunk * each
            due = min(due, wanted)
            slot, ours, theirs = next_in_line(s, ours, theirs)
    return due


time_of_next_due = entry(F64, STATE, I64, F64)(next_due)
