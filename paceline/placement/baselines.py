"""What AlpaServe is compared with (section 6): placements that are simpler, and one that sees the future."""

from collections.abc import Sequence

import numpy as np

from paceline.placement.greedy import Choice, fill
from paceline.placement.problem import Ints, Problem
from paceline.placement.search import uniform


def selective_replication(problem: Problem) -> Choice:
    """Groups of one device each, models by the fast heuristic: replicas, and no model parallelism."""
    smallest = int(np.argmin(problem.devices))
    return uniform(problem, smallest)


def clockwork(problem: Problem, window: float) -> list[tuple[float, Choice]]:
    """Clockwork++: a selective replication for every `window` seconds, made for that window's own requests; models are
    swapped for free. Nobody can do that: a bound. (Begin, placement) of each window."""
    found = []
    last = float(problem.times[-1]) if len(problem.times) else 0.0
    for begin in window * np.arange(int(last / window) + 1):
        now = (problem.times >= begin) & (problem.times < begin + window)
        found.append((float(begin), selective_replication(problem.only(now))))
    return found


def round_robin(problem: Problem, shape: Ints) -> Choice:
    """Models one after the other to the next group that has room, until none has."""
    member = np.zeros((len(shape), len(problem.tables)), np.bool_)
    g, idle = 0, 0
    while idle < len(problem.tables):
        for m in range(len(problem.tables)):
            idle += 1
            for step in range(len(shape)):
                at = (g + step) % len(shape)
                if problem.room(shape[at], member[at])[m]:
                    member[at, m] = True
                    g, idle = at + 1, 0
                    break
    return Choice(shape, member, problem.evaluate(shape, member))


def fixed(problem: Problem, p: int) -> Choice:
    """Groups of one shape for everybody."""
    return fill(problem, np.full(problem.cluster.devices // int(problem.devices[p]), p, np.int64))


def alone(problem: Problem, p: int, order: Sequence[int] | None = None) -> Choice:
    """A group for each model, as long as there are devices."""
    groups = problem.cluster.devices // int(problem.devices[p])
    shape = np.full(groups, p, np.int64)
    member = np.zeros((groups, len(problem.tables)), np.bool_)
    for g, m in zip(range(groups), range(len(problem.tables)) if order is None else order, strict=False):
        member[g, m] = problem.room(p, member[g])[m]
    return Choice(shape, member, problem.evaluate(shape, member))
