"""Draws of `stock_sampler.draw` on a GPU in Triton: a program a row, in a few passes over it, and nothing is sorted.

Filters keep the tokens above a threshold and, of those that equal it, the first few. The threshold is found by halves:
floats are in the order of their bits, so 32 passes that count tokens (top_k), or add up what they weigh (top_p), are
enough for any row. A row without filters takes one pass.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from paceline.engine.keyed_random import MUL_A, MUL_B, MUL_C

BLOCK, WARPS = 4096, 16  # tokens at a time


@triton.jit
def _scaled(logits, ids, size, peak, temperature):
    """Logits of these tokens, their place in the order of floats, from 0 on, and (logit - peak) / T in float64."""
    x = tl.load(logits + ids, mask=ids < size, other=float("-inf")) + 0.0  # 0.0 for -0.0, which equals it
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64) + 2147483648
    return order, (x.to(tl.float64) - peak) / temperature


@triton.jit
def _count(logits, size, least, BLOCK: tl.constexpr):
    """Tokens at or above a place in the order."""
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        order, _ = _scaled(logits, ids, size, 0.0, 1.0)
        found += ((order >= least) & (ids < size)).to(tl.int32)
    return tl.sum(found, axis=0).to(tl.int64)


@triton.jit
def _weight(logits, size, peak, temperature, floor, above, BLOCK: tl.constexpr):
    """What tokens above a place in the order weigh, without those below the `floor`; the likeliest weighs 1."""
    found = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        order, scaled = _scaled(logits, ids, size, peak, temperature)
        found += tl.where((order > above) & (scaled >= floor) & (ids < size), tl.exp(scaled), 0.0)
    return tl.sum(found, axis=0)


@triton.jit
def _weight_at(place, peak, temperature, floor):
    """What one token at a place in the order weighs."""
    order = (place - 2147483648).to(tl.int32)
    bits = tl.where(order >= 0, order, order ^ 0x7FFFFFFF)
    scaled = (bits.to(tl.float32, bitcast=True).to(tl.float64) - peak) / temperature
    return tl.where(scaled >= floor, tl.exp(scaled), 0.0)


@triton.jit
def _noise(low, high, ids, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """`keyed_random.gumbel` in float64, of a key's halves. 1 - u has 33 bits, so u is exact, too."""
    x = ids.to(tl.uint32) ^ low
    x = (x ^ (x >> 17)) * A
    x = (x ^ (x >> 11)) + high
    x = x * B
    x = (x ^ (x >> 15)) * C
    x = x ^ (x >> 14)
    return -tl.log(-tl.log((x.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "keys", "numbers"])
def _draw(
    logits, stride, size, peaks, tokens, rows, keys, numbers, count,
    BLOCK: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The token of row rows[i]. numbers [4, count]: temperature, top_p, log(min_p), top_k, or the number of tokens."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    largest = tl.load(peaks + row) + 0.0
    if tl.abs(largest) < float("inf"):  # else it is infinite or NaN, and the row has no distribution
        logits += row * stride
        bits = largest.to(tl.int32, bitcast=True)
        top = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64) + 2147483648
        peak = largest.to(tl.float64)
        temperature, top_p = tl.load(numbers + i), tl.load(numbers + count + i)
        floor, k = tl.load(numbers + 2 * count + i), tl.load(numbers + 3 * count + i).to(tl.int64)
        least, ties = tl.full((), 0, tl.int64), size.to(tl.int64)  # the threshold, and how many that equal it are kept
        if k < size:
            high = top
            while least < high:
                middle = (least + high + 1) // 2
                if _count(logits, size, middle, BLOCK) >= k:
                    least = middle
                else:
                    high = middle - 1
            ties = k - _count(logits, size, least + 1, BLOCK)
        if top_p < 1.0:
            low, high = least, top
            total = _weight(logits, size, peak, temperature, floor, least, BLOCK)
            if k < size:
                total += ties.to(tl.float64) * _weight_at(least, peak, temperature, floor)
            bound = top_p * total
            while low < high:
                middle = (low + high) // 2
                if _weight(logits, size, peak, temperature, floor, middle, BLOCK) < bound:
                    high = middle
                else:
                    low = middle + 1
            before = _weight(logits, size, peak, temperature, floor, low, BLOCK)
            each = _weight_at(low, peak, temperature, floor)
            kept = tl.maximum(1, tl.ceil((bound - before) / each).to(tl.int64))
            ties = tl.where(low == least, tl.minimum(ties, kept), kept)
            least = low
        key = tl.load(keys + i)
        low32, high32 = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
        best = tl.full((), float("-inf"), tl.float64)
        chosen, equal = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
        for start in range(0, size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            order, scaled = _scaled(logits, ids, size, peak, temperature)
            same = ((order == least) & (ids < size)).to(tl.int64)
            place = equal + tl.cumsum(same, axis=0) - same
            equal += tl.sum(same, axis=0)
            stays = ((order > least) | ((same > 0) & (place < ties))) & (scaled >= floor) & (ids < size)
            value = tl.where(stays, scaled + _noise(low32, high32, ids, A, B, C), float("-inf"))
            most = tl.max(value, axis=0)
            if most > best:
                best = most
                chosen = tl.min(tl.where(value == most, ids, size), axis=0).to(tl.int64)
        tl.store(tokens + row, chosen)


def draw(
    logits: torch.Tensor, peaks: torch.Tensor, tokens: torch.Tensor, rows: list[int], keys: list[int],
    numbers: list[tuple[float, float, float, int]],
) -> None:  # fmt: skip
    """Tokens [rows] of logits float32 [rows, vocab], whose largest are `peaks`, are drawn for these `rows`, with their
    position keys and (temperature, top_p, min_p, top_k); those without a distribution stay as they are."""
    columns = np.array(numbers, np.float64).T.copy()
    with np.errstate(divide="ignore"):
        columns[2] = np.log(columns[2])
    columns[3, columns[3] <= 0] = logits.shape[1]
    packed = np.stack([np.array(rows, np.int64), np.array(keys, np.uint64).view(np.int64), *columns.view(np.int64)])
    there = torch.from_numpy(packed).to(logits.device, non_blocking=True)
    _draw[(len(rows),)](
        logits, logits.stride(0), logits.shape[1], peaks, tokens, there[0], there[1], there[2:].view(torch.float64),
        len(rows), BLOCK=BLOCK, A=MUL_A, B=MUL_B, C=MUL_C, num_warps=WARPS,
    )  # fmt: skip
