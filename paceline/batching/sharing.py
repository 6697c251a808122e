"""Who takes a request, and whose turn it is: decisions between groups, for the controller and for its simulation.

Arguments are lists or arrays over groups.
"""

from typing import Any

from paceline.batching.compiled import part


@part
def fewest(queued: Any, able: Any) -> int:
    """Of the groups that can take a request the one with the fewest, the first of equals; -1: none can."""
    best = -1
    for g in range(len(queued)):
        if able[g] and (best < 0 or queued[g] < queued[best]):
            best = g
    return best


@part
def next_in_turn(served: Any, tried: Any) -> int:
    """Of the groups that share a device the one that waited longest for a step, the first of equals; -1: all tried."""
    best = -1
    for g in range(len(served)):
        if not tried[g] and (best < 0 or served[g] < served[best]):
            best = g
    return best
