"""A device is gone for good: another placement takes over, and no request is lost."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.deployment import Deployment, complete, used
from paceline.cli.spare import Spare, described, without_devices
from paceline.core.cluster import Group, Parallel, Placement
from paceline.core.request import SamplingParams
from paceline.runtime import workers
from paceline.runtime.api import Unavailable
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.process import Local
from paceline.runtime.recent import Recent
from paceline.runtime.workers import Command
from tests.cli.test_replan import STEP
from tests.runtime.test_fleet import Collector, children, expected, until, worker

PIPELINE = Group((0, 1), Parallel(2, 1), ("a", "b"))
SINGLE = Group((2,), Parallel(), ("b", "c"))
LAST = Group((3,), Parallel(), ("d",))
THREE = Placement(tuple(Group((i,), Parallel(), (name,)) for i, name in enumerate("abc")))


def test_a_group_that_has_devices_left_goes_on_with_those():
    after = without_devices(Placement((PIPELINE, SINGLE)), [PIPELINE])
    assert after.groups == (SINGLE, replace(PIPELINE, devices=(0,), parallel=Parallel()))
    for shape, left in (((1, 4), (1, 2)), ((1, 3), (1, 1)), ((3, 2), (2, 2)), ((1, 2), (1, 1))):
        group = Group(tuple(range(Parallel(*shape).devices)), Parallel(*shape), ("a",))
        (smaller,) = without_devices(Placement((group,)), [group]).groups
        assert smaller.parallel == Parallel(*left) and smaller.models == ("a",)


def test_models_that_nobody_else_has_join_the_groups_with_the_fewest():
    after = without_devices(Placement((PIPELINE, SINGLE, LAST)), [SINGLE])
    assert after.groups == (PIPELINE, replace(LAST, models=("d", "c")))
    assert described(after) == "0,1(2,1): a b; 3: d c"
    many = Placement(tuple(Group((i,), Parallel(), ("a",)) for i in range(10)))
    assert described(many).endswith("7: a; and 2 more")
    (only,) = without_devices(Placement((PIPELINE, SINGLE, LAST)), [LAST, SINGLE, PIPELINE]).groups
    assert only == Group((0,), Parallel(), ("a", "b", "d", "c"))
    with pytest.raises(RuntimeError, match="no device is left"):
        without_devices(Placement((LAST,)), [LAST])


def test_models_that_a_plan_left_out_are_in_it_all_the_same():
    whole = complete(Placement((PIPELINE, LAST)), "abcde")
    assert whole.groups == (replace(PIPELINE, models=("a", "b", "e")), replace(LAST, models=("d", "c")))


class NoRoom(Local):
    """A launcher that finds no room when its device is lost, as Ray's does."""

    async def meeting(self, workers: int) -> str | None:
        if not self.lost:
            return await super().meeting(workers)
        self.reason = "a node was lost"
        await asyncio.sleep(0.01)
        return None


class NoOtherDevices:
    """A cluster in which groups must leave before others come."""

    def instead(self, shapes, old) -> list[Local]:
        return [Local() for _ in shapes]


class Placed:
    """A fleet of toys on THREE with a spare placement; the device of `c` can be made to go."""

    def __init__(self, cluster: NoOtherDevices | None = None, folder: Path = Path(), delay: float = 0.004) -> None:
        self.gone, self.refuse, self.said, self.delay = False, "", list[str](), delay
        *others, last = self._groups(THREE)
        last = replace(last, command=self._until_gone(last.command))
        self.fleet = LocalFleet([*others, last], FleetConfig(token_budget=16))
        options = ["--profile", str(folder / "profile.json"), "--memory", "2GiB"]
        self.deployment = Deployment(self.fleet, folder / "fleet.yaml", options, THREE, self._groups, 3, cluster)
        self.spare = Spare(self.deployment, Recent(self.fleet, 600.0, lambda: 0.0), self.said.append)
        self.fleet.take_over = self.spare.take_over

    def _groups(self, placement: Placement) -> list[WorkerGroup]:
        load_s = 0.3 if self.gone else 0.0  # time to look at what is there meanwhile
        return [worker(*group.models, delay=self.delay, refuse=self.refuse, load_s=load_s) for group in used(placement)]

    def _until_gone(self, command: Command) -> Command:
        return lambda seat: ["-m", "tests.runtime.toy_worker", '{"exit": 9}', "{}"] if self.gone else command(seat)

    def lose(self) -> None:
        self.gone = True
        os.kill(self.fleet.workers[2].pids[0], signal.SIGKILL)

    def submit(self, tokens: int, names: str = "abcabc") -> list[Collector]:
        sinks = [Collector() for _ in names]
        for i, (name, sink) in enumerate(zip(names, sinks, strict=True)):
            self.fleet.submit(name, [i, i + 1], SamplingParams(max_tokens=tokens), sink)
        return sinks

    def states(self) -> list[str]:
        return [status.state for status in self.fleet.status()]


@asynccontextmanager
async def placed(*options):
    one = Placed(*options)
    async with one.fleet:
        yield one
    assert not children()


async def check(sinks: list[Collector], tokens: int) -> None:
    async with asyncio.timeout(30):
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
    for i, sink in enumerate(sinks):
        assert not sink.error and sink.tokens == expected([i, i + 1], tokens)


PLANNED = Placement((Group((0,), Parallel(), ("a", "b")), Group((1,), Parallel(), ("c",))))


@pytest.mark.parametrize(
    ("cluster", "planned", "stays", "groups"),
    [
        (None, None, [1], [("b",), ("a", "c")]),
        (NoOtherDevices(), PLANNED, [], [("a", "b"), ("c",)]),
        pytest.param(None, PLANNED, [], [("a", "b"), ("c",)], marks=pytest.mark.slow),
        pytest.param(NoOtherDevices(), None, [1], [("b",), ("a", "c")], marks=pytest.mark.slow),
    ],
)
async def test_another_placement_takes_over_and_streams_go_on(cluster, planned, stays, groups):
    async with placed(cluster) as one:
        if planned:
            one.spare.planned[2] = planned
        sinks = one.submit(60)
        await until(lambda: all(len(sink.tokens) > 3 for sink in sinks))
        kept = [one.fleet.workers[number].pids for number in stays]
        one.lose()
        await until(lambda: one.fleet.workers[2].gone)
        assert one.states()[2] == "restarting" and not one.fleet.ready and one.fleet.healthy
        assert cluster or one.states()[:2] == ["ready"] * 2
        assert "ended with code 9 6 times in a row" in one.fleet.status()[2].reason
        late = one.submit(10, "cab")
        assert not any(sink.done.is_set() for sink in (sinks[2], sinks[5], late[0]))
        await check(sinks, 60)
        await check(late, 10)
        await until(lambda: one.fleet.ready and any("moved" in line for line in one.said))
        assert one.states() == ["ready"] * 3
        assert [group.models for group in one.deployment.placement.groups] == groups
        ready = [workers for workers in one.fleet.workers if workers.state == "ready"]
        assert len(ready) == 2 and [workers.pids for workers in ready[: len(stays)]] == kept
        assert one.deployment.devices == 2 and one.deployment.moved.is_set()
        await check(one.submit(20), 20)


@pytest.mark.parametrize("cluster", [None, NoOtherDevices()], ids=["beside", "instead"])
async def test_where_nothing_can_take_over_the_others_go_on_and_who_waits_is_told(cluster):
    async with placed(cluster) as one:
        one.refuse = "no memory"
        sinks = one.submit(60)
        await until(lambda: all(len(sink.tokens) > 3 for sink in sinks))
        one.lose()
        async with asyncio.timeout(30):
            await asyncio.gather(*(sink.done.wait() for sink in sinks))
        for i in (2, 5):
            assert "6 times in a row, and nothing takes over: " in sinks[i].error and "no memory" in sinks[i].error
        others = [0, 1, 3, 4]
        assert [sinks[i].tokens for i in others] == [expected([i, i + 1], 60) for i in others]
        await until(lambda: one.states() == ["ready", "ready", "failed"] and one.fleet.ready)
        with pytest.raises(Unavailable) as refused:
            one.submit(1, "c")
        assert refused.value.retry_after is None and "no memory" in str(refused.value)
        await check(one.submit(10, "ab"), 10)
        assert any("moving failed: " in line for line in one.said)
        assert [group.models for group in one.deployment.placement.groups] == [("a",), ("b",)]


async def test_a_model_that_had_failed_before_stops_no_takeover():
    async with placed() as one:
        one.fleet.groups[0].failed("no memory", False)
        one.deployment._start = lambda placement: [worker("a", "c", errors=[["OSError"], [""]])]
        sinks = one.submit(40, "c")
        await until(lambda: len(sinks[0].tokens) > 3)
        one.lose()
        await check(sinks, 40)
        await until(lambda: one.said[-1] == "moved: its requests go on")
        assert one.states() == ["failed", "ready", "ready"]


async def test_a_group_that_finds_no_room_is_gone_too_and_with_it_all_that_find_none(monkeypatch):
    monkeypatch.setattr(workers, "NO_ROOM_S", 0.1)
    async with placed(NoOtherDevices()) as one:
        sinks = one.submit(60)
        await until(lambda: all(len(sink.tokens) > 3 for sink in sinks))
        for number in (1, 2):
            one.fleet.workers[number].launcher = NoRoom()
            one.fleet.workers[number].launcher.lost = True
            os.kill(one.fleet.workers[number].pids[0], signal.SIGKILL)
        await check(sinks, 60)
        await until(lambda: one.fleet.ready)
        assert "a node was lost, for 0.1 s; moving to 0: a b c" in one.said[0]
        assert one.deployment.devices == 1 and len(children()) == 1
        nowhere = NoRoom()
        nowhere.lost = True
        with pytest.raises(RuntimeError, match="a: a node was lost, for 0.1 s"):
            await one.fleet.move([replace(worker("a"), launcher=nowhere)], [])


TOGETHER = Placement((Group((0,), Parallel(), ("a", "b")), Group((2,), Parallel(), ("c",))))


async def test_a_device_is_taken_over_while_groups_of_a_move_finish_what_they_run():
    async with placed(None, Path(), 0.02) as one:
        sinks = one.submit(240, "ab")
        await until(lambda: all(len(sink.tokens) > 3 for sink in sinks))
        await one.deployment.move(TOGETHER)
        one.lose()
        await until(lambda: "moved: its requests go on" in one.said, 20)
        assert one.fleet.ready and not any(sink.done.is_set() for sink in sinks)
        await check(one.submit(5), 5)
        await check(sinks, 240)
        await one.fleet.left()
        assert len(children()) == 1


async def test_who_cannot_move_from_a_group_that_leaves_and_is_lost_is_told():
    async with placed(None, Path(), 0.02) as one:
        one.fleet.submit("c", [5] * 50, SamplingParams(max_tokens=190), long := Collector())
        await until(lambda: len(long.tokens) > 3)
        async with asyncio.timeout(2), one.deployment.moving:
            await one.fleet.move([worker("c", num_blocks=12)], [2])
        assert not long.done.is_set()
        one.lose()
        await until(long.done.is_set)
        assert "ended with code 9 6 times in a row" in long.error
        await one.fleet.left()
        assert len(children()) == 3 and one.fleet.ready


async def test_a_request_that_no_other_group_can_hold_fails_alone():
    async with placed() as one:
        small = worker("a", "c", num_blocks=12)
        one.deployment._start = lambda placement: [small]
        sinks = one.submit(30, "cc")
        one.fleet.submit("c", [5] * 50, SamplingParams(max_tokens=100), long := Collector())
        await until(lambda: all(len(sink.tokens) > 3 for sink in (*sinks, long)))
        one.lose()
        await check(sinks, 30)
        await until(long.done.is_set)
        assert "no other group has room" in long.error
        await until(lambda: any("moved" in line for line in one.said))


async def test_models_loaded_by_need_take_over_too():
    """The new group holds one of its two models at a time; what waits for the other has it loaded."""
    async with placed() as one:
        one.deployment._start = lambda placement: [worker("a", "c", slots=1)]
        sinks = one.submit(40, "cac")
        await until(lambda: all(len(sink.tokens) > 3 for sink in sinks))
        one.lose()
        await check(sinks, 40)


async def test_stopping_in_the_middle_of_a_takeover_leaves_no_process():
    async with placed() as one:
        sinks = one.submit(200, "c")
        await until(lambda: len(sinks[0].tokens) > 3)
        one.lose()
        await until(lambda: len(one.fleet.workers) == 4)
    assert sinks[0].error and not one.fleet._takeovers


async def test_it_is_planned_ahead_and_again_after_a_move(monkeypatch):
    async with placed() as one:
        asked = []

        async def plan(devices, trace):
            asked.append((devices, trace))
            if devices == 1:
                raise RuntimeError("source: no profile")
            return THREE

        monkeypatch.setattr(one.deployment, "plan", plan)
        task = asyncio.create_task(one.spare.run())
        await until(lambda: one.said == ["should a device be lost: 0: a; 1: b; 2: c"])
        one.deployment.devices = 2
        one.deployment.moved.set()
        await until(lambda: len(one.said) == 2)
        assert one.said[1].endswith("the rest of its group, or other groups, take over its models (source: no profile)")
        assert asked == [(2, None), (1, None)] and list(one.spare.planned) == [2]
        task.cancel()


@pytest.mark.slow
async def test_the_planner_itself_is_asked_and_every_model_has_a_place(tmp_path):
    """On two devices of 2 GiB, whatever the fleet file says; the third model has no room beside the others."""
    entry = {"parallel": [{"stage_weight_bytes": [6e8]}], "step_time": STEP, "roofline": {"kv_bytes": 1000}}
    (tmp_path / "profile.json").write_text(json.dumps({"models": dict.fromkeys("abc", entry)}))
    models = [f"  - {{name: {name}, source: 'profile:{name}', workload: {{rate: 1.0}}}}\n" for name in "abc"]
    (tmp_path / "fleet.yaml").write_text(f"models:\n{''.join(models)}cluster: {{devices: 3, memory: 1MiB}}\n")
    async with placed(None, tmp_path) as one:
        task = asyncio.create_task(one.spare.run())
        await until(lambda: one.said, 100)
        task.cancel()
        groups = one.spare.planned[2].groups
        assert {device for group in groups for device in group.devices} == {0, 1}, one.said
        assert sorted(model for group in groups for model in group.models) == ["a", "b", "c"]
