"""What steps and drafts take by the profiles of both models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from paceline.compiled import CORE, F64, FLOATS, I64, part, watched
from paceline.core.batch import AGAIN
from paceline.core.request import MAX_DRAFT_TOKENS
from paceline.latency.step_time import StepTime

Floats = NDArray[np.float64]
BYTES = types.Array(types.uint8, 1, "C", readonly=True)


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps of a model take that are mostly decodes (`latency.step_time`). Seconds."""

    linear: Sequence[float]  # by tokens, from 0 on
    token: float = 0.0  # more for each
    context: float = 0.0  # for each token that those read
    once: float = 0.0  # of drafting, beside its passes

    @staticmethod
    def of(time: StepTime) -> "Costs":
        return Costs(time.linear, time.emit + time.decode, time.decode_context)

    @staticmethod
    def of_drafts(time: StepTime, chained: Mapping[int, float]) -> "Costs":
        """Of a model that drafts, some of whose passes are one call (`Profile.chained`)."""
        if not chained:
            return Costs.of(time)
        rows = sorted(set(chained) - {0})
        passes = np.interp(range(rows[-1] + 1), rows, [chained[count] for count in rows]).tolist()
        wider = [passes[-1] + seconds - time.linear[rows[-1]] for seconds in time.linear[rows[-1] + 1 :]]
        return Costs(passes + wider, 0.0, time.decode_context, chained[0])

    def scaled(self, share: float) -> "Costs":
        """Those of a part of the model."""
        linear = [share * seconds for seconds in self.linear]
        return Costs(linear, share * self.token, share * self.context, share * self.once)

    @property
    def drafting(self) -> "Costs":
        """As `choose` takes those of drafting: in the place of no tokens stands what it takes beside its passes."""
        return replace(self, linear=[self.once, *self.linear[1:]])

    @property
    def arrays(self) -> tuple[Floats, float, float]:
        """As compiled code takes them."""
        return np.array(self.linear), self.token, self.context


@part
def seconds_of(linear, token, context, tokens, read):  # type: ignore[no-untyped-def]
    last = linear.shape[0] - 1
    table = linear[tokens] if tokens <= last else linear[last] * tokens / max(last, 1)
    return table + token * tokens + context * read


@part
def reading(linear, tokens, more):  # type: ignore[no-untyped-def]
    """What more tokens take that a pass of these only reads."""
    return max(0.0, seconds_of(linear, 0.0, 0.0, tokens + more, 0) - seconds_of(linear, 0.0, 0.0, tokens, 0))


@watched(types.UniTuple(F64, 3)(BYTES, I64, I64, FLOATS, F64, F64, FLOATS, F64, F64), *CORE)
@njit(cache=True)
def expected(  # type: ignore[no-untyped-def]
    drafted, unread, read, linear, token, context, draft_linear, draft_token, draft_context
):
    """Seconds of drafting, in its first pass, which reads so many tokens, and in those after it, and of the target, by
    the profiles."""
    passes = np.zeros(MAX_DRAFT_TOKENS, np.int64)
    width = 0
    for length in drafted:
        width += 1 + length
        for j in range(min(length, MAX_DRAFT_TOKENS)):
            passes[j] += 1
    again = read * (width - drafted.shape[0]) / drafted.shape[0]
    first, further = 0.0, 0.0
    if passes[0] > 0:
        first = draft_linear[0] + seconds_of(draft_linear, draft_token, 0.0, passes[0], 0)
        first += reading(draft_linear, passes[0], max(0, unread - passes[0]))
    for some in passes[1:]:
        if some > 0:
            further += seconds_of(draft_linear, draft_token, 0.0, some, 0)
    further += draft_context * again
    return first, further, seconds_of(linear, token, context, width, read + again * AGAIN / 100)
