"""Speculation against the target alone: the joint law of three tokens, 1e6 samples a case, and 1,000 seeded requests.

A law is that of a tiny model through the whole engine; how many standard deviations the chi-square test is off (3.7 is
exceeded once in 10,000 times). Steps are wide, or (`disturbed`) so narrow that prompts come in parts, with a sequence
preempted before every second of them: how many samples that happened to is counted, and must be a tenth or more.
`seeded`: mixed requests that name their seed, tokens compared one by one with those of a run without drafts.
"""

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random

from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import BUILTIN
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.engine.runner import ModelRunner
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.offline import Offline
from paceline.speculation.costs import Costs
from paceline.speculation.lookahead import Lookahead
from tests.engine import law
from tests.engine.schedules import forced

SAMPLES = int(os.environ.get("SAMPLES", 1_000_000))
PART = 20_000  # samples at a time
PENALTIES = dict(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3, min_tokens=4, stop_token_ids=(3,))
LAWS: dict[str, dict] = {
    "K=0": dict(draft=0),
    "temperature 0.6, K=1": dict(draft=1, temperature=0.6),
    "K=3": dict(draft=3),
    "token level, K=5": dict(draft=5, by_block=False),
    "top-k, K=2": dict(draft=2, top_k=3),
    "top-p, K=4": dict(draft=4, top_p=0.8),
    "min-p, K=3": dict(draft=3, min_p=0.1, temperature=1.3),
    "penalties and bias, K=4": dict(draft=4, logit_bias=((2, 1.5), (4, -1.0)), **PENALTIES),
    "n-gram, K=4": dict(draft=4, drafter="ngram", prompt=law.REPETITIVE),
    "early exit, K=3": dict(draft=3, drafter="early_exit", seed=2),
    "trigram, K=4": dict(draft=4, drafter="trigram"),
    "another vocabulary, K=3": dict(draft=3, letters="dxcayb"),
    "coupled, K=3": dict(draft=3, seeded=True),
    "disturbed, K=3": dict(draft=3, **law.NARROW),
    "disturbed, token level, K=5": dict(draft=5, by_block=False, **law.NARROW),
    "disturbed, penalties and bias, K=2": dict(draft=2, logit_bias=((2, 1.5), (4, -1.0)), **PENALTIES, **law.NARROW),
    "disturbed, n-gram, K=4": dict(draft=4, drafter="ngram", prompt=law.REPETITIVE, **law.NARROW),
    "disturbed, early exit, K=3": dict(draft=3, drafter="early_exit", seed=2, **law.NARROW),
    "disturbed, another vocabulary, K=3": dict(draft=3, letters="dxcayb", **law.NARROW),
}
CASES = [*LAWS, "seeded"]


def run(case: str) -> dict:
    if case == "seeded":
        return seeded()
    found = _started[case].result()
    assert abs(found["sigmas"]) < 3.7, f"{case}: {found}"
    if case.startswith("disturbed"):
        assert min(found["in parts"], found["preempted"]) > law.DISTURBED * SAMPLES, f"{case}: {found}"
    return {"samples": SAMPLES, **found}


_started: dict[str, Future] = {}


def start(cases: list[str]) -> None:
    """The laws among these cases on their way, one for each core."""
    own = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # of the processes that start here
    pool = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"))
    _started.update((name, pool.submit(one_law, name, **LAWS[name])) for name in cases if name in LAWS)
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # not of this one, which still has to run `seeded`
        os.environ.pop(name)
    os.environ |= own


def one_law(name: str, **case: object) -> dict:
    """Standard deviations that the samples are off by, how many drafted tokens stayed, samples whose prompts came in
    parts and that were preempted, and seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        samples = law.Samples(Path(folder), **case)
    for begin in range(0, SAMPLES, PART):
        samples.draw(range(begin, min(begin + PART, SAMPLES)))
        if begin * 10 // SAMPLES != (begin + PART) * 10 // SAMPLES:
            print(f"  {name}: {len(samples.tokens)} samples in {time.monotonic() - started:.0f} s", flush=True)
    return {
        "sigmas": round(samples.off(), 2), "accepted": samples.accepted, "in parts": samples.cut,
        "preempted": samples.preempted, "seconds": round(time.monotonic() - started),
    }  # fmt: skip


def seeded(requests: int = 1000) -> dict:
    """Everything that must not matter: drafter, K, batch, budget, preemption, lookahead."""
    tokenizer, random = Tokenizer.load(BUILTIN / "coder"), Random(5)
    text = tokenizer.encode((BUILTIN.parent / "controller.py").read_text(), add_special_tokens=False)
    prompts, params = [], []
    for seed in range(requests):
        begin = random.randrange(len(text) - 120)
        prompts.append(text[begin : begin + random.randrange(4, 120)])
        params.append(
            SamplingParams(
                max_tokens=random.randrange(1, 40), seed=seed, temperature=random.choice((0.0, 0.5, 0.8, 1.0)),
                top_p=random.choice((1.0, 0.9)), top_k=random.choice((0, 40)), min_p=random.choice((0.0, 0.05)),
                frequency_penalty=random.choice((0.0, 0.4)), repetition_penalty=random.choice((1.0, 1.2)),
                min_tokens=random.choice((0, 5)), stop_token_ids=random.choice(((), (16, 199))),
            )
        )  # fmt: skip

    def answers(
        drafter: str, draft: int, batch: int = 32, budget: int = 512, every: int = 0,
        lookahead: Callable[[], Lookahead] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        runner = ModelRunner.load(
            BUILTIN / "coder", max_batch_tokens=512, max_batch=32, num_blocks=600, drafter=drafter
        )
        limits = SchedulerConfig(token_budget=budget, max_batch=batch, num_blocks=600)
        offline = Offline(runner, GroupConfig(scheduler=limits, lookahead=lookahead), runner.decoder.config.eos_ids)
        if every:
            forced(every)(offline.controller.groups[0].scheduler)
        outputs = offline.generate(prompts, [replace(one, max_draft_tokens=draft) for one in params])
        assert not any(output.error for output in outputs)
        return [output.tokens for output in outputs]

    model = str(BUILTIN / "coder-draft")
    adaptive = partial(Lookahead, Costs([1 + n / 50 for n in range(600)]), Costs([0.05] * 600))
    ways = {
        "n-gram, K=4": ("ngram", 4),
        "n-gram, K=8, budget 16, preemption": ("ngram", 8, 32, 16, 7),
        "draft model, K=1, batch 1": (model, 1, 1),
        "draft model, K=3, batch 8, budget 64": (model, 3, 8, 64),
        "draft model, K=8, preemption": (model, 8, 32, 512, 9),
        "draft model, adaptive": (model, 8, 32, 512, 0, adaptive),
        "early exit, K=2, budget 100, preemption": ("early_exit", 2, 16, 100, 5),
        "early exit, adaptive, preemption": ("early_exit", 6, 32, 512, 11, adaptive),
        "n-gram, else draft model, K=5": (f"ngram+{model}", 5),
        "trigram, K=3, batch 16": (f"trigram:{BUILTIN.parent / 'controller.py'}", 3, 16),
    }
    alone = answers("ngram", 0)
    result: dict = {"requests": requests, "tokens": sum(map(len, alone))}
    for name, way in ways.items():
        begin = time.time()
        got = answers(*way)
        result[name] = {"differ": sum(a != b for a, b in zip(got, alone, strict=True))}
        print(f"  {name}: {result[name]} in {time.time() - begin:.0f} s", flush=True)
        assert got == alone, name
    return result
