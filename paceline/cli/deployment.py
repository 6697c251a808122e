"""The placement that a fleet serves on: who plans for it, and how the fleet comes onto another one.

Planning runs in processes of their own at a low priority, by the same commands that people use.
"""

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

from paceline.cli.placement_file import load_placement, save_placement
from paceline.core.cluster import Group, Placement
from paceline.python import PYTHON, packages
from paceline.runtime.fleet import LocalFleet, WorkerGroup
from paceline.runtime.ray_process import RayCluster, RayLauncher
from paceline.workload.trace import Trace


class Deployment:
    """A fleet that serves a fleet file's models on a placement."""

    def __init__(
        self,
        fleet: LocalFleet,
        file: Path,
        options: Sequence[str],
        placement: Placement,
        groups: Callable[[Placement], list[WorkerGroup]],
        devices: int,
        cluster: RayCluster | None = None,
    ) -> None:
        """`options`: words for `plan` and `simulate`, by which they know what the fleet knows; `groups`: how a
        placement's groups are started; `cluster`: of nodes that have no other devices than those in use."""
        self.fleet, self.file, self.devices = fleet, file, devices
        self.groups = dict(enumerate(used(placement)))  # by the fleet's numbers of their workers
        self.models = [model for group in placement.groups for model in group.models]
        self.moving = asyncio.Lock()  # held by who looks at the groups to move them
        self.moved = asyncio.Event()
        self._options, self._start, self._cluster = options, groups, cluster

    @property
    def placement(self) -> Placement:
        return Placement(tuple(self.groups.values()))

    async def plan(self, devices: int, trace: Trace | None) -> Placement:
        """For so many devices, and this traffic or that which the fleet file expects. Raises RuntimeError."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            out = Path(folder) / "placement.json"
            by_need = any(one.config.slots is not None for one in self.fleet.groups)
            loading = self._loading() if by_need else []  # costs time, and brings nothing where all models stay
            await self._run("plan", trace, folder, "--quiet", "--devices", str(devices), "--out", str(out), *loading)
            return complete(load_placement(out), self.models)

    async def simulate(self, placement: Placement, trace: Trace) -> bytes:
        """The report as JSON. Raises RuntimeError."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            path, out = Path(folder) / "placement.json", Path(folder) / "out"
            save_placement(path, placement)
            await self._run(
                "simulate", trace, folder, "--placement", str(path), "--out", str(out), *self._loading()
            )  # fmt: skip
            return (out / "report.json").read_bytes()

    def _loading(self) -> list[str]:
        """How fast models come, as an option: as they did here, room for KV included. What a device does not hold is
        loaded by need whatever the fleet file says of that."""
        loads = [
            (one.info.weight_bytes / one.workers.parallel.devices, one.load_s)
            for one in self.fleet.groups
            if one.info and one.load_s
        ]
        size, seconds = map(sum, zip(*loads, strict=True)) if loads else (0.0, 0.0)
        return ["--load-bandwidth", str(int(size / seconds) or 1)] if seconds else []

    @property
    def lost(self) -> list[int]:
        """Groups that are gone, or have no room any more."""
        workers = self.fleet.workers
        return [number for number in self.groups if workers[number].gone or workers[number].launcher.lost]

    async def move(self, placement: Placement) -> None:
        """Groups that are in both placements stay as they are, but not lost ones.

        Raises RuntimeError, ValueError or OSError where new groups cannot be started; then nothing changes.
        """
        leaving, staying, coming, lost = dict(self.groups), dict[int, Group](), list[Group](), self.lost
        for group in used(placement):
            alike = (number for number, one in leaving.items() if number not in lost and _alike(one, group))
            if (same := next(alike, None)) is None:
                coming.append(group)
            else:
                del leaving[same]
                staying[same] = group
        groups = self._start(Placement(tuple(coming)))
        if self._cluster:
            order = sorted(leaving, key=lost.__contains__)
            old = [cast(RayLauncher, self.fleet.workers[number].launcher) for number in order]
            launchers = self._cluster.instead([group.parallel for group in groups], old)
            pairs = zip(groups, launchers, strict=True)
            groups = [dataclasses.replace(group, launcher=launcher) for group, launcher in pairs]
        before = len(self.fleet.workers)
        await self.fleet.move(groups, list(leaving), room=self._cluster is None)
        self.groups = staying | dict(enumerate(coming, before))
        self.moved.set()

    async def _run(self, command: str, trace: Trace | None, folder: str, *options: str) -> None:
        if trace:
            asked = Path(folder) / "trace.csv"
            trace.save(asked)
            options = (*options, "--trace", str(asked))
        await _paceline(command, str(self.file), *self._options, *options)


def used(placement: Placement) -> list[Group]:
    """Groups with models."""
    return [group for group in placement.groups if group.models]


def complete(placement: Placement, models: Iterable[str]) -> Placement:
    """Models that are in no group share what the group with the fewest has."""
    groups = list(placement.groups)
    for model in dict.fromkeys(models):
        if not any(model in group.models for group in groups):
            least = min(range(len(groups)), key=lambda g: len(groups[g].models))
            groups[least] = dataclasses.replace(groups[least], models=(*groups[least].models, model))
    return Placement(tuple(groups))


def _alike(one: Group, other: Group) -> bool:
    return (one.parallel, sorted(one.models)) == (other.parallel, sorted(other.models))


async def _paceline(*arguments: str) -> None:
    """Runs a command of ours. Raises RuntimeError with what it said last."""
    process = await asyncio.create_subprocess_exec(
        "nice", "-n", "19", *PYTHON, "-m", "paceline.cli.main", *arguments, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=os.environ | packages(),
    )  # fmt: skip
    try:
        _, said = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise RuntimeError(said.decode(errors="replace").strip().rsplit("\n", 1)[-1])
