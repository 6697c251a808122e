"""Entries of a profile file that shapes and encoders need, and the profile of a whole fleet."""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from rich.progress import Progress as Bars
from rich.table import Table

from paceline.cli import profile_cache
from paceline.cli.fleet_file import Entry, FleetFile, check_cache
from paceline.cli.profile_cache import Device
from paceline.cli.shape_profile import Progress, Shape, Slices, Stages, measure, shapes_of
from paceline.cli.sizes import parse_bytes
from paceline.cli.sources import resolve
from paceline.cli.worker import WorkerOptions
from paceline.core.batch import StepShape
from paceline.core.cluster import Parallel
from paceline.engine.config import ModelConfig
from paceline.engine.encoder_config import EncoderConfig, is_encoder
from paceline.engine.precision import precision
from paceline.latency.profile import Measured, Percentiles
from paceline.latency.texts import TextTimes
from paceline.python import PYTHON, packages

BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16), (1, 4, 16)  # texts of a step
WIDEST = 2048  # tokens of several texts: serving makes no wider steps unless told to
TOKENS = 512  # of a forward pass at most, as in serving unless told otherwise
BLOCK = 16
# Steps by which shapes of a model with steps are compared: decodes, their context each, and a chunk from context 0
PROBES = ((1, 64, 0), (8, 128, 0), (0, 0, 64), (0, 0, 256), (8, 128, 120))
SHARE_S = 10.0  # seconds to compare shapes for, unless quick


def measured_here(path: Path, name: str, options: Sequence[str]) -> None:
    """Profiles a model in a process of its own, which shows its progress, and leaves the profile in the cache.

    Raises ValueError when that fails; the process has said why.
    """
    command = [*PYTHON, "-m", "paceline.cli.main", "profile", str(path), *options]
    if subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | packages()).returncode:
        raise ValueError(f"{name!r} could not be profiled, so nothing that rests on its steps can be chosen; see above")


def texts(
    options: WorkerOptions, parallel: Parallel, lengths: Sequence[int], between: Sequence[int],
    batches: Sequence[int], seconds: float, progress: Progress,
) -> tuple[Shape, TextTimes, list[float]]:  # fmt: skip
    """Of an encoder in a shape: a step's times by length and number of texts, and relative errors of single turns.

    Those are of single texts of the lengths `between`, which the table does not have; without them, of all turns
    against the median of the others.
    """
    cells = [(length, count) for length in lengths for count in batches if count == 1 or count * length <= WIDEST]
    with Shape(options, parallel) as shape:
        steps = [[(0, length, True)] * count for length, count in [*cells, *((length, 1) for length in between)]]
        turns = measure([(shape, step) for step in steps], seconds, progress)
    table: dict[int, dict[int, Stages]] = {length: {} for length in lengths}
    for (length, count), mine in zip(cells, turns, strict=False):
        table[length][count] = tuple(map(median, zip(*mine, strict=True)))
    times = TextTimes(table)
    held_out = list(zip(between, turns[len(cells) :], strict=True))
    errors = [abs(sum(times.at(length)[1]) / sum(one) - 1) for length, mine in held_out for one in mine]
    spread = (one for mine in turns for one in Measured(StepShape(), [sum(turn) for turn in mine]).spread())
    return shape, times, errors or list(spread)


def shape_entry(shape: Shape, **rest: object) -> dict[str, Any]:
    parallel = shape.parallel
    return {
        "pipeline": parallel.pipeline, "tensor": parallel.tensor, "stage_weight_bytes": shape.weight_bytes,
        "working_bytes": shape.working_bytes,
    } | rest  # fmt: skip


def encoder_alone(
    path: Path, tokens: int, threads: int | None, quantization: str, seconds: float, quick: bool, progress: Progress
) -> dict[str, Any]:
    """A profile file's entry of an encoder on one device, by length and number of texts; `stage_latency` is of texts of
    so many tokens, at most what it takes."""
    longest = EncoderConfig.load(path).max_context
    tokens = min(tokens, longest)
    grid = [2**n for n in range(3, longest.bit_length(), 2 if quick else 1)]
    lengths = sorted({min(length, longest) for length in grid} | {tokens, longest})
    between = [(a + b) // 2 for a, b in zip(lengths, lengths[1:], strict=False) if b > a + 1]
    batches = QUICK_BATCHES if quick else BATCHES
    options = WorkerOptions(str(path), TOKENS, max(batches), threads=threads, quantization=quantization)
    shape, times, errors = texts(options, Parallel(), lengths, between, batches, seconds, progress)
    found = shape_entry(shape, stage_latency=times.at(tokens), prompt_tokens=tokens, by_length=times.seconds)
    return {"parallel": [found], "error": asdict(Percentiles.of(errors))}


def encoder_table(entry: dict[str, Any]) -> Table:
    """Milliseconds of a step by the length of its texts and their number."""
    (shape,) = entry["parallel"]
    by_length = shape["by_length"]
    batches = list(next(iter(by_length.values())))
    table = Table(box=None, pad_edge=False, title="milliseconds by texts in a step", title_justify="left")
    for column in ("tokens of each", *map(str, batches), "tokens/s, best"):
        table.add_column(column, justify="right")
    for length, times in by_length.items():
        best = max(length * count / sum(stages) for count, stages in times.items())
        cells = (f"{1e3 * sum(times[count]):.2f}" if count in times else "" for count in batches)
        table.add_row(str(length), *cells, f"{best:,.0f}")
    return table


def encoder_shapes(
    options: WorkerOptions, shapes: Sequence[Parallel], tokens: int, seconds: float, quick: bool, progress: Progress
) -> dict[str, Any]:
    """An encoder's entry with all of these shapes, for texts of so many tokens (at most what it takes)."""
    tokens = min(tokens, EncoderConfig.load(options.path).max_context)
    entries, errors = [], []
    for number, parallel in enumerate(shapes):
        part = _part(progress, number, len(shapes), seconds)
        batches = QUICK_BATCHES if quick else BATCHES
        shape, times, wrong = texts(options, parallel, [tokens], [], batches, seconds / len(shapes), part)
        entries.append(shape_entry(shape, stage_latency=times.at(tokens), prompt_tokens=tokens))
        errors += wrong
    return {"parallel": entries, "error": asdict(Percentiles.of(errors))}


def step_shapes(
    options: WorkerOptions, shapes: Sequence[Parallel], seconds: float, progress: Progress
) -> list[dict[str, Any]]:
    """`parallel` of a model with steps: `step_share` is what the slowest stage takes of a step of one whole device.

    The median over PROBES; each shape and the whole model take turns, since the machine drifts.
    """
    context = ModelConfig.load(options.path).max_context
    steps = [step for probe in PROBES if (step := _probe(*probe, context))]
    divided = [parallel for parallel in shapes if parallel != Parallel()]
    with Shape(options, Parallel()) as whole:
        entries = [shape_entry(whole, step_share=1.0)]
        for number, parallel in enumerate(divided):
            with Shape(options, parallel) as shape:
                jobs = [(one, step) for step in steps for one in (whole, shape)]
                part = _part(progress, number, len(divided), seconds)
                turns = [_low(mine) for mine in measure(jobs, seconds / len(divided), part)]
            shares = [slowest / one for one, slowest in zip(turns[::2], turns[1::2], strict=True)]
            entries.append(shape_entry(shape, step_share=median(shares)))
    return entries


def fleet(
    file: FleetFile, threads: int, tokens: int | None, seconds: float | None, quick: bool, bars: Bars
) -> dict[str, Any]:
    """A profile file with every model of the fleet in every shape that it can have on the cluster's devices.

    `threads` of a device; `tokens` of encoders' texts (None: by their workloads); `seconds` to measure each model for.
    Models alike are measured once. Raises ValueError.
    """
    devices = file.cluster.count
    memory = None if file.cluster.memory == "auto" else parse_bytes(str(file.cluster.memory))
    done: dict[tuple[object, ...], dict[str, Any]] = {}
    models, paths = {}, [resolve(entry.source) for entry in file.models]
    for entry, path in zip(file.models, paths, strict=True):
        check_cache(entry, is_encoder(path))
    for entry, path in zip(file.models, paths, strict=True):
        length = tokens or entry.workload.prompt_tokens
        held = precision("cpu", "auto", entry.quantization, path, entry.kv_cache_dtype)
        key = (path, held, length if is_encoder(path) else 0)
        if key not in done:
            shapes = shapes_of(path, entry.quantization, devices)
            done[key] = _of_model(entry, path, shapes, length, threads, memory, seconds, quick, bars)
        models[entry.name] = done[key]
    error = {name: max(model["error"][name] for model in models.values()) for name in ("p50", "p95")}
    return {"models": models, "device": Device.here(threads), "error": error}


def shapes_table(file: dict[str, Any]) -> Table:
    """A line for each model and shape: milliseconds of one text in each stage, or what a stage takes of a step."""
    table = Table(box=None, pad_edge=False)
    for column in ("model", "(pipeline,tensor)", "MiB of each stage", "one text in each, ms", "slowest stage"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, model in file["models"].items():
        for one in model["parallel"]:
            sizes = " ".join(f"{size / 2**20:.0f}" for size in one["stage_weight_bytes"])
            alone = " ".join(f"{1e3 * stage:.2f}" for stage in one.get("stage_latency", {}).get(1, ()))
            share = f"{one['step_share']:.0%}" if "step_share" in one else ""
            table.add_row(name, str(Parallel(one["pipeline"], one["tensor"])), sizes, alone, share)
    return table


def _of_model(
    entry: Entry, path: Path, shapes: list[Parallel], tokens: int, threads: int, memory: int | None,
    seconds: float | None, quick: bool, bars: Bars,
) -> dict[str, Any]:  # fmt: skip
    task = bars.add_task(f"profiling {entry.name} in {', '.join(map(str, shapes))}", total=None)

    def progress(gone: float, planned: float) -> None:
        bars.update(task, completed=gone, total=planned)

    options = WorkerOptions(
        str(path), TOKENS, max(BATCHES), threads=threads, quantization=entry.quantization,
        kv_cache_dtype=entry.kv_cache_dtype, memory=memory,
    )  # fmt: skip
    if is_encoder(path):
        each = seconds or (3.0 if quick else 20.0) * len(shapes)
        return encoder_shapes(options, shapes, tokens, each, quick, progress)
    how = ["--threads", str(threads), "--quantization", entry.quantization, "--kv-cache-dtype", entry.kv_cache_dtype]
    how += ["--quick"] * quick
    how += ["--seconds", str(seconds)] if seconds else []
    bars.stop()  # the other process has bars of its own
    measured_here(path, entry.name, how)
    bars.start()
    device = Device.here(threads, kv_cache_dtype=entry.kv_cache_dtype)
    known = profile_cache.load(profile_cache.cache_file(path, entry.quantization, device))
    assert known is not None
    blocks = sum(-(-(TOKENS + BLOCK) // BLOCK) + decodes * (context // BLOCK + 2) for decodes, context, _ in PROBES)
    options = msgspec.structs.replace(options, num_blocks=blocks)
    each = seconds or (SHARE_S / 3 if quick else SHARE_S) * max(1, len(shapes) - 1)
    return asdict(known) | {"parallel": step_shapes(options, shapes, each, progress)}


def _probe(decodes: int, context: int, chunk: int, most: int) -> Slices | None:
    """None where the model's sequences are shorter."""
    if max(context + 1, chunk) > most:
        return None
    return [(context, 1, True)] * decodes + [(0, chunk, True)] * (chunk > 0)


def _low(turns: Sequence[Stages]) -> float:
    """Seconds of the slowest stage, by the lowest third of its turns: on a shared machine the others are disturbed."""
    least = max(1, len(turns) // 3)
    return max(fmean(sorted(stage)[:least]) for stage in zip(*turns, strict=True))


def _part(progress: Progress, number: int, of: int, seconds: float) -> Callable[[float, float], None]:
    """Progress of one of so many equal parts as that of the whole."""
    return lambda gone, _: progress(number * seconds / of + gone, seconds)
