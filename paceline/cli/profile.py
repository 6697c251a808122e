"""`paceline profile`: measures a model's steps here, and says what follows for the token budget."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cli import draft_profile, fleet_file, fleet_profile, live_profile, profile_cache
from paceline.cli.accelerators import Accelerator, DType, KVDType, check
from paceline.cli.drafting import Drafting
from paceline.cli.fleet_file import Quantization, Speculation
from paceline.cli.goals import goal_budget
from paceline.cli.planning import check_file, make_folder
from paceline.cli.profile_cache import threads_of
from paceline.cli.sizes import parse_bytes
from paceline.cli.sources import default_name, resolve
from paceline.core.batch import StepShape
from paceline.core.drafter_name import FORMS
from paceline.core.model_spec import ModelSpec
from paceline.engine.encoder_config import is_encoder
from paceline.engine.precision import precision
from paceline.latency.profile import Profile

if TYPE_CHECKING:
    from paceline.engine.runner import ModelRunner

FULL_S, QUICK_S = 120.0, 12.0  # about how long to measure
MAX_TOKENS, MAX_BATCH = 512, 256  # of a step, unless told otherwise
ENCODER_TOKENS = 256  # of a text, likewise
BATCHES = (1, 8, 32, 128)
errors = Console(stderr=True, markup=False)


def profile(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE | FLEET.yaml", help="builtin:NAME, a directory or a hub id; or a fleet.")
    ],
    drafts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DRAFT ...]", help=f"With --speculation: {FORMS}."),
    ] = None,
    token_budget: Annotated[int, typer.Option(min=2, help="The widest step to measure, in tokens.")] = MAX_TOKENS,
    max_batch: Annotated[int, typer.Option(min=1, help="The most decodes of a step.")] = MAX_BATCH,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence; default: the model's own.")] = None,
    memory: Annotated[str | None, typer.Option(help="For weights and KV, such as 6GiB; default: what is left.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: the machine's cores.")] = None,
    quantization: Annotated[Quantization, typer.Option(help="Of the weights.")] = "none",
    device: Annotated[Accelerator, typer.Option(help="What computes.")] = "cpu",
    dtype: Annotated[DType, typer.Option(help="Of weights; auto: bfloat16 on GPUs; as they are on CPUs.")] = "auto",
    kv_cache_dtype: Annotated[
        KVDType, typer.Option(help="Of keys and values; auto on CPUs: float32, float16 beside int8 weights.")
    ] = "auto",
    tbt_goal: Annotated[float | None, typer.Option(min=0, help="Seconds between tokens to be held.")] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Measure what each DRAFT is worth, instead of steps.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="With --speculation: what is continued; default: Python's own sources.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps, each fewer times.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="About how long to measure a model; default: 120, quick 12.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an encoder's texts; default: its workload's in a fleet, or 256.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With FLEET.yaml: the profile file, to plan with.")] = None,
    live: Annotated[
        str | None, typer.Option(metavar="URL", help="Adds to --out how a server of it differs, under its traffic.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="PACELINE_API_KEY", help="Of that server.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time and tokens/s by width into this PNG.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the profile file here too.")] = None,
) -> None:
    """Measure what steps of a model take on this machine. `paceline serve` then chooses its token budget from it.

    Example: paceline profile builtin:coder --tbt-goal 0.05
    Which draft pays: paceline profile --speculation builtin:coder builtin:coder-draft ngram
    Every model of a fleet, in every shape: paceline profile fleet.yaml --out profile.json
    And as it serves: paceline profile fleet.yaml --out profile.json --live http://localhost:8000
    """
    if bool(drafts) != speculation:
        raise ValueError("speculation: takes the drafts behind the source, and they need --speculation")
    for option, file in (("plot", plot), ("json", json), ("out", out)):
        check_file(option, file)
    of_steps = {
        "speculation": speculation, "tbt-goal": tbt_goal is not None, "plot": plot, "memory": memory,
        "context": context, "token-budget": token_budget != MAX_TOKENS, "max-batch": max_batch != MAX_BATCH,
    }  # fmt: skip
    check(device, 1)
    precision(device, dtype, quantization, None, kv_cache_dtype)
    decoding = {"device": device != "cpu", "dtype": dtype != "auto", "kv-cache-dtype": kv_cache_dtype != "auto"}
    if source.endswith((".yaml", ".yml")):
        of_steps |= decoding
        _refuse(of_steps | {"json": json, "quantization": quantization != "none"}, "of one model, and this is a fleet")
        if out is None:
            raise ValueError("out: says where a fleet's profile goes: --out PROFILE.json")
        if live:
            to_measure = {"threads": threads, "prompt-tokens": prompt_tokens, "seconds": seconds, "quick": quick}
            _refuse(to_measure, "to measure with; --live takes what a server has measured")
            _live(Path(source), out, live, api_key)
            return
        _fleet(Path(source), out, threads, prompt_tokens, seconds, quick)
        return
    _refuse({"out": out, "live": live}, "of a fleet; one model's profile goes to --json")
    path, name = resolve(source), default_name(source)
    seconds = seconds or (QUICK_S if quick else FULL_S)
    if is_encoder(path):
        _refuse(of_steps | decoding, f"of models that generate, and {source!r} is an encoder")
        _encoder(path, name, json, threads, quantization, prompt_tokens or ENCODER_TOKENS, seconds, quick)
        return
    _refuse({"prompt-tokens": prompt_tokens}, f"of encoders, and {source!r} generates")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as for workers; before torch is imported
    limits: dict[str, Any] = {
        "threads": threads, "quantization": quantization, "device": device, "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
    }  # fmt: skip
    if speculation:
        if text and not text.is_file():
            raise ValueError(f"text: {text} is not a file")
        ways = [way for one in drafts or () for way in _ways(one, device, quantization)]
        _drafts(path, name, ways, text, 1 if quick else 3, limits, plot, json)
        return
    limits |= {
        "max_batch_tokens": max(token_budget, max_batch), "max_batch": max_batch, "context": context,
        "memory": parse_bytes(memory) if memory else None,
    }  # fmt: skip
    _steps(path, name, token_budget, limits, seconds, tbt_goal, plot, json)


def _drafts(
    path: Path, name: str, drafts: list[Speculation], text: Path | None, rounds: int, limits: dict[str, Any],
    plot: Path | None, json: Path | None,
) -> None:  # fmt: skip
    """What each way to draft is worth."""
    figure = _figure() if plot else None
    with _progress() as bars:
        told = text.read_text(encoding="utf-8") if text else draft_profile.standard_text()
        results = draft_profile.profile_drafts(path, name, drafts, told, rounds, limits, bars)
    out = Console(markup=False)
    out.print(draft_profile.table(results))
    out.print(draft_profile.advice(results), highlight=False, soft_wrap=True)
    if plot and figure:
        draft_profile.draw(figure, results, plot, name)
    if json:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def _steps(
    path: Path, name: str, token_budget: int, limits: dict[str, Any], seconds: float, tbt_goal: float | None,
    plot: Path | None, json: Path | None,
) -> None:  # fmt: skip
    """What steps take, kept for `serve`; `limits` are the engine's."""
    figure = _figure() if plot else None
    device = profile_cache.Device.here(*(limits[key] for key in ("threads", "device", "dtype", "kv_cache_dtype")))
    kept = _kept(path, limits["quantization"], device)
    from paceline.engine.kv_cache import available_bytes, held_bytes
    from paceline.engine.machine import require
    from paceline.engine.profiler import profile as measure
    from paceline.engine.runner import ModelRunner

    on, dtype, max_batch = limits["device"], limits["dtype"], limits["max_batch"]
    require(on)
    memory = limits["memory"] or available_bytes(on) + held_bytes(on)
    with _progress() as bars:
        loading = bars.add_task(f"loading {name}", total=None)
        runner = ModelRunner.load(
            path, **limits, progress=lambda done, total: bars.update(loading, completed=done, total=total)
        )
        steps = bars.add_task(f"profiling {name}", total=None)
        result = measure(
            runner, max_tokens=token_budget, max_batch=max_batch, seconds=seconds,
            quantization=precision(on, dtype, limits["quantization"], path).weights,
            progress=lambda done, total: bars.update(steps, completed=done, total=total),
        )  # fmt: skip
    for file in (kept, json):
        if file:
            profile_cache.save(file, name, result, device)
    out = Console(markup=False)
    out.print(widths_table(result))
    out.print(findings(result), highlight=False)
    out.print(budgets_table(result, max_batch, runner.info.num_blocks * runner.info.block_size, runner.info.context))
    out.print(batch_table(runner, memory))
    if tbt_goal is not None:
        out.print(goal_line(name, result, tbt_goal, max_batch, runner.info.context), highlight=False)
    if plot and figure:
        draw(figure, result, plot, name)
    errors.print(f"kept in {kept}", highlight=False, soft_wrap=True)


def _kept(path: Path, quantization: str, device: profile_cache.Device) -> Path:
    """The file in the cache that is to be written. Raises ValueError where it could not be."""
    kept = profile_cache.cache_file(path, quantization, device)
    make_folder("XDG_CACHE_HOME", kept.parent)
    return kept


def _ways(draft: str, device: str, target: str) -> list[Speculation]:
    """To draft so: on a CPU a draft model in int8 and, if the target is not, as it is."""
    if draft == "none":
        raise ValueError(f"speculation: {draft!r} drafts nothing; a draft is {FORMS}")
    drafting = Drafting.of(Speculation(drafter=draft), device)
    kinds = [drafting.quantization, *(["none"] if device == "cpu" and drafting.model and target == "none" else [])]
    return [Speculation(drafter=draft, quantization=kind) for kind in kinds]  # type: ignore[arg-type]


def _refuse(options: dict[str, Any], whose: str) -> None:
    """Raises ValueError for the first option that is given, and is not for this."""
    given = next((option for option, value in options.items() if value), None)
    if given:
        raise ValueError(f"{given}: is {whose}")


def _live(source: Path, out: Path, url: str, api_key: str | None) -> None:
    file = fleet_file.load(source)
    found = live_profile.measured(url, api_key)
    live_profile.add(out, found, file, threads_of(file.cluster.count if file.shares else None))
    Console(markup=False).print(live_profile.live_table(found))


def _fleet(
    source: Path, out: Path, threads: int | None, tokens: int | None, seconds: float | None, quick: bool
) -> None:
    file = fleet_file.load(source)
    each = threads or threads_of(file.cluster.count)
    assert each is not None
    with _progress() as bars:
        found = fleet_profile.fleet(file, each, tokens, seconds, quick, bars)
    profile_cache.write(out, found)
    Console(markup=False).print(fleet_profile.shapes_table(found))
    errors.print(f"kept in {out}", highlight=False, soft_wrap=True)


def _encoder(
    path: Path, name: str, json: Path | None, threads: int | None, quantization: str, tokens: int, seconds: float,
    quick: bool,
) -> None:  # fmt: skip
    device = profile_cache.Device.here(threads)
    kept = _kept(path, quantization, device)
    with _progress() as bars:
        task = bars.add_task(f"profiling {name}", total=None)

        def progress(gone: float, planned: float) -> None:
            bars.update(task, completed=gone, total=planned)

        entry = fleet_profile.encoder_alone(path, tokens, threads, quantization, seconds, quick, progress)
    for file in (kept, json):
        if file:
            profile_cache.write(file, {"models": {name: entry}, "device": device, "error": entry["error"]})
    out, wrong = Console(markup=False), entry["error"]
    out.print(fleet_profile.encoder_table(entry))
    out.print(f"error at lengths between: P50 {wrong['p50']:.1%}, P95 {wrong['p95']:.1%}", highlight=False)
    errors.print(f"kept in {kept}", highlight=False, soft_wrap=True)


def widths_table(result: Profile) -> Table:
    """One line a power of two and a tile more: time, rate, and both floors."""
    table = Table(box=None, pad_edge=False, title="prompt chunks from context 0", title_justify="left")
    for column in ("tokens", "ms", "tokens/s", "floor: bytes ms", "operations ms", "share of the floor"):
        table.add_column(column, justify="right")
    for tokens, seconds in result.widths.items():
        if tokens & (tokens - 1) and (tokens - 1) & (tokens - 2) and tokens != result.max_tokens:
            continue
        shape = StepShape().add(0, tokens, True)
        floors = result.roofline.seconds(shape)
        cells = [f"{1e3 * value:.2f}" for value in floors]
        table.add_row(
            str(tokens), f"{1e3 * seconds:.2f}", f"{tokens / seconds:,.0f}", *cells, f"{max(floors) / seconds:.0%}"
        )
    return table


def findings(result: Profile) -> str:
    """Knee, tiles, cliffs, coefficients and errors, a line each."""
    model, microseconds = result.step_time, 1e6
    tiles = ", ".join(f"{tile} from {begin} on" for begin, tile in result.tiles)
    cliffs = ", ".join(f"{cliff.tokens} -> {cliff.tokens + 1} {cliff.rise:+.0%}" for cliff in result.cliffs)
    return "\n".join(
        [
            f"knee {result.knee} tokens; tiles: {tiles}; cliffs: {cliffs or 'none'}",
            f"microseconds: token yielded {model.emit * microseconds:.1f}, decode {model.decode * microseconds:.1f} "
            f"and {model.decode_context * microseconds:.3f} per token of context, chunk "
            f"{model.chunk * microseconds:.1f}, {model.chunk_context * microseconds:.3f} per token before it and "
            f"{model.chunk_pair * microseconds:.5f} per query-key pair",
            f"error on mixes not fitted: P50 {result.error.p50:.1%}, P95 {result.error.p95:.1%}; the same steps "
            f"repeated (noise floor): P50 {result.noise.p50:.1%}, P95 {result.noise.p95:.1%}",
            f"measured with it: {result.roofline.bandwidth / 1e9:.1f} GB/s, {result.roofline.peak / 1e9:.0f} GFLOP/s",
        ]
    )


def worst(decodes: int, context: int) -> StepShape:
    """So many decodes, all at this context."""
    return StepShape(tokens=decodes, emits=decodes, decodes=decodes, decode_context=decodes * context)


def budgets_table(result: Profile, max_batch: int, pool: int, context: int) -> Table:
    """Time of a step as wide as the knee by decodes and contexts, the worst that the KV pool can hold last."""
    title = "decodes alone, and with a chunk up to the knee"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in ("decodes", "context each", "ms", "ms with the chunk"):
        table.add_column(column, justify="right")
    for decodes in sorted({min(batch, max_batch) for batch in (*BATCHES, max_batch)}):
        each = min(context - 1, pool // decodes)
        shape = worst(decodes, each)
        chunk = max(1, result.knee - decodes)
        seconds = (result.step_time.seconds(s) for s in (shape, shape.add(max(0, each - chunk), chunk, True)))
        table.add_row(str(decodes), str(each), *(f"{1e3 * value:.1f}" for value in seconds))
    return table


def batch_table(runner: "ModelRunner", limit: int) -> Table:
    """SARATHI's bound on the batch, floor((M_G - M_S) / (L m_kv)), and what fits with everything else in memory."""
    from paceline.engine.kv_cache import pool_blocks

    info, token_bytes = runner.info, runner.cache.token_bytes
    spec = ModelSpec("", info.weight_bytes, token_bytes, info.context)
    used = info.planned_bytes - info.kv_bytes
    blocks = pool_blocks(token_bytes, info.block_size, used=used, memory=limit, useful_tokens=1 << 60)
    table = Table(box=None, pad_edge=False, title=f"largest batch in {limit / 2**30:.1f} GiB", title_justify="left")
    for column in ("sequence length", "bound (M_G - M_S) / (L m_kv)", "fits"):
        table.add_column(column, justify="right")
    for length in sorted({min(length, info.context) for length in (1024, 2048, 4096, info.context)}):
        fits = blocks // -(-length // info.block_size)
        table.add_row(str(length), str(spec.max_sequences(limit, length)), str(fits))
    return table


def goal_line(name: str, result: Profile, tbt: float, max_batch: int, context: int) -> str:
    """SARATHI's ideal chunk size, turned round: the budget that the goal leaves, or how many decodes hold it at all."""
    budget = goal_budget(name, result, result.max_tokens, tbt)
    lines = []
    for decodes in sorted({min(batch, max_batch) for batch in (*BATCHES, max_batch)}):
        shape = worst(decodes, context - 1)
        width = budget(shape, [(max(0, context - result.max_tokens), result.max_tokens)], None)
        held = result.step_time.seconds(shape) <= tbt
        lines.append(f"{decodes} decodes: {f'budget {width}' if held else 'more than the goal allows'}")
    return f"goal {1e3 * tbt:.1f} ms, all contexts at {context}: " + "; ".join(lines)


def draw(figure: Any, result: Profile, path: Path, name: str) -> None:
    """Time and rate by width: measured, predicted, floor."""
    widths = list(result.widths)
    shapes = [StepShape().add(0, width, True) for width in widths]
    curves = {
        "measured": [result.widths[width] for width in widths],
        "predicted": [result.step_time.seconds(shape) for shape in shapes],
        "floor": [max(result.roofline.seconds(shape)) for shape in shapes],
    }
    time, rate = figure.subplots(1, 2)
    for label, seconds in curves.items():
        style = "." if label == "measured" else "-"
        time.plot(widths, [1e3 * s for s in seconds], style, label=label)
        rate.plot(widths, [w / s for w, s in zip(widths, seconds, strict=True)], style, label=label)
    rate.axvline(result.knee, color="grey", linestyle=":", label=f"knee {result.knee}")
    rate.set_ylim(0, 1.5 * max(w / s for w, s in result.widths.items()))
    for axes, label in ((time, "ms"), (rate, "tokens/s")):
        axes.set_xlabel("tokens in the step")
        axes.set_ylabel(label)
        axes.legend()
    figure.suptitle(f"{name}: a prompt chunk from context 0")
    figure.savefig(path)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot: needs matplotlib; install paceline[plot]") from None
    return Figure(figsize=(11, 4.5), layout="constrained")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True)
