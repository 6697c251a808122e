"""One controller, two drivers: the asyncio driver and the simulator take the same decisions at the same times."""

import asyncio
import random
from itertools import groupby

import pytest

from paceline.batching.config import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core import record
from paceline.core.batch import Batch
from paceline.core.events import Advance, Cancel, Complete, Event, Input, Submit
from paceline.core.request import Request
from paceline.runtime.driver import Driver
from paceline.simulator.driver import FixedOutputs, advance, replay, simulate
from tests.fidelity.virtual_loop import run


def controller() -> Controller:
    tight = SchedulerConfig(token_budget=24, max_batch=6, block_size=4, num_blocks=40)
    wide = SchedulerConfig(token_budget=64, max_batch=16, block_size=16, num_blocks=64)
    return Controller(
        [
            GroupConfig(("a",), tight, max_waiting=2),
            GroupConfig(("b",), wide),
            GroupConfig(("c",), tight, pipeline=3),
            GroupConfig(("d",), wide, "prefill_first", pipeline=2),
            GroupConfig(("e",), wide, pipeline=2, device=1),
            GroupConfig(("f", "a"), tight, pipeline=2, max_waiting=2, device=1),
        ]
    )


def latency(batch: Batch) -> float:
    return 0.25 + 0.125 * batch.num_tokens  # dyadic, so that instants coincide


def workload(seed: int) -> tuple[list[Request], list[tuple[float, str]]]:
    rng = random.Random(seed)
    requests = [
        Request(str(i), rng.randint(1, 40), rng.randint(1, 12), rng.randrange(200) / 8, rng.choice("abcdef"))
        for i in range(80)
    ]
    cancels = [(rng.randrange(400) / 8, str(rng.randrange(80))) for _ in range(16)]
    return requests, cancels


def post_all(driver: Driver, items: list[Input]) -> None:
    """Arrivals of one instant keep their order, which asyncio's timers would not."""
    for item in items:
        driver.post(item)


async def drive(requests: list[Request], cancels: list[tuple[float, str]], log: list[str]) -> list[Event]:
    """Runs the asyncio driver with executors that sleep for as long as each stage of the model would take."""
    loop = asyncio.get_running_loop()
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests})
    trace: list[Event] = []
    groups = controller()
    alone = [[0.0] * group.config.pipeline for group in groups.groups[:4]]
    shared = [0.0] * 2
    clocks = [*alone, shared, shared]  # the last two are on one device

    def execute(batch: Batch) -> None:
        stages = advance(clocks[batch.group], loop.time(), latency(batch))
        if len(stages) > 1:
            loop.call_at(stages[0][1], driver.post, Advance(batch.group, batch.id))
        loop.call_at(stages[-1][1], driver.post, Complete(batch.group, batch.id, outputs(batch)))

    driver = Driver(groups, execute, trace.extend, loop.time, lambda now, i: log.append(record.dump(now, i)))
    for time, group in groupby(sorted(cancels), key=lambda c: c[0]):  # before the arrivals: the turn sorts them
        loop.call_at(time, post_all, driver, [Cancel(request) for _, request in group])
    for time, group in groupby(sorted(requests, key=lambda r: r.arrival), key=lambda r: r.arrival):
        loop.call_at(time, post_all, driver, [Submit(request) for request in group])
    await asyncio.sleep(10_000)
    return trace


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 12))])
def test_simulator_and_asyncio_driver_agree_event_for_event(seed):
    requests, cancels = workload(seed)
    log: list[str] = []
    live = run(drive(requests, cancels, log))
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests})
    simulated = simulate(controller(), requests, latency, outputs, sorted(cancels))
    assert live == simulated
    assert {e.kind for e in live} >= {"accepted", "started", "tokens", "finished", "cancelled"}
    assert replay(controller(), record.load(log)) == live


def test_preemptions_and_rejections_happen_in_this_comparison():
    kinds = set()
    for seed in range(12):
        requests, cancels = workload(seed)
        outputs = FixedOutputs({r.id: r.max_tokens for r in requests})
        kinds |= {e.kind for e in simulate(controller(), requests, latency, outputs, cancels)}
    assert "preempted" in kinds and "rejected" in kinds


def test_completions_come_before_arrivals_at_one_instant():
    limits = SchedulerConfig(token_budget=8, max_batch=1, block_size=4, num_blocks=8)
    requests = [Request("a", 8, 1), Request("b", 8, 1, arrival=1.25)]
    outputs = FixedOutputs({"a": 1, "b": 1})
    trace = simulate(Controller([GroupConfig(scheduler=limits)]), requests, latency, outputs)
    at = [(e.kind, e.request) for e in trace if e.time == 1.25]
    assert at == [("tokens", "0"), ("finished", "a"), ("accepted", "b"), ("started", "1")]
