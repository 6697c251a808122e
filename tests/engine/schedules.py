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
    """Now and then the latest sequence is preempted for no reason."""

    def change(scheduler: Scheduler) -> None:
        steps, compose = count(1), scheduler.compose

        def step(group: int, now: float) -> Batch | None:
            if not scheduler.flying and next(steps) % every == 0 and scheduler.running:
                sequence = scheduler.running[-1]
                _preempt(scheduler.handle, sequence.slot)
                scheduler.preempted.append(sequence)
            return compose(group, now)

        scheduler.compose = step

    return change


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
