"""What it costs to divide a model over two worker processes, one core each: a decode's time over that of one worker.

One sequence at a time: nothing overlaps, so a step in two stages takes what one worker takes, and the hop. With two
tensor ranks it takes half of that at best, and two sums a layer. Runs of all take turns.
"""

import asyncio
import statistics
import time

from benchmarks.checkpoints import checkpoint
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Parallel
from paceline.core.request import SamplingParams
from paceline.engine.config import ModelConfig
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel

SHAPES = (Parallel(), Parallel(2, 1), Parallel(1, 2))
ROUNDS, TOKENS, PROMPT = 5, 120, 64


class Times:
    """A sink that notes when tokens came."""

    checks_stop = False

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = asyncio.Event()

    def push(self, output, finish) -> bool:
        self.times += [time.perf_counter()] * len(output.tokens)
        if finish:
            self.done.set()
        return False

    def fail(self, reason: str) -> None:
        raise RuntimeError(reason)


CASES = ("small",)


def run(model: str) -> dict:
    return asyncio.run(measure(model))


async def measure(model: str) -> dict:
    path = checkpoint(model)
    options = WorkerOptions(str(path), max_batch_tokens=512, max_batch=16, num_blocks=200, threads=1)
    gaps: dict[str, list[float]] = {str(shape): [] for shape in SHAPES}
    for _ in range(ROUNDS):
        for shape in SHAPES:
            group = WorkerGroup((ServedModel("m"),), GroupOptions((options,), shape).command, shape)
            async with LocalFleet([group], FleetConfig()) as fleet:
                params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
                sink = Times()
                fleet.submit("m", list(range(3, 3 + PROMPT)), params, sink)
                await sink.done.wait()
                gaps[str(shape)] += [b - a for a, b in zip(sink.times[20:], sink.times[21:], strict=False)]
    layers = ModelConfig.load(path).layers
    whole, stages, ranks = (statistics.median(gaps[str(shape)]) for shape in SHAPES)
    return {
        "decode_ms": {name: round(1e3 * statistics.median(some), 3) for name, some in gaps.items()},
        "hop_us": round(1e6 * (stages - whole)),
        "sum_us": round(1e6 * (ranks - whole / 2) / (2 * layers)),
        "goal_hop_us": 300,
    }
