"""Plans again while the fleet serves, for the traffic of late, and moves the fleet where that pays."""

import asyncio
import json
from collections.abc import Callable

from paceline.cli.deployment import Deployment
from paceline.cli.planning import FEWEST
from paceline.runtime.recent import Recent

WINDOW_S = 600.0  # of traffic
GAIN = 0.01  # attainment by which another placement must be better


class Replanner:
    """Of a fleet that serves a fleet file's models on a placement."""

    def __init__(self, deployment: Deployment, recent: Recent, say: Callable[[str], None]) -> None:
        self.deployment, self.recent, self.say = deployment, recent, say

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
        trace, at = self.recent.trace(), self.deployment
        if len(trace) < FEWEST:
            return False
        here = at.placement
        there = await at.plan(at.devices, trace)
        shares = [json.loads(await at.simulate(one, trace))["attainment"] for one in (here, there)]
        if shares[1] < shares[0] + GAIN:
            return False
        async with at.moving:
            if at.placement != here:  # a device was lost meanwhile
                return False
            self.say(f"moving to another placement: {shares[1]:.1%} instead of {shares[0]:.1%} of the traffic of late")
            await at.move(there)
        await at.fleet.left()  # and not before it may move again, unless a device is lost
        return True
