"""Paceline and its peers on the same requests and weights, by turns: who is asked computes, the others are stopped.

Every engine answers with the time of every token of every request; what is printed follows from these alone.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

from benchmarks import workload
from benchmarks.checkpoints import ROOT, checkpoint
from benchmarks.machine import describe
from benchmarks.peers.child import THREADS
from benchmarks.peers.process import Cannot, Process
from benchmarks.plots import draw

OURS = "paceline"
ENGINES: dict[str, tuple[str, dict]] = {  # name: module, options
    OURS: ("ours", {"budget": 512}),  # as `serve` by default
    "paceline-256": ("ours", {"budget": 256}),
    "paceline-72": ("ours", {"budget": 72}),
    "paceline-64": ("ours", {"budget": 64}),
    "paceline-2048": ("ours", {"budget": 2048}),
    "paceline-kv16": ("ours", {"budget": 512, "kv_cache_dtype": "float16"}),
    "paceline-72-kv16": ("ours", {"budget": 72, "kv_cache_dtype": "float16"}),
    "paceline-64-kv16": ("ours", {"budget": 64, "kv_cache_dtype": "float16"}),
    "paceline-bf16": ("ours", {"budget": 512, "dtype": "bfloat16"}),
    "paceline-72-bf16": ("ours", {"budget": 72, "dtype": "bfloat16"}),
    "openvino": ("openvino", {"budget": 256}),
    "openvino-bf16": ("openvino", {"budget": 256, "hint": "bf16"}),
    "openvino-llm": ("openvino", {"pipeline": "llm"}),
    "vllm": ("vllm", {}),
    "vllm-512": ("vllm", {"budget": 512}),
    "llama.cpp": ("llama_cpp", {"budget": 512, "unified": False}),
    "llama.cpp-unified": ("llama_cpp", {"budget": 512, "unified": True}),
    "transformers": ("transformers", {}),
    "transformers-continuous": ("transformers", {"budget": 512}),
}
SHAPES = ["qwen2.5-0.5b", "llama-3.2-1b", "small"]
PRECISIONS = ["fp32", "bf16", "int8"]  # of weights; bf16 is computed in float32 wherever an engine can
ROWS = ["prefill 512", "prefill 2048", "decode 1", "decode 8", "decode 32", "mixed"]
# what such narrow steps are for
ONLY = dict.fromkeys(
    ["paceline-64", "paceline-72", "paceline-64-kv16", "paceline-72-kv16", "paceline-72-bf16"], "mixed"
)
CONTEXT, DECODED = 64, 24
LOWER_IS_BETTER = {"mean_ttft_s", "p99_tbt_s"}
WORKING = 3 << 29  # bytes of an engine besides its weights: KV cache, activations, libraries


def requests(row: str, turn: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of a row; other tokens each turn, but for the mixed workload."""
    if row == "mixed":
        prompts, outputs = workload.prompts(32768), workload.outputs()
        return (prompts, outputs) if turn >= 0 else (prompts[:4], outputs[:4])
    kind, size = row.split()
    count, length, output = (1, int(size), 1) if kind == "prefill" else (int(size), CONTEXT, DECODED)
    rng = Random(f"{row} {turn}")
    return [[rng.randrange(300, 8000) for _ in range(length)] for _ in range(count)], [output] * count


def figures(row: str, times: list[list[float]]) -> dict[str, float]:
    """What the seconds of each request's tokens say. Raises Cannot for a batch that never was one."""
    if row == "mixed":
        gaps = np.concatenate([np.diff(request) for request in times])
        return {
            "output_tokens_s": sum(map(len, times)) / max(request[-1] for request in times),
            "mean_ttft_s": float(np.mean([request[0] for request in times])),
            "p99_tbt_s": float(np.percentile(gaps, 99)),
        }
    kind, size = row.split()
    if kind == "prefill":
        return {"tokens_s": int(size) / times[0][0]}
    last = max(times, key=lambda request: request[0])
    steps = np.diff([now for now in last if now <= min(request[-1] for request in times)])
    if not len(steps):
        raise Cannot("its requests do not run at the same time")
    return {"tokens_s": len(times) / float(np.median(steps))}


class Case:
    """One shape in one precision: samples of all engines, taken in turns."""

    def __init__(self, shape: str, precision: str, rows: list[str]) -> None:
        self.path = checkpoint(shape, "bf16" if precision == "bf16" else "fp32")
        self.precision, self.rows = precision, rows
        self.about: dict[str, str] = {}
        self.cannot: dict[str, dict[str, str]] = defaultdict(dict)  # engine, row: reason
        # engine, row, metric: values, and how much better ours was in the same turn
        self.samples: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: ([], []))))
        self.same: dict[str, list[float]] = defaultdict(list)  # tokens equal to ours in the mix

    def together(self) -> int:
        """How many engines fit into memory at once, ours and at least one more."""
        weights = sum(file.stat().st_size for file in self.path.glob("*.safetensors"))
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
        return max(2, int(free / (1.1 * weights + WORKING)))

    def measure(self, peers: list[str], rounds: int, mixed_rounds: int) -> None:
        size = self.together() - 1
        for start in range(0, len(peers) or 1, size):
            with ExitStack() as stack:
                group = {}
                for name in [OURS, *peers[start : start + size]]:
                    try:
                        group[name] = stack.enter_context(
                            closing(Process(name, *ENGINES[name], self.path, self.precision))
                        )
                        self.about[name] = group[name].about
                    except Cannot as error:
                        self.cannot[name] = dict.fromkeys(self.rows, str(error))
                    if name in ONLY:
                        others = (row for row in self.rows if row != ONLY[name])
                        self.cannot[name] |= dict.fromkeys(others, f"only for {ONLY[name]}")
                    print(f"  {name}: {self.about.get(name) or next(iter(self.cannot[name].values()))}", flush=True)
                last = max(rounds, mixed_rounds)
                for turn in range(-1, last):  # the first is to warm up
                    for row in self.rows:
                        if turn < (mixed_rounds if row == "mixed" else rounds):
                            self.take_turns(group, row, turn)
                    print(f"  round {turn + 1} of {last}", flush=True)

    def take_turns(self, group: dict[str, Process], row: str, turn: int) -> None:
        """One row by every engine; each begins once."""
        names = [name for name in group if row not in self.cannot[name]]
        shift = turn % len(names) if names else 0
        values, tokens = {}, {}
        for name in names[shift:] + names[:shift]:
            try:
                answer = group[name].ask(*requests(row, turn))
                values[name], tokens[name] = figures(row, answer["times"]), sum(answer["tokens"], [])
            except Cannot as error:
                self.cannot[name][row] = str(error)
        if turn < 0:
            return
        for name, metrics in values.items():
            for metric, value in metrics.items():
                kept, ratios = self.samples[name][row][metric]
                kept.append(value)
                if OURS in values:
                    ratio = values[OURS][metric] / value
                    ratios.append(1 / ratio if metric in LOWER_IS_BETTER else ratio)
            if row == "mixed" and OURS in tokens:
                self.same[name].append(float(np.mean(np.equal(tokens[name], tokens[OURS]))))

    def report(self) -> dict:
        """Medians, and how many times better ours was; reasons where there is no number."""
        result: dict = {}
        for name in ENGINES:
            if name not in self.about and name not in self.cannot:
                continue
            rows: dict = {row: {"cannot": reason} for row, reason in self.cannot[name].items()}
            for row, metrics in self.samples[name].items():
                for metric, (values, ratios) in metrics.items():
                    entry = {"median": short(median(values)), "rounds": [short(value) for value in values]}
                    if ratios:
                        entry["ours_is_better_by"] = short(median(ratios))
                    rows.setdefault(row, {})[metric] = entry
            result[name] = {"about": self.about.get(name, ""), "rows": rows}
            if self.same[name]:
                result[name]["tokens_equal_to_ours"] = short(median(self.same[name]))
        return result


def short(value: float) -> float:
    return float(f"{value:.4g}")


def table(report: dict) -> str:
    """A line for each row and metric, with every engine's median and ours over it."""
    lines = []
    for row in ROWS:
        for metric in ["tokens_s", "output_tokens_s", "mean_ttft_s", "p99_tbt_s"]:
            found = {name: engine["rows"].get(row, {}).get(metric) for name, engine in report.items()}
            cells = [
                f"{name} {entry['median']:g}" + (f" (x{entry['ours_is_better_by']:g})" if name != OURS else "")
                for name, entry in found.items()
                if entry
            ]
            if cells:
                lines.append(f"{row}, {metric}: " + ", ".join(cells))
    return "\n".join(lines)


def choice(valid: list[str]):
    """Comma-separated names, each one of the valid ones."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in valid:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(valid)}")
        return names

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    peers = [name for name in ENGINES if name != OURS]
    parser.add_argument("--models", type=choice(SHAPES), default=SHAPES, help=f"shapes: {', '.join(SHAPES)}")
    parser.add_argument("--precisions", type=choice(PRECISIONS), default=PRECISIONS, help=", ".join(PRECISIONS))
    parser.add_argument("--engines", type=choice(peers), default=peers, help=f"besides ours: {', '.join(peers)}")
    parser.add_argument("--rows", type=choice(ROWS), default=ROWS, help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mixed-rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended, not left stopped
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    waiting = os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a thread that spins starves on a shared processor
    result = json.loads(options.out.read_text()) if options.out.exists() else {}  # other cases stay
    result |= {"benchmark": "peers", "about": __doc__.splitlines()[0]}
    ran = {"machine": describe(), "threads": THREADS, "omp_wait_policy": waiting}
    for shape in options.models:
        for precision in options.precisions:
            begin = time.time()
            print(f"== {shape}, {precision}", flush=True)
            case = Case(shape, precision, options.rows)
            case.measure(options.engines, options.rounds, options.mixed_rounds)
            report = case.report()
            ran["seconds"] = round(time.time() - begin)
            result.setdefault(shape, {})[precision] = {**ran, "engines": report}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            draw(options.out)
            print(table(report), flush=True)


if __name__ == "__main__":
    main()
