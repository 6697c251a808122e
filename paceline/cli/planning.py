"""What `plan`, `simulate` and `trace` have in common: a fleet file's models, devices and traffic."""

import contextlib
import os
from bisect import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.batching import policies
from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.cli import profile_cache
from paceline.cli.drafting import Drafting, costs
from paceline.cli.fleet_file import ClusterKeys, Entry, FleetFile, check_cache
from paceline.cli.goals import goal_budget
from paceline.cli.profile_file import LiveEntry, ModelEntry, PlanningProfile, ShapeEntry
from paceline.cli.sizes import parse_bytes
from paceline.cli.sources import resolve
from paceline.controller import GroupConfig
from paceline.core.batch import StepShape
from paceline.core.cluster import Cluster, Parallel
from paceline.core.request import SLO
from paceline.engine.config import ModelConfig, draft_config, matrix_bytes
from paceline.engine.encoder_config import EncoderConfig, is_encoder
from paceline.engine.host import device_bytes
from paceline.engine.precision import precision
from paceline.latency.profile import Profile
from paceline.latency.step_time import StepTime, interference, of_width
from paceline.latency.texts import TextTimes
from paceline.placement.problem import Problem
from paceline.placement.tables import ModelTable, ShapeTable, from_layers
from paceline.simulator.drafts import SimulatedDrafts
from paceline.simulator.fleet import SimulatedModel, judge
from paceline.workload import arrivals
from paceline.workload.trace import Trace, load

REQUESTS = 10_000  # that a workload is made of, about, unless a duration is given
STEPWISE_REQUESTS = 2000  # likewise where steps are simulated one by one
MOST_S = 3600.0  # of recorded requests beside those of workloads
MOST_DEVICES = 1 << 16
FEWEST = 50  # requests of late, below which traffic is not known
DEFAULT_POLICY, DEFAULT_WIDTH = GroupConfig().policy, SchedulerConfig().token_budget  # as `serve` has them
OVERHEAD = 640 << 20  # bytes of a worker beside its models, at least: interpreter, libraries, the largest step
PIPELINES = (1, 2, 4, 8, 16)  # stages that models are cut into where nobody measured shapes


@dataclass(frozen=True, slots=True)
class Planned:
    """A fleet to plan or simulate."""

    models: list[SimulatedModel]
    cluster: Cluster
    error: dict[str, float] | None  # of the profile's predictions
    limits: SchedulerConfig = SchedulerConfig()  # of steps
    policy: str = DEFAULT_POLICY

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.models)

    @property
    def goals(self) -> list[SLO]:
        return [model.slo for model in self.models]

    @property
    def kinds(self) -> list[int]:
        """1: of those that go by steps, as they are served."""
        return [int(model.by_steps is not None) for model in self.models]

    @property
    def stepwise(self) -> bool:
        return any(self.kinds)

    def share(self, name: str, parallel: Parallel) -> float | None:
        """Of a step's time that the slowest stage of this shape takes; None where steps or the shape are not known."""
        model = self.models[self.names.index(name)]
        known = model.by_steps is not None and parallel in model.table.shapes
        return model.share(parallel) if known else None

    def problem(self, trace: Trace, rule: str = "finish", cluster: Cluster | None = None) -> Problem:
        """To place the models for this traffic. A stepwise model keeps room for KV of two mean requests at least."""
        slo = [np.inf if model.slo.deadline is None else model.slo.deadline for model in self.models]
        tokens = [_mean(trace.prompts + trace.outputs, trace.models == m) for m in range(len(self.models))]
        kv_bytes = [model.kv_bytes + max(model.draft_kv_bytes.values(), default=0) for model in self.models]
        reserve = [int(2 * count + 32) * size for size, count in zip(kv_bytes, tokens, strict=True)]
        tables = [self._table(m, model, trace) for m, model in enumerate(self.models)]
        return Problem(
            cluster or self.cluster, tables, slo, trace.arrivals, trace.models, rule, reserve=reserve,
            kinds=self.kinds,
            judge=judge(self.models, trace, self.cluster.memory, self.limits, self.policy) if self.stepwise else None,
        )  # fmt: skip

    def _table(self, m: int, model: SimulatedModel, trace: Trace) -> ModelTable:
        """Of a stepwise model, with what a mean request takes of a device as its latency."""
        if model.by_steps is None:
            return model.table
        mine = trace.models == m
        prompt = max(1.0, _mean(trace.prompts, mine))
        output = 0.0 if model.text_time else _mean(trace.outputs, mine)
        step, batch = model.by_steps, 8
        decode = step.seconds(StepShape(batch, batch, batch, int(batch * prompt))) / batch
        seconds = step.seconds(StepShape().add(0, int(prompt), True)) + output * decode
        shapes = {
            parallel: replace(shape, stage_latency={1: (seconds * model.share(parallel),) * parallel.pipeline})
            for parallel, shape in model.table.shapes.items()
        }
        return ModelTable(model.name, shapes)


def planned(
    fleet: FleetFile,
    profile: Path | None,
    threads: int | None = None,
    devices: int | None = None,
    memory: str | int | None = None,
    policy: str = DEFAULT_POLICY,
    token_budget: int | None = None,
    load_bandwidth: str | None = None,
) -> Planned:
    """`threads` of a device, by which profiles measured here were kept; None: its share of this machine's cores.
    `devices`, `memory` and `load_bandwidth`: instead of the fleet file's. `policy` and `token_budget` are those of
    `paceline serve`. Raises ValueError naming what is missing."""
    policies.policy(policy)
    threads = threads or profile_cache.threads_of(fleet.cluster.count)
    file = PlanningProfile.load(profile) if profile else None
    errors: dict[str, float] = dict(file.error or {}) if file else {}
    models = [_in_worker(_model(entry, file, errors, threads, token_budget)) for entry in fleet.models]
    given = {"devices": devices, "memory": memory, "load_bandwidth": load_bandwidth}
    instead = {key: value for key, value in given.items() if value is not None}
    cluster = _cluster(fleet.cluster.model_copy(update=instead))
    limits = SchedulerConfig() if token_budget is None else SchedulerConfig(token_budget)
    return Planned(models, cluster, errors or None, limits, policy)


def _model(
    entry: Entry, file: PlanningProfile | None, errors: dict[str, float], threads: int | None, width: int | None
) -> SimulatedModel:
    """`errors` are of predictions: the largest of the profiles that are used."""
    slo = SLO(entry.slo.ttft, entry.slo.tbt, entry.slo.deadline)
    known = file.models if file else {}
    name = entry.source.removeprefix("profile:")
    if name != entry.source or entry.name in known:
        name = name if name != entry.source else entry.name
        if name not in known:
            there = f"it has {', '.join(known)}" if file else "give --profile FILE"
            raise ValueError(f"source: model {entry.name!r}: no {name!r} in a profile; {there}")
        assert file
        live = known[name].live or LiveEntry()
        found = _as_served(_from_profile(entry, known[name], slo, file.margin(name), width), live)
        return _drafting(found, entry, threads, live)
    path = resolve(entry.source)
    one_shot = is_encoder(path)
    check_cache(entry, one_shot)
    kept = _kept(path, entry.quantization, entry, threads)
    found = None if one_shot else profile_cache.load(kept)
    if found is None and not (one_shot and kept.exists()):
        raise ValueError(
            f"source: {entry.source!r} has no profile on this machine; run `paceline profile {entry.source}"
            f"{_options(entry.quantization, entry)}` first, or give --profile FILE with a model {entry.name!r}"
        )
    error = asdict(found.error) if found else PlanningProfile.load(kept).error or {}
    for name, value in error.items():
        errors[name] = max(errors.get(name, 0.0), value)
    if found is None:
        times, one, margin = text_times(kept)
        step, budget = text_steps(times, width or DEFAULT_WIDTH, margin)
        known_texts = SimulatedModel(_from_texts(entry, path, times, one), slo, budget=budget, text_time=step)
        return _drafting(known_texts, entry, threads, LiveEntry())
    floor = found.roofline
    table = _from_config(entry, path, floor.working_bytes)
    budget = _budget(entry.name, found, slo, width)
    return _drafting(SimulatedModel(table, slo, found.step_time, floor.kv_bytes, budget), entry, threads, LiveEntry())


def _in_worker(model: SimulatedModel) -> SimulatedModel:
    """With what `serve` counts for its worker, where it is simulated as it is served."""
    if model.by_steps is None:
        return model
    shapes = {
        parallel: replace(shape, working_bytes=max(OVERHEAD, shape.working_bytes))
        for parallel, shape in model.table.shapes.items()
    }
    return replace(model, table=replace(model.table, shapes=shapes))


def _budget(name: str, found: Profile, slo: SLO, width: int | None, share: float = 1.0) -> GoalBudget | None:
    """As it is served with: where a `width` was asked for and there is no goal, steps are always that wide."""
    if width is not None and slo.tbt is None:
        return None
    return goal_budget(name, found, width or DEFAULT_WIDTH, slo.tbt, share)


def _kept(path: Path, quantization: str, entry: Entry, threads: int | None) -> Path:
    """Where the profile of the entry's model, or of its draft model, is, or would be: of a device with so many threads
    or of one with all cores."""
    devices = (profile_cache.Device.here(one, kv_cache_dtype=entry.kv_cache_dtype) for one in (threads, None))
    own, whole = (profile_cache.cache_file(path, quantization, device) for device in devices)
    return own if own.exists() else whole


def _options(quantization: str, entry: Entry) -> str:
    """Of a command that measures such a profile."""
    given = {"--quantization": (quantization, "none"), "--kv-cache-dtype": (entry.kv_cache_dtype, "auto")}
    return "".join(f" {name} {value}" for name, (value, default) in given.items() if value != default)


def _drafting(model: SimulatedModel, entry: Entry, threads: int | None, live: LiveEntry) -> SimulatedModel:
    """With its drafter: its memory, and where the workload says how good it is what it brings. Steps of a draft model
    differ from its profile by as much. Raises ValueError."""
    rate, files = entry.workload.acceptance, not entry.source.startswith("profile:")
    if model.step_time is None and rate is not None:
        raise ValueError(f"workload.acceptance: {entry.name!r} is one-shot, and drafts nothing")
    if model.step_time is None or (rate is None and not files):  # nobody will serve a model without files
        return model
    drafting, draft, path = Drafting.of(entry.speculation), None, Path()
    if drafting.drafter.kind == "early_exit":
        if not files:
            raise ValueError(f"speculation.drafter: early_exit needs files, and {entry.name!r} has a profile only")
        path = resolve(entry.source)
    model = _beside(model, drafting, path, entry)
    if rate is None:
        return model
    if drafting.model:
        quantization = drafting.quantized(entry.quantization)
        draft = profile_cache.load(_kept(drafting.model, quantization, entry, threads))
        if draft is None:
            raise ValueError(
                f"speculation.drafter: {drafting.model} has no profile on this machine; run `paceline profile "
                f"{drafting.model}{_options(quantization, entry)}` first"
            )
        chained = {count: seconds * of_width(live.paces, max(1, count)) for count, seconds in draft.chained.items()}
        draft = replace(draft, step_time=draft.step_time.paced(live.paces), chained=chained)
    cost = costs(drafting, path, entry.quantization, model.step_time, draft)
    return replace(model, drafts=SimulatedDrafts(drafting.max_draft_tokens, rate, cost, drafting.adaptive))


def _beside(model: SimulatedModel, drafting: Drafting, path: Path, entry: Entry) -> SimulatedModel:
    """With what the first worker holds to draft by. `path`: of a target that exits early."""
    quantization = drafting.quantized(entry.quantization)
    shapes, kv_bytes = dict(model.table.shapes), dict[Parallel, int]()
    for parallel, shape in model.table.shapes.items():
        if config := draft_config(drafting.drafter, path, drafting.early_exit_layers, parallel.devices):
            held = precision("cpu", "auto", quantization, drafting.model or path, entry.kv_cache_dtype)
            shapes[parallel] = _more_in_front(shape, config.weight_bytes(held.weights) + config.table_bytes)
            kv_bytes[parallel] = config.kv_bytes_per_token(held.kv)
    shares = {parallel: model.share(parallel) for parallel in shapes} if kv_bytes else model.shares
    return replace(model, table=replace(model.table, shapes=shapes), shares=shares, draft_kv_bytes=kv_bytes)


def _as_served(model: SimulatedModel, live: LiveEntry) -> SimulatedModel:
    """With steps as they were in a server."""

    def longer(stages: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(live.pace * seconds + live.overhead_s for seconds in stages)

    shapes = {
        parallel: replace(shape, stage_latency={size: longer(stages) for size, stages in shape.stage_latency.items()})
        for parallel, shape in model.table.shapes.items()
    }
    step, text = (time and time.paced(live.paces) for time in (model.step_time, model.text_time))
    budget, times = model.budget, step or text
    if budget and times:
        budget = replace(budget, linear=times.linear, terms=times.terms)
    return replace(
        model, table=replace(model.table, shapes=shapes), step_time=step, text_time=text, budget=budget,
        overhead_s=live.overhead_s, spread=live.spread,
        interference=interference(live.paces, live.apart),
    )  # fmt: skip


def _more_in_front(shape: ShapeTable, weight: int) -> ShapeTable:
    """With so many bytes more in the first stage."""
    first, *others = shape.stage_weight_bytes
    return replace(shape, stage_weight_bytes=(first + weight, *others))


def _from_profile(model: Entry, entry: ModelEntry, slo: SLO, error: float, width: int | None) -> SimulatedModel:
    """`error`: P95 of the predictions of texts; `width`: the token budget, if one was asked for."""
    name, shapes, shares = model.name, {}, {}
    for index, one in enumerate(entry.parallel):
        where, stages = f"profile: {name}.parallel.{index}", one.pipeline
        if len(one.stage_weight_bytes) != stages:
            raise ValueError(f"{where}.stage_weight_bytes: {len(one.stage_weight_bytes)} for {stages} stages")
        if stages < 1 or one.tensor < 1:
            raise ValueError(f"{where}: pipeline {stages} and tensor {one.tensor} must be at least 1")
        latency = {int(size): tuple(seconds) for size, seconds in (one.stage_latency or {}).items()}
        if any(len(seconds) != stages for seconds in latency.values()) or (latency and 1 not in latency):
            raise ValueError(f"{where}.stage_latency: needs batch size 1, and a time for each of {stages} stages")
        if any(not value >= 0 for seconds in latency.values() for value in seconds):
            raise ValueError(f"{where}.stage_latency: a time is not at least 0")
        if not latency and entry.step_time is None:
            raise ValueError(f"{where}: neither stage_latency (one-shot) nor step_time (autoregressive) is there")
        if one.step_share is not None:
            if not one.step_share > 0:
                raise ValueError(f"{where}.step_share: {one.step_share} is not above 0")
            shares[Parallel(stages, one.tensor)] = one.step_share
        weights = tuple(int(bytes_) for bytes_ in one.stage_weight_bytes)
        times, working = latency or {1: (0.0,) * stages}, int(one.working_bytes)
        shapes[Parallel(stages, one.tensor)] = ShapeTable(weights, times, working)
    if entry.step_time is None:
        table, whole, times = ModelTable(name, shapes), shapes.get(Parallel()), entry.texts()
        if times is None or whole is None or not whole.latency:
            return SimulatedModel(table, slo)
        step, budget = text_steps(times, width or DEFAULT_WIDTH, error)
        shares = {parallel: max(known.stage_latency[1]) / whole.latency for parallel, known in shapes.items()}
        return SimulatedModel(table, slo, budget=budget, shares=shares, text_time=step)
    try:
        step, measured = msgspec.convert(entry.step_time, StepTime), entry.measured(name)
    except msgspec.ValidationError as error:
        raise ValueError(f"profile: {name}: {error}") from error
    if len(step.linear) < 2:
        raise ValueError(f"profile: {name}.step_time.linear: needs times of steps of 0, 1 and more tokens")
    if set(shapes) == {Parallel()} and not shares:  # nothing else was measured: stages of equal layers
        alone, deepest = shapes[Parallel()], max(PIPELINES)
        with contextlib.suppress(ValueError):  # of a profile alone nobody knows the layers
            deepest = ModelConfig.load(resolve(model.source, "*.json")).layers + 2  # embedding and head may be stages
        for count in PIPELINES[1 : bisect(PIPELINES, deepest)]:
            part = -(-alone.stage_weight_bytes[0] // count)
            shapes[Parallel(count)] = ShapeTable((part,) * count, {1: (0.0,) * count}, alone.working_bytes)
    quickest = min(shares.get(one, 1 / one.devices) * one.pipeline for one in shapes)
    budget = measured and _budget(name, measured, slo, width, quickest)
    kv_bytes = int((entry.roofline or {}).get("kv_bytes", 0))
    return SimulatedModel(ModelTable(name, shapes), slo, step, kv_bytes, budget, shares)


def text_times(kept: Path) -> tuple[TextTimes, ShapeEntry, float]:
    """Of an encoder, as it was measured on one device, and the P95 error of what is read from it. Raises ValueError."""
    profile = PlanningProfile.load(kept)
    (model,) = profile.models.values()
    (one,) = model.parallel
    if not one.by_length:
        raise ValueError(f"profile: {kept} has no by_length; delete it and profile again")
    return TextTimes(one.by_length), one, (profile.error or {}).get("p95", 0.0)


def text_steps(times: TextTimes, most: int, error: float) -> tuple[StepTime, GoalBudget]:
    """What steps of whole texts take, of at most so many tokens, and a budget to predict by: what fits into a step
    goes, whatever it takes."""
    step = times.by_tokens(most)
    return step, GoalBudget(step.linear, step.terms, 1, most, most, margin=error)


def _from_texts(entry: Entry, path: Path, times: TextTimes, one: ShapeEntry) -> ModelTable:
    """Of an encoder that was measured on one device: for texts as long as its workload says. Other shapes are cut from
    equal layers."""
    latency, layers = times.at(entry.workload.prompt_tokens), EncoderConfig.load(path).layers
    seconds, weight = sum(latency[1]) / layers, int(sum(one.stage_weight_bytes)) // layers
    working = int(one.working_bytes)
    table = from_layers(entry.name, [seconds] * layers, [weight] * layers, PIPELINES, working=working)
    table.shapes[Parallel()] = ShapeTable((int(sum(one.stage_weight_bytes)),), latency, working)
    return table


def _from_config(entry: Entry, path: Path, working: int) -> ModelTable:
    """Stages by cutting the model's layers: blocks and the head by their weights, of experts those that one token is
    sent to; embeddings are read a row at a time, and cost nothing but memory. `working`: bytes of each device."""
    config, kept = ModelConfig.load(path), precision("cpu", "auto", entry.quantization, path).weights
    head = matrix_bytes(config.vocab_size, config.hidden, kept)
    layers = range(config.layers)
    active = [config.layer_bytes(layer, kept, config.experts_per_token) for layer in layers]
    held = [config.layer_bytes(layer, kept) for layer in layers]
    seconds = [0.0, *map(float, active), float(head)]
    weights = [config.table_bytes, *held, head]
    return from_layers(entry.name, seconds, weights, PIPELINES, working=working)


def _cluster(keys: ClusterKeys) -> Cluster:
    devices = keys.count
    if devices > MOST_DEVICES:
        raise ValueError(f"devices: {devices} are more than the {MOST_DEVICES} that are planned for at most")
    memory = device_bytes(devices) if keys.memory == "auto" else parse_bytes(str(keys.memory))
    rate = keys.load_bandwidth
    bandwidth = rate if isinstance(rate, int) else parse_bytes(rate, "load_bandwidth")
    return Cluster(devices, memory, keys.devices_per_node, bandwidth)


def traffic(fleet: FleetFile, plan: Planned, trace: Path | None, duration: float | None, seed: int) -> Trace:
    """A trace file's requests, or those of the models' workloads. Raises ValueError where there are none."""
    found = load(trace).named(plan.names) if trace else drawn(fleet, plan, duration, seed)
    if not len(found):
        where = "trace" if trace else "duration" if duration else "workload.trace"
        raise ValueError(f"{where}: has no requests, and there is nothing to plan for")
    return found


def drawn(fleet: FleetFile, plan: Planned, duration: float | None, seed: int) -> Trace:
    """Requests of the models' workloads; none, if so short a `duration` has none. By default as long as REQUESTS take,
    at most MOST_S beside recorded ones. Raises ValueError."""
    rates = [entry.workload.rate or 0.0 for entry in fleet.models]
    if duration is None and any(rates):
        wanted = STEPWISE_REQUESTS if plan.stepwise else REQUESTS
        most = MOST_S if any(entry.workload.trace for entry in fleet.models) else np.inf
        duration = min(most, max(10.0, wanted / sum(rates)))
    one_shot = [model.step_time is None for model in plan.models]
    return workloads(fleet, rates, None, duration, seed, one_shot)


def workloads(
    fleet: FleetFile, rates: list[float], cv: float | None, duration: float | None, seed: int, one_shot: list[bool]
) -> Trace:
    """Requests of the models' workloads, at these rates, with their own burstiness or `cv`; recorded ones as they are,
    up to `duration` (None: all). Raises ValueError."""
    streams, lengths = {}, {}
    for index, (entry, rate) in enumerate(zip(fleet.models, rates, strict=True)):
        work = entry.workload
        if work.trace:
            recorded = load(Path(work.trace), entry.name).of_model(entry.name).between(0.0, duration or float("inf"))
            streams[entry.name] = recorded.arrivals
            lengths[entry.name] = recorded.prompts, recorded.outputs
        else:
            times = arrivals.gamma(rate, cv or work.cv, duration or 60.0, 1000 * seed + index)
            output = 0 if one_shot[index] else work.output_tokens
            streams[entry.name] = times
            lengths[entry.name] = np.full(len(times), work.prompt_tokens), np.full(len(times), output)
    if not any(rates) and not any(entry.workload.trace for entry in fleet.models):
        raise ValueError("workload.rate: no model has a rate above 0 or a trace; or give --trace or --total-rate")
    return Trace.of(streams, lambda name, count: lengths[name])


def make_folder(option: str, path: Path) -> None:
    """Before the work that is to be kept in it. Raises ValueError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"{option}: {path}: cannot be written to")


def _mean(values: Any, mine: Any) -> float:
    return float(values[mine].mean()) if mine.any() else 0.0


def check_parent(option: str, path: Path | None) -> None:
    """Raises ValueError where a file could not be written."""
    if path and not path.parent.is_dir():
        raise ValueError(f"{option}: {path.parent} is not a directory")


def check_file(option: str, path: Path | None) -> None:
    """Before the work that is to be kept in it. Raises ValueError where it could not be written."""
    check_parent(option, path)
    if path and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ValueError(f"{option}: {path}: cannot be written to")


def names_of(groups: Sequence[str], most: int = 8) -> str:
    return ", ".join(groups[:most]) + (f" and {len(groups) - most} more" if len(groups) > most else "")
