"""Pumps the controller in wall time on an asyncio loop: inputs gather, one turn takes them all."""

import asyncio
from collections.abc import Callable

from paceline.controller import Controller
from paceline.core.batch import Batch
from paceline.core.events import Event, Input

Recorder = Callable[[float, list[Input]], None]


class Driver:
    """Gives the controller's batches to `execute`; whoever runs them posts `Complete` when they are done.

    Inputs of one instant go into one turn, completions first, exactly as in the simulator.
    """

    def __init__(
        self,
        controller: Controller,
        execute: Callable[[Batch], None],
        notice: Callable[[list[Event]], None],
        clock: Callable[[], float],
        record: Recorder | None = None,
    ) -> None:
        self.controller = controller
        self.turn_s = 0.0  # seconds that the last turn took
        self._execute, self._notice, self._clock, self._record = execute, notice, clock, record
        self._inbox: list[Input] = []
        self._scheduled: asyncio.Handle | None = None

    def post(self, item: Input) -> None:
        """Hands in an input; the turn comes when the loop has run what is ready now."""
        self._inbox.append(item)
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> list[Event]:
        """Takes the turn now, with all inputs posted so far."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        inputs, self._inbox = self._inbox, []
        now = self._clock()
        if self._record:
            self._record(now, inputs)
        events, batches = self.controller.turn(inputs, now)
        self.turn_s = self._clock() - now
        for batch in batches:
            self._execute(batch)
        self._notice(events)
        return events
