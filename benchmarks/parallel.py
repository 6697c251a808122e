"""What it costs to divide a model over two worker processes, one core each.

A hop: from just before one worker sends hidden states until the other one, which waits for them, has them. And a
decode's time over that of one worker, one sequence at a time: nothing overlaps, so a step in two stages takes what one
worker takes, the hop, and what the second one does besides. With two tensor ranks it takes half of that at best, and
two sums a layer. Runs of all take turns.
"""

import asyncio
import multiprocessing
import socket
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.checkpoints import checkpoint
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Parallel
from paceline.core.request import SamplingParams
from paceline.engine.config import ModelConfig
from paceline.engine.parallel import Peers, Place
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel

SHAPES = (Parallel(), Parallel(2, 1), Parallel(1, 2))
ROUNDS, TOKENS, PROMPT = 5, 120, 64
HOPS, ROWS, WIDTH, BUSY_S = 300, (1, 32, 512), 2048, 3e-3


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
    return {"hop": {way: hops(way) for way in ("line", "gloo")}} | asyncio.run(measure(model))


def hops(way: str) -> dict:
    """Microseconds of a hop of so many rows, P50 and P90."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        # only workers that meet at a file are known to be on one machine
        meeting = f"file://{Path(folder) / 'meeting'}" if way == "line" else f"tcp://127.0.0.1:{port}"
        stages = [spawn.Process(target=stage, args=(number, meeting, results)) for number in (0, 1)]
        for process in stages:
            process.start()
        found = results.get()
        for process in stages:
            process.join()
    return found


def stage(number: int, meeting: str, results: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    peers, found = Peers(Place(Parallel(2, 1), number), meeting), {}
    for rows in ROWS:
        taken = []
        for _ in range(HOPS):
            if number:
                x = peers.receive(rows, WIDTH)
                taken.append(time.perf_counter() - float(x.view(torch.float64)[0, 0]))
            else:
                x, begin = torch.zeros(rows, WIDTH), time.perf_counter()
                while time.perf_counter() < begin + BUSY_S:  # computes
                    pass
                x.view(torch.float64)[0, 0] = time.perf_counter()
                peers.send(x)
        if number:
            p50, p90 = np.percentile(taken, (50, 90)).tolist()
            found[str(rows)] = {"p50_us": round(1e6 * p50, 1), "p90_us": round(1e6 * p90, 1)}
    if number:
        results.put(found)
    peers.least(0)  # nobody leaves before the other one
    torch.distributed.destroy_process_group()


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
        "second_stage_us": round(1e6 * (stages - whole)),
        "sum_us": round(1e6 * (ranks - whole / 2) / (2 * layers)),
        "goal_hop_us": 300,
    }
