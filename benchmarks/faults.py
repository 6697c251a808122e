"""How long faults go unnoticed, streams stand still, groups are away: workers killed, stopped; devices, nodes lost.

Workers with real weights: a model on two pipeline stages and, another group, on one. Streams run at both all the time.
Each fault hits the group of two (of one, where a device or a node is lost): until that is seen (`noticed`), until
a stream that ran there has another token (`stood_still`), until the group, or what took its place, is ready (`back`).
A device that is gone is one whose worker dies whenever it is started: its group's model moves to the other group. A
node is one of Ray's (extra `cluster`), on this machine; to end it takes a while, in which streams go on, and which
counts; another one joins when they have moved. Tokens are compared with those of an undisturbed answer.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.checkpoints import checkpoint
from paceline.cli.deployment import Deployment, used
from paceline.cli.spare import Spare
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Group, Parallel, Placement
from paceline.core.request import SamplingParams
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel
from paceline.runtime.ray_process import RayCluster
from paceline.runtime.recent import Recent

CASES = ("killed", "stopped", "device", "node")
ROUNDS, STREAMS, OUTPUT, PATIENCE_S = 8, 6, 200, 120.0
CONFIG = FleetConfig(token_budget=64, max_batch=8)
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def run(case: str) -> dict:
    if case == "node":
        return asyncio.run(lost_nodes())
    return asyncio.run(lost_devices() if case == "device" else hurt(case))


def group(parallel: Parallel, *names: str) -> WorkerGroup:
    """Groups of one and the same model, by several names if need be."""
    path = str(checkpoint("small"))
    options = WorkerOptions(path, threads=1, max_batch_tokens=64, max_batch=8, num_blocks=200)
    served = tuple(ServedModel(name) for name in names)
    return WorkerGroup(served, GroupOptions((options,) * len(names), parallel).command, parallel)


class Stream:
    """One request after the other, each the same: a sink that notes when tokens came."""

    checks_stop = False

    def __init__(self, fleet: LocalFleet, model: str, number: int) -> None:
        self.fleet, self.model, self.number = fleet, model, number
        self.times, self.answers, self.tokens = list[float](), list[list[int]](), list[int]()
        self.ends, self.done, self.failed = False, asyncio.Event(), ""
        self.begin()

    def begin(self) -> None:
        prompt = [300 + (self.number * 17 + i) % 7000 for i in range(16)]
        self.tokens = []
        params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        self.id = self.fleet.submit(self.model, prompt, params, self)

    def push(self, output, finish) -> bool:
        self.times += [time.monotonic()] * len(output.tokens)
        self.tokens += output.tokens
        if finish:
            self.answers.append(self.tokens)
            if self.ends:
                self.done.set()
            else:
                asyncio.get_running_loop().call_soon(self.begin)
        return False

    def fail(self, reason: str) -> None:
        print(f"  lost: {reason}", flush=True)
        self.failed = reason
        self.done.set()

    def is_past(self, count: int) -> bool:
        """It has more tokens than that, or will never have."""
        return len(self.times) > count or bool(self.failed)

    def is_at(self, group: int) -> bool:
        at = self.fleet.driver.controller.sequences.get(self.id)
        return at is not None and at[0] == group


async def until(condition) -> float:
    """When it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)
    return time.monotonic()


class Faults:
    """What comes of them, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"noticed": [], "stood_still": [], "back": []}

    async def hit(self, fleet: LocalFleet, streams: list[Stream], number: int, strike, back) -> None:
        """`strike` at the group of this number; `back` says whether the fleet is well again."""
        await until(lambda: any(stream.is_at(number) for stream in streams))
        counts = [len(stream.times) for stream in streams]  # workers that end before any step are given up
        await until(lambda: all(map(Stream.is_past, streams, counts)))
        there, workers = [stream for stream in streams if stream.is_at(number)], fleet.workers[number]
        pids, begin = workers.pids, time.monotonic()
        strike()
        self.seconds["noticed"].append(await until(lambda: workers.pids != pids) - begin)
        tokens = [len(stream.times) for stream in there]
        await until(lambda: all(map(Stream.is_past, there, tokens)))
        self.seconds["stood_still"] += [
            stream.times[n] - max(begin, stream.times[n - 1])
            for stream, n in zip(there, tokens, strict=True)
            if not stream.failed
        ]
        self.seconds["back"].append(await until(back) - begin)

    async def report(self, streams: list[Stream]) -> dict:
        for stream in streams:
            stream.ends = True
        await asyncio.gather(*(stream.done.wait() for stream in streams))
        alike = [answer == stream.answers[0] for stream in streams for answer in stream.answers]
        figures = {name: {"p50": round(median(some), 3), "max": round(max(some), 3)} for name, some in
                   self.seconds.items()}  # fmt: skip
        failed = sum(bool(stream.failed) for stream in streams)
        return {"faults": len(self.seconds["noticed"])} | figures | {
            "answers": len(alike), "lost": failed, "other_tokens": alike.count(False)
        }  # fmt: skip


async def started(fleet: LocalFleet, *models: str) -> list[Stream]:
    """Streams of each model, whose first answers nothing disturbs."""
    await until(lambda: fleet.ready)
    streams = [Stream(fleet, model, number) for number in range(STREAMS) for model in models]
    await until(lambda: all(stream.answers for stream in streams))
    return streams


async def hurt(case: str) -> dict:
    rng, faults = random.Random(0), Faults()
    number = signal.SIGKILL if case == "killed" else signal.SIGSTOP
    async with LocalFleet([group(Parallel(2, 1), "m"), group(Parallel(), "m")], CONFIG) as fleet:
        streams, workers = await started(fleet, "m"), fleet.workers[0]
        for turn in range(ROUNDS):
            await faults.hit(
                fleet, streams, 0, lambda: os.kill(rng.choice(workers.pids), number), lambda: workers.state == "ready"
            )
            print(f"  fault {turn + 1} of {ROUNDS}", flush=True)
        return await faults.report(streams)


async def lost_devices() -> dict:
    """Each time a fleet of its own, since what is gone stays so."""
    faults, reports = Faults(), []
    for turn in range(ROUNDS // 2):
        reports.append(await lost_device(faults))
        print(f"  fault {turn + 1} of {ROUNDS // 2}", flush=True)
    return reports[-1] | {name: sum(one[name] for one in reports) for name in ("answers", "lost", "other_tokens")}


async def lost_device(faults: Faults) -> dict:
    placement = Placement((Group((0,), Parallel(), ("a",)), Group((1,), Parallel(), ("b",))))
    gone = []

    def groups(placement: Placement) -> list[WorkerGroup]:
        return [group(one.parallel, *one.models) for one in used(placement)]

    kept, lost = groups(placement)
    there = replace(lost, command=lambda seat: ["-m", "benchmarks.gone"] if gone else lost.command(seat))
    async with LocalFleet([kept, there], CONFIG) as fleet:
        deployment = Deployment(fleet, Path(), [], placement, groups, 2)
        fleet.take_over = Spare(deployment, Recent(fleet, 600.0, time.monotonic), lambda line: None).take_over
        streams = await started(fleet, "a", "b")

        def strike() -> None:
            gone.append(True)
            os.kill(fleet.workers[1].pids[0], signal.SIGKILL)

        await faults.hit(fleet, streams, 1, strike, lambda: fleet.ready)
        return await faults.report(streams)


async def lost_nodes() -> dict:
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        return {"skipped": "the extra `cluster` is not installed"}
    quick = {"health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 4}
    os.environ |= {"PYTHONPATH": str(Path(__file__).parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}
    faults, nodes = Faults(), Cluster()
    with contextlib.ExitStack() as stack:
        stack.callback(nodes.shutdown)
        nodes.add_node(**NODE | {"num_cpus": 0}, include_dashboard=False, _system_config=quick)
        for _ in range(2):
            nodes.add_node(**NODE)
        joined = RayCluster(nodes.address)
        stack.callback(joined.close)
        launchers = joined.reserve([Parallel()] * 2, {"CPU": 1.0}, 8)
        groups = [replace(group(Parallel(), "m"), launcher=launcher) for launcher in launchers]
        async with LocalFleet(groups, CONFIG) as fleet:
            streams = await started(fleet, "m")
            for turn in range(ROUNDS // 2):
                await lost_node(nodes, joined, fleet, streams, faults)
                print(f"  fault {turn + 1} of {ROUNDS // 2}", flush=True)
            return await faults.report(streams)


async def lost_node(nodes, joined: RayCluster, fleet: LocalFleet, streams: list[Stream], faults: Faults) -> None:
    import ray

    hosts = ray.util.placement_group_table(joined._group)["bundles_to_node_id"]
    node, joins = next(one for one in nodes.worker_nodes if one.node_id == hosts[0]), []

    def back() -> bool:
        if not joins:
            joins.append(nodes.add_node(**NODE))  # only in the main thread: the front end stands still meanwhile
        return fleet.workers[0].state == "ready"

    await faults.hit(fleet, streams, 0, lambda: nodes.remove_node(node, allow_graceful=False), back)
