"""Pipeline bubbles on 64 devices, simulated: SARATHI's GPT-3 setting (2023, section 5.3) under our policies.

GPT-3 in eight stages of eight tensor ranks, 10,000 requests at once, 1 to 4 thousand tokens by a Zipf law (0.4), ten of
a prompt to one of the output. As in the paper there are eight batches of 27 requests, each of which a policy runs for
itself; ours has all 216 and fills batches as it likes. What a step takes follows from the model's size and the rates of
an A100. Chunks are the paper's, 256 tokens, and in rows that say so as wide as the knee of these times, where ours has
a profile, as it has in a server. A bubble is what a stage waits between its first step and its last.
"""

import numpy as np

from benchmarks.plots import figure
from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.latency.step_time import StepTime
from paceline.latency.tiles import find_knee
from paceline.simulator.steps import run as simulate
from paceline.simulator.world import Requests, SimulatedGroup

CASES = ["gpt3"]
LAYERS, WIDTH, TENSOR, STAGES = 96, 12288, 8, 8
FLOPS, BANDWIDTH = 0.55 * 312e12, 0.8 * 2.0e12  # an A100's in 16 bits: what large products and copies reach of them
HOP_S, STEP_S = 50e-6, 12 * 2 * 60e-6  # to the next stage; two sums over eight ranks in each of a stage's layers
BATCH, CHUNK, TILE, REQUESTS = 27, 256, 128, 10_000
POLICIES = ("request_level", "prefill_first", "orca", "sarathi_2023", "sarathi_serve", "paceline")
TOGETHER = ("paceline",)  # policies that have all requests


def stage_time() -> StepTime:
    """Of one stage, by the rooflines of its linear layers and its attention."""
    weights = 12 * WIDTH**2 * LAYERS // STAGES // TENSOR  # of a device
    linear = [HOP_S + STEP_S + max(2 * weights / BANDWIDTH, 2 * weights * n / FLOPS) for n in range(4 * 4096 + 1)]
    kv_bytes = 2 * 2 * WIDTH * LAYERS // STAGES // TENSOR  # of a token
    pair_flop = 4 * WIDTH * LAYERS // STAGES // TENSOR
    return StepTime(tuple(linear), 0.0, 0.0, kv_bytes / BANDWIDTH, 0.0, kv_bytes / BANDWIDTH, pair_flop / FLOPS)


def lengths(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of prompts and outputs."""
    sizes = np.arange(1024, 4097)
    chance = (1.0 + np.arange(len(sizes))) ** -0.4
    whole = rng.choice(sizes, REQUESTS, p=chance / chance.sum())
    outputs = whole // 11
    return (whole - outputs).astype(np.int64), outputs.astype(np.int64)


def simulated(
    policy: str, width: int, budget: GoalBudget | None, time: StepTime, prompts: np.ndarray, outputs: np.ndarray
) -> dict:  # fmt: skip
    lanes = 1 if policy in TOGETHER else STAGES
    limits = SchedulerConfig(
        token_budget=width, max_batch=BATCH * STAGES // lanes, num_blocks=BATCH * STAGES // lanes * (4096 // 16 + 1),
        block_size=16, max_model_len=4096, max_num_batched_tokens=4096,
    )  # fmt: skip
    names = [str(lane) for lane in range(lanes)]
    configs = [GroupConfig((name,), limits, policy, STAGES, budget=budget, device=0) for name in names]
    groups = [SimulatedGroup(config, time) for config in configs]
    far = np.full(REQUESTS, np.inf)
    requests = Requests(np.zeros(REQUESTS), np.arange(REQUESTS) % lanes, prompts, outputs, far, far)
    served, steps = simulate(groups, names, requests)
    begins, end = steps.left - steps.took[:, None], float(served.finish.max())
    bubbles = steps.left.max(0) - begins.min(0) - steps.took.sum()
    return {
        "makespan_s": round(end, 1),
        "tokens_per_s": round(float((prompts + outputs).sum() / end)),
        "bubble_s": [round(float(one), 1) for one in bubbles],
        "bubble_share": round(float(bubbles.mean() / end), 4),
        "steps": len(steps.took),
    }


def run(case: str) -> dict:
    time, rows = stage_time(), {}
    knee = find_knee(lambda tokens: time.linear[tokens], TILE, 4096)
    sizes = lengths(np.random.default_rng(0))
    wide = [("sarathi_2023", knee), ("paceline", knee)]
    ours = f"paceline, {knee} tokens"
    for policy, width in [*((policy, CHUNK) for policy in POLICIES), *wide]:
        name = policy if width == CHUNK else f"{policy}, {width} tokens"
        budget = GoalBudget(time.linear, time.terms, TILE, knee, 4096) if name == ours else None
        rows[name] = simulated(policy, width, budget, time, *sizes)
        print(f"  {name}: {rows[name]}", flush=True)
    bubble = {name: float(np.mean(row["bubble_s"])) for name, row in rows.items()}
    with figure("bubbles", 2) as axes:
        for at, key in enumerate(("bubble_share", "makespan_s")):
            axes[at].barh(list(rows), [row[key] for row in rows.values()])
            axes[at].set(title=key)
    return {
        "devices": STAGES * TENSOR, "requests": REQUESTS, "chunk": CHUNK, "knee": knee, "policies": rows,
        "bubbles, Orca's over ours": round(bubble["orca"] / bubble["paceline"], 1),
        "bubbles, Orca's over ours at the knee": round(bubble["orca"] / bubble[ours], 1),
        "bubbles, Orca's over SARATHI's": round(bubble["orca"] / bubble["sarathi_2023"], 1),
        "tokens/s, ours over Orca's": round(rows["orca"]["makespan_s"] / rows["paceline"]["makespan_s"], 2),
        "tokens/s, ours at the knee over Orca's": round(rows["orca"]["makespan_s"] / rows[ours]["makespan_s"], 2),
    }  # fmt: skip
