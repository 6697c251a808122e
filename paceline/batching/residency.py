"""Which of the models that share a device is loaded, where it does not hold all of them.

A model that has requests and is not loaded comes as soon as there is a place: that of the model which nobody has asked
for longest. While all others are busy it waits for PATIENCE_S; then the one with the fewest requests gives way, unless
it has just come, or has given no token since: its requests are computed again later, from the tokens that they have. So
nobody starves, every stay brings somebody on, and loading does not take all the time.
"""

# mypy: disable-error-code=no-any-return

from typing import Any

from paceline.compiled import part

PATIENCE_S = 1.0
STAY_S = 2.0


@part
def gives_way(there: Any, requests: Any, used: Any, came: Any, emitted: Any, waited: float, now: float) -> int:
    """Which group of a device makes room for one whose first request has waited for so many seconds; -1: none does.

    Arguments are lists or arrays over its groups: whether the model is there (not one that is still coming), its
    requests, waiting and running, when its last step was done, when it came, and when it last gave a token.
    """
    best = -1
    for g in range(len(there)):
        if there[g] and requests[g] == 0 and (
            best < 0 or max(used[g], came[g]) < max(used[best], came[best])
        ):
            best = g
    if best >= 0 or waited < PATIENCE_S:
        return best
    for g in range(len(there)):
        if there[g] and now - came[g] >= STAY_S and emitted[g] >= came[g] and (
            best < 0
            or requests[g] < requests[best]
            or (requests[g] == requests[best] and came[g] < came[best])
        ):
            best = g
    return best


@part
def loading(load_s: float, resident: bool, since: float, arrival: float) -> float:
    """Seconds for which a request that arrives still waits for a model that is not there: all of what loading takes, or
    what is left of it since it was decided that the model is to come."""
    return max(0.0, load_s - (arrival - since if resident else 0.0))
