"""AlpaServe's own results: every request's fate, bit for bit, and placements at least as good as its planner's."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from paceline.core.cluster import Parallel
from paceline.placement.baselines import clockwork, round_robin
from paceline.placement.batches import replay_batches
from paceline.placement.greedy import Choice, beam_search, fill
from paceline.placement.problem import ALPASERVE, Problem
from paceline.placement.search import plan
from paceline.workload.arrivals import power_law, rate_and_cv
from tests.papers.alpaserve import CASES, arrays, cluster, generated, planned, problem, tables, traffic

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


def figures(one: Problem, finish: np.ndarray, owner: np.ndarray, good: np.ndarray, groups: int) -> dict:
    """What AlpaServe's code reports of a run."""
    waited = finish - one.times
    trim = int(10 / (one.times[-1] - one.times[0]) * len(good))
    middle = slice(trim, -trim)
    return {
        "num_requests": len(good), "num_good": int(good.sum()), "slo_attainment_all": good.mean(),
        "mean_latency_counting_rejected_as_0_s": waited.mean(),
        "served_mean_latency_s": waited[good].mean() if good.any() else None,
        **{f"served_p{n}_s": np.percentile(waited[good], n) if good.any() else None for n in (50, 90, 99)},
        "group_num_requests_incl_rejected": np.bincount(owner[owner >= 0], minlength=groups).tolist(),
        "per_model_num_requests": one.requests.tolist(),
        "per_model_num_good": np.bincount(one.models[good], minlength=len(one.tables)).tolist(),
        "slo_attainment_trim10s": good[middle].mean() if len(good[middle]) else None,
        "mean_latency_trim10s_rejected_as_0_s": waited[middle].mean() if len(good[middle]) else None,
    }  # fmt: skip


def check(case: dict, result: dict, slo: list[float] | None = None) -> None:
    """All that is expected of a placement, to the bit."""
    placement, expected, one = result["placement"], result["expected"], problem(case, slo)
    if "batching" in case["case_id"]:
        finish, owner, good = replay_batches(one, *arrays(one, placement["groups"]))
    else:
        finish, owner, good = fates(case, placement, slo)
    groups = max(len(segment["groups"]) for segment in placement.get("segments", [placement]))
    got = figures(one, finish, owner, good, groups) | {
        "finish_s": finish.tolist(), "good": good.astype(int).tolist(),
        "group_of_request": [max(group, -1) for group in owner.tolist()],
        "per_model": [
            {"served_mean_s": waited.mean(), "served_p99_s": np.percentile(waited, 99)}
            for waited in ((finish - one.times)[good & (one.models == m)] for m in range(len(one.tables)))
            if len(waited)
        ],
    }  # fmt: skip
    known = {name: value for name, value in expected.items() if name != "trim_error"}  # why there is nothing to trim
    assert {name: got[name] for name in known} == known


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "workload_fingerprint" in case])
def test_the_traffic_is_theirs(name):
    case, known = CASES[name], CASES[name]["workload_fingerprint"]
    times, _ = traffic(case)
    assert len(times) == known["num_requests"] and times[:3].tolist() == known["first_arrivals"]
    assert times[-1] == known["last_arrival"] and times.sum() == known["sum_arrivals"]
    rate, cv = rate_and_cv(times)
    gap = 1 / rate + 1e-6  # as they put it
    assert (1 / gap, cv / (rate * gap)) == pytest.approx((known["measured_rate"], known["measured_cv"]), rel=1e-12)
    if KINDS[name] == "search":
        assert power_law(case["total_rate"], len(case["models"])) == pytest.approx(
            case["arrival_spec"]["rates"], rel=1e-15
        )
        assert set(case["arrival_spec"]["cvs"]) == {case["cv"]}
        assert [model["slo"] for model in case["models"]] == [case["slo_scale"] * table.alone for table in tables(case)]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if {"arrivals", "arrival_spec"} <= set(case)])
def test_arrivals_are_those_of_their_processes(name):
    case = CASES[name]
    for given, ours in zip(traffic(case), generated(case["arrival_spec"]), strict=True):
        assert given.tolist() == ours.tolist()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "replay"])
def test_a_replayed_trace_is_the_same_to_the_bit(name):
    check(CASES[name], CASES[name])


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "des_replay"])
def test_the_event_driven_simulator_is_the_same(name):
    case = CASES[name]
    times, models = generated(case["arrival_spec_before_tie_removal"])
    assert [models.tolist(), times.tolist()] == [traffic(case)[1].tolist(), pytest.approx(traffic(case)[0], abs=0.002)]
    finish, owner, good = fates(case, case["placement"])
    assert np.abs(finish - case["expected"]["finish_s"]).max() < 1e-9
    assert good.astype(int).tolist() == case["expected"]["good"]
    assert np.bincount(owner).tolist() == case["expected"]["group_num_requests"]
    assert good.mean() == case["expected"]["slo_attainment_all"]
    for noisy in case["expected"]["slo_attainment_with_official_noise_seeds_0_1_2"]:
        assert good.mean() == pytest.approx(noisy, abs=0.003)
    fast = problem(case, rule="last_stage", timing=ALPASERVE)
    assert fast.evaluate(*arrays(fast, case["placement"]["groups"])).attainment == (
        case["expected"]["slo_attainment_fast_simulator_same_input"]
    )


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "replay_summary"])
def test_published_goodput_to_three_decimals(name):
    case = CASES[name]
    for row in case["rows"]:
        assert row["slo_s"] == row["slo_scale"] * tables(case)[0].alone
        check(case, row, [row["slo_s"]] * case["num_models"])
        assert round(row["expected"]["slo_attainment_trim10s"], 3) == row["authors_sim_goodput"]
        assert row["authors_sim_goodput"] == pytest.approx(row["authors_real_testbed_goodput"], abs=0.0101)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "two_model"])
def test_two_models_on_two_devices(name):
    case = CASES[name]
    assert case["single_gpu_latency_raw_s"] == tables(case)[0].alone
    for result in case["results"]:
        check(case, result)
    ours = plan(problem(case, cluster=cluster(case), rule="deadline"), effort=2_000_000)
    best = max(result["expected"]["num_good"] for result in case["results"])
    assert ours.outcome.good.sum() >= best


@pytest.mark.parametrize("name", SEARCHES)
def test_our_simulator_agrees_on_every_placement(name):
    """And that it fits."""
    case = CASES[name]
    one = problem(case, cluster=cluster(case))
    for result in case["results"]:
        check(case, result)
        for part in result["placement"].get("segments", [result["placement"]]):
            assert one.fits(*arrays(one, part["groups"]))


@pytest.mark.parametrize("rule", ["last_stage", "finish", "deadline"])
@pytest.mark.parametrize("name", SEARCHES)
def test_our_placement_is_at_least_as_good_as_the_best_policys(name, rule):
    """By AlpaServe's dispatch, and by ours."""
    case = CASES[name]
    one = problem(case, cluster=cluster(case), rule=rule)
    ours = plan(one, effort=1_000_000)
    assert one.fits(ours.shape, ours.member)
    assert ours.outcome.good.sum() >= max(result["expected"]["num_good"] for result in case["results"])


# AlpaServe's policies by our heuristics. As many placements are tried, unless nothing is unserved: then we stop. Which
# ones differs where models are equally bad, or groups equally free: AlpaServe takes the last of such models, by shares
# rounded to float32, and sorts the groups every time. It also takes every stage for as large as a model's largest.

TIES = 0.01  # of the requests that meet their goals
OTHERS = 0.04  # of the placements that are tried, over several shapes
MANY = 1_000_000  # simulated requests
POLICIES = [
    pytest.param(name, result, id=f"{name}-{result['policy']}",
                 marks=[pytest.mark.slow] * (result["planning"]["simulated_requests"] > MANY))
    for name, kind in KINDS.items() if kind in ("search", "two_model")
    for result in CASES[name]["results"]
    if result["policy"].startswith(("sr", "mp")) and not result["policy"].endswith("sep")
    and result.get("stable_argsort", True)
]  # fmt: skip
ROWS = CASES["planning_time"]["rows"] if CASES else []
PLANNED = [
    pytest.param(row, id="-".join(str(row[key]) for key in ("set", "num_devices", "num_models", "duration", "policy")),
                 marks=[pytest.mark.slow] * (row["simulated_requests"] > most * MANY))
    for row in ROWS for most in [20 if row["policy"].endswith("sep") else 2]
]  # fmt: skip


def tried(one: Problem, policy: str) -> tuple[list[Choice], int]:
    """The best for each shape of all groups, and how many placements the policy looks at."""
    beam, searches = policy in ("sr-search", "mp-search-beam3"), policy.startswith("mp-search")
    devices, node = one.cluster.devices, one.cluster.devices_per_node
    sizes = [n for n in range(1, devices + 1) if devices % n == 0 and (n <= node or n % node == 0)]
    shapes = [Parallel(n // tensor, tensor) for n in sizes for tensor in range(1, 5) if n % tensor == 0]
    if not searches:
        shapes = [Parallel(int(policy.removeprefix("mp-greedy-")) if policy.startswith("mp") else 1)]
    found, count = list[Choice](), 0
    for parallel in shapes:
        if parallel in one.shapes:
            shape, before = np.full(devices // parallel.devices, one.shapes.index(parallel)), one.evaluations
            found.append(beam_search(one, shape, beam=3) if beam else fill(one, shape))
            count += one.evaluations - before - beam  # it does not look at groups without models
        elif parallel.pipeline <= 8:
            count += not beam
        count += searches and parallel.pipeline <= 8  # at the result once more
    return found, count


def agree(one: Problem, policy: str, planning: dict, good: int) -> Choice:
    found, count = tried(one, policy)
    best = max(found, key=lambda choice: choice.outcome.score)
    assert best.outcome.good.sum() >= good - TIES * len(one.times)
    assert planning["simulated_requests"] == planning["simulator_calls"] * len(one.times)
    if one.cluster.devices == 6 or not all(choice.outcome.bad.any() for choice in found):
        assert count <= (1 + OTHERS) * planning["simulator_calls"]
    else:
        many = OTHERS if policy.startswith("mp-search") else 0.001
        assert count == pytest.approx(planning["simulator_calls"], rel=many)
    return best


@pytest.mark.parametrize(("name", "result"), POLICIES)
def test_policies_try_as_many_placements_and_find_as_good_ones(name, result):
    case, policy, good = CASES[name], result["policy"], result["expected"]["num_good"]
    one = problem(case, cluster=cluster(case))
    if policy == "mp-round-robin":  # a group without room ends it, while ours goes on
        row = round_robin(one, arrays(one, result["placement"]["groups"])[0])
        assert row.outcome.good.sum() >= good - TIES * len(one.times)
    elif "segments" in result["placement"]:
        window = float(policy.removeprefix("sr-replace-"))
        starts, calls, simulated = [segment["start_time"] for segment in result["placement"]["segments"]], 0, 0
        for begin, end in pairwise([*starts, np.inf]):  # from an arrival for a window, while ours are by the clock
            part = one.only((one.times >= begin) & (one.times < end))
            assert part.times[0] == begin and (end == np.inf or end == one.times[one.times >= begin + window][0])
            calls += (count := tried(part, "sr-greedy")[1])
            simulated += count * len(part.times)
        assert calls == pytest.approx(result["planning"]["simulator_calls"], rel=OTHERS)
        assert simulated == pytest.approx(result["planning"]["simulated_requests"], rel=OTHERS)
        windows = clockwork(one, window)
        assert len(windows) == len(starts)
        assert sum(choice.outcome.good.sum() for _, choice in windows) >= good - TIES * len(one.times)
    else:
        agree(one, policy, result["planning"], good)


@pytest.mark.parametrize("row", PLANNED)
def test_planning_takes_as_many_simulations(row):
    """Of Algorithm 2 fewer: parts are solved once. Theirs found nothing in time for 64 devices."""
    case = planned(row)
    one = problem(case, cluster=cluster(case))
    assert len(one.times) == row["num_requests"]
    if row["policy"] == "mp-search-sep":
        ours = plan(one, effort=1_000_000)
        assert ours.outcome.attainment >= row.get("slo_attainment_all", 1.0)
        assert one.evaluations < row["simulator_calls"]
    else:
        best = agree(one, row["policy"], row, round(row["slo_attainment_all"] * len(one.times)))
        parallel, groups = one.shapes[best.shape[0]], len(best.shape)
        if best.outcome.bad.any() and "beam" not in row["policy"]:  # else another shape is as good, or better
            assert {f"(1, {parallel.tensor}, {parallel.pipeline})": groups} == row["group_configs"]
            assert groups == row["num_groups"]
            if best.outcome.attainment < 0.99:  # then what has room is used
                assert best.member.sum() == pytest.approx(row["num_replicas"], rel=0.1)
