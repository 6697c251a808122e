"""Through the whole engine, the joint law of tokens that can be drafted is the target's; and every mistake shows.

The short version of `make bench-exactness`.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.engine import drafters, fused, sampler, verdict
from paceline.engine.drafters import Part
from paceline.engine.fused import FusedStep
from paceline.engine.job import Job
from paceline.engine.keyed_random import DRAFT, LAST, lane_key
from paceline.engine.sampler import SamplingState
from paceline.speculation import rejection
from tests.engine import law

PENALTIES = dict(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3, logit_bias=((2, 1.5),))
OTHER = dict(letters="dxcayb")
LAWS: dict[str, dict] = {
    "K=1": dict(draft=1),
    "K=5": dict(draft=5),
    "token level": dict(draft=3, by_block=False),
    "filters": dict(draft=2, temperature=0.7, top_p=0.8),
    "filters, token level": dict(draft=4, by_block=False, top_k=4, min_p=0.05),
    "penalties and bias": dict(draft=3, **PENALTIES),
    "n-gram": dict(draft=4, drafter="ngram", prompt=law.REPETITIVE),
    "early exit": dict(draft=3, drafter="early_exit", seed=2),
    "trigram": dict(draft=3, drafter="trigram"),
    "trigram, token level": dict(draft=2, drafter="trigram", by_block=False, seed=3),
    "trigram, coupled": dict(draft=3, drafter="trigram", seeded=True),
    "another vocabulary": dict(draft=3, **OTHER),
    "another vocabulary, coupled": dict(draft=3, seeded=True, **OTHER),
}
NARROW: dict[str, dict] = {
    "block": dict(draft=3),
    "penalties, token level": dict(draft=3, by_block=False, **PENALTIES),
    "n-gram": dict(draft=4, drafter="ngram", prompt=law.REPETITIVE),
    "another vocabulary": dict(draft=2, **OTHER),
}
MANY, SOME, PART = 2400, 1000, 600  # samples; of MANY, after which a mistake may show
LIKE_OTHERS = {  # in what they go through
    "K=1", "filters, token level", "trigram", "trigram, token level", "another vocabulary, coupled",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in LAWS]
)
def test_the_law_is_the_targets(tmp_path, name):
    samples = law.Samples(tmp_path, **LAWS[name]).draw(range(1000, 1000 + MANY))
    assert samples.accepted > 200 and abs(samples.off()) < 3.7


@pytest.mark.parametrize("name", NARROW)
def test_the_law_is_the_targets_with_chunks_and_preemption(tmp_path, name):
    samples = law.Samples(tmp_path, **NARROW[name], **law.NARROW).draw(range(SOME))
    assert samples.cut > law.DISTURBED * SOME and samples.preempted > law.DISTURBED * SOME
    assert samples.accepted > 100 and abs(samples.off()) < 3.7


# Mistakes. Coarse ones: so few samples tell no others. The oracle of tests/speculation and the long version do.


ACCEPTANCE, DRAFTED, TAKE, TO_JUDGE = rejection.acceptance, drafters._take, Job.take, verdict.to_judge
DRAW, UNIFORM = sampler.draw, verdict.uniform


def always_accepted(*args: object) -> tuple[list[float], list[float]]:
    accept, weights = ACCEPTANCE(*args)
    return [1.0] * len(accept), weights


def last_from_the_target(pair: rejection.Pair, weights: list[float], lengths: list[int], kept: list[int]):
    return pair.last([begin + n for begin, n in zip(rejection._begins(lengths, 1), kept, strict=True)], [])


def against_another_draft(*args: object) -> tuple:
    lines, drafts, *rest = TO_JUDGE(*args)
    return lines, drafts[::-1].copy(), *rest


def none_for_token_0(part: Part, tokens: list[int], rows: torch.Tensor) -> bool:
    return DRAFTED(part, [token or -1 for token in tokens], rows)


def likeliest(log_weights: torch.Tensor, *noise: object) -> list[int]:
    return log_weights.argmax(1).tolist()


def sharper(log_weights: torch.Tensor, *noise: list[int]) -> list[int]:
    return DRAW(2 * log_weights, *noise)


def rounded(log_weights: torch.Tensor, *noise: list[int]) -> list[int]:
    return DRAW(log_weights.bfloat16().float(), *noise)


def one_for_all(stream: int, index: int) -> float:
    return UNIFORM(stream, 0)


def whatever_was_drafted(job: Job, token: int, *rest: object) -> bool:
    place = len(job.tokens)
    return TAKE(job, job.draft[place] if place < len(job.draft) else token, *rest)


def blind(states: list[SamplingState], drafts: list[list[int]]) -> Iterator[tuple[int, SamplingState]]:
    return enumerate(state for state, draft in zip(states, drafts, strict=True) for _ in range(1 + len(draft)))


MISTAKES: dict[str, tuple[str, object, str, Callable | int]] = {
    "all accepted": ("K=5", rejection, "acceptance", always_accepted),
    "all accepted, token level": ("token level", rejection, "acceptance", always_accepted),
    "the last token from the target": ("K=5", rejection, "last_log_weights", last_from_the_target),
    "drafts judged by each other's rows": ("K=5", verdict, "to_judge", against_another_draft),
    "token 0 taken for missing": ("K=5", drafters, "_take", none_for_token_0),
    "the likeliest drafted, its probability taken": ("trigram", sampler, "draw", likeliest),
    "drafted at another temperature": ("trigram", sampler, "draw", sharper),
    "one uniform for all positions": ("trigram, token level", verdict, "uniform", one_for_all),
    "n-grams accepted unseen": ("n-gram", Job, "take", whatever_was_drafted),
    "penalties that do not see the draft": ("penalties and bias", sampler, "penalised", blind),
    "the noise of the draft for the last token": ("K=1", drafters, "DRAFT", LAST),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(tmp_path, monkeypatch, mistake):
    name, *patch = MISTAKES[mistake]
    samples = law.Samples(tmp_path, **LAWS[name])
    monkeypatch.setattr(*patch)
    if patch[1] == "to_judge":  # as the one call has it, too
        monkeypatch.setattr(fused, *patch[1:])
    if patch[0] is rejection or patch[1] == "uniform":  # in compiled code the rules are what they were
        monkeypatch.setattr(verdict, "verdict_kernel", None)
        monkeypatch.setattr(FusedStep, "takes", lambda *_: False)
    parts = (range(first, first + PART) for first in range(1000, 1000 + MANY, PART))
    assert any(samples.draw(seeds).off() > 3.7 for seeds in parts)


def redrawn(samples: law.Samples, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many tokens are drafted, and how many of them their noise draws from the rows that judge them."""
    pairs = []

    def to_judge(jobs: list[Job], *rest: object) -> tuple:
        for job in jobs:
            stream, places = lane_key(job.sequence.state.stream, DRAFT, job.end), list(range(len(job.draft)))
            pairs.extend(zip(job.draft, DRAW(torch.stack(job.draft_rows), [stream] * len(places), places), strict=True))
        return TO_JUDGE(jobs, *rest)

    for module in (verdict, fused):
        monkeypatch.setattr(module, "to_judge", to_judge)
    samples.draw(range(PART))
    return len(pairs), sum(drafted == again for drafted, again in pairs)


@pytest.mark.parametrize("name", ["K=5", "trigram"])
def test_drafts_are_drawn_from_the_rows_that_judge_them(tmp_path, monkeypatch, name):
    drafted, same = redrawn(law.Samples(tmp_path, **LAWS[name]), monkeypatch)
    assert drafted == same > 2000


def test_drafts_from_rounded_probabilities_show(tmp_path, monkeypatch):
    """Of so small an error the law of so few samples tells nothing."""
    samples = law.Samples(tmp_path, **LAWS["trigram"])
    monkeypatch.setattr(sampler, "draw", rounded)
    drafted, same = redrawn(samples, monkeypatch)
    assert drafted > same


def test_the_law_test_can_fail(tmp_path):
    model = law.tiny(tmp_path, 6, seed=1)
    expected = law.law(model, [1, 5, 2], SamplingParams(), 3)
    contexts, weights = list(expected), torch.tensor(list(expected.values()))
    generator = torch.Generator().manual_seed(3)

    def draw(weights: torch.Tensor) -> list[law.Context]:
        return [contexts[i] for i in torch.multinomial(weights, 5_000, True, generator=generator).tolist()]

    assert abs(law.surprise(draw(weights), expected)) < 3.7
    assert law.surprise(draw(weights**0.9), expected) > 3.7
