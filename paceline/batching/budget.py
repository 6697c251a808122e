"""How wide a step may be, from predicted times (Sarathi-Serve, OSDI'24, section 4.3; docs/latency.md)."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from paceline.core.batch import StepShape

TOKENS = attrgetter("tokens")


class Pace:
    """Predicted step times, and how far the machine has been from them of late.

    A shared machine is half as fast for seconds on end, and the same for steps of all shapes, so one factor that
    follows slowly repairs most of it: a running average of what steps took over what was predicted, in logarithms. A
    single step counts little, however long it stalled.
    """

    FOLLOWS, MOST = 0.2, 1.5  # share of the newest step; the most that it may be off by

    def __init__(self, predict: Callable[[StepShape], float]) -> None:
        self.predict = predict
        self.factor = 1.0

    def seconds(self, shape: StepShape) -> float:
        return self.factor * self.predict(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        ratio = seconds / self.seconds(shape)
        self.factor *= min(max(ratio, 1 / self.MOST), self.MOST) ** self.FOLLOWS


@dataclass(frozen=True, slots=True)
class GoalBudget:
    """The widest step whose predicted time, contexts included, is within the goal; the knee where there is no goal.

    The paper takes one budget for all steps, that of the worst decodes and contexts. Here it is asked anew every step,
    so that few decodes at short contexts leave more to the prompts. The goal is the group's or a request's, whichever
    is tighter. A step without decodes keeps nobody waiting and is as wide as the knee.

    The goal counts with a margin, and predictions at the pace that the machine has shown of late.

    Widths are multiples of the tile in all, decodes included. Prompts always get what is left of the decodes' last
    tile, or a new one where nothing is left: at least one token. So they never starve, not even behind a request whose
    goal no step can hold, and the decodes pay one tile at most for it, most of which is computed anyway.
    """

    seconds: Callable[[StepShape], float]  # must not fall as a step widens
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
    ) -> int:
        goals = [(goal - spent) / (pace * (1 + self.margin)) for goal in (self.tbt, tbt) if goal is not None]
        widest = self._within(min(goals), shape, prompts) if goals and shape.decodes else self.knee
        return min(self.maximum, max(widest, (shape.tokens // self.tile + 1) * self.tile))

    def _within(self, goal: float, shape: StepShape, prompts: Sequence[tuple[int, int]]) -> int:
        """The largest multiple of the tile whose step, filled from the prompts in order, is within the goal."""
        filled = [shape]  # with the first prompts whole
        for context, left in prompts:
            if filled[-1].tokens >= self.maximum:
                break
            filled.append(filled[-1].add(context, left, True))

        def late(tiles: int) -> bool:
            width = tiles * self.tile
            whole = bisect_right(filled, width, key=TOKENS) - 1
            step = filled[whole]
            if width > step.tokens and whole < len(filled) - 1:
                step = step.add(prompts[whole][0], width - step.tokens, False)
            return self.seconds(step) > goal

        decodes = shape.tokens // self.tile
        most = min(self.maximum // self.tile, -(-filled[-1].tokens // self.tile))
        return (bisect_right(range(decodes + 1, most + 1), False, key=late) + decodes) * self.tile
