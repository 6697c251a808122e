"""`paceline trace`: makes traces, and says what is in them."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import fleet_file
from paceline.cli.planning import check_file, workloads
from paceline.workload import arrivals
from paceline.workload.trace import Trace, joint_lengths, load, spread

app = typer.Typer(help="Make traces, and say what is in them.", no_args_is_help=True)


@app.command()
def make(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET.yaml", help="Models and their workloads.")],
    out: Annotated[Path, typer.Option(help="Trace file to write.")],
    duration: Annotated[float, typer.Option(min=0.001, help="Seconds.")] = 60.0,
    total_rate: Annotated[
        float | None, typer.Option(min=0.0, help="Requests/s of all models, instead of their own rates.")
    ] = None,
    power: Annotated[float, typer.Option(min=0.0, help="With a total rate: shares fall as rank**-POWER.")] = 0.5,
    cv: Annotated[float | None, typer.Option(min=0.01, help="Burstiness, instead of the models' own.")] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="A recording (ours or Azure's) that arrivals and lengths are taken from.")
    ] = None,
    lengths: Annotated[Path | None, typer.Option(help="A recording that only lengths are taken from.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Make a trace of a fleet's workloads; models with a deadline are one-shot and have no output.

    Example: paceline trace make fleet.yaml --duration 600 --total-rate 8 --cv 4 --out trace.csv
    """
    check_file("out", out)
    if recorded and (cv is not None or lengths):
        raise ValueError("recorded: has its own burstiness and lengths; without --cv and --lengths")
    file = fleet_file.load(fleet)
    names = [entry.name for entry in file.models]
    one_shot = [entry.slo.deadline is not None for entry in file.models]
    rates = [entry.workload.rate or 0.0 for entry in file.models]
    if total_rate is not None:
        rates = arrivals.power_law(total_rate, len(names), power)
    if recorded:
        if not any(rates):
            raise ValueError("workload.rate: no model has a rate above 0; or give --total-rate")
        made = spread(load(recorded, "recorded"), names, rates, duration, seed)
    else:
        made = workloads(file, rates, cv, duration, seed, one_shot)
        if lengths:
            known = load(lengths, "lengths")
            draw = joint_lengths(list(zip(known.prompts.tolist(), known.outputs.tolist(), strict=True)), seed)
            made = Trace.of({name: made.of_model(name).arrivals for name in made.names}, draw)
    made = replace(made, outputs=np.where(np.array(one_shot)[made.models], 0, made.outputs))
    made.save(out)
    Console(markup=False).print(described(made))


@app.command()
def show(
    trace: Annotated[Path, typer.Argument(help="Trace file.")],
    model: Annotated[str | None, typer.Option(help="Name of the model of a recording that names none.")] = None,
) -> None:
    """Say what is in a trace: requests, rates, burstiness, lengths.

    Example: paceline trace show trace.csv
    """
    Console(markup=False).print(described(load(trace, model)))


@app.command()
def rescale(
    trace: Annotated[Path, typer.Argument(help="Trace file.")],
    out: Annotated[Path, typer.Option(help="Trace file to write.")],
    rate: Annotated[float, typer.Option(min=0.001, help="So many times the rate.")] = 1.0,
    cv: Annotated[float, typer.Option(min=0.001, help="So many times the burstiness.")] = 1.0,
    window: Annotated[float, typer.Option(min=0.1, help="Seconds in which rate and burstiness are the same.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    model: Annotated[str | None, typer.Option(help="Name of the model of a recording that names none.")] = None,
) -> None:
    """Resample a trace with another rate and burstiness, window by window; lengths are drawn from its own, jointly.

    Example: paceline trace rescale trace.csv --rate 2 --cv 1.5 --out more.csv
    """
    check_file("out", out)
    known = load(trace, model)
    streams, draws = {}, {}
    for index, name in enumerate(known.names):
        mine = known.models == index
        streams[name] = arrivals.resampled(known.arrivals[mine], rate, cv, window, 10_000 * seed + 1000 * index)
        pairs = list(zip(known.prompts[mine].tolist(), known.outputs[mine].tolist(), strict=True))
        draws[name] = joint_lengths(pairs, seed + index)
    made = Trace.of(streams, lambda name, count: draws[name](name, count))
    made.save(out)
    Console(markup=False).print(described(made))


def described(trace: Trace) -> Table:
    table = Table(box=None, pad_edge=False, title=f"{len(trace)} requests in {trace.duration:.1f} s",
                  title_justify="left")  # fmt: skip
    for column in ("model", "requests", "requests/s", "CV", "prompt tokens", "output tokens"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, count, rate, cv, prompt, output in trace.describe():
        table.add_row(name, str(count), f"{rate:.3f}", f"{cv:.2f}", f"{prompt:.0f}", f"{output:.0f}")
    return table
