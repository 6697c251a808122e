"""Pictures beside the results. `python -m benchmarks.plots [NAME ...]` draws them again from the JSON that is kept."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Bars = dict[str, dict[str, float]]  # by place on the axis and series


@contextmanager
def figure(name: str, columns: int, rows: int = 1, folder: Path = RESULTS) -> Iterator[list[Any]]:
    """Axes to draw on, kept as results/NAME.png."""
    from matplotlib.figure import Figure
    from PIL import Image

    picture, drawn = Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained"), io.BytesIO()
    yield list(picture.subplots(rows, columns, squeeze=False).flat)
    picture.savefig(drawn, dpi=70)
    Image.open(drawn).convert("RGB").quantize(64).save(folder / f"{name}.png", optimize=True)  # half the bytes


@dataclass(frozen=True)
class Panel:
    """Bars in groups, and lines for goals: of a place on the axis, or of all ("")."""

    title: str
    of: str  # what the places on the axis are
    measure: str
    bars: Bars
    goals: tuple[tuple[str, float], ...] = ()
    log: bool = False

    def draw(self, axes: Any) -> None:
        series = list(dict.fromkeys(name for some in self.bars.values() for name in some))
        width, places = 0.8 / max(1, len(series)), range(len(self.bars))
        for i, name in enumerate(series):
            shown = [(place, some[name]) for place, some in enumerate(self.bars.values()) if name in some]
            at = [place + (i + 0.5) * width - 0.4 for place, _ in shown]
            axes.bar(at, [height for _, height in shown], width, label=name)
        for i, (name, value) in enumerate(self.goals):
            at, reach = (list(self.bars).index(name), 0.48) if name else ((len(self.bars) - 1) / 2, len(self.bars) / 2)
            label = "goal" if i == 0 else None
            axes.hlines(value, at - reach, at + reach, color="black", linewidth=1.5, linestyle="--", label=label)
        bottom, top = axes.get_ylim()
        if self.log:
            heights = [height for some in self.bars.values() for height in some.values()]
            bottom = 0.7 * min([*heights, *(value for _, value in self.goals)])
            axes.set_yscale("log", subs=[])
            axes.yaxis.set_major_locator(_ticks())
            axes.yaxis.set_major_formatter("{x:g}")
        room = 0.16 * (1 + len(series) // 3) if len(series) > 1 or self.goals else 0.0  # for the legend
        axes.set_ylim(bottom, top * (top / bottom) ** room if self.log else top + room * (top - bottom))
        axes.set(title=self.title, xlabel=self.of, ylabel=self.measure)
        long = max(map(len, self.bars), default=0) * len(self.bars) > 50
        axes.set_xticks(places, list(self.bars), rotation=25 if long else 0, ha="right" if long else "center")
        if len(series) > 1 or self.goals:
            axes.legend(fontsize="x-small", ncols=3, loc="upper center", framealpha=0.7)


def _ticks() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5))


def panels(result: dict) -> list[list[Panel]]:
    cases = {name: case for name, case in result.items() if isinstance(case, dict) and "skipped" not in case}
    return PICTURES[result["benchmark"]](cases)


def draw(file: Path) -> None:
    """The picture of a result, NAME.png beside NAME.json, where there is one: a row of panels a case."""
    result = json.loads(file.read_text())
    if result.get("benchmark") not in PICTURES:
        return
    rows = panels(result)
    columns = max(map(len, rows))
    with figure(file.stem, columns, len(rows), file.parent) as axes:
        for at, one in enumerate(axes):
            row = rows[at // columns]
            if at % columns < len(row):
                row[at % columns].draw(one)
            else:
                one.set_axis_off()


def _each(case: Callable[[str, dict], list[Panel]]) -> Callable[[dict], list[list[Panel]]]:
    return lambda cases: [case(name, one) for name, one in cases.items()]


def _floor(name: str, case: dict) -> list[Panel]:
    kinds = {kind: case[kind] for kind in ("fp32", "bf16", "int8") if kind in case}

    def over(what: str, *keys: str) -> Bars:
        """Of each batch or prompt, with a series for each precision, or for each key of it."""
        found: Bars = {}
        for kind, parts in kinds.items():
            for size, row in parts.get(what, {}).items():
                for key in keys:
                    label = f"{kind}, {key.split('_')[0]}" if len(keys) > 1 else kind
                    found.setdefault(size, {})[label] = row[key]
        return found

    batch, at = "sequences that decode", f"{name} ({case['machine']['cpu']})"
    sizes = over("decode", "ms")
    shares = over("prefill", "linear_fraction_of_peak", "step_fraction_of_peak")
    return [
        Panel(at, batch, "floor / time of a step", over("decode", "fraction_of_floor"),
              tuple((size, value) for size, value in (("1", 0.9), ("1", 0.75), ("32", 0.85)) if size in sizes)),
        Panel("decodes together", batch, "tokens/s over one sequence's", over("decode", "tokens_s_over_batch_1"),
              tuple((size, value) for size, value in (("8", 7), ("16", 11)) if size in sizes)),
        Panel("prompts alone", "tokens", "share of the GEMM peak", shares, (("", 0.92),)),
    ]  # fmt: skip


def _peers(name: str, case: dict) -> list[Panel]:
    row_of_panels = []
    for precision, ran in case.items():
        ratios: Bars = {}
        for engine, said in ran["engines"].items():
            for row, measures in said.get("rows", {}).items() if not engine.startswith("paceline") else ():
                for measure, one in measures.items() if isinstance(measures, dict) else ():
                    if isinstance(one, dict) and "ours_is_better_by" in one:
                        key = row if measure == "tokens_s" else measure.removesuffix("_s").replace("_", " ")
                        ratios.setdefault(key.replace("prefill", "prompt"), {})[engine] = one["ours_is_better_by"]
        goals = {"": 1.5} if precision == "int8" else {"": 1.0, "decode 8": 1.3, "decode 32": 1.3}
        goals |= {"p99 tbt": 3.0}
        title = f"{name}, {precision} ({ran['machine']['cpu'].split(' @')[0]})"
        shown = tuple((row, value) for row, value in goals.items() if not row or row in ratios)
        measure = "how many times better ours is"
        row_of_panels.append(Panel(title, "last three: of the mix", measure, ratios, shown, True))
    return row_of_panels


def _sarathi_tables(name: str, case: dict) -> list[Panel]:
    def rows(key: str, field_: str, label: Callable[[dict], str]) -> Bars:
        return {label(row): row[field_] for row in case.get(key, ()) if field_ in row}

    added = {text: 100 * case["decode_cost"][f"step_over_prompt_of_{text}"] for text in ("1021", "1024")}
    end, of = "end_to_end", "whole runs"
    if all("steady" in row for row in case["policies"]):
        end, of = "steady", "in the steady state"
    faster = "tokens/s over request-level batches'"
    found = [
        Panel(name, "prompt that it is compared with, tokens", "time that 3 decodes add to 1021 tokens, %",
              {text: {"measured": value} for text, value in added.items()}, (("1021", 2),)),
        Panel(f"table 4, {of}", "L/B/P:D", faster,
              rows("policies", end, lambda row: f"{row['L']}/{row['B']}/{row['P:D']}")),
        Panel(f"prompt to output, {of}", "P:D", faster, rows("ratio_sweep", end, lambda row: str(row["P:D"]))),
        Panel("chunks", "tokens of a chunk", "longest step with decodes, ms",
              rows("chunk_sweep", "longest_step_with_decodes_ms", lambda row: str(row["chunk"])), log=True),
    ]  # fmt: skip
    return [panel for panel in found if panel.bars]


def _gpu(name: str, case: dict) -> list[Panel]:
    engines = {engine: one for engine, one in case.items() if engine == "ours" or engine.startswith("transformers")}
    steps: Bars = {}
    for engine, one in engines.items():
        steps.setdefault("a prompt", {})[engine] = one["prompt_ms"]
        for batch, ms in one["decode_ms"].items():
            steps.setdefault(f"decode {batch}", {})[engine] = ms
    return [
        Panel(f"{name} ({case['gpu']})", "1,024 tokens, or decodes behind them", "milliseconds", steps, log=True),
        Panel("share of the floor", "sequences that decode", "bytes over bandwidth / time",
              {batch: {"ours": share} for batch, share in case["ours"]["decode_share_of_floor"].items()}, (("", 0.9),)),
        *_sarathi_tables(name, case["ours"])[:2],
    ]  # fmt: skip


def _async_steps(name: str, case: dict) -> list[Panel]:
    def over(key: str) -> Bars:
        kinds = {"composed ahead": case["async"], "in turn": case["in turn"]}
        return {
            streams: {label: kind[streams][key] for label, kind in kinds.items()} for streams in kinds["in turn"]
        }

    return [
        Panel(f"{name} ({case['gpu']})", "streams", "tokens/s of decodes", over("decoding_tokens_s"), log=True),
        Panel("between tokens", "streams", "P50, ms", over("p50_tbt_ms")),
        Panel("between tokens", "streams", "P99, ms", over("p99_tbt_ms")),
        Panel("first token", "streams", "mean, ms", over("mean_ttft_ms"), log=True),
    ]


def _tails(name: str, case: dict) -> list[Panel]:
    def over(key: str, scale: float = 1.0) -> Bars:
        found: Bars = {}
        for policy, rates in case["figures_by_share_of_the_peak"].items():
            for rate, row in rates.items():
                found.setdefault(rate, {})[policy] = scale * row[key]
        return found

    goals = {goal: 1e3 * one["tbt_s"] for goal, one in case["goals"].items()}
    rate = f"requests/s over the peak, {case['peak_requests_s']:.1f}"
    return [
        Panel(f"{name} ({case['machine']['cpu'].split(' @')[0]})", rate, "P99 time between tokens, ms",
              over("p99_tbt_s", 1e3), tuple(("", value) for value in goals.values()), True),
        Panel("prompts", rate, "P90 time to the first token, s", over("p90_ttft_s"), log=True),
        Panel("throughput", rate, "output tokens/s", over("output_tokens_s")),
    ]  # fmt: skip


def _prediction(name: str, case: dict) -> list[Panel]:
    series = {"predicted": "error", "same step again": "noise", "by the profile alone": "error_of_the_profile"}
    bars = {at.upper(): {label: 100 * case[key][at] for label, key in series.items()} for at in ("p50", "p95")}
    goals = tuple((at.upper(), 100 * value) for at, value in case["goal"].items())
    return [Panel(f"{name} ({case['machine']['cpu']})", "of steps of the mix", "off by, %", bars, goals)]


def _scheduler(cases: dict) -> list[list[Panel]]:
    steady, simulated = cases.get("steady_decoding", {}), cases.get("simulation", {})
    steps = {
        name.split("_")[0]: {"median": row["us_a_step"], "best": row["best"]}
        for name, row in steady.items() if name.endswith("_sequences")
    }  # fmt: skip
    rows = {name: row for name, row in simulated.items() if isinstance(row, dict) and "requests_a_second" in row}
    rates = {name: {"requests/s": row["requests_a_second"]} for name, row in rows.items()}
    goals = tuple((size, value) for size, value in (("32", 20.0), ("512", 200.0)) if size in steps)
    return [[
        Panel("steady decoding", "sequences", "microseconds of a step", steps, goals, True),
        Panel("simulation", "policy", "requests simulated a second", rates),
    ]]  # fmt: skip


def _faults(cases: dict) -> list[list[Panel]]:
    texts = {"noticed": "until it is noticed", "stood_still": "that streams stand still", "back": "until all is back"}
    bars = {
        key: {name: {"median": x[key]["p50"], "longest": x[key]["max"]} for name, x in cases.items()} for key in texts
    }
    return [[Panel(texts[key], "killed and stopped: a worker", "seconds", some) for key, some in bars.items()]]


def _loading(cases: dict) -> list[list[Panel]]:
    bars: Bars = {}
    for name, case in cases.items():
        for way, row in case.items():
            if isinstance(row, dict) and "gb_s" in row:
                bars.setdefault(way.replace("_", " "), {})[name] = row["gb_s"]
    return [[Panel("loading, and copying as much", "", "GB/s read and written", bars)]]


def _speculation(name: str, case: dict) -> list[Panel]:
    """The paper's Figure 1 and, where there are loads, no drafts and fixed numbers against as many as pay."""
    rows = {str(row["K"]): row for row in case["single"]["rows"] if row["K"] not in (0, "adaptive")}

    def by_depth(**keys: str) -> Bars:
        return {depth: {label: row[key] for label, key in keys.items()} for depth, row in rows.items()}

    at, tokens = f"{name} ({case['machine']['cpu'].split(' @')[0]})", "tokens drafted, K"
    shares = {"speed-up": "speed_up", "by the formula": "formula", "tokens / (K + 1)": "tokens_per_step_over_K_1"}
    found = [
        Panel(at, tokens, "speed-up; share of the tokens of a step", by_depth(**shares)),
        Panel("time of a step", tokens, "ms", by_depth(measured="ms_per_step")),
    ]
    for key, what, goal in ("none", "no drafts", 0.98), ("best_fixed", "the best fixed number", 0.97):
        over: Bars = {}
        for one in case.get("loads", ()):
            over.setdefault(str(one["requests"]), {})[f"{one['acceptance']:.2f}"] = one[f"adaptive_over_{key}"]
        if over:
            found.append(Panel("as many as pay, by acceptance", "requests", f"over {what}", over, (("", goal),), True))
    return found


def _smooth(name: str, case: dict) -> list[Panel]:
    """P99 between tokens at clients, by acceptance."""
    found: dict[float, Bars] = {}
    for row in case["rows"]:
        ways = {way: row[way]["p99_gap_ms"] for way in ("none", "at once", "evenly")}
        found.setdefault(row["dialled"], {})[str(row["requests"])] = ways
    what = "P99 between tokens, ms"
    return [Panel(f"{name}, {at:.0%} accepted", "requests", what, bars) for at, bars in found.items()]


PICTURES: dict[str, Callable[[dict], list[list[Panel]]]] = {
    "floor": _each(_floor), "peers": _each(_peers), "sarathi_tables": _each(_sarathi_tables), "tails": _each(_tails),
    "prediction": lambda cases: [[panel for name, one in cases.items() for panel in _prediction(name, one)]],
    "scheduler": _scheduler, "faults": _faults, "loading": _loading, "speculation": _each(_speculation),
    "smooth": _each(_smooth), "gpu": _each(_gpu), "async_steps": _each(_async_steps),
}  # fmt: skip


if __name__ == "__main__":
    for one in sys.argv[1:] or sorted(path.stem for path in RESULTS.glob("*.json")):
        draw(RESULTS / f"{one}.json")
