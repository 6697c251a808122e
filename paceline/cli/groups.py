"""Which groups of devices are started, with which models: as a placement says, as is planned, or one a model."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cli.drafting import lookahead
from paceline.cli.fleet_file import ClusterKeys, FleetFile
from paceline.cli.models import Model
from paceline.cli.planning import load_placement, planned, traffic
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Parallel, Placement
from paceline.placement.search import plan as search
from paceline.runtime.fleet import WorkerGroup
from paceline.runtime.group import ServedModel
from paceline.runtime.ray_process import RayCluster

EVALUATIONS = 30  # of local search in planning, where every one simulates steps: `paceline plan` takes more
Limits = dict[str, int | None]


def devices_of(file: FleetFile | None, placement: Placement | None) -> int | None:
    """How many devices the models share; None: each has a worker of its own, with all cores."""
    if placement:
        return 1 + max(device for group in placement.groups for device in group.devices)
    return file.cluster.devices if file and isinstance(file.cluster.devices, int) else None


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


def plan(file: FleetFile, profile: Path | None, threads: int) -> Placement:
    """For the traffic that the fleet file expects. Raises ValueError for models that nobody has measured."""
    known = planned(file, profile, threads)
    expected = traffic(file, known, None, None, 0)
    problem = known.problem(expected)
    effort = {"effort": EVALUATIONS * len(expected)} if known.stepwise else {}
    choice = search(problem, **effort)
    left_out = [name for name, placed in zip(known.names, choice.member.any(0), strict=True) if not placed]
    if left_out:
        raise ValueError(f"cluster.memory: is not enough for {', '.join(left_out)}")
    return problem.placement(choice.shape, choice.member)


def threads_of(devices: int | None) -> int | None:
    """Of each worker, where workers share the machine's cores."""
    return devices and max(1, len(os.sched_getaffinity(0)) // devices)


def worker_groups(models: Sequence[Model], placement: Placement | None, limits: Limits) -> list[WorkerGroup]:
    if placement is None:
        return [worker_group([model], limits) for model in models]
    named = {model.name: model for model in models}
    return [
        worker_group([named[name] for name in group.models], limits, group.parallel)
        for group in placement.groups
        if group.models
    ]


def worker_group(
    models: Sequence[Model], limits: Limits, parallel: Parallel = Parallel()  # noqa: B008
) -> WorkerGroup:
    """Models that share the workers of a group, and what each leaves of the memory for KV: an equal part."""
    left = range(len(models), 0, -1)
    options = (worker_options(model, limits, 1 / count) for model, count in zip(models, left, strict=True))
    command = GroupOptions(tuple(options), parallel).command
    return WorkerGroup(tuple(group_model(model, parallel) for model in models), command, parallel)


def on_cluster(
    groups: Sequence[WorkerGroup], cluster: RayCluster, threads: int, file: FleetFile | None
) -> list[WorkerGroup]:
    """On nodes of a Ray cluster, with so many cores for each worker. Raises ValueError where there is no room."""
    keys = file.cluster if file else ClusterKeys()
    launchers = cluster.reserve([group.parallel for group in groups], {"CPU": threads}, keys.devices_per_node)
    return [replace(group, launcher=launcher) for group, launcher in zip(groups, launchers, strict=True)]


def worker_options(model: Model, limits: Limits, share: float) -> WorkerOptions:
    drafting = model.drafting
    return WorkerOptions(
        str(model.path),
        quantization=model.quantization,
        drafter=str(drafting.drafter),
        early_exit_layers=drafting.early_exit_layers,
        share=share,
        **limits,
    )


def group_model(model: Model, parallel: Parallel) -> ServedModel:
    """Of a step's time a stage is taken to have its share of the devices: nobody has measured shapes."""
    drafting, share = model.drafting, 1 / parallel.devices
    step = model.profile.step_time if model.profile else None
    return ServedModel(
        model.name,
        model.tokenizer.eos_ids,
        model.slo,
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
