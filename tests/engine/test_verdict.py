"""Target rows as logits and five numbers: the same verdicts as with tensors of log-probabilities."""

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.engine import sampler, verdict
from paceline.engine.sampler import SamplingState, to_log_probs
from paceline.speculation.rejection import Cut, LogProbs

PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(top_k=5, min_p=0.01),
    SamplingParams(top_k=10_000),
    SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.2, logit_bias=((3, 4.0),)),
    SamplingParams(temperature=0.0),
]
DRAFTS = [[3, 3, 7], [1], [9, 2], [], [3, 4, 3, 4], [5, 6]]


def made(vocab: int, banned: bool) -> tuple[torch.Tensor, list[SamplingState], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(40, vocab, generator=generator)
    if banned:
        logits[:, vocab // 2 :] = -torch.inf
    drafted = (3 * torch.randn(sum(map(len, DRAFTS)), vocab, generator=generator)).log_softmax(1)
    return logits, [SamplingState(one, vocab, (), [1, 2], [3]) for one in PARAMS], list(drafted)


@pytest.mark.skipif(sampler.sample_kernels is None, reason="torch operations do the work")
@pytest.mark.parametrize("banned", [False, True])
@pytest.mark.parametrize("vocab", [20, 256, 1000])
def test_what_a_verdict_asks_has_the_same_answers(vocab: int, banned: bool) -> None:
    logits, states, drafted = made(vocab, banned)
    rows = [2 * n for n in range(sum(len(draft) + 1 for draft in DRAFTS))]
    target, before = logits[rows], logits.clone()
    to_log_probs(target, states, DRAFTS)
    plain = LogProbs(target, torch.stack(drafted))
    goes_on = [row < len(draft) for draft in DRAFTS for row in range(len(draft) + 1)]
    places = [n for n, behind in enumerate(goes_on) if behind]  # rows with a drafted token
    tokens = [token for draft in DRAFTS for token in draft]
    some = list(range(len(tokens)))
    weights = [0.1 + 0.07 * n for n in some]
    cut = [Cut(n, n, weights[n]) for n in some[::2]]
    with verdict.compared(logits, rows, states, DRAFTS, drafted) as pair:
        assert not isinstance(pair, LogProbs)
        ours, theirs = (one.log_ratios(places, tokens) for one in (pair, plain))
        assert ours == pytest.approx(theirs, abs=1e-4)
        ours, theirs = (one.excess(places, some, weights) for one in (pair, plain))
        assert ours == pytest.approx(theirs, abs=1e-5)
        ours, theirs = (one.last(places, cut).softmax(1) for one in (pair, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        if banned:
            assert not ours[:, vocab // 2 :].any(), "what cannot be drawn has no weight at all"
    assert torch.equal(logits, before)


@pytest.mark.skipif(sampler.sample_kernels is None, reason="torch operations do the work")
def test_logits_are_as_they_were_after_a_failure_and_a_row_without_a_distribution_is_alone() -> None:
    logits, states, drafted = made(100, False)
    logits[3] = torch.nan
    before, rows = logits.clone(), list(range(sum(len(draft) + 1 for draft in DRAFTS)))
    with pytest.raises(RuntimeError, match="here"), verdict.compared(logits, rows, states, DRAFTS, drafted) as pair:
        assert not torch.equal(logits.nan_to_num(), before.nan_to_num()), "penalties are in place"
        last = pair.last([2, 3, 4], [Cut(1, 0, 0.5)])
        assert last[1].isnan().all() and not last[[0, 2]].isnan().any()
        raise RuntimeError("here")
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.skipif(sampler.sample_kernels is None, reason="torch operations do the work")
def test_a_difference_without_mass_is_the_targets_row() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    state = SamplingState(SamplingParams(), 300, (), (), ())
    with verdict.compared(logits, [0, 1], [state], [[4]], [logits[0].log_softmax(0)]) as pair:
        assert pair.excess([0], [0], [0.9]) == [0.0]
        last = pair.last([0], [Cut(0, 0, 0.9)])
    torch.testing.assert_close(last[0], logits[0].log_softmax(0), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(sampler.sample_kernels is None, reason="torch operations do the work")
def test_a_greedy_row_is_sure_of_one_token_whatever_the_sign_of_zero() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -2.0]])
    to_log_probs(logits, [SamplingState(SamplingParams(temperature=0.0), 4, (), (), ())], [[]])
    assert logits[0].exp().tolist() in ([0, 0, 1, 0], [0, 1, 0, 0])
