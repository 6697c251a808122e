"""Predicted step times against those of the mixed workload, beside the same steps repeated.

The profile is measured first, in the same process. The workload then runs several times; its steps are the same every
time, so that what differs between the runs of one step is the noise that no prediction can be better than. Predictions
are those that the scheduler makes, at the pace of late; `error_of_the_profile` is without that, and `drift` how much
slower the machine was than while it was profiled.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from statistics import median

import torch

from benchmarks import workload
from benchmarks.checkpoints import checkpoint
from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.core.batch import Batch, StepShape
from paceline.engine.profiler import profile
from paceline.engine.runner import ModelRunner
from paceline.latency.profile import Measured, Percentiles
from paceline.latency.step_time import relative_errors
from paceline.runtime.offline import Offline

BUDGET, BATCH, ROUNDS = 512, 64, 4
GOAL = {"p50": 0.03, "p95": 0.10}


def run(model: str) -> dict:
    return predictions(checkpoint(model))


def predictions(path, seconds: float = 120.0, rounds: int = ROUNDS) -> dict:
    """Relative errors of all steps of all runs, as fractions. Needs two rounds for the noise."""
    runner = ModelRunner.load(path, max_batch_tokens=BUDGET, max_batch=BATCH, num_blocks=1800)
    result = profile(runner, max_tokens=BUDGET, max_batch=BATCH, seconds=seconds)
    steps, live = workload_steps(runner, rounds, result.step_time.seconds)
    shapes = [step.shape for step in steps for _ in step.seconds]
    actual = [one for step in steps for one in step.seconds]
    predicted = [result.step_time.seconds(shape) for shape in shapes]
    drift = median(a / p for a, p in zip(actual, predicted, strict=True))
    return {
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "steps": len(steps),
        "rounds": rounds,
        "goal": GOAL,
        "error": rounded(Percentiles.of(live)),
        "noise": rounded(Percentiles.of([value for step in steps for value in step.spread()])),
        "drift": round(drift, 3),
        "error_of_the_profile": rounded(Percentiles.of(relative_errors(result.step_time, shapes, actual))),
        "while_profiling": {"error": rounded(result.error), "noise": rounded(result.noise)},
        "knee": result.knee,
        "tiles": result.tiles,
        "seconds_predicted": round(sum(predicted), 2),
        "seconds_measured": round(sum(actual), 2),
    }


def workload_steps(
    runner: ModelRunner, rounds: int, predict: Callable[[StepShape], float]
) -> tuple[list[Measured], list[float]]:
    """Every step of the mixed workload with its seconds, forward pass and sampling, in each round after a first one;
    and the relative errors of what the scheduler predicted."""
    info = runner.info
    limits = SchedulerConfig(BUDGET, BATCH, block_size=info.block_size, num_blocks=info.num_blocks)
    prompts = workload.prompts(info.vocab_size)
    params = [workload.greedy(count) for count in workload.outputs()]
    steps: list[Measured] = []
    errors: list[float] = []
    for turn in range(rounds + 1):
        taken: list[tuple[Batch, float]] = []

        offline = Offline(runner, GroupConfig(scheduler=limits, predict=predict))  # a fresh one: no prefix is cached
        offline.on_step = lambda batch, _, forward_s, sample_s: taken.append((batch, forward_s + sample_s))  # noqa: B023
        offline.generate(prompts, params)
        if not turn:
            steps = [Measured(batch.shape) for batch, _ in taken]
            continue
        for step, (batch, seconds) in zip(steps, taken, strict=True):
            assert step.shape == batch.shape and batch.predicted is not None
            step.seconds.append(seconds)
            errors.append(abs(batch.predicted / seconds - 1))
    return steps, errors


def rounded(values: Percentiles) -> dict:
    return {name: round(value, 4) for name, value in asdict(values).items()}
