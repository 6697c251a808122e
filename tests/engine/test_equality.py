"""A sequence's tokens do not depend on how it was scheduled: budget, batch, preemption, prefix cache."""

from dataclasses import replace

import pytest

from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import BUILTIN
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.engine.runner import ModelRunner
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.offline import Offline
from tests.engine.schedules import forced

TEXTS = [
    "def __init__(self, ",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "class Point:\n    x: int\n    y: int\n\n    def distance(self, other):\n        return ",
    "try:\n    value = int(text)\nexcept ",
]
COUNT, OUTPUT, NUM_BLOCKS = 16, 48, 400


@pytest.fixture(scope="module")
def runner():
    return ModelRunner.load(BUILTIN / "coder", max_batch_tokens=4096, max_batch=16, num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module")
def prompts():
    """16 prompts of very different lengths, some with a beginning in common."""
    tokenizer = Tokenizer.load(BUILTIN / "coder")
    pieces = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    return [(pieces[i % 4] * (1 + i // 4 * 3) + pieces[(i + 1) % 4])[: 10 + 12 * i] for i in range(COUNT)]


def params(kind: str) -> list[SamplingParams]:
    base = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    if kind == "seeded":
        base = replace(base, temperature=0.9, top_p=0.95, top_k=200, frequency_penalty=0.2)
    return [replace(base, seed=100 + i) for i in range(COUNT)]


def run(runner, prompts, params, budget=512, num_blocks=NUM_BLOCKS, schedule=None):
    limits = SchedulerConfig(token_budget=budget, max_batch=16, num_blocks=num_blocks)
    offline = Offline(runner, GroupConfig(scheduler=limits))
    if schedule:
        schedule(offline.controller.groups[0].scheduler)
    preempted = []
    offline.on_step = lambda batch, outputs, forward_s, sample_s: preempted.extend(batch.preempted)
    return [output.tokens for output in offline.generate(prompts, params)], len(preempted)


@pytest.fixture(scope="module", params=["greedy", "seeded"])
def reference(request, runner, prompts):
    """Each prompt alone, whole."""
    chosen = params(request.param)
    alone = [run(runner, [p], [s], budget=4096)[0][0] for p, s in zip(prompts, chosen, strict=True)]
    assert all(len(tokens) == OUTPUT for tokens in alone)
    return chosen, alone


@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 7, 64, 512, 4096])
def test_budget_and_batch_change_nothing(runner, prompts, reference, budget):
    chosen, alone = reference
    together, preemptions = run(runner, prompts, chosen, budget)
    assert together == alone and preemptions == 0


@pytest.mark.parametrize(
    ("budget", "every"), [pytest.param(1, 40, marks=pytest.mark.slow), (7, 12), (64, 5), (512, 5), (4096, 5)]
)
def test_forced_preemption_changes_nothing(runner, prompts, reference, budget, every):
    chosen, alone = reference
    together, preemptions = run(runner, prompts, chosen, budget, schedule=forced(every))
    assert preemptions > 5 and together == alone


@pytest.mark.parametrize("budget", [64, 4096])
def test_preemption_for_want_of_memory_changes_nothing(runner, prompts, reference, budget):
    chosen, alone = reference
    tight = 1 + max(-(-(len(p) + OUTPUT) // 16) for p in prompts)
    together, preemptions = run(runner, prompts, chosen, budget, num_blocks=tight)
    assert preemptions > 0 and together == alone


@pytest.mark.parametrize(
    ("budget", "draft", "every"),
    [(512, 1, 0), (512, 4, 0), (64, 8, 0), (16, 3, 9), (512, 8, 5), (7, 2, 12), (4096, 5, 5)],
)
def test_drafts_change_nothing(runner, prompts, reference, budget, draft, every):
    chosen, alone = reference
    drafted = [replace(one, max_draft_tokens=draft) for one in chosen]
    together, preemptions = run(runner, prompts, drafted, budget, schedule=forced(every) if every else None)
    assert together == alone and (preemptions > 5) == bool(every)


@pytest.mark.parametrize("draft", [3, 8])
def test_drafts_give_way_when_memory_is_short(runner, prompts, reference, draft):
    chosen, alone = reference
    tight = 1 + max(-(-(len(p) + OUTPUT) // 16) for p in prompts)
    drafted = [replace(one, max_draft_tokens=draft) for one in chosen]
    together, preemptions = run(runner, prompts, drafted, 64, num_blocks=tight)
    assert preemptions > 0 and together == alone


def test_steps_yield_several_tokens(runner, prompts, reference):
    chosen, alone = reference
    steps = []
    for one, params, tokens in zip(prompts, chosen, alone, strict=True):
        offline = Offline(runner, GroupConfig(scheduler=SchedulerConfig(num_blocks=NUM_BLOCKS)))
        offline.on_step = lambda batch, outputs, forward_s, sample_s: steps.append(batch.num_tokens)
        text = [*one, *tokens, *one]  # what came once may come again
        (output,) = offline.generate([text], [replace(params, max_draft_tokens=6)])
        assert len(output.tokens) == OUTPUT
        offline.controller.groups[0].scheduler.check()
    assert len(steps) < 0.9 * OUTPUT * len(prompts)


def test_seeded_sampling_is_sampling(reference):
    chosen, alone = reference
    if chosen[0].temperature:
        assert len({tuple(tokens[:8]) for tokens in alone}) > COUNT // 2
