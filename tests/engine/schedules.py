"""Policies that do to sequences what should not matter to their tokens. For tests, and `benchmarks/exactness.py`."""

from dataclasses import replace
from itertools import count

from paceline.batching.policies import policy as named
from paceline.batching.scheduler import Policy, Scheduler


def forced(every: int) -> Policy:
    """The default policy, but now and then the latest sequence is preempted for no reason."""
    steps, policy = count(1), named("paceline")

    def compose(scheduler: Scheduler) -> None:
        if next(steps) % every == 0 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
        policy.compose(scheduler)

    return replace(policy, compose=compose)


def off_and_on(every: int) -> Policy:
    """The default policy, but for half of every so many steps nothing of the budget is left for drafts."""
    steps, policy = count(1), named("paceline")

    def compose(scheduler: Scheduler) -> None:
        limits = scheduler.config
        if next(steps) % every < every // 2:
            scheduler.config = replace(limits, token_budget=1)
        policy.compose(scheduler)
        scheduler.config = limits

    return replace(policy, compose=compose)
