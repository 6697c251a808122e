"""Why a placement is as it is: what each group's next best shape, and the simpler policies, would have lost."""

from typing import NamedTuple

import numpy as np

from paceline.placement.baselines import clockwork, selective_replication
from paceline.placement.greedy import Choice, fill
from paceline.placement.problem import Problem, assign
from paceline.placement.search import uniform


class Alternative(NamedTuple):
    """Something else, and the share of requests that would meet their goals."""

    what: str
    attainment: float


def of_group(problem: Problem, choice: Choice, g: int) -> list[Alternative]:
    """The group's devices in other shapes, and as groups of one device; the best first. Models that do not fit are
    dropped, and room is filled anew."""
    size, found = int(problem.devices[choice.shape[g]]), []
    keep = np.setdiff1d(np.arange(len(choice.shape)), [g])
    one = np.flatnonzero(problem.devices == 1)
    others = [[int(p)] for p in np.flatnonzero(problem.devices == size) if p != choice.shape[g]]
    if size > 1 and len(one):
        others.append([int(one[0])] * size)
    for shapes in others:
        shape = np.concatenate([choice.shape[keep], shapes]).astype(np.int64)
        if assign(problem.cluster, problem.largest_first(shape)) is None:
            continue
        member = np.zeros((len(shape), len(problem.tables)), np.bool_)
        member[: len(keep)] = choice.member[keep]
        if len(shapes) == 1:
            member[-1] = _that_fit(problem, choice.member[g], shapes[0])
        after = fill(problem, shape, member, at_a_time=len(shapes))
        what = str(problem.shapes[shapes[0]]) if len(shapes) == 1 else f"{size} x {problem.shapes[shapes[0]]}"
        found.append(Alternative(what, after.outcome.attainment))
    return sorted(found, key=lambda other: -other.attainment)


def policies(problem: Problem, window: float) -> list[Alternative]:
    """The runners-up: groups of one shape for all, selective replication, Clockwork++ (which sees the future)."""
    found = [
        Alternative(f"groups of {problem.shapes[p]} only", uniform(problem, p).outcome.attainment)
        for p in range(len(problem.shapes))
    ]
    found.append(Alternative("selective replication", selective_replication(problem).outcome.attainment))
    if problem.judge is None:
        parts = clockwork(problem, window)
        good = sum(int(choice.outcome.good.sum()) for _, choice in parts)
        found.append(Alternative(f"Clockwork++ every {window:g} s", good / max(1, len(problem.times))))
    return sorted(found, key=lambda other: -other.attainment)


def _that_fit(problem: Problem, models: np.ndarray, p: int) -> np.ndarray:
    """Of these models as many as fit the shape, those with most requests first."""
    kept = np.zeros_like(models)
    for m in sorted(np.flatnonzero(models), key=lambda m: -problem.requests[m]):
        kept[m] = problem.room(p, kept)[m]
    return kept
