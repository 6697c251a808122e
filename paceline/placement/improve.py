"""Local search: from a placement to a better one, a change at a time.

What the paper's search cannot reach: groups of different shapes beside each other, models that share a group because it
turned out well, replicas that only stand in the way of others. A change is tried by simulation, first of a tenth of the
traffic, which most do not survive, and kept if the score is not worse. Which changes are tried is drawn at random, the
more unserved requests a model has the likelier it is to gain; the same seed gives the same placement.
"""

from collections.abc import Callable

import numpy as np

from paceline.placement.greedy import Choice
from paceline.placement.problem import Bools, Ints, Problem, assign

FIRST, WINDOWS = 0.1, 8  # share of the traffic that a change is first tried on, in so many places
LEAST = 4000  # requests: with fewer to make a change takes longer than to try it
CLEARLY = 0.5  # of the standard deviation of what is unserved there (Poisson's): more than that, and one, is worse
Change = tuple[Ints, Bools] | None
Move = Callable[[Problem, Choice, np.random.Generator], Change]


def improve(problem: Problem, choice: Choice, evaluations: int, seed: int) -> Choice:
    """The best placement found with as much simulation as so many of all the traffic take."""
    random, best, spent = np.random.default_rng(seed), choice, 0.0
    shares = np.cumsum([weight for _, weight in MOVES]) / sum(weight for _, weight in MOVES)
    small = problem.judge or len(problem.times) < LEAST
    first = None if small else problem.some(FIRST, WINDOWS)
    least = first.evaluate(best.shape, best.member).bad.sum() if first else 0
    while spent < evaluations:
        served = not best.outcome.bad.any()
        if problem.judge and served:
            break  # steps are slow to simulate
        move = MOVES[np.searchsorted(shares, random.random(), side="right")][0]
        change = move(problem, best, random)
        cost = 10.0 if served else 1.0  # only speed is to be gained
        spent += FIRST * cost
        if change is None:
            continue
        bad = first.evaluate(*change).bad.sum() if first else least
        if bad > least + 1 + CLEARLY * least**0.5:
            continue
        spent += cost
        tried = Choice(*change, problem.evaluate(*change))
        if tried.outcome.score >= best.outcome.score:
            best, least = tried, bad
    return best


def gain_replica(problem: Problem, now: Choice, random: np.random.Generator) -> Change:
    """A model with unserved requests comes to a group; others go where there is no room."""
    m = _unserved(now, random)
    strangers = now.member[:, problem.kind_of != problem.kind_of[m]].any(1)
    groups = np.flatnonzero(~now.member[:, m] & ~strangers & np.isfinite(problem.latency[m, now.shape, 0]))
    if not len(groups):
        return None
    g, member = int(random.choice(groups)), now.member.copy()
    return (now.shape, member) if _make_room(problem, now.shape, member, g, m, random) else None


def lose_replica(problem: Problem, now: Choice, random: np.random.Generator) -> Change:
    """A model that others wait behind goes from a group, if another has it."""
    g, m = _one(random, np.argwhere(now.member & (now.member.sum(0) > 1)))
    if g < 0:
        return None
    member = now.member.copy()
    member[g, m] = False
    return now.shape, member


def exchange(problem: Problem, now: Choice, random: np.random.Generator) -> Change:
    """Two groups exchange a model each, or one gives one away."""
    if len(now.shape) < 2:
        return None
    a, b = random.choice(len(now.shape), 2, replace=False)
    member = now.member.copy()
    mine, theirs = (np.flatnonzero(now.member[i] & ~now.member[j]) for i, j in ((a, b), (b, a)))
    if not len(mine):
        return None
    m = random.choice(mine)
    member[a, m], member[b, m] = False, True
    if len(theirs) and random.random() < 0.7:
        other = random.choice(theirs)
        member[b, other], member[a, other] = False, True
    return (now.shape, member) if problem.fits(now.shape, member) else None


def reshape(problem: Problem, now: Choice, random: np.random.Generator) -> Change:
    """A group's devices are used in another shape."""
    g = int(random.integers(len(now.shape)))
    return _regrouped(problem, now, [g], [_shape_of(problem, problem.devices[now.shape[g]], random)], random)


def split(problem: Problem, now: Choice, random: np.random.Generator) -> Change:
    """A group becomes two."""
    g = int(random.integers(len(now.shape)))
    size = int(problem.devices[now.shape[g]])
    if size < 2:
        return None
    half = size // 2 if random.random() < 0.7 else int(random.integers(1, size))
    parts = [_shape_of(problem, half, random), _shape_of(problem, size - half, random)]
    return _regrouped(problem, now, [g], parts, random)


def merge(problem: Problem, now: Choice, random: np.random.Generator) -> Change:
    """Two groups become one, or share their devices anew."""
    if len(now.shape) < 2:
        return None
    a, b = (int(g) for g in random.choice(len(now.shape), 2, replace=False))
    size = int(problem.devices[now.shape[[a, b]]].sum())
    parts = [_shape_of(problem, size, random)]
    if parts[0] is None or random.random() < 0.3:
        one = int(random.integers(1, size))
        parts = [_shape_of(problem, one, random), _shape_of(problem, size - one, random)]
    return _regrouped(problem, now, [a, b], parts, random)


MOVES: list[tuple[Move, float]] = [
    (gain_replica, 4), (exchange, 2), (lose_replica, 1), (reshape, 1), (split, 1), (merge, 1),
]  # fmt: skip


def _unserved(now: Choice, random: np.random.Generator) -> int:
    """A model, the likelier the more requests it has that are unserved."""
    bad = now.outcome.bad + 0.01 * now.outcome.requests + 1e-9
    return int(random.choice(len(bad), p=bad / bad.sum()))


def _one(random: np.random.Generator, pairs: Ints) -> tuple[int, int]:
    return tuple(pairs[random.integers(len(pairs))].tolist()) if len(pairs) else (-1, -1)


def _shape_of(problem: Problem, size: int, random: np.random.Generator) -> int | None:
    """A shape of so many devices; None: there is none."""
    known = np.flatnonzero(problem.devices == size)
    return int(random.choice(known)) if len(known) else None


def _make_room(problem: Problem, shape: Ints, member: Bools, g: int, m: int, random: np.random.Generator) -> bool:
    """Puts a model into a group, others out as long as memory is short: first those that others have, too."""
    member[g, m] = True
    while (problem.taken(shape[g], member[g]) > problem.cluster.memory).any():
        others = [one for one in np.flatnonzero(member[g]) if one != m]
        if not others:
            return False
        elsewhere = [one for one in others if member[:, one].sum() > 1]
        gone = random.choice(elsewhere or others)
        member[g, gone] = False
    return True


def _regrouped(
    problem: Problem, now: Choice, old: list[int], new: list[int | None], random: np.random.Generator
) -> Change:
    """New groups instead of old ones, for their models: each goes where most memory is left, all that fit to all."""
    shapes = [p for p in new if p is not None]
    if len(shapes) < len(new) or sorted(shapes) == sorted(now.shape[old].tolist()):
        return None
    keep = np.setdiff1d(np.arange(len(now.shape)), old)
    shape = np.concatenate([now.shape[keep], np.array(shapes, np.int64)])
    if assign(problem.cluster, problem.largest_first(shape)) is None:
        return None
    member = np.concatenate([now.member[keep], np.zeros((len(new), now.member.shape[1]), np.bool_)])
    homeless = np.flatnonzero(now.member[old].any(0))
    order = homeless[np.argsort(-problem.requests[homeless] + random.random(len(homeless)), kind="stable")]
    for turn in range(len(new)):  # a replica each before any has two
        for m in order:
            room = [
                (float((problem.weight[:, shape[g]][member[g]].sum(0) + problem.weight[m, shape[g]]).max()), g)
                for g in range(len(keep), len(shape))
                if problem.room(shape[g], member[g])[m]
            ]
            if room and (turn == 0 or random.random() < 0.7):
                member[min(room)[1], m] = True
    return shape, member
