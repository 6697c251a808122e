"""Paceline itself: one engine and its scheduler in one process, `budget` tokens a step.

Keys and values are float32, beside int8 weights and with `dtype` bfloat16 in half precision, unless `kv_cache_dtype`
says otherwise.
"""

from pathlib import Path

import torch

from benchmarks import workload
from benchmarks.peers.child import THREADS, Tokens, serve
from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline

BLOCKS, BATCH = 1024, 32


class Ours:
    def __init__(self, runner: ModelRunner, budget: int) -> None:
        info = runner.info
        self.runner = runner
        self.config = GroupConfig(scheduler=SchedulerConfig(budget, BATCH, info.block_size, info.num_blocks))
        kept = str(runner.cache.pool.dtype).removeprefix("torch.")
        self.about = f"paceline, {budget} tokens a step, keys and values in {kept}"

    def run(self, prompts: list[list[int]], outputs: list[int]) -> Tokens:
        result = Tokens(len(prompts))
        offline = Offline(self.runner, self.config)  # a scheduler of its own, so nothing is in the prefix cache
        for i, output in enumerate(offline.generate(prompts, [workload.greedy(count) for count in outputs])):
            result.tokens[i], result.times[i] = output.tokens, output.times
        return result


def load(checkpoint: Path, precision: str, options: dict, cache: Path) -> Ours:
    torch.set_num_threads(THREADS)
    runner = ModelRunner.load(
        checkpoint,
        max_batch_tokens=options["budget"],
        max_batch=BATCH,
        num_blocks=BLOCKS,
        quantization="int8" if precision == "int8" else "none",
        dtype=options.get("dtype", "auto"),
        kv_cache_dtype=options.get("kv_cache_dtype", "auto"),
    )
    return Ours(runner, options["budget"])


if __name__ == "__main__":
    serve(load)
