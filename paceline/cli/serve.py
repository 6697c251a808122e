"""`paceline serve`: loads models, prints what was made of the machine, answers until SIGTERM."""

import asyncio
import gc
import resource
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from paceline.batching import policies
from paceline.batching.config import SchedulerConfig
from paceline.cli import fleet_file
from paceline.cli.accelerators import Accelerator, DType, KVDType, check, gpus
from paceline.cli.deployment import Deployment
from paceline.cli.fleet_file import FleetFile, Quantization
from paceline.cli.groups import (
    Limits,
    devices_of,
    in_turn,
    on_cluster,
    plan,
    quickest_share,
    read_placement,
    worker_groups,
)
from paceline.cli.models import Model, find_models, is_fleet_file, paced
from paceline.cli.placement_file import placement_json
from paceline.cli.planning import Planned, check_file, planned
from paceline.cli.profile_cache import threads_of
from paceline.cli.profile_file import PlanningProfile
from paceline.cli.replan import WINDOW_S, Replanner
from paceline.cli.sizes import parse_bytes
from paceline.cli.sources import builtin_names
from paceline.cli.spare import Spare
from paceline.cli.startup import LoadingProgress, console, summary
from paceline.core.cluster import Group, Placement
from paceline.core.request import SLO
from paceline.engine.host import device_bytes
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.ray_process import RayCluster
from paceline.runtime.recent import Recent
from paceline.server.app import ServedModel, ServerConfig, create_app
from paceline.server.serve import bind
from paceline.server.serve import serve as serve_http

DEFAULTS = FleetConfig()
MOST_FILES = 1 << 16  # open at a time


def serve(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FLEET.yaml | SOURCE ...]", help="builtin:NAME, a directory or a hub id."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Names for clients, in order of SOURCEs.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="PACELINE_API_KEYS", help="Accepted keys; without any, everybody is.")
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a step, decodes first; default: by the model's profile, or 512."),
    ] = None,
    tbt_goal: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds between tokens: no step is to be longer. Profiles the model.")
    ] = None,
    policy: Annotated[str, typer.Option(help="How steps are composed (docs/batching.md).")] = DEFAULTS.policy,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Compose steps before the last one's tokens are known; default: on GPUs, by the policy paceline.",
        ),
    ] = None,
    quantization: Annotated[Quantization, typer.Option(help="Of the weights.")] = "none",
    device: Annotated[Accelerator, typer.Option(help="What computes; cuda: a GPU for each worker.")] = "cpu",
    dtype: Annotated[DType, typer.Option(help="auto: on GPUs bfloat16, on CPUs weights as they are.")] = "auto",
    kv_cache_dtype: Annotated[
        KVDType, typer.Option(help="Of keys and values; auto on CPUs: float32, with int8 or bfloat16 float16.")
    ] = "auto",
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences that run at a time.")] = 256,
    max_waiting: Annotated[int, typer.Option(min=1, help="Sequences that wait; more are answered 503.")] = 1024,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence; default: the model's own.")] = None,
    memory: Annotated[str | None, typer.Option(help="For each worker, such as 6GiB; default: what is left.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks; default: what fits the memory.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each worker; default: the machine's cores.")] = None,
    placement: Annotated[
        Path | None, typer.Option(help="Which models where, by `paceline plan`; default: planned if `cluster` is.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Of a fleet, in its shapes; default: profiles measured here.")
    ] = None,
    replan: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds after which to plan again, for recent traffic, and move.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run the workers on a Ray cluster: HOST:PORT of its head, or auto."),
    ] = None,
    metrics_compat: Annotated[str, typer.Option(help="'vllm' adds vLLM's metric names.")] = "",
    record: Annotated[Path | None, typer.Option(help="Log the scheduler's inputs, to be replayed.")] = None,
) -> None:
    """Serve models on one OpenAI-compatible port.

    Without SOURCE the built-in models. Example: paceline serve builtin:coder --port 8000
    """
    composer = composer_of(policy, tbt_goal, async_scheduling)
    maximum = token_budget or DEFAULTS.token_budget
    sources = sources or [f"builtin:{name}" for name in builtin_names()]
    file = fleet_file.load(Path(sources[0])) if is_fleet_file(sources) else None
    places = read_placement(placement, file) if placement else None
    slo = SLO(tbt=tbt_goal)
    models = find_models(sources, served_model_name or [], quantization, slo, device, dtype, kv_cache_dtype)
    if device != "cpu" and not (ray or devices_of(file, places)) and 0 < len(gpus()) < len(models):
        places = in_turn([model.name for model in models], len(gpus()))
    there = what_is_there(file, places, models, device, ray, threads, memory, profile, replan)
    limits: Limits = {
        "max_batch_tokens": composer.widest(SchedulerConfig(token_budget=maximum, max_batch=max_batch)),
        "max_batch": max_batch,
        "context": context,
        "memory": parse_bytes(there.memory) if there.memory else None,
        "num_blocks": num_blocks,
        "threads": there.threads,
    }
    if replan and (there.devices is None or ray):
        raise ValueError("replan: needs a fleet file with a cluster, or a placement, and goes without --ray")
    check_file("record", record)
    measured = PlanningProfile.load(profile) if profile else None
    ahead = device != "cpu" and policy == DEFAULTS.policy if async_scheduling is None else async_scheduling
    fleet = FleetConfig(maximum, max_batch, max_waiting, policy=policy, async_scheduling=ahead, record=record)
    server = ServerConfig(api_keys=tuple(api_key or ()), metrics_compat=metrics_compat)
    sizes = {
        "--token-budget": max(2, maximum), "--max-batch": max_batch, "--context": context, "--memory": there.memory,
        "--threads": there.threads,
    }  # fmt: skip
    told = {
        "--profile": profile, "--threads": there.threads, "--policy": policy, "--token-budget": token_budget,
        "--memory": limits["memory"] or there.left,
    }  # fmt: skip
    with listener(host, port) as sock:  # from now on: what follows may take minutes
        models = budgeted(models, places, there, measured, maximum, token_budget is not None, words(sizes))
        known, places = placement_for(file, places, there, profile, policy, token_budget)
        groups = partial(
            worker_groups, models, limits=limits, known=known, elsewhere=there.cluster is not None, room=there.left
        )
        started = groups(places)
        if there.cluster and there.threads:
            started = on_cluster(started, there.cluster, there.threads, file, device == "cuda")
        if known:
            told["--memory"] = known.cluster.memory
        options = {
            "file": Path(sources[0]), "options": words(told), "placement": places, "groups": groups,
            "devices": there.size, "cluster": there.cluster,
        }  # fmt: skip
        beside = partial(placed, every=replan, **options) if places and device == "cpu" else None
        more_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(run(models, started, fleet, server, sock, beside))
    if there.cluster:
        there.cluster.close()
    sys.exit(code)


def composer_of(policy: str, tbt_goal: float | None, ahead: bool | None) -> policies.Policy:
    """Raises ValueError for a policy that there is not, or that cannot do what is asked."""
    composer = policies.policy(policy)
    if tbt_goal is not None and not composer.within_goals:
        able = ", ".join(sorted(name for name, one in policies.POLICIES.items() if one.within_goals))
        raise ValueError(f"tbt-goal: policy {policy!r} takes no notice of goals between tokens; {able} do")
    if ahead and policy != DEFAULTS.policy:
        raise ValueError(f"async-scheduling: policy {policy!r} composes no steps ahead; {DEFAULTS.policy} does")
    return composer


@dataclass(frozen=True, slots=True)
class Resources:
    """What there is for the workers, on this machine or on a Ray cluster."""

    cluster: RayCluster | None
    devices: int | None  # that models share; None: a worker each
    size: int | None  # of the fleet's cluster: a placement may leave devices out
    threads: int | None  # of each worker
    memory: str | None  # likewise, if it is given
    left: int | None  # bytes of a device where it is not


def what_is_there(
    file: FleetFile | None, places: Placement | None, models: list[Model], device: Accelerator, ray: str | None,
    threads: int | None, memory: str | None, profile: Path | None, replan: float | None,
) -> Resources:  # fmt: skip
    """Raises ValueError where these models cannot run there as is asked."""
    devices = devices_of(file, places)
    if not ray:
        check(device, devices or len(models))
    check_devices(models, devices, device, places)
    if device != "cpu" and replan:
        raise ValueError("replan: is for CPUs; a GPU has no room for a group beside the one that it replaces")
    if profile and not (file and devices):
        raise ValueError("profile: is to plan with: it goes with a fleet file that has a cluster, or --placement")
    cluster = RayCluster(ray) if ray else None
    if cluster and file and devices and not places and file.cluster.devices == "auto":
        devices = cluster.devices(threads)
    shared = devices or len(models)
    threads = threads or (cluster.cores(shared, device == "cuda") if cluster else threads_of(devices))
    if file and memory is None and file.cluster.memory != "auto":
        memory = str(file.cluster.memory)
    size = file.cluster.devices if file and isinstance(file.cluster.devices, int) else devices
    left = device_bytes(size) if size and not (memory or cluster) and device == "cpu" else None
    return Resources(cluster, devices, size, threads, memory, left)


def check_devices(models: list[Model], devices: int | None, device: Accelerator, places: Placement | None) -> None:
    """Raises ValueError for models that share devices of which plans know nothing."""
    if device != "cpu" and devices and not places:
        raise ValueError("device: plans are made for CPUs; a fleet on GPUs needs --placement")
    for one in models if devices and device == "cpu" else ():
        auto = replace(one, dtype="auto")
        if (one.precision, one.draft_precision) != (auto.precision, auto.draft_precision):
            raise ValueError(
                f"dtype: plans are made for auto, and {one.name!r} would be held in other numbers; where models share "
                "devices only auto is valid for it"
            )


def budgeted(
    models: list[Model], places: Placement | None, there: Resources, given: PlanningProfile | None, maximum: int,
    fixed: bool, options: list[str],
) -> list[Model]:  # fmt: skip
    """The models with their profiles and the budgets that follow (`paced`)."""
    measures = there.devices is not None and places is None and given is None
    share = partial(quickest_share, places) if there.devices else lambda name: 1.0
    return [paced(one, maximum, fixed, there.threads, options, measures, share(one.name), given) for one in models]


def placement_for(
    file: FleetFile | None, places: Placement | None, there: Resources, profile: Path | None, policy: str,
    token_budget: int | None,
) -> tuple[Planned | None, Placement | None]:  # fmt: skip
    """What is planned with, if anything is, and the placement: planned where models share devices and none is given."""
    planning = there.devices is not None and places is None
    if not file or not (planning or profile):
        return None, places
    known = planned(file, profile, there.threads, there.size, there.memory or there.left, policy, token_budget)
    if planning:
        with console.status("planning"):
            places = plan(file, known)
    return known, places


def listener(host: str, port: int) -> socket.socket:
    """`bind`. Raises ValueError."""
    try:
        return bind(host, port)
    except OSError as error:
        raise ValueError(f"host, port: cannot listen on {host}:{port}: {error.strerror}") from error


def more_files() -> None:
    """As many open connections as the system allows, where its default is few: clients are told that a queue is full,
    not cut off, and workers can be started again meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def words(options: dict[str, Any]) -> list[str]:
    """Those that have a value, as a command line."""
    return [str(word) for option in options.items() if option[1] is not None for word in option]


async def run(
    models: list[Model],
    groups: list[WorkerGroup],
    config: FleetConfig,
    server: ServerConfig,
    sock: socket.socket,
    beside: Callable[[LocalFleet, Recent], Coroutine[None, None, None]] | None = None,
) -> int:
    """Starts the fleet, serves until told to stop, drains. Returns the exit code."""
    begin = time.monotonic()
    console.print(f"loading {', '.join(m.name for m in models)} (kernels are compiled once, at the first start)")
    progress = LoadingProgress([m.name for m in models])
    fleet = LocalFleet(groups, config, progress.update)
    try:
        with progress:
            await fleet.start()
        failed = [group for group in fleet.groups if group.state == "failed"]
        for group in failed:
            console.print(f"{group.config.name}: {group.reason}", style="red", highlight=False, soft_wrap=True)
        if len(failed) == len(fleet.groups):
            return 2 if all(group.bad_input for group in failed) else 1
        gc.collect()
        gc.freeze()  # modules and tokenizers stay: collections while serving need not look at them
        recent = Recent(fleet, WINDOW_S, time.monotonic)
        app = create_app(
            fleet, served_models(models, fleet), server, lambda: recent.trace().text(),
            lambda: placement_json(placement_of(fleet, [model.name for model in models])),
        )  # fmt: skip

        def on_started(url: str) -> None:
            summary(fleet, models, config, url, time.monotonic() - begin)

        task = beside and asyncio.create_task(beside(fleet, recent))
        try:
            return 0 if await serve_http(app, fleet, sock, on_started=on_started) else 1
        finally:
            if task:
                task.cancel()
    finally:
        await fleet.stop()


async def placed(fleet: LocalFleet, recent: Recent, every: float | None, **options: Any) -> None:
    """Sees to the placement: another one when a device is lost, and when traffic changes if that is looked at."""

    def say(text: str) -> None:
        with suppress(OSError, SystemExit):  # by which Rich says that nobody reads any more
            console.print(text, highlight=False, soft_wrap=True)

    deployment = Deployment(fleet, **options)
    spare = Spare(deployment, recent, say)
    fleet.take_over = spare.take_over
    replans = [Replanner(deployment, recent, say).run(every)] if every else []
    await asyncio.gather(spare.run(), *replans)


def placement_of(fleet: LocalFleet, names: list[str]) -> Placement:
    """The groups that have these models now; devices are numbered in their order."""
    hosted = [(name, *host) for name in names for host in fleet.hosts(name)]
    shapes, devices = {number: shape for _, number, shape in sorted(hosted, key=lambda one: one[1])}, count()
    return Placement(
        tuple(
            Group(tuple(islice(devices, shape.devices)), shape, tuple(name for name, n, _ in hosted if n == number))
            for number, shape in shapes.items()
        )
    )


def served_models(models: list[Model], fleet: LocalFleet) -> dict[str, ServedModel]:
    """The models as clients see them; those that failed to load too, with a context of 0."""
    served, statuses = {}, {status.name: status for status in fleet.status()}
    for model in models:
        status = statuses[model.name]
        context, vocabulary = (status.info.context, status.info.vocab_size) if status.info else (0, None)
        size = model.encoder.hidden if model.encoder else None
        served[model.name] = ServedModel(
            model.name, model.tokenizer, context, int(time.time()), vocabulary, size, model.drafting.smooth
        )
    return served
