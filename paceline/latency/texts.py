"""The time of a step of whole texts, as encoders take them: by their length and number, as measured."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from paceline.latency.step_time import StepTime

Stages = tuple[float, ...]  # seconds in each pipeline stage


@dataclass(frozen=True, slots=True)
class TextTimes:
    """Of one model in one shape."""

    seconds: dict[int, dict[int, Stages]]  # by tokens of each text, then by number of texts

    def at(self, tokens: int) -> dict[int, Stages]:
        """By number of texts of this length: linear between measured lengths, beyond them as at the nearest. Numbers
        that were measured on both sides."""
        lengths = sorted(self.seconds)
        tokens = min(max(tokens, lengths[0]), lengths[-1])
        below = max(length for length in lengths if length <= tokens)
        above = min(length for length in lengths if length >= tokens)
        share = (tokens - below) / (above - below) if above > below else 0.0
        low, high = self.seconds[below], self.seconds[above]
        return {
            count: tuple(a + share * (b - a) for a, b in zip(low[count], high[count], strict=True))
            for count in low
            if count in high
        }

    def by_tokens(self, widest: int) -> StepTime:
        """Of a step of texts of any lengths, by their tokens alone: of those that were measured with so many tokens the
        slowest, in all stages, linear in between. Its table goes to `widest` tokens."""
        points: dict[int, float] = {}
        for length, counts in self.seconds.items():
            for count, stages in counts.items():
                points[length * count] = max(points.get(length * count, 0.0), sum(stages))
        tokens = sorted(points)
        seconds = accumulate((points[one] for one in tokens), max)
        table = np.interp(np.arange(widest + 1), tokens, [*seconds])
        table[tokens[-1] :] *= np.maximum(1.0, np.arange(widest + 1)[tokens[-1] :] / tokens[-1])
        return StepTime(tuple(table.tolist()), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
