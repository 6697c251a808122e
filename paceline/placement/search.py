"""How devices are grouped and shaped (AlpaServe, section 4.2, Algorithm 2), and a search that goes on from there.

1. Groups of one shape over all devices, for every shape; models by the fast heuristic.
2. Buckets: models of similar latency get devices of their own, so that short requests do not wait behind long ones.
   Devices go to buckets by their load, then move from one to the other as long as that is better.
3. The best of these are improved by local search (`improve`), with different shapes beside each other.

Where the paper enumerates all splits of devices over buckets, each part here is solved once and remembered. A cluster
of more than CELL devices is planned in cells of that size with the same share of traffic each: pooling over more
devices gains little, and costs grow with the cells.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from paceline.placement.greedy import Choice, fill
from paceline.placement.improve import improve
from paceline.placement.problem import Ints, Problem

CELL = 64  # devices
EFFORT = 20_000_000  # simulated requests to spend on local search, for each cell
BUCKETS = 3  # at most
APART = 1.25  # latencies whose ratio is below are of one bucket
Progress = Callable[[str], None]
Part = tuple[Ints, Problem, Choice]  # some of the models, on their own


def plan(problem: Problem, effort: int = EFFORT, seed: int = 0, progress: Progress = lambda text: None) -> Choice:
    """The best placement found. Deterministic for a seed. Raises ValueError for a model that fits nowhere."""
    refuse_misfits(problem)
    cells = -(-problem.cluster.devices // CELL)
    if cells == 1:
        return solve(problem, effort, seed, progress)
    parts = []
    for index, (models, devices) in enumerate(split_cells(problem, cells)):
        progress(f"cell {index + 1} of {cells}")
        some = part(problem, models, devices)
        parts.append((models, some, solve(some, effort, seed + index)))
        problem.evaluations += some.evaluations
    return joined(problem, parts)


def solve(problem: Problem, effort: int, seed: int, progress: Progress = lambda text: None) -> Choice:
    """Algorithm 2 and local search, without cells."""
    starts = []
    for p in range(len(problem.shapes)):
        progress(f"groups of {problem.shapes[p]}")
        starts.append(uniform(problem, p))
    starts.sort(key=lambda choice: choice.outcome.score, reverse=True)
    for cuts in bucketings(problem):
        progress(f"{len(cuts)} buckets")
        starts.append(in_buckets(problem, cuts))
    starts.sort(key=lambda choice: choice.outcome.score, reverse=True)
    progress("local search")
    evaluations = effort // max(1, len(problem.times))
    tried = [improve(problem, start, evaluations // 6, seed + i) for i, start in enumerate(starts[:3])]
    best = max(tried, key=lambda choice: choice.outcome.score)
    return improve(problem, best, evaluations // 2, seed + len(tried))


def uniform(problem: Problem, p: int) -> Choice:
    """As many groups of one shape as there are devices for; smaller ones of the rest."""
    sizes, shape = problem.devices, []
    left = problem.cluster.devices
    while left:
        fitting = np.flatnonzero(sizes <= left)
        if not len(fitting):
            break
        like = np.flatnonzero(sizes == sizes[fitting].max())
        one = p if sizes[p] <= left else int(min(like, key=lambda q: abs(problem.stages[q] - problem.stages[p])))
        shape.append(one)
        left -= int(sizes[one])
    return fill(problem, np.array(shape, np.int64), at_a_time=max(1, len(shape) // 4))


def bucketings(problem: Problem) -> Iterator[list[Ints]]:
    """Ways to divide the models by latency into two buckets or more, at the widest gaps first."""
    alone = np.array([table.alone for table in problem.tables])
    order = np.argsort(alone, kind="stable")
    ratios = alone[order][1:] / alone[order][:-1]
    gaps = [int(i) + 1 for i in np.argsort(-ratios, kind="stable") if ratios[i] > APART][:4]
    for count in range(1, BUCKETS):
        for cuts in combinations(sorted(gaps), count):
            yield np.split(order, cuts)


def in_buckets(problem: Problem, buckets: list[Ints]) -> Choice:
    """Devices for each bucket: by load first, then one move after the other that is better."""
    loads = np.array([_load(problem, models) for models in buckets])
    devices, total = problem.cluster.devices, loads.sum() or 1.0
    known: dict[tuple[int, int], Part] = {}

    def solved(bucket: int, count: int) -> Part:
        if (bucket, count) not in known:
            some = part(problem, buckets[bucket], count)
            starts = [uniform(some, p) for p in range(len(some.shapes))]
            best = max(starts, key=lambda choice: choice.outcome.score)
            known[bucket, count] = buckets[bucket], some, best
            problem.evaluations += some.evaluations
        return known[bucket, count]

    def good(counts: list[int]) -> tuple[int, float]:
        scores = [solved(b, count)[2].outcome.score for b, count in enumerate(counts)]
        return sum(score.good for score in scores), sum(score.speed for score in scores)

    counts = np.maximum(1, np.floor(devices * loads / total)).astype(int).tolist()
    while sum(counts) > devices:
        counts[int(np.argmax(counts))] -= 1
    counts[int(np.argmax(loads))] += devices - sum(counts)
    if min(counts) < 1:
        return uniform(problem, 0)
    step, best = max(1, devices // 8), good(counts)
    while step:
        moves = []
        for a in range(len(counts)):
            for b in range(len(counts)):
                if a != b and counts[a] > step:
                    moved = [count - step * (i == a) + step * (i == b) for i, count in enumerate(counts)]
                    moves.append((good(moved), moved))
        if moves and max(moves)[0] > best:
            best, counts = max(moves)
        else:
            step //= 2
    return joined(problem, [solved(b, count) for b, count in enumerate(counts)])


def refuse_misfits(problem: Problem) -> None:
    """Raises ValueError for a model that fits no group of these devices, or whose goal no shape can meet."""
    memory, cluster = problem.cluster.memory, problem.cluster
    for m, table in enumerate(problem.tables):
        largest = problem.weight[m].max(1)
        if not (largest <= memory).any():
            possible = [float(b) for b in largest if np.isfinite(b)]
            least = f"{min(possible) / 2**30:.2f} GiB a device" if possible else "no shape is known for so few devices"
            raise ValueError(
                f"memory: {table.name!r} fits nowhere on {cluster.devices} devices with {memory / 2**30:.2f} GiB; "
                f"its smallest share is {least}"
            )
        fitting = problem.latency[m, largest <= memory]
        alone = np.where(np.isfinite(fitting), fitting, 0.0).sum(1).min() + problem.timing.margin
        if alone > problem.goal[m] and problem.judge is None:
            raise ValueError(
                f"slo.deadline: {table.name!r} takes {alone:.4g} s in its fastest shape that fits, more than its goal "
                f"of {problem.goal[m]:.4g} s"
            )


def part(problem: Problem, models: Ints, devices: int) -> Problem:
    """Some of the models, on so many devices, with their own traffic."""
    places = np.full(len(problem.tables), -1, np.int32)
    places[models] = np.arange(len(models))
    mine = places[problem.models] >= 0
    return Problem(
        replace(problem.cluster, devices=devices), [problem.tables[m] for m in models],
        [problem.slo[m] for m in models], problem.times[mine], places[problem.models[mine]], problem.rule,
        problem.timing, [problem.reserve[m] for m in models] if problem.reserve else (), problem.judge,
    )  # fmt: skip


def joined(problem: Problem, parts: list[Part]) -> Choice:
    """One placement of several."""
    shapes, members = [], []
    for models, some, choice in parts:
        member = np.zeros((len(choice.shape), len(problem.tables)), np.bool_)
        member[:, models] = choice.member
        members.append(member)
        shapes.append([problem.shapes.index(some.shapes[p]) for p in choice.shape])
    shape, member = np.concatenate(shapes).astype(np.int64), np.concatenate(members)
    return Choice(shape, member, problem.evaluate(shape, member))


def split_cells(problem: Problem, cells: int) -> list[tuple[Ints, int]]:
    """Models and devices of each cell: the heaviest model goes to the cell that has least yet."""
    loads = [(_load(problem, np.array([m])), m) for m in range(len(problem.tables))]
    sizes = [problem.cluster.devices // cells + (c < problem.cluster.devices % cells) for c in range(cells)]
    held: list[list[int]] = [[] for _ in range(cells)]
    weight = [0.0] * cells
    for load, m in sorted(loads, reverse=True):
        c = min(range(cells), key=lambda c: (weight[c] / sizes[c], len(held[c])))
        held[c].append(m)
        weight[c] += load
    return [(np.array(sorted(models), np.int64), size) for models, size in zip(held, sizes, strict=True) if models]


def _load(problem: Problem, models: Ints) -> float:
    """Device-seconds of these models' requests."""
    return float(sum(problem.requests[m] * problem.tables[m].alone for m in models))
