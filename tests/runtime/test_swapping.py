"""More models than a worker holds: loaded by need, beside the steps of others; nobody fails, nobody starves."""

import asyncio
import os
import random
import signal
import time

import pytest

from paceline.batching.config import SchedulerConfig
from paceline.batching.residency import PATIENCE_S, STAY_S, gives_way
from paceline.compiled import plain
from paceline.controller import Controller, GroupConfig
from paceline.core.request import Request, SamplingParams
from paceline.runtime.api import Unavailable
from paceline.runtime.fleet import FleetConfig, LocalFleet
from paceline.simulator.driver import FixedOutputs, simulate
from tests.runtime.test_fleet import Collector, children, expected, lose, until, worker

NAMES = tuple("abcdef")


class Watcher:
    """Counts what the controller has loaded, and sees to it that there are never too many."""

    def __init__(self, resident: set[int], slots: int) -> None:
        self.resident, self.slots, self.loads = resident, slots, 0

    def on_events(self, events) -> None:
        for event in events:
            if event.kind == "unload":
                self.resident.remove(event.group)
            elif event.kind == "load":
                self.resident.add(event.group)
                self.loads += 1
            elif event.kind == "started":
                assert event.group in self.resident
            assert len(self.resident) <= self.slots

    def on_step(self, step) -> None:
        pass


async def test_six_models_where_three_fit_serve_zipf_traffic_without_a_failure():
    rng = random.Random(2)
    weights = [1 / (1 + rank) for rank in range(6)]
    async with LocalFleet([worker(*NAMES, slots=3, delay=0.001, load_s=0.02)], FleetConfig(token_budget=16)) as fleet:
        watcher = Watcher({0, 1, 2}, 3)
        fleet.observers.append(watcher)
        assert [one.state for one in fleet.status()] == ["ready"] * 3 + ["cold"] * 3
        assert all(one.info for one in fleet.status()), "cold ones were loaded once, to see whether they can be"
        cases = []
        for i in range(150):
            prompt, sink = [i, i + 1], Collector()
            fleet.submit(rng.choices(NAMES, weights)[0], prompt, SamplingParams(max_tokens=6), sink)
            cases.append((prompt, sink))
            await asyncio.sleep(rng.random() * 0.02)
        async with asyncio.timeout(30):
            await asyncio.gather(*(sink.done.wait() for _, sink in cases))
        assert all(sink.tokens == expected(prompt, 6) and not sink.error for prompt, sink in cases)
        assert watcher.loads > 5
        assert not fleet.driver.controller.sequences


async def test_a_cold_model_comes_though_all_others_are_busy_and_loses_them_nothing():
    async with LocalFleet([worker("a", "b", slots=1, delay=0.005, load_s=0.05)], FleetConfig(token_budget=16)) as fleet:
        busy = [Collector() for _ in range(4)]
        for i, sink in enumerate(busy):
            fleet.submit("a", [i, 5], SamplingParams(max_tokens=220), sink)
        late = Collector()
        fleet.submit("b", [7, 8], SamplingParams(max_tokens=3), late)
        async with asyncio.timeout(30):
            await late.done.wait()
            assert not any(sink.done.is_set() for sink in busy), "it did not wait for their end"
            await asyncio.gather(*(sink.done.wait() for sink in busy))
        assert late.tokens == expected([7, 8], 3)
        assert [sink.tokens for sink in busy] == [expected([i, 5], 220) for i in range(4)]


async def test_a_model_unloaded_between_the_parts_of_a_step_loses_nobodys_tokens():
    """After a crash a batch goes in parts; those that are done have been told to nobody yet."""
    async with LocalFleet([worker("a", "b", slots=1, delay=0.2)], FleetConfig(token_budget=16)) as fleet:
        group, controller = fleet.groups[0], fleet.driver.controller
        sinks = [Collector() for _ in range(3)]
        for i, sink in enumerate(sinks):
            fleet.submit("a", [i, 5], SamplingParams(max_tokens=3), sink)
        await until(lambda: all(sink.tokens for sink in sinks))
        os.kill(fleet.workers[0].pids[0], signal.SIGKILL)
        await until(lambda: any(flight.outputs and flight.parts for flight in group._flying()))
        assert len(controller.sequences) == 3, "the last token of one is there"
        controller.groups[0].resident = False  # as its device is another model's turn, and then its own again
        controller.lose(0, time.monotonic())
        group.unload()
        controller.groups[0].resident = True
        group.load()
        async with asyncio.timeout(30):
            await asyncio.gather(*(sink.done.wait() for sink in sinks))
        assert [sink.tokens for sink in sinks] == [expected([i, 5], 3) for i in range(3)]
        assert not controller.sequences and not fleet.sequences


async def test_steps_go_on_while_a_model_is_loaded():
    async with LocalFleet([worker(*"abc", slots=2, delay=0.002, load_s=1.0)], FleetConfig(token_budget=16)) as fleet:
        running, cold = Collector(), Collector()
        fleet.submit("a", [1, 2], SamplingParams(max_tokens=200), running)
        await until(lambda: len(running.tokens) > 3)
        fleet.submit("c", [3], SamplingParams(max_tokens=2), cold)
        await running.done.wait()
        assert not cold.done.is_set(), "it is still being loaded"
        await cold.done.wait()
        assert cold.tokens == expected([3], 2)


async def test_a_worker_killed_while_it_loads_has_the_same_models_again():
    async with LocalFleet([worker(*"ab", slots=1, load_s=0.3)], FleetConfig(token_budget=16)) as fleet:
        sinks = [Collector() for _ in range(2)]
        fleet.submit("b", [3], SamplingParams(max_tokens=4), sinks[0])
        await until(lambda: fleet.groups[1].resident)
        await lose(fleet.workers[0])
        fleet.submit("a", [4], SamplingParams(max_tokens=4), sinks[1])
        async with asyncio.timeout(30):
            await asyncio.gather(*(sink.done.wait() for sink in sinks))
        assert [sink.tokens for sink in sinks] == [expected([3], 4), expected([4], 4)]


@pytest.mark.parametrize(("names", "errors"), [("ab", [["KeyError"], [""]]), ("ba", [[""], ["", "KeyError"]])])
async def test_a_model_that_cannot_be_loaded_takes_no_place_from_the_others(names, errors):
    """At the start, or when it is asked for."""
    async with LocalFleet([worker(*names, slots=1, errors=errors)], FleetConfig(token_budget=16)) as fleet:
        assert fleet.ready
        if names == "ba":
            sink = Collector()
            fleet.submit("a", [1], SamplingParams(max_tokens=4), sink)
            async with asyncio.timeout(10):
                await sink.done.wait()
            assert sink.error == "model 'a' is not available: KeyError: 'toy'"
        assert {one.name: one.state for one in fleet.status() if one.state == "failed"} == {"a": "failed"}
        with pytest.raises(Unavailable, match="KeyError: 'toy'"):
            fleet.submit("a", [1], SamplingParams(max_tokens=4), Collector())
        for _ in range(2):
            sink = Collector()
            fleet.submit("b", [3], SamplingParams(max_tokens=4), sink)
            async with asyncio.timeout(10):
                await sink.done.wait()
            assert sink.tokens == expected([3], 4)
            await lose(fleet.workers[0])
            await until(lambda: fleet.workers[0].state == "ready")


@pytest.mark.parametrize("failures", [3, 4])
async def test_a_model_for_which_memory_is_lacking_is_tried_again_a_few_times(failures):
    errors = [[""], ["", *["MemoryError"] * failures, ""]]
    async with LocalFleet([worker("a", "b", slots=1, errors=errors)], FleetConfig(token_budget=16)) as fleet:
        sink = Collector()
        fleet.submit("b", [3], SamplingParams(max_tokens=4), sink)
        async with asyncio.timeout(10):
            await sink.done.wait()
        assert sink.tokens == expected([3], 4) if failures == 3 else "MemoryError" in sink.error


async def test_a_worker_killed_before_it_has_seen_all_models_sees_them_again():
    fleet = LocalFleet([worker("a", "b", slots=1, load_s=0.2)], FleetConfig())
    starting = asyncio.create_task(fleet.start())
    await until(lambda: fleet.groups[1].info)
    os.kill(fleet.workers[0].pids[0], signal.SIGKILL)
    async with asyncio.timeout(20):
        await starting
    assert [one.state for one in fleet.status()] == ["ready", "cold"]
    await fleet.stop()


async def test_workers_whose_last_model_fails_end():
    async with LocalFleet([worker("a", "b", slots=1, errors=[["OSError"], ["", "OSError"]])], FleetConfig()) as fleet:
        sink = Collector()
        fleet.submit("b", [3], SamplingParams(max_tokens=4), sink)
        await sink.done.wait()
        assert sink.error and [one.state for one in fleet.status()] == ["failed"] * 2
        await until(lambda: not children())


@pytest.mark.parametrize(
    ("loaded", "waited", "gone"),
    [  # by model: whether it is there, requests, when it was used, when it came, and when it gave a token
        ([(True, 0, 5.0, 0.0, 5.0), (True, 0, 3.0, 0.0, 3.0)], 0.0, 1),  # both idle: not asked for longest
        ([(True, 0, 5.0, 0.0, 5.0), (True, 2, 1.0, 0.0, 1.0)], 0.0, 0),  # the other one is busy
        ([(True, 3, 9.0, 0.0, 9.0), (True, 2, 9.0, 0.0, 9.0)], PATIENCE_S / 2, -1),  # not yet
        ([(True, 3, 9.0, 0.0, 9.0), (True, 2, 9.0, 0.0, 9.0)], PATIENCE_S, 1),  # the fewest requests
        ([(True, 3, 9.0, 0.0, 9.0), (True, 2, 9.0, 10.0 - STAY_S / 2, 9.5)], PATIENCE_S, 0),  # has just come
        ([(True, 3, 9.0, 0.0, 9.0), (True, 2, 9.0, 5.0, 4.0)], PATIENCE_S, 0),  # no token since it came
        ([(False, 0, 9.0, 0.0, 9.0)], 99.0, -1),  # is still coming, or is not there
    ],
)
def test_who_gives_way(loaded, waited, gone):
    assert plain(gives_way)(*zip(*loaded, strict=True), waited, 10.0) == gone


@pytest.mark.timeout(30)
def test_models_whose_prompts_take_longer_than_a_stay_do_not_drive_each_other_out_for_ever():
    """25 steps of a second for each prompt; a model stays for two seconds, and until it has given a token."""
    limits = SchedulerConfig(token_budget=8)
    groups = [
        GroupConfig((name,), limits, device=0, slots=1, resident=name == "a", load_s=1.5) for name in ("a", "b")
    ]
    requests = [Request(name, 200, 3, model=name) for name in ("a", "b")]
    events = simulate(Controller(groups), requests, lambda batch: 1.0, FixedOutputs({"a": 3, "b": 3}))
    assert {event.request for event in events if event.kind == "finished"} == {"a", "b"}
