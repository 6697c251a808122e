"""Cutting a model's layers into pipeline stages (AlpaServe, section 4.1): the slowest stage as fast as possible.

F(s, k) = min over i < k of max(F(s - 1, i), cost of layers i..k): the fastest that the slowest of s stages can be that
hold the first k layers. Embedding and head are layers like others. Of equally good cuts the one whose stages differ
least: later stages are filled first where it makes no difference.
"""

from collections.abc import Sequence
from itertools import accumulate


def cut(costs: Sequence[float], stages: int) -> list[int]:
    """Ends of the stages: stage s holds layers [end of the one before, ends[s]). None is empty. Raises ValueError."""
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"pipeline: {stages} stages for {count} layers; from 1 to {count} are possible")
    before = [0.0, *accumulate(costs)]
    # best[k]: (slowest stage, sum of squares) of the first k layers; chosen[s][k]: where the last of s stages begins
    best = [(before[k], before[k] ** 2) for k in range(count + 1)]
    chosen: list[list[int]] = []
    for stage in range(2, stages + 1):
        row, at = [(float("inf"), 0.0)] * (count + 1), [0] * (count + 1)
        for k in range(stage, count + 1):
            for i in range(stage - 1, k):
                last = before[k] - before[i]
                slowest = max(best[i][0], last)
                if slowest < row[k][0] or (slowest == row[k][0] and best[i][1] + last**2 < row[k][1]):
                    row[k], at[k] = (slowest, best[i][1] + last**2), i
        best = row
        chosen.append(at)
    ends = [count]
    for at in reversed(chosen):
        ends.append(at[ends[-1]])
    return ends[::-1]
