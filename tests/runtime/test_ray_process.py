"""What of the Ray launcher needs no Ray: who gets in, and how bundles are made. The rest: tests/cluster."""

import asyncio
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.core.cluster import Parallel
from paceline.runtime import ray_process, workers
from paceline.runtime.channel import FrontEnd, pack
from paceline.runtime.fleet import FleetConfig, LocalFleet
from paceline.runtime.ray_process import TOKEN_BYTES, Door, RayCluster, RayLauncher, bundle_sizes, fit, interface
from tests.runtime.test_fleet import until, worker


@pytest.fixture
async def door():
    opened = Door("127.0.0.1")
    await opened.open()
    yield opened
    opened.close()


@asynccontextmanager
async def visit(door: Door, said: bytes):
    reader, writer = await asyncio.open_connection(door.host, door.port)
    writer.write(said)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def is_dropped(door: Door, said: bytes) -> bool:
    async with visit(door, said) as (reader, _):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


async def test_a_token_opens_the_door_once_and_to_its_channel(door):
    heard = []
    first, second = FrontEnd(lambda frame: heard.append(b"first")), FrontEnd(heard.append)
    door.expect(first)
    token = door.expect(second)
    async with visit(door, token + pack(b"at once")) as (reader, writer):
        await until(lambda: heard == [b"at once"])
        writer.write(pack(b"later"))
        second.send(b"answer")
        assert await reader.readexactly(10) == pack(b"answer")
        await until(lambda: heard == [b"at once", b"later"])
        assert await is_dropped(door, token + pack(b"again"))
        assert len(heard) == 2 and not second.closed.is_set()
    await second.closed.wait()


@pytest.mark.parametrize("said", [bytes(TOKEN_BYTES), b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"], ids=["0", "http"])
async def test_a_wrong_token_is_dropped(door, said):
    heard = []
    channel = FrontEnd(heard.append)
    token = door.expect(channel)
    assert await is_dropped(door, said + pack(b"me"))
    door.forget(token)
    assert await is_dropped(door, token + pack(b"too late"))
    assert not heard and not channel.closed.is_set()


async def test_who_says_too_little_is_dropped(door, monkeypatch):
    monkeypatch.setattr(ray_process, "HELLO_S", 0.05)
    token = door.expect(FrontEnd(lambda frame: None))
    assert await is_dropped(door, token[:-1])


def test_ranks_of_a_stage_are_one_bundle_as_far_as_a_node_goes():
    assert bundle_sizes(Parallel(1, 1), 8) == [1]
    assert bundle_sizes(Parallel(2, 4), 8) == [4, 4]
    assert bundle_sizes(Parallel(2, 4), 3) == [3, 1, 3, 1]
    assert bundle_sizes(Parallel(2, 2), 1) == [1, 1, 1, 1]


def test_bundles_fit_on_nodes_or_not():
    assert fit([2, 2, 1], [3, 2]) and not fit([2, 2], [3, 1]) and not fit([4], [3, 3])
    assert fit([], [1])


def test_new_groups_get_the_devices_of_old_ones_that_are_left(monkeypatch):
    nodes = [{"NodeID": name, "Alive": name != "gone"} for name in ("one", "two", "gone")]
    table = {"bundles_to_node_id": {0: "one", 1: "two", 2: "gone", 3: ""}}
    util = SimpleNamespace(placement_group_table=lambda group: table)
    monkeypatch.setattr(ray_process, "ray", lambda: SimpleNamespace(nodes=lambda: nodes, util=util))
    cluster = RayCluster.__new__(RayCluster)
    cluster._group, cluster.host = None, "127.0.0.1"
    old = [RayLauncher(cluster, bundles) for bundles in ([1, 1], [2, 0], [3])]
    assert [one.bundles for one in cluster.instead([Parallel(2, 1), Parallel()], old)] == [[1, 1], [0]]
    with pytest.raises(ValueError, match="4 devices are needed, 3 are left"):
        cluster.instead([Parallel(2, 2)], old)


class Refusing:
    """A cluster (`RayCluster`) that has room, on which no actor does its first task, but one, after a while."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.lacks, self.actors = "", 0

    def actor(self, bundle):
        async def place():
            self.actors += 1
            if self.actors % 3 == 2:
                await asyncio.sleep(3600)
            raise RuntimeError("ray::Host.place()\n  where\nOSError: no address")

        return SimpleNamespace(place=SimpleNamespace(remote=place))

    def lack(self):
        return self.lacks


@pytest.fixture
def refusing(monkeypatch):
    monkeypatch.setattr(ray_process, "POLL_S", 0.01)
    library = SimpleNamespace(exceptions=SimpleNamespace(RayError=RuntimeError), kill=lambda actor: None)
    monkeypatch.setattr(ray_process, "ray", lambda: library)
    return Refusing()


async def test_actors_that_never_start_say_why_until_a_node_is_known_to_be_lost(refusing):
    launcher = RayLauncher(refusing, [0])
    for _ in range(3):  # the second does nothing for a while
        assert await launcher.meeting(1) is None
        assert (launcher.reason, launcher.lost) == ("no worker starts in the cluster: OSError: no address", True)
    for refusing.lacks in ("a node was lost", ""):
        assert await launcher.meeting(1) is None
        assert (launcher.reason, launcher.lost) == (refusing.lacks, bool(refusing.lacks))
    launcher.close()


async def test_loading_ends_where_no_actor_starts(refusing, monkeypatch):
    monkeypatch.setattr(workers, "NO_ROOM_S", 0.1)
    group = replace(worker("a"), launcher=RayLauncher(refusing, [0]))
    fleet = LocalFleet([group], FleetConfig(token_budget=16))
    async with asyncio.timeout(20):
        await fleet.start()
    (status,) = fleet.status()
    await fleet.stop()
    assert status.state == "failed"
    assert status.reason == "no worker starts in the cluster: OSError: no address, for 0.1 s"


@pytest.mark.parametrize(("cores", "devices"), [(None, 2), (2, 5), (9, 0)])
def test_a_node_is_a_device_unless_the_cores_of_one_are_given(monkeypatch, cores, devices):
    nodes = [{"Resources": {"CPU": count}, "Alive": True} for count in (4.0, 4.0, 3.0)]
    monkeypatch.setattr(ray_process, "ray", lambda: SimpleNamespace(nodes=lambda: nodes))
    assert RayCluster.__new__(RayCluster).devices(cores) == devices


@pytest.mark.parametrize(("devices", "gpus", "cores"), [(1, False, 16), (2, False, 8), (1, True, 8), (3, True, 4)])
def test_devices_have_the_cores_of_nodes_that_have_all_of_a_device(monkeypatch, devices, gpus, cores):
    resources = [{"CPU": 16.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}]
    nodes = [{"Resources": one, "Alive": True} for one in resources]
    monkeypatch.setattr(ray_process, "ray", lambda: SimpleNamespace(nodes=lambda: nodes))
    assert RayCluster.__new__(RayCluster).cores(devices, gpus) == cores


def test_interfaces_are_known_by_their_addresses():
    assert interface("127.0.0.1") == "lo" and interface("203.0.113.77") is None


def test_bad_addresses_and_no_ray_are_one_line(monkeypatch):
    for address in ("ray://head:10001", "head", "head:", "local"):
        with pytest.raises(ValueError, match="^--ray: .* is not auto or HOST:PORT"):
            RayCluster(address)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--ray: .*paceline\[cluster\]"):
        RayCluster("auto")
