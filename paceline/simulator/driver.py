"""Pumps the controller in virtual time: a heap of what will happen, an executor made of a latency model."""

import heapq
from collections.abc import Iterable

from paceline.controller import Controller
from paceline.core.batch import Batch, SliceResult, StepResult
from paceline.core.events import Cancel, Complete, Event, Input, Submit
from paceline.core.protocols import LatencyModel, OutputOracle
from paceline.core.record import Turn
from paceline.core.request import Request


def simulate(
    controller: Controller,
    arrivals: Iterable[Request],
    latency: LatencyModel,
    outputs: OutputOracle,
    cancels: Iterable[tuple[float, str]] = (),
) -> list[Event]:
    """Runs until nothing is left to happen; returns all events in order. Any unit of time will do."""
    future: list[tuple[float, int, Input]] = []
    plans: list[tuple[float, Input]] = [(r.arrival, Submit(r)) for r in arrivals]
    plans += [(time, Cancel(request)) for time, request in cancels]
    for serial, (time, item) in enumerate(plans):
        future.append((time, serial, item))
    heapq.heapify(future)
    serial = len(future)
    trace: list[Event] = []
    while future:
        now = future[0][0]
        inputs = []
        while future and future[0][0] == now:
            inputs.append(heapq.heappop(future)[2])
        events, batches = controller.turn(inputs, now)
        trace += events
        for batch in batches:
            done = Complete(batch.group, batch.id, outputs(batch))
            heapq.heappush(future, (now + latency(batch), serial, done))
            serial += 1
    return trace


def replay(controller: Controller, log: Iterable[Turn]) -> list[Event]:
    """Repeats a recorded run: the same inputs at the same times give the same decisions, event for event."""
    trace: list[Event] = []
    for now, inputs in log:
        trace += controller.turn(inputs, now)[0]
    return trace


class FixedOutputs:
    """Plays a model that gives every request a known number of tokens."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self._left = dict(lengths)

    def __call__(self, batch: Batch) -> StepResult:
        return StepResult(tuple(self._slice(s.sequence.id) if s.emits else SliceResult() for s in batch.slices))

    def _slice(self, request: str) -> SliceResult:
        self._left[request] -= 1
        return SliceResult(tokens=1, finish=None if self._left[request] else "length")
