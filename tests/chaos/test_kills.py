"""Workers are killed and stopped at random moments under load: no request is lost, no token changed.

`make chaos` makes it long.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import replace

import pytest

from paceline.cli.sources import BUILTIN
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Parallel
from paceline.core.request import SamplingParams
from paceline.engine.runner import ModelRunner
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel
from tests.engine.test_parallel import alone
from tests.runtime.test_fleet import Collector, until

FAULTS = int(os.environ.get("PACELINE_CHAOS", "2"))
LIMITS = dict(max_batch_tokens=64, max_batch=8, num_blocks=60)
STREAMS = 6  # at a time, of each model
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def kinds(vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Short and long prompts, greedy and seeded, with and without drafts."""
    seeded = replace(GREEDY, temperature=0.9, top_p=0.9, frequency_penalty=0.2)
    return [
        ([3 + (11 * i + 7 * j) % (vocabulary - 3) for j in range(n)], replace(params, seed=i, max_draft_tokens=draft))
        for i, n in enumerate((5, 40, 120))
        for params in (GREEDY, seeded)
        for draft in (0, 3)
    ]


def group(parallel: Parallel, *names: str) -> WorkerGroup:
    options = tuple(WorkerOptions(str(BUILTIN / name), threads=1, **LIMITS) for name in names)
    served = tuple(ServedModel(name, max_draft_tokens=3) for name in names)
    return WorkerGroup(served, GroupOptions(options, parallel).command, parallel)


async def client(fleet: LocalFleet, name: str, asked: list, expected: list, rng: random.Random, ends: Counter) -> None:
    """One request after the other, until nobody wants more; some hang up."""
    while not ends["enough"]:
        index = rng.randrange(len(asked))
        sink = Collector()
        id = fleet.submit(name, *asked[index], sink)
        if rng.random() < 0.15:
            await asyncio.sleep(rng.random() * 0.2)
            if not sink.done.is_set():
                fleet.cancel(id)
                ends["left"] += 1
                continue
        await sink.done.wait()
        assert not sink.error and sink.tokens == expected[index], f"{name} {index}: {sink.error or 'other tokens'}"
        ends[name] += 1


async def hurt(fleet: LocalFleet, rng: random.Random) -> None:
    """Kills or stops one worker, perhaps another one of another group; waits until all are well."""
    victims = rng.sample(fleet.workers, rng.choice([1, 1, 2]))
    for workers in victims:
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        os.kill(rng.choice(workers.pids), number)
        await until(lambda workers=workers: workers.state == "restarting", 0.25 if number == signal.SIGKILL else 4)
        await asyncio.sleep(rng.random() * 0.3)
    await until(lambda: all(workers.state == "ready" for workers in fleet.workers), 60)


@pytest.mark.timeout(60 + 30 * FAULTS)
async def test_kills_at_random_moments_lose_nothing_and_change_nothing():
    rng, ends = random.Random(4), Counter()
    names = ("coder", "coder-draft")
    runners = {name: ModelRunner.load(BUILTIN / name, **LIMITS | {"num_blocks": 400}) for name in names}
    asked = {name: kinds(runner.info.vocab_size) for name, runner in runners.items()}
    expected = {name: alone(runners[name], asked[name]) for name in names}
    groups = [group(Parallel(2, 1), *names), group(Parallel(), "coder"), group(Parallel(), "coder-draft")]
    async with LocalFleet(groups, FleetConfig(token_budget=64, max_batch=8)) as fleet:
        clients = [
            asyncio.create_task(client(fleet, name, asked[name], expected[name], random.Random(i), ends))
            for i, name in enumerate(names * STREAMS)
        ]
        for fault in range(FAULTS):
            await asyncio.sleep(0.3 + rng.random())
            before = ends.total()
            await hurt(fleet, rng)
            assert ends.total() > before, f"fault {fault}: everything waits, though one group is always up"
        ends["enough"] = 1
        await asyncio.gather(*clients)
        await until(lambda: not fleet.driver.controller.sequences)
        for state in fleet.driver.controller.groups:
            state.scheduler.check()
            assert state.scheduler.num_free_blocks == state.scheduler.config.num_blocks
    assert ends["coder"] > 10 * FAULTS and ends["coder-draft"] > 10 * FAULTS and ends["left"] > FAULTS
