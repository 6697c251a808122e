"""Acceptance leaves the target's law as it is, and every mistake that others shipped would show."""

from collections import Counter
from collections.abc import Iterable
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from paceline.speculation import rejection
from tests.speculation import oracle

EXACT = 1e-12


def models(vocabulary: int = 3, zeros: float = 0.0) -> tuple[oracle.Model, oracle.Model]:
    target = oracle.toy("target", vocabulary, zeros)
    return target, oracle.mixed(target, oracle.toy("draft", vocabulary, zeros), 0.3)


def error(block: bool, drafted: int = 3, **mistake: object) -> float:
    """Of the joint law of four tokens."""
    target, draft = models()
    law = oracle.speculative(target, draft, lambda context: drafted, 4, block, **mistake)
    return oracle.distance(law, oracle.ordinary(target, 4))


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize(
    ("vocabulary", "drafted", "length"), [(3, 1, 4), (3, 2, 4), (3, 3, 4), (4, 3, 3), (3, 4, 3), (4, 4, 2)]
)
def test_the_law_is_the_targets(vocabulary: int, drafted: int, length: int, block: bool) -> None:
    target, draft = models(vocabulary)
    law = oracle.speculative(target, draft, lambda context: drafted, length, block)
    assert oracle.distance(law, oracle.ordinary(target, length)) <= EXACT


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("kind", ["filtered", "filtered target", "sure", "the same", "apart"])
def test_the_law_is_the_targets_whatever_the_draft(kind: str, block: bool) -> None:
    target = oracle.toy("target", 4, 0.4 if "filtered" in kind else 0.0)
    draft = {
        "filtered": oracle.toy("draft", 4, 0.4),
        "filtered target": oracle.toy("draft", 4),
        "sure": oracle.sure(oracle.toy("draft", 4)),  # as n-grams are
        "the same": target,
        "apart": oracle.toy("draft", 4, sharp=8.0),
    }[kind]
    law = oracle.speculative(target, draft, lambda context: 3, 3, block)
    assert oracle.distance(law, oracle.ordinary(target, 3)) <= EXACT


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_a_peaked_row_behind_a_sure_token(block: bool) -> None:
    """What the target has above the draft is a rounding error there, of a token that passes for certain."""
    target = {0: [0.6, 0.4], 1: [1 - 1e-17, 1e-17]}
    draft = {0: [0.4, 0.6], 1: [1 - 3e-17, 3e-18]}
    at = lambda model: lambda context: model[len(context) % 2]  # noqa: E731
    law = oracle.speculative(at(target), at(draft), lambda context: 2, 3, block)
    assert oracle.distance(law, oracle.ordinary(at(target), 3)) <= EXACT


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_each_request_has_its_own_number_of_drafted_tokens(block: bool) -> None:
    target, draft = models()
    law = oracle.speculative(target, draft, lambda context: sum(context) * 2 % 5, 4, block)
    assert oracle.distance(law, oracle.ordinary(target, 4)) <= EXACT


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_in_float32_the_law_is_the_targets_up_to_rounding(block: bool) -> None:
    assert error(block, dtype=torch.float32) < 1e-6


def kept(block: bool, drafted: int) -> float:
    """Tokens kept on average, behind an empty context."""
    target, draft = models()
    drafts = list(product(range(3), repeat=drafted))
    outcomes = oracle.outcomes([((), tokens) for tokens in drafts], target, draft, block)
    total = 0.0
    for tokens, (accept, _) in zip(drafts, outcomes, strict=True):
        likely = prod(draft(tokens[:n])[token] for n, token in enumerate(tokens))
        for passed, chance in oracle.independent(accept):
            stays = [float(good) for good in passed]
            total += likely * chance * rejection.count(stays, [0.5] * drafted, [drafted], block)[0]
    return total


def test_block_verification_keeps_more() -> None:
    assert kept(True, 1) == pytest.approx(kept(False, 1))
    assert kept(True, 3) > kept(False, 3) + 0.01


class Counting(rejection.LogProbs):
    asked = 0

    def excess(self, rows: list[int], drafts: list[int], weights: list[float]) -> list[float]:
        self.asked += len(rows)
        return super().excess(rows, drafts, weights)


def test_a_block_is_judged_alike_with_few_passes_over_the_vocabulary() -> None:
    """What does not decide is not looked up: what p alone refuses or lets pass, and what comes before the latter."""
    generator, lengths = torch.Generator().manual_seed(3), [4, 1, 0, 3, 5] * 40
    rows = [torch.randn(sum(lengths) + n, 5, generator=generator, dtype=torch.float64) for n in (len(lengths), 0)]
    tokens = rows[1].softmax(1).multinomial(1, generator=generator).squeeze(1).tolist()
    uniforms = torch.rand(len(tokens), generator=generator, dtype=torch.float64).tolist()
    pair = Counting(*(part.log_softmax(1) for part in rows))
    args = pair, tokens, lengths, True
    everywhere, weights = rejection.acceptance(*args)
    kept, asked, pair.asked = rejection.count(everywhere, uniforms, lengths, True), pair.asked, 0
    assert asked == sum(max(0, length - 1) for length in lengths) and len(set(kept)) == 6
    accept, same_weights = rejection.acceptance(*args, uniforms)
    assert rejection.count(accept, uniforms, lengths, True) == kept and same_weights == weights
    assert 0 < pair.asked < 0.5 * asked


# Mistakes. Each is what some server did; the law must show it.


def resampled_from_the_target(pair: rejection.Pair, weights: list[float], lengths: list[int], n: list[int]) -> Tensor:
    return pair.last([begin + some for begin, some in zip(rejection._begins(lengths, 1), n, strict=True)], [])


def always_accepted(*args: object) -> tuple[list[float], list[float]]:
    accept, weights = rejection.acceptance(*args)
    return [1.0] * len(accept), weights


def refused_without_mass(*args: object) -> tuple[list[float], list[float]]:
    """Where nothing is above the draft, not even a token passes that the target likes as much."""
    accept, weights = rejection.acceptance(*args)
    return [p * (p < 1) for p in accept], weights


def without_weights(*args: object) -> tuple[list[float], list[float]]:
    accept, weights = rejection.acceptance(*args)
    return accept, [1.0] * len(weights)


def ratios_of_single_tokens(pair: rejection.Pair, tokens: list[int], lengths: list[int], block: bool):
    accept, _ = rejection.acceptance(pair, tokens, lengths, False)
    return accept, rejection.acceptance(pair, tokens, lengths, True)[1]


def one_uniform_for_all(accept: list[float]) -> Iterable[tuple[tuple[bool, ...], float]]:
    edges = sorted({0.0, 1.0, *accept})
    for low, high in zip(edges, edges[1:], strict=False):
        yield tuple(p > low for p in accept), high - low


def sharper(model: oracle.Model, power: float) -> oracle.Model:
    def probabilities(context: oracle.Context) -> list[float]:
        weights = [p**power for p in model(context)]
        return [weight / sum(weights) for weight in weights]

    return probabilities


def rounded(model: oracle.Model) -> oracle.Model:
    def probabilities(context: oracle.Context) -> list[float]:
        weights = torch.tensor(model(context)).log().bfloat16().double().exp()
        return (weights / weights.sum()).tolist()

    return probabilities


TARGET, DRAFT = models()
MISTAKES = {
    "resampled from the target": dict(last_log_weights=resampled_from_the_target),
    "always accepted": dict(acceptance=always_accepted),
    "the likeliest drafted, its probability taken": dict(drawn_from=oracle.sure(DRAFT)),
    "drafted at another temperature": dict(drawn_from=sharper(DRAFT, 2.0)),
    "drafted from rounded probabilities": dict(drawn_from=rounded(DRAFT)),
    "one uniform for all positions": dict(patterns=one_uniform_for_all),
    "the longest prefix at token level": dict(count=lambda *args: rejection.count(*args[:-1], True)),
}
BLOCK_MISTAKES = {
    "a block's last token without p": dict(acceptance=without_weights),
    "a block's tokens judged one by one": dict(acceptance=ratios_of_single_tokens),
    "the first refusal ends a block": dict(count=lambda *args: rejection.count(*args[:-1], False)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_at_token_level_shows(mistake: str) -> None:
    assert error(False, **MISTAKES[mistake]) > 1e-4


@pytest.mark.parametrize("mistake", [*list(MISTAKES)[:6], *BLOCK_MISTAKES])
def test_a_mistake_in_a_block_shows(mistake: str) -> None:
    assert error(True, **(MISTAKES | BLOCK_MISTAKES)[mistake]) > 1e-4


def test_one_uniform_for_all_shows_only_behind_the_first_token() -> None:
    """Marginals of the first token would not tell: the reason why laws here are joint."""
    target, draft = models()
    law = oracle.speculative(target, draft, lambda context: 3, 1, False, patterns=one_uniform_for_all)
    assert oracle.distance(law, oracle.ordinary(target, 1)) <= EXACT


# Noise: `verify` itself, by statistics


def emitted(block: bool, mistake: str = "", samples: int = 200_000) -> float:
    """Chi-square over its degrees of freedom, of the first two tokens of `samples` verifications of two drafts."""
    target, draft = models(4)
    generator = torch.Generator().manual_seed(11)

    def noise() -> Tensor:
        return -(-torch.rand(samples, 4, generator=generator, dtype=torch.float64).log()).log()

    def logs(model: oracle.Model, *tokens: Tensor) -> Tensor:
        contexts = product(range(4), repeat=len(tokens))
        table = torch.tensor([model(context) for context in contexts], dtype=torch.float64).log()
        return table.view(*[4] * len(tokens), 4)[tokens] if tokens else table.expand(samples, 4)

    first_noise, second_noise = noise(), noise()
    first = (logs(draft) + first_noise).argmax(1)
    second = (logs(draft, first) + second_noise).argmax(1)
    rows = torch.stack([logs(target), logs(target, first), logs(target, first, second)], 1).flatten(0, 1)
    drafts = torch.stack([logs(draft), logs(draft, first)], 1).flatten(0, 1)
    uniforms = torch.rand(samples, 2, generator=generator, dtype=torch.float64)
    last_noise = first_noise if mistake == "the draft's noise" else noise()
    if mistake == "accepted by coupling":  # with the noise that the target would have, and resampled as after a refusal
        ours = [(logs(target) + first_noise).argmax(1), (logs(target, first) + second_noise).argmax(1)]
        uniforms = torch.stack([ours[0] != first, ours[1] != second], 1).double()
    verdicts = rejection.verify(
        rejection.LogProbs(rows, drafts), torch.stack([first, second], 1).flatten().tolist(), [2] * samples,
        uniforms.flatten().tolist(), lambda weights: (weights + last_noise).argmax(1).tolist(), block,
    )  # fmt: skip
    seen: Counter[oracle.Context] = Counter()
    follow = (logs(target, torch.tensor([token for _, token in verdicts])) + noise()).argmax(1).tolist()
    for drafted, (count, token), behind in zip(
        zip(first.tolist(), second.tolist(), strict=True), verdicts, follow, strict=True
    ):
        seen[(*drafted[:count], token, behind)[:2]] += 1
    law = oracle.ordinary(target, 2)
    return sum((seen[key] - samples * p) ** 2 / (samples * p) for key, p in law.items()) / (len(law) - 1)


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_what_is_emitted_follows_the_target(block: bool) -> None:
    assert emitted(block) < 3  # 15 degrees of freedom: exceeded once in 10,000 times


@pytest.mark.parametrize("mistake", ["the draft's noise", "accepted by coupling"])
def test_noise_that_is_shared_shows(mistake: str) -> None:
    assert emitted(False, mistake) > 10


def test_a_block_that_p_alone_decides_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "first_open", lambda p, uniforms: len(p))
    assert emitted(True) > 10


def test_without_a_draft_the_token_is_the_targets() -> None:
    target = torch.tensor([[0.2, 0.5, 0.3], [0.9, 0.05, 0.05]]).log()
    pair = rejection.LogProbs(target, torch.empty(0, 3))
    got = rejection.verify(pair, [], [0, 0], [], lambda w: w.argmax(1).tolist(), True)
    assert got == [(0, 1), (0, 0)]


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_a_difference_without_mass_stands_for_the_target(block: bool) -> None:
    """Equal up to rounding: a refusal that should not happen does not leave a request without a distribution."""
    assert torch.equal(behind_a_refusal(rejection.LogProbs, block), EQUAL[:1])
    assert not torch.equal(behind_a_refusal(WhateverIsAbove, block), EQUAL[:1])


EQUAL = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()


class WhateverIsAbove(rejection.LogProbs):
    """The mistake: what is above the draft is drawn from, even if it has no mass."""

    def last(self, rows: list[int], cut: list[rejection.Cut]) -> Tensor:
        last = self.target[list(rows)]
        for place, draft, weight in cut:
            last[place] = self._above(last[place : place + 1], [draft], [weight]).log()
        return last


def behind_a_refusal(pair_of: type[rejection.LogProbs], block: bool) -> Tensor:
    pair = pair_of(EQUAL, EQUAL[:1])
    _, weights = rejection.acceptance(pair, [1], [1], block)
    return rejection.last_log_weights(pair, weights, [1], [0])


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_a_draft_that_is_the_target_is_never_refused(block: bool) -> None:
    """What is above it has no mass, so whoever refuses has nothing to draw from."""
    target, _ = models()
    requests = [((), tokens) for tokens in product(range(3), repeat=3)]
    for acceptance, right in ((rejection.acceptance, True), (refused_without_mass, False)):
        outcomes = oracle.outcomes(requests, target, target, block, acceptance)
        assert all(accept == [1.0] * 3 for accept, _ in outcomes) is right
