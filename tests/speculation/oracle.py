"""The law of what speculation emits, by enumeration: every draft, every outcome of acceptance, every last token.

Toy models: the next token's probabilities are a function of the whole context. No statistics, so that an error of 1e-12
would show.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate, product
from math import prod
from random import Random

import torch
from torch import Tensor

from paceline.speculation import rejection

Context = tuple[int, ...]
Model = Callable[[Context], list[float]]
Patterns = Callable[[list[float]], Iterable[tuple[tuple[bool, ...], float]]]


def toy(seed: str, vocabulary: int, zeros: float = 0.0, sharp: float = 1.0) -> Model:
    """A model whose probabilities are random but fixed; each is 0 with probability `zeros`, but never all."""
    known: dict[Context, list[float]] = {}

    def probabilities(context: Context) -> list[float]:
        if context not in known:
            rng = Random(f"{seed} {context}")
            weights = [rng.random() ** sharp * (rng.random() >= zeros) for _ in range(vocabulary)]
            weights[rng.randrange(vocabulary)] += 0.1
            known[context] = [weight / sum(weights) for weight in weights]
        return known[context]

    return probabilities


def mixed(target: Model, draft: Model, share: float) -> Model:
    """Some of the target's probabilities and some of another model's: a good draft."""
    return lambda context: [
        share * own + (1 - share) * other for own, other in zip(target(context), draft(context), strict=True)
    ]


def sure(model: Model) -> Model:
    """A drafter without a choice: all on the likeliest token."""

    def probabilities(context: Context) -> list[float]:
        own = model(context)
        return [float(token == own.index(max(own))) for token in range(len(own))]

    return probabilities


def ordinary(target: Model, length: int) -> Counter[Context]:
    """The law of the target's own first tokens."""
    law: Counter[Context] = Counter({(): 1.0})
    for _ in range(length):
        law = Counter(
            {
                (*context, token): mass * share
                for context, mass in law.items()
                for token, share in enumerate(target(context))
                if share
            }
        )
    return law


def independent(accept: list[float]) -> Iterable[tuple[tuple[bool, ...], float]]:
    """Which drafted tokens pass, and how likely that is."""
    for passed in product((True, False), repeat=len(accept)):
        yield passed, prod(p if good else 1 - p for p, good in zip(accept, passed, strict=True))


def speculative(
    target: Model,
    draft: Model,
    tokens: Callable[[Context], int],
    length: int,
    block: bool,
    *,
    drawn_from: Model | None = None,
    patterns: Patterns = independent,
    acceptance: Callable = rejection.acceptance,
    count: Callable = rejection.count,
    last_log_weights: Callable = rejection.last_log_weights,
    dtype: torch.dtype = torch.float64,
) -> Counter[Context]:
    """The law of the first `length` tokens; `tokens` says how many are drafted behind a context.

    `drawn_from` is what drafts really come from where that is not `draft`, for the mistakes.
    """
    drawn_from = drawn_from or draft
    law, ready = Counter({(): 1.0}), Counter()
    while law:
        shortest = min(map(len, law))
        contexts = {context: law.pop(context) for context in list(law) if len(context) == shortest}
        if shortest >= length:
            for context, mass in contexts.items():
                ready[context[:length]] += mass
            continue
        requests, masses = [], []
        for context, mass in contexts.items():
            for drafted in product(range(len(target(context))), repeat=tokens(context)):
                likely = mass * prod(drawn_from(context + drafted[:n])[token] for n, token in enumerate(drafted))
                if likely > 0:
                    requests.append((context, drafted))
                    masses.append(likely)
        results = outcomes(requests, target, draft, block, acceptance, last_log_weights, dtype)
        for (context, drafted), mass, (accept, lasts) in zip(requests, masses, results, strict=True):
            for passed, chance in patterns(accept):
                (kept,) = count([float(good) for good in passed], [0.5] * len(passed), [len(passed)], block)
                for token, share in enumerate(lasts[kept]):
                    if share and chance:
                        law[(*context, *drafted[:kept], token)] += mass * chance * share
    return ready


def outcomes(
    requests: list[tuple[Context, Context]],
    target: Model,
    draft: Model,
    block: bool,
    acceptance: Callable = rejection.acceptance,
    last_log_weights: Callable = rejection.last_log_weights,
    dtype: torch.dtype = torch.float64,
) -> list[tuple[list[float], list[list[float]]]]:
    """Each request's acceptance, and the law of its last token for every number of tokens kept, all as one batch."""
    lengths = [len(drafted) for _, drafted in requests]
    before = [context + drafted[:n] for context, drafted in requests for n in range(len(drafted) + 1)]
    within = [context + drafted[:n] for context, drafted in requests for n in range(len(drafted))]

    def logs(model: Model, contexts: list[Context]) -> Tensor:
        width = len(target(()))
        rows = torch.tensor([model(context) for context in contexts], dtype=torch.float64)
        return rows.view(-1, width).log().to(dtype)

    rows, drafts = logs(target, before), logs(draft, within)
    pair, ids = rejection.LogProbs(rows, drafts), [token for _, drafted in requests for token in drafted]
    accept, weights = acceptance(pair, ids, lengths, block)
    lasts = []
    for kept in range(max(lengths, default=0) + 1):
        some = [min(kept, length) for length in lengths]
        lasts.append(last_log_weights(pair, weights, lengths, some).softmax(1).tolist())
    ends = accumulate(lengths)
    parts = [accept[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return [(part, [last[i] for last in lasts]) for i, part in enumerate(parts)]


def distance(one: Counter[Context], other: Counter[Context]) -> float:
    """Total variation."""
    return sum(abs(one[key] - other[key]) for key in one.keys() | other.keys()) / 2
