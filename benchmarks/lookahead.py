"""Is choosing how many tokens to draft worth it? Against no drafts and the best fixed number, by load and acceptance.

Simulated, with what steps take on this machine and drafts that cost a tenth and a third of the target's. Once without
noise: what is lost is lost by the choice. Once with noise, and steps that differ from their profiles: what is lost is
lost by finding out (`drafts_in_noise`).
"""

from itertools import product

import numpy as np

from benchmarks import drafts_in_noise
from benchmarks.checkpoints import checkpoint
from paceline.batching.config import SchedulerConfig
from paceline.cli import profile_cache
from paceline.cli.fleet_profile import measured_here
from paceline.controller import GroupConfig
from paceline.latency.step_time import StepTime
from paceline.simulator.drafts import SimulatedDrafts
from paceline.simulator.steps import run as simulate
from paceline.simulator.world import Requests, SimulatedGroup
from paceline.speculation.costs import Costs

CASES = ["small"]
COSTS, AT_A_TIME, ACCEPTANCES = (0.1, 0.33), (1, 2, 4, 8, 16, 32), (0.3, 0.6, 0.8, 0.9, 0.95)
FIXED, MOST = (1, 2, 3, 4, 5, 6, 8), 8
PROMPT, OUTPUT, TURNS = 64, 400, 4  # tokens; requests for each that runs at a time


def run(model: str) -> dict:
    path = checkpoint(model)
    file = profile_cache.cache_file(path, "none", profile_cache.Device.here(None))
    if not file.exists():
        measured_here(path, model, ["--quick"])
    profile = profile_cache.load(file)
    rows = []
    for cost, at_a_time, acceptance in product(COSTS, AT_A_TIME, ACCEPTANCES):
        draft = Costs.of(profile.step_time).scaled(cost)
        none = tokens_per_s(profile.step_time, at_a_time, None)
        fixed = {
            str(most): tokens_per_s(profile.step_time, at_a_time, SimulatedDrafts(most, acceptance, draft, False))
            for most in FIXED
        }
        chosen = tokens_per_s(profile.step_time, at_a_time, SimulatedDrafts(MOST, acceptance, draft))
        rows.append({
            "draft_cost": cost, "at_a_time": at_a_time, "acceptance": acceptance, "none": round(none, 1),
            "fixed_over_none": {most: round(one / none, 3) for most, one in fixed.items()},
            "chosen_over_none": round(chosen / none, 3),
            "chosen_over_best": round(chosen / max(none, *fixed.values()), 3),
        })  # fmt: skip
    over_none, over_best = ([row[key] for row in rows] for key in ("chosen_over_none", "chosen_over_best"))
    return {
        "least over none": min(over_none), "least over the best": min(over_best),
        "mean over the best": round(float(np.mean(over_best)), 4),
        "below 0.97 of the best": sum(one < 0.97 for one in over_best), "rows": rows,
        "in noise": drafts_in_noise.run(profile.step_time),
    }  # fmt: skip


def tokens_per_s(time: StepTime, at_a_time: int, drafts: SimulatedDrafts | None) -> float:
    count = TURNS * at_a_time
    limits = SchedulerConfig(max_batch=at_a_time, num_blocks=at_a_time * 64)
    same, far = np.ones(count, np.int64), np.full(count, np.inf)
    requests = Requests(np.zeros(count), 0 * same, PROMPT * same, OUTPUT * same, far, far)
    found, _ = simulate([SimulatedGroup(GroupConfig(("m",), limits), time, 1.0, drafts)], ["m"], requests)
    return count * OUTPUT / float(found.finish.max())
