"""Drafts of the built-in pair on held-out Python, and what judging drafts costs.

`builtin`: files that no built-in model was trained on, one request at a time: tokens/s over those without drafts, for
each drafter, temperature and number of drafted tokens, by turns. The trigram table is of the training files.
`verdict`: the acceptance step alone (log-probabilities of target rows, the rule, last tokens) at a vocabulary of 32,768
with 16 requests and 4 drafted tokens each, over a step of the target with as many rows.
`one_call`: a dialled pair of the 55M shape, one request at a time at temperature 1, whose drafts are one call, and pass
by pass: speed-ups over no drafts, and what a drafted token takes.
`served`: the built-in model behind a server, where as many tokens are drafted as pay, which are few: streams that go on
from held-out text at temperature 1, the sum of their tokens/s over that of those without a drafter, by turns in random
order. Two groups have none: what they differ by says what these figures are good for.
"""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

import torch

from benchmarks.async_steps import streams
from benchmarks.checkpoints import checkpoint
from benchmarks.dialled import Dial, pair
from benchmarks.http_streams import ready
from benchmarks.plots import figure
from paceline.cli.draft_profile import prompts
from paceline.cli.draft_profile import run as decode
from paceline.cli.sources import BUILTIN
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine.job import Job
from paceline.engine.runner import ModelRunner
from paceline.engine.tokenizer import Tokenizer
from paceline.engine.verdict import judged
from scripts.builtin_models.data import read_corpus

CASES = ["builtin", "verdict", "one_call", "served"]
EPSILONS, LENGTHS, TEXTS = (0.106, 0.049), (0, 2, 4, 6), 4  # accept 60 and 80 %
SERVED = {"none": "none", "none again": "none", "model": "builtin:coder-draft", "n-gram": "ngram"}
STREAMS, TURNS = (1, 4, 16), 20
TEMPERATURES, DEPTHS, ROUNDS = (0.0, 0.8, 1.0), (1, 2, 4), 2
VOCABULARY, REQUESTS, DRAFTED, SCATTER = 32_768, 16, 4, 0.5


def run(case: str) -> dict:
    return {"builtin": builtin, "verdict": verdict, "one_call": one_call, "served": served}[case]()


def held_out_tokens(files: list) -> list[int]:
    text = "\n".join(file.text for file in files if file.held_out)
    return Tokenizer.load(BUILTIN / "coder").encode(text, add_special_tokens=False)


def served() -> dict:
    tokens, random = held_out_tokens(read_corpus()), Random(3)
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.yaml"
        models = [
            {"name": name, "source": "builtin:coder", "speculation": {"drafter": drafter, "max_draft_tokens": 8}}
            for name, drafter in SERVED.items()
        ]
        fleet.write_text(json.dumps({"models": models}))
        command = [sys.executable, "-m", "paceline.cli.main", "serve", str(fleet), "--port", "0", "--memory", "8GiB"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            port, found = ready(server), {}
            for count in STREAMS:
                rates: dict[str, list[float]] = {name: [] for name in SERVED}
                for turn in range(TURNS + 1):  # the first to warm up
                    for name in random.sample(list(SERVED), len(SERVED)):
                        begins = [random.randrange(len(tokens) - 64) for _ in range(count)]
                        texts = [tokens[begin : begin + 64] for begin in begins]
                        rate = asyncio.run(streams(port, name, texts, 1.0))["sum_of_tokens_s"]
                        rates[name] += [rate] * (turn > 0)
                over = {
                    name: sorted(a / b for a, b in zip(some, rates["none"], strict=True))
                    for name, some in rates.items() if name != "none"
                }
                found[f"{count} streams"] = {"none, tokens/s": round(median(rates["none"]), 1)} | {
                    f"{name}, over none": {
                        "of all turns": round(sum(rates[name]) / sum(rates["none"]), 3),
                        "median": round(median(some), 3),
                        "quartiles": [round(some[len(some) // 4], 3), round(some[-1 - len(some) // 4], 3)],
                    }
                    for name, some in over.items()
                }
                print(f"  {count}: {found[f'{count} streams']}", flush=True)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    return {"turns": TURNS} | found


def builtin() -> dict:
    files, random = read_corpus(), Random(3)
    tokens = held_out_tokens(files)
    texts = [text for _ in range(2) for text in prompts(tokens[random.randrange(len(tokens) // 2) :])]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "training.txt"
        text.write_text("\n".join(file.text for file in files if not file.held_out and not file.is_test))
        model = str(BUILTIN / "coder-draft")
        names = {
            "n-gram": "ngram", "trigram": f"trigram:{text}", "early exit": "early_exit", "model": model,
            "model in int8": model, "model, pass by pass": model, "n-gram, else model": f"ngram+{model}",
        }  # fmt: skip
        options = dict(max_batch_tokens=256, max_batch=1, num_blocks=64)
        runners = {
            name: ModelRunner.load(
                BUILTIN / "coder", drafter=drafter, draft_quantization="int8" if "int8" in name else None, **options
            )
            for name, drafter in names.items()
        }
    runners["model, pass by pass"].drafter.model.chain = None
    result: dict = {"held_out_files": sum(file.held_out for file in files), "requests": len(texts)}
    for temperature in TEMPERATURES:
        seconds: dict[tuple[str, int], list[float]] = {}
        seen = {}
        for turn in range(ROUNDS + 1):  # the first to warm up
            for name, runner in runners.items():
                for depth in (0, *DEPTHS):
                    counts = decode(runner, texts, depth, temperature)
                    seen[name, depth] = counts
                    if turn:
                        seconds.setdefault((name, depth), []).append(counts.per_token)
        rows = {}
        for name in runners:
            best = {
                depth: median(a / b for a, b in zip(seconds[name, 0], seconds[name, depth], strict=True))
                for depth in DEPTHS
            }
            counts = seen[name, DEPTHS[-1]]
            rows[name] = {
                "speed_up": {depth: round(ratio, 3) for depth, ratio in best.items()},
                "acceptance": round(float(counts.kept.sum() / max(1, counts.tried.sum())), 3),
                "ms_per_token": round(1e3 * median(seconds[name, 0]), 3),
                "draft_ms_per_token": round(1e3 * counts.draft_seconds / max(1, counts.drafted), 3),
            }
            print(f"  T = {temperature}, {name}: {rows[name]}", flush=True)
        result[f"temperature {temperature:g}"] = rows
    with figure("speculation_builtin", 3) as axes:
        for ax, temperature in zip(axes, TEMPERATURES, strict=True):
            for name, row in result[f"temperature {temperature:g}"].items():
                ax.plot(list(row["speed_up"]), list(row["speed_up"].values()), "o-", label=name)
            ax.axhline(1.0, color="gray", linewidth=0.8)
            ax.set(xlabel="drafted tokens K", ylabel="speed-up", title=f"held-out Python, T = {temperature:g}")
        axes[0].legend(fontsize="small")
    return result


def one_call() -> dict:
    target, draft = pair("small", 1)
    options = dict(max_batch_tokens=256, max_batch=1, num_blocks=64, context=1024)
    runners = {
        name: ModelRunner.load(target, drafter=str(draft), draft_quantization="int8", **options)
        for name in ("one call", "pass by pass")
    }
    assert runners["one call"].drafter.model.chain is not None
    runners["pass by pass"].drafter.model.chain = None
    dial, random, found = Dial(list(runners.values()), 1), Random(3), {}
    texts = [random.choices(range(300, VOCABULARY // 2), k=96) for _ in range(TEXTS)]
    for epsilon in EPSILONS:
        dial.turn(epsilon)
        seen: dict[tuple[str, int], list] = {}
        for turn in range(2 * ROUNDS + 1):  # the first to warm up
            for name, runner in runners.items():
                for depth in LENGTHS:
                    counts = decode(runner, texts, depth, 1.0)
                    if turn:
                        seen.setdefault((name, depth), []).append(counts)
        for name in runners:
            rows = {}
            for depth in LENGTHS[1:]:
                some, none = seen[name, depth], seen[name, 0]
                rows[f"K={depth}"] = {
                    "speed_up": round(median(a.per_token / b.per_token for a, b in zip(none, some, strict=True)), 3),
                    "accepted": round(float(some[0].kept.sum() / max(1, some[0].tried.sum())), 3),
                    "draft_ms_per_token": round(1e3 * median(one.draft_seconds / one.drafted for one in some), 3),
                }
            found.setdefault(f"epsilon {epsilon}", {})[name] = rows
            print(f"  {epsilon}, {name}: {rows}", flush=True)
    return found


def verdict(shape: str = "qwen2.5-0.5b") -> dict:
    """Logits of the rows are random, those of a draft scatter about the target's; the step is that of a real model of
    the shape."""
    runner = ModelRunner.load(checkpoint(shape), max_batch_tokens=512, max_batch=REQUESTS, num_blocks=200)
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(max_tokens=64, max_draft_tokens=DRAFTED, seeded=False)
    logits, jobs = 2.5 * torch.randn(REQUESTS, 1 + DRAFTED, VOCABULARY, generator=generator), []
    for i in range(REQUESTS):
        runner.step([NewSequence(i, [5 + i] * 80, 80, params)], [], [])
        job = Job(SliceWork(i, 79, 1 + DRAFTED, True, 0, [], DRAFTED), runner.sequences[i])
        rows = (logits[i, :DRAFTED] + SCATTER * torch.randn(DRAFTED, VOCABULARY, generator=generator)).log_softmax(-1)
        job.draft = rows.exp().multinomial(1, generator=generator).squeeze(1).tolist()
        job.draft_rows, job.first_row = list(rows), i * (1 + DRAFTED)
        jobs.append(job)
    taken, kept = [], []
    with torch.inference_mode():
        for _ in range(20):
            begin = time.perf_counter()
            verdicts = judged(jobs, logits.flatten(0, 1), runner.by_block)
            taken.append(time.perf_counter() - begin)
            kept += [count for count, _ in verdicts]
    steps, decodes, blocks = [], [], 6
    for _ in range(8):
        new = [NewSequence(100 + i, [7 + i] * 85, 85, SamplingParams(max_draft_tokens=0)) for i in range(REQUESTS)]
        runner.step(new, [SliceWork(100 + i, 0, 80, False, 0, list(range(i * blocks, (i + 1) * blocks)))
                          for i in range(2)], [])  # fmt: skip
        tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(REQUESTS)]
        for i in range(2, REQUESTS):
            runner.step([], [SliceWork(100 + i, 0, 80, False, 0, tables[i])], [])
        for start, length, some in ((80, 1 + DRAFTED, steps), (85, 1, decodes)):
            begin = time.perf_counter()
            runner.step([], [SliceWork(100 + i, start, length, True, blocks, []) for i in range(REQUESTS)], [])
            some.append(time.perf_counter() - begin)
        runner.step([], [], [100 + i for i in range(REQUESTS)])
    judging, step, decode_step = median(taken[3:]), median(steps[1:]), median(decodes[1:])
    return {"shape": shape, "vocabulary": VOCABULARY, "requests": REQUESTS, "K": DRAFTED,
            "kept": round(sum(kept) / len(kept), 2), "verdicts_ms": round(1e3 * judging, 2),
            "step_ms": round(1e3 * step, 1), "share_of_step": round(judging / (judging + step), 4),
            "decode_ms": round(1e3 * decode_step, 1), "share_of_decode": round(judging / decode_step, 4)}  # fmt: skip
