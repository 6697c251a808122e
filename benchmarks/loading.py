"""Loading a model whose files are in memory, against copying from mapped files to fresh memory.

Bytes that count: those read, of the matrices in the file, and those written, of what they become. Compared is how many
pass in a second: copying the fp32 file's matrices tensor by tensor (`copy`), the bf16 file's into float32
(`copy_to_float32`), and loading. In turns; medians over the rounds, those of ratios within a round.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.checkpoints import checkpoint
from paceline.engine import pages
from paceline.engine.config import ModelConfig
from paceline.engine.linear import best_kind
from paceline.engine.model import Decoder, load_decoder
from paceline.engine.weights import Checkpoint

CASES = ("qwen2.5-0.5b",)
LOADS = {"fp32": ("fp32", "none"), "bf16": ("bf16", "none"), "fp32_to_int8": ("fp32", "int8")}
ROUNDS = 7


def matrices(file: Checkpoint) -> list[str]:
    return [name for name, entry in file.entries.items() if len(entry.shape) == 2]


def copy(file: Checkpoint) -> list[Tensor]:
    """The file's matrices in float32."""
    held = []
    for name in matrices(file):
        shape = file.entries[name].shape
        held.append(pages.zeros(shape).copy_(file.view(name, shape)))
        file.release(name)
    return held


def packed_bytes(decoder: Decoder) -> int:
    layers = [part for layer in decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return sum(layer.nbytes for layer in (*layers, decoder.head))


def run(model: str) -> dict:
    files = {dtype: Checkpoint(checkpoint(model, dtype)) for dtype in ("fp32", "bf16")}
    read = {dtype: sum(map(file.nbytes, matrices(file))) for dtype, file in files.items()}
    config = ModelConfig.load(checkpoint(model))
    cases: dict[str, Callable[[], object]] = {
        "copy": lambda: copy(files["fp32"]),
        "copy_to_float32": lambda: copy(files["bf16"]),
    }
    moved = {"copy": 2 * read["fp32"], "copy_to_float32": read["bf16"] + read["fp32"]}
    for name, (dtype, quantization) in LOADS.items():
        kind = best_kind("cpu", quantization)
        cases[name] = lambda kind=kind, file=files[dtype]: load_decoder(file, config, kind=kind)
        moved[name] = read[dtype] + packed_bytes(cases[name]())
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(ROUNDS):
        for name, case in cases.items():
            begin = time.perf_counter()
            held = case()
            seconds[name].append(time.perf_counter() - begin)
            del held
        print(f"  round {turn + 1} of {ROUNDS}", flush=True)
    speeds = {name: [moved[name] / one / 1e9 for one in some] for name, some in seconds.items()}
    result: dict = {"threads": torch.get_num_threads()}
    for name, some in seconds.items():
        result[name] = {
            "seconds": round(median(some), 3),
            "gigabytes_moved": round(moved[name] / 1e9, 3),
            "gb_s": round(median(speeds[name]), 2),
            "over_copy": round(median(a / b for a, b in zip(speeds[name], speeds["copy"], strict=True)), 3),
        }
    return result
