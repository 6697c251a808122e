"""Which models each group has, for given groups (AlpaServe, section 4.2, Algorithm 1, and its fast heuristic)."""

from heapq import heapify, heappop, heappush
from itertools import cycle
from typing import NamedTuple

import numpy as np

from paceline.placement.problem import Bools, Ints, Outcome, Problem


class Choice(NamedTuple):
    """Groups, their models, and what becomes of the traffic."""

    shape: Ints
    member: Bools
    outcome: Outcome


def beam_search(problem: Problem, shape: Ints, beam: int = 1) -> Choice:
    """Algorithm 1: every model on every group that has room for it is tried, the `beam` best go on, until nothing fits.

    The best of all that were seen. Groups of the same shape are interchangeable, and tried once.
    """
    empty = np.zeros((len(shape), len(problem.tables)), np.bool_)
    best = Choice(shape, empty, problem.evaluate(shape, empty))
    front = [empty]
    while front:
        seen: dict[tuple[tuple[int, bytes], ...], Choice] = {}
        for member in front:
            for g, p in enumerate(shape):
                for m in np.flatnonzero(problem.room(p, member[g])):
                    more = member.copy()
                    more[g, m] = True
                    key = tuple(sorted((int(q), row.tobytes()) for q, row in zip(shape, more, strict=True)))
                    if key not in seen:
                        seen[key] = Choice(shape, more, problem.evaluate(shape, more))
        ranked = sorted(seen.values(), key=lambda choice: choice.outcome.score, reverse=True)[:beam]
        best = max([best, *ranked], key=lambda choice: choice.outcome.score)
        front = [choice.member for choice in ranked]
    return best


def fill(problem: Problem, shape: Ints, member: Bools | None = None, at_a_time: int = 1) -> Choice:
    """The fast heuristic: simulate once, then the model with the most unserved requests goes to the least used group
    that has room for it; again, until nothing fits. The best of all placements on the way.

    `at_a_time`: so many additions before the next simulation, each taken to halve what its model has unserved.
    """
    member = np.zeros((len(shape), len(problem.tables)), np.bool_) if member is None else member.copy()
    best = now = Choice(shape, member.copy(), problem.evaluate(shape, member))
    while add(problem, shape, member, now.outcome, at_a_time):
        now = Choice(shape, member.copy(), problem.evaluate(shape, member))
        best = max(best, now, key=lambda choice: choice.outcome.score)
    return best


def add(problem: Problem, shape: Ints, member: Bools, outcome: Outcome, most: int) -> int:
    """Adds up to so many replicas to `member`, in turn to each group, by what was unserved and asked; how many."""
    unserved = [(-float(bad), m) for m, bad in enumerate(outcome.bad) if bad]
    heapify(unserved)
    added, last = 0, 0
    for g in cycle(np.argsort(outcome.asked, kind="stable")):
        room, passed = problem.room(shape[g], member[g]), list[tuple[float, int]]()
        last += 1
        while unserved:
            bad, m = heappop(unserved)
            if room[m]:
                member[g, m] = True
                added, last = added + 1, 0
                passed.append((bad / 2, m))
                break
            passed.append((bad, m))
        for one in passed:
            heappush(unserved, one)
        if added == most or last == len(shape):
            break
    return added
