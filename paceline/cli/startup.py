"""What `paceline serve` shows of a start: what loads, then what runs."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.batching import policies
from paceline.cli.models import Model
from paceline.cli.planning import names_of
from paceline.runtime.fleet import FleetConfig, LocalFleet

console = Console(stderr=True, markup=False)  # names and reasons are no markup


class LoadingProgress:
    """One bar a model, which pulses until its weights are read; silent where nobody looks."""

    def __init__(self, names: list[str]) -> None:
        what = TextColumn("loading {task.description}", markup=False)
        columns = (what, BarColumn(), DownloadColumn(), TimeElapsedColumn())
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
    sizes = ("context", "weights", "KV cache", "blocks", "planned peak", "token budget", "prediction error")
    for column in ("model", "groups", *sizes):
        table.add_column(column, justify="right" if column in sizes else "left")
    statuses = {status.name: status for status in fleet.status()}
    for model in models:
        status, hosts = statuses[model.name], fleet.hosts(model.name)
        shapes = " ".join(f"{number}{shape}" if shape.devices > 1 else str(number) for number, shape in hosts)
        if info := status.info:
            sizes = [f"{size / 2**20:,.0f} MiB" for size in (info.weight_bytes, info.kv_bytes, info.planned_bytes)]
            blocks = f"{info.num_blocks} x {info.block_size}"
            pace = pace_of(model, config)
            table.add_row(status.name, shapes, str(info.context), sizes[0], sizes[1], blocks, sizes[2], *pace)
        else:
            table.add_row(status.name, shapes, "failed")
    console.print(table)
    if any(workers.parallel.devices > 1 for workers in fleet.workers):
        console.print("groups: number (pipeline stages, tensor ranks)", highlight=False)
    if unknown := [model.name for model in models if model.step_time is None]:
        console.print(
            f"no profile of {names_of(unknown)}: goals of requests (x-slo-ttft-ms, x-slo-tpot-ms) refuse nobody there; "
            "a goal of the model, or paceline profile, makes one", highlight=False, soft_wrap=True,
        )  # fmt: skip
    whole = " (whole prompts for encoders)" if any(model.encoder for model in models) else ""
    console.print(f"policy {config.policy}{whole}, at most {config.max_batch} sequences a step")
    console.print(f"ready in {seconds:.1f} s at {url}/v1  (Ctrl-C drains and ends)", highlight=False)


def pace_of(model: Model, config: FleetConfig) -> tuple[str, str]:
    """The budget in words, and what the profile's predictions are off by."""
    budget, error = str(config.token_budget), ""
    if model.profile and model.budget and policies.policy(config.policy).within_goals:
        knee = f"knee {model.budget.knee}"
        budget = f"{1e3 * model.budget.tbt:g} ms, {knee}" if model.budget.tbt else knee
    if model.profile:
        error = f"P50 {model.profile.error.p50:.1%}, P95 {model.profile.error.p95:.1%}"
    return budget, error
