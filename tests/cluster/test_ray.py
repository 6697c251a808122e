"""Workers on a real Ray cluster of three nodes on this machine: the head, which has no room, and two of one core."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.deployment import Deployment
from paceline.cli.sources import BUILTIN
from paceline.cli.spare import Spare
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Group, Parallel, Placement
from paceline.core.request import SamplingParams
from paceline.engine.runner import ModelRunner
from paceline.runtime import workers
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel
from paceline.runtime.ray_process import RayCluster
from paceline.runtime.recent import Recent
from tests.engine.test_parallel import alone, requests
from tests.runtime.test_fleet import Collector, expected, until, worker
from tests.runtime.test_ray_process import is_dropped
from tests.system.server import Server

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed: make test-cluster")
ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
QUICK = {"health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 4}
CORE = {"CPU": 1.0}
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def nodes():
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        try:
            cluster.add_node(**NODE | {"num_cpus": 0}, include_dashboard=False, _system_config=QUICK)
            cluster.add_node(**NODE)
            cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture
def cluster(nodes):
    joined = RayCluster(nodes.address)
    yield joined
    joined.close()


@asynccontextmanager
async def toys(launchers, **options):
    """A fleet of a group for each launcher, all with the same model."""
    groups = [replace(worker(**options), launcher=one) for one in launchers]
    async with LocalFleet(groups, FleetConfig(token_budget=16)) as fleet:
        fleet.used = set()
        fleet.observers.append(
            SimpleNamespace(on_events=lambda events: None, on_step=lambda step: fleet.used.add(step.group))
        )
        yield fleet


def submit(fleet: LocalFleet, count: int, tokens: int) -> list[Collector]:
    sinks = [Collector() for _ in range(count)]
    for i, sink in enumerate(sinks):
        fleet.submit("toy", [i, i + 1, i + 2], SamplingParams(max_tokens=tokens), sink)
    return sinks


async def check(sinks: list[Collector], tokens: int) -> None:
    """Nothing was lost."""
    await asyncio.gather(*(sink.done.wait() for sink in sinks))
    for i, sink in enumerate(sinks):
        assert not sink.error and sink.tokens == expected([i, i + 1, i + 2], tokens)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


async def test_a_lost_node_is_a_lost_device(nodes, cluster):
    """Streams go on at the other group; theirs waits for a node with room, and comes back with one."""
    async with toys(cluster.reserve([Parallel()] * 2, CORE, 8), delay=0.02) as fleet:
        lost, kept = fleet.workers
        sinks = submit(fleet, 12, 50)
        await until(lambda: all(len(sink.tokens) > 2 for sink in sinks))
        assert fleet.used == {0, 1}
        hosts = ray.util.placement_group_table(cluster._group)["bundles_to_node_id"]
        assert hosts[0] != hosts[1]
        pids = lost.pids
        nodes.remove_node(next(n for n in nodes.worker_nodes if n.node_id == hosts[0]), allow_graceful=False)
        await until(lambda: lost.state == "restarting")
        assert kept.state == "ready" and not all(sink.done.is_set() for sink in sinks)
        await check(sinks, 50)
        await until(lambda: "node" in lost.reason, 60)
        assert fleet.ready and not any(map(runs, pids))

        os.kill(kept.pids[0], signal.SIGKILL)
        await until(lambda: kept.state == "restarting")
        (status,) = fleet.status()
        assert status.state == "restarting" and "node" in status.reason
        await until(lambda: kept.state == "ready", 60)
        assert lost.state == "restarting"

        nodes.add_node(**NODE)  # only in the main thread: the front end stands still meanwhile
        await until(lambda: lost.state == "ready", 90)
        fleet.used.clear()
        await check(submit(fleet, 12, 20), 20)
        assert fleet.used == {0, 1} and not lost.reason


async def test_where_a_node_does_not_come_back_the_others_take_over(nodes, cluster, monkeypatch):
    """On the device of a group that makes way."""
    monkeypatch.setattr(workers, "NO_ROOM_S", 5.0)
    placement = Placement(tuple(Group((i,), Parallel(), (name,)) for i, name in enumerate("ab")))

    def groups(placement: Placement) -> list[WorkerGroup]:
        return [worker(*group.models, delay=0.02) for group in placement.groups]

    launchers = cluster.reserve([Parallel()] * 2, CORE, 8)
    first = [replace(group, launcher=one) for group, one in zip(groups(placement), launchers, strict=True)]
    async with LocalFleet(first, FleetConfig(token_budget=16)) as fleet:
        deployment, said = Deployment(fleet, ROOT, [], placement, groups, 2, cluster=cluster), list[str]()
        fleet.take_over = Spare(deployment, Recent(fleet, 600.0, lambda: 0.0), said.append).take_over
        sinks = [Collector() for _ in range(4)]
        for i, sink in enumerate(sinks):
            fleet.submit("ab"[i % 2], [i, i + 1, i + 2], SamplingParams(max_tokens=60), sink)
        await until(lambda: all(len(sink.tokens) > 2 for sink in sinks))
        hosts = ray.util.placement_group_table(cluster._group)["bundles_to_node_id"]
        nodes.remove_node(next(n for n in nodes.worker_nodes if n.node_id == hosts[1]), allow_graceful=False)
        await until(lambda: len(said) == 2, 60)
        assert "a node was lost" in said[0] and "moving to 0: a b" in said[0] and said[1].startswith("moved: ")
        await check(sinks, 60)
        assert fleet.ready and fleet.hosts("a") == fleet.hosts("b") == [(2, Parallel())]
    nodes.add_node(**NODE)


async def test_what_dies_or_hangs_is_replaced_and_streams_go_on(cluster):
    async with toys(cluster.reserve([Parallel()], CORE, 8), delay=0.02) as fleet:
        (workers,) = fleet.workers
        sinks = submit(fleet, 4, 60)

        def worker_dies() -> None:
            os.kill(workers.pids[0], signal.SIGKILL)

        def worker_hangs() -> None:
            os.kill(workers.pids[0], signal.SIGSTOP)

        def actor_dies() -> None:
            """And cannot say good-bye to its worker, which hangs."""
            actor = int(Path(f"/proc/{workers.pids[0]}/stat").read_text().split()[3])
            os.kill(workers.pids[0], signal.SIGSTOP)
            os.kill(actor, signal.SIGKILL)

        for fault in (worker_dies, actor_dies, worker_hangs):
            progress, pids = len(sinks[0].tokens), workers.pids
            await until(lambda progress=progress: len(sinks[0].tokens) > progress + 2)
            fault()
            await until(lambda: workers.state == "restarting")
            await until(lambda: workers.state == "ready", 60)
            await until(lambda pids=pids: not any(map(runs, pids)))
        await check(sinks, 60)
        pids = workers.pids
    await until(lambda: not any(map(runs, pids)))


async def test_strangers_are_dropped(cluster):
    async with toys(cluster.reserve([Parallel()], CORE, 8)) as fleet:
        assert await is_dropped(fleet.workers[0].launcher.door, bytes(1000))
        await check(submit(fleet, 2, 5), 5)


async def test_workers_that_cannot_connect_say_so(cluster):
    (launcher,) = cluster.reserve([Parallel()], CORE, 8)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nowhere = taken.getsockname()[1]

    async def opened() -> None:
        launcher.door.port = nowhere

    launcher.door.host, launcher.door.open = "127.0.0.1", opened
    async with toys([launcher]) as fleet:
        (status,) = fleet.status()
        assert status.state == "failed" and f"127.0.0.1:{nowhere}" in status.reason


@pytest.mark.parametrize("drafter", ["ngram", str(BUILTIN / "coder-draft")])
async def test_two_stages_on_two_nodes_yield_the_tokens_of_one_device(cluster, drafter):
    """With drafts, which come from the first one."""
    limits = dict(max_batch_tokens=64, max_batch=16, num_blocks=200)
    coder = ModelRunner.load(BUILTIN / "coder", **limits)
    asked = [(p, replace(one, max_tokens=20)) for p, one in requests(coder.info.vocab_size)]
    want, parallel = alone(coder, asked), Parallel(2, 1)
    options = WorkerOptions(str(BUILTIN / "coder"), threads=1, drafter=drafter, **limits)
    command = GroupOptions((options,), parallel).command
    (launcher,) = cluster.reserve([parallel], CORE, 8)
    group = WorkerGroup((ServedModel("coder", max_draft_tokens=3),), command, parallel, launcher)
    async with LocalFleet([group], FleetConfig()) as fleet:
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in fleet.workers[0].pids]
        assert len(lines) == 2 and all('"meeting":"tcp://' in line for line in lines)
        sinks, accepted = [Collector() for _ in asked], []
        fleet.observers.append(
            SimpleNamespace(
                on_events=lambda events: None, on_step=lambda step: accepted.extend(one.accepted for one in step.drafts)
            )
        )
        for (prompt, params), sink in zip(asked, sinks, strict=True):
            fleet.submit("coder", prompt, params, sink)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
    assert [sink.tokens for sink in sinks] == want and sum(accepted) > 0


async def test_ranks_of_a_stage_share_a_node_where_they_fit(nodes, cluster):
    node = nodes.add_node(**NODE | {"num_cpus": 2})
    try:
        (launcher,) = cluster.reserve([Parallel(1, 2)], CORE, 8)
        while (meeting := await launcher.meeting(2)) is None:
            pass
        assert launcher.bundles == [0, 0] and meeting.startswith("file://")
        launcher.close()
    finally:
        nodes.remove_node(node)


async def test_ray_that_does_not_answer_is_asked_again(cluster, monkeypatch):
    def away(bundle):
        raise ray.exceptions.RaySystemError("the head is away")

    (launcher,) = cluster.reserve([Parallel()], CORE, 8)
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "actor", away)
        assert await launcher.meeting(1) is None and "the head is away" in launcher.reason
    while (meeting := await launcher.meeting(1)) is None:
        pass
    assert meeting == "" and not launcher.reason
    launcher.close()


FLEET = "models: [{name: coder, source: 'builtin:coder'}]\n"


def files(folder: Path, stages: int) -> list[str]:
    shape = {"devices": list(range(stages)), "parallel": {"pipeline": stages, "tensor": 1}, "models": ["coder"]}
    (folder / "fleet.yaml").write_text(FLEET)
    (folder / "placement.json").write_text(json.dumps({"groups": [shape]}))
    return [str(folder / "fleet.yaml"), "--placement", str(folder / "placement.json")]


def test_serve_answers_from_the_cluster(nodes, tmp_path):
    with Server(*files(tmp_path, 2), "--ray", nodes.address) as server:
        assert not server.workers(), "none is a child of the server's"
        body = {"model": "coder", "prompt": "def read(path):\n", "max_tokens": 9, "ignore_eos": True}
        request = urllib.request.Request(
            server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 9
    assert server.process.returncode == 0
    assert not [line for line in server.log if "raylet" in line or "INFO" in line or "WARN" in line], server.log


@pytest.mark.parametrize(
    ("stages", "address", "words"),
    [(3, "", "3 devices of CPU:1 are needed, the cluster has 2"), (1, "127.0.0.1:9", "no answer from 127.0.0.1:9")],
)
def test_what_cannot_be_is_one_line(nodes, tmp_path, stages, address, words):
    command = [sys.executable, "-m", "paceline.cli.main", "serve", *files(tmp_path, stages)]
    done = subprocess.run([*command, "--ray", address or nodes.address], capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
