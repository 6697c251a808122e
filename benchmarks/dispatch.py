"""Decisions a second of the live controller for a large fleet: 64 groups of devices, 128 models, simulated workers.

Every model is on two groups, every group has four, and each takes Poisson traffic of prompts with goals. A decision is
a turn with an arrival: admission and dispatch (predictions for both groups, and of the turns of the others on their
devices), and the step that may begin. Beside it, what all turns of a request take, completions of steps included. In
virtual time; seconds are those of the processor.
"""

import random
import time

from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch
from paceline.core.events import Event, Input, Submit
from paceline.core.request import SLO, Request
from paceline.latency.step_time import StepTime
from paceline.simulator.driver import FixedOutputs, simulate

CASES = ["half_load", "overload"]
DEVICES, MODELS, REPLICAS = 64, 128, 2
RATE, SECONDS = {"half_load": 250.0, "overload": 2000.0}, 40.0  # of all models together
GOAL = SLO(ttft=1.5)
# about a small model on two cores: 11 ms a decode, 2,500 tokens/s of prompts
STEP = StepTime(tuple(0.010 + n / 2500 for n in range(513)), 1e-4, 2e-4, 1e-7, 1e-3, 1e-7, 1e-8)


class Timed(Controller):
    """Notes what its turns take."""

    def turn(self, inputs: list[Input], now: float) -> tuple[list[Event], list[Batch]]:
        begin = time.process_time_ns()
        done = super().turn(inputs, now)
        self.spent[any(isinstance(item, Submit) for item in inputs)].append(time.process_time_ns() - begin)
        return done


def run(case: str) -> dict:
    rng, requests, now = random.Random(1), [], 0.0
    while (now := now + rng.expovariate(RATE[case])) < SECONDS:
        size = rng.choice([20, 60, 150, 400]), rng.choice([4, 20, 60])
        requests.append(Request(f"{len(requests)}", *size, now, f"{rng.randrange(MODELS)}", GOAL))
    controller = Timed(groups())
    controller.spent = [[], []]
    outputs = FixedOutputs({request.id: request.max_tokens for request in requests})
    events = simulate(controller, requests, lambda batch: STEP.seconds(batch.shape), outputs)
    others, decisions = ([1e-9 * one for one in some] for some in controller.spent)
    ordered = sorted(decisions)
    return {
        "decisions_a_second": round(len(decisions) / sum(decisions)),
        "decision_us": {share: round(1e6 * ordered[int(at * len(ordered))], 1)
                        for share, at in (("p50", 0.5), ("p99", 0.99))},
        "other_turns_us": round(1e6 * sum(others) / len(others), 1),
        "requests_a_second_of_all_turns": round(len(requests) / (sum(decisions) + sum(others))),
        "requests": len(requests),
        "refused": sum(event.kind == "rejected" for event in events),
        "goal_decisions_a_second": 5000,
    }  # fmt: skip


def groups() -> list[GroupConfig]:
    limits = SchedulerConfig(token_budget=256, max_batch=64, num_blocks=2048)
    budget = GoalBudget(STEP.linear, STEP.terms, 16, 128, 256, None, margin=0.05)
    hosts = [(model, (model + replica * (DEVICES // REPLICAS + 1)) % DEVICES)
             for model in range(MODELS) for replica in range(REPLICAS)]  # fmt: skip
    return [
        GroupConfig((f"{model}",), limits, budget=budget, predict=STEP.seconds, admission=True, device=device)
        for model, device in hosts
    ]
