"""The planner: as good as trying everything on tiny clusters, within memory, the same every time."""

from itertools import product

import numpy as np
import pytest

from paceline.core.cluster import Cluster, Group, Parallel, Placement
from paceline.placement import baselines, explain
from paceline.placement.greedy import beam_search, fill
from paceline.placement.problem import Problem, assign
from paceline.placement.search import CELL, part, plan
from paceline.placement.tables import ModelTable, ShapeTable
from paceline.workload.arrivals import gamma, merged

GB = 10**9


def table(name: str, seconds: float, weight: int, overhead: float = 1.1, working: int = 0) -> ModelTable:
    shapes = {}
    for pipeline, tensor in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
        devices = pipeline * tensor
        latency = seconds / devices * (1 if devices == 1 else overhead if tensor == 1 else overhead * 1.2)
        stages = (weight // devices,) * pipeline, {1: (latency,) * pipeline}
        shapes[Parallel(pipeline, tensor)] = ShapeTable(*stages, working)
    return ModelTable(name, shapes)


def problem(
    seconds=(0.1, 0.1, 0.2), weight=2 * GB, devices=2, memory=4 * GB, rate=3.0, cv=3.0, scale=4.0, seed=0, working=0,
    **changes,
) -> Problem:
    tables = [table(f"m{i}", one, weight, working=working * (i + 1)) for i, one in enumerate(seconds)]
    times, models = merged([gamma(rate, cv, 60.0, 100 * seed + i) for i in range(len(seconds))])
    return Problem(Cluster(devices, memory), tables, [scale * one for one in seconds], times, models, **changes)


def everything(one: Problem, shape: np.ndarray) -> int:
    """The best of all memberships that fit."""
    count, best = len(one.tables), 0
    rows = [np.array(row, bool) for row in product((False, True), repeat=count)]
    for choice in product(rows, repeat=len(shape)):
        member = np.stack(choice)
        if one.fits(shape, member):
            best = max(best, int(one.evaluate(shape, member).good.sum()))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_beam_search_and_local_search_equal_brute_force_on_tiny_clusters(seed):
    one = problem(seed=seed)
    best = 0
    for shapes in ([Parallel(), Parallel()], [Parallel(2)], [Parallel(1, 2)]):
        shape = np.array([one.shapes.index(p) for p in shapes])
        exact = everything(one, shape)
        found = beam_search(one, shape, beam=3)
        assert one.fits(found.shape, found.member)
        assert found.outcome.good.sum() >= 0.995 * exact
        best = max(best, exact)
    assert plan(one, effort=200_000).outcome.good.sum() == best


def test_the_fast_heuristic_is_near_the_search():
    for seed in range(4):
        one = problem((0.1, 0.1, 0.15, 0.2), devices=4, seed=seed)
        shape = np.zeros(4, np.int64)
        fast, slow = fill(one, shape), beam_search(one, shape)
        assert one.fits(shape, fast.member) and fast.outcome.attainment >= slow.outcome.attainment - 0.05


@pytest.mark.parametrize("working", [0, GB // 3])
@pytest.mark.parametrize("seed", range(3))
def test_memory_and_devices_are_never_exceeded(seed, working):
    """Of what steps need beside weights, that of one model at a time: they take turns."""
    one = problem((0.1, 0.2, 0.1, 0.3, 0.15), weight=3 * GB, devices=7, memory=5 * GB, seed=seed, working=working)
    choice = plan(one, effort=300_000, seed=seed)
    placement = one.placement(choice.shape, choice.member)
    assert one.fits(choice.shape, choice.member)
    assert sum(len(group.devices) for group in placement.groups) <= 7
    names = {t.name: t for t in one.tables}
    for group in placement.groups:
        for stage in range(group.parallel.pipeline):
            used = sum(names[model].shapes[group.parallel].stage_weight_bytes[stage] for model in group.models)
            most = max((names[model].shapes[group.parallel].working_bytes for model in group.models), default=0)
            assert used + most <= 5 * GB


def test_a_plan_is_a_function_of_its_seed():
    one, again = (problem((0.1, 0.2, 0.1, 0.3), devices=4) for _ in range(2))
    first, second = plan(one, effort=200_000, seed=3), plan(again, effort=200_000, seed=3)
    assert one.placement(first.shape, first.member) == again.placement(second.shape, second.member)
    assert one.evaluations == again.evaluations


def test_bursts_are_served_by_model_parallelism_and_steady_traffic_by_replicas():
    """AlpaServe, section 3.1: two models, two devices, memory for one model each."""
    bursty = problem((0.4, 0.4), weight=13 * GB, memory=14 * GB, rate=1.0, cv=4.0, scale=3.0)
    choice = plan(bursty, effort=100_000)
    assert bursty.devices[choice.shape].tolist() == [2]  # one group, in whatever shape
    alone = fill(bursty, np.zeros(2, np.int64))
    assert choice.outcome.attainment > alone.outcome.attainment + 0.05
    # with room for both models on both devices, replicas have no overhead
    roomy = problem((0.4, 0.4), weight=GB, memory=14 * GB, rate=1.5, cv=1.0, scale=2.5)
    choice = plan(roomy, effort=100_000)
    assert all(roomy.shapes[p] == Parallel() for p in choice.shape)


def test_long_requests_are_kept_from_short_ones():
    """Algorithm 2's buckets: a model of two seconds in the way of ones with a goal of a tenth."""
    one = problem((0.02, 0.02, 2.0), devices=2, rate=1.0, cv=1.0)
    choice = plan(one, effort=100_000)
    assert not any(row[2] and row[:2].any() for row in choice.member)


def test_large_clusters_are_planned_in_cells():
    one = problem(tuple(0.1 + 0.01 * (i % 7) for i in range(40)), devices=2 * CELL, rate=2.0, scale=3.0)
    choice = plan(one, effort=20_000)
    assert one.fits(choice.shape, choice.member) and choice.outcome.attainment > 0.95
    used = one.devices[choice.shape].sum()
    assert CELL < used <= 2 * CELL


def test_a_stage_does_not_span_nodes():
    cluster = Cluster(6, GB, devices_per_node=3)
    assert assign(cluster, [Parallel(1, 2), Parallel(1, 2)]) == [(0, 1), (3, 4)]
    assert assign(cluster, [Parallel(1, 2), Parallel(1, 2), Parallel(1, 2)]) is None
    assert assign(cluster, [Parallel(1, 2), Parallel(1, 2), Parallel(2, 1)]) == [(0, 1), (3, 4), (2, 5)]
    assert assign(cluster, [Parallel(1, 4)]) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"working": 3 * GB}, "memory: 'm1' fits nowhere on 2 devices with 3.73 GiB; its smallest share is 6.52 GiB"),
        ({"weight": 30 * GB}, "memory: 'm0' fits nowhere on 2 devices with 3.73 GiB; its smallest share is 13.97 GiB"),
        ({"scale": 0.5}, r"slo.deadline: 'm0' takes .* s in its fastest shape that fits, more than its goal"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        plan(problem(**changes))


def test_baselines():
    one = problem((0.1, 0.1, 0.2), devices=4)
    replicated = baselines.selective_replication(one)
    assert all(one.shapes[p] == Parallel() for p in replicated.shape)
    row = baselines.round_robin(one, np.zeros(4, np.int64))
    assert one.fits(row.shape, row.member) and row.member.any(0).all()
    alone = baselines.alone(one, 0)
    assert alone.member.sum() == 3 and alone.member.sum(1).max() == 1
    windows = baselines.clockwork(one, 20.0)
    assert [begin for begin, _ in windows] == [0, 20, 40]
    assert sum(int(choice.outcome.good.sum()) for _, choice in windows) > 0
    ours = plan(one, effort=100_000)
    for other in (replicated, row, alone, baselines.fixed(one, 0)):
        assert ours.outcome.score >= other.outcome.score


def test_a_part_of_a_problem_has_its_own_traffic():
    one = problem((0.1, 0.2, 0.3), devices=4)
    some = part(one, np.array([2, 0]), 2)
    assert [t.name for t in some.tables] == ["m2", "m0"] and some.requests.tolist() == one.requests[[2, 0]].tolist()
    assert some.cluster.devices == 2 and Parallel(4) not in some.shapes


def test_reasons_are_what_other_shapes_give():
    one = problem((0.4, 0.4), weight=13 * GB, memory=14 * GB, rate=1.0, cv=4.0, scale=3.0)
    choice = plan(one, effort=50_000)
    others = {other.what: other.attainment for other in explain.of_group(one, choice, 0)}
    other = {"(1,2)", "(2,1)"} - {str(one.shapes[choice.shape[0]])}
    assert set(others) == {*other, "2 x (1,1)"} and max(others.values()) <= choice.outcome.attainment
    alone = fill(one, np.zeros(2, np.int64)).outcome.attainment
    assert others["2 x (1,1)"] == alone
    policies = {other.what: other.attainment for other in explain.policies(one, 15.0)}
    assert policies["selective replication"] == policies["groups of (1,1) only"] == alone
    assert "Clockwork++ every 15 s" in policies


def test_scores_are_compared_in_order():
    one = problem((0.1, 0.1), devices=2)
    shape = np.zeros(2, np.int64)
    rows = [0, 0], [1, 0], [1, 1]
    none, first, both = (one.evaluate(shape, np.array([row, row], bool)).score for row in rows)
    assert none < first < both and both.good > first.good > none.good == 0
    assert both._replace(speed=both.speed - 0.1) < both and both._replace(replicas=both.replicas - 1) < both


def test_kinds_of_models_have_groups_of_their_own():
    one = problem((0.1, 0.1, 0.1, 0.1), weight=GB, devices=3, kinds=[0, 1, 0, 1], judge=lambda *args: judged(*args))
    choice = plan(one, effort=30_000)
    assert all(len({one.kinds[m] for m in np.flatnonzero(row)}) <= 1 for row in choice.member)
    assert choice.member.any(0).all()
    assert not one.fits(np.zeros(1, np.int64), np.array([[True, True, False, False]]))


def judged(problem, shape, member, active, out) -> None:
    """Every request of a model that somebody has is good."""
    hosted = member.any(0)
    out.good += problem.requests * hosted
    out.asked += member.sum(1)


def test_a_bucket_that_does_not_fit_its_devices_is_not_tried():
    tables = [table("a", 0.1, GB), table("b", 0.5, 3 * GB)]
    for parallel in ((1, 1), (1, 2), (2, 2)):
        del tables[1].shapes[Parallel(*parallel)]
    times, models = merged([gamma(8.0, 1.0, 60.0, 1), gamma(0.5, 1.0, 60.0, 2)])
    one = Problem(Cluster(4, 2 * GB), tables, [0.4, 2.0], times, models)
    choice = plan(one, effort=50_000)
    assert one.fits(choice.shape, choice.member) and choice.member.any(0).all()


def test_groups_fit_the_nodes():
    one = problem((0.1, 0.2), devices=12)
    one.cluster = Cluster(12, 4 * GB, devices_per_node=3)
    choice = plan(one, effort=50_000)
    for group in one.placement(choice.shape, choice.member).groups:
        for stage in range(group.parallel.pipeline):
            mine = group.devices[stage * group.parallel.tensor :][: group.parallel.tensor]
            assert len({device // 3 for device in mine}) == 1


def test_a_hot_model_is_in_several_cells():
    one = problem((0.1,) * 12, weight=GB, devices=3 * CELL, rate=0.5, cv=1.0)
    times, models = merged([one.times[one.models == m] for m in range(11)] + [gamma(1200.0, 1.0, 60.0, 9)])
    hot = Problem(one.cluster, one.tables, one.slo, times, models)
    choice = plan(hot, effort=0)
    assert choice.outcome.attainment > 0.99 and hot.devices[choice.shape[choice.member[:, 11]]].sum() > CELL


def test_models_without_requests_are_placed_where_there_is_room():
    one = problem((0.1, 0.1, 0.1), weight=GB, devices=2)
    quiet = Problem(one.cluster, one.tables, one.slo, one.times[one.models < 2], one.models[one.models < 2])
    choice = plan(quiet, effort=20_000)
    assert choice.member.any(0).all() and quiet.fits(choice.shape, choice.member)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_a_model_that_nobody_wants_beside_them_goes_where_it_costs_least(order):
    """A few requests are met of the slow model, and in each of them many of another one are not."""
    seconds, weight, rates = (2.0, 0.01, 0.01), (GB, 3 * GB, 3 * GB), (3.0, 20.0, 4.0)
    tables = [ModelTable(f"m{i}", {Parallel(): ShapeTable((weight[i],), {1: (seconds[i],)})}) for i in order]
    times, models = merged([gamma(rates[i], 1.0, 60.0, i) for i in order])
    one = Problem(Cluster(2, 4 * GB), tables, [2.5 if i == 0 else 0.5 for i in order], times, models)
    choice = plan(one, effort=100_000)
    assert choice.member.any(0).all()
    hot = order.index(1)
    assert choice.outcome.good[hot] == choice.outcome.requests[hot]


def test_a_plan_promises_what_its_file_gives():
    one = problem((0.1, 0.2, 0.1, 0.3, 0.1), devices=5, rate=6.0)
    choice = plan(one, effort=200_000)
    again = one.arrays(one.placement(choice.shape, choice.member))
    assert all((a == b).all() for a, b in zip(again, (choice.shape, choice.member), strict=True))
    assert one.evaluate(*again).score == choice.outcome.score


def test_placements_name_their_mistakes():
    with pytest.raises(ValueError, match=r"groups.0.parallel: \(2,1\) needs 2 devices, the group has 1"):
        Placement((Group((0,), Parallel(2), ()),))
    with pytest.raises(ValueError, match="groups.1.devices: device 0 is used twice"):
        Placement((Group((0,), Parallel(), ()), Group((0,), Parallel(), ())))
    with pytest.raises(ValueError, match="groups.0.devices: -1 is not at least 0"):
        Placement((Group((-1,), Parallel(), ()),))
    with pytest.raises(ValueError, match="groups.0.models: a model is there twice: a, a"):
        Placement((Group((0,), Parallel(), ("a", "a")),))
    one = problem()
    assert one.evaluate(*one.arrays(Placement(()))).good.sum() == 0
    with pytest.raises(ValueError, match="groups.0.models: no model 'x'; there are m0, m1, m2"):
        one.arrays(Placement((Group((0,), Parallel(), ("x",)),)))
    with pytest.raises(ValueError, match=r"groups.0.parallel: 'm0' has no shape \(1,3\)"):
        one.arrays(Placement((Group((0, 1, 2), Parallel(1, 3), ("m0",)),)))


def test_a_search_with_nothing_to_change_ends():
    one = problem(seconds=(0.1,), devices=1, rate=20.0)
    assert plan(one, effort=10**7).outcome.bad.any() and one.evaluations < 10


def test_little_traffic_is_searched_as_well():
    times, models = np.array([0.0, 0.0, 0.1]), np.array([0, 1, 2], np.int32)
    tables = [table(f"m{i}", 0.1, 2 * GB) for i in range(3)]
    assert plan(Problem(Cluster(3, 2 * GB), tables, [0.15] * 3, times, models), effort=1000).outcome.good.sum() == 3
