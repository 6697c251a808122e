"""A fleet moves to another placement under load: groups come and go, and no request notices."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from paceline.core.request import SamplingParams
from paceline.runtime.fleet import FleetConfig, LocalFleet
from tests.runtime.test_fleet import Collector, children, expected, worker


async def load(fleet: LocalFleet, name: str, seed: int, stop: asyncio.Event) -> int:
    rng, done = random.Random(seed), 0
    while not stop.is_set():
        prompt, count, sink = [rng.randrange(900), seed], rng.randint(1, 60), Collector()
        fleet.submit(name, prompt, SamplingParams(max_tokens=count), sink)
        await sink.done.wait()
        assert not sink.error and sink.tokens == expected(prompt, count)
        done += 1
    return done


async def test_no_request_fails_while_models_change_their_groups():
    first = [worker("a", delay=0.002), worker("b", delay=0.002)]
    second = [worker("a", "b", delay=0.002), worker("b", delay=0.002)]
    async with LocalFleet(first, FleetConfig(token_budget=16)) as fleet:
        stop = asyncio.Event()
        clients = [asyncio.create_task(load(fleet, name, i, stop)) for i, name in enumerate("aabb")]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(30):
            await fleet.move(second, [0, 1])
            await fleet.left()
        assert [workers.state for workers in fleet.workers] == ["stopped"] * 2 + ["ready"] * 2
        assert len(fleet.hosts("a")) == 1 and len(fleet.hosts("b")) == 2 and fleet.ready
        await asyncio.sleep(0.2)
        async with asyncio.timeout(30):
            await fleet.move([worker("b", delay=0.002)], [3])
            await fleet.left()
        stop.set()
        async with asyncio.timeout(30):
            assert min(await asyncio.gather(*clients)) > 2
        assert len(children()) == 2 and not fleet.driver.controller.sequences


async def test_what_runs_in_a_group_that_leaves_ends_there_and_what_waits_moves():
    config = FleetConfig(token_budget=16, max_batch=1)
    async with LocalFleet([worker(delay=0.01)], config) as fleet:
        sinks = [Collector() for _ in range(3)]
        for i, sink in enumerate(sinks):
            fleet.submit("toy", [i], SamplingParams(max_tokens=100), sink)
        events = []
        fleet.observers.append(SimpleNamespace(on_events=events.extend, on_step=lambda step: None))
        await fleet.move([worker(delay=0.01)], [0])
        await fleet.left()
        assert sinks[0].done.is_set(), "the old group left when it had nothing more to do"
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        assert [sink.tokens for sink in sinks] == [expected([i], 100) for i in range(3)]
        kinds = [event.kind for event in events if event.kind in ("moved", "preempted", "retired")]
        assert kinds == ["moved", "moved", "retired"]


@pytest.mark.parametrize("names", ["ab", "b"])
async def test_a_model_that_had_failed_stops_no_move(names):
    """It fails again beside one that is served, or with workers of its own, and a move later it is not in the way."""
    async with LocalFleet([worker("a"), worker("b", refuse="no memory")], FleetConfig(token_budget=16)) as fleet:
        for old in ([0, 1], [2, 3]):
            broken = worker(*names, errors=[[""], ["KeyError"]][-len(names) :])
            await fleet.move([worker("a"), broken], old)
            await fleet.left()
            assert [(one.name, one.state) for one in fleet.status()] == [("a", "ready"), ("b", "failed")]
            assert fleet.ready and fleet.status()[1].reason == "KeyError: 'toy'"
        await fleet.move([worker("a", "b")], [4, 5])
        await fleet.left()
        sinks = [Collector() for _ in "ab"]
        for name, sink in zip("ab", sinks, strict=True):
            fleet.submit(name, [1], SamplingParams(max_tokens=5), sink)
            await sink.done.wait()
        assert [sink.tokens for sink in sinks] == [expected([1], 5)] * 2
        assert len(children()) == 1


async def test_nobody_is_to_blame_for_workers_that_make_way():
    async with asyncio.timeout(30), LocalFleet([worker(delay=0.01)], FleetConfig(token_budget=16)) as fleet:
        sink = Collector()
        sequence = fleet.sequences[fleet.submit("toy", [1, 2], SamplingParams(max_tokens=60), sink)]
        while len(sink.tokens) < 4:
            await asyncio.sleep(0.01)
        await fleet.move([worker(delay=0.01)], [0], room=False)
        assert sequence.crashes == 0
        await sink.done.wait()
        assert sink.tokens == expected([1, 2], 60)


async def test_a_group_that_unloads_is_no_worker_of_those_that_have_moved_on():
    async with LocalFleet([worker(delay=0.01), worker()], FleetConfig(token_budget=16)) as fleet:
        sink = Collector()
        sequence = fleet.sequences[fleet.submit("toy", [1, 2], SamplingParams(max_tokens=60), sink)]
        while len(sink.tokens) < 4:
            await asyncio.sleep(0.01)
        here, other = sorted(fleet.groups, key=lambda group: group is not sequence.worker)
        sequence.worker = other  # as if it had come from there
        other.unload()
        assert sequence.worker is None
        await sink.done.wait()
        assert sink.tokens == expected([1, 2], 60) and sequence.worker in (None, here)


async def test_a_placement_that_cannot_be_loaded_changes_nothing():
    async with LocalFleet([worker()], FleetConfig(token_budget=16)) as fleet:
        with pytest.raises(RuntimeError, match="no memory"):
            await fleet.move([worker(refuse="no memory")], [0])
        sink = Collector()
        fleet.submit("toy", [1], SamplingParams(max_tokens=5), sink)
        await sink.done.wait()
        assert sink.tokens == expected([1], 5) and fleet.ready
