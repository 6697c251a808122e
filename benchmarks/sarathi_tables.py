"""SARATHI's tables in this engine: what decodes cost alone and on a chunk, and every policy over L, B and P:D.

Every policy runs the same requests through the same engine, by turns. A request has L tokens in all, P of prompt and D
of output (L = P + D, P:D their ratio); B requests run at a time and twice as many follow. `end_to_end` compares whole
runs, in which the first chunks go without decodes and the last decodes without chunks; `steady` the time from the end
of the B-th request to that of the 2B-th, when neither is so. `decode_speed_up` is what a decode costs in a batch of its
own (the baseline's, which is request-level) over what it adds to a chunk's step; what a chunk alone takes is measured
in the same turn.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import NamedTuple

import torch

from benchmarks import workload
from benchmarks.checkpoints import checkpoint
from benchmarks.machine import gemm_peak
from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.core.batch import Batch
from paceline.core.work import NewSequence, SliceOutput, SliceWork
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline

CHUNK = 256
POLICIES = ("request_level", "orca", "prefill_first", "sarathi_2023", "sarathi_serve", "paceline")
BASELINE = POLICIES[0]
BATCHES = 3  # of requests: one to begin with, one that is between others, one to end with


@dataclass(frozen=True)
class Plan:
    """What a shape is run with: the larger one has little time for each point."""

    points: tuple[tuple[int, int, float], ...]  # L, B, P:D
    ratios: tuple[float, ...]  # of the P:D sweep, at the first point's L and B
    chunks: tuple[int, ...]
    rounds: int


# The paper's points, and its batch of 6 at 50:1
PLANS = {
    "small": Plan(
        ((1024, 6, 50), (2048, 6, 50), (3072, 6, 50), (1024, 10, 28), (2048, 5, 63), (3072, 3, 127)),
        (5, 10, 20, 50, 100, 200),
        (64, 128, 256, 512, 1024),
        2,
    ),
    "qwen2.5-0.5b": Plan(((1024, 6, 50),), (10, 50), (128, 256, 512), 2),
}
CASES = list(PLANS)


def run(model: str) -> dict:
    plan = PLANS[model]
    longest, widest = max(point[0] for point in plan.points), max(point[1] for point in plan.points)
    runner = ModelRunner.load(
        checkpoint(model),
        max_batch_tokens=longest * widest,  # request-level and Orca take all prompts in one step
        max_batch=2 * widest,
        num_blocks=2 * widest * (longest // SchedulerConfig().block_size + 1),
        context=longest + 1,
    )
    result: dict = {"threads": torch.get_num_threads(), "gemm_gflop_s": round(gemm_peak() / 1e9, 1)}
    result["decode_cost"] = decode_cost(runner, 3 * plan.rounds)
    print(f"  decode cost: {result['decode_cost']}", flush=True)
    result["policies"] = [compare(runner, *point, CHUNK, POLICIES, plan.rounds) for point in plan.points]
    length, batch, ratio = plan.points[0]
    some = (BASELINE, "sarathi_2023", "paceline")
    result["ratio_sweep"] = [compare(runner, length, batch, one, CHUNK, some, plan.rounds) for one in plan.ratios]
    result["chunk_sweep"] = [
        compare(runner, length, batch, ratio, chunk, some, plan.rounds)
        | prompt_alone(runner, chunk, length, plan.rounds)
        for chunk in plan.chunks
    ]
    return result


def decode_cost(runner: ModelRunner, rounds: int, context: int = 1024) -> dict:
    """Table 2: milliseconds of a 1,024-token prompt, of decodes alone, and of both in one step of 1,024 tokens."""
    whole, decodes, block = 1024, 3, runner.info.block_size
    prompt = [300 + i for i in range(context)]
    each = context // block + 1
    tables = [list(range(i * each, (i + 1) * each)) for i in range(decodes + 2)]
    long = range((decodes + 2) * each, (decodes + 2) * each + -(-whole // block))
    steps = {
        "prompt of 1024": (whole, 0),
        "prompt of 1021": (whole - decodes, 0),
        "4 decodes": (0, 4),
        "3 decodes": (0, decodes),
        "1021 and 3 decodes": (whole - decodes, decodes),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, (length, count) in steps.items():
            ids = list(range(count))
            new = [NewSequence(i, [*prompt, 5], context + 1, workload.greedy(9)) for i in ids]
            work = [SliceWork(i, context, 1, True, 0, tables[i]) for i in ids]
            if length:
                new.append(NewSequence(9, prompt[:1] * length, length, workload.greedy(9)))
                work.append(SliceWork(9, 0, length, True, 0, list(long)))
            begin = time.perf_counter()
            outputs, _, _ = runner.step(new, work, [])
            assert not any(output.error for output in outputs)
            if turn:
                taken[name].append(time.perf_counter() - begin)
            runner.step([], [], [item.id for item in new])
    ms = {name: 1e3 * median(seconds) for name, seconds in taken.items()}
    hybrid = ms["1021 and 3 decodes"]

    def over(other: str) -> float:
        pairs = zip(taken["1021 and 3 decodes"], taken[other], strict=True)
        return median(both / alone - 1 for both, alone in pairs)

    return {
        "ms": {name: round(value, 2) for name, value in ms.items()},
        "ms_per_decode_alone": round(ms["4 decodes"] / 4, 3),
        "ms_per_decode_riding": round(over("prompt of 1024") * hybrid / decodes, 3),
        "step_over_prompt_of_1024": round(over("prompt of 1024"), 4),
        "step_over_prompt_of_1021": round(over("prompt of 1021"), 4),
    }


def config(policy: str, batch: int, chunk: int, length: int, block: int) -> GroupConfig:
    return GroupConfig(
        policy=policy,
        scheduler=SchedulerConfig(
            # 2023's chunk excludes the decodes, 2024's budget includes them: the same chunk beside a full batch
            chunk if policy == "sarathi_2023" else chunk + batch - 1,
            batch,
            block,
            2 * batch * (length // block + 1),
            max_num_batched_tokens=length * batch,
        ),
    )


class Step(NamedTuple):
    batch: Batch
    seconds: float
    finished: int  # requests by its end


def sample(runner: ModelRunner, limits: GroupConfig, prompts: list[list[int]], output: int) -> list[Step]:
    """All steps of a run."""
    steps: list[Step] = []
    tokens: Counter[str] = Counter()
    offline = Offline(runner, limits)

    def on_step(batch: Batch, outputs: list[SliceOutput], forward_s: float, sample_s: float) -> None:
        tokens.update({name: len(one.tokens) for name, one in zip(batch.requests, outputs, strict=True)})
        finished = sum(count == output for count in tokens.values())
        steps.append(Step(batch, forward_s + sample_s, finished))

    offline.on_step = on_step
    outputs = offline.generate(prompts, [workload.greedy(output)] * len(prompts))
    assert all(len(one.tokens) == output for one in outputs)
    return steps


def between(steps: list[Step], first: int, last: int) -> float:
    """Seconds from the end of the first-th request to that of the last-th."""
    return sum(step.seconds for before, step in pairwise(steps) if first <= before.finished < last)


def compare(
    runner: ModelRunner, length: int, batch: int, ratio: float, chunk: int, policies: tuple[str, ...], rounds: int
) -> dict:
    """Every policy's seconds over those of request-level batches, and what its decodes cost beside theirs."""
    output, block = max(2, round(length / (ratio + 1))), runner.info.block_size
    rng = Random(f"{length} {batch} {ratio}")
    prompts = [[rng.randrange(300, 8000) for _ in range(length - output)] for _ in range(BATCHES * batch)]
    seconds, steady, gaps = defaultdict(list), defaultdict(list), defaultdict(list)
    alone, riding = [], []
    for turn in range(rounds):
        by_start = defaultdict(list)
        for step, took, _ in sample(runner, config("sarathi_2023", 1, chunk, length, block), prompts[:2], 1):
            by_start[step.starts[0], step.lengths[0]].append(took)
        for policy in policies[turn % len(policies) :] + policies[: turn % len(policies)]:
            steps = sample(runner, config(policy, batch, chunk, length, block), prompts, output)
            seconds[policy].append(sum(step.seconds for step in steps))
            steady[policy].append(between(steps, batch, 2 * batch))
            gaps[policy].append(max(step.seconds for step in steps if step.batch.shape.decodes))
            if policy == BASELINE:
                only = [step for step in steps if step.batch.shape.tokens == step.batch.shape.decodes]
                alone.append(sum(step.seconds for step in only) / sum(step.batch.shape.decodes for step in only))
            elif policy == "sarathi_2023":
                riding.append(marginal(steps, by_start))
    result: dict = {"L": length, "B": batch, "P:D": ratio, "D": output, "chunk": chunk}
    result["ms_per_decode"] = {"alone": round(1e3 * median(alone), 3), "riding": round(1e3 * median(riding), 3)}
    if median(riding) > 0:  # else it is less than the noise of a chunk's time
        result["decode_speed_up"] = round(median(alone) / median(riding), 2)
    for name, taken_by in (("end_to_end", seconds), ("steady", steady)):
        result[name] = {
            policy: round(median(one / own for one, own in zip(taken_by[BASELINE], taken, strict=True)), 3)
            for policy, taken in taken_by.items()
        }
    result["seconds"] = {policy: round(median(taken), 2) for policy, taken in seconds.items()}
    result["longest_step_with_decodes_ms"] = {policy: round(1e3 * median(each), 1) for policy, each in gaps.items()}
    print(f"  {result}", flush=True)
    return result


def marginal(steps: list[Step], chunks: dict[tuple[int, int], list[float]]) -> float:
    """Seconds that a decode adds to a step with a chunk: of all such steps, less those chunks alone."""
    extra, decodes = 0.0, 0
    for step, took, _ in steps:
        chunk = next((at for at in zip(step.starts, step.lengths, strict=True) if at[1] > 1), None)
        if chunk in chunks and step.shape.decodes and step.shape.chunks == 1:
            extra += took - median(chunks[chunk])
            decodes += step.shape.decodes
    return extra / max(1, decodes)


def prompt_alone(runner: ModelRunner, chunk: int, length: int, rounds: int) -> dict:
    """A prompt's seconds in chunks, over those in one step (the paper's chunking overhead)."""
    block = runner.info.block_size
    prompts = [[300 + i % 7000 for i in range(length)]]
    ratios = []
    for _ in range(2 * rounds):
        parts, whole = (
            sum(step.seconds for step in sample(runner, config("sarathi_2023", 1, size, length, block), prompts, 1))
            for size in (chunk, length)
        )
        ratios.append(parts / whole)
    return {"prompt_in_chunks_over_whole": round(median(ratios), 3)}
