"""The sampler in plain torch operations: for accelerators, and for CPUs without Numba. Sorts the rows that filter,
where `triton_sampler` does not draw instead.

Sums that decide where a filter ends are float64, so a row's result does not hang on how a device splits a reduction.
"""

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

from paceline.core.work import TokenLogprobs
from paceline.engine import machine
from paceline.engine.keyed_random import gumbel, position_key

GREEDY_BELOW = 1e-5


def draw(
    logits: torch.Tensor, streams: list[int], positions: list[int], numbers: list[tuple[float, float, float, int]]
) -> torch.Tensor:
    """A token int64 for each row of logits float32 [rows, vocab]; -1 where the row has no distribution. It does
    not wait for the device.

    numbers[i] = (temperature, top_p, min_p, top_k); stream keys and positions as in `keyed_random`.
    """
    peaks, tokens = logits.max(dim=1)  # NaN wherever the row has one; of equal ones the lowest id
    drawn = [i for i, (temperature, *_) in enumerate(numbers) if temperature >= GREEDY_BELOW]
    if drawn:
        keys = [position_key(streams[i], positions[i]) for i in drawn]
        device = str(logits.device)
        by = _kernel(device, machine.triton_kernels(device)) or _draw_sorted
        by(logits, peaks, tokens, drawn, keys, [numbers[i] for i in drawn])
    return torch.where(peaks.isfinite(), tokens, -1)


Numbers = list[tuple[float, float, float, int]]  # temperature, top_p, min_p, top_k
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[int], list[int], Numbers], None]


def _draw_sorted(
    logits: torch.Tensor, peaks: torch.Tensor, tokens: torch.Tensor, rows: list[int], keys: list[int], numbers: Numbers
) -> None:
    """As `triton_sampler.draw`."""
    index = torch.tensor(rows).to(logits.device, non_blocking=True)
    noise = gumbel(keys, torch.arange(logits.shape[1], device=logits.device))
    tokens.index_copy_(0, index, (_scaled(logits.index_select(0, index), numbers) + noise).argmax(dim=1))


@cache
def _kernel(device: str, kernels: ModuleType | None) -> Draw | None:
    """Ours, where our `kernels` run, and it does and draws the same."""
    if kernels is None:
        return None
    noise = torch.Generator(device).manual_seed(1)
    logits = torch.randn(4, 3000, device=device, generator=noise) * 3
    peaks, tokens = logits.max(dim=1)
    numbers = [(1.0, 1.0, 0.0, 0), (0.7, 0.9, 0.0, 0), (1.2, 0.95, 0.01, 40), (1.0, 1.0, 0.05, 7)]
    both = tokens.clone(), tokens.clone()
    try:
        from paceline.engine import triton_sampler

        for by, into in zip((triton_sampler.draw, _draw_sorted), both, strict=True):
            by(logits, peaks, into, [0, 1, 2, 3], [11, 12, 13, 14], numbers)
        if torch.equal(*both):
            return triton_sampler.draw
        error: object = f"{both[0].tolist()} are not {both[1].tolist()}"
    except Exception as fault:
        error = fault
    print(f"{device}: tokens are drawn by torch's operations, for our kernel does not run: {error}", file=sys.stderr)
    return None


def log_probs(logits: torch.Tensor, numbers: list[tuple[float, float, float, int]]) -> torch.Tensor:
    """float32 [rows, vocab]: log-probabilities of what `draw` draws from, a greedy row's 0 for its token.

    NaN where the row has no distribution.
    """
    out = torch.full_like(logits, -torch.inf).scatter_(1, logits.argmax(dim=1, keepdim=True), 0.0)
    drawn = [i for i, (temperature, *_) in enumerate(numbers) if temperature >= GREEDY_BELOW]
    if drawn:
        out[drawn] = _scaled(logits[drawn], [numbers[i] for i in drawn]).log_softmax(dim=1).float()
    out[~logits.amax(dim=1).isfinite()] = torch.nan
    return out


def _scaled(logits: torch.Tensor, numbers: list[tuple[float, float, float, int]]) -> torch.Tensor:
    """(logits - peak) / T float64, -inf for what filters remove."""
    columns = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)
    temperature, top_p, min_p, top_k = (column[:, None] for column in columns.unbind(1))
    scaled = (logits.double() - logits.amax(dim=1, keepdim=True).double()) / temperature
    if any(p < 1.0 or least > 0.0 or most > 0 for _, p, least, most in numbers):
        scaled = _filtered(scaled, top_p, min_p, top_k)
    return scaled


def _filtered(scaled: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """scaled float64 [rows, vocab] with -inf for what min_p, top_k and top_p (each [rows, 1]) remove; 0 is the peak."""
    values, order = scaled.sort(dim=1, descending=True, stable=True)
    values = values.masked_fill((values < min_p.log()) & (min_p > 0), -torch.inf)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    values = values.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    mass = values.exp()
    above = mass.cumsum(dim=1) - mass
    outside = (above >= top_p * mass.sum(dim=1, keepdim=True)) & (top_p < 1.0) & (rank > 0)
    return torch.full_like(scaled, -torch.inf).scatter(1, order, values.masked_fill(outside, -torch.inf))


def describe(logits: torch.Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Raw logprob and rank of tokens[row] in logits float32 [rows, vocab], and the `top` likeliest tokens."""
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    finite = logits.amax(dim=1).isfinite().tolist()
    logprobs = logits.double().log_softmax(dim=1)
    chosen = logprobs.gather(1, ids)[:, 0].tolist()
    ranks = (1 + (logits > logits.gather(1, ids)).sum(dim=1)).tolist()
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :top]
    columns = zip(tokens, chosen, ranks, order.tolist(), logprobs.gather(1, order).tolist(), strict=True)
    entries = [TokenLogprobs(*column) for column in columns]
    return [
        entry if ok else TokenLogprobs(-1, float("nan"), 0, [], []) for entry, ok in zip(entries, finite, strict=True)
    ]
