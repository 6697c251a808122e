"""Requests that wait by their deadlines: what they gain, and that nobody who was accepted pays for it."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.core.cluster import Cluster, Parallel
from paceline.placement.problem import Problem, Timing
from paceline.placement.tables import ModelTable, ShapeTable
from tests.placement.test_search import problem as bursty

ONE = Parallel()


def small(seconds: list[float], slo: list[float], arrivals: list[tuple[float, int]], rule: str) -> Problem:
    """Models by their seconds on one device."""
    tables = [ModelTable(f"m{i}", {ONE: ShapeTable((1,), {1: (one,)})}) for i, one in enumerate(seconds)]
    times, models = zip(*arrivals, strict=True)
    return Problem(Cluster(4, 100), tables, slo, np.array(times), np.array(models, np.int32), rule)


def served(one: Problem, member: list[list[int]]) -> list[float]:
    """When each request is finished; NaN: it was rejected."""
    outcome = one.evaluate(np.zeros(len(member), np.int64), np.array(member, bool), whole=True)
    return np.where(outcome.owner >= 0, outcome.finish, np.nan).tolist()


def test_a_short_request_passes_a_long_one_that_has_time():
    case = [1.0, 0.1], [5.0, 1.0], [(0.0, 0), (0.1, 0), (0.2, 1)]
    assert served(small(*case, "finish"), [[1, 1]]) == pytest.approx([1.0, 2.0, np.nan], nan_ok=True)
    assert served(small(*case, "deadline"), [[1, 1]]) == pytest.approx([1.0, 2.1, 1.1])


def test_nobody_passes_where_another_would_be_late_then():
    case = [1.0, 0.1], [2.0, 1.0], [(0.0, 0), (0.05, 0), (0.2, 1)]
    assert served(small(*case, "deadline"), [[1, 1]]) == pytest.approx([1.0, 2.0, np.nan], nan_ok=True)


def test_one_who_waits_makes_room_for_a_model_that_is_nowhere_else():
    case = [1.0, 1.0], [2.0, 2.0], [(0.0, 0), (0.0, 1), (0.1, 1), (0.2, 0)]
    groups = [[1, 1], [0, 1]]
    assert served(small(*case, "finish"), groups) == pytest.approx([1.0, 1.0, 2.0, np.nan], nan_ok=True)
    one = small(*case, "deadline")
    assert served(one, groups) == pytest.approx([1.0, 1.0, 2.0, 2.0])
    outcome = one.evaluate(np.zeros(2, np.int64), np.array(groups, bool), whole=True)
    assert outcome.owner.tolist() == [0, 1, 1, 0] and outcome.asked.tolist() == [2, 2]


def test_models_alike_on_a_group_of_their_own_are_served_as_they_come():
    for seed in range(3):
        results = []
        for rule in ("finish", "deadline"):
            one = bursty(seconds=(0.1, 0.1), seed=seed, rule=rule, timing=Timing(margin=0.01, overhead=0.01))
            shape = np.array([one.shapes.index(ONE), one.shapes.index(ONE)])
            outcome = one.evaluate(shape, np.eye(2, dtype=bool), whole=True)
            assert 0 < outcome.bad.sum() < len(one.times)
            results.append([
                outcome.finish.tolist(), outcome.owner.tolist(), outcome.good.tolist(), outcome.asked.tolist(),
                np.nan_to_num(outcome.ends).tolist(), np.round(outcome.busy, 9).tolist(),
                np.round(outcome.waited, 9).tolist(),
            ])  # fmt: skip
        assert results[0] == results[1]


@pytest.mark.parametrize("seed", range(6))
def test_who_is_accepted_is_in_time_and_stages_run_one_at_a_time(seed):
    random = np.random.default_rng(seed)
    one = bursty(
        seconds=tuple(random.choice([0.05, 0.1, 0.3, 0.6], 5)), devices=7, rate=4.0, scale=3.0, seed=seed,
        rule="deadline", timing=Timing(margin=0.011, overhead=0.011),
    )  # fmt: skip
    shape = np.array([one.shapes.index(p) for p in (Parallel(4), Parallel(1, 2), ONE)])
    member = random.random((3, 5)) < 0.7
    outcome = one.evaluate(shape, member, whole=True)
    counted = one.evaluate(shape, member)
    assert counted.good.tolist() == outcome.good.tolist() and counted.asked.tolist() == outcome.asked.tolist()
    accepted = outcome.owner >= 0
    assert ((outcome.finish - one.times) <= one.goal[one.models])[accepted].all()
    assert np.bincount(one.models[accepted], minlength=5).tolist() == outcome.good.tolist()
    assert outcome.asked.sum() == member.any(0)[one.models].sum()
    assert (outcome.owner == -1).sum() == (~member.any(0))[one.models].sum()
    for g, p in enumerate(shape):
        mine = np.flatnonzero(outcome.owner == g)
        mine = mine[np.argsort(outcome.ends[mine, 0])]
        entered = one.times[mine]
        for k in range(one.stages[p]):
            begins = outcome.ends[mine, k] - one.latency[one.models[mine], p, k]
            assert (begins >= entered - 1e-9).all()  # after its stage before
            assert (begins[1:] >= outcome.ends[mine[:-1], k] - 1e-9).all()  # in order, one at a time
            entered = outcome.ends[mine, k]
        assert outcome.finish[mine] == pytest.approx(entered + 0.011)


def test_it_serves_more_than_first_come_first_served():
    good = {"finish": 0, "deadline": 0}
    for rule in good:
        for seed in range(6):
            one = bursty(seconds=(0.05, 0.1, 0.4), devices=4, rate=4.0, seed=seed, rule=rule)
            shape = np.array([one.shapes.index(Parallel(2)), one.shapes.index(ONE), one.shapes.index(ONE)])
            outcome = one.evaluate(shape, np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1]], bool))
            good[rule] += outcome.good.sum()
    assert good["deadline"] > 1.02 * good["finish"]


def test_only_active_models_are_there():
    one = bursty(seconds=(0.1, 0.2), rule="deadline", rate=6.0)
    shape, both = np.array([one.shapes.index(ONE)]), np.ones((1, 2), bool)
    alone = one.evaluate(shape, np.array([[False, True]]))
    outcome = one.evaluate(shape, both, active=np.array([False, True]))
    assert outcome.good.tolist() == alone.good.tolist() and outcome.requests[0] == outcome.good[0] == 0
    assert outcome.asked.tolist() == [one.requests[1]]


def test_who_has_no_goal_waits_behind_those_who_have():
    case = [1.0, 0.5], [np.inf, 1.0], [(0.0, 0), (0.1, 0), (0.2, 0), (0.3, 1), (1.2, 0), (1.3, 1)]
    late = [1.0, 2.0, 3.0, np.nan, 4.0, np.nan]
    assert served(small(*case, "deadline"), [[1, 1]]) == pytest.approx(late, nan_ok=True)
    case = [1.0, 0.5], [np.inf, 1.5], *case[2:]
    assert served(small(*case, "deadline"), [[1, 1]]) == pytest.approx([1.0, 3.0, 4.0, 1.5, 5.0, 2.0])


@pytest.mark.parametrize("changes", [{"timing": Timing(to_group=0.1)}, {"cluster": Cluster(1, 100, load_bandwidth=1)}])
def test_it_knows_no_time_on_the_way(changes):
    with pytest.raises(ValueError, match=r"dispatch: 'deadline' .* in_flight"):
        replace(small([1.0], [1.0], [(0.0, 0)], "deadline"), **changes)
