"""Attention over pages on a GPU in Triton, and what stands between products: norms, rotation with writing to pages,
gates.

Triton comes with torch's CUDA builds. Attention is FlashAttention's (Dao et al., 2022): scores of a tile of queries and
a tile of keys at a time, with a running maximum and sum. Tiles of few rows, decodes and verifications, may have their
keys cut in parts that are computed side by side and put together by a second kernel ("Flash-Decoding", Dao et al.,
2023).

The query heads that share keys are rows of one tile. Pages are [blocks, page, kv_heads, dims]; a slice's tokens are at
the end of the `used` tokens that its row of `tables` leads to.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.engine.gpu_plan import MOST_PARTS, Tiles
from paceline.engine.linear import Norm

LOG2_E = 1.4426950408889634
HEADS = 8  # that a program rotates


class Tile(NamedTuple):
    """Queries and keys that are multiplied at a time; what a multiprocessor's memory has to hold, twice or more."""

    rows: int
    keys: int
    warps: int
    stages: int  # of loading


FEW = Tile(16, 128, 4, 3)  # of short slices: the fewest rows that tensor cores take
MANY = {2: Tile(64, 64, 4, 2), 4: Tile(32, 32, 4, 2)}  # of others, by the bytes of a number

# Where they lie changes from step to step, and nothing is to be compiled for that.
METADATA = ["slots", "tile_slices", "tile_rows", "starts", "used", "tables"]


@triton.jit(do_not_specialize_on_alignment=METADATA)
def _rotate_and_write(
    heads, stride, turns, slots, keys, values, query_norm, key_norm, eps,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Queries are rotated where they are; keys, rotated, and values go to their slots."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, WIDE)[None, :]
    pair = tl.arange(0, WIDE // 2)[None, :]
    there = (head < Q + 2 * KV) & (dim < D)
    is_query, is_value = head < Q, head >= Q + KV
    source = heads + token * stride + head * D + dim
    x = tl.load(source, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        weight = tl.load(query_norm + dim + 0 * head, mask=there & is_query, other=0.0).to(tl.float32)
        is_key = there & (head >= Q) & (head < Q + KV)
        weight += tl.load(key_norm + dim + 0 * head, mask=is_key, other=0.0).to(tl.float32)
        weight *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = tl.where(is_value, x, x * weight)
    turn = turns + token * D + 2 * pair
    cosine = tl.load(turn, mask=pair < D // 2, other=1.0)
    sine = tl.load(turn + 1, mask=pair < D // 2, other=0.0)
    even, odd = tl.split(tl.reshape(x, (HEADS, WIDE // 2, 2)))
    turned = tl.reshape(tl.join(even * cosine - odd * sine, odd * cosine + even * sine), (HEADS, WIDE))
    kind = heads.dtype.element_ty
    tl.store(source, turned.to(kind), mask=there & is_query)
    slot = tl.load(slots + token).to(tl.int64) * (KV * D) + dim
    tl.store(keys + slot + (head - Q) * D, turned.to(kind), mask=there & (head >= Q) & (head < Q + KV))
    tl.store(values + slot + (head - Q - KV) * D, x.to(kind), mask=there & is_value)


@triton.jit
def _over_keys(
    peak, mass, mixed, q, position, low, high, keys, values, table, scale, first,
    KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Goes on with keys [low, high) of one head, which begins at `first` of a token's. Without MASKED all of their
    tiles are full and every row sees them."""
    dim = tl.arange(0, WIDE)
    inside = dim < D
    for at in range(low, high, KEYS):
        key_at = at + tl.arange(0, KEYS)
        if MASKED:
            known = key_at < high
            block = tl.load(table + key_at // PAGE, mask=known, other=0)
        else:
            known = key_at >= 0
            block = tl.load(table + key_at // PAGE)
        place = (block.to(tl.int64) * PAGE + key_at % PAGE) * (KV * D) + first
        if MASKED or D < WIDE:
            k = tl.load(keys + place[None, :] + dim[:, None], mask=known[None, :] & inside[:, None], other=0.0)
            v = tl.load(values + place[:, None] + dim[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        else:
            k = tl.load(keys + place[None, :] + dim[:, None])
            v = tl.load(values + place[:, None] + dim[None, :])
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if MASKED:
            seen = known[None, :] & (key_at[None, :] <= position[:, None])
            if WINDOW > 0:
                seen &= key_at[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        mass = mass * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak
    return peak, mass, mixed


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=METADATA)
def _attend(
    queries, stride, keys, values, tile_slices, tile_rows, starts, used, tables, width, scale, out, partial, sums,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile's queries, one head of keys, one part of them. `scale` makes scores powers of 2.

    With SPLIT it is `partial` [parts, tiles, KV, ROWS, D] that is written, not yet divided by its sum, and `sums`
    [parts, tiles, KV, ROWS, 2]: the largest score, and the sum.
    """
    tile, shared, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = Q // KV
    slice_ = tl.load(tile_slices + tile)
    first = tl.load(tile_rows + tile)  # of the slice's tokens
    begin = tl.load(starts + slice_)
    length = tl.load(starts + slice_ + 1) - begin
    total = tl.load(used + slice_)
    row = tl.arange(0, ROWS)
    token = first + row // group  # of the slice
    asked = (token < length) & (row < ROWS // group * group)
    position = total - length + token
    head = shared * group + row % group
    dim = tl.arange(0, WIDE)
    wanted = asked[:, None] & (dim < D)[None, :]
    line = (begin + token).to(tl.int64)
    q = tl.load(queries + line[:, None] * stride + head[:, None] * D + dim[None, :], mask=wanted, other=0.0)

    low = 0
    high = tl.minimum(total, total - length + first + ROWS // group)
    if WINDOW > 0:
        low = tl.maximum(0, total - length + first - WINDOW + 1) // KEYS * KEYS
    if SPLIT:
        size = tl.cdiv(tl.cdiv(high - low, KEYS), tl.num_programs(2)) * KEYS
        low += part * size
        high = tl.minimum(high, low + size)
    peak = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    table = tables + slice_.to(tl.int64) * width
    if WINDOW == 0:  # tiles that all rows see, up to the first row's own token
        middle = tl.maximum(low, tl.minimum(high, total - length + first + 1) // KEYS * KEYS)
        peak, mass, mixed = _over_keys(
            peak, mass, mixed, q, position, low, middle, keys, values, table, scale, shared * D,
            KV, D, WIDE, PAGE, WINDOW, KEYS, False,
        )  # fmt: skip
        low = middle
    peak, mass, mixed = _over_keys(
        peak, mass, mixed, q, position, low, high, keys, values, table, scale, shared * D,
        KV, D, WIDE, PAGE, WINDOW, KEYS, True,
    )  # fmt: skip
    if SPLIT:
        line = ((part * tl.num_programs(0) + tile) * KV + shared).to(tl.int64) * ROWS + row
        tl.store(partial + line[:, None] * D + dim[None, :], mixed, mask=wanted)
        tl.store(sums + 2 * line, peak)
        tl.store(sums + 2 * line + 1, mass)
    else:
        mixed = (mixed / tl.where(asked, mass, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + (line * Q + head)[:, None] * D + dim[None, :], mixed, mask=wanted)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=METADATA)
def _put_together(
    partial, sums, parts, tile_slices, tile_rows, starts, out,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """What the parts of a row's keys give together."""
    tile, shared, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = Q // KV
    slice_ = tl.load(tile_slices + tile)
    begin = tl.load(starts + slice_)
    length = tl.load(starts + slice_ + 1) - begin
    token = tl.load(tile_rows + tile) + row // group
    if (token < length) & (row < ROWS // group * group):
        part = tl.arange(0, MOST)
        dim = tl.arange(0, WIDE)
        line = ((part * tl.num_programs(0) + tile) * KV + shared).to(tl.int64) * ROWS + row
        peaks = tl.load(sums + 2 * line, mask=part < parts, other=-1e30)
        masses = tl.load(sums + 2 * line + 1, mask=part < parts, other=0.0)
        weights = tl.exp2(peaks - tl.max(peaks, 0))
        known = (part < parts)[:, None] & (dim < D)[None, :]
        mixed = tl.load(partial + line[:, None] * D + dim[None, :], mask=known, other=0.0)
        mixed = tl.sum(mixed * weights[:, None], 0) / tl.sum(masses * weights, 0)
        place = ((begin + token).to(tl.int64) * Q + shared * group + row % group) * D
        tl.store(out + place + dim, mixed.to(out.dtype.element_ty), mask=dim < D)


@triton.jit
def _norm(x, stride, weight, eps, out, width, SIZE: tl.constexpr):
    """Root mean square norm of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    values = tl.load(x + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    values *= scale * tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, values.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _gate(both, out, width, SIZE: tl.constexpr):
    """silu(g) v of the halves of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(both + 2 * row * width + at, mask=at < width, other=0.0).to(tl.float32)
    value = tl.load(both + (2 * row + 1) * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1 + tl.exp(-gate)) * value).to(out.dtype.element_ty), mask=at < width)


def rotate_and_write(
    heads: Tensor, turns: Tensor, norms: tuple[Norm, Norm] | None, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Of heads [tokens, (q + 2 kv) dims] the queries in place, with turns [tokens, 1, dims / 2] complex64; keys and
    values [blocks, page, kv, dims]."""
    kv, dims = keys.shape[2:]
    count = heads.shape[1] // dims
    query_norm, key_norm = (norms[0].weight, norms[1].weight) if norms else (heads, heads)
    _rotate_and_write[len(heads), triton.cdiv(count, HEADS)](
        heads, heads.stride(0), torch.view_as_real(turns), slots, keys, values, query_norm, key_norm,
        norms[0].eps if norms else 0.0, Q=count - 2 * kv, KV=kv, D=dims, WIDE=triton.next_power_of_2(dims),
        HEADS=HEADS, NORMED=norms is not None, num_warps=4,
    )  # fmt: skip


def attend(
    heads: Tensor, keys: Tensor, values: Tensor, out: Tensor, window: int | None, starts: Tensor, used: Tensor,
    tables: Tensor, few: Tiles | None, many: Tiles | None,
) -> None:  # fmt: skip
    """Rotated queries, the first of heads [tokens, (q + 2 kv) dims], over pages, to out [tokens, q dims].

    Decodes, which read, and chunks, which multiply, are computed side by side.
    """
    page, kv, dims = keys.shape[1:]
    sizes = dict(Q=out.shape[1] // dims, KV=kv, D=dims, WIDE=max(16, triton.next_power_of_2(dims)))
    group = sizes["Q"] // kv

    def over(tiles: Tiles, shape: Tile) -> None:
        tile = dict(tile_slices=tiles.slices, tile_rows=tiles.rows, starts=starts, out=out)
        partial, sums, count = out, out, len(tiles.slices)
        if tiles.parts > 1:
            lines = tiles.parts * count * kv * shape.rows
            partial, sums = (torch.empty(lines, n, dtype=torch.float32, device=out.device) for n in (dims, 2))
        _attend[count, kv, tiles.parts](
            heads, heads.stride(0), keys, values, used=used, tables=tables, width=tables.stride(0),
            scale=LOG2_E / dims**0.5, partial=partial, sums=sums, PAGE=page, WINDOW=window or 0, ROWS=shape.rows,
            KEYS=shape.keys, SPLIT=tiles.parts > 1, num_warps=shape.warps, num_stages=shape.stages, **tile, **sizes,
        )  # fmt: skip
        if tiles.parts > 1:
            _put_together[count, kv, shape.rows](
                partial, sums, tiles.parts, ROWS=shape.rows, MOST=MOST_PARTS, num_warps=4, **tile, **sizes
            )

    aside = _second_stream(out.device) if few and many and out.is_cuda else None
    if aside:
        aside.wait_stream(torch.cuda.current_stream(out.device))
    if few:
        with torch.cuda.stream(aside):  # None: where we are
            over(few, few_tile(group))
    if many:
        over(many, many_tile(group, keys.dtype))
    if aside:
        torch.cuda.current_stream(out.device).wait_stream(aside)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def few_tile(group: int) -> Tile:
    """Of short slices, for so many query heads that share keys."""
    return FEW._replace(rows=max(FEW.rows, triton.next_power_of_2(group)))


def many_tile(group: int, dtype: torch.dtype) -> Tile:
    """Of others."""
    tile = MANY[dtype.itemsize]
    return tile._replace(rows=max(tile.rows, triton.next_power_of_2(group)))


def norm(x: Tensor, by: Norm) -> Tensor:
    """Of rows x [rows, n]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = triton.next_power_of_2(x.shape[1])
    _norm[(len(x),)](x, x.stride(0), by.weight, by.eps, out, x.shape[1], SIZE=size, num_warps=8 if size > 1024 else 4)
    return out


def gate(both: Tensor) -> Tensor:
    """[rows, 2 n], gates before values, to silu(gate) value [rows, n]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width)
    _gate[rows, triton.cdiv(width, 1024)](both, out, width, SIZE=1024, num_warps=4)
    return out
