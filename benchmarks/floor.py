"""Steps against the floor: bytes over bandwidth, operations over GEMM peak, both measured in the same run.

Decodes at several batch sizes and prompts at two lengths, all interleaved: in fp32, in fp32 of weights that stay
bfloat16 ("bf16", where they do), and in int8. Bandwidth and peak drift with what else the machine's memory serves,
within seconds by half: so before every batch both bandwidth and one row are measured, and what is reported are medians
of the ratios to these.
"""

import time
from statistics import median

import numpy as np
import torch

from benchmarks import workload
from benchmarks.checkpoints import checkpoint
from benchmarks.machine import bandwidth, gemm_peak
from paceline.core.work import NewSequence, SliceWork
from paceline.engine import kernels
from paceline.engine.profiler import operations
from paceline.engine.runner import ModelRunner
from paceline.processor import HAS_TILES

BATCHES, CONTEXT = (1, 2, 4, 5, 8, 16, 32), 64
PROMPTS = (512, 2048)
ROUNDS, STEPS = 5, 4
BLOCK = 16
TOGETHER = 512  # rows of linear layers that are measured alone


class Steps:
    """Runs single steps of an engine and takes their time."""

    def __init__(self, path, quantization: str) -> None:
        longest = max(PROMPTS)
        self.engine = ModelRunner.load(
            path,
            max_batch_tokens=longest,
            max_batch=max(BATCHES),
            num_blocks=longest // BLOCK + max(BATCHES) * 2 * CONTEXT // BLOCK,
            context=2 * longest,
            quantization=quantization,
        )
        self.blocks = longest // BLOCK

    def decode(self, batch: int) -> list[float]:
        """Seconds of steps of `batch` sequences with about CONTEXT tokens each, whose KV is whatever the pool holds."""
        each = 2 * CONTEXT // BLOCK
        prompt = [300 + i for i in range(CONTEXT + 1)]
        new = [NewSequence(i, prompt, CONTEXT + 1, workload.greedy(1000)) for i in range(batch)]
        tables = [list(range(self.blocks + i * each, self.blocks + (i + 1) * each)) for i in range(batch)]
        seconds = []
        for step in range(STEPS + 1):
            work = [SliceWork(i, CONTEXT + step, 1, True, 0, tables[i]) for i in range(batch)]
            begin = time.perf_counter()
            self.engine.step(new, work, [])
            seconds.append(time.perf_counter() - begin)
            new = []
        self.engine.step([], [], list(range(batch)))
        return seconds[1:]

    def prefill(self, length: int) -> tuple[float, float]:
        """Seconds of one step with a whole prompt, and of its linear layers alone."""
        prompt = [300 + i % 7000 for i in range(length)]
        blocks = list(range(length // BLOCK))
        begin = time.perf_counter()
        self.engine.step(
            [NewSequence(0, prompt, length, workload.greedy(2))], [SliceWork(0, 0, length, True, 0, blocks)], []
        )
        whole = time.perf_counter() - begin
        self.engine.step([], [], [0])
        return whole, self._linear(length)

    def _linear(self, rows: int) -> float:
        """The linear layers of such a step, without what is between them, and some rows at a time, as there: outputs of
        all would be more than the allocator keeps, and in new pages every time."""
        decoder = self.engine.decoder
        config = decoder.config
        x, mixed = torch.randn(rows, config.hidden), torch.randn(rows, config.heads * config.head_dim)
        begin = time.perf_counter()
        for layer in decoder.layers:
            for some in x.split(TOGETHER):
                layer.qkv(some, layer.input_norm)
            if layer is decoder.layers[-1]:  # which does the rest for the token that is read alone
                x, mixed = x[:1], mixed[:1]
            for some, seen in zip(x.split(TOGETHER), mixed.split(TOGETHER), strict=True):
                layer.out(seen, add_to=some)
                layer.down(layer.gate_up(some, layer.post_norm), add_to=some)
        return time.perf_counter() - begin


def run(model: str) -> dict:
    kinds = {"fp32": Steps(checkpoint(model), "none")}
    if HAS_TILES:
        kinds["bf16"] = Steps(checkpoint(model, "bf16"), "none")
    kinds["int8"] = Steps(checkpoint(model), "int8")
    peaks = []
    decodes = {(kind, batch): [] for kind in kinds for batch in BATCHES}
    prompts = {(kind, length): [] for kind in kinds for length in PROMPTS}
    for turn in range(ROUNDS):
        peaks.append(gemm_peak(repeats=3))
        for kind, steps in kinds.items():
            for batch in BATCHES:
                read, first = bandwidth(repeats=2), median(steps.decode(1))
                decodes[kind, batch].append((read, first, median(steps.decode(batch))))
            for length in PROMPTS:
                prompts[kind, length].append(steps.prefill(length))
        print(f"  round {turn + 1} of {ROUNDS}", flush=True)
    reads = [read for times in decodes.values() for read, *_ in times]
    result: dict = {"read_gb_s": round(median(reads) / 1e9, 1), "gemm_gflop_s": round(median(peaks) / 1e9, 1)}
    result["reads_gb_s"] = [round(float(one) / 1e9, 1) for one in np.percentile(reads, (0, 25, 50, 75, 100))]
    for kind, steps in kinds.items():
        own = ({size: np.array(times[kind, size]).T for size in sizes} for times, sizes in (
            (decodes, BATCHES), (prompts, PROMPTS)
        ))  # fmt: skip
        result[kind] = report(steps, np.array(peaks), kind, *own)
    return result


def report(
    steps: Steps, peak: np.ndarray, kind: str, decodes: dict[int, np.ndarray], prompts: dict[int, np.ndarray]
) -> dict:
    """`peak` [rounds]; of `decodes` the bandwidth before, then the seconds of one row and of all [3, rounds], of
    `prompts` those of the step and of its linear layers [2, rounds]."""
    engine = steps.engine
    layers, head = operations(engine.decoder.config)
    each = engine.cache.token_bytes
    # int8 products where one of float32 was; in matrix registers 16 x 16 x 64 in 16 cycles, in vectors 2 x 16 in one
    compute = peak if kind != "int8" else (32 if kernels.HAS_AMX else 4 // kernels.BYTE) * peak
    weights = engine.info.weight_bytes - engine.decoder.config.table_bytes  # of which a step reads some rows
    out: dict = {"weight_bytes": weights, "decode": {}, "prefill": {}}

    def middle(values: np.ndarray, digits: int) -> float:
        return round(float(np.median(values)), digits)

    for batch, (read, first, seconds) in decodes.items():
        moving = (weights + batch * CONTEXT * each) / read
        computing = batch * (layers + head) / compute
        out["decode"][batch] = {
            "ms": middle(1e3 * seconds, 2),
            "tokens_s": middle(batch / seconds, 1),
            "floor_ms": {"bytes": middle(1e3 * moving, 2), "operations": middle(1e3 * computing, 2)},
            "fraction_of_floor": middle(np.maximum(moving, computing) / seconds, 3),
            "time_over_batch_1": middle(seconds / first, 3),
            "tokens_s_over_batch_1": middle(batch * first / seconds, 2),
        }
    for length, (whole, linear) in prompts.items():
        out["prefill"][length] = {
            "ms": middle(1e3 * whole, 1),
            "tokens_s": middle(length / whole, 1),
            "linear_fraction_of_peak": middle(length * layers / compute / linear, 3),
            "step_fraction_of_peak": middle(length * layers / compute / whole, 3),
        }
    return out
