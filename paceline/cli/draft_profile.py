"""`paceline profile --speculation`: which draft, and how many tokens of it, for one request at a time on this machine.

Three things decide (Leviathan et al., 2023; Chen et al., 2023): how often drafted tokens are accepted, place by place;
what drafting one costs, c, in steps of the target, and the first of a step more; and how much longer a step of n tokens
takes than one of 1, T(n). The speed-up of K tokens is then predicted as (1 + survivals of K places) / (K c + T(K + 1) /
T(1)), on average over the lengths that drafts have (n-grams often have nothing). Some K, among them the best, are
measured against no drafts, by turns.
"""

import inspect
import json
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from rich.progress import Progress
from rich.table import Table

from paceline.cli.drafting import Drafting
from paceline.cli.fleet_file import Speculation
from paceline.core.batch import Batch
from paceline.core.request import SamplingParams
from paceline.core.work import SliceOutput
from paceline.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.engine.runner import ModelRunner

DEEPEST = 8  # tokens of a draft
SWEEP = (1, 2, 4, 8)  # measured once, beside the best
TEMPERATURES = (0.0, 0.8, 1.0)
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 96, 48
SETTLED_S = 0.05  # of steps like the one that is measured before it, where eight of them take so long
MODULES = (json.decoder, inspect, tokenize)  # text that every machine has


@dataclass(frozen=True, slots=True)
class Counts:
    """Of decodes: what they took and yielded. By place in the draft: how often it was reached, and kept."""

    seconds: float
    draft_seconds: float
    tokens: int
    tried: np.ndarray
    kept: np.ndarray
    lengths: np.ndarray  # decodes by tokens drafted, from none on

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def drafted(self) -> int:
        return int(self.lengths @ np.arange(len(self.lengths)))


@dataclass(frozen=True, slots=True)
class DraftResult:
    """One draft at one temperature. Times in steps of the target alone."""

    draft: str  # as a fleet file says it
    quantization: str | None
    temperature: float
    acceptance: float  # of tokens whose predecessors stayed
    cost: float  # of a drafted token, at the best K
    widths: dict[int, float]  # T(n) / T(1)
    predicted: dict[int, float]  # speed-up by K
    sweep: dict[int, float]  # measured speed-up by K
    measured: float  # at the best K

    @property
    def label(self) -> str:
        return self.draft + f", quantization: {self.quantization}" * (self.quantization is not None)

    @property
    def best(self) -> int:
        return max(self.predicted, key=lambda depth: self.predicted[depth])


def profile_drafts(
    path: Path, name: str, drafts: list[Speculation], text: str, rounds: int, limits: dict[str, Any], bars: Progress
) -> list[DraftResult]:
    """Loads the model with each draft in turn, and measures. Raises ValueError for a text that is too short."""
    from paceline.engine.runner import ModelRunner

    tokens = Tokenizer.load(path).encode(text, add_special_tokens=False)
    if len(tokens) < PROMPT_TOKENS:
        raise ValueError(f"text: has {len(tokens)} tokens, fewer than the {PROMPT_TOKENS} of a prompt")
    results: list[DraftResult] = []
    for one in drafts:
        drafting = Drafting.of(one, limits["device"])
        loading = bars.add_task(f"loading {name}, {one.drafter}", total=None)
        room = {"max_batch_tokens": 256, "max_batch": 1, "num_blocks": 32}
        runner = ModelRunner.load(
            path,
            drafter=str(drafting.drafter),
            draft_quantization=drafting.quantization,
            progress=lambda done, total, task=loading: bars.update(task, completed=done, total=total),  # type: ignore[misc]
            **room | limits,
        )
        if runner.info.undrafted:
            raise ValueError(f"speculation.drafter: {runner.info.undrafted}")
        measuring = bars.add_task(f"measuring {one.drafter}", total=len(TEMPERATURES) * stages(rounds))
        results += measure(runner, one, prompts(tokens), rounds, lambda task=measuring: bars.advance(task))  # type: ignore[misc]
        runner.release()
    return results


def prompts(tokens: list[int]) -> list[list[int]]:
    """Pieces of a text, from all over it."""
    stride = max(1, (len(tokens) - PROMPT_TOKENS) // PROMPTS)
    return [tokens[i * stride :][:PROMPT_TOKENS] for i in range(PROMPTS)]


def standard_text() -> str:
    """Python sources, where nobody says what the model is used for."""
    return "\n".join(inspect.getsource(module) for module in MODULES)


def measure(
    runner: "ModelRunner", draft: Speculation, texts: list[list[int]], rounds: int, progress: Callable[[], None]
) -> Iterable[DraftResult]:
    """What this draft is worth at each temperature; `progress` is called `stages(rounds)` times for each."""
    for temperature in TEMPERATURES:
        seen = run(runner, texts, DEEPEST, temperature)
        progress()
        steps = step_seconds(runner, range(1, DEEPEST + 2))
        widths = {n: seconds / steps[1] for n, seconds in steps.items()}
        progress()
        costs = draft_costs(run(runner, texts, 1, temperature), seen, steps[1])
        progress()
        predicted = {depth: predict(seen, depth, costs, widths) for depth in range(1, DEEPEST + 1)}
        best = max(predicted, key=lambda depth: predicted[depth])
        sweep: dict[int, float] = {}
        ratios = []
        for number in range(rounds):
            depths = (0, best, *SWEEP) if number == 0 else (0, best)
            took = {}
            for depth in depths:
                if depth not in took:
                    took[depth] = run(runner, texts, depth, temperature).per_token
                progress()
            ratios.append(took[0] / took[best])
            sweep |= {depth: took[0] / seconds for depth, seconds in took.items() if depth and depth not in sweep}
        sweep[best] = median(ratios)
        acceptance = float(seen.kept.sum() / max(1, seen.tried.sum()))
        name = draft.drafter, draft.quantization
        yield DraftResult(*name, temperature, acceptance, costs[best] / best, widths, predicted, sweep, sweep[best])


def stages(rounds: int) -> int:
    return 3 + 2 * rounds + len(SWEEP)


def draft_costs(short: Counts, long: Counts, step: float) -> list[float]:
    """Of drafts by their length, from none to `DEEPEST`, in steps of so many seconds: from what those of one token
    took, and those of all lengths."""
    first = short.draft_seconds / max(1, short.drafted)
    drafts = int(long.lengths[1:].sum())
    further = max(0.0, long.draft_seconds - first * drafts) / max(1, long.drafted - drafts)
    return [0.0, *((first + further * more) / step for more in range(DEEPEST))]


def predict(seen: Counts, depth: int, costs: list[float], widths: dict[int, float]) -> float:
    """The speed-up of at most `depth` drafted tokens, from what was seen with `DEEPEST`."""
    survival = np.cumprod((seen.kept + 0.5) / (seen.tried + 1))
    tokens = seconds = 0.0
    for length, count in enumerate(seen.lengths.tolist()):
        some = min(length, depth)
        tokens += count * float(1 + survival[:some].sum())
        seconds += count * (costs[some] + widths[some + 1])
    return tokens / seconds


def run(runner: "ModelRunner", texts: list[list[int]], depth: int, temperature: float) -> Counts:
    """Continues each text alone, with at most `depth` tokens drafted a step."""
    from paceline.batching.config import SchedulerConfig
    from paceline.controller import GroupConfig
    from paceline.runtime.offline import Offline

    totals, tried, kept = np.zeros(3), np.zeros(DEEPEST, np.int64), np.zeros(DEEPEST, np.int64)
    lengths = np.zeros(DEEPEST + 1, np.int64)

    def count(batch: Batch, outputs: list[SliceOutput], forward_s: float, sample_s: float) -> None:
        if batch.num_decodes < len(outputs):
            return
        tokens = sum(len(output.tokens) for output in outputs)
        totals[:] += forward_s + sample_s, runner.draft_s, tokens
        for output in outputs:
            lengths[output.num_draft] += 1
            kept[: output.num_accepted] += 1
            tried[: min(output.num_draft, output.num_accepted + 1)] += 1

    params = [
        SamplingParams(
            max_tokens=OUTPUT_TOKENS, temperature=temperature, ignore_eos=True, seed=i, seeded=False,
            max_draft_tokens=depth,
        )
        for i in range(len(texts))
    ]  # fmt: skip
    limits = SchedulerConfig(max_batch=1, num_blocks=runner.info.num_blocks, block_size=runner.info.block_size)
    offline = Offline(runner, GroupConfig(scheduler=limits))
    offline.on_step = count
    offline.generate(texts, params)
    seconds, draft_seconds, tokens = totals.tolist()
    return Counts(seconds, draft_seconds, int(tokens), tried, kept, lengths)


def step_seconds(runner: "ModelRunner", widths: Iterable[int], times: int = 5) -> dict[int, float]:
    """By width: a step of the target that verifies so many tokens but one of one sequence. They come from its prompt,
    which takes next to no time. Widths take turns, and each step comes behind others like it, as in serving: the first
    ones behind a prompt are slower."""
    from time import perf_counter

    from paceline.core.work import NewSequence, SliceWork
    from paceline.engine.drafters import InTurn, PromptLookup

    known, taken = PROMPT_TOKENS + 1, {rows: list[float]() for rows in widths}
    tokens, names = [3 + i % 50 for i in range(known)], range(-1, -9, -1)  # which share what is known of the prompt
    kept = runner.drafter
    if not isinstance(kept, PromptLookup):  # with which steps overlap
        runner.drafter = InTurn(PromptLookup())
    try:
        for _ in range(times + 1):
            for rows, some in taken.items():
                blocks = list(range(-(-(PROMPT_TOKENS + rows) // runner.info.block_size)))
                params = SamplingParams(max_draft_tokens=rows - 1)
                new = [NewSequence(name, tokens, known, params) for name in names]
                runner.step(new, [SliceWork(names[0], 0, PROMPT_TOKENS, False, 0, blocks)], [])
                began = perf_counter()
                for name in names:
                    own = [] if name == names[0] else blocks
                    work = SliceWork(name, PROMPT_TOKENS, rows, True, len(blocks) - len(own), own, rows - 1)
                    begin = perf_counter()
                    (output,), *_ = runner.step([], [work], [])
                    seconds = perf_counter() - begin
                    if output.error:
                        raise RuntimeError(f"a step failed: {output.error}")
                    assert output.num_draft == rows - 1
                    if name != names[0] and begin - began > SETTLED_S:
                        break
                some.append(seconds)
                runner.step([], [], list(names))
    finally:
        runner.drafter = kept
    return {rows: median(some[1:]) for rows, some in taken.items()}


def table(results: list[DraftResult]) -> Table:
    out = Table(box=None, pad_edge=False, title="drafts, one request at a time", title_justify="left")
    out.add_column("draft", overflow="fold")
    for column in ("T", "acceptance", "c", "best K", "T(K+1)", "predicted", "measured"):
        out.add_column(column, justify="right")
    for one in results:
        numbers = f"{one.acceptance:.2f}", f"{one.cost:.3f}", str(one.best), f"{one.widths[one.best + 1]:.2f}"
        speed_ups = f"{one.predicted[one.best]:.2f}x", f"{one.measured:.2f}x"
        out.add_row(one.label, f"{one.temperature:g}", *numbers, *speed_ups)
    return out


def advice(results: list[DraftResult]) -> str:
    """The draft that is best over all temperatures, as lines for a fleet file."""
    drafts = list(dict.fromkeys((one.draft, one.quantization) for one in results))
    of = {draft: [one for one in results if (one.draft, one.quantization) == draft] for draft in drafts}
    mean = {draft: float(np.exp(np.mean([np.log(one.measured) for one in some]))) for draft, some in of.items()}
    best = max(drafts, key=lambda draft: mean[draft])
    if mean[best] <= 1:
        return "no draft pays for one request at a time: speculation: {drafter: none}"
    keys = {"drafter": best[0], "quantization": best[1], "max_draft_tokens": max(one.best for one in of[best])}
    keys = {key: value for key, value in keys.items() if value is not None}
    line = yaml.safe_dump(keys, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return f"best: {mean[best]:.2f}x on average with  speculation: {line}"


def draw(figure: Any, results: list[DraftResult], path: Path, name: str) -> None:
    """Speed-up over K, one line a draft and temperature: predicted, and measured with more rounds for the best."""
    axes = figure.subplots()
    for one in results:
        (line,) = axes.plot(one.predicted.keys(), one.predicted.values(), label=f"{one.label}, T = {one.temperature:g}")
        axes.plot(one.sweep.keys(), one.sweep.values(), ".", color=line.get_color())
        axes.plot([one.best], [one.measured], "o", color=line.get_color())
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xlabel="drafted tokens K", ylabel="speed-up", title=f"{name}: predicted (lines), measured (dots)")
    axes.legend(fontsize="small")
    figure.savefig(path)
