"""A whole fleet in virtual time: a trace through a placement, one-shot models and autoregressive ones.

One-shot requests go through `placement.dispatch`, autoregressive ones through the controller's rules and its batching
scheduler, as they would live; and so do texts whose steps were measured, several in one as in the server. Groups
share nothing, so each kind is simulated on its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.batching.budget import GoalBudget
from paceline.batching.config import WHOLE_PROMPTS, SchedulerConfig
from paceline.controller import GroupConfig
from paceline.core.cluster import Group, Parallel, Placement, slots_of
from paceline.core.request import SLO
from paceline.latency.step_time import NO_INTERFERENCE, Interference, StepTime
from paceline.metrics.outcomes import STATUSES, Outcomes
from paceline.placement.problem import Judge, Outcome, Problem
from paceline.placement.tables import ModelTable
from paceline.simulator.drafts import SimulatedDrafts
from paceline.simulator.steps import run as run_steps
from paceline.simulator.world import Requests, SimulatedGroup
from paceline.workload.trace import Trace

Floats = NDArray[np.float64]
BLOCK = 16  # tokens
REJECTED = STATUSES.index("rejected")


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model as simulation knows it; `step_time` is of one whole device, None for one-shot models. `text_time` is of
    those, by the tokens of a step's texts; with it they go through steps as models that generate do, and share groups
    with them."""

    table: ModelTable
    slo: SLO
    step_time: StepTime | None = None
    kv_bytes: int = 0  # of a token, in all layers
    budget: GoalBudget | None = None  # as it is served with on one whole device; None: always the token budget
    shares: dict[Parallel, float] = field(default_factory=dict)  # of a step's time that the slowest stage takes
    text_time: StepTime | None = None
    drafts: SimulatedDrafts | None = None  # None: it has no drafter, or nobody knows how good that is
    draft_kv_bytes: dict[Parallel, int] = field(default_factory=dict)  # of a token, in a draft model by the first stage
    overhead_s: float = 0.0  # of a step, beside the engine
    spread: Sequence[float] = ()  # of what steps take in the engine over what steps like them take on average
    interference: Interference = NO_INTERFERENCE

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def first_token(self) -> float | None:
        """The goal for the first token."""
        return self.slo.whole if self.text_time else self.slo.ttft

    @property
    def by_steps(self) -> StepTime | None:
        """What its steps take, where it is simulated by steps."""
        return self.step_time or self.text_time

    def share(self, parallel: Parallel) -> float:
        """Of a step's time that the slowest stage takes; of shapes that nobody measured a guess, by its weights."""
        if parallel in self.shares:
            return self.shares[parallel]
        known = self.table.shapes
        whole = sum(known[Parallel()].stage_weight_bytes) if Parallel() in known else 0
        part = max(known[parallel].stage_weight_bytes)
        return part / whole if whole else 1 / parallel.devices


@dataclass(eq=False, slots=True)
class FleetRun:
    """Outcomes, and how busy each stage of each group was, in seconds, and when (begin, end, requests or tokens)."""

    outcomes: Outcomes
    busy: list[list[float]]  # by group and stage
    spans: dict[tuple[int, int], tuple[Floats, Floats, NDArray[Any]]]  # likewise; columns over requests or steps
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
        if (g, 0) not in self.spans:
            return 0.0
        begins, ends = self.spans[g, 0][0], self.spans[g, stages - 1][1]  # first in, first out
        return float((ends - np.maximum(begins, np.append(-np.inf, ends[:-1]))).sum())

    def spend(self, g: int, k: int, ends: Floats, seconds: Floats, sizes: NDArray[Any]) -> None:
        """A stage ran these, until then, for so long."""
        self.busy[g][k] = float(seconds.sum())
        self.spans[g, k] = ends - seconds, ends, sizes


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
    result = FleetRun(outcomes, busy, {}, 0.0)
    shape, member = problem.arrays(placement)
    stepwise = np.array([model.by_steps is not None for model in models])
    for g, group in enumerate(placement.groups):
        if stepwise[member[g]].any() and not stepwise[member[g]].all():
            raise ValueError(
                f"groups.{g}.models: {', '.join(group.models)}: one-shot models share groups with autoregressive ones "
                "only where steps of their texts were measured (`paceline profile`)"
            )
    if not stepwise.all():
        _one_shot(problem, shape, member, ~stepwise, result)
    if stepwise.any():
        bandwidth = problem.cluster.load_bandwidth
        _by_steps(models, placement, trace, result, memory, bandwidth, limits or SchedulerConfig(), policy)
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
    owner = np.where(served, out.owner, -1)
    for g in set(owner[served].tolist()):
        here = np.flatnonzero(owner == g)
        here = here[np.argsort(out.ends[here, 0], kind="stable")]  # who waited may have been passed
        for k in range(len(result.busy[g])):
            took = problem.latency[problem.models[here], shape[g], k]
            result.spend(g, k, out.ends[here, k], took, np.ones(len(here)))


def _by_steps(
    models: Sequence[SimulatedModel], placement: Placement, trace: Trace, result: FleetRun, memory: int,
    bandwidth: float, limits: SchedulerConfig, policy: str,
) -> None:  # fmt: skip
    groups, lanes = _groups(models, placement, trace, memory, bandwidth, limits, policy)
    mine = np.array([model.by_steps is not None for model in models])[trace.models]
    whole = np.array([model.text_time is not None for model in models])
    goals = [(model.first_token, model.slo.tbt) for model in models]
    ttft, tbt = np.array(goals, np.float64).T  # NaN is no goal
    of = trace.models[mine].astype(np.int64)
    requests = Requests(
        trace.arrivals[mine], of, np.maximum(1, trace.prompts[mine]).astype(np.int64),
        np.where(whole[of], 1, np.maximum(1, trace.outputs[mine])).astype(np.int64),
        np.nan_to_num(ttft, nan=np.inf)[of], np.nan_to_num(tbt, nan=np.inf)[of],
    )  # fmt: skip
    (served, ran), outcomes = run_steps(groups, trace.names, requests), result.outcomes
    taken = served.owner >= 0
    assert not np.isnan(served.finish).any()
    outcomes.groups[mine] = np.where(taken, np.array([*lanes, -1])[served.owner], -1)
    outcomes.first_tokens[mine], outcomes.finishes[mine] = served.first, served.finish
    outcomes.outputs[mine] = np.where(whole[of], 0, served.tokens)
    outcomes.statuses[mine] = np.where(taken, 0, REJECTED)
    room = np.cumsum(np.bincount(of, requests.outputs, len(models)).astype(np.int64))
    begins = [0, *room[:-1].tolist()]
    ends = enumerate(served.gap_ends.tolist())
    outcomes.gaps = {m: served.gaps[begins[m] : end] for m, end in ends if end > begins[m]}
    first = ran.took + ran.drafting if len(ran.drafting) else ran.took
    columns: list[NDArray[Any]] = [ran.left, ran.took, first, ran.sizes[:, 1]]
    bounds = (np.arange(len(result.busy) + 1) > min(lanes, default=0)) * len(first)
    if len(set(lanes)) > 1:
        where = np.array(lanes, np.int16)[ran.sizes[:, 0]]  # small numbers are sorted in one pass
        order = np.argsort(where, kind="stable")
        columns, bounds = [column[order] for column in columns], np.bincount(where + 1, minlength=len(bounds)).cumsum()
    for g, stages in enumerate(result.busy):
        left, took, first, sizes = (column[bounds[g] : bounds[g + 1]] for column in columns)
        for k in range(len(stages) if len(took) else 0):
            result.spend(g, k, left[:, k], took if k else first, sizes)


def _groups(
    models: Sequence[SimulatedModel], placement: Placement, trace: Trace, memory: int, bandwidth: float,
    limits: SchedulerConfig, policy: str,
) -> tuple[list[SimulatedGroup], list[int]]:  # fmt: skip
    """A group for each model of a placement's groups, and which of those it is of."""
    groups, lanes = list[SimulatedGroup](), list[int]()
    for g, group in enumerate(placement.groups):
        hosted = [models[trace.names.index(name)] for name in group.models]
        if not any(model.by_steps for model in hosted):
            continue
        shapes = [model.table.shapes[group.parallel] for model in hosted]
        sizes = [max(shape.stage_weight_bytes) for shape in shapes]
        left = memory and max(1, memory - max(shape.working_bytes for shape in shapes))
        slots = slots_of(sizes, left) if memory and bandwidth else None
        if slots == 0:
            raise ValueError(f"groups.{g}.models: {memory} bytes a device are too few for {max(sizes)}, steps and KV")
        for place, model in enumerate(hosted):
            assert model.by_steps
            limit, rule = _limits(model, group, hosted, slots, left, limits), policy
            share, token = model.share(group.parallel), model.kv_bytes + model.draft_kv_bytes.get(group.parallel, 0)
            if model.text_time:
                limit, rule = limit.of_texts(), WHOLE_PROMPTS
            config = GroupConfig(
                (model.name,), limit, rule, group.parallel.pipeline, admission=True, device=g,
                budget=model.budget and model.budget.of_share(share), slots=slots,
                resident=slots is None or place < slots, load_s=sizes[place] / bandwidth if slots else 0.0,
                block_bytes=(token * BLOCK,) if limit.most_blocks else (),
            )  # fmt: skip
            own = model.drafts, model.overhead_s, model.spread, model.interference
            groups.append(SimulatedGroup(config, model.by_steps, share, *own))
            lanes.append(g)
    return groups, lanes


def _limits(
    model: SimulatedModel, group: Group, here: Sequence[SimulatedModel], slots: int | None, memory: int,
    limits: SchedulerConfig,
) -> SchedulerConfig:  # fmt: skip
    """Of what the weights leave of a device's `memory`, bytes without those for steps, each of the models here has an
    equal part, and lends it, as live on CPUs; or a fixed one, where so many `slots` of them are loaded at a time."""
    if not memory or not model.kv_bytes:
        return limits
    stages = zip(*(one.table.shapes[group.parallel].stage_weight_bytes for one in here), strict=True)
    rooms = [memory - sum(sorted(stage)[-slots:] if slots else stage) for stage in stages]
    token, draft = model.kv_bytes / group.parallel.devices, model.draft_kv_bytes.get(group.parallel, 0)
    most = int(min(rooms[0] / (token + draft), *(room / token for room in rooms))) // BLOCK
    sharing = sum(one.kv_bytes > 0 for one in here) if slots is None else slots
    if most < sharing:
        raise ValueError(
            f"memory: {model.name!r} has no room for its KV cache in the {memory} bytes that steps leave of a device"
        )
    lent = most if slots is None and sharing > 1 else None
    return replace(limits, num_blocks=most // sharing, block_size=BLOCK, most_blocks=lent)


def timeline(run: FleetRun) -> Iterator[tuple[str, Floats]]:
    """Rows of a picture: which stage, and what it ran when: [requests or steps, 3]."""
    for (g, k), columns in sorted(run.spans.items()):
        yield f"group {g}, stage {k}", np.column_stack(columns)


def judge(
    models: Sequence[SimulatedModel], trace: Trace, memory: int, limits: SchedulerConfig, policy: str
) -> Judge:  # fmt: skip
    """Simulates models by their steps for a planner: requests that meet their goals, as `Problem.evaluate` counts."""
    known = {model.name: model for model in models}

    def call(problem: Problem, shape: np.ndarray, member: np.ndarray, active: np.ndarray, out: Outcome) -> None:
        names = [table.name for table in problem.tables]
        prompts, outputs = trace.prompts[problem.numbers], trace.outputs[problem.numbers]
        some = Trace(problem.times, problem.models, prompts, outputs, tuple(names))
        groups, begin = [], 0
        for g, p in enumerate(shape):
            parallel = problem.shapes[p]
            end = begin + parallel.devices
            groups.append(Group(tuple(range(begin, end)), parallel, tuple(names[m] for m in np.flatnonzero(member[g]))))
            begin = end
        mine = [known[name] for name in names]
        try:
            result = run(mine, Placement(tuple(groups)), some, problem, memory, limits, policy)
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
