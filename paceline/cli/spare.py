"""What a fleet does when a device is gone for good: it moves to a placement for one device fewer, planned ahead.

Which device is lost does not matter to a plan, since all are alike. Groups that are in both placements stay as they
are; the others of the new one take over the waiting requests.
"""

import dataclasses
from collections.abc import Callable

from paceline.cli.deployment import Deployment, complete, used
from paceline.cli.planning import FEWEST
from paceline.core.cluster import Group, Parallel, Placement
from paceline.runtime.recent import Recent


class Spare:
    """Of a fleet that serves a fleet file's models on a placement."""

    def __init__(self, deployment: Deployment, recent: Recent, say: Callable[[str], None]) -> None:
        self.deployment, self.recent, self.say = deployment, recent, say
        self.planned: dict[int, Placement] = {}  # by devices

    async def run(self) -> None:
        """Plans ahead, and again whenever the fleet has moved, for ever."""
        at = self.deployment
        while True:
            at.moved.clear()
            if at.devices > 1:
                await self._plan(at.devices - 1)
            await at.moved.wait()

    async def take_over(self, number: int) -> None:
        """The group with this number of the fleet's is gone for good: moves to one device fewer.

        Raises RuntimeError, ValueError or OSError where that cannot be; the other groups go on.
        """
        at = self.deployment
        async with at.moving:
            if number not in at.groups:
                raise RuntimeError("it was leaving")
            at.devices -= 1
            reason, lost = at.fleet.workers[number].gone, at.groups[number]
            try:
                placement = self.planned.get(at.devices) or without_device(at.placement, lost)
                self.say(f"a device is gone for good: {reason}; moving to {described(placement)}")
                await at.move(placement, number)
            except (RuntimeError, ValueError, OSError) as error:
                del at.groups[number]
                self.say(f"moving failed: {error}; {', '.join(lost.models)} no longer served there")
                raise
        self.say(f"moved: {at.devices} devices serve all models")

    async def _plan(self, devices: int) -> None:
        trace = self.recent.trace()
        try:
            self.planned[devices] = await self.deployment.plan(devices, trace if len(trace) >= FEWEST else None)
            how = described(self.planned[devices])
        except (RuntimeError, ValueError, OSError) as error:
            how = f"its models join other groups ({error})"
        self.say(f"should a device be lost: {how}")


def without_device(placement: Placement, lost: Group) -> Placement:
    """Where there is nothing to plan with: a group that has devices left goes on with those; otherwise those of its
    models that no other group has join the groups with the fewest. Raises RuntimeError where no device is left."""
    others = tuple(group for group in used(placement) if group != lost)
    pipeline, tensor = lost.parallel.pipeline, lost.parallel.tensor
    if lost.parallel.devices > 1:
        shape = Parallel(pipeline - 1, tensor) if pipeline > 1 else Parallel(1, tensor // 2)
        smaller = dataclasses.replace(lost, devices=lost.devices[: shape.devices], parallel=shape)
        return Placement((*others, smaller))
    if not others:
        raise RuntimeError("no device is left")
    return complete(Placement(others), lost.models)


def described(placement: Placement) -> str:
    """The groups in a line: devices, shape, models."""
    groups = (
        f"{','.join(map(str, group.devices))}{group.parallel if group.parallel.devices > 1 else ''}: "
        f"{' '.join(group.models)}"
        for group in used(placement)
    )
    return "; ".join(groups)
