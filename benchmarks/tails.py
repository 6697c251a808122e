"""Time between tokens on the Azure conversation trace: prefill-first, fixed budgets, and the budget by the goal.

The trace's first requests, their lengths divided by LENGTHS and arrivals rescaled to each rate, run live through the
same engine by turns; idle time is skipped. A goal is a multiple of the shortest step's time, so that it means the same
on every machine. `capacity` is the highest rate at which a configuration holds the goal, P99 over all gaps between
tokens, and is at most a twentieth slower than the fastest of all.
"""

import csv
import os
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

from benchmarks import workload
from benchmarks.checkpoints import checkpoint
from paceline.batching.config import SchedulerConfig
from paceline.cli.profile import goal_budget
from paceline.controller import GroupConfig
from paceline.engine.profiler import profile
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline

CASES = ["small"]
TRACE = Path("sarathi") / "traces" / "azure_2023_conv.csv"
REQUESTS, LENGTHS = 80, 4
BUDGETS = (64, 128, 256, 512)
WIDEST, BATCH, BLOCK = 1024, 64, 16
LOADS = (0.5, 0.8, 1.5)  # of the rate that the engine serves when all requests are there at once
GOALS = (3.0, 6.0)  # times the shortest step
ROUNDS = 2
SERVED = 0.95


def trace() -> tuple[list[float], list[tuple[int, int]]]:
    """Arrivals, in seconds from the first, and (prompt, output) tokens, scaled."""
    path = Path(os.environ.get("PACELINE_REFERENCE", "../shared/reference")) / TRACE
    with open(path) as file:
        rows = list(csv.DictReader(file))[:REQUESTS]
    arrivals = [float(row["arrived_at"]) for row in rows]
    lengths = [
        tuple(max(1, round(int(row[key]) / LENGTHS)) for key in ("num_prefill_tokens", "num_decode_tokens"))
        for row in rows
    ]
    return [at - arrivals[0] for at in arrivals], lengths  # type: ignore[return-value]


class Load:
    """The trace's requests, and what an engine makes of them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.arrivals, lengths = trace()
        rng = Random(7)
        self.prompts = [[rng.randrange(300, 8000) for _ in range(prompt)] for prompt, _ in lengths]
        self.outputs = [output for _, output in lengths]

    def run(self, group: GroupConfig, rate: float | None) -> dict:
        """Figures at a rate in requests/s; None: all at once."""
        stretch = 0.0 if rate is None else len(self.arrivals) / rate / self.arrivals[-1]
        arrivals = [at * stretch for at in self.arrivals]
        params = [workload.greedy(count) for count in self.outputs]
        outputs = Offline(self.runner, group).generate(self.prompts, params, arrivals)
        gaps = np.concatenate([np.diff(one.times) for one in outputs])
        first = [one.times[0] - one.arrival for one in outputs]
        end = max(one.times[-1] for one in outputs)
        return {
            "p99_tbt_s": float(np.percentile(gaps, 99)),
            "p50_tbt_s": float(np.median(gaps)),
            "p90_ttft_s": float(np.percentile(first, 90)),
            "requests_s": len(outputs) / end,
            "output_tokens_s": sum(self.outputs) / end,
        }


def run(model: str) -> dict:
    runner = ModelRunner.load(checkpoint(model), max_batch_tokens=4 * WIDEST, max_batch=BATCH, num_blocks=4096)
    result = profile(runner, max_tokens=WIDEST, max_batch=BATCH, seconds=90.0)
    load = Load(runner)
    limits = [SchedulerConfig(budget, BATCH, BLOCK, runner.info.num_blocks) for budget in (*BUDGETS, WIDEST)]
    predict = result.step_time.seconds
    groups = {f"budget {one.token_budget}": GroupConfig(scheduler=one, policy="sarathi_serve") for one in limits[:-1]}
    prefill_first = SchedulerConfig(WIDEST, BATCH, BLOCK, runner.info.num_blocks, max_num_batched_tokens=4 * WIDEST)
    groups["prefill_first"] = GroupConfig(scheduler=prefill_first, policy="prefill_first")
    goals = {f"goal x{times:g}": times * result.floor for times in GOALS}
    for name, goal in goals.items():
        budget = goal_budget(model, result, WIDEST, goal)
        groups[name] = GroupConfig(scheduler=limits[-1], budget=budget, predict=predict)
    peak = load.run(groups["budget 512"], None)["requests_s"]
    samples: dict = {name: {load: [] for load in LOADS} for name in groups}
    for turn in range(ROUNDS):
        for share in LOADS:
            for name in list(groups)[turn:] + list(groups)[:turn]:
                got = load.run(groups[name], share * peak)
                samples[name][share].append(got)
                print(f"  round {turn + 1} of {ROUNDS}, {share:g} of the peak, {name}: {got}", flush=True)
    figures = {
        name: {f"{share:g}": medians(runs) for share, runs in shares.items()} for name, shares in samples.items()
    }
    return {
        "requests": len(load.prompts),
        "lengths_divided_by": LENGTHS,
        "peak_requests_s": round(peak, 3),
        "shortest_step_s": round(result.floor, 4),
        "profile_error": {"p50": round(result.error.p50, 4), "p95": round(result.error.p95, 4)},
        "figures_by_share_of_the_peak": figures,
        "goals": {name: verdict(name, goal, figures, peak) for name, goal in goals.items()},
    }


def medians(runs: list[dict]) -> dict:
    return {key: round(median(one[key] for one in runs), 4) for key in runs[0]}


def verdict(name: str, goal: float, figures: dict, peak: float) -> dict:
    """Where each configuration holds the goal; whether the one made for it does wherever a fixed one does."""
    fixed = [other for other in figures if other.startswith("budget")]

    def holds(other: str, share: str) -> bool:
        return figures[other][share]["p99_tbt_s"] <= goal

    def served(other: str, share: str) -> bool:
        return figures[other][share]["requests_s"] >= SERVED * max(one[share]["requests_s"] for one in figures.values())

    def capacity(other: str) -> float:
        held = [share for share in shares if holds(other, share) and served(other, share)]
        return max((float(share) * peak for share in held), default=0.0)

    shares = list(figures[name])
    missed = [share for share in shares if not holds(name, share) and any(holds(one, share) for one in fixed)]
    best = {
        share: max((figures[one][share]["output_tokens_s"] for one in fixed if holds(one, share)), default=None)
        for share in shares
    }
    return {
        "tbt_s": round(goal, 4),
        "capacity_requests_s": {one: round(capacity(one), 3) for one in [name, *fixed, "prefill_first"]},
        "missed_though_a_fixed_one_holds": missed,
        "throughput_over_the_best_fixed_one_that_holds": {
            share: round(figures[name][share]["output_tokens_s"] / rate, 3) for share, rate in best.items() if rate
        },
    }
