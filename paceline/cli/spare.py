"""What a fleet does when a device is gone for good: it moves to a placement for one device fewer, planned ahead.

Which device is lost does not matter to a plan, since all are alike. Groups that are in both placements stay as they
are; the others of the new one take over the waiting requests.
"""

import dataclasses
from collections.abc import Callable, Sequence

from paceline.cli.deployment import Deployment, complete, used
from paceline.cli.planning import FEWEST
from paceline.core.cluster import Group, Parallel, Placement
from paceline.runtime.recent import Recent

SHOWN = 8  # groups in a line


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
        """The group with this number of the fleet's is gone for good: moves to one device fewer, or to as many fewer as
        groups are lost.

        Raises RuntimeError, ValueError or OSError where that cannot be; the other groups go on.
        """
        at = self.deployment
        async with at.moving:
            if number not in at.groups:
                raise RuntimeError("it was leaving")
            lost, reason = [at.groups[one] for one in at.lost], at.fleet.workers[number].gone
            devices = at.devices - len(lost)
            try:
                placement = self.planned.get(devices) or without_devices(at.placement, lost)
                self.say(f"a device is gone for good: {reason}; moving to {described(placement)}")
                await at.move(placement)
            except (RuntimeError, ValueError, OSError) as error:
                at.devices -= 1
                gone = at.groups.pop(number)
                self.say(f"moving failed: {error}; no longer served there: {' '.join(gone.models)}")
                raise
            at.devices = devices
        self.say("moved: its requests go on")

    async def _plan(self, devices: int) -> None:
        trace = self.recent.trace()
        try:
            self.planned[devices] = await self.deployment.plan(devices, trace if len(trace) >= FEWEST else None)
            how = described(self.planned[devices])
        except (RuntimeError, ValueError, OSError) as error:
            how = f"the rest of its group, or other groups, take over its models ({error})"
        self.say(f"should a device be lost: {how}")


def without_devices(placement: Placement, lost: Sequence[Group]) -> Placement:
    """Where there is nothing to plan with: of groups that have lost a device each, those that have others go on with
    them; models that are in no group then join those with the fewest. Raises RuntimeError where no device is left."""
    groups = [group for group in used(placement) if group not in lost]
    groups += [_smaller(group) for group in lost if group.parallel.devices > 1]
    if not groups:
        raise RuntimeError("no device is left")
    return complete(Placement(tuple(groups)), [model for group in lost for model in group.models])


def _smaller(group: Group) -> Group:
    """A stage fewer, or half the ranks."""
    pipeline, tensor = group.parallel.pipeline, group.parallel.tensor
    shape = Parallel(pipeline - 1, tensor) if pipeline > 1 else Parallel(1, tensor // 2)
    return dataclasses.replace(group, devices=group.devices[: shape.devices], parallel=shape)


def described(placement: Placement) -> str:
    """The groups in a line: devices, shape, models."""
    groups = [
        f"{','.join(map(str, group.devices))}{group.parallel if group.parallel.devices > 1 else ''}: "
        f"{' '.join(group.models)}"
        for group in used(placement)
    ]
    return "; ".join(groups[:SHOWN]) + f"; and {len(groups) - SHOWN} more" * (len(groups) > SHOWN)
