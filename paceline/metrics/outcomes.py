"""What became of each request, as columns, the file that holds them, and the report (DESIGN, section 7).

The same for a simulation and for a live server: only who fills in the columns differs.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import SLO

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
COLUMNS = (
    "request", "model", "group", "arrival", "first_token", "finish", "prompt_tokens", "output_tokens", "status",
    "slo_met",
)  # fmt: skip
STATUSES = ("ok", "rejected", "cancelled", "failed")
PERCENTILES = (50, 90, 99)


@dataclass(eq=False)
class Outcomes:
    """Columns over requests, in order of arrival. Times in seconds, NaN where there was none; group -1: nobody's."""

    names: tuple[str, ...]  # of the models
    models: Ints  # index into names
    groups: Ints
    arrivals: Floats
    first_tokens: Floats
    finishes: Floats
    prompts: Ints  # tokens
    outputs: Ints  # tokens that came
    statuses: NDArray[np.uint8]  # index into STATUSES
    gaps: dict[int, NDArray[Any]] = field(default_factory=dict)  # between tokens, by model, where they are known

    def __len__(self) -> int:
        return len(self.arrivals)

    def met(self, goals: Sequence[SLO]) -> Bools:
        """Whether each request met all goals of its model: time to first token, mean time between tokens, deadline."""
        limits = np.array([[_limit(g.ttft), _limit(g.tbt), _limit(g.deadline)] for g in goals]).reshape(-1, 3)
        ttft, tbt, deadline = limits[self.models].T
        good: Bools = self.statuses == 0
        with np.errstate(invalid="ignore"):
            good &= ~(self.first_tokens - self.arrivals > ttft) & ~(self.finishes - self.arrivals > deadline)
            good &= ~(self.mean_gaps > tbt)
        return good

    @property
    def mean_gaps(self) -> Floats:
        """Mean seconds between tokens of each request; NaN of fewer than two."""
        spans = np.where(self.outputs > 1, self.finishes - self.first_tokens, np.nan)
        return spans / np.maximum(1, self.outputs - 1)

    def save(self, path: Path, goals: Sequence[SLO]) -> None:
        """Writes the file. Raises OSError."""
        met = self.met(goals)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for i in range(len(self)):
                times = [self.arrivals[i], self.first_tokens[i], self.finishes[i]]
                group = "" if self.groups[i] < 0 else int(self.groups[i])
                writer.writerow([
                    i, self.names[self.models[i]], group, *("" if np.isnan(t) else repr(float(t)) for t in times),
                    int(self.prompts[i]), int(self.outputs[i]), STATUSES[self.statuses[i]], str(bool(met[i])).lower(),
                ])  # fmt: skip


def report(outcomes: Outcomes, goals: Sequence[SLO], devices: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Attainment, goodput and percentiles, in all and by model. Seconds; goodput in requests/s that met their goals.

    `devices`: what is known of each, such as its utilisation.
    """
    met = outcomes.met(goals)
    everybody = np.ones(len(outcomes), np.bool_)
    result = _part(outcomes, met, everybody)
    result["models"] = {
        name: _part(outcomes, met, outcomes.models == index) for index, name in enumerate(outcomes.names)
    }
    if devices is not None:
        result["devices"] = devices
    return result


def _part(outcomes: Outcomes, met: Bools, mine: Bools) -> dict[str, Any]:
    count, done = int(mine.sum()), mine & (outcomes.statuses == 0)
    ends = outcomes.finishes[mine]
    ends = ends[~np.isnan(ends)]
    span = float(ends.max() - outcomes.arrivals[mine].min()) if len(ends) else 0.0
    result: dict[str, Any] = {
        "requests": count,
        "attainment": float(met[mine].mean()) if count else 1.0,
        "goodput": float(met[mine].sum() / span) if span > 0 else 0.0,
        "duration": span,
        "status": {name: int((outcomes.statuses[mine] == i).sum()) for i, name in enumerate(STATUSES)},
        "latency": percentiles(outcomes.finishes[done] - outcomes.arrivals[done]),
    }
    refused = mine & (outcomes.statuses == STATUSES.index("rejected"))
    if refused.any():
        result["refused"] = percentiles(outcomes.finishes[refused] - outcomes.arrivals[refused])
    done &= outcomes.outputs > 0
    if done.any():
        result["ttft"] = percentiles(outcomes.first_tokens[done] - outcomes.arrivals[done])
        known = [gaps for model, gaps in outcomes.gaps.items() if mine[outcomes.models == model].any()]
        result["tbt"] = percentiles(np.concatenate(known) if known else outcomes.mean_gaps[done])
        result["tokens_per_s"] = float(outcomes.outputs[done].sum() / span) if span > 0 else 0.0
    return result


def percentiles(values: NDArray[Any]) -> dict[str, float | None]:
    """By linear interpolation; None of no values. And the mean."""
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(["mean", *(f"p{share}" for share in PERCENTILES)])
    found = [float(values.mean()), *np.percentile(values, PERCENTILES).tolist()]
    return dict(zip(["mean", *(f"p{share}" for share in PERCENTILES)], found, strict=True))


def _limit(goal: float | None) -> float:
    return np.inf if goal is None else goal
