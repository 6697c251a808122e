"""The worker's peak of resident memory against what the start-up summary promised."""

import subprocess
import sys

import msgspec

from benchmarks.checkpoints import checkpoint
from paceline.cli.worker import WorkerOptions

CHILD = """
import sys, resource, msgspec
from benchmarks import workload
from paceline.batching.scheduler import SchedulerConfig
from paceline.cli.worker import WorkerOptions
from paceline.controller import GroupConfig
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline
options = msgspec.json.decode(sys.argv[1], type=WorkerOptions)
fields = {n: getattr(options, n) for n in options.__struct_fields__ if n != "path"}
runner = ModelRunner.load(options.path, **fields)
loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
limits = SchedulerConfig(options.max_batch_tokens, options.max_batch, num_blocks=runner.info.num_blocks)
prompts = workload.prompts(32768)
Offline(runner, GroupConfig(scheduler=limits)).generate(prompts, [workload.greedy(12)] * len(prompts))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(msgspec.json.encode([runner.info.planned_bytes, loaded * 1024, peak * 1024]).decode())
"""


def run(model: str) -> dict:
    """Loads in a process of its own, runs full batches, compares."""
    options = WorkerOptions(str(checkpoint(model)), max_batch_tokens=512, max_batch=256, num_blocks=2048)
    arguments = [sys.executable, "-c", CHILD, msgspec.json.encode(options).decode()]
    out = subprocess.run(arguments, check=True, capture_output=True, text=True)
    planned, loaded, peak = msgspec.json.decode(out.stdout.splitlines()[-1])
    return {
        "planned_mib": planned >> 20,
        "peak_after_loading_mib": loaded >> 20,
        "peak_mib": peak >> 20,
        "peak_over_planned": round(peak / planned, 3),
    }
