"""Pipeline bubbles on 64 devices, simulated: SARATHI's GPT-3 setting (2023, section 5.3) under every policy.

GPT-3 in eight stages of eight tensor ranks, 10,000 requests at once, 1 to 4 thousand tokens by a Zipf law (0.4), ten of
a prompt to one of the output, batches of 27. What a step takes follows from the model's size and an A100's rates; the
chunk is the paper's, 256 tokens, and the knee of these times is told beside it. A bubble is what a stage waits between
its first step and its last.
"""

import numpy as np

from benchmarks.plots import figure
from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.latency.step_time import StepTime
from paceline.latency.tiles import find_knee
from paceline.simulator.steps import Requests, SimulatedGroup
from paceline.simulator.steps import run as simulate

CASES = ["gpt3"]
LAYERS, WIDTH, TENSOR, STAGES = 96, 12288, 8, 8
FLOPS, BANDWIDTH = 0.55 * 312e12, 0.8 * 2.0e12  # an A100's in 16 bits: what large products and copies reach of them
HOP_S, STEP_S = 50e-6, 12 * 2 * 60e-6  # to the next stage; two sums over eight ranks in each of a stage's layers
BATCH, CHUNK, TILE, REQUESTS = 27, 256, 128, 10_000
POLICIES = ("request_level", "prefill_first", "orca", "sarathi_2023", "sarathi_serve", "paceline")


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


def run(case: str) -> dict:
    time, rows = stage_time(), {}
    prompts, outputs = lengths(np.random.default_rng(0))
    far, first = np.full(REQUESTS, np.inf), np.zeros(REQUESTS)
    requests = Requests(first, np.zeros(REQUESTS, np.int64), prompts, outputs, far, far)
    blocks = BATCH * STAGES * (-(-4096 // 16))
    for policy in POLICIES:
        limits = SchedulerConfig(
            token_budget=CHUNK, max_batch=BATCH * STAGES, num_blocks=blocks, block_size=16, max_model_len=4096,
            max_num_batched_tokens=4096,
        )  # fmt: skip
        found = simulate([SimulatedGroup(GroupConfig(("m",), limits, policy, STAGES), time)], ["m"], requests)
        begins = found.left - found.took[:, None]
        bubbles = found.left.max(0) - begins.min(0) - found.took.sum()
        rows[policy] = {
            "makespan_s": round(float(found.finish.max()), 1),
            "tokens_per_s": round(float((prompts + outputs).sum() / found.finish.max())),
            "bubble_s": [round(float(one), 1) for one in bubbles],
            "bubble_share": round(float(bubbles.mean() / found.finish.max()), 4),
            "steps": len(found.steps),
        }
        print(f"  {policy}: {rows[policy]}", flush=True)
    means = {policy: float(np.mean(row["bubble_s"])) for policy, row in rows.items()}
    with figure("bubbles", 2) as axes:
        for at, name in enumerate(("bubble_share", "makespan_s")):
            axes[at].bar(POLICIES, [rows[policy][name] for policy in POLICIES])
            axes[at].tick_params(axis="x", rotation=45)
            axes[at].set(title=name)
    knee = find_knee(lambda tokens: time.linear[tokens], TILE, 4096)
    return {
        "devices": STAGES * TENSOR, "requests": REQUESTS, "chunk": CHUNK, "knee": knee, "policies": rows,
        "bubbles, Orca's over ours": round(means["orca"] / means["paceline"], 1),
        "bubbles, Orca's over SARATHI's": round(means["orca"] / means["sarathi_2023"], 1),
        "tokens/s, ours over Orca's": round(rows["orca"]["makespan_s"] / rows["paceline"]["makespan_s"], 2),
    }  # fmt: skip
