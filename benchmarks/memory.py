"""The worker's peak of resident memory against what the start-up summary promised."""

import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks import workload
from benchmarks.checkpoints import checkpoint
from paceline.batching.config import SchedulerConfig
from paceline.cli.worker import WorkerOptions
from paceline.controller import GroupConfig
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline


def run(model: str) -> dict:
    """Loads in a process of its own, runs full batches, compares."""
    options = WorkerOptions(str(checkpoint(model)), max_batch_tokens=512, max_batch=256, num_blocks=2048)
    command = [sys.executable, "-m", "benchmarks.memory", msgspec.json.encode(options).decode()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    planned, loaded, peak = msgspec.json.decode(done.stdout)
    return {
        "planned_mib": planned >> 20,
        "peak_after_loading_mib": loaded >> 20,
        "peak_mib": peak >> 20,
        "peak_over_planned": round(peak / planned, 3),
    }


def peak_bytes() -> int:
    """The most this process was resident; ru_maxrss would begin with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def child(options: WorkerOptions) -> list[int]:
    """Bytes: planned, peak after loading, peak after the mixed workload's prompts and some decodes."""
    fields = {name: getattr(options, name) for name in options.__struct_fields__ if name != "path"}
    runner = ModelRunner.load(options.path, **fields)
    loaded = peak_bytes()
    limits = SchedulerConfig(options.max_batch_tokens, options.max_batch, num_blocks=runner.info.num_blocks)
    prompts = workload.prompts(runner.decoder.config.vocab_size)
    Offline(runner, GroupConfig(scheduler=limits)).generate(prompts, [workload.greedy(12)] * len(prompts))
    return [runner.info.planned_bytes, loaded, peak_bytes()]


if __name__ == "__main__":
    print(msgspec.json.encode(child(msgspec.json.decode(sys.argv[1], type=WorkerOptions))).decode())
