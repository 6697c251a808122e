"""The requests of late, as planners want them: what was asked for, also what was refused for its goal."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from paceline.core.events import Event
from paceline.runtime.api import StepRecord
from paceline.runtime.fleet import LocalFleet
from paceline.workload.trace import Trace


class Asked(NamedTuple):
    """A request that is done, or was refused (`outputs` -1)."""

    arrival: float
    model: str
    prompt: int  # tokens
    outputs: int  # tokens; 0 of one-shot models


class Recent:
    """An observer of a fleet. Keeps what arrived in the last so many seconds."""

    def __init__(self, fleet: LocalFleet, seconds: float, clock: Callable[[], float]) -> None:
        self.fleet, self.seconds, self.clock = fleet, seconds, clock
        self._open: dict[str, Asked] = {}
        self._rows: deque[Asked] = deque()
        fleet.observers.append(self)

    def on_events(self, events: Seq[Event]) -> None:
        for event in events:
            if event.kind in ("accepted", "rejected"):
                self._note(event)
            elif event.kind in ("finished", "cancelled", "failed"):
                asked = self._open.pop(event.request, None)
                if asked and event.kind == "finished":
                    self._rows.append(asked._replace(outputs=event.tokens) if asked.outputs else asked)
        while self._rows and self._rows[0].arrival < self.clock() - self.seconds:
            self._rows.popleft()

    def on_step(self, record: StepRecord) -> None:
        pass

    def trace(self) -> Trace:
        """From the first that is known; who was refused would have had the mean output of the model."""
        begin = self.clock() - self.seconds
        rows = sorted(row for row in self._rows if row.arrival >= begin)
        done: dict[str, list[int]] = {row.model: [] for row in rows}
        for row in rows:
            if row.outputs >= 0:
                done[row.model].append(row.outputs)
        mean = {model: round(sum(some) / len(some)) if some else 1 for model, some in done.items()}
        places = {model: place for place, model in enumerate(done)}
        begin = rows[0].arrival if rows else 0.0
        outputs = [row.outputs if row.outputs >= 0 else mean[row.model] for row in rows]
        return Trace(
            np.array([row.arrival - begin for row in rows]),
            np.array([places[row.model] for row in rows], np.int32),
            np.array([row.prompt for row in rows], np.int64),
            np.array(outputs, np.int64),
            tuple(places),
        )

    def _note(self, event: Event) -> None:
        seq = self.fleet.sequences.get(event.request)
        if seq is None or event.group < 0:
            return
        model = self.fleet.groups[event.group].config
        asked = Asked(seq.arrival, model.name, seq.num_prompt, 0 if model.one_shot else -1)
        if event.kind == "rejected":
            self._rows.append(asked)
        else:
            self._open[event.request] = asked
