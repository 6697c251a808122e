"""What is done to sequences that should not matter to their tokens. For tests, and `benchmarks/exactness.py`."""

from collections.abc import Callable
from itertools import count

from paceline.batching import moves
from paceline.batching.scheduler import Scheduler
from paceline.batching.state import STATE, TOKEN_BUDGET
from paceline.compiled import I64, VOID, entry
from paceline.core.batch import Batch

Schedule = Callable[[Scheduler], None]  # changes how its steps are composed

_preempt = entry(VOID, STATE, I64)(moves.preempt)


def forced(every: int) -> Schedule:
    """Now and then a sequence is preempted for no reason: the latest, or another one, in turn."""

    def change(scheduler: Scheduler) -> None:
        steps, compose = count(1), scheduler.compose

        def step(group: int, now: float) -> Batch | None:
            if not scheduler.flying and (number := next(steps)) % every == 0 and (running := scheduler.running):
                sequence = running[-(number // every) % len(running)]
                _preempt(scheduler.handle, sequence.slot)
                scheduler.preempted.append(sequence)
            return compose(group, now)

        scheduler.compose = step

    return change


class Disturbed:
    """Counts sequences, over all steps that it is shown: whose prompts came in parts, and who lost their blocks when
    they had generated something."""

    def __init__(self) -> None:
        self._cut, self._preempted = set[str](), set[str]()

    def __call__(self, batch: Batch) -> None:
        self._cut.update(request for request, emits in zip(batch.requests, batch.emits, strict=True) if not emits)
        self._preempted.update(sequence.id for sequence in batch.preempted if sequence.generated)

    @property
    def cut(self) -> int:
        return len(self._cut)

    @property
    def preempted(self) -> int:
        return len(self._preempted)


def off_and_on(every: int) -> Schedule:
    """For half of every so many steps nothing of the budget is left for drafts."""

    def change(scheduler: Scheduler) -> None:
        steps, compose, limits = count(1), scheduler.compose, scheduler.state.limits
        budget = int(limits[TOKEN_BUDGET])

        def step(group: int, now: float) -> Batch | None:
            limits[TOKEN_BUDGET] = 1 if not scheduler.flying and next(steps) % every < every // 2 else budget
            return compose(group, now)

        scheduler.compose = step

    return change
