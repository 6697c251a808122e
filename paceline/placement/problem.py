"""What a placement is judged by: requests of the expected traffic that meet their goals, by simulation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.cluster import KV_SHARE, Cluster, Group, Parallel, Placement
from paceline.placement.dispatch import RULES, replay
from paceline.placement.reorder import replay_by_deadline
from paceline.placement.tables import ModelTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Score(NamedTuple):
    """Of placements, better is greater: requests that meet their goals, then how fast, then how few replicas."""

    good: int
    speed: float  # minus the mean seconds of the good ones
    replicas: int  # minus their number


class Timing(NamedTuple):
    """What running takes beside the stages. Seconds."""

    stage_penalty: float = 0.0  # share by which every stage makes all stages slower
    to_group: float = 0.0  # from arrival to the group
    to_stage: float = 0.0  # from there to its first stage
    margin: float = 0.0  # added to the predicted finish
    overhead: float = 0.0  # added to the finish
    single: bool = False  # latencies and goals are rounded to float32


# The artifact's fast simulator, and its event-driven one with all noise at its mean
ALPASERVE = Timing(stage_penalty=0.009, margin=0.011, overhead=0.011, single=True)
ALPASERVE_EVENTS = Timing(to_group=0.005, to_stage=0.005, margin=0.004)


@dataclass(eq=False, slots=True)
class Outcome:
    """What became of the traffic under a placement."""

    requests: Ints  # [models]
    good: Ints  # [models]
    waited: Floats  # [models]: seconds of the good ones
    asked: Ints  # [groups]: requests sent there, rejected ones included
    busy: Floats  # [groups, stages]; of a whole evaluation
    replicas: int
    finish: Floats  # [requests]; empty unless asked for
    owner: Ints  # [requests]: group; -1: nobody has the model; -2 - group: rejected there
    ends: Floats  # [requests, stages]: when it leaves each

    @property
    def bad(self) -> Ints:
        return self.requests - self.good

    @property
    def attainment(self) -> float:
        """Share of the requests that meet their goals; 1 of none."""
        return float(self.good.sum() / self.requests.sum()) if self.requests.sum() else 1.0

    @property
    def score(self) -> Score:
        good = int(self.good.sum())
        return Score(good, -float(self.waited.sum()) / max(1, good), -self.replicas)


Judge = Callable[["Problem", Ints, Bools, Bools, Outcome], None]  # adds up an Outcome


@dataclass(eq=False)
class Problem:
    """Models, devices and traffic, as arrays. Groups are given by `shape` [groups], indices into `shapes`, and `member`
    [groups, models]."""

    cluster: Cluster
    tables: Sequence[ModelTable]
    slo: Sequence[float]  # seconds from arrival to finish, by model
    times: Floats  # arrivals, not falling
    models: NDArray[np.int32]  # of each request
    rule: str = "finish"  # of dispatch
    timing: Timing = Timing()
    reserve: Sequence[int] = ()  # bytes beside the weights, by model, over all devices of its group (its KV cache)
    kinds: Sequence[int] = ()  # of the models: a group has models of one kind; 0: whole requests go, not steps
    judge: "Judge | None" = None  # simulates models that are not one-shot; None: there are none
    numbers: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # of requests as the judge knows them; or all
    shapes: list[Parallel] = field(init=False)
    stages: Ints = field(init=False)  # [shapes]
    devices: Ints = field(init=False)  # [shapes]
    latency: Floats = field(init=False)  # [models, shapes, stages]; infinite where the model does not have the shape
    weight: Floats = field(init=False)  # likewise: bytes on each device
    working: Floats = field(init=False)  # [models, shapes]: bytes of each device for steps, which models take in turn
    evaluations: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"dispatch: {self.rule!r} is not one of {', '.join(RULES)}")
        if self.rule == "deadline" and (self.timing.to_group or self.timing.to_stage or self.cluster.load_bandwidth):
            others = ", ".join(rule for rule in RULES if rule != self.rule)
            raise ValueError(f"dispatch: 'deadline' knows no way to a group and no models that load; {others} do")
        known = {p for table in self.tables for p in table.shapes}
        self.shapes = sorted(
            p for p in known if p.devices <= self.cluster.devices and p.tensor <= self.cluster.devices_per_node
        )
        self.stages = np.array([p.pipeline for p in self.shapes], np.int64)
        self.devices = np.array([p.devices for p in self.shapes], np.int64)
        size = len(self.tables), len(self.shapes), max([*self.stages, 1])
        self.latency, self.weight, self.working = np.full(size, np.inf), np.zeros(size), np.zeros(size[:2])
        for m, table in enumerate(self.tables):
            for p, parallel in enumerate(self.shapes):
                if parallel in table.shapes:
                    shape, k = table.shapes[parallel], parallel.pipeline
                    slower = 1 + self.timing.stage_penalty * k
                    self.latency[m, p, :k] = [seconds * slower for seconds in shape.stage_latency[1]]
                    self.weight[m, p, :k], self.working[m, p] = shape.stage_weight_bytes, shape.working_bytes
                    if self.reserve:
                        self.weight[m, p, :k] += self.reserve[m] / parallel.devices
                    if self.kinds and self.kinds[m]:  # and what `slots_of` leaves beside weights, at least
                        least = np.array(shape.stage_weight_bytes) / (1 - KV_SHARE)
                        self.weight[m, p, :k] = np.maximum(self.weight[m, p, :k], least)
                else:
                    self.weight[m, p] = np.inf
        self.goal = np.array(self.slo, np.float64)
        if self.timing.single:
            self.latency = self.latency.astype(np.float32).astype(np.float64)
            self.goal = self.goal.astype(np.float32).astype(np.float64)
        self.models = np.asarray(self.models, np.int32)  # one type: compiled once
        if not len(self.numbers):
            self.numbers = np.arange(len(self.times))
        self.requests = np.bincount(self.models, minlength=len(self.tables)).astype(np.int64)
        self.kind_of = np.array(self.kinds or [0] * len(self.tables))
        self._everybody = np.ones(len(self.tables), np.bool_)

    def evaluate(self, shape: Ints, member: Bools, active: Bools | None = None, whole: bool = False) -> Outcome:
        """What becomes of the traffic of the active models; `whole`: of every request, too."""
        active = self._everybody if active is None else active
        groups, count = len(shape), len(self.times) * whole
        out = Outcome(
            self.requests * active, np.zeros(len(self.tables), np.int64), np.zeros(len(self.tables)),
            np.zeros(groups, np.int64), np.zeros((groups, self.latency.shape[2])), int(member.sum()),
            np.empty(count), np.full(count, -1), np.full((count, self.latency.shape[2]), np.nan),
        )  # fmt: skip
        self.evaluations += 1
        if self.judge and not whole:
            self.judge(self, shape, member, active, out)
            return out
        if self.rule == "deadline":
            replay_by_deadline(
                self.times, self.models, active, self.goal, self.latency, self.stages, shape, member,
                self.timing.margin, self.timing.overhead, out.good, out.waited, out.asked, out.busy, out.finish,
                out.owner, out.ends,
            )  # fmt: skip
            return out
        steps = (member * self.working.T[shape]).max(1, initial=0.0)  # the largest of each group
        replay(
            self.times, self.models, active, self.goal, self.latency, self.stages, shape, member, RULES[self.rule],
            self.timing[1:5], self.weight, self.cluster.memory - steps,
            float(self.cluster.load_bandwidth),
            out.good, out.waited, out.asked, out.busy, out.finish, out.owner, out.ends,
        )  # fmt: skip
        return out

    def some(self, share: float, windows: int) -> "Problem":
        """The same with that share of the traffic only, in so many windows spread over it."""
        at = np.arange(len(self.times)) * windows / max(1, len(self.times))
        return self.only(at % 1 < share)

    def only(self, mine: Bools) -> "Problem":
        """The same with these requests only."""
        return replace(self, times=self.times[mine], models=self.models[mine], numbers=self.numbers[mine])

    def arrays(self, placement: Placement) -> tuple[Ints, Bools]:
        """Raises ValueError for a shape or a model that there is no table of."""
        names = {table.name: index for index, table in enumerate(self.tables)}
        shape, member = np.zeros(len(placement.groups), np.int64), np.zeros((len(placement.groups), len(names)), bool)
        for g, group in enumerate(placement.groups):
            for name in group.models:
                if name not in names:
                    raise ValueError(f"groups.{g}.models: no model {name!r}; there are {', '.join(names)}")
                if group.parallel not in self.tables[names[name]].shapes:
                    some = " ".join(str(p) for p in sorted(self.tables[names[name]].shapes))
                    raise ValueError(f"groups.{g}.parallel: {name!r} has no shape {group.parallel}; it has {some}")
                member[g, names[name]] = True
            if group.models and group.parallel not in self.shapes:
                raise ValueError(
                    f"groups.{g}.parallel: {group.parallel} needs {group.parallel.tensor} devices in a node; there are "
                    f"{self.cluster.devices_per_node}, and {self.cluster.devices} in all"
                )
            if group.models:
                shape[g] = self.shapes.index(group.parallel)
        return shape, member

    def order(self, shape: Ints) -> list[int]:
        """In which devices are given to groups: wide stages first, then large groups, then as they are."""
        return sorted(range(len(shape)), key=lambda g: (-self.shapes[shape[g]].tensor, -self.devices[shape[g]], g))

    def canonical(self, shape: Ints, member: Bools) -> tuple[Ints, Bools]:
        """The same groups in the order that they have in a placement."""
        order, devices = self.order(shape), assign(self.cluster, self.largest_first(shape))
        assert devices is not None, "infeasible groups"
        places = [order[i] for i in sorted(range(len(order)), key=lambda i: devices[i])]
        return shape[places], member[places]

    def placement(self, shape: Ints, member: Bools) -> Placement:
        """With devices; a stage's are in one node."""
        order = self.order(shape)
        devices = assign(self.cluster, [self.shapes[shape[g]] for g in order])
        assert devices is not None, "infeasible groups"
        groups = [
            Group(one, self.shapes[shape[g]], tuple(self.tables[m].name for m in np.flatnonzero(member[g]).tolist()))
            for g, one in zip(order, devices, strict=True)
        ]
        return Placement(tuple(sorted(groups, key=lambda group: group.devices)))

    def largest_first(self, shape: Ints) -> list[Parallel]:
        """The groups' shapes in the order in which devices are given to them."""
        return [self.shapes[shape[g]] for g in self.order(shape)]

    def free(self, shape: Ints, member: Bools) -> Floats:
        """Bytes left on a device of each stage [groups, stages]; what is no stage has none to give."""
        used = [self.taken(p, mine) for p, mine in zip(shape, member, strict=True)]
        return self.cluster.memory - np.array(used).reshape(len(shape), self.weight.shape[2])

    def taken(self, p: int, mine: Bools) -> Floats:
        """Bytes on a device of each stage [stages] that the models [models] of a group of shape p must have at once.

        That is one at a time where they can come from host memory, so what they leave is what the largest leaves; and
        what the largest step of them takes.
        """
        weight = self.weight[mine, p]
        weight = np.where(np.isfinite(weight), weight, 0.0)
        held = weight.max(0, initial=0.0) if self.cluster.load_bandwidth > 0 else weight.sum(0)
        taken: Floats = held + self.working[mine, p].max(initial=0.0)
        return taken

    def room(self, p: int, mine: Bools) -> Bools:
        """Which models could join a group of shape p that has `mine` [models]: memory, shape and kind allow it."""
        weight, working = self.weight[:, p], self.working[:, p]
        swapped = self.cluster.load_bandwidth > 0
        taken = np.zeros(weight.shape[1]) if swapped else weight[mine].sum(0)
        step = np.maximum(working, working[mine].max(initial=0.0))
        fits: Bools = (weight <= self.cluster.memory - step[:, None] - taken).all(1) & ~mine
        if mine.any():
            fits &= self.kind_of == self.kind_of[mine.argmax()]
        return fits

    def fits(self, shape: Ints, member: Bools) -> bool:
        """Whether there are devices for the groups, models have their groups' shapes, and fit every device's memory."""
        if assign(self.cluster, self.largest_first(shape)) is None:
            return False
        if any(len(set(self.kind_of[row])) > 1 for row in member):
            return False
        has = all(np.isfinite(self.latency[np.flatnonzero(member[g]), p, 0]).all() for g, p in enumerate(shape))
        return bool(has and (self.free(shape, member) >= 0).all())


def assign(cluster: Cluster, shapes: Sequence[Parallel]) -> list[tuple[int, ...]] | None:
    """Devices for groups, in their order: every stage's within one node; None where there is no room."""
    nodes = [
        list(range(begin, min(begin + cluster.devices_per_node, cluster.devices)))
        for begin in range(0, cluster.devices, cluster.devices_per_node)
    ]
    found = []
    for parallel in shapes:
        mine: list[int] = []
        for _ in range(parallel.pipeline):
            node = next((node for node in nodes if len(node) >= parallel.tensor), None)
            if node is None:
                return None
            mine += node[: parallel.tensor]
            del node[: parallel.tensor]
        found.append(tuple(mine))
    return found
