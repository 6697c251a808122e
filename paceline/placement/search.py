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

from paceline.core.cluster import Parallel
from paceline.placement.greedy import Choice, fill
from paceline.placement.improve import improve
from paceline.placement.problem import Bools, Ints, Problem, assign
from paceline.placement.tables import ModelTable, ShapeTable

CELL = 64  # devices
EFFORT = 60_000_000  # simulated requests to spend on local search, for each cell
MOST = 8_000  # simulations of local search at that effort: with little traffic, making changes is what takes time
BUCKETS = 3  # at most
GAPS = 3  # between latencies, at which buckets may end
ROUNDS = 24  # of the fast heuristic: with more replicas to place several are placed between simulations
LIKELY = 2  # shapes that buckets are tried with: those that are best for all models
APART = 1.25  # latencies whose ratio is below are of one bucket
PLACES = 8  # groups that a model is tried in which the search left out
Progress = Callable[[str], None]
Part = tuple[Ints, Problem, Choice]  # some of the models, on their own


def plan(problem: Problem, effort: int = EFFORT, seed: int = 0, progress: Progress = lambda text: None) -> Choice:
    """The best placement found; groups in the order of `Problem.placement`. Deterministic for a seed.

    Models that are in no group get a replica where room is left: a placement without them cannot be served. Raises
    ValueError for a model that fits nowhere.
    """
    refuse_misfits(problem)
    best = in_cells(problem, effort, seed, progress) or solve(problem, effort, seed, progress)
    shape, member = problem.canonical(best.shape, best.member)
    for m in np.flatnonzero(~member.any(0)):
        member = with_model(problem, shape, member, int(m))
    return Choice(shape, member, problem.evaluate(shape, member))


def with_model(problem: Problem, shape: Ints, member: Bools, m: int) -> Bools:
    """`member` with one model more, in the group where it is in the way of others least, of PLACES whose models have
    the fewest requests; as it is without room."""
    places = [g for g, p in enumerate(shape) if problem.room(int(p), member[g])[m]]
    places.sort(key=lambda g: int(problem.requests[member[g]].sum()))
    tried = []
    for g in places[: PLACES if problem.requests[m] else 1]:
        tried.append(member.copy())
        tried[-1][g, m] = True
    if len(tried) == 1:
        return tried[0]
    return max(tried, key=lambda more: problem.evaluate(shape, more).score, default=member)


def in_cells(problem: Problem, effort: int, seed: int, progress: Progress) -> Choice | None:
    """Cells planned one by one, or the shape that they like best over all devices. None: there are no cells, or one of
    them cannot hold its models."""
    cells, parts = split_cells(problem), list[Part]()
    for index, (mine, devices) in enumerate(cells):
        progress(f"cell {index + 1} of {len(cells)}")
        models = np.flatnonzero(np.bincount(problem.models[mine], minlength=len(problem.tables)))
        some = part(problem, models, devices, mine)
        if some is None:
            return None
        parts.append((models, some, solve(some, effort, seed + index, progress)))
        problem.evaluations += some.evaluations
    whole = joined(problem, parts) if parts else None
    if whole is None:
        return None
    alike = uniform(problem, int(np.bincount(whole.shape).argmax()))
    return max(whole, alike, key=lambda choice: choice.outcome.score)


def solve(problem: Problem, effort: int, seed: int, progress: Progress = lambda text: None) -> Choice:
    """Algorithm 2 and local search, without cells."""
    starts = []
    for p in range(len(problem.shapes)):
        progress(f"groups of {problem.shapes[p]}")
        starts.append((uniform(problem, p), problem.shapes[p]))
    starts.sort(key=lambda start: start[0].outcome.score, reverse=True)
    likely, choices = [parallel for _, parallel in starts[:LIKELY]], [choice for choice, _ in starts]
    if choices[0].outcome.bad.any():
        for cuts in bucketings(problem):
            progress(f"{len(cuts)} buckets")
            choices += [choice for choice in [in_buckets(problem, cuts, likely)] if choice]
    choices.sort(key=lambda choice: choice.outcome.score, reverse=True)
    progress("local search")
    evaluations = min(effort // max(1, len(problem.times)), max(1, effort // EFFORT) * MOST)
    tried = [improve(problem, start, evaluations // 6, seed + i) for i, start in enumerate(choices[:3])]
    best = max(tried, key=lambda choice: choice.outcome.score)
    return improve(problem, best, evaluations // 2, seed + len(tried))


def uniform(problem: Problem, p: int) -> Choice:
    """As many groups of one shape as there are devices for; smaller ones of the rest."""
    sizes, shape = problem.devices, list[int]()
    while True:
        left = problem.cluster.devices - int(sizes[shape].sum())
        like = sorted(np.flatnonzero(sizes <= left).tolist(), key=lambda q: _likeness(problem, p, q))
        fits = (q for q in like if assign(problem.cluster, problem.largest_first(np.array([*shape, q]))) is not None)
        if (one := next(fits, None)) is None:
            break
        shape.append(one)
    groups = np.array(shape, np.int64)
    weight = np.where(np.isfinite(problem.weight[:, groups]), problem.weight[:, groups], 0.0).max(2).mean(0)
    slots = (problem.cluster.memory / np.maximum(weight, 1.0)).clip(max=len(problem.tables)).sum()
    return fill(problem, groups, at_a_time=max(1, int(slots / ROUNDS)))


def _likeness(problem: Problem, p: int, q: int) -> tuple[bool, int, int]:
    """Order of shapes to use instead of p: itself, then large ones, then those of as many stages."""
    return q != p, -int(problem.devices[q]), abs(int(problem.stages[q] - problem.stages[p]))


def bucketings(problem: Problem) -> Iterator[list[Ints]]:
    """Ways to divide the models into two buckets or more: by kind, for no group has both; by latency, at the widest
    gaps first."""
    kinds = [np.flatnonzero(problem.kind_of == kind) for kind in np.unique(problem.kind_of)]
    if len(kinds) > 1:
        yield kinds
    alone = np.array([table.alone for table in problem.tables])
    order = np.argsort(alone, kind="stable")
    ratios = alone[order][1:] / alone[order][:-1]
    gaps = [int(i) + 1 for i in np.argsort(-ratios, kind="stable") if ratios[i] > APART][:GAPS]
    for count in range(1, BUCKETS):
        for cuts in combinations(sorted(gaps), count):
            yield np.split(order, cuts)


def in_buckets(problem: Problem, buckets: list[Ints], likely: list[Parallel]) -> Choice | None:
    """Devices for each bucket: by load first, then one move after the other that is better. None: there is no room."""
    loads = np.array([_load(problem, models) for models in buckets])
    devices, total = problem.cluster.devices, loads.sum() or 1.0
    known: dict[tuple[int, int], Part | None] = {}

    def solved(bucket: int, count: int) -> Part | None:
        if (bucket, count) not in known:
            some, best = part(problem, buckets[bucket], count), None
            if some:
                shapes = [p for p, parallel in enumerate(some.shapes) if parallel in likely] or range(len(some.shapes))
                best = max((uniform(some, p) for p in shapes), key=lambda choice: choice.outcome.score)
                problem.evaluations += some.evaluations
            known[bucket, count] = (buckets[bucket], some, best) if some and best else None
        return known[bucket, count]

    def good(counts: list[int]) -> tuple[int, float]:
        parts = [solved(b, count) for b, count in enumerate(counts)]
        if None in parts:
            return -1, 0.0
        scores = [part[2].outcome.score for part in parts if part]
        return sum(score.good for score in scores), sum(score.speed for score in scores)

    counts = np.maximum(1, np.floor(devices * loads / total)).astype(int).tolist()
    while sum(counts) > devices:
        counts[int(np.argmax(counts))] -= 1
    counts[int(np.argmax(loads))] += devices - sum(counts)
    if min(counts) < 1:
        return None
    step, best = max(1, devices // 8), good(counts)
    while step >= max(1, devices // 32):
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
    parts = [solved(b, count) for b, count in enumerate(counts)]
    return joined(problem, [one for one in parts if one]) if None not in parts else None


def refuse_misfits(problem: Problem) -> None:
    """Raises ValueError for a model that fits no group of these devices, or whose goal no shape can meet."""
    memory, cluster = problem.cluster.memory, problem.cluster
    for m, table in enumerate(problem.tables):
        largest = problem.weight[m].max(1) + problem.working[m]
        if not (largest <= memory).any():
            possible = [float(b) for b in largest if np.isfinite(b)]
            least = f"{min(possible) / 2**30:.2f} GiB a device" if possible else "no shape is known for so few devices"
            raise ValueError(
                f"memory: {table.name!r} fits nowhere on {cluster.devices} devices with {memory / 2**30:.2f} GiB; "
                f"its smallest share is {least}"
            )
        fitting = problem.latency[m, largest <= memory]
        alone = np.where(np.isfinite(fitting), fitting, 0.0).sum(1).min() + problem.timing.margin
        if alone > problem.goal[m] and problem.kind_of[m] == 0:
            raise ValueError(
                f"slo.deadline: {table.name!r} takes {alone:.4g} s in its fastest shape that fits, more than its goal "
                f"of {problem.goal[m]:.4g} s"
            )


def part(problem: Problem, models: Ints, devices: int, mine: Bools | None = None) -> Problem | None:
    """Some of the models, on so many devices, with their own traffic (`mine` [requests]: of that these requests).

    None: one of them fits nowhere on so few devices.
    """
    places = np.full(len(problem.tables), -1, np.int32)
    places[models] = np.arange(len(models))
    mine = (places[problem.models] >= 0) & (True if mine is None else mine)
    some = Problem(
        replace(problem.cluster, devices=devices), [problem.tables[m] for m in models],
        [problem.slo[m] for m in models], problem.times[mine], places[problem.models[mine]], problem.rule,
        problem.timing, [problem.reserve[m] for m in models] if problem.reserve else (),
        [problem.kinds[m] for m in models] if problem.kinds else (), problem.judge,
        problem.numbers[mine],
    )  # fmt: skip
    fits = [some.room(p, np.zeros(len(models), np.bool_)) for p in range(len(some.shapes))]
    return some if fits and np.any(fits, 0).all() else None


def joined(problem: Problem, parts: list[Part]) -> Choice | None:
    """One placement of several; None where nodes have no room for them beside each other."""
    shapes, members = [], []
    for models, some, choice in parts:
        member = np.zeros((len(choice.shape), len(problem.tables)), np.bool_)
        member[:, models] = choice.member
        members.append(member)
        shapes.append([problem.shapes.index(some.shapes[p]) for p in choice.shape])
    shape, member = np.concatenate(shapes).astype(np.int64), np.concatenate(members)
    if assign(problem.cluster, problem.largest_first(shape)) is None:
        return None
    return Choice(shape, member, problem.evaluate(shape, member))


def split_cells(problem: Problem) -> list[tuple[Bools, int]]:
    """Requests and devices of each cell: whole nodes, as much load and as many bytes for each device as in the others.

    A model with more load than a cell's share is in several, a request in each in turn. None where the cluster is no
    larger than a cell, or a model needs more devices than a cell has.
    """
    cluster = problem.cluster
    nodes = -(-cluster.devices // cluster.devices_per_node)
    cells = min(-(-cluster.devices // CELL), nodes)
    smallest = [min((p.devices for p in t.shapes), default=1) for t in problem.tables]
    if cells < 2 or max(smallest) > cluster.devices // cells or len(problem.times) == 0:
        return []
    ends = [min(cluster.devices, (nodes * (c + 1) // cells) * cluster.devices_per_node) for c in range(cells)]
    sizes = np.diff([0, *ends])
    used, mine = np.zeros((cells, 2)), np.zeros((cells, len(problem.times)), np.bool_)
    loads = np.array([[_load(problem, np.array([m])), sum(_smallest(t).stage_weight_bytes)]
                      for m, t in enumerate(problem.tables)])  # fmt: skip
    totals = np.maximum(loads.sum(0), 1e-9)
    for m in np.argsort(-loads[:, 0], kind="stable"):
        copies = min(cells, max(1, round(float(loads[m, 0] / totals[0]) * cells)))
        index = np.flatnonzero(problem.models == m)
        for copy in range(copies):
            full = (used / totals).max(1) / sizes + (mine[:, index].any(1) if copy else 0)
            c = int(full.argmin())
            used[c] += loads[m] / (copies, 1)
            mine[c, index[copy::copies]] = True
    return [(some, int(size)) for some, size in zip(mine, sizes, strict=True) if some.any()]


def _smallest(table: ModelTable) -> ShapeTable:
    return table.shapes[min(table.shapes, key=lambda p: p.devices)]


def _load(problem: Problem, models: Ints) -> float:
    """Device-seconds of these models' requests."""
    return float(sum(problem.requests[m] * problem.tables[m].alone for m in models))
