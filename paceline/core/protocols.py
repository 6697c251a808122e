"""Seams between packages."""

from typing import Any, Protocol

from paceline.core.batch import Batch, StepResult


class Lookahead(Protocol):
    """How many tokens to draft, asked in every step in which somebody may. Arrays are NumPy's; slots the group's."""

    def choose(
        self, numbers: Any, drafts: Any, running: Any, pending: int, budget: int, goal: float
    ) -> tuple[Any, float]:
        """Tokens to draft by slot, at most `drafts`, and the seconds that drafting them should take.

        `numbers` [slots, NUM_COLUMNS] are the sequences; `running` the slots whose decodes the step takes where they
        are ready; `pending` prompt tokens wait, of which the step takes what the `budget` leaves: the tokens that it
        would have without drafts. `goal`: seconds that its decodes may take with their drafts, if they can be done in
        that time without any. Of those for whom nothing is to be drafted it may enter why, as `HELD_BACK`.
        """
        ...

    def rests(self, running: Any, pending: int) -> bool:
        """Whether nobody is to draft in the next step either, as was chosen last; else it is to be chosen for."""
        ...

    def composed(self, resting: bool) -> None:
        """A step is under way; `resting`: it was not chosen for."""
        ...

    def rested(self, slots: Any, steady: bool, seconds: float) -> bool:
        """A step without drafts is done; `steady`: it was decodes alone, and nobody left. Whether it was at rest, so
        that there is nothing more to observe."""
        ...

    def observe(self, slots: Any, known: Any, drafted: Any, emitted: Any, asked: Any) -> None:
        """A step is done: each slot (-1: none) had so many known tokens computed (1: a decode), drafted so many, where
        so many were asked for, and yielded so many in all."""
        ...

    def observe_times(self, slots: Any, drafted: Any, read: int, seconds: float, draft_seconds: float) -> None:
        """A step of decodes is done, that drafted so many tokens each behind `read` tokens in all.

        `seconds` of the whole step, in the engine and beside it, `draft_seconds` of drafting in it. Comes before
        `observe`.
        """
        ...

    def verification(self, seconds: float, sequences: int, tokens: int) -> float:
        """Of a step of so many sequences' tokens with drafts, without drafting: what it should take, in the engine and
        beside it, where the profile says so many seconds."""
        ...

    def forget(self, slot: int, kind: int = 0) -> None:
        """Another sequence has the slot now, of this kind (`SamplingParams.kind`)."""
        ...


class LatencyModel(Protocol):
    """Predicts the seconds that a batch takes, in each stage of its group."""

    def __call__(self, batch: Batch) -> float: ...


class OutputOracle(Protocol):
    """Plays the model in a simulation: knows how many tokens a request yields, and tells nobody before."""

    def __call__(self, batch: Batch) -> StepResult: ...
