"""Cutting layers into stages: the best cut, by trying them all."""

from itertools import combinations, pairwise
from random import Random

import pytest

from paceline.core.cluster import Parallel
from paceline.placement.partition import cut
from paceline.placement.tables import from_layers


def slowest(costs: list[float], ends: list[int]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise([0, *ends]))


def test_the_slowest_stage_is_as_fast_as_can_be():
    random = Random(4)
    for _ in range(200):
        costs = [random.choice([0.0, 1.0, random.random() * 5]) for _ in range(random.randint(1, 9))]
        stages = random.randint(1, len(costs))
        ends = cut(costs, stages)
        assert len(ends) == stages and ends[-1] == len(costs) and all(a < b for a, b in pairwise([0, *ends]))
        every = [[*some, len(costs)] for some in combinations(range(1, len(costs)), stages - 1)]
        assert slowest(costs, ends) == pytest.approx(min(slowest(costs, one) for one in every))


def test_a_heavy_head_has_a_stage_of_its_own():
    assert cut([0.0, 1, 1, 1, 1, 4], 2) == [5, 6]


def test_no_stage_is_empty():
    with pytest.raises(ValueError, match="pipeline: 4 stages for 3 layers; from 1 to 3"):
        cut([1.0, 1, 1], 4)


def test_shapes_from_layers():
    table = from_layers("a", [0.0, 1, 1, 2], [10, 20, 20, 10], (1, 2, 8), hop=0.1, tensors={1: 1.0, 2: 1.6})
    assert set(table.shapes) == {Parallel(p, t) for p in (1, 2) for t in (1, 2)}
    two = table.shapes[Parallel(2)]
    assert two.stage_latency[1] == pytest.approx((2.0, 2.1)) and two.stage_weight_bytes == (50, 10)
    assert table.shapes[Parallel(1, 2)].latency == pytest.approx(2.5) and table.alone == 4
