"""Causal attention of one step's slices over the paged KV cache.

Everything that depends on the step and not on the layer (slots, gathered blocks, masks) is made once, in `plan_step`.
Slices of few tokens (decodes, verifications) are rows of one batched operation; longer ones (prompt chunks) run one by
one, each over its own gathered keys and values. Query heads that share a key-value head are handled without copies.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.engine.kv_cache import KVCache

SHORT = 8  # slices of up to this many tokens are treated as rows


class SliceSpan(NamedTuple):
    """Tokens [start, start + length) of a sequence with this block table."""

    start: int
    length: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice that attends on its own: rows [begin, end) of the step, over tokens [first, stop) of the sequence."""

    begin: int
    end: int
    first: int  # a multiple of the block size: what lies before is outside the window
    stop: int
    blocks: Tensor  # ids of the blocks of [first, stop)
    mask: Tensor | None  # [rows, tokens] float32, 0 or -inf; None: plain causal from token 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens that attend one by one: row `index[i]` of the step sees tokens [low[i], high[i]) of table[i]."""

    index: Tensor
    table: Tensor  # [rows, most blocks], padded with block 0
    low: Tensor
    high: Tensor
    mask: Tensor | None  # [rows, 1, 1, tokens] float32; only for the gathering path


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's metadata. Chunks and rows are kept by window size, since layers may differ in it."""

    slots: Tensor  # [tokens]: where each token's key and value go
    positions: Tensor  # [tokens]
    chunks: dict[int | None, list[Chunk]]
    rows: dict[int | None, Rows | None]


def plan_step(spans: list[SliceSpan], windows: set[int | None], block_size: int, device: str = "cpu") -> StepPlan:
    """Prepares a step of these slices for layers with these windows."""
    positions, slots = [], []
    for start, length, blocks in spans:
        where = torch.arange(start, start + length)
        table = torch.tensor(blocks[: -(-(start + length) // block_size)])
        positions.append(where)
        slots.append(table[where // block_size] * block_size + where % block_size)
    begins = [0]
    for span in spans:
        begins.append(begins[-1] + span.length)
    return StepPlan(
        slots=torch.cat(slots).to(device),
        positions=torch.cat(positions).to(device),
        chunks={window: _chunks(spans, begins, window, block_size, device) for window in windows},
        rows={window: _rows(spans, begins, window, block_size, device) for window in windows},
    )


def _chunks(
    spans: list[SliceSpan], begins: list[int], window: int | None, block_size: int, device: str
) -> list[Chunk]:
    chunks = []
    for (start, length, blocks), begin in zip(spans, begins, strict=False):
        if length <= SHORT:
            continue
        stop = start + length
        first = 0 if window is None else max(0, start - window + 1) // block_size
        ids = torch.tensor(blocks[first : -(-stop // block_size)], device=device)
        first *= block_size
        plain = start == 0 and (window is None or window >= length)
        mask = None if plain else _chunk_mask(start, length, first, window).to(device)
        chunks.append(Chunk(begin, begin + length, first, stop, ids, mask))
    return chunks


def _chunk_mask(start: int, length: int, first: int, window: int | None) -> Tensor:
    """[length, start + length - first]: 0 where row i, at position start + i, sees token first + j, else -inf."""
    back = torch.arange(start, start + length)[:, None] - torch.arange(first, start + length)
    hidden = back < 0
    if window is not None:
        hidden |= back >= window
    return torch.zeros(back.shape).masked_fill_(hidden, float("-inf"))


def _rows(
    spans: list[SliceSpan], begins: list[int], window: int | None, block_size: int, device: str
) -> Rows | None:
    # Longest first, so that threads which take rows in turn get about the same work.
    rows = [
        (start + offset + 1, begin + offset, blocks)
        for (start, length, blocks), begin in zip(spans, begins, strict=False)
        if length <= SHORT
        for offset in range(length)
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: -row[0])
    width = -(-rows[0][0] // block_size)
    high = torch.tensor([row[0] for row in rows])
    low = torch.zeros_like(high) if window is None else (high - window).clamp_(min=0)
    padded = [row[2][: -(-row[0] // block_size)] for row in rows]
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in padded])
    token = torch.arange(width * block_size)
    hidden = (token >= high[:, None]) | (token < low[:, None])
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
    index = torch.tensor([row[1] for row in rows])
    return Rows(*(tensor.to(device) for tensor in (index, table, low, high, mask)))


def attend(queries: Tensor, cache: KVCache, layer: int, window: int | None, plan: StepPlan) -> Tensor:
    """Queries [tokens, heads, head_dim], whose own keys and values are in the cache, to outputs of that shape."""
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for chunk in plan.chunks[window]:
        out[chunk.begin : chunk.end] = _chunk(queries[chunk.begin : chunk.end], cache, layer, chunk)
    rows = plan.rows[window]
    if rows is not None:
        out.index_copy_(0, rows.index, _gathered_rows(queries.index_select(0, rows.index), cache, layer, rows))
    return out


def _chunk(queries: Tensor, cache: KVCache, layer: int, chunk: Chunk) -> Tensor:
    """Queries [rows, heads, head_dim] of one slice."""
    tokens = chunk.stop - chunk.first
    keys, values = (tensor[:tokens].transpose(0, 1)[None] for tensor in cache.gather(layer, chunk.blocks))
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


def _gathered_rows(queries: Tensor, cache: KVCache, layer: int, rows: Rows) -> Tensor:
    """Queries [rows, heads, head_dim], one token each: the heads of a group are the rows of one small product."""
    count, heads, head_dim = queries.shape
    keys, values = cache.gather(layer, rows.table.flatten())
    kv_heads = keys.shape[1]
    keys, values = (tensor.view(count, -1, kv_heads, head_dim).transpose(1, 2) for tensor in (keys, values))
    grouped = queries.view(count, kv_heads, heads // kv_heads, head_dim)
    mask = rows.mask if rows.mask is None else rows.mask.expand(-1, kv_heads, heads // kv_heads, -1)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(queries.shape)
