"""`paceline plan`: which models run where, why, and what to expect of it."""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cli import fleet_file
from paceline.cli.ask import ask, fault
from paceline.cli.placement_file import load_placement, save_placement
from paceline.cli.planning import DEFAULT_POLICY, FEWEST, Planned, check_file, drawn, names_of, planned, traffic
from paceline.core.cluster import Placement
from paceline.placement import explain
from paceline.placement.dispatch import RULES
from paceline.placement.greedy import Choice
from paceline.placement.problem import Problem
from paceline.placement.search import EFFORT
from paceline.placement.search import plan as search

STEPWISE_EVALUATIONS = 200  # of local search, where every one simulates steps
EXPLAINED = 16  # groups at most
WINDOWS = 4  # of a trace, to see how much its parts differ
errors = Console(stderr=True, markup=False)


def plan(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET.yaml", help="Models, goals, workloads, devices.")],
    profile: Annotated[Path | None, typer.Option(help="Profile file; default: profiles measured here.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Expected traffic; default: the models' workloads.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the placement here.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Instead of the fleet file's.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each, such as 6GiB, instead of the fleet file's.")] = None,
    load_bandwidth: Annotated[
        str | None, typer.Option(help="Bytes/s from host memory, such as 2GiB, instead of the fleet file's.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a device, by which its profiles are kept.")] = None,
    duration: Annotated[float | None, typer.Option(min=1.0, help="Seconds of traffic made from workloads.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of workloads and of the search.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Workloads to judge the result by, without a trace.")] = 5,
    effort: Annotated[
        int | None, typer.Option(min=0, help=f"Requests to simulate in local search; default {EFFORT:.0e} a cell.")
    ] = None,
    dispatch: Annotated[str, typer.Option(help=f"Of one-shot requests: {', '.join(RULES)}.")] = "finish",
    policy: Annotated[str, typer.Option(help="How steps are composed (docs/batching.md).")] = DEFAULT_POLICY,
    token_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a step; default: by the model's profile, or 512.")
    ] = None,
    quiet: Annotated[bool, typer.Option(help="Without the reasons.")] = False,
    watch: Annotated[
        str | None, typer.Option(help="URL of a Paceline server: plan for its traffic of late, again and again.")
    ] = None,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between plans with --watch.")] = 60.0,
    api_key: Annotated[str | None, typer.Option(envvar="PACELINE_API_KEY", help="Of that server.")] = None,
) -> None:
    """Plan a placement of the fleet's models on its devices.

    Example: paceline plan fleet.yaml --profile profile.json --trace trace.csv --out placement.json
    """
    check_file("out", out)
    if (trace or watch) and duration:
        raise ValueError("duration: is of workloads, and --trace or --watch has its own")
    if trace and watch:
        raise ValueError("trace, watch: one of them, not both")
    options = (
        profile, out, devices, memory, load_bandwidth, threads, duration, seed, seeds, effort, dispatch, policy,
        token_budget, quiet,
    )  # fmt: skip
    if watch is None:
        make(fleet, trace, *options)
        return
    heard = False
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        while True:
            try:
                known, heard = fetch(watch, api_key, Path(folder)), True
            except OSError as error:
                if not heard:
                    raise fault("watch", watch, error) from error
                errors.print(f"{watch}: {error}; trying again in {every:g} s", highlight=False, soft_wrap=True)
            else:
                if known:
                    make(fleet, known[0], *options, running=known[1])
            time.sleep(every)


def fetch(url: str, key: str | None, folder: Path) -> tuple[Path, Placement | None] | None:
    """A server's trace, kept in a file of the folder, and its placement where it tells; None: it has not seen enough.
    Raises OSError where the server does not answer."""
    trace, placement = folder / "trace.csv", folder / "placement.json"
    trace.write_bytes(ask(url, "trace", key))
    requests = trace.read_text().count("\n") - 1
    if requests < FEWEST:
        errors.print(f"{requests} requests so far; with {FEWEST} there is something to plan for", highlight=False)
        return None
    try:
        placement.write_bytes(ask(url, "placement", key))
    except HTTPError as error:
        if error.code != 404:
            raise
        return trace, None
    return trace, load_placement(placement)


def make(
    fleet: Path,
    trace: Path | None,
    profile: Path | None,
    out: Path | None,
    devices: int | None,
    memory: str | None,
    load_bandwidth: str | None,
    threads: int | None,
    duration: float | None,
    seed: int,
    seeds: int,
    effort: int | None,
    dispatch: str,
    policy: str,
    token_budget: int | None,
    quiet: bool,
    running: Placement | None = None,
) -> None:
    """Plans, prints the placement and why, and writes it; and what would change of one that is `running`."""
    file = fleet_file.load(fleet)
    known = planned(file, profile, threads, devices, memory, policy, token_budget, load_bandwidth)
    expected = traffic(file, known, trace, duration, seed)
    problem = known.problem(expected, dispatch)
    begin, cpu = time.perf_counter(), time.process_time()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bars:
        task = bars.add_task("planning", total=None)
        default = STEPWISE_EVALUATIONS * len(expected) if known.stepwise else EFFORT
        most = default if effort is None else effort
        choice = search(problem, most, seed, lambda text: bars.update(task, description=f"planning: {text}"))
        took, used, simulations = time.perf_counter() - begin, time.process_time() - cpu, problem.evaluations
        placement = problem.placement(choice.shape, choice.member)
        if out:
            save_placement(out, placement)
        bars.update(task, description="what else there is")
        reasons = [] if quiet else why(problem, choice)
        bars.update(task, description="other traffic of the same kind")
        recorded = trace or all(entry.workload.trace for entry in file.models)
        if recorded:
            edges = np.linspace(expected.arrivals[0], expected.arrivals[-1], WINDOWS + 1)
            edges[-1] = np.inf
            others = [expected.between(a, b) for a, b in zip(edges, edges[1:], strict=False)]
        else:
            others = [drawn(file, known, duration, seed + 1 + i) for i in range(seeds)]
        judged = [known.problem(other, dispatch).evaluate(choice.shape, choice.member) for other in others]
    console = Console(markup=False)
    console.print(groups_table(placement))
    console.print(models_table(known, choice, judged, "parts of the trace" if recorded else "other seeds"))
    left_out = [known.names[m] for m in np.flatnonzero(~choice.member.any(0))]
    if left_out:
        text = f"not placed: {names_of(left_out)}; there is no memory left for them"
        errors.print(text, style="red", soft_wrap=True)
    for line in changes(problem, choice, placement, running) if running else ():
        console.print(line, highlight=False, soft_wrap=True)
    for line in reasons:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"planned in {took:.2f} s ({used:.2f} CPU seconds, {simulations} simulations of up to {len(expected)} "
        "requests)", highlight=False,
    )  # fmt: skip
    if known.error:
        console.print(
            "step times that this rests on were predicted with an error of "
            + ", ".join(f"{name.upper()} {value:.1%}" for name, value in known.error.items()), highlight=False,
        )  # fmt: skip


def changes(problem: Problem, choice: Choice, placement: Placement, running: Placement) -> list[str]:
    """A line for each group that would leave, or come, and what that would bring."""
    old, new = (
        Counter(f"{group.parallel}: {' '.join(sorted(group.models))}" for group in one.groups if group.models)
        for one in (running, placement)
    )
    if old == new:
        return ["", "this is what runs now"]
    try:
        here = f"the {problem.evaluate(*problem.arrays(running)).attainment:.2%}"
    except ValueError as error:
        here = f"what nobody can tell ({error})"
    return [
        "", f"{choice.outcome.attainment:.2%} instead of {here} of what runs now, by these groups:",
        *(f"  - {group}" for group in (old - new).elements()), *(f"  + {group}" for group in (new - old).elements()),
    ]  # fmt: skip


def why(problem: Problem, choice: Choice) -> list[str]:
    """A line for each group, and the runners-up."""
    here, lines = choice.outcome.attainment, ["", "why these groups, by what others would lose:"]
    order = sorted(range(len(choice.shape)), key=lambda g: -int(choice.outcome.asked[g]))[:EXPLAINED]
    for g in order:
        group = problem.shapes[choice.shape[g]]
        alternatives = explain.of_group(problem, choice, g)
        text = "; ".join(f"{other.what} {_loss(here, other.attainment)}" for other in alternatives[:4])
        holds = int(choice.member[g].sum())
        lines.append(f"  {group} with {holds} models: {text or 'there is no other shape of so many devices'}")
    if len(choice.shape) > EXPLAINED:
        lines.append(f"  (the {EXPLAINED} busiest of {len(choice.shape)} groups)")
    window = max(1.0, float(problem.times[-1]) / 4) if len(problem.times) else 1.0
    lines.append("instead of all of it:")
    lines += [
        f"  {other.what} {_loss(here, other.attainment)}" for other in explain.policies(problem, window)[:6]
    ]
    return [*lines, ""]


def _loss(here: float, there: float) -> str:
    points = 100 * (here - there)
    return f"loses {points:.2f} points" if points >= 0.005 else f"gains {-points:.2f}" if points <= -0.005 else "equals"


def groups_table(placement: Placement) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("group", "devices", "(pipeline,tensor)", "models"):
        table.add_column(column)
    for index, group in enumerate(placement.groups):
        first, last, count = group.devices[0], group.devices[-1], len(group.devices)
        row = count > 2 and last - first == count - 1
        devices = f"{first}-{last}" if row else ",".join(map(str, group.devices))
        table.add_row(str(index), devices, str(group.parallel), names_of(group.models))
    return table


def models_table(known: Planned, choice: Choice, judged: list, others: str) -> Table:
    """Attainment in the traffic that was planned for, and in other traffic: mean and standard deviation."""
    table = Table(box=None, pad_edge=False)
    for column in ("model", "requests", "replicas", "attainment", others):
        table.add_column(column, justify="left" if column == "model" else "right")
    rows = list(range(len(known.models)))
    if len(rows) > 24:  # the worst
        rows = sorted(rows, key=lambda m: _share(choice.outcome, m))[:24]
    for m in rows:
        shares = [_share(outcome, m) for outcome in judged if outcome.requests[m]] or [1.0]
        cells = f"{_share(choice.outcome, m):.2%}", f"{np.mean(shares):.2%} ± {np.std(shares):.2%}"
        replicas = str(int(choice.member[:, m].sum()))
        table.add_row(known.models[m].name, str(int(choice.outcome.requests[m])), replicas, *cells)
    shares = [outcome.attainment for outcome in judged if outcome.requests.sum()] or [1.0]
    whole = f"{choice.outcome.attainment:.2%}", f"{np.mean(shares):.2%} ± {np.std(shares):.2%}"
    table.add_row("all", str(int(choice.outcome.requests.sum())), str(choice.outcome.replicas), *whole)
    return table


def _share(outcome, m: int) -> float:  # type: ignore[no-untyped-def]
    return float(outcome.good[m] / outcome.requests[m]) if outcome.requests[m] else 1.0


