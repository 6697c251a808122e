"""What a step drafts in one call is what it drafts pass by pass."""

from dataclasses import replace

import pytest

from paceline.cli.sources import BUILTIN
from paceline.core.request import SamplingParams
from paceline.engine.runner import ModelRunner
from tests.engine import checkpoints
from tests.engine.test_drafters import CODER, SCHEDULES, Generated, generate, load, prompts  # noqa: F401

chains = pytest.importorskip("paceline.engine.chain", exc_type=ImportError)
if not chains.kernels.HAS_TILES:
    pytest.skip("the kernels of this processor are not its", allow_module_level=True)


def params(seeded: bool, count: int = 8) -> list[SamplingParams]:
    """Of all kinds, and drafts of different lengths."""
    kinds = ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}, {"temperature": 0.8})
    base = SamplingParams(max_tokens=40, ignore_eos=True, seeded=seeded)
    return [replace(base, seed=50 + i, max_draft_tokens=1 + i % 6, **kinds[i % 4]) for i in range(count)]


def both(runner: ModelRunner, *asked: object, **options: object) -> tuple[Generated, Generated, int, int]:
    """Pass by pass and in one call; and how many passes were asked for."""
    model, counts = runner.drafter.model, []
    chain, forward, answers = model.chain, model.forward, []
    assert chain is not None
    for model.chain in (None, chain):
        counts.append(0)

        def counted(parts: list) -> object:
            counts[-1] += 1
            return forward(parts)

        model.forward = counted
        answers.append(generate(runner, *asked, **options))
    return *answers, *counts


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seeded", [True, False], ids=["coupled", "rejection"])
@pytest.mark.parametrize("drafter", [str(BUILTIN / "coder-draft"), "early_exit"], ids=["model", "early_exit"])
def test_drafts_are_the_same(prompts, monkeypatch, drafter, seeded, threads):  # noqa: F811
    monkeypatch.setattr(chains, "ALONE", 0 if threads > 1 else 1 << 60)
    passes, call, before, after = both(load(drafter), prompts, params(seeded))
    assert call == passes and (call.drafted, call.accepted) == (passes.drafted, passes.accepted)
    assert call.accepted > 20 and after < before / 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_drafts_are_the_same_whatever_happens(prompts, name):  # noqa: F811
    """Some with penalties, which are drafted for pass by pass beside the others."""
    some = [replace(one, frequency_penalty=0.3 * (i == 2)) for i, one in enumerate(params(True))]
    passes, call, before, after = both(load(str(BUILTIN / "coder-draft")), prompts, some, **SCHEDULES[name]())
    assert call == passes and call.accepted > 50


@pytest.mark.parametrize("family", ["llama3-rope", "qwen2", "qwen3-window", "mistral"])
def test_every_family_drafts_for_itself(tmp_path, family):
    """Windows, biases, norms of heads; contexts longer than windows."""
    checkpoints.save(family, tmp_path)
    runner = load(str(tmp_path), tmp_path)
    texts = [[3 + (7 * i + j) % 150 for j in range(5 + 9 * i)] for i in range(4)]
    passes, call, before, after = both(runner, texts, params(False, 4))
    assert call == passes and call.accepted >= 0.99 * call.drafted > 50
    assert runner.drafter.model.chain.windows[-1] == (runner.decoder.config.windows[-1] or 0)


def test_the_end_of_the_context_and_of_an_answer(prompts):  # noqa: F811
    """Nothing is drafted beyond what the draft model can see, or behind a token that ends the answer."""
    runner = load(str(CODER))
    assert runner.drafter.model.chain
    runner.drafter.model.max_context = 60  # within what the first prompts and their answers take
    some = [replace(one, max_draft_tokens=6, temperature=0.0) for one in params(True)]
    passes, call, _, _ = both(runner, prompts, some)
    assert call == passes and 0 < call.drafted == passes.drafted
    stops = [replace(one, stop_token_ids=(call[i][5],)) for i, one in enumerate(some)]
    passes, call, _, _ = both(runner, prompts, stops)
    assert call == passes and call.drafted == passes.drafted and max(map(len, call)) <= 6
