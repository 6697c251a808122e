"""Whole simulated runs of Sarathi-Serve and a prefill-first scheduler over a trace, number for number."""

import csv
import json
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.batching.config import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.request import Request
from paceline.simulator.driver import FixedOutputs, simulate
from tests.papers.test_sarathi import CostModel
from tests.reference import cases, root

GOLDEN = next((path for path in cases("sarathi") if path.stem == "golden_runs"), None)
RUNS = json.loads(GOLDEN.read_text())["runs"] if GOLDEN else []


def requests(trace: Path, run: dict) -> list[Request]:
    """A sample of the trace's lengths with Poisson arrivals, in microseconds."""
    rows = list(csv.DictReader(trace.read_text().splitlines()))
    rng = random.Random(run["seed"])
    time, made = 0.0, []
    for index, row in enumerate(rng.sample(rows, run["n"])):
        time += rng.expovariate(run["qps"]) * 1e6
        prompt, output = (int(float(row[f"num_{kind}_tokens"])) for kind in ("prefill", "decode"))
        made.append(Request(str(index), prompt, output, arrival=int(time)))
    return made


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.skipif(not RUNS, reason="no reference runs here; set PACELINE_REFERENCE to their folder")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['policy']}-{run['token_budget']}-{run['qps']}")
def test_a_whole_run_number_for_number(run):
    golden = json.loads(GOLDEN.read_text())
    limits = SchedulerConfig(
        token_budget=run["token_budget"] or 512,
        max_batch=golden["max_batch"],
        block_size=golden["block_size"],
        num_blocks=golden["num_blocks"],
        max_num_batched_tokens=run["max_num_batched_tokens"] or 8192,
    )
    controller = Controller([GroupConfig(scheduler=limits, policy=run["policy"])])
    arrivals = requests(root() / "sarathi" / "traces" / f"{run['trace']}.csv", run)
    outputs = FixedOutputs({r.id: r.max_tokens for r in arrivals})
    trace = simulate(controller, arrivals, CostModel(**golden["cost_model"]), outputs)
    times: dict[str, list[int]] = defaultdict(list)
    begun: dict[str, int] = {}
    batches = 0
    for event in trace:
        if event.kind == "started":
            batches += 1
            for id in event.detail.requests:
                begun.setdefault(id, event.time)
        elif event.kind == "tokens":
            for id, tokens in zip(event.detail.requests, event.detail.tokens, strict=True):
                times[id] += [event.time] * tokens
    ttft = [times[r.id][0] - r.arrival for r in arrivals]
    tbt = [after - before for of_one in times.values() for before, after in pairwise(of_one)]
    assert {
        "batches": batches,
        "makespan_us": trace[-1].time,
        "ttft_p50_us": percentile(ttft, 0.5),
        "ttft_p90_us": percentile(ttft, 0.9),
        "tbt_p50_us": percentile(tbt, 0.5),
        "tbt_p99_us": percentile(tbt, 0.99),
        "tbt_max_us": max(tbt),
        "sched_delay_p50_us": percentile([begun[r.id] - r.arrival for r in arrivals], 0.5),
    }.items() <= run.items()
