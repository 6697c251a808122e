"""Accept or resample: drafted tokens become tokens of the target, and its distribution is untouched.

A request's K tokens were drawn from `draft`, one distribution each; the target gave K + 1 distributions, the last one
for the token behind the draft. A verification keeps the first n drafted tokens and draws one more. Two rules, both
exact:

* token-level (Chen et al., 2023, Algorithm 2): token x stays with probability min(1, target(x) / draft(x)); at the
  first that does not, the last token comes from what the target has above the draft, max(0, target - draft);
* block verification (Sun et al., 2024): the tokens are judged together, by p, the product of their ratios cut to 1 at
  each. The longest prefix that passes stays; the last token comes from max(0, p * target - draft). It keeps at least
  as many tokens on average.

A batch is ragged: K differs between its requests; `lengths` lists them. A `Pair` has the target's rows [sum(K + 1)] and
the draft's [sum(K)], distributions as sampled from, after temperature, filters and penalties; of a drafter that was
sure of its token, draft is 1 there. `tokens` [sum(K)] are the drafted ids.

Requests that are greedy or seeded need none of this: ordinary sampling decides each of their rows, with the noise that
the position has in any case, and a drafted token stays if it is the same (`engine.runner`).
"""

from collections.abc import Callable, MutableSequence, Sequence
from itertools import accumulate
from math import exp
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Pair(Protocol):
    """Target and draft, in whatever way their distributions are held: what a verdict asks about them."""

    def log_ratios(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """log target[rows[i]](tokens[i]) - log draft[i](tokens[i])."""
        ...

    def excess(self, rows: Sequence[int], drafts: Sequence[int], weights: Sequence[float]) -> list[float]:
        """The mass of max(0, weights[i] * target[rows[i]] - draft[drafts[i]])."""
        ...

    def last(self, rows: Sequence[int], cut: Sequence["Cut"]) -> Tensor:
        """Log-weights [rows, vocabulary], not normalised: of these rows of the target; at the places that are cut of
        what is above the draft. A difference that rounding has left without any mass stands for equal distributions:
        then it is the target's row too."""
        ...


class Cut(NamedTuple):
    """Where a draft ends early: among the rows asked for, the refused token's row of the draft, and the target's weight
    there."""

    place: int
    draft: int
    weight: float


def verify(
    pair: Pair,
    tokens: Sequence[int],
    lengths: Sequence[int],
    uniforms: Sequence[float],
    draw: Callable[[Tensor], list[int]],
    block: bool,
) -> list[tuple[int, int]]:
    """For each request how many drafted tokens stay, and the one that follows them.

    uniforms [sum(K)] in [0, 1) decide about the drafted tokens; `draw` draws the last ones, an id from each row of
    log-weights [requests, vocabulary]. The noise of both must be independent of each other's and of what the drafts
    were drawn with, this time and at any earlier one.
    """
    accept, weights = acceptance(pair, tokens, lengths, block, uniforms)
    kept = count(accept, uniforms, lengths, block)
    return list(zip(kept, draw(last_log_weights(pair, weights, lengths, kept)), strict=True))


def acceptance(
    pair: Pair, tokens: Sequence[int], lengths: Sequence[int], block: bool, uniforms: Sequence[float] | None = None
) -> tuple[list[float], list[float]]:
    """Each drafted token's probability to pass [sum(K)], and the weight of each row of the target [sum(K + 1)].

    A row's weight is p of the tokens before it, 1 at token level: a last token there is drawn from what is left of
    max(0, weight * target - draft). In a block, a token behind which the draft goes on passes with what is left there,
    over that and 1 - p: at most p, and 1 where p is. With `uniforms` this is looked up (a pass over the vocabulary)
    only where it decides; elsewhere p stands for it.
    """
    accept, weights, going_on = list[float](), list[float](), list[int]()
    rows = [begin + n for begin, length in zip(_begins(lengths, 1), lengths, strict=True) for n in range(length)]
    ratios = pair.log_ratios(rows, tokens)
    for begin, length in zip(_begins(lengths), lengths, strict=True):
        p, weight = [0.0] * length, [1.0] * (length + 1)
        chances(ratios[begin : begin + length], block, p, weight)
        if block and uniforms is None:
            going_on += range(begin, begin + length - 1)
        elif block:
            some = uniforms[begin : begin + length]
            going_on += [begin + n for n in range(first_open(p, some), length - 1) if some[n] < p[n]]
        accept += p
        weights += weight
    p, behind = [accept[i] for i in going_on], [rows[i] + 1 for i in going_on]
    masses = pair.excess(behind, [i + 1 for i in going_on], p) if going_on else []
    for i, excess in zip(going_on, masses, strict=True):
        accept[i] = settled(accept[i], excess)
    return accept, weights


def count(accept: Sequence[float], uniforms: Sequence[float], lengths: Sequence[int], block: bool) -> list[int]:
    """How many drafted tokens of each request stay."""
    ends = accumulate(lengths)
    return [
        stay(accept[end - length : end], uniforms[end - length : end], block)
        for end, length in zip(ends, lengths, strict=True)
    ]


# The rules for one request, as `engine.verdict_kernel` has them compiled too


def chances(ratios: Sequence[float], block: bool, p: MutableSequence[float], weights: MutableSequence[float]) -> None:
    """Fills in p [K], and the weights [1 + K] of the target's rows but the first, from log target - log draft."""
    log_p = 0.0
    for n in range(len(ratios)):
        ratio = ratios[n] + (log_p if block else 0.0)
        log_p = 0.0 if ratio > 0 else ratio  # NaN stays: nothing passes then
        p[n] = exp(log_p)
        weights[n + 1] = p[n] if block else 1.0


def first_open(p: Sequence[float], uniforms: Sequence[float]) -> int:
    """Where in a block it begins to take more than p to know what stays: behind the last token that p alone lets
    pass."""
    for n in range(len(p) - 1, -1, -1):
        if uniforms[n] < p[n] and (n == len(p) - 1 or p[n] >= 1):
            return n + 1
    return 0


def settled(p: float, excess: float) -> float:
    """A token's probability to pass in a block, with so much of max(0, p * target - draft) behind it."""
    if excess > 0:
        return excess / (excess + (1 - p))
    return 1.0 if p >= 1 else 0.0


def stay(accept: Sequence[float], uniforms: Sequence[float], block: bool) -> int:
    """How many drafted tokens do: to the first that does not pass, or in a block the last that does."""
    kept = 0
    for n in range(len(accept)):
        if uniforms[n] < accept[n]:
            kept = n + 1
        elif not block:
            break
    return kept


def last_log_weights(pair: Pair, weights: Sequence[float], lengths: Sequence[int], kept: Sequence[int]) -> Tensor:
    """Of the token behind those kept: the target's own row behind a whole draft, else what is in it above the draft."""
    rows = [begin + n for begin, n in zip(_begins(lengths, 1), kept, strict=True)]
    cut = [
        Cut(i, begin + n, weights[rows[i]])
        for i, (begin, n, length) in enumerate(zip(_begins(lengths), kept, lengths, strict=True))
        if n < length
    ]
    return pair.last(rows, cut)


class LogProbs:
    """A pair of tensors [rows, vocabulary] of log-probabilities, -inf where a token cannot be drawn."""

    def __init__(self, target: Tensor, draft: Tensor) -> None:
        self.target, self.draft = target, draft

    def log_ratios(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.draft.device)
        drafted = self.draft.gather(1, ids[:, None]).squeeze(1)
        return (self.target[list(rows), ids] - drafted).tolist()

    def excess(self, rows: Sequence[int], drafts: Sequence[int], weights: Sequence[float]) -> list[float]:
        return self._above(self.target[list(rows)], drafts, weights).sum(1).tolist()

    def last(self, rows: Sequence[int], cut: Sequence[Cut]) -> Tensor:
        last, (places, drafts, weights) = self.target[list(rows)], zip(*cut, strict=True) if cut else ((), (), ())
        excess = self._above(last[list(places)], drafts, weights)
        mass = excess.sum(1)
        useful = ((mass > 0) & mass.isfinite()).nonzero().squeeze(1)
        last[torch.tensor(places, dtype=torch.int64, device=last.device)[useful]] = excess[useful].log_()
        return last

    def _above(self, target: Tensor, drafts: Sequence[int], weights: Sequence[float]) -> Tensor:
        """max(0, weight * target - draft), as probabilities, in `target`, which is a copy."""
        weight = torch.tensor(weights, dtype=target.dtype, device=target.device)
        return target.exp_().mul_(weight[:, None]).sub_(self.draft[list(drafts)].exp_()).clamp_(min=0)


def _begins(lengths: Sequence[int], more: int = 0) -> list[int]:
    """Where each request's rows begin, if it has K + `more` of them."""
    return [0, *accumulate(length + more for length in lengths)][:-1]
