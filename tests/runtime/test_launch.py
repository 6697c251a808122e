"""Workers that wait for room, as on a cluster that has lost a node: here with processes of this machine."""

import asyncio
from dataclasses import replace

import pytest

from paceline.core.request import SamplingParams
from paceline.runtime import workers
from paceline.runtime.fleet import FleetConfig, LocalFleet
from paceline.runtime.process import Local
from paceline.runtime.workers import MAX_RESTARTS
from tests.runtime.test_fleet import Collector, children, expected, lose, until, worker


class Cramped(Local):
    """Has no room so many times before it has some."""

    def __init__(self) -> None:
        super().__init__()
        self.full = 0

    async def meeting(self, workers):
        if self.full:
            await asyncio.sleep(0.01)
            self.full -= 1
            self.reason = "no room"
            return None
        self.reason = ""
        return await super().meeting(workers)


async def test_who_waits_for_room_is_not_given_up():
    launcher = Cramped()
    fleet = LocalFleet([replace(worker(), launcher=launcher)], FleetConfig())
    await fleet.start()
    try:
        for _ in range(MAX_RESTARTS + 1):
            launcher.full = 3
            await lose(fleet.workers[0])
            await until(lambda: fleet.workers[0].state == "ready")
        sink = Collector()
        fleet.submit("toy", [1, 2], SamplingParams(max_tokens=5), sink)
        await sink.done.wait()
        assert sink.tokens == expected([1, 2], 5)
        for _ in range(MAX_RESTARTS + 1):  # there is room, and no step gets done
            assert fleet.workers[0].state == "ready"
            await lose(fleet.workers[0])
            await until(lambda: fleet.workers[0].state != "restarting")
        assert fleet.workers[0].state == "failed"
    finally:
        await fleet.stop()


async def test_the_status_says_what_is_waited_for_and_a_stop_does_not_wait():
    launcher = Cramped()
    fleet = LocalFleet([replace(worker(), launcher=launcher)], FleetConfig())
    await fleet.start()
    assert [(status.state, status.reason) for status in fleet.status()] == [("ready", "")]
    launcher.full = 10**9
    await lose(fleet.workers[0])
    await until(lambda: launcher.reason)
    assert [(status.state, status.reason) for status in fleet.status()] == [("restarting", "no room")]
    await fleet.stop()
    assert not children()


class Short(Local):
    """Has no file left so many times, when the workers are to meet or when one is to start."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.left = where, 0

    def _take(self, where: str) -> None:
        if self.left and where == self.where:
            self.left -= 1
            raise OSError(24, "Too many open files")

    async def meeting(self, workers):
        self._take("meeting")
        return await super().meeting(workers)

    def process(self, *arguments):
        process = super().process(*arguments)
        start = process.start

        async def starting() -> None:
            self._take("start")
            await start()

        process.start = starting
        return process


async def test_a_fault_of_ours_in_starting_again_leaves_nobody_waiting(monkeypatch):
    monkeypatch.setattr(workers, "AGAIN_S", 0.0)
    seen: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    async with asyncio.timeout(30), LocalFleet([worker(delay=0.05)], FleetConfig()) as fleet:
        sink = Collector()
        fleet.submit("toy", [1, 2], SamplingParams(max_tokens=250), sink)
        fleet.workers[0].launcher.meeting = lambda _: 1 / 0
        await lose(fleet.workers[0])
        await sink.done.wait()
        assert "ZeroDivisionError" in sink.error and fleet.status()[0].state == "failed"
        assert [type(context["exception"]) for context in seen] == [ZeroDivisionError]


@pytest.mark.parametrize("where", ["meeting", "start"])
async def test_workers_that_cannot_be_started_for_a_while_are_not_given_up(where, monkeypatch):
    monkeypatch.setattr(workers, "AGAIN_S", 0.0)
    launcher = Short(where)
    fleet = LocalFleet([replace(worker(), launcher=launcher)], FleetConfig())
    await fleet.start()
    try:
        launcher.left = MAX_RESTARTS - 1
        await lose(fleet.workers[0])
        await until(lambda: not launcher.left and fleet.workers[0].state != "restarting")
        sink = Collector()
        fleet.submit("toy", [1, 2], SamplingParams(max_tokens=5), sink)
        await sink.done.wait()
        assert sink.tokens == expected([1, 2], 5)
        launcher.left = 10**9
        await lose(fleet.workers[0])
        await until(lambda: fleet.workers[0].state == "failed")
        assert f"Too many open files) {MAX_RESTARTS + 1} times in a row" in fleet.status()[0].reason
    finally:
        await fleet.stop()
    assert not children()
