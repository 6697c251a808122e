"""Pumps the controller in virtual time: a heap of what will happen, an executor made of a latency model."""

import heapq
from collections.abc import Callable, Iterable

from paceline.controller import Controller
from paceline.core.batch import Batch, StepResult
from paceline.core.events import Advance, Back, Cancel, Complete, Event, Input, Submit
from paceline.core.protocols import LatencyModel, OutputOracle
from paceline.core.record import Turn
from paceline.core.request import Request


def simulate(
    controller: Controller,
    arrivals: Iterable[Request],
    latency: LatencyModel,
    outputs: OutputOracle,
    cancels: Iterable[tuple[float, str]] = (),
    watch: Callable[[Batch, list[tuple[float, float]]], None] = lambda batch, stages: None,
) -> list[Event]:
    """Runs until nothing is left to happen; returns all events in order. Any unit of time will do.

    `latency` is what a batch takes in each stage of its group; `watch` sees every batch with its (begin, end) by stage.
    """
    free: dict[object, list[float]] = {}  # when each stage is; groups that share a device have the same
    clocks = []
    for index, group in enumerate(controller.groups):
        device = group.config.device
        clocks.append(free.setdefault(index if device is None else (device,), [0.0] * group.config.pipeline))
    future: list[tuple[float, int, Input | Batch]] = []  # a batch: it is complete
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
            what = heapq.heappop(future)[2]
            inputs.append(Complete(what.group, what.id, outputs(what)) if isinstance(what, Batch) else what)
        events, batches = controller.turn(inputs, now)
        trace += events
        for event in events:
            if event.kind == "unload":  # what was in flight is lost
                lost = (Advance, Batch)
                future = [one for one in future if not (isinstance(one[2], lost) and one[2].group == event.group)]
                heapq.heapify(future)
            if event.kind == "load":
                heapq.heappush(future, (now + controller.groups[event.group].config.load_s, serial, Back(event.group)))
                serial += 1
        for batch in batches:
            stages = advance(clocks[batch.group], now, latency(batch))
            watch(batch, stages)
            if len(stages) > 1:
                heapq.heappush(future, (stages[0][1], serial, Advance(batch.group, batch.id)))
            heapq.heappush(future, (stages[-1][1], serial + 1, batch))
            serial += 2
    return trace


def advance(clocks: list[float], now: float, latency: float) -> list[tuple[float, float]]:
    """Sends a batch through a pipeline, first in first out: a stage begins when it is free and the one before is done.

    Moves the stages' clocks; returns (begin, end) by stage.
    """
    stages, end = [], now
    for index, free in enumerate(clocks):
        begin = max(end, free)
        end = clocks[index] = begin + latency
        stages.append((begin, end))
    return stages


def replay(controller: Controller, log: Iterable[Turn]) -> list[Event]:
    """Repeats a recorded run: the same inputs at the same times give the same decisions, event for event."""
    trace: list[Event] = []
    for now, inputs in log:
        trace += controller.turn(inputs, now)[0]
    return trace


class FixedOutputs:
    """Plays a model that gives every request a known number of tokens.

    `stay` says how many of a request's drafted tokens do, where some are drafted.
    """

    def __init__(self, lengths: dict[str, int], stay: Callable[[str, int], int] = lambda request, drafted: 0) -> None:
        self.left, self._stay = dict(lengths), stay  # tokens of each that are to come

    def __call__(self, batch: Batch) -> StepResult:
        result = StepResult(bytearray(batch.emits), drafted=bytearray(batch.drafts or ()))
        for index, (request, emits) in enumerate(zip(batch.requests, batch.emits, strict=True)):
            if emits:
                drafted = batch.drafts[index] if batch.drafts else 0
                result.tokens[index] = min(1 + self._stay(request, drafted), self.left[request])
                self.left[request] -= result.tokens[index]
                if not self.left[request]:
                    result.finished.append((index, "length"))
        return result
