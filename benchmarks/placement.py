"""The planner: how fast it simulates and plans, how that grows, and its placements against the artifact's.

`speed`: one-shot requests simulated a second, autoregressive ones through the real scheduler, and CPU seconds of
planning, over devices and models. `attainment`: every `search` case of the reference, with its best policy beside ours.
`ablation`: what each part of the search adds. `effort`: what more of it would add. Latencies and weights are those that
AlpaServe's authors measured.
"""

import json
import time
from dataclasses import replace

import numpy as np

from benchmarks.plots import figure
from paceline.core.cluster import Cluster, Parallel
from paceline.placement.greedy import Choice
from paceline.placement.problem import ALPASERVE, Problem
from paceline.placement.search import EFFORT, bucketings, in_buckets, plan, uniform
from paceline.placement.tables import ModelTable, ShapeTable
from paceline.workload.arrivals import gamma, merged, power_law
from tests.papers.alpaserve import CASES as REFERENCE
from tests.papers.alpaserve import cluster, problem
from tests.reference import root

CASES = ["speed", "attainment", "ablation", "effort"]
EFFORTS = (1, 4)  # times the usual
KINDS = {  # of AlpaServe's model sets
    "S1": ["bert-1.3b"],
    "S2": ["bert-6.7b"],
    "S3": ["bert-1.3b", "bert-2.6b", "bert-6.7b", "moe-1.3b", "moe-2.4b", "moe-5.3b"],
}
MEMORY = int(13 * 2**30)


def run(case: str) -> dict:
    return {"speed": speed, "attainment": attainment, "ablation": ablation, "effort": effort}[case]()


def tables(kinds: list[str], count: int) -> list[ModelTable]:
    known = json.loads((root() / "alpaserve/profiles/alpaserve_v100.json").read_text())["models"]
    found = []
    for index in range(count):
        shapes = {}
        for entry in known[kinds[index % len(kinds)]]["configs"]:
            _, tensor, pipeline = entry["config"]
            weights = tuple(int(size) for size in entry["stage_weight_bytes"])
            shapes[Parallel(pipeline, tensor)] = ShapeTable(weights, {1: tuple(entry["stage_latency_s"]["1"])})
        found.append(ModelTable(f"m{index}", shapes))
    return found


def traffic(models: int, rate: float, cv: float, duration: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Power-law shares in an order of their own, Gamma gaps."""
    order = np.random.RandomState(seed).permutation(models)
    rates = power_law(rate, models)
    return merged([gamma(rates[order[m]], cv, duration, 1000 * seed + m) for m in range(models)])


def expected(
    kind: str, models: int, devices: int, rate: float, cv: float = 4.0, scale: float = 5.0, duration: float = 200.0,
    rule: str = "finish", memory: int = MEMORY,
) -> Problem:  # fmt: skip
    """A set of models of one kind, and its traffic; goals are `scale` times the latency on one device."""
    known = tables(KINDS[kind], models)
    slo = [scale * table.alone for table in known]
    return Problem(Cluster(devices, memory, 8), known, slo, *traffic(models, rate, cv, duration), rule, ALPASERVE)


def speed() -> dict:
    plan(expected("S3", 6, 8, 4.0, duration=20.0), effort=1000)  # compiles
    result: dict = {"planning": [], "simulation": []}
    for kind, models, devices in (("S1", 32, 16), ("S3", 60, 24), ("S3", 60, 64)):
        choice = plan(expected(kind, models, devices, 64.0), effort=0)
        row: dict = {"models": models, "devices": devices, "groups": len(choice.shape), "million_requests_per_s": {}}
        for rule in ("last_stage", "finish", "deadline"):
            one = expected(kind, models, devices, 64.0, rule=rule)
            begin, count = time.process_time(), 0
            while time.process_time() - begin < 2.0:
                one.evaluate(choice.shape, choice.member)
                count += len(one.times)
            row["million_requests_per_s"][rule] = round(count / (time.process_time() - begin) / 1e6, 1)
        result["simulation"].append(row)
    for models, devices, rate, duration in (
        (24, 16, 40, 200), (24, 64, 40, 200), (60, 24, 64, 200), (60, 64, 64, 200), (60, 64, 128, 200),
        (128, 128, 128, 200), (256, 256, 256, 100), (512, 512, 512, 60), (1024, 1024, 1024, 60),
    ):  # fmt: skip
        one = expected("S3", models, devices, rate, duration=duration)
        begin = time.process_time()
        choice = plan(one)
        result["planning"].append({
            "models": models, "devices": devices, "requests": len(one.times),
            "cpu_s": round(time.process_time() - begin, 2), "simulations": one.evaluations,
            "attainment": round(choice.outcome.attainment, 4),
        })  # fmt: skip
        print(f"  {result['planning'][-1]}", flush=True)
    with figure("planning_time", 1) as axes:
        points = result["planning"]
        axes[0].loglog([p["devices"] for p in points], [p["cpu_s"] for p in points], "o")
        for point in points:
            axes[0].annotate(f"{point['models']} models", (point["devices"], point["cpu_s"]))
        axes[0].set(xlabel="devices", ylabel="CPU seconds of planning", title="S3, with buckets and local search")
    return result


def attainment() -> dict:
    result = {}
    for name, case in REFERENCE.items():
        if case["kind"] != "search":
            continue
        row: dict = {}
        for policy in case["results"]:
            if policy.get("stable_argsort", True):
                row[policy["policy"]] = round(policy["expected"]["slo_attainment_all"], 4)
        for rule in ("last_stage", "finish", "deadline"):
            one = problem(case, cluster=cluster(case), rule=rule)
            begin = time.process_time()
            row[f"ours, {rule}"] = round(plan(one).outcome.attainment, 4)
            row[f"ours, {rule}, cpu_s"] = round(time.process_time() - begin, 2)
        row["everything everywhere"] = round(unlimited(case), 4)
        result[name] = row
        print(f"  {name}: {row}", flush=True)
    rows = [row for row in result.values() if row["mp-search"] < 0.9995]
    result["mean gain over mp-search where that is below 99.95 %, points"] = round(
        100 * float(np.mean([row["ours, deadline"] - row["mp-search"] for row in rows])), 2
    )
    return result


def effort() -> dict:
    """Of the cases that are not saturated: attainment by how many requests local search may simulate."""
    result: dict = {}
    for name, case in REFERENCE.items():
        if case["kind"] != "search":
            continue
        row = {}
        for times in EFFORTS:
            one = problem(case, cluster=cluster(case), rule="deadline")
            begin = time.process_time()
            row[f"{times} x"] = round(plan(one, effort=times * EFFORT).outcome.attainment, 4)
            row[f"{times} x, cpu_s"] = round(time.process_time() - begin, 1)
            if row[f"{times} x"] > 0.9995:
                break
        else:
            result[name] = row
            print(f"  {name}: {row}", flush=True)
    last = f"{EFFORTS[-1]} x"
    result["mean gain over the usual, points"] = round(
        100 * float(np.mean([row[last] - row["1 x"] for row in result.values()])), 2
    )
    return result


def unlimited(case: dict) -> float:
    """A bound of groups of one shape: all models in all of them, as if memory had no end."""
    one = problem(case, cluster=replace(cluster(case), memory=10**15), rule="deadline")
    best = 0.0
    for p in range(len(one.shapes)):
        groups = one.cluster.devices // int(one.devices[p])
        member = np.ones((groups, len(one.tables)), np.bool_)
        if np.isfinite(one.latency[:, p, 0]).all():
            best = max(best, one.evaluate(np.full(groups, p), member).attainment)
    return best


def ablation() -> dict:
    """By AlpaServe's dispatch unless it says otherwise."""
    result = {}
    for name, case in REFERENCE.items():
        if case["kind"] != "search":
            continue
        one = problem(case, cluster=cluster(case))
        starts = sorted((uniform(one, p) for p in range(len(one.shapes))), key=_score, reverse=True)
        likely = [one.shapes[choice.shape[0]] for choice in starts[:2]]
        buckets = [in_buckets(one, cuts, likely) for cuts in bucketings(one)]
        sooner, ours = replace(one, rule="finish"), replace(one, rule="deadline")
        result[name] = {
            "one shape for all": starts[0].outcome.attainment,
            "and buckets": max([starts[0], *buckets], key=_score).outcome.attainment,
            "and dispatch by finish": max(
                sooner.evaluate(choice.shape, choice.member).attainment for choice in [starts[0], *buckets]
            ),
            "and by deadlines": max(
                ours.evaluate(choice.shape, choice.member).attainment for choice in [starts[0], *buckets]
            ),
            "and local search": plan(ours, effort=EFFORT).outcome.attainment,
        }
        result[name] = {what: round(value, 4) for what, value in result[name].items()}
        print(f"  {name}: {result[name]}", flush=True)
    return result


def _score(choice: Choice) -> tuple:
    return choice.outcome.score
