"""Accept or resample: drafted tokens become tokens of the target, and its distribution is untouched.

A request's K tokens were drawn from `draft`, one distribution each; the target gave K + 1 distributions, the last one
for the token behind the draft. A verification keeps the first n drafted tokens and draws one more. Two rules, both
exact:

* token-level (Chen et al., 2023, Algorithm 2): token x stays with probability min(1, target(x) / draft(x)); at the
  first that does not, the last token comes from what the target has above the draft, max(0, target - draft);
* block verification (Sun et al., 2024): the tokens are judged together, by p, the product of their ratios cut to 1 at
  each. The longest prefix that passes stays; the last token comes from max(0, p * target - draft). It keeps at least
  as many tokens on average.

A batch is ragged: K differs between its requests; `lengths` lists them. `target` [sum(K + 1), vocabulary] and `draft`
[sum(K), vocabulary] are log-probabilities as sampled from, after temperature, filters and penalties, -inf where a token
cannot be drawn; of a drafter that was sure of its token, draft is 0 there. `tokens` [sum(K)] are the drafted ids.

Requests that are greedy or seeded need none of this: ordinary sampling decides each of their rows, with the noise that
the position has in any case, and a drafted token stays if it is the same (`engine.runner`).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def verify(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    lengths: Sequence[int],
    uniforms: Tensor,
    draw: Callable[[Tensor], list[int]],
    block: bool,
) -> list[tuple[int, int]]:
    """For each request how many drafted tokens stay, and the one that follows them.

    uniforms [sum(K)] in [0, 1) decide about the drafted tokens; `draw` draws the last ones, an id from each row of
    log-weights [requests, vocabulary]. The noise of both must be independent of each other's and of what the drafts
    were drawn with, this time and at any earlier one.
    """
    accept, weights = acceptance(target, draft, tokens, lengths, block)
    kept = count(accept, uniforms, lengths, block)
    last = last_log_weights(target, draft, weights, lengths, kept)
    return list(zip(kept, draw(last), strict=True))


def acceptance(
    target: Tensor, draft: Tensor, tokens: Tensor, lengths: Sequence[int], block: bool
) -> tuple[Tensor, Tensor]:
    """Each drafted token's probability to pass [sum(K)], and the weight of each row of `target` [sum(K + 1)].

    A row's weight is p of the tokens before it, 1 at token level: a last token there is drawn from what is left of
    max(0, weight * target - draft).
    """
    weights = target.new_ones(len(target))
    first = [begin + n for begin, length in zip(_begins(lengths, 1), lengths, strict=True) for n in range(length)]
    before = torch.tensor(first, dtype=torch.int64, device=target.device)
    ratios = target[before, tokens] - draft.gather(1, tokens[:, None]).squeeze(1)
    if not block or not first:
        return ratios.clamp(max=0).exp(), weights
    running, after = target.new_zeros(len(lengths)), []
    for ratio in pad_sequence(ratios.split(list(lengths)), batch_first=True).unbind(1):
        running = (running + ratio).clamp(max=0)
        after.append(running)
    p = torch.cat([row[:length] for row, length in zip(torch.stack(after, 1), lengths, strict=True)]).exp()
    weights[before + 1] = p
    begins = zip(_begins(lengths), lengths, strict=True)
    inner = [i for begin, length in begins for i in range(begin, begin + length - 1)]
    excess = _excess(target[before[inner] + 1], draft[[i + 1 for i in inner]], p[inner]).sum(1)
    accept = p.clone()  # right for the last token of each draft; behind the others the draft goes on
    accept[inner] = torch.where(excess > 0, excess / (excess + 1 - p[inner]), (p[inner] >= 1).to(p.dtype))
    return accept, weights


def count(accept: Tensor, uniforms: Tensor, lengths: Sequence[int], block: bool) -> list[int]:
    """How many drafted tokens of each request stay: to the first that does not pass, or the last that does."""
    passed, kept, begin = (uniforms < accept).tolist(), [], 0
    for length in lengths:
        some = passed[begin : begin + length]
        if block:
            kept.append(max((n + 1 for n, good in enumerate(some) if good), default=0))
        else:
            kept.append(next((n for n, good in enumerate(some) if not good), length))
        begin += length
    return kept


def last_log_weights(
    target: Tensor, draft: Tensor, weights: Tensor, lengths: Sequence[int], kept: Sequence[int]
) -> Tensor:
    """Of the token behind those kept: log-weights [requests, vocabulary], not normalised.

    The target's own row behind a whole draft, else what is in it above the draft. A difference that rounding has left
    without any mass stands for equal distributions: then it is the target's row too.
    """
    rows = [begin + n for begin, n in zip(_begins(lengths, 1), kept, strict=True)]
    next_draft = [begin + n for begin, n in zip(_begins(lengths), kept, strict=True)]
    last = target[rows]
    cut = [i for i, (n, length) in enumerate(zip(kept, lengths, strict=True)) if n < length]
    excess = _excess(last[cut], draft[[next_draft[i] for i in cut]], weights[[rows[i] for i in cut]])
    mass = excess.sum(1)
    useful = ((mass > 0) & mass.isfinite()).nonzero().squeeze(1)
    last[torch.tensor(cut, dtype=torch.int64, device=last.device)[useful]] = excess[useful].log_()
    return last


def _excess(target: Tensor, draft: Tensor, weight: Tensor) -> Tensor:
    """max(0, weight * target - draft) of rows [rows, vocabulary] of log-probabilities, as probabilities, in `target`.

    Both are the caller's own copies: memory that is there already is written twice as fast as new one.
    """
    return target.exp_().mul_(weight[:, None]).sub_(draft.exp_()).clamp_(min=0)


def _begins(lengths: Sequence[int], more: int = 0) -> list[int]:
    """Where each request's rows begin, if it has K + `more` of them."""
    return [0, *accumulate(length + more for length in lengths)][:-1]
