"""`paceline simulate`: a trace through a placement, in virtual time."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import fleet_file
from paceline.cli.placement_file import load_placement
from paceline.cli.planning import DEFAULT_POLICY, check_parent, make_folder, planned
from paceline.core.cluster import KV_SHARE
from paceline.metrics.outcomes import report
from paceline.placement.dispatch import RULES
from paceline.placement.problem import ALPASERVE, ALPASERVE_EVENTS, Problem, Timing
from paceline.simulator.fleet import FleetRun, run, timeline
from paceline.workload.trace import load

SHOWN = 5000  # spans of a row of the picture
TIMINGS = {"plain": Timing(), "alpaserve": ALPASERVE, "alpaserve_events": ALPASERVE_EVENTS}


def simulate(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET.yaml", help="Models, goals, devices.")],
    placement: Annotated[Path, typer.Option(help="Placement file.")],
    trace: Annotated[Path, typer.Option(help="Trace file.")],
    out: Annotated[Path, typer.Option(help="Directory for requests.csv and report.json.")],
    profile: Annotated[Path | None, typer.Option(help="Profile file; default: profiles measured here.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of a device, such as 6GiB, instead of the fleet file's.")] = None,
    load_bandwidth: Annotated[
        str | None, typer.Option(help="Bytes/s from host memory, such as 2GiB, instead of the fleet file's.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a device, by which its profiles are kept.")] = None,
    dispatch: Annotated[str, typer.Option(help=f"One of {', '.join(RULES)}, of one-shot requests.")] = "finish",
    timing: Annotated[str, typer.Option(help=f"One of {', '.join(TIMINGS)}: what is added to stages.")] = "plain",
    policy: Annotated[str, typer.Option(help="How steps are composed (docs/batching.md).")] = DEFAULT_POLICY,
    token_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a step; default: by the model's profile, or 512.")
    ] = None,
    plot: Annotated[bool, typer.Option(help="Draw timeline.png, too: what each stage ran when.")] = False,
) -> None:
    """Replay a trace on a placement.

    Example: paceline simulate fleet.yaml --placement placement.json --trace trace.csv --out results
    """
    if timing not in TIMINGS:
        raise ValueError(f"timing: {timing!r} is not one of {', '.join(TIMINGS)}")
    check_parent("out", out)
    if plot:
        picture()
    file, where = fleet_file.load(fleet), load_placement(placement)
    used = max((device for group in where.groups for device in group.devices), default=0)
    devices = used + 1 if file.cluster.devices == "auto" else file.cluster.devices
    if used >= devices:
        raise ValueError(f"placement: device {used} is not one of the cluster's {devices}")
    known = planned(file, profile, threads, devices, memory, policy, token_budget, load_bandwidth)
    requests = load(trace).named(known.names)
    slo = [float("inf") if goal.deadline is None else goal.deadline for goal in known.goals]
    problem = Problem(
        known.cluster,
        [model.table for model in known.models], slo, requests.arrivals, requests.models, dispatch, TIMINGS[timing],
        kinds=known.kinds,
    )  # fmt: skip
    shape, member = problem.arrays(where)
    over = (problem.free(shape, member) < 0).any(1).nonzero()[0]
    if len(over):
        raise ValueError(
            f"placement: groups.{over[0]}.models: their weights are more than the {known.cluster.memory} bytes of a "
            f"device, less those of a step and, of models that go by steps, {KV_SHARE:.0%} for keys and values; fewer "
            "models, more devices, or memory or, for models to be loaded by need, load_bandwidth in the fleet file's "
            "cluster"
        )
    make_folder("out", out)
    result = run(known.models, where, requests, problem, known.cluster.memory, known.limits, known.policy)
    result.outcomes.save(out / "requests.csv", known.goals)
    summary = report(result.outcomes, known.goals, result.devices(where)) | {"prediction_error": known.error}
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
    if plot:
        draw(result, out / "timeline.png")
    Console(markup=False).print(report_table(summary))
    Console(stderr=True, markup=False).print(f"kept in {out}", highlight=False, soft_wrap=True)


def report_table(summary: dict) -> Table:
    """The report in short, as `bench` prints it, too."""
    table = Table(box=None, pad_edge=False, title="milliseconds are P50 / P99", title_justify="left")
    for column in ("model", "requests", "attained", "good/s", "latency", "TTFT", "TBT"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for name, part in [*summary["models"].items(), ("all", summary)]:
        cells = [_milliseconds(part.get(kind, {})) for kind in ("latency", "ttft", "tbt")]
        table.add_row(name, str(part["requests"]), f"{part['attainment']:.2%}", f"{part['goodput']:.2f}", *cells)
    return table


def _milliseconds(part: dict) -> str:
    low, high = part.get("p50"), part.get("p99")
    return "" if low is None else f"{_three(1e3 * low)}/{_three(1e3 * high)}"


def _three(value: float) -> str:
    """Three digits, or the whole number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def picture() -> Any:
    """Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot: needs matplotlib; install paceline[plot]") from None
    return Figure


def draw(result: FleetRun, path: Path) -> None:
    """A row for each stage; darker where a step had more tokens. The first SHOWN of each row."""
    rows = list(timeline(result))
    figure = picture()(figsize=(12, 1.5 + 0.35 * max(1, len(rows))), layout="constrained")
    axes = figure.subplots()
    most = max((size for _, spans in rows for _, _, size in spans), default=1)
    for height, (_, spans) in enumerate(rows):
        shown = spans[:SHOWN]
        axes.broken_barh(
            [(begin, end - begin) for begin, end, _ in shown], (height - 0.4, 0.8),
            facecolors=[(0.1, 0.3, 0.7, 0.25 + 0.75 * size / most) for _, _, size in shown],
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    cut = any(len(spans) > SHOWN for _, spans in rows)
    axes.set_xlabel("seconds" + f" (the first {SHOWN} of each row)" * cut)
    figure.savefig(path)


