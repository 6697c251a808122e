"""Models that come from host memory when they are asked for: whom they push out, and how long that takes."""

import numpy as np
import pytest

from paceline.core.cluster import Cluster, Parallel
from paceline.placement.problem import Problem
from paceline.placement.search import plan, uniform
from paceline.placement.tables import ModelTable, ShapeTable
from paceline.workload.arrivals import gamma, merged, power_law

GB = 10**9


def table(name: str, seconds: float, weight: int, working: int = 0) -> ModelTable:
    shapes = {
        Parallel(k): ShapeTable((weight // k,) * k, {1: (seconds / k,) * k}, working) for k in (1, 2)
    }  # fmt: skip
    return ModelTable(name, shapes)


def problem(count: int, times, models, slo: float = 10.0, devices: int = 1, memory: int = 3 * GB, bandwidth=GB):
    tables = [table(f"m{i}", 0.1, GB) for i in range(count)]
    cluster = Cluster(devices, memory, load_bandwidth=bandwidth)
    return Problem(cluster, tables, [slo] * count, np.array(times, float), np.array(models, np.int32))


def by_hand(times, models, sizes, memory, bandwidth, seconds, stages) -> list[float]:
    """Finish times on one group that serves all in order, whatever is late. The last asked for are kept."""
    held, clocks, finish = [], [0.0] * stages, []
    for m, size in enumerate(sizes):
        if sum(sizes[one] for one in held) + size <= memory:
            held.append(m)  # the first to go are the first of these
    for now, m in zip(times, models, strict=True):
        if m in held:
            held.remove(m)
        else:
            while sum(sizes[one] for one in held) + sizes[m] > memory:
                held.pop(0)
            clocks = [max(clock, now) + sizes[m] / stages / bandwidth for clock in clocks]
        held.append(m)
        end = now
        for k in range(stages):
            end = clocks[k] = max(end, clocks[k]) + seconds / stages
        finish.append(end)
    return finish


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("rule", "working"), [("finish", 0), ("last_stage", 0), ("finish", GB // 8)])
def test_finish_times_are_those_of_a_simulation_by_hand(stages, rule, working):
    """What steps take of a device, the largest of the group's models, is not for weights."""
    random = np.random.default_rng(stages)
    times, models = np.sort(random.uniform(0, 60, 300)), random.integers(0, 6, 300)
    sizes = [GB, GB // 2, 2 * GB, GB, GB // 4, GB]
    tables = [table(f"m{i}", 0.1, size, working * (i == 3)) for i, size in enumerate(sizes)]
    cluster = Cluster(stages, 3 * GB // stages + working, load_bandwidth=20.0 * GB)
    one = Problem(cluster, tables, [np.inf] * 6, times, models.astype(np.int32), rule)
    shape = np.array([one.shapes.index(Parallel(stages))])
    out = one.evaluate(shape, np.ones((1, 6), bool), whole=True)
    expected = by_hand(times, models, sizes, 3 * GB, 20.0 * GB, 0.1, stages)
    assert out.finish == pytest.approx(expected)
    assert out.ends[:, stages - 1] == pytest.approx(expected)


def test_admission_knows_what_loading_takes():
    """A second of loading is too long for one that wants its answer in half of it, and it pushes nobody out."""
    one = problem(4, [0.0, 1.0, 2.0], [3, 0, 3], slo=0.5)
    out = one.evaluate(np.array([0]), np.ones((1, 4), bool), whole=True)
    assert out.owner.tolist() == [-2, 0, -2] and out.good.tolist() == [1, 0, 0, 0]


def test_requests_go_where_their_model_is():
    cluster_wide = np.zeros((2, 4), bool)
    cluster_wide[0, [0, 1, 2, 3]] = cluster_wide[1, [3, 0]] = True
    one = problem(4, [0.0, 0.01, 0.02], [3, 3, 1], devices=2)
    out = one.evaluate(np.array([0, 0]), cluster_wide, whole=True)
    assert out.owner.tolist() == [1, 1, 0] and out.finish == pytest.approx([0.1, 0.2, 0.12])


def test_six_models_where_three_fit():
    times, models = merged([gamma(rate, 1.0, 300.0, i) for i, rate in enumerate(power_law(0.5, 6))])
    without, swapped = (
        plan(problem(6, times, models, slo=3.0, bandwidth=bandwidth), effort=20_000).outcome.attainment
        for bandwidth in (0.0, float(GB))
    )
    assert without < 0.9 and swapped > 0.97
    assert plan(problem(6, times, models, slo=3.0, bandwidth=1.0), effort=20_000).outcome.attainment >= without


def test_where_all_fit_nothing_changes():
    times, models = merged([gamma(2.0, 3.0, 60.0, i) for i in range(3)])
    plain, able = (problem(3, times, models, slo=0.6, devices=2, bandwidth=b) for b in (0.0, float(GB)))
    for p in range(2):
        groups = 2 // int(plain.devices[p])
        everybody = np.ones((groups, 3), bool)
        a, b = (one.evaluate(np.full(groups, p), everybody, whole=True) for one in (plain, able))
        assert np.array_equal(a.finish, b.finish) and np.array_equal(a.good, b.good)


def test_a_model_that_is_too_large_by_itself_is_refused_all_the_same():
    one = Problem(
        Cluster(1, GB // 2, load_bandwidth=GB), [table("m", 0.1, GB)], [1.0], np.zeros(1), np.zeros(1, np.int32)
    )
    with pytest.raises(ValueError, match="memory: 'm' fits nowhere"):
        plan(one)
    assert not uniform(one, 0).member.any()
