"""Which of the models that share a device is loaded, where it does not hold all of them.

A model that has requests and is not loaded comes as soon as there is a place: that of the model which nobody has asked
for longest. While all others are busy it waits for PATIENCE_S; then the one with the fewest requests gives way, unless
it has just come: its requests are computed again later. So nobody starves, and loading does not take all the time.
"""

from collections.abc import Sequence
from typing import NamedTuple

PATIENCE_S = 1.0
STAY_S = 2.0


class Loaded(NamedTuple):
    """A model on a device."""

    group: int
    requests: int  # waiting and running
    used: float  # when its last step was done
    since: float  # when it was loaded
    steps: bool  # it is there; False: it is still coming


def gives_way(loaded: Sequence[Loaded], waited: float, now: float) -> int:
    """The group that makes room for one whose first request has waited for so many seconds; -1: none does."""
    idle = [one for one in loaded if one.steps and not one.requests]
    if idle:
        return min(idle, key=lambda one: (max(one.used, one.since), one.group)).group
    settled = [one for one in loaded if one.steps and now - one.since >= STAY_S]
    if waited >= PATIENCE_S and settled:
        return min(settled, key=lambda one: (one.requests, one.since, one.group)).group
    return -1
