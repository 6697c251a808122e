"""The scheduler alone: microseconds of a step in steady decoding, requests a second in simulation. Needs no model."""

import random
import statistics
import time

from paceline.batching.config import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch, StepResult
from paceline.core.request import Request
from paceline.simulator.driver import FixedOutputs, simulate

CASES = ["steady_decoding", "simulation"]
SEQUENCES, STEPS, ROUNDS = (32, 128, 512), 500, 9
REQUESTS, RATE = 3000, 3.0


def run(case: str) -> dict:
    """Figures of one case."""
    if case == "steady_decoding":
        return {f"{count}_sequences": decoding(count) for count in SEQUENCES}
    return {policy: simulation(policy) for policy in ("paceline", "sarathi_serve", "prefill_first")}


def decoding(count: int) -> dict:
    """Microseconds of `complete` and `next_batch` together, as the live driver calls them; blocks of 16 tokens."""
    limits = SchedulerConfig(token_budget=16_384, max_batch=count, num_blocks=200_000)
    controller = Controller([GroupConfig(scheduler=limits)])
    for index in range(count):
        controller.submit(Request(f"{index}", 64 + index % 16, 1_000_000), 0.0)
    batch = controller.next_batch(0, 0.0)
    rounds = []
    for _ in range(ROUNDS):
        seconds = 0.0
        for _ in range(STEPS):
            assert batch
            result = StepResult(bytearray(batch.emits))
            begin = time.perf_counter()
            controller.complete(0, batch.id, result, 0.0)
            batch = controller.next_batch(0, 0.0)
            seconds += time.perf_counter() - begin
        rounds.append(1e6 * seconds / STEPS)
    return {"us_a_step": round(statistics.median(rounds), 1), "best": round(min(rounds), 1)}


def simulation(policy: str) -> dict:
    """A group with one stage and a mixed load that it can just serve."""
    rng = random.Random(1)
    now, requests = 0.0, []
    for index in range(REQUESTS):
        now += rng.expovariate(RATE)
        prompt, output = int(rng.lognormvariate(6.5, 1.0)) + 1, int(rng.lognormvariate(5.0, 0.8)) + 1
        requests.append(Request(f"{index}", prompt, output, now))
    limits = SchedulerConfig(token_budget=512, max_batch=256, num_blocks=100_000)
    controller = Controller([GroupConfig(scheduler=limits, policy=policy)])
    outputs = FixedOutputs({request.id: request.max_tokens for request in requests})
    begin = time.perf_counter()
    trace = simulate(controller, requests, seconds, outputs)
    took = time.perf_counter() - begin
    steps = sum(event.kind == "started" for event in trace)
    assert sum(event.kind == "finished" for event in trace) == REQUESTS
    return {
        "requests_a_second": round(REQUESTS / took),
        "steps_a_second": round(steps / took),
        "mean_sequences_a_step": round(sum(len(e.detail.requests) for e in trace if e.kind == "started") / steps, 1),
        "simulated_over_real_time": round(trace[-1].time / took),
    }


def seconds(batch: Batch) -> float:
    """A large model's step: a floor, linear layers, attention."""
    shape = batch.shape
    pairs = shape.chunk_pairs + shape.decode_context
    return max(0.02, 1e-4 * shape.tokens) + 1e-8 * pairs
