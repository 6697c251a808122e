"""`paceline serve`: loads models, prints what was made of the machine, answers until SIGTERM."""

import asyncio
import gc
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.batching import policies
from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.cli import fleet_file, profile_cache
from paceline.cli.drafting import Drafting, lookahead
from paceline.cli.fleet_file import Quantization
from paceline.cli.profile import goal_budget, measured_here
from paceline.cli.sizes import parse_bytes
from paceline.cli.sources import builtin_names, default_name, resolve
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Parallel
from paceline.core.request import NO_SLO, SLO
from paceline.engine.config import ModelConfig
from paceline.engine.encoder_config import EncoderConfig, is_encoder
from paceline.engine.tokenizer import Tokenizer
from paceline.latency.profile import Profile
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel as GroupModel
from paceline.server.app import ServedModel, ServerConfig, create_app
from paceline.server.serve import bind
from paceline.server.serve import serve as serve_http

console = Console(stderr=True)


DEFAULTS = FleetConfig()


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    path: Path
    tokenizer: Tokenizer
    quantization: Quantization = "none"
    slo: SLO = NO_SLO
    profile: Profile | None = None
    budget: GoalBudget | None = None  # None: as wide as the token budget, always
    drafting: Drafting = Drafting()
    draft_profile: Profile | None = None
    encoder: EncoderConfig | None = None  # None: it generates


def serve(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FLEET.yaml | SOURCE ...]", help="builtin:NAME, a directory or a hub id."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Names for clients, in order.")] = None,
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
    quantization: Annotated[Quantization, typer.Option(help="Of the weights.")] = "none",
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences that run at a time.")] = 256,
    max_waiting: Annotated[int, typer.Option(min=1, help="Sequences that wait; more are answered 503.")] = 1024,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence; default: the model's own.")] = None,
    memory: Annotated[str | None, typer.Option(help="For each worker, such as 6GiB; default: what is left.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks; default: what fits the memory.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each worker; default: the machine's cores.")] = None,
    metrics_compat: Annotated[str, typer.Option(help="'vllm' adds vLLM's metric names.")] = "",
    record: Annotated[Path | None, typer.Option(help="Log the scheduler's inputs, to be replayed.")] = None,
) -> None:
    """Serve models on one OpenAI-compatible port.

    Without SOURCE the built-in models. Example: paceline serve builtin:coder --port 8000
    """
    composer = policies.policy(policy)
    maximum = token_budget or DEFAULTS.token_budget
    slo = SLO(tbt=tbt_goal)
    models = find_models(
        sources or [f"builtin:{name}" for name in builtin_names()], served_model_name or [], quantization, slo
    )
    limits: dict[str, int | None] = {
        "max_batch_tokens": composer.widest(SchedulerConfig(token_budget=maximum, max_batch=max_batch)),
        "max_batch": max_batch,
        "context": context,
        "memory": parse_bytes(memory) if memory else None,
        "num_blocks": num_blocks,
        "threads": threads,
    }
    if record and not record.parent.is_dir():
        raise ValueError(f"record: {record.parent} is not a directory")
    options = {
        "--token-budget": max(2, maximum), "--max-batch": max_batch, "--context": context, "--memory": memory,
        "--threads": threads,
    }  # fmt: skip
    given = [str(word) for option in options.items() if option[1] is not None for word in option]
    models = [paced(model, maximum, token_budget is not None, threads, given) for model in models]
    fleet = FleetConfig(maximum, max_batch, max_waiting, policy=policy, record=record)
    server = ServerConfig(api_keys=tuple(api_key or ()), metrics_compat=metrics_compat)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(run(models, limits, fleet, server, host, port))
    sys.exit(code)


def find_models(
    sources: list[str], names: list[str], quantization: Quantization = "none", slo: SLO = NO_SLO
) -> list[Model]:
    """Resolves all sources before anything is loaded; `quantization` and `slo` are for those that a fleet file does not
    name. Raises ValueError naming the source."""
    if len(sources) == 1 and sources[0].endswith((".yaml", ".yml")):
        if quantization != "none" or slo != NO_SLO:
            raise ValueError("quantization, tbt-goal: with a fleet file they are keys of its models: quantization, slo")
        file = fleet_file.load(Path(sources[0]))
        entries = file.models
        if file.cluster != fleet_file.ClusterKeys():
            console.print("cluster: is for plan and simulate; each model is served by a worker of its own")
    else:
        goals = fleet_file.Goals.model_construct(ttft=slo.ttft, tbt=slo.tbt)
        entries = [
            fleet_file.Entry.model_construct(
                name=default_name(source), source=source, quantization=quantization, slo=goals
            )
            for source in sources
        ]
    if len(names) > len(entries):
        raise ValueError(f"served-model-name: {len(names)} names for {len(entries)} models")
    models = []
    for index, entry in enumerate(entries):
        if entry.source.startswith("profile:"):
            raise ValueError(f"source: {entry.source!r} is known by its profile only; it can be planned, not served")
        path, name = resolve(entry.source), names[index] if index < len(names) else entry.name
        goals = SLO(entry.slo.ttft, entry.slo.tbt, entry.slo.deadline)
        encoder = EncoderConfig.load(path) if is_encoder(path) else None
        check_goals(name, encoder is not None, goals, entry.speculation.drafter)
        model = Model(name, path, Tokenizer.load(path), entry.quantization, goals, encoder=encoder)
        model = replace(model, drafting=Drafting.of(entry.speculation))
        if model.drafting.drafter.kind == "early_exit":
            ModelConfig.load(path).exit_layers(model.drafting.early_exit_layers)  # refused before anything is measured
        models.append(model)
    twice = [m.name for m in models if [n.name for n in models].count(m.name) > 1]
    if twice:
        raise ValueError(f"served-model-name: two models are called {twice[0]!r}; name them apart")
    return models


def check_goals(name: str, one_shot: bool, goals: SLO, drafter: str) -> None:
    """Raises ValueError for what a fleet file asks of a model and models of its kind do not do."""
    if goals.deadline is not None and not one_shot:
        raise ValueError(f"slo.deadline: {name!r} generates: it has ttft and tbt; a deadline is for encoders")
    if goals.tbt is not None and one_shot:
        raise ValueError(f"slo.tbt, tbt-goal: {name!r} is an encoder, which gives no tokens: it has ttft and deadline")
    if drafter != "none" and one_shot:
        raise ValueError(f"speculation.drafter: {name!r} is an encoder, which drafts nothing: only none is valid")


def paced(model: Model, maximum: int, fixed: bool, threads: int | None, options: list[str]) -> Model:
    """The model with its profile and the budget that follows: with a goal, or by default where a profile is cached.

    What a goal or a choice of drafts needs and the cache lacks is measured first, by `paceline profile` with these
    options. Raises ValueError for a goal below the floor.
    """
    device, tbt, chooses = profile_cache.Device.here(threads), model.slo.tbt, model.drafting.chooses

    def profile_of(path: Path, name: str, options: list[str], needed: bool) -> Profile | None:
        file = profile_cache.cache_file(path, model.quantization, device)
        known = profile_cache.load(file)
        if known is None and needed:
            measured_here(path, name, [*options, "--quantization", model.quantization])
            known = profile_cache.load(file)
            assert known is not None
        return known

    model = replace(model, profile=profile_of(model.path, model.name, options, tbt is not None or chooses))
    if chooses and model.drafting.model:
        name, begin = f"{model.name}'s draft model", options.index("--context") if "--context" in options else None
        own = options if begin is None else options[:begin] + options[begin + 2 :]  # its context may be shorter
        model = replace(model, draft_profile=profile_of(model.drafting.model, name, own, True))
    if model.profile is None or (fixed and tbt is None):
        return model
    return replace(model, budget=goal_budget(model.name, model.profile, maximum, tbt))


def worker_group(
    models: list[Model], limits: dict[str, int | None], parallel: Parallel = Parallel()  # noqa: B008
) -> WorkerGroup:
    """Models that share the workers of a group."""
    left = range(len(models), 0, -1)
    options = (worker_options(model, limits, 1 / count) for model, count in zip(models, left, strict=True))
    command = GroupOptions(tuple(options), parallel).command
    return WorkerGroup(tuple(map(group_model, models)), command, parallel)


def worker_options(model: Model, limits: dict[str, int | None], share: float) -> WorkerOptions:
    drafting = model.drafting
    return WorkerOptions(
        str(model.path),
        quantization=model.quantization,
        drafter=str(drafting.drafter),
        early_exit_layers=drafting.early_exit_layers,
        share=share,
        **limits,
    )


def group_model(model: Model) -> GroupModel:
    drafting = model.drafting
    return GroupModel(
        model.name,
        model.tokenizer.eos_ids,
        model.slo,
        model.budget,
        predict=model.profile.step_time.seconds if model.profile else None,
        max_draft_tokens=drafting.max_draft_tokens,
        lookahead=(
            lookahead(drafting, model.path, model.quantization, model.profile, model.draft_profile)
            if drafting.chooses and model.profile
            else None
        ),
        one_shot=model.encoder is not None,
    )


async def run(
    models: list[Model], limits: dict[str, int | None], config: FleetConfig, server: ServerConfig, host: str, port: int
) -> int:
    """Starts the fleet, serves until told to stop, drains. Returns the exit code."""
    begin = time.monotonic()
    try:
        sock = bind(host, port)
    except OSError as error:
        raise ValueError(f"host, port: cannot listen on {host}:{port}: {error.strerror}") from error
    console.print(f"loading {', '.join(m.name for m in models)} (kernels are compiled once, at the first start)")
    groups = [worker_group([model], limits) for model in models]
    progress = LoadingProgress([m.name for m in models])
    fleet = LocalFleet(groups, config, progress.update)
    try:
        with progress:
            await fleet.start()
        failed = [group for group in fleet.groups if group.state == "failed"]
        for group in failed:
            console.print(f"[red]{group.config.name}: {group.reason}[/red]", highlight=False, soft_wrap=True)
        if len(failed) == len(models):
            return 2 if all(group.bad_input for group in failed) else 1
        gc.collect()
        gc.freeze()  # modules and tokenizers stay: collections while serving need not look at them
        app = create_app(fleet, served_models(models, fleet), server)

        def on_started(url: str) -> None:
            summary(fleet, models, config, url, time.monotonic() - begin)

        return 0 if await serve_http(app, fleet, sock, on_started=on_started) else 1
    finally:
        await fleet.stop()


def served_models(models: list[Model], fleet: LocalFleet) -> dict[str, ServedModel]:
    """The models as clients see them; those that failed to load too, with a context of 0."""
    served = {}
    for model, status in zip(models, fleet.status(), strict=True):
        context, vocabulary = (status.info.context, status.info.vocab_size) if status.info else (0, None)
        size = model.encoder.hidden if model.encoder else None
        served[model.name] = ServedModel(model.name, model.tokenizer, context, int(time.time()), vocabulary, size)
    return served


class LoadingProgress:
    """One bar a model, which pulses until its weights are read; silent where nobody looks."""

    def __init__(self, names: list[str]) -> None:
        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {name: self._progress.add_task(name, total=None) for name in names}

    def __enter__(self) -> "LoadingProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._tasks[name], completed=done, total=total)


def summary(fleet: LocalFleet, models: list[Model], config: FleetConfig, url: str, seconds: float) -> None:
    """What runs, in which memory, at which pace, where."""
    table = Table(box=None, pad_edge=False)
    columns = ("model", "context", "weights", "KV cache", "blocks", "planned peak", "token budget", "prediction error")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for model, status in zip(models, fleet.status(), strict=True):
        if info := status.info:
            sizes = [f"{size / 2**20:,.0f} MiB" for size in (info.weight_bytes, info.kv_bytes, info.planned_bytes)]
            blocks = f"{info.num_blocks} x {info.block_size}"
            pace = pace_of(model, config)
            table.add_row(status.name, str(info.context), sizes[0], sizes[1], blocks, sizes[2], *pace)
        else:
            table.add_row(status.name, "failed")
    console.print(table)
    whole = " (whole prompts for encoders)" if any(model.encoder for model in models) else ""
    console.print(f"policy {config.policy}{whole}, at most {config.max_batch} sequences a step")
    console.print(f"ready in {seconds:.1f} s at [bold]{url}/v1[/bold]  (Ctrl-C drains and ends)", highlight=False)


def pace_of(model: Model, config: FleetConfig) -> tuple[str, str]:
    """The budget in words, and what the profile's predictions are off by."""
    budget, error = str(config.token_budget), ""
    if model.budget:
        knee = f"knee {model.budget.knee}"
        budget = f"{1e3 * model.budget.tbt:g} ms, {knee}" if model.budget.tbt else knee
    if model.profile:
        error = f"P50 {model.profile.error.p50:.1%}, P95 {model.profile.error.p95:.1%}"
    return budget, error
