"""A whole fleet in virtual time: a trace through a placement, one-shot models and autoregressive ones.

One-shot requests go through `placement.dispatch`, autoregressive ones through the controller and its batching
scheduler, as they would live. Groups share nothing, so each kind is simulated on its own.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.batching.scheduler import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch
from paceline.core.cluster import Group, Parallel, Placement
from paceline.core.events import Event
from paceline.core.request import SLO, Request
from paceline.latency.step_time import StepTime
from paceline.metrics.outcomes import STATUSES, Outcomes
from paceline.placement.dispatch import enter
from paceline.placement.problem import Judge, Outcome, Problem
from paceline.placement.tables import ModelTable
from paceline.simulator.driver import FixedOutputs, simulate
from paceline.workload.trace import Trace

BLOCK = 16  # tokens
REJECTED = STATUSES.index("rejected")


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model as simulation knows it; `step_time` is of one whole device, None for one-shot models."""

    table: ModelTable
    slo: SLO
    step_time: StepTime | None = None
    kv_bytes: int = 0  # of a token, in all layers

    @property
    def name(self) -> str:
        return self.table.name

    def share(self, parallel: Parallel) -> float:
        """Of a step's time that the slowest stage takes: that of its weights. A guess for shapes nobody measured."""
        known = self.table.shapes
        whole = sum(known[Parallel()].stage_weight_bytes) if Parallel() in known else 0
        part = max(known[parallel].stage_weight_bytes)
        return part / whole if whole else 1 / parallel.devices


@dataclass(eq=False, slots=True)
class FleetRun:
    """Outcomes, and how busy each stage of each group was, in seconds, and when (begin, end, requests or tokens)."""

    outcomes: Outcomes
    busy: list[list[float]]  # by group and stage
    spans: dict[tuple[int, int], list[tuple[float, float, int]]]  # likewise
    duration: float

    def devices(self, placement: Placement) -> list[dict[str, float]]:
        """Of each device its group, stage and utilisation; bubbles: seconds in which it waits while its group works."""
        rows = []
        for g, group in enumerate(placement.groups):
            active = self._active(g, group.parallel.pipeline)
            for at, device in enumerate(group.devices):
                busy = self.busy[g][at // group.parallel.tensor]
                rows.append({
                    "device": device, "group": g, "stage": at // group.parallel.tensor, "busy_s": busy,
                    "utilization": busy / self.duration if self.duration else 0.0,
                    "bubble_s": max(0.0, active - busy),
                })  # fmt: skip
        return sorted(rows, key=lambda row: row["device"])

    def _active(self, g: int, stages: int) -> float:
        """Seconds in which something is in the group's pipeline."""
        total, until = 0.0, 0.0
        firsts, lasts = self.spans.get((g, 0), []), self.spans.get((g, stages - 1), [])
        for (begin, _, _), (_, end, _) in zip(firsts, lasts, strict=True):  # first in, first out
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total


def run(
    models: Sequence[SimulatedModel], placement: Placement, trace: Trace, problem: Problem,
    memory: int = 0, limits: SchedulerConfig | None = None, policy: str = "paceline",
) -> FleetRun:  # fmt: skip
    """Simulates. `trace` is by the names of `models`; `problem` has the one-shot models' tables, in the same order;
    `memory`: bytes of a device. Raises ValueError for a placement that does not fit the models."""
    count = len(trace)
    nan = np.full(count, np.nan)
    outcomes = Outcomes(
        trace.names, trace.models.astype(np.int64), np.full(count, -1, np.int64), trace.arrivals, nan, nan.copy(),
        trace.prompts, np.zeros(count, np.int64), np.full(count, REJECTED, np.uint8),
    )  # fmt: skip
    busy = [[0.0] * group.parallel.pipeline for group in placement.groups]
    result = FleetRun(outcomes, busy, defaultdict(list), 0.0)
    shape, member = problem.arrays(placement)
    stepwise = np.array([model.step_time is not None for model in models])
    for g, group in enumerate(placement.groups):
        if stepwise[member[g]].any() and not stepwise[member[g]].all():
            raise ValueError(f"groups.{g}.models: {', '.join(group.models)}: one-shot and autoregressive models mixed")
    _one_shot(problem, shape, member, ~stepwise, result)
    if stepwise.any():
        _autoregressive(models, placement, trace, result, memory, limits or SchedulerConfig(), policy)
    ends = outcomes.finishes[~np.isnan(outcomes.finishes)]
    result.duration = float(ends.max() - trace.arrivals[0]) if len(ends) else 0.0
    return result


def _one_shot(problem: Problem, shape: np.ndarray, member: np.ndarray, active: np.ndarray, result: FleetRun) -> None:
    out, outcomes = problem.evaluate(shape, member, active, whole=True), result.outcomes
    mine = active[problem.models]
    served = mine & (out.owner >= 0)
    outcomes.groups[mine] = np.where(out.owner < -1, -2 - out.owner, out.owner)[mine]
    outcomes.finishes[mine] = out.finish[mine]
    outcomes.first_tokens[served] = out.finish[served]
    outcomes.statuses[served] = 0
    clocks, delay = np.zeros(out.busy.shape), problem.timing.to_group + problem.timing.to_stage
    for i in np.flatnonzero(served):
        g = int(out.owner[i])
        latency, stages = problem.latency[problem.models[i], shape[g]], len(result.busy[g])
        enter(clocks[g], latency, stages, problem.times[i] + delay)
        for k, (end, seconds) in enumerate(zip(clocks[g, :stages].tolist(), latency[:stages].tolist(), strict=True)):
            result.busy[g][k] += seconds
            result.spans[g, k].append((end - seconds, end, 1))


def _autoregressive(
    models: Sequence[SimulatedModel], placement: Placement, trace: Trace, result: FleetRun, memory: int,
    limits: SchedulerConfig, policy: str,
) -> None:  # fmt: skip
    lanes = [
        (g, models[trace.names.index(name)])
        for g, group in enumerate(placement.groups)
        for name in group.models
        if models[trace.names.index(name)].step_time is not None
    ]
    configs = [
        GroupConfig(
            (model.name,), _limits(model, placement.groups[g], models, trace, memory, limits), policy,
            placement.groups[g].parallel.pipeline, device=g,
        )
        for g, model in lanes
    ]  # fmt: skip
    arrivals = [
        Request(str(i), int(trace.prompts[i]), max(1, int(trace.outputs[i])), float(trace.arrivals[i]),
                trace.names[m], models[m].slo)
        for i, m in enumerate(trace.models.tolist()) if models[m].step_time is not None
    ]  # fmt: skip
    lengths = {request.id: request.max_tokens for request in arrivals}
    shares = [model.share(placement.groups[g].parallel) for g, model in lanes]

    def latency(batch: Batch) -> float:
        step = lanes[batch.group][1].step_time
        assert step is not None
        return step.seconds(batch.shape) * shares[batch.group]

    def watch(batch: Batch, stages: list[tuple[float, float]]) -> None:
        g = lanes[batch.group][0]
        for k, (begin, end) in enumerate(stages):
            result.busy[g][k] += end - begin
            result.spans[g, k].append((begin, end, batch.num_tokens))

    events = simulate(Controller(configs), arrivals, latency, FixedOutputs(lengths), watch=watch)
    _collect(events, lanes, result.outcomes)


def _collect(events: Sequence[Event], lanes: list[tuple[int, SimulatedModel]], outcomes: Outcomes) -> None:
    last: dict[str, float] = {}
    gaps: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event.kind == "accepted":
            outcomes.groups[int(event.request)] = lanes[event.group][0]
        elif event.kind == "rejected":
            outcomes.finishes[int(event.request)] = event.time
        elif event.kind == "tokens":
            for request, tokens in zip(event.detail.requests, event.detail.tokens, strict=True):  # type: ignore[union-attr]
                if tokens:
                    i = int(request)
                    if request in last:
                        gaps[int(outcomes.models[i])].append(event.time - last[request])
                    else:
                        outcomes.first_tokens[i] = event.time
                    last[request] = event.time
                    outcomes.outputs[i] += tokens
        elif event.kind == "finished":
            i = int(event.request)
            outcomes.finishes[i], outcomes.statuses[i] = event.time, 0
    outcomes.gaps = {model: np.array(some) for model, some in gaps.items()}


def _limits(
    model: SimulatedModel, group: Group, models: Sequence[SimulatedModel], trace: Trace, memory: int,
    limits: SchedulerConfig,
) -> SchedulerConfig:  # fmt: skip
    """What memory the weights leave holds as many tokens of each of the group's models, as blocks."""
    if not memory or not model.kv_bytes:
        return limits
    others = [models[trace.names.index(name)] for name in group.models]
    stages = zip(*(other.table.shapes[group.parallel].stage_weight_bytes for other in others), strict=True)
    free = min(memory - sum(stage) for stage in stages)
    blocks = int(free * group.parallel.devices / sum(other.kv_bytes for other in others)) // BLOCK
    if blocks < 1:
        raise ValueError(f"memory: {model.name!r} has no room for its KV cache in {memory} bytes a device")
    return replace(limits, num_blocks=blocks, block_size=BLOCK)


def timeline(run: FleetRun) -> Iterator[tuple[str, list[tuple[float, float, int]]]]:
    """Rows of a picture: which stage, and what it ran when."""
    for (g, k), spans in sorted(run.spans.items()):
        yield f"group {g}, stage {k}", spans


def judge(models: Sequence[SimulatedModel], trace: Trace, memory: int) -> Judge:
    """Simulates autoregressive models for a planner: requests that meet their goals, as `Problem.evaluate` counts."""
    known = {model.name: model for model in models}

    def call(problem: Problem, shape: np.ndarray, member: np.ndarray, active: np.ndarray, out: Outcome) -> None:
        names = [table.name for table in problem.tables]
        places = [trace.names.index(name) for name in names]
        kept = np.isin(trace.models, places)
        index = np.full(len(trace.names), -1, np.int32)
        index[places] = np.arange(len(names))
        some = Trace(
            trace.arrivals[kept], index[trace.models[kept]], trace.prompts[kept], trace.outputs[kept], tuple(names)
        )
        groups, begin = [], 0
        for g, p in enumerate(shape):
            parallel = problem.shapes[p]
            end = begin + parallel.devices
            groups.append(Group(tuple(range(begin, end)), parallel, tuple(names[m] for m in np.flatnonzero(member[g]))))
            begin = end
        mine = [known[name] for name in names]
        try:
            result = run(mine, Placement(tuple(groups)), some, problem, memory)
        except ValueError:
            return  # no room for keys and values: nobody is served
        outcomes = result.outcomes
        met = outcomes.met([model.slo for model in mine])
        out.good += np.bincount(outcomes.models[met], minlength=len(names))
        out.waited += np.bincount(outcomes.models[met], (outcomes.finishes - outcomes.arrivals)[met], len(names))
        out.asked += np.bincount(outcomes.groups[outcomes.groups >= 0], minlength=len(shape))
        for g, stages in enumerate(result.busy):
            out.busy[g, : len(stages)] = stages

    return call
