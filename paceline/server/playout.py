"""When the text of a stream goes out: evenly, though a step with drafts yields several tokens at once.

Speculation makes a stream faster and uneven: steps take longer, and what they yield comes together. So with every
step half of what is held goes, in two messages, one when the step comes and one half a step later (but LEAST_S at
least); the rest waits, as in a jitter buffer, for steps that yield one or take long. That is about as much as a step
yields beyond one, so each token comes about a step later than it could; where steps yield one nothing is held, and
the first token and the end never are. How long steps take is learnt from when their outputs come. More messages would
be more even, but take cores that the next step needs; these go at the same moments for all streams of a group.
"""

import math

FOLLOWS = 0.2  # share of the newest step
LONGEST = 2.0  # a step counts for at most so many average ones, and those for so many of it: stalls pass
LEAST_S = 0.005  # what would be closer goes together


class Playout:
    """Of one stream. Times are seconds of one clock, sizes are parts: texts of one token, mostly."""

    def __init__(self) -> None:
        self._step_s = 0.0  # an average step: 0 until there was one
        self._came = -math.inf
        self._first = self._second = 0  # to go when the step comes, and half a step later
        self._turn = 0  # the next of those; all others are of one

    def come(self, now: float, held: int) -> None:
        """A step is done; so many are held with what it has yielded."""
        if self._came > -math.inf:
            took = now - self._came
            before = self._step_s or took
            average = before + FOLLOWS * (min(took, LONGEST * before) - before)
            self._step_s = min(average, LONGEST * took)
        self._came, self._turn = now, 0
        if self.spreads:
            some = (held + 1) / 2
            self._first = math.ceil(some / 2)
            self._second = max(0, round(some) - self._first)

    @property
    def spreads(self) -> bool:
        """Whether anything is held; else all goes as it comes."""
        return self._step_s > LEAST_S

    def due(self, held: int) -> tuple[float, int]:
        """When some of those that are held may go next, and how many then."""
        if not self.spreads:
            return self._came, held
        parts = (self._first, self._second, 1)[min(self._turn, 2)]
        return self._came + self._turn * max(self._step_s / 2, LEAST_S), min(held, parts)

    def sent(self) -> None:
        """They went."""
        self._turn += 1 if self._turn or self._second else 2
