"""When the text of a stream goes out: evenly, though a step with drafts yields several tokens at once.

Speculation makes a stream faster and uneven: steps take longer, and what they yield comes together. So tokens wait, as
in a jitter buffer, for steps that yield few or take long, and go one by one: every so many seconds as one has taken of
late, slower where few are held and faster where many are. As many should be as a step yields, and as steps are off
their usual pace by: each token comes a step or two later than it could. Where steps yield one nothing is held, and the
first token and the end never are. How long steps take and what they yield is learnt from when their outputs come.
Messages take cores that the next step needs, so those that would be closer than a share of a step, or LEAST_S, go
together.
"""

import math

KEEPS = 0.9  # of the steps before, with every step
LONGEST, STALLED = 2.0, 4.0  # a step counts for at most so many average ones, those for so many of it: stalls pass
SAME_S = 0.001  # what comes closer is of one step: clocks may count milliseconds
MOST = 3.0  # how often as many as should be held may be
SPREAD = 1.5  # how much slower or faster than of late, at most
LEAST_YIELD, LEAST_STEP_S = 1.05, 0.005  # where steps are less, all goes as it comes
LEAST_S, SHARE = 0.004, 0.4  # between messages, and of a step


class Playout:
    """Of one stream. Times are seconds of one clock, sizes are parts: texts of one token, mostly."""

    def __init__(self) -> None:
        self._steps = self._seconds = self._parts = 0.0  # of late
        self._off = 0.0  # parts that those steps yielded more or less than their time says
        self._came = self._went = -math.inf  # the newest step, the newest message
        self._held = 0

    def come(self, now: float, held: int) -> None:
        """A step is done; so many are held with what it has yielded."""
        took, yielded = now - self._came, held - self._held
        self._held = held
        if took < SAME_S:
            self._parts += yielded if self._steps else 0
            return
        if self._came > -math.inf:
            if self._steps:
                took = min(took, LONGEST * self._seconds / self._steps)
                self._off = KEEPS * self._off + abs(yielded - took * self._parts / self._seconds)
            self._seconds = KEEPS * min(self._seconds, STALLED * took * self._steps) + took
            self._steps = KEEPS * self._steps + 1
            self._parts = KEEPS * self._parts + yielded
        self._came = now

    @property
    def spreads(self) -> bool:
        """Whether anything is held; else all goes as it comes."""
        return self._seconds > LEAST_STEP_S * self._steps and self._parts > LEAST_YIELD * self._steps

    def due(self, held: int) -> tuple[float, int]:
        """When some of those that are held may go next, and how many then."""
        if not self.spreads:
            return self._came, held
        step_s, wanted = self._seconds / self._steps, (self._parts + self._off) / self._steps
        each = self._seconds / self._parts * min(SPREAD, max(1 / SPREAD, wanted / max(held, 1)))
        apart = max(min(LEAST_S, step_s), SHARE * step_s)
        parts = max(1, round(apart / each))
        when = self._went + max(apart, parts * each)
        return when, min(held, max(parts, int(held - MOST * wanted)))

    def sent(self, now: float, parts: int) -> None:
        """So many went."""
        self._went, self._held = now, self._held - parts
