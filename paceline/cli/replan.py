"""Plans again while the fleet serves, for the traffic of late, and moves the fleet where that pays.

Planning runs in processes of their own at a low priority, by the same commands that people use.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.cli.planning import FEWEST, load_placement, save_placement
from paceline.core.cluster import Group, Placement
from paceline.runtime.fleet import LocalFleet, WorkerGroup
from paceline.runtime.recent import Recent

WINDOW_S = 600.0  # of traffic
GAIN = 0.01  # attainment by which another placement must be better


class Replanner:
    """Of a fleet that serves a fleet file's models on a placement."""

    def __init__(
        self,
        fleet: LocalFleet,
        recent: Recent,
        file: Path,
        profile: Path | None,
        placement: Placement,
        groups: Callable[[Placement], list[WorkerGroup]],
        say: Callable[[str], None],
    ) -> None:
        self.fleet, self.file, self.placement, self.groups, self.say = fleet, file, placement, groups, say
        self.options = ["--profile", str(profile)] if profile else []
        self.recent = recent
        self._numbers = dict(enumerate(used(placement)))  # workers of the fleet, and the groups that they are

    async def run(self, every: float) -> None:
        """Looks again every so many seconds, for ever."""
        while True:
            await asyncio.sleep(every)
            try:
                await self.once()
            except (RuntimeError, ValueError, OSError) as error:
                self.say(f"planning again failed: {error}")

    async def once(self) -> bool:
        """Whether the fleet has moved."""
        trace = self.recent.trace()
        if len(trace) < FEWEST:
            return False
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            here, there, asked = (Path(folder) / name for name in ("here.json", "there.json", "trace.csv"))
            trace.save(asked)
            save_placement(here, self.placement)
            given = [str(self.file), "--trace", str(asked), *self.options]
            await _paceline("plan", *given, "--quiet", "--out", str(there))
            shares = [await self._attained(given, path) for path in (here, there)]
            better = load_placement(there)
        if shares[1] < shares[0] + GAIN:
            return False
        self.say(f"moving to another placement: {shares[1]:.1%} instead of {shares[0]:.1%} of the traffic of late")
        await self._move(better)
        return True

    async def _attained(self, given: list[str], placement: Path) -> float:
        out = placement.with_suffix("")
        await _paceline("simulate", *given, "--placement", str(placement), "--out", str(out))
        return float(json.loads((out / "report.json").read_text())["attainment"])

    async def _move(self, placement: Placement) -> None:
        """Groups that are in both stay as they are."""
        leaving, coming = dict(self._numbers), []
        for group in used(placement):
            same = next((number for number, one in leaving.items() if _alike(one, group)), None)
            if same is None:
                coming.append(group)
            else:
                del leaving[same]
        before = len(self.fleet.workers)
        await self.fleet.move(self.groups(Placement(tuple(coming))), list(leaving))
        self._numbers = {n: one for n, one in self._numbers.items() if n not in leaving}
        self._numbers |= dict(enumerate(coming, before))
        self.placement = placement


def used(placement: Placement) -> list[Group]:
    """Groups with models."""
    return [group for group in placement.groups if group.models]


def _alike(one: Group, other: Group) -> bool:
    return (one.parallel, sorted(one.models)) == (other.parallel, sorted(other.models))


async def _paceline(*arguments: str) -> None:
    """Runs a command of ours. Raises RuntimeError with what it said last."""
    process = await asyncio.create_subprocess_exec(
        "nice", "-n", "19", sys.executable, "-m", "paceline.cli.main", *arguments, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        _, said = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(said.decode(errors="replace").strip().rsplit("\n", 1)[-1])
