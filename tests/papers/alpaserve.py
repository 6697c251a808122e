"""Cases made by running AlpaServe's own code, as problems of ours."""

import hashlib
import json

import numpy as np

from paceline.core.cluster import Cluster, Parallel
from paceline.placement.problem import ALPASERVE, ALPASERVE_EVENTS, Problem
from paceline.placement.tables import ModelTable, ShapeTable
from paceline.workload.arrivals import gamma, merged, power_law
from tests.reference import cases, root

CASES = {path.stem: json.loads(path.read_text()) for path in cases("alpaserve/cases")}
SETS = {  # of planning times
    "S1 bert-1.3b": ("alpaserve_v100", ["bert-1.3b"]),
    "S3 mixed": ("alpaserve_v100", ["bert-6.7b", "moe-5.3b", "bert-2.6b", "moe-2.4b", "bert-1.3b", "moe-1.3b"]),
    "toy mix": ("synthetic", ["toy-small", "toy-mid", "toy-large", "toy-nobal"]),
}
ANYWHERE = Cluster(10**6, 10**15)  # for placements that are given


def tables(case: dict) -> list[ModelTable]:
    profile = json.loads((root() / "alpaserve" / case["profile_db"]).read_text())["models"]
    kinds = {kind: ModelTable(kind, dict(map(_shape, entry["configs"]))) for kind, entry in profile.items()}
    models = case.get("models") or [
        {"name": f"m{i}", "type": case["model_type"]} for i in range(case.get("num_models", 0))
    ]
    return [ModelTable(model["name"], kinds[model["type"]].shapes) for model in models]


def _shape(entry: dict) -> tuple[Parallel, ShapeTable]:
    _, tensor, pipeline = entry["config"]
    latency = {int(size): tuple(seconds) for size, seconds in entry["stage_latency_s"].items()}
    return Parallel(pipeline, tensor), ShapeTable(tuple(map(int, entry["stage_weight_bytes"])), latency)


def traffic(case: dict) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and the model of each."""
    if "arrivals" in case:
        times, models = zip(*case["arrivals"], strict=True)
        return np.array(times), np.array(models, np.int32)
    times, models = generated(case["arrival_spec"])
    if known := case.get("workload_fingerprint"):
        assert hashlib.sha256(times.astype("<f8").tobytes()).hexdigest() == known["arrivals_sha256_le_f64"]
        names = ",".join(f"m{model}" for model in models)
        assert hashlib.sha256(names.encode()).hexdigest() == known["model_sequence_sha256"]
    return times, models


def generated(spec: dict) -> tuple[np.ndarray, np.ndarray]:
    streams = zip(spec["rates"], spec["cvs"], spec["seeds"], strict=True)
    return merged([gamma(rate, cv, spec["duration"], seed) for rate, cv, seed in streams])


def problem(case: dict, slo: list[float] | None = None, cluster: Cluster | None = None, **changes) -> Problem:
    known = tables(case)
    slo = slo or [model["slo"] for model in case["models"]]
    events = case["kind"] == "des_replay"
    rules = {"rule": "in_flight" if events else "last_stage", "timing": ALPASERVE_EVENTS if events else ALPASERVE}
    return Problem(cluster or ANYWHERE, known, slo, *traffic(case), **rules | changes)


def planned(row: dict) -> dict:
    """The case of a row of planning times: kinds of models by turns, power-law rates, CV 4, goals of 5 latencies."""
    profile, kinds = SETS[row["set"]]
    count = row["num_models"]
    case = {
        "kind": "search", "profile_db": f"profiles/{profile}.json",
        "models": [{"name": f"m{i}", "type": kinds[i % len(kinds)]} for i in range(count)],
        "arrival_spec": {
            "rates": power_law(row["rate"], count), "cvs": [4] * count, "seeds": range(count),
            "duration": row["duration"],
        },
        "cluster": {
            "num_devices": row["num_devices"], "mem_budget_bytes": row["mem_budget_gib"] * 2**30,
            "num_devices_per_node": 8,
        },
    }  # fmt: skip
    for model, table in zip(case["models"], tables(case), strict=True):
        model["slo"] = 5 * table.alone
    return case


def cluster(case: dict) -> Cluster:
    known = case["cluster"]
    return Cluster(known["num_devices"], known["mem_budget_bytes"], known["num_devices_per_node"])


def arrays(problem: Problem, groups: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    shape = [problem.shapes.index(Parallel(group["config"][2], group["config"][1])) for group in groups]
    member = np.zeros((len(groups), len(problem.tables)), bool)
    for row, group in zip(member, groups, strict=True):
        row[group["models"]] = True
    return np.array(shape, np.int64), member
