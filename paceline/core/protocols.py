"""Seams between packages."""

from typing import Protocol

from paceline.core.batch import Batch, StepResult


class LatencyModel(Protocol):
    """Predicts the seconds that a batch takes."""

    def __call__(self, batch: Batch) -> float: ...


class OutputOracle(Protocol):
    """Plays the model in a simulation: knows how many tokens a request yields, and tells nobody before."""

    def __call__(self, batch: Batch) -> StepResult: ...
