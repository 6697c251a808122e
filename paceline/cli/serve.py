"""`paceline serve`: loads models, prints what was made of the machine, answers until SIGTERM."""

import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cli import fleet_file
from paceline.cli.sources import builtin_names, default_name, resolve
from paceline.cli.worker import WorkerOptions
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.fleet import FleetConfig, LocalFleet
from paceline.runtime.group import WorkerConfig
from paceline.server.app import ServedModel, ServerConfig, create_app
from paceline.server.serve import bind
from paceline.server.serve import serve as serve_http

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    path: Path
    tokenizer: Tokenizer


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
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens of a step, decodes first (Sarathi-Serve).")] = 512,
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
    models = find_models(sources or [f"builtin:{name}" for name in builtin_names()], served_model_name or [])
    limits: dict[str, int | None] = {
        "max_batch_tokens": max(token_budget, max_batch),
        "max_batch": max_batch,
        "context": context,
        "memory": parse_bytes(memory) if memory else None,
        "num_blocks": num_blocks,
        "threads": threads,
    }
    if record and not record.parent.is_dir():
        raise ValueError(f"record: {record.parent} is not a directory")
    fleet = FleetConfig(token_budget, max_batch, max_waiting, record=record)
    server = ServerConfig(api_keys=tuple(api_key or ()), metrics_compat=metrics_compat)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(run(models, limits, fleet, server, host, port))
    sys.exit(code)


def find_models(sources: list[str], names: list[str]) -> list[Model]:
    """Resolves all sources before anything is loaded. Raises ValueError naming the source."""
    if len(sources) == 1 and sources[0].endswith((".yaml", ".yml")):
        entries = [(entry.name, entry.source) for entry in fleet_file.load(Path(sources[0])).models]
    else:
        entries = [(default_name(source), source) for source in sources]
    if len(names) > len(entries):
        raise ValueError(f"served-model-name: {len(names)} names for {len(entries)} models")
    models = []
    for index, (name, source) in enumerate(entries):
        path = resolve(source)
        models.append(Model(names[index] if index < len(names) else name, path, Tokenizer.load(path)))
    twice = [m.name for m in models if [n.name for n in models].count(m.name) > 1]
    if twice:
        raise ValueError(f"served-model-name: two models are called {twice[0]!r}; name them apart")
    return models


def parse_bytes(text: str) -> int:
    """Bytes of 6GiB, 512MB (taken as MiB), 1073741824."""
    number = text.strip().removesuffix("B").removesuffix("i")
    unit = number[-1:].upper() if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(number[-1:]) if unit else number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"memory: {text!r} is not a size such as 6GiB or 512MiB") from None


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
    workers = [WorkerConfig(m.name, WorkerOptions(str(m.path), **limits).command, m.tokenizer.eos_ids) for m in models]
    progress = LoadingProgress([m.name for m in models])
    fleet = LocalFleet(workers, config, progress.update)
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
            summary(fleet, config, url, time.monotonic() - begin)

        return 0 if await serve_http(app, fleet, sock, on_started=on_started) else 1
    finally:
        await fleet.stop()


def served_models(models: list[Model], fleet: LocalFleet) -> dict[str, ServedModel]:
    """The models as clients see them; those that failed to load too, with a context of 0."""
    served = {}
    for model, status in zip(models, fleet.status(), strict=True):
        context, vocabulary = (status.info.context, status.info.vocab_size) if status.info else (0, None)
        served[model.name] = ServedModel(model.name, model.tokenizer, context, int(time.time()), vocabulary)
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


def summary(fleet: LocalFleet, config: FleetConfig, url: str, seconds: float) -> None:
    """What runs, in which memory, where."""
    table = Table(box=None, pad_edge=False)
    for column in ("model", "context", "weights", "KV cache", "blocks", "planned peak"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for status in fleet.status():
        if info := status.info:
            sizes = [f"{size / 2**20:,.0f} MiB" for size in (info.weight_bytes, info.kv_bytes, info.planned_bytes)]
            blocks = f"{info.num_blocks} x {info.block_size}"
            table.add_row(status.name, str(info.context), sizes[0], sizes[1], blocks, sizes[2])
        else:
            table.add_row(status.name, "failed")
    console.print(table)
    console.print(f"token budget {config.token_budget}, at most {config.max_batch} sequences a step")
    console.print(f"ready in {seconds:.1f} s at [bold]{url}/v1[/bold]  (Ctrl-C drains and ends)", highlight=False)
