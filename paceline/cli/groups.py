"""Which groups of devices are started, with which models: as a placement says, as is planned, or one a model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from paceline.batching.config import SchedulerConfig
from paceline.cli.deployment import complete
from paceline.cli.drafting import lookahead
from paceline.cli.fleet_file import ClusterKeys, FleetFile
from paceline.cli.models import Model
from paceline.cli.placement_file import load_placement
from paceline.cli.planning import OVERHEAD, Planned, traffic
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import KV_SHARE, Group, Parallel, Placement, slots_of
from paceline.core.request import SLO
from paceline.engine.config import ModelConfig, draft_config
from paceline.placement.search import plan as search
from paceline.runtime.fleet import WorkerGroup
from paceline.runtime.group import ServedModel
from paceline.runtime.ray_process import RayCluster

# of local search in planning, where every one simulates steps; else requests to simulate: `paceline plan` takes more
EVALUATIONS, REQUESTS = 30, 10_000_000
BLOCK_SIZE = SchedulerConfig().block_size
Limits = dict[str, int | None]


def devices_of(file: FleetFile | None, placement: Placement | None) -> int | None:
    """How many devices the models share; None: each has a worker of its own, with all cores."""
    if placement:
        return 1 + max(device for group in placement.groups for device in group.devices)
    return file.cluster.count if file and file.shares else None


def read_placement(path: Path, file: FleetFile | None) -> Placement:
    """Raises ValueError for one that is not of this fleet."""
    if file is None:
        raise ValueError("placement: goes with a fleet file, which has the models")
    placement, names = load_placement(path), [entry.name for entry in file.models]
    placed = [model for group in placement.groups for model in group.models]
    for model in placed:
        if model not in names:
            raise ValueError(f"placement: {path}: no model {model!r} in the fleet file, which has {', '.join(names)}")
    for name in names:
        if name not in placed:
            raise ValueError(f"placement: {path}: model {name!r} is in no group")
    most = file.cluster.devices
    if isinstance(most, int) and (used := devices_of(file, placement) or 0) > most:
        raise ValueError(f"placement: {path}: has devices up to {used - 1}, the cluster from 0 to {most - 1}")
    return placement


def in_turn(models: list[str], devices: int) -> Placement:
    """Models one after the other to the next device (round robin): nothing is known of their sizes or their traffic."""
    return Placement(tuple(Group((at,), Parallel(), tuple(models[at::devices])) for at in range(devices)))


def quickest_share(placement: Placement | None, model: str) -> float:
    """Of what a step takes on one device, all stages together, in the quickest shape that the model has (the ranks of a
    stage share it); 0 where it is still to be planned."""
    groups = placement.groups if placement else ()
    return min((1 / group.parallel.tensor for group in groups if model in group.models), default=0.0)


def plan(file: FleetFile, known: Planned) -> Placement:
    """For the traffic that the fleet file expects; without any, one device has all models. Those for which there is no
    memory are loaded by need."""
    if known.cluster.devices == 1 and not any(entry.workload.rate or entry.workload.trace for entry in file.models):
        return Placement((Group((0,), Parallel(), known.names),))
    expected = traffic(file, known, None, None, 0)
    problem = known.problem(expected)
    choice = search(problem, EVALUATIONS * len(expected) if known.stepwise else REQUESTS)
    return complete(problem.placement(choice.shape, choice.member), known.names)


def worker_groups(
    models: Sequence[Model], placement: Placement | None, limits: Limits, known: Planned | None = None,
    elsewhere: bool = False, room: int | None = None,
) -> list[WorkerGroup]:  # fmt: skip
    """Without a placement a worker for each model. `known`: what was planned with, which says what a stage takes;
    `elsewhere`: somebody else gives each worker its GPU; `room`: bytes of a device where no memory is given, which
    only says how many models it holds."""
    if placement is None:
        alone = [() if elsewhere else (number,) for number in range(len(models))]
        return [worker_group([model], limits, devices=mine) for model, mine in zip(models, alone, strict=True)]
    named = {model.name: model for model in models}
    return [
        worker_group(
            [named[name] for name in group.models],
            limits,
            group.parallel,
            known,
            () if elsewhere else group.devices,
            room,
        )
        for group in placement.groups
        if group.models
    ]


def worker_group(
    models: Sequence[Model], limits: Limits, parallel: Parallel = Parallel(), known: Planned | None = None,  # noqa: B008
    devices: Sequence[int] = (), room: int | None = None,
) -> WorkerGroup:  # fmt: skip
    """Models that share the workers of a group, each with an equal part of the memory for KV, to lend.

    Where the memory does not hold all of them, as many as it does are loaded at a time, with fixed parts. Where the
    number of blocks is given, it is fixed, too. `devices`: of each worker, where those are GPUs. Raises ValueError.
    """
    on_gpus = any(model.device != "cpu" for model in models)
    shares = [known.share(model.name, parallel) if known else None for model in models]
    served = [group_model(model, parallel, share) for model, share in zip(models, shares, strict=True)]
    memory = limits["memory"] or room
    slots = held_of([weight_bytes(model, parallel) for model in models], memory) if memory else None
    if slots is not None and on_gpus:
        raise ValueError("memory: does not hold all models of a group, and models are loaded by need on CPUs only")
    if slots is None:
        left = range(len(models), 0, -1)
        lends = len(models) > 1 and limits["num_blocks"] is None
        options = [worker_options(model, limits, 1 / count, lends) for model, count in zip(models, left, strict=True)]
    else:
        assert memory
        sizes = sorted(weight_bytes(model, parallel) for model in models)
        each = (memory - OVERHEAD - sum(sizes[-slots:])) / slots
        blocks = [limits["num_blocks"] or kv_blocks(model, each, parallel) for model in models]
        options = [
            replace(worker_options(model, limits, 1.0), num_blocks=some)
            for model, some in zip(models, blocks, strict=True)
        ]
        served = [dataclasses.replace(one, slots=slots, resident=n < slots) for n, one in enumerate(served)]
    group = GroupOptions(tuple(options), parallel, devices=tuple(devices) if on_gpus else ())
    return WorkerGroup(tuple(served), group.command, parallel)


def held_of(sizes: Sequence[float], memory: int) -> int | None:
    """`slots_of` a worker with this memory. Raises ValueError if it holds not even one."""
    slots = slots_of(sizes, memory - OVERHEAD)
    if slots == 0:
        raise ValueError(
            f"memory: {memory >> 20} MiB for a worker are too few for a model of {int(max(sizes)) >> 20} MiB, "
            f"{OVERHEAD >> 20} MiB beside models and {KV_SHARE:.0%} for keys and values"
        )
    return slots


def weight_bytes(model: Model, parallel: Parallel) -> float:
    """Of the first worker's part, with what it holds to draft by."""
    whole, draft = model.encoder or ModelConfig.load(model.path), _draft(model, parallel)
    beside = draft.weight_bytes(model.draft_precision.weights) + draft.table_bytes if draft else 0
    table = 0 if model.encoder or model.device != "cpu" else whole.table_bytes
    return whole.weight_bytes(model.precision.weights) / parallel.devices + table + beside


def kv_blocks(model: Model, room: float, parallel: Parallel) -> int | None:
    """That so many bytes of each worker hold; None for models without."""
    if model.encoder:
        return None
    per_token = ModelConfig.load(model.path).kv_bytes_per_token(model.precision.kv) / parallel.devices
    if draft := _draft(model, parallel):
        per_token += draft.kv_bytes_per_token(model.draft_precision.kv)
    return max(1, int(room / (per_token * BLOCK_SIZE)))


def _draft(model: Model, parallel: Parallel) -> ModelConfig | None:
    return draft_config(model.drafting.drafter, model.path, model.drafting.early_exit_layers, parallel.devices)


def on_cluster(
    groups: Sequence[WorkerGroup], cluster: RayCluster, threads: int, file: FleetFile | None, gpus: bool = False
) -> list[WorkerGroup]:
    """On nodes of a Ray cluster, with so many cores for each worker, and a GPU. Raises ValueError where there is no
    room."""
    keys, device = file.cluster if file else ClusterKeys(), {"CPU": threads} | ({"GPU": 1} if gpus else {})
    launchers = cluster.reserve([group.parallel for group in groups], device, keys.devices_per_node)
    return [dataclasses.replace(group, launcher=launcher) for group, launcher in zip(groups, launchers, strict=True)]


def worker_options(model: Model, limits: Limits, share: float, lends: bool = False) -> WorkerOptions:
    """A worker refuses a context that its KV cannot hold: the model's own where none was asked for."""
    drafting, context = model.drafting, limits.get("context")
    if context is None and not model.encoder:
        context = ModelConfig.load(model.path).max_context
    return WorkerOptions(
        str(model.path),
        device=model.device,
        dtype="auto" if model.encoder else model.dtype,
        kv_cache_dtype=model.kv_cache_dtype,
        quantization=model.quantization,
        drafter=str(drafting.drafter),
        early_exit_layers=drafting.early_exit_layers,
        draft_quantization=drafting.quantization,
        share=share,
        lends=lends,
        **(limits | {"context": context}),
    )


def group_model(model: Model, parallel: Parallel, share: float | None = None) -> ServedModel:
    """`share`: of a step's time that a stage takes; None: nobody knows, and it is taken to be that of the devices."""
    drafting, share = model.drafting, share or 1 / parallel.devices
    step, slo = model.step_time, model.slo
    if model.encoder:
        slo = SLO(slo.whole)
    return ServedModel(
        model.name,
        model.tokenizer.eos_ids,
        slo,
        model.budget and model.budget.of_share(share),
        predict=(lambda shape: share * step.seconds(shape)) if step else None,
        max_draft_tokens=drafting.max_draft_tokens,
        lookahead=(
            lookahead(drafting, model.path, model.quantization, model.profile, model.draft_profile)
            if drafting.chooses and model.profile
            else None
        ),
        one_shot=model.encoder is not None,
    )
