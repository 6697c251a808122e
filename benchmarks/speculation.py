"""Speculation with a dialled pair: speed-up over K against the formula, and every load against no speculation.

`single`: one request at a time, for each K, what the engine reaches, beside
(1 - a^(K+1)) / ((1 - a) (K c + T(K+1) / T(1)))
with the acceptance a, the draft's cost c and the step times T(n) measured in the same run (the paper's Figure 1), and
what K = 4 gives by how tokens are drawn (its Table 1). `loads`: so many requests at a time, at several acceptances: no
drafts, K fixed, and as many as pay (adaptive). Ways of one request take turns run by run, those of loads every few
steps, so that what the machine does in a minute happens to all of them; a ratio's error is the standard one of its
parts. Which K is best is found in steps that do not count: the best of several ways by the steps that it is compared in
is mostly one that was lucky there. Answers of a load are of different lengths: where all are as long, and nobody
drafts, they stay together, and their prompts come together in few wide steps, as those of no real load. Parts have more
or fewer prompts than belong to their tokens: what those take is evened out, by the profile. What comes in the first
second does not count: a server has learnt what it can. Draft models are in int8, which is the default, or plain: in
fp32 as their targets.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from statistics import median, stdev

from benchmarks.dialled import VOCABULARY, Dial, pair
from paceline.batching.config import SchedulerConfig
from paceline.cli.draft_profile import step_seconds
from paceline.controller import GroupConfig
from paceline.core.batch import Batch
from paceline.core.request import SamplingParams
from paceline.core.work import SliceOutput
from paceline.engine.profiler import profile
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline, Output
from paceline.speculation.costs import Costs
from paceline.speculation.lookahead import Lookahead

PROMPT = 64
# draft layers, output tokens, rounds of one request, seconds of each way of a load to find the best K and to compare,
# loads
PLANS: dict[str, tuple[int, int, int, tuple[float, float], tuple[int, ...]]] = {
    "small": (1, 96, 8, (5.0, 16.0), (1, 2, 4, 8, 16, 32)),
    "qwen2.5-0.5b": (1, 96, 3, (8.0, 16.0), (1, 4, 16)),
    "llama-3.2-1b": (1, 64, 3, (0.0, 0.0), ()),
    "small-plain-draft": (1, 96, 3, (4.0, 12.0), (1, 4, 8, 16)),
}
CASES = list(PLANS)
TURN_S, WARM_S, PARTS, MANY = 0.1, 1.0, 16, 600  # MANY: requests that no way comes to the end of
ACCEPTANCES = (0.3, 0.6, 0.8, 0.95)
DEPTHS = (0, 1, 2, 3, 4, 5, 6, 8)
FIXED = (1, 2, 4, 6, 8)
DRAWN: dict[str, dict] = {"greedy": dict(temperature=0.0), "nucleus .8": dict(top_p=0.8), "temperature 1": {}}
WAYS = {"none": (0, False), **{f"K={k}": (k, False) for k in FIXED}, "adaptive": (8, True)}  # most drafts; adaptive?


class Pair:
    """Target and draft in one engine, and counts of what a run did."""

    def __init__(self, shape: str) -> None:
        self.layers, self.output, self.rounds, self.seconds, self.loads = PLANS[shape]
        target, draft = pair(shape.removesuffix("-plain-draft"), self.layers)
        quantization = "none" if shape.endswith("-plain-draft") else "int8"
        widest = max(self.loads, default=1)
        limits = dict(max_batch_tokens=512, max_batch=widest, num_blocks=widest * 16 + 128, context=1024)
        # one for each way, which holds the same weights as the others
        self.of = {
            name: ModelRunner.load(target, drafter=str(draft), draft_quantization=quantization, **limits)
            for name in (WAYS if self.loads else ["none"])
        }
        self.runner = self.of["none"]
        self.dial = Dial(list(self.of.values()), self.layers)
        models = self.runner, ModelRunner.load(draft, quantization=quantization, **limits)
        profiles = [profile(one, max_tokens=256, max_batch=widest, seconds=20) for one in models]
        target, own = profiles
        self.costs = [Costs.of(target.step_time), Costs.of_drafts(own.step_time, own.chained)]

    def run(
        self, requests: int, most: int, at_a_time: int, adaptive: bool = False, seed: int = 0, **drawn: float
    ) -> dict[str, float]:  # fmt: skip
        """Seconds, tokens and drafts of requests that are there at once; `drawn`: how their tokens are."""
        counts: dict[str, float] = defaultdict(float)
        offline = self.offline(self.runner, at_a_time, adaptive, counts)
        begin = time.perf_counter()
        results = offline.generate(*self.requests(requests, most, seed, **drawn))
        counts["seconds"] = time.perf_counter() - begin
        return counts | {"output": sum(len(one.tokens) for one in results)}

    def requests(
        self, count: int, most: int, seed: int, apart: bool = False, temperature: float = 1.0, top_p: float = 1.0
    ) -> tuple[list[list[int]], list[SamplingParams]]:  # fmt: skip
        """`apart`: answers are of different lengths, up to half of the usual one longer or shorter."""
        prompts = [Random(100 * seed + i).choices(range(300, VOCABULARY), k=PROMPT) for i in range(count)]
        base = SamplingParams(
            max_tokens=self.output, temperature=temperature, top_p=top_p, ignore_eos=True, seeded=False,
            max_draft_tokens=most,
        )  # fmt: skip
        random, more = Random(seed), self.output // 2 if apart else 0
        lengths = [self.output + random.randint(-more, more) for _ in range(count)]
        return prompts, [replace(base, seed=1000 * seed + i, max_tokens=one) for i, one in enumerate(lengths)]

    def offline(self, runner: ModelRunner, at_a_time: int, adaptive: bool, counts: dict[str, float]) -> Offline:
        """An engine that counts what its steps do; what decodes do apart."""
        limits = SchedulerConfig(max_batch=at_a_time, num_blocks=runner.info.num_blocks)
        lookahead: Callable[[], Lookahead] | None = (lambda: self.lookahead) if adaptive else None
        offline = Offline(runner, GroupConfig(scheduler=limits, lookahead=lookahead))

        def count(batch: Batch, outputs: list[SliceOutput], forward_s: float, sample_s: float) -> None:
            counts["step_s"] += forward_s + sample_s
            counts["prompt"] += sum(one.length for one in batch.slices[batch.num_decodes :])
            counts["all_tokens"] += sum(len(output.tokens) for output in outputs)
            if batch.num_decodes == len(outputs):
                counts["decode_s"] += forward_s + sample_s
                counts["steps"] += 1
                counts["tokens"] += sum(len(output.tokens) for output in outputs)
                counts["draft_s"] += runner.draft_s
            for output in outputs:
                counts["drafted"] += output.num_draft
                counts["accepted"] += output.num_accepted
                counts["verified"] += output.num_draft > 0
                counts["tried"] += min(output.num_draft, output.num_accepted + 1)

        offline.on_step = count
        return offline

    def side_by_side(self, at_a_time: int, ways: Sequence[str], seconds: float) -> dict[str, list[dict[str, float]]]:
        """These ways under this load, by turns, so many seconds each: what each did, part by part."""
        counts = {name: defaultdict(float) for name in ways}
        flows: dict[str, Iterator[None]] = {}
        for name in ways:
            most, adaptive = WAYS[name]
            offline = self.offline(self.of[name], at_a_time, adaptive, counts[name])
            prompts, params = self.requests(MANY, most, at_a_time, apart=True)
            outputs = [Output() for _ in prompts]
            flows[name] = offline.steps(prompts, params, outputs, [0.0] * len(prompts))
        parts: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for part in (WARM_S, *[seconds / PARTS] * PARTS):
            before = {name: dict(counted) for name, counted in counts.items()}
            for turn in range(round(part / TURN_S)):
                for name, flow in flows.items():
                    while counts[name]["step_s"] - before[name].get("step_s", 0.0) < (turn + 1) * TURN_S:
                        next(flow)
            for name, some in parts.items():
                some.append({key: counts[name][key] - before[name].get(key, 0.0) for key in counts[name]})
        for flow in flows.values():
            flow.close()
        return {name: some[1:] for name, some in parts.items()}

    def rates(self, parts: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
        """Tokens a second of each part, as if each token had come with its share of a prompt."""
        linear = self.costs[0].linear
        token_s = (linear[256] - linear[128]) / 128
        rates: dict[str, list[float]] = {name: [] for name in parts}
        for name, some in parts.items():
            for part in some:
                more = part["prompt"] - part["all_tokens"] * PROMPT / self.output
                rates[name].append(part["all_tokens"] / (part["step_s"] - token_s * more))
        return rates

    def accepted_share(self, requests: int = 4) -> float:
        """The probability that a drafted token stays, if those before it did."""
        found = self.run(requests, 4, 4 if self.loads else 1, seed=77)
        return found["accepted"] / found["tried"]

    def dialled_to(self, acceptance: float) -> float:
        """Turns the dial until drafts are accepted so often; what was reached."""
        low, high, found = 1e-3, 4.0, 1.0
        self.lookahead = Lookahead(*self.costs)  # learns anew
        for _ in range(9):
            self.dial.turn((low * high) ** 0.5)
            found = self.accepted_share()
            low, high = (low, self.dial.eps) if found < acceptance else (self.dial.eps, high)
            if abs(found - acceptance) < 0.015:
                break
        return found


def run(shape: str) -> dict:
    both = Pair(shape)
    result: dict = {"draft_layers": both.layers, "vocabulary": VOCABULARY, "output": both.output}
    result["single"] = single(both)
    print(f"  single: {result['single']}", flush=True)
    result["drawn, K=4"] = drawn(both)
    print(f"  drawn: {result['drawn, K=4']}", flush=True)
    result["loads"] = [point for acceptance in ACCEPTANCES for point in loads(both, acceptance)] if both.loads else []
    return result


def single(both: Pair, acceptance: float = 0.8) -> dict:
    reached = both.dialled_to(acceptance)
    widths = step_seconds(both.runner, sorted({depth + 1 for depth in DEPTHS}), times=8)
    runs: dict[int | str, list[dict]] = defaultdict(list)
    for turn in range(both.rounds):
        for depth in DEPTHS:
            runs[depth].append(both.run(2, depth, 1, seed=turn))
        runs["adaptive"].append(both.run(2, DEPTHS[-1], 1, adaptive=True, seed=turn))
    rows = []
    for depth, found in runs.items():
        total = {key: sum(one[key] for one in found) for key in found[0]}
        per_token = total["decode_s"] / total["tokens"]
        speed_ups = [a["decode_s"] / a["tokens"] / (b["decode_s"] / b["tokens"])
                     for a, b in zip(runs[0], found, strict=True)]  # fmt: skip
        row: dict = {"K": depth, "ms_per_token": round(1e3 * per_token, 3), "speed_up": round(median(speed_ups), 3)}
        if total["drafted"]:
            a, c = total["accepted"] / total["tried"], total["draft_s"] / total["drafted"] / widths[1]
            row |= {"acceptance": round(a, 3), "draft_cost": round(c, 3),
                    "tokens_per_step": round(total["tokens"] / total["steps"], 3),
                    "ms_per_step": round(1e3 * total["decode_s"] / total["steps"], 2)}  # fmt: skip
        if depth and depth != "adaptive":
            row["tokens_per_step_over_K_1"] = round(row["tokens_per_step"] / (depth + 1), 3)
            row["formula"] = round((1 - a ** (depth + 1)) / (1 - a) / (depth * c + widths[depth + 1] / widths[1]), 3)
        rows.append(row)
    return {
        "acceptance": round(reached, 3),
        "eps": round(both.dial.eps, 4),
        "T(n)/T(1)": {n: round(seconds / widths[1], 3) for n, seconds in widths.items()},
        "T(1)_ms": round(1e3 * widths[1], 2),
        "rows": rows,
    }


def drawn(both: Pair, most: int = 4) -> dict[str, dict]:
    """The pair as it is dialled now, by how tokens are drawn."""
    rows = {}
    for name, how in DRAWN.items():
        runs = [[both.run(2, depth, 1, seed=turn, **how) for depth in (0, most)] for turn in range(both.rounds)]
        total = {key: sum(with_drafts[key] for _, with_drafts in runs) for key in runs[0][1]}
        times = [[one["decode_s"] / one["tokens"] for one in pair] for pair in runs]
        rows[name] = {
            "ms_per_token": [round(1e3 * median(some), 3) for some in zip(*times, strict=True)],
            "speed_up": round(median(alone / drafted for alone, drafted in times), 3),
            "acceptance": round(total["accepted"] / total["tried"], 3),
            "tokens_per_step": round(total["tokens"] / total["steps"], 3),
        }
    return rows


def loads(both: Pair, acceptance: float) -> list[dict]:
    reached, points = both.dialled_to(acceptance), []
    for load in both.loads:
        found = both.rates(both.side_by_side(load, list(WAYS), both.seconds[0]))
        fixed = max((f"K={k}" for k in FIXED), key=lambda name: median(_over(found[name], found["none"])))
        parts = both.side_by_side(load, ("none", fixed, "adaptive"), both.seconds[1])
        rates = both.rates(parts)
        over = {name: _over(rates["adaptive"], some) for name, some in rates.items()}
        mine = {key: sum(one[key] for one in parts["adaptive"]) for key in parts["adaptive"][0]}
        points.append({
            "acceptance": round(reached, 3), "requests": load, "best_fixed": fixed,
            "tokens_per_s_before": {name: round(median(some), 2) for name, some in found.items()},
            "tokens_per_s": {name: round(median(some), 2) for name, some in rates.items()},
            "drafted_per_token": round(mine["drafted"] / mine["all_tokens"], 3),
            "adaptive_over_none": round(median(over["none"]), 3), "error": _error(over["none"]),
            "adaptive_over_best_fixed": round(median(over[fixed]), 3), "error_of_that": _error(over[fixed]),
        })  # fmt: skip
        print(f"  {points[-1]}", flush=True)
    return points


def _over(these: list[float], those: list[float]) -> list[float]:
    return [a / b for a, b in zip(these, those, strict=True)]


def _error(ratios: list[float]) -> float:
    return round(stdev(ratios) / len(ratios) ** 0.5, 4)
