"""How wide a step may be, from predicted times (Sarathi-Serve, OSDI'24, section 4.3; docs/latency.md)."""

# mypy: disable-error-code=no-any-return

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.batching.pace import COMPUTES, pace_of
from paceline.batching.state import (
    BESIDE,
    KNEE,
    MARGIN,
    MAXIMUM,
    NONE,
    PACE,
    SPENT,
    TILE,
    WIDE,
    Floats,
    Ints,
    State,
)
from paceline.compiled import F64, FLOATS, I64, INTS, INTS_2D, entry, making, part
from paceline.core.batch import StepShape
from paceline.latency.step_time import predicted

REREAD = 0.1  # of a step's time, at most, for the next one to read again what this one has read

seconds = part(predicted)


@dataclass(frozen=True, slots=True)
class GoalBudget:
    """The widest step whose predicted time, contexts included, is within the goal; the knee where there is no goal.

    The paper takes one budget for all steps, that of the worst decodes and contexts. Here it is asked anew every step,
    so that few decodes at short contexts leave more to the prompts. The goal is the group's or a request's, whichever
    is tighter. A step that keeps no decode waiting, in it or behind it in a pipeline, has none.

    The knee is of steps without contexts. A chunk reads again all that its prompt had before, so where that is much,
    and decodes leave few tokens of the knee, steps are wider: until it is a tenth of their time.

    The goal counts with a margin, and predictions at the pace that the machine has shown of late.

    Widths are multiples of the tile in all, decodes included. Prompts always get what is left of the decodes' last
    tile, or a new one where nothing is left: at least one token. So they never starve, not even behind a request whose
    goal no step can hold, and the decodes pay one tile at most for it, most of which is computed anyway.
    """

    linear: tuple[float, ...]  # seconds of a step by its tokens, and the other terms (`latency.step_time.StepTime`)
    terms: tuple[float, ...]
    tile: int
    knee: int
    maximum: int
    tbt: float | None = None  # seconds
    margin: float = 0.0  # share of a step's time by which it may come out longer than predicted

    def __call__(
        self,
        shape: StepShape,
        prompts: Sequence[tuple[int, int]],
        tbt: float | None,
        pace: float = 1.0,
        spent: float = 0.0,
        wide: float = 1.0,
    ) -> int:
        """Tokens of the whole step, `shape`, its decodes, included; more than a group's `token_budget` counts as that.

        `prompts`: (context, remaining) tokens of the prompts that could be chunked, in the order in which they would
        be. `tbt`: seconds, the tightest goal among the running sequences that decode; None: nobody has one. `pace`:
        what steps took of late over what was predicted for them, and `wide`: more than that where they compute
        (`batching.pace`). `spent`: seconds for drafting beside all that.
        """
        goal = min(NONE if one is None or not shape.decodes else one for one in (self.tbt, tbt))
        rows = np.array(prompts, np.int64).reshape(-1, 2)
        within = (goal - spent) / (pace * (1 + self.margin))
        return int(_widest(*self.arrays(), self.tile, self.knee, self.maximum, within, wide, np.array(shape), rows))

    def of_share(self, share: float) -> "GoalBudget":
        """Where a step takes this share of the time."""
        linear, terms = (tuple(share * seconds for seconds in some) for some in (self.linear, self.terms))
        return replace(self, linear=linear, terms=terms)

    def arrays(self) -> tuple[Floats, Floats]:
        """What steps take, as compiled code reads it."""
        return np.array(self.linear), np.array(self.terms)


@part
def seconds_at_pace(s: State, shape: tuple[int, ...]) -> float:
    """From when a step of this shape (`core.batch.StepShape`) is composed until it is complete, at the present pace; 0
    where nobody has measured steps."""
    if len(s.linear) == 0:
        return 0.0
    return pace_of(s, shape[0]) * seconds(s.linear, s.terms, shape) + s.factors[BESIDE]


@making
def room_within_goals(s: State, width: int, prompts: Ints, read: int, goal: float) -> int:
    """Tokens of a step that has taken so many, which read so many from the cache. `goal`: `moves.goal_of_step`."""
    shape = np.zeros(7, np.int64)
    shape[0] = shape[1] = shape[2] = width
    shape[3] = read
    within = (goal - s.factors[SPENT] / (1 + s.factors[MARGIN])) / s.factors[PACE]
    return widest_of(s, within, shape, prompts)


@part
def widest_of(s: State, goal: float, shape: Ints, prompts: Ints) -> int:
    """`widest`, by the state's budget."""
    limits = s.limits
    return widest(
        s.linear, s.terms, limits[TILE], limits[KNEE], limits[MAXIMUM], goal, s.factors[WIDE], shape, prompts
    )  # fmt: skip


@making
def widest(
    linear: Floats, terms: Floats, tile: int, knee: int, maximum: int, goal: float, wide: float, shape: Ints,
    prompts: Ints,
) -> int:  # fmt: skip
    """`GoalBudget`, for a goal in seconds of a predicted step; infinity is none. Wider steps never count as shorter."""
    decodes, wide, free = shape[0] // tile, max(1.0, wide), goal == np.inf
    step = shape.copy()
    fill(step, prompts, maximum)
    low, high = max(knee // tile, decodes + 1) if free else decodes, min(maximum // tile, -(-step[0] // tile))
    middle = low  # mostly the knee will do
    while low < high:
        if not free:
            middle = (low + high + 1) // 2
        for i in range(len(shape)):  # at once it takes five seconds to compile
            step[i] = shape[i]
        again = fill(step, prompts, middle * tile)
        took = seconds(linear, terms, (step[0], step[1], step[2], step[3], step[4], step[5], step[6]))
        if free:  # from the knee on, until little is left to be read again
            much = terms[3] * (again > 0) + terms[4] * again > REREAD * took
            low, high = (middle + 1, high) if much else (low, middle)
            middle = (low + high) // 2
        else:  # the widest, filled from the prompts in order, that is within the goal
            over = (took * wide if step[0] >= COMPUTES else took) > goal
            low, high = (low, middle - 1) if over else (middle, high)
    width = max(knee if free else 0, low * tile)
    return min(maximum, max(width, (decodes + 1) * tile))


@part
def fill(step: Ints, prompts: Ints, width: int) -> int:
    """Adds chunks of the prompts, (context, remaining) tokens each, in order, until the step is so wide. Returns the
    tokens of the prompt that it ends in, which the next one reads again; 0: it ends in none."""
    again = 0
    for i in range(len(prompts)):
        length = min(width - step[0], prompts[i, 1])
        if length > 0:
            add_chunk(step, prompts[i, 0], length, length == prompts[i, 1])
            again = prompts[i, 0] + length if length < prompts[i, 1] else 0
    return again


@part
def add_chunk(shape: Ints, start: int, length: int, emits: bool) -> None:
    """`StepShape.add`, of a chunk."""
    shape[0] += length
    shape[1] += emits
    if length == 1:
        shape[2] += 1
        shape[3] += start
    else:
        shape[4] += start
        shape[5] += length * (2 * start + length + 1) // 2
        shape[6] += 1


_widest = entry(I64, FLOATS, FLOATS, I64, I64, I64, F64, F64, INTS, INTS_2D)(widest)
