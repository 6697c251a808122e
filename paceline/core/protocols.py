"""Seams between packages."""

from collections.abc import Sequence
from typing import Protocol

from paceline.core.batch import Batch, StepResult, StepShape


class Budget(Protocol):
    """How wide the next step may be, asked in every step that could take a prompt (Sarathi-Serve asks once for all)."""

    def __call__(
        self, shape: StepShape, prompts: Sequence[tuple[int, int]], tbt: float | None, pace: float
    ) -> int:
        """Tokens of the whole step, decodes included; more than the group's `token_budget` counts as that.

        `shape`: the decodes that the step takes in any case. `prompts`: (context, remaining) tokens of the prompts that
        could be chunked, in the order in which they would be, as far as they could fill `token_budget`. `tbt`: seconds,
        the tightest goal for the time between tokens among the running sequences that decode; None: nobody has one.
        `pace`: what steps took of late over what was predicted for them.
        """
        ...


class LatencyModel(Protocol):
    """Predicts the seconds that a batch takes, in each stage of its group."""

    def __call__(self, batch: Batch) -> float: ...


class OutputOracle(Protocol):
    """Plays the model in a simulation: knows how many tokens a request yields, and tells nobody before."""

    def __call__(self, batch: Batch) -> StepResult: ...
