"""A profile: what steps of one model took on one device, and what follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from paceline.core.batch import StepShape
from paceline.latency.roofline import Roofline
from paceline.latency.step_time import StepTime, fit, percentile, relative_errors
from paceline.latency.tiles import Cliff, Tiles, find_cliffs, find_knee, find_tiles


@dataclass(slots=True)
class Measured:
    """The same step several times, spread over the whole measurement. `seconds` as they came."""

    shape: StepShape
    seconds: list[float] = field(default_factory=list)

    @property
    def low(self) -> float:
        """The mean of the lowest third: on a shared machine a step takes its own time or, while somebody else computes,
        nearly twice that, and a median of few runs may be either."""
        return fmean(sorted(self.seconds)[: max(1, len(self.seconds) // 3)])

    def spread(self) -> list[float]:
        """What no model can predict: |the median of the other runs - one run|, relative."""
        runs = self.seconds
        return [abs(median(runs[:i] + runs[i + 1 :]) / one - 1) for i, one in enumerate(runs)] if runs[1:] else []


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of relative errors, as fractions."""

    p50: float
    p95: float

    @staticmethod
    def of(values: Sequence[float]) -> "Percentiles":
        return Percentiles(percentile(values, 0.5), percentile(values, 0.95))


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one device."""

    step_time: StepTime
    tiles: Tiles
    cliffs: tuple[Cliff, ...]  # steeper than the noise
    knee: int  # tokens
    error: Percentiles  # of predicted against measured steps that the fit has not seen
    noise: Percentiles  # of the same steps against their own repetitions
    widths: dict[int, float]  # seconds of one prompt chunk from context 0, by tokens
    roofline: Roofline
    # seconds of a pass of drafts in one call (`engine.chain`), by sequences, and with 0 of the call itself
    chained: dict[int, float] = field(default_factory=dict)

    @property
    def tile(self) -> int:
        """Of wide steps: what widths are aligned to."""
        return self.tiles[-1][1]

    @property
    def max_tokens(self) -> int:
        """The widest step measured."""
        return len(self.step_time.linear) - 1

    @property
    def floor(self) -> float:
        """Seconds of the shortest step there is: one decode. No goal below can be held."""
        return self.step_time.seconds(StepShape().add(0, 1, True))


def summarize(
    sweep: Sequence[Measured], mixes: Sequence[Measured], held_out: Sequence[Measured], roofline: Roofline
) -> Profile:
    """Fits the model to `sweep` (single chunks from context 0) and `mixes`, and judges it by single runs of `held_out`.

    Steps are compared with each other by their low times; all are then scaled to what runs took at the median.
    """
    known = [*sweep, *mixes]
    scale = median(median(item.seconds) / item.low for item in known)
    widths = {item.shape.tokens: item.low * scale for item in sweep}
    tiles = find_tiles(widths)
    model = fit([item.shape for item in known], [item.low * scale for item in known], tiles)
    runs = [(item.shape, one) for item in held_out for one in item.seconds]
    error = Percentiles.of(relative_errors(model, [shape for shape, _ in runs], [one for _, one in runs]))
    noise = Percentiles.of([value for item in held_out for value in item.spread()])

    def without_attention(tokens: int) -> float:  # whose time per token does not depend on the width
        return model.seconds(StepShape(tokens=tokens, emits=1, chunks=1))

    knee = find_knee(without_attention, tiles[-1][1], max(widths))
    cliffs = find_cliffs(widths, max(0.05, noise.p95))
    return Profile(model, tiles, tuple(cliffs), knee, error, noise, widths, roofline)
