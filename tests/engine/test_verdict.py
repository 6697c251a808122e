"""Verdicts of compiled code, which has logits and five numbers of each row: those by tensors of log-probabilities."""

from array import array

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.work import SliceWork
from paceline.engine import sampler, verdict
from paceline.engine.job import EngineSequence, Job
from paceline.engine.keyed_random import LAST, lane_key
from paceline.engine.sampler import SamplingState, to_log_probs

kernels = pytest.mark.skipif(verdict.verdict_kernel is None, reason="torch operations do the work")
PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(top_k=5, min_p=0.01),
    SamplingParams(top_k=10_000),
    SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.2, logit_bias=((3, 4.0),)),
    SamplingParams(temperature=0.0),
]
LENGTHS = [3, 1, 5, 2, 4, 2]


def job(params: SamplingParams, rows: torch.Tensor, tokens: list[int], first_row: int, known: int = 7) -> Job:
    """That drafted these tokens from these rows of log-probabilities."""
    state = SamplingState(params, rows.shape[1], (), [1, 2], [3])
    work = SliceWork(0, known - 1, 1 + len(tokens), True, 0, [], num_draft=len(tokens))
    sequence = EngineSequence(array("q"), 0, frozenset(), params, state)
    return Job(work, sequence, draft=tokens, draft_rows=list(rows), first_row=first_row)


def made(vocab: int, seed: int, banned: bool) -> tuple[torch.Tensor, list[Job]]:
    """Logits, some of them nobody's, and jobs with drafts that are often like them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(40, vocab, generator=generator)
    if banned:
        logits[:, vocab // 2 :] = -torch.inf
    jobs, first_row = [], 1
    for params, length in zip(PARAMS, LENGTHS, strict=True):
        rows = logits[first_row:][:length] + 0.5 * torch.randn(length, vocab, generator=generator)
        to_log_probs(rows, [SamplingState(params, vocab, (), [1, 2], [3])], [list(range(length - 1))])
        tokens = rows.exp().multinomial(1, generator=generator).squeeze(1).tolist()
        jobs.append(job(params, rows, tokens, first_row, known=7 + seed))
        first_row += length + 2
    return logits, jobs


def by_log_probs(jobs: list[Job], logits: torch.Tensor, block: bool) -> list[tuple[int, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdict, "verdict_kernel", None)
        return verdict.judged(jobs, logits.clone(), block)


@kernels
@pytest.mark.parametrize("block", [False, True], ids=["token level", "block"])
@pytest.mark.parametrize("banned", [False, True])
@pytest.mark.parametrize("vocab", [20, 1000])
def test_verdicts_are_the_same(vocab: int, banned: bool, block: bool) -> None:
    kept = [[0] * (length + 1) for length in LENGTHS]
    for seed in range(150):
        logits, jobs = made(vocab, seed, banned)
        before = logits.clone()
        verdicts = verdict.judged(jobs, logits, block)
        assert verdicts == by_log_probs(jobs, logits, block) and torch.equal(logits, before)
        for counts, (length, token) in zip(kept, verdicts, strict=True):
            counts[length] += 1
            assert not banned or token < vocab // 2, "what cannot be drawn has no weight at all"
    assert all(counts[0] and counts[-1] for counts in kept[:-1])


@kernels
def test_verdicts_are_the_same_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, jobs = made(300, 5, False)
    alone = [verdict.judged([one], logits, True)[0] for one in jobs]
    monkeypatch.setattr(sampler, "threads", lambda size: 2)
    assert verdict.judged(jobs, logits, True) == alone


@kernels
@pytest.mark.parametrize("fails", [False, True])
def test_logits_are_as_they_were(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Those that penalties changed meanwhile, too; and a row without a distribution is alone with it."""
    logits, jobs = made(100, 1, False)
    right = verdict.judged(jobs, logits, True)
    logits[jobs[3].first_row : jobs[4].first_row] = torch.nan
    before, seen = logits.clone(), []
    if fails:
        monkeypatch.setattr(verdict, "to_judge", lambda *_: seen.append(logits.clone()) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            verdict.judged(jobs, logits, True)
        assert not torch.equal(seen[0].nan_to_num(7.0), before.nan_to_num(7.0)), "penalties were in place"
    else:
        assert verdict.judged(jobs, logits, True) == [*right[:3], (0, -1), *right[4:]]
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


@kernels
def test_a_difference_without_mass_is_the_targets_row() -> None:
    """Where the draft is above the target everywhere, as rounding may leave it, and its token is refused."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    above = logits[:1].log_softmax(1) + 1.0
    refused = 0
    for known in range(60):
        one = job(SamplingParams(), above, [4], 0, known)
        kept, token = verdict.judged([one], logits, False)[0]
        refused += not kept
        expected = sampler.draw(logits[kept : kept + 1], [lane_key(one.sequence.state.stream, LAST, one.end)], [0])
        assert [token] == expected
    assert 20 < refused < 55


@pytest.mark.skipif(sampler.sample_kernels is None, reason="torch operations do the work")
def test_a_greedy_row_is_sure_of_one_token_whatever_the_sign_of_zero() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -2.0]])
    to_log_probs(logits, [SamplingState(SamplingParams(temperature=0.0), 4, (), (), ())], [[]])
    assert logits[0].exp().tolist() in ([0, 0, 1, 0], [0, 1, 0, 0])
