"""The time of a step as a function of its shape, fitted to measured steps.

Linear layers see all tokens at once: a table by width, with the hardware's cliffs in it. Attention is per slice: a
decode costs by the tokens that it reads, a chunk by the tokens before it and by its query-key pairs. What neither says
(head rows, sampling, bookkeeping) is counted per token that the step yields and per slice.
"""

import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.batch import Batch, StepShape
from paceline.latency.tiles import Tiles, padded

Array = NDArray[np.float64]
# Steps of so many tokens and more differ from their profile alike in a server: a decode alone, decodes that read the
# weights together, and what computes more than it reads
WIDTHS = (1, 2, 17)
# and by what else there is: whether other devices have a step under way when it enters its own, and whose was last
OTHERS, BEFORE = ("idle", "busy"), ("own", "other")
# What a step takes over what steps of its width do on average, [others, before, width] in a row
Interference = tuple[float, ...]
NO_INTERFERENCE: Interference = (1.0,) * len(OTHERS) * len(BEFORE) * len(WIDTHS)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step. No term is negative, and the table never falls: a step that computes more takes no less.

    A `core.protocols.LatencyModel`.
    """

    linear: tuple[float, ...]  # by tokens, from 0 to the widest step measured
    emit: float  # per token that the step yields
    decode: float  # per slice of one token
    decode_context: float  # per token that those read
    chunk: float  # per longer slice
    chunk_context: float  # per token before those
    chunk_pair: float  # per query-key pair of those

    def __call__(self, batch: Batch) -> float:
        return self.seconds(batch.shape)

    @property
    def terms(self) -> tuple[float, ...]:
        """All but the table, in the order of `predicted`."""
        return self.emit, self.decode, self.decode_context, self.chunk, self.chunk_context, self.chunk_pair

    def paced(self, paces: Mapping[int, float]) -> "StepTime":
        """With steps so much longer, by tokens from so many on; decodes' terms as the narrowest, chunks' the widest.

        A wider step still takes no less, so a pace that would make it shorter counts from where it does not.
        """
        linear = np.maximum.accumulate([seconds * of_width(paces, n) for n, seconds in enumerate(self.linear)])
        factors = [paces[min(paces)]] * 3 + [paces[max(paces)]] * 3
        return StepTime(tuple(linear.tolist()), *map(operator.mul, factors, self.terms))

    def seconds(self, shape: StepShape) -> float:
        """Steps wider than the table go on at its average slope."""
        return predicted(self.linear, self.terms, shape)


def of_width(paces: Mapping[int, float], tokens: int) -> float:
    """By tokens from so many on; below the first as there."""
    bounds = sorted(paces)
    return paces[bounds[max(0, bisect_right(bounds, tokens) - 1)]]


def interference(paces: Mapping[int, float], apart: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Interference:
    """Of paces by width, and apart by what else there is; what is not known apart is as on average."""
    return tuple(
        apart.get(others, {}).get(before, {}).get(width, of_width(paces, width)) / of_width(paces, width)
        for others in OTHERS for before in BEFORE for width in WIDTHS
    )  # fmt: skip


def predicted(linear: Any, terms: Any, shape: tuple[int, ...]) -> float:
    """`StepTime.seconds`, for the scheduler, too, which compiles it: sequences, or arrays."""
    tokens, emits, decodes, decode_context, chunk_context, chunk_pairs, chunks = shape
    last = len(linear) - 1
    seconds: float = (
        (linear[tokens] if tokens <= last else linear[last] * tokens / last)
        + terms[0] * emits
        + terms[1] * decodes
        + terms[2] * decode_context
        + terms[3] * chunks
        + terms[4] * chunk_context
        + terms[5] * chunk_pairs
    )
    return seconds


def fit(shapes: Sequence[StepShape], seconds: Sequence[float], tiles: Tiles) -> StepTime:
    """The model with the least squared relative error over measured steps.

    The table has a knot at every padded width measured and is linear in between. The unknowns are the rises from knot
    to knot and the other coefficients, none of them negative: one non-negative least-squares problem.
    """
    knots = np.unique([padded(shape.tokens, tiles) for shape in shapes]).astype(np.float64)
    rows = np.array([padded(shape.tokens, tiles) for shape in shapes], dtype=np.float64)
    rest = np.array([_terms(shape) for shape in shapes], dtype=np.float64)
    columns = np.hstack([_rises(rows, knots), rest]) / np.asarray(seconds)[:, None]
    found = nnls(columns, np.ones(len(shapes)))
    widest = max(shape.tokens for shape in shapes)
    widths = np.array([padded(max(1, tokens), tiles) for tokens in range(widest + 1)], dtype=np.float64)
    linear = _rises(widths, knots) @ found[: len(knots)]
    return StepTime(tuple(linear.tolist()), *found[len(knots) :].tolist())


def relative_errors(model: StepTime, shapes: Sequence[StepShape], seconds: Sequence[float]) -> list[float]:
    """|predicted - measured| / measured of each step."""
    return [abs(model.seconds(shape) / actual - 1) for shape, actual in zip(shapes, seconds, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation, as NumPy does."""
    return float(np.quantile(np.asarray(values), share))


def _terms(shape: StepShape) -> tuple[int, ...]:
    """What StepTime's coefficients multiply, in their order."""
    return (
        shape.emits, shape.decodes, shape.decode_context, shape.chunks, shape.chunk_context, shape.chunk_pairs
    )  # fmt: skip


def _rises(rows: Array, knots: Array) -> Array:
    """[steps, knots]: how much of each rise a step of so many rows has climbed; the first is the table's bottom."""
    climbed: Array = ((rows[:, None] - knots[:-1]) / np.diff(knots)).clip(0.0, 1.0)
    return np.hstack([np.ones((len(rows), 1)), climbed])


def nnls(columns: Array, target: Array) -> Array:
    """argmin |columns x - target| with x >= 0: the active-set method of Lawson and Hanson (1974, chapter 23)."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    columns = columns / scale
    x = np.zeros(columns.shape[1])
    free = np.zeros(len(x), dtype=bool)
    tolerance = 1e-10 * float(np.abs(columns.T @ target).max())
    for _ in range(3 * len(x)):
        gradient = columns.T @ (target - columns @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(np.argmax(gradient))] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            falling = free & (trial < 0)
            if not falling.any():
                break
            step = float(np.min(x[falling] / (x[falling] - trial[falling])))
            x = x + step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = trial
    result: Array = x / scale
    return result
