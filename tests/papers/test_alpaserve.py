"""AlpaServe's own results: every request's fate, bit for bit, and placements at least as good as its planner's."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.placement.batches import replay_batches
from paceline.placement.search import plan
from tests.papers.alpaserve import CASES, arrays, cluster, problem

KINDS = {name: case["kind"] for name, case in CASES.items()}
SEARCHES = [name for name, kind in KINDS.items() if kind == "search"]


def fates(case: dict, placement: dict, slo: list[float] | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finish, group (-1: none) and success of each request; a placement may change at its segments' starts."""
    whole = problem(case, slo)
    segments = placement.get("segments") or [{"start_time": -1.0, "groups": placement["groups"]}]
    starts = [int(np.searchsorted(whole.times, segment["start_time"], side="right")) for segment in segments[1:]]
    finish, owner = np.empty(len(whole.times)), np.empty(len(whole.times), np.int64)
    for segment, begin, end in zip(segments, [0, *starts], [*starts, len(finish)], strict=True):
        some = replace(whole, times=whole.times[begin:end], models=whole.models[begin:end])
        outcome = some.evaluate(*arrays(some, segment["groups"]), whole=True)
        finish[begin:end], owner[begin:end] = outcome.finish, outcome.owner
    good = (owner >= 0) & (finish - whole.times <= whole.goal[whole.models])
    return finish, np.where(owner < -1, -2 - owner, owner), good


def check(expected: dict, finish: np.ndarray, owner: np.ndarray, good: np.ndarray) -> None:
    assert int(good.sum()) == expected["num_good"]
    assert np.bincount(owner[owner >= 0], minlength=len(expected["group_num_requests_incl_rejected"])).tolist() == (
        expected["group_num_requests_incl_rejected"]
    )
    if "group_of_request" in expected:
        assert [group if group >= 0 else None for group in owner.tolist()] == [
            group if group is not None and group >= 0 else None for group in expected["group_of_request"]
        ]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "replay" and "batching" not in name])
def test_a_replayed_trace_is_the_same_to_the_bit(name):
    case = CASES[name]
    finish, owner, good = fates(case, case["placement"])
    assert finish.tolist() == case["expected"]["finish_s"]
    assert good.astype(int).tolist() == case["expected"]["good"]
    if "segments" not in case["placement"]:
        check(case["expected"], finish, owner, good)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "replay" and "batching" in name])
def test_batches_of_one_shot_requests_are_the_same_to_the_bit(name):
    case = CASES[name]
    one = problem(case)
    finish, good = replay_batches(one, *arrays(one, case["placement"]["groups"]))
    assert good.astype(int).tolist() == case["expected"]["good"]
    assert finish.tolist() == case["expected"]["finish_s"]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "des_replay"])
def test_the_event_driven_simulator_is_the_same(name):
    case = CASES[name]
    finish, owner, good = fates(case, case["placement"])
    assert np.abs(finish - case["expected"]["finish_s"]).max() < 1e-9
    assert good.astype(int).tolist() == case["expected"]["good"]
    assert np.bincount(owner).tolist() == case["expected"]["group_num_requests"]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "replay_summary"])
def test_published_goodput_to_three_decimals(name):
    case = CASES[name]
    for row in case["rows"]:
        finish, owner, good = fates(case, row["placement"], [row["slo_s"]] * case["num_models"])
        check(row["expected"], finish, owner, good)
        times = problem(case, [row["slo_s"]] * case["num_models"]).times
        trim = int(10 / (times[-1] - times[0]) * len(times))
        assert round(float(good[trim:-trim].mean()), 3) == row["authors_sim_goodput"]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "two_model"])
def test_two_models_on_two_devices(name):
    case = CASES[name]
    for result in case["results"]:
        finish, owner, good = fates(case, result["placement"])
        check(result["expected"], finish, owner, good)
        waited = finish - problem(case).times
        assert waited.mean() == pytest.approx(result["expected"]["mean_latency_counting_rejected_as_0_s"], rel=1e-12)
        for share in (50, 99):
            assert np.percentile(waited[good], share) == pytest.approx(result["expected"][f"served_p{share}_s"])
    ours = plan(problem(case, cluster=cluster(case), rule="deadline"), effort=2_000_000)
    best = max(result["expected"]["num_good"] for result in case["results"])
    assert ours.outcome.good.sum() >= best


@pytest.mark.parametrize("name", SEARCHES)
def test_our_simulator_agrees_on_every_placement(name):
    case = CASES[name]
    for result in case["results"]:
        finish, owner, good = fates(case, result["placement"])
        assert int(good.sum()) == result["expected"]["num_good"]
        if "segments" not in result["placement"]:
            check(result["expected"], finish, owner, good)


@pytest.mark.parametrize("rule", ["last_stage", "finish", "deadline"])
@pytest.mark.parametrize("name", SEARCHES)
def test_our_placement_is_at_least_as_good_as_the_best_policys(name, rule):
    """By AlpaServe's dispatch, and by ours."""
    case = CASES[name]
    one = problem(case, cluster=cluster(case), rule=rule)
    ours = plan(one, effort=1_000_000)
    assert one.fits(ours.shape, ours.member)
    assert ours.outcome.good.sum() >= max(result["expected"]["num_good"] for result in case["results"])
