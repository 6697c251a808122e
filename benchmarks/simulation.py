"""Autoregressive requests simulated a second, on one core: lengths of the Azure conversation trace, through the
scheduler that serves, KV blocks and predicted step times included; by rate, and so by how many sequences a step has.
The median of the rounds, and the best: what others do on the machine only ever costs time."""

import statistics
import time

import numpy as np

from paceline.core.cluster import Cluster, Group, Parallel, Placement
from paceline.core.request import SLO
from paceline.latency.step_time import StepTime
from paceline.placement.problem import Problem
from paceline.placement.tables import ModelTable, ShapeTable
from paceline.simulator.fleet import SimulatedModel
from paceline.simulator.fleet import run as run_fleet
from paceline.workload.arrivals import gamma
from paceline.workload.trace import Trace, joint_lengths, load
from tests.reference import root

CASES = ["one_group"]
REQUESTS, RATES, ROUNDS = 20_000, (0.3, 1.0, 3.0, 6.0, 8.0), 15


def run(case: str) -> dict:
    known = load(root() / "sarathi/traces/azure_2023_conv.csv", "m")
    lengths = joint_lengths(list(zip(known.prompts.tolist(), known.outputs.tolist(), strict=True)), 0)
    simulated(100, 1.0, lengths)  # compiles
    rounds = [[simulated(REQUESTS, rate, lengths) for rate in RATES] for _ in range(ROUNDS)]
    rows = []
    for some in zip(*rounds, strict=True):
        rates = [one.pop("requests_per_s") for one in some]
        rows.append(some[0] | {"requests_per_s": round(statistics.median(rates)), "best_requests_per_s": max(rates)})
    return {"goal_requests_per_s": 100_000, "rounds": ROUNDS, "rates": rows}


def simulated(requests: int, rate: float, lengths) -> dict:
    trace = Trace.of({"m": gamma(rate, 1.0, requests / rate, 1)}, lengths)
    step = StepTime(tuple(0.02 + 3e-5 * n for n in range(513)), 1e-4, 1e-4, 1e-8, 1e-4, 1e-8, 1e-10)
    table = ModelTable("m", {Parallel(): ShapeTable((2**30,), {1: (0.1,)})})
    model = SimulatedModel(table, SLO(ttft=2.0, tbt=0.2), step, 100_000)
    placement = Placement((Group((0,), Parallel(), ("m",)),))
    one = Problem(Cluster(1, 2**36), [table], [np.inf], trace.arrivals, trace.models)
    begin = time.process_time()
    outcome = run_fleet([model], placement, trace, one, 2**36).outcomes
    seconds = time.process_time() - begin
    return {"rate": rate, "requests": len(trace), "tokens": int(outcome.outputs.sum()),
            "requests_per_s": round(len(trace) / seconds)}  # fmt: skip
