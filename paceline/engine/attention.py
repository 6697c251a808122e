"""Causal attention of one step's slices over the paged KV cache.

Everything that depends on the step and not on the layer (rows, gathered blocks, masks) is made once, in `plan_step`.
Slices of few tokens (decodes, verifications) are rows of one batched operation; longer ones (prompt chunks) run one by
one, each over its own gathered keys and values. Query heads that share a key-value head are handled without copies.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.engine.config import ModelConfig
from paceline.engine.kv_cache import KVCache, block_rows, token_rows

try:
    from paceline.engine import cpu_attention
except (ImportError, ValueError):  # no Numba or no OpenMP layer for it: keys and values are gathered instead
    cpu_attention = None

SHORT = 8  # slices of up to this many tokens are treated as rows


class SliceSpan(NamedTuple):
    """Tokens [start, start + length) of a sequence with this block table."""

    start: int
    length: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice that attends on its own: rows [begin, end) of the step, over tokens [first, start + length)."""

    begin: int
    end: int
    start: int  # the first row's position
    first: int  # a multiple of the block size: what lies before is outside the window
    index: Tensor  # of KVCache.gather
    mask: Tensor | None  # [rows, tokens] float32, 0 or -inf; None: causal, all tokens from 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens that attend one by one: row index[i] of the step sees tokens [low[i], high[i]) of table[i]."""

    index: Tensor
    table: Tensor  # [rows, most blocks], padded with block 0
    low: Tensor
    high: Tensor
    mask: Tensor | None  # [rows, 1, 1, tokens] float32; only where keys and values are gathered


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's metadata. Chunks and rows are kept by window size, since layers may differ in it."""

    positions: Tensor  # [tokens]
    rows_written: Tensor  # of KVCache.write
    chunks: dict[int | None, list[Chunk]]
    rows: dict[int | None, Rows | None]


def plan_step(spans: list[SliceSpan], config: ModelConfig, block_size: int, device: str = "cpu") -> StepPlan:
    """Prepares a step of these slices."""
    positions, written, begins = [], [], [0]
    for start, length, blocks in spans:
        where = torch.arange(start, start + length)
        table = torch.tensor(blocks[: -(-(start + length) // block_size)])
        positions.append(where)
        written.append(token_rows(where, table, block_size, config.kv_heads))
        begins.append(begins[-1] + length)
    placed = list(zip(begins, spans, strict=False))
    chunks = [at for at in placed if at[1].length > SHORT]
    rows = [at for at in placed if at[1].length <= SHORT]
    windows = set(config.windows)
    return StepPlan(
        positions=torch.cat(positions).to(device),
        rows_written=torch.cat(written).to(device),
        chunks={
            window: [_plan_chunk(*at, window, config.kv_heads, block_size, device) for at in chunks]
            for window in windows
        },
        rows={window: _plan_rows(rows, window, block_size, device) for window in windows},
    )


def _plan_chunk(
    begin: int, span: SliceSpan, window: int | None, kv_heads: int, block_size: int, device: str
) -> Chunk:
    start, length, blocks = span
    stop = start + length
    windowed = window is not None and window < stop
    first = max(0, start - window + 1) // block_size if windowed else 0
    index = block_rows(torch.tensor(blocks[first : -(-stop // block_size)]), kv_heads).flatten()
    first *= block_size
    # Without a window a causal chunk is computed in two parts on CPU, and needs no mask.
    mask = _mask(start, length, first, window) if windowed or (start > 0 and device != "cpu") else None
    return Chunk(begin, begin + length, start, first, index.to(device), None if mask is None else mask.to(device))


def _mask(start: int, length: int, first: int, window: int | None) -> Tensor:
    """[length, start + length - first]: 0 where row i, at position start + i, sees token first + j, else -inf."""
    back = torch.arange(start, start + length, dtype=torch.int32)[:, None]
    back = back - torch.arange(first, start + length, dtype=torch.int32)
    hidden = back < 0
    if window is not None:
        hidden |= back >= window
    return torch.zeros(back.shape).masked_fill_(hidden, float("-inf"))


def _plan_rows(
    placed: list[tuple[int, SliceSpan]], window: int | None, block_size: int, device: str
) -> Rows | None:
    rows = [
        (span.start + offset + 1, begin + offset, span.blocks)
        for begin, span in placed
        for offset in range(span.length)
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: -row[0])  # threads take rows in turn: longest first gives them about the same work
    width = -(-rows[0][0] // block_size)
    high = torch.tensor([row[0] for row in rows])
    low = torch.zeros_like(high) if window is None else (high - window).clamp_(min=0)
    used = [row[2][: -(-row[0] // block_size)] for row in rows]
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in used])
    index, mask = torch.tensor([row[1] for row in rows]), None
    if not _in_place(device):
        token = torch.arange(width * block_size)
        hidden = (token >= high[:, None]) | (token < low[:, None])
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None].to(device)
    return Rows(index.to(device), table.to(device), low.to(device), high.to(device), mask)


def _in_place(device: str) -> bool:
    return cpu_attention is not None and torch.device(device).type == "cpu"


def attend(queries: Tensor, cache: KVCache, layer: int, window: int | None, plan: StepPlan) -> Tensor:
    """Queries [tokens, heads, head_dim], whose own keys and values are in the cache, to outputs of that shape."""
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for chunk in plan.chunks[window]:
        out[chunk.begin : chunk.end] = _chunk(queries[chunk.begin : chunk.end], cache, layer, chunk)
    rows = plan.rows[window]
    if rows is None:
        return out
    if rows.mask is None:
        _rows_in_place(queries.index_select(0, rows.index), cache, layer, rows, out)
    else:
        out.index_copy_(0, rows.index, _rows_gathered(queries.index_select(0, rows.index), cache, layer, rows))
    return out


def _chunk(queries: Tensor, cache: KVCache, layer: int, chunk: Chunk) -> Tensor:
    """Queries [rows, heads, head_dim] of one slice."""
    tokens = chunk.start + queries.shape[0] - chunk.first
    keys, values = (part[None, :, :tokens] for part in cache.gather(layer, chunk.index))
    queries = queries.transpose(0, 1)[None]
    if chunk.mask is None and chunk.start:
        return _in_two_parts(queries, keys, values, chunk.start)[0].transpose(0, 1)
    out = F.scaled_dot_product_attention(
        queries, keys, values, chunk.mask, is_causal=chunk.mask is None, enable_gqa=queries.shape[1] != keys.shape[1]
    )
    return out[0].transpose(0, 1)


def _in_two_parts(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Queries at positions from `start` on, over all of [0, start) and causally over their own tokens.

    torch skips the hidden half of the second part, and neither needs a mask of rows x tokens. The parts are joined by
    their log-sum-exps, as FlashAttention joins its blocks. Only on CPU.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before, before_lse = flash(queries, keys[:, :, :start], values[:, :, :start], 0.0, False)
    own, own_lse = flash(queries, keys[:, :, start:], values[:, :, start:], 0.0, True)
    return own.lerp_(before, torch.sigmoid(before_lse - own_lse)[..., None])


def _rows_in_place(queries: Tensor, cache: KVCache, layer: int, rows: Rows, out: Tensor) -> None:
    keys, values = cache.flat[layer]
    head_dim = queries.shape[2]
    cpu_attention.attend_rows(
        queries.flatten(1).numpy(), keys.numpy(), values.numpy(), rows.index.numpy(), rows.table.numpy(),
        rows.low.numpy(), rows.high.numpy(), head_dim**-0.5, cache.kv_heads, cache.block_size, head_dim,
        torch.get_num_threads(), out.view(out.shape[0], -1).numpy(),
    )  # fmt: skip


def _rows_gathered(queries: Tensor, cache: KVCache, layer: int, rows: Rows) -> Tensor:
    """Queries [rows, heads, head_dim], one token each: the heads of a group are the rows of one small product."""
    count, heads, head_dim = queries.shape
    kv_heads = cache.kv_heads
    index = block_rows(rows.table.cpu(), kv_heads).flatten().to(queries.device)
    keys, values = (part.view(count, kv_heads, -1, head_dim) for part in cache.gather(layer, index))
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, head_dim)
    mask = rows.mask.expand(-1, kv_heads, heads // kv_heads, -1)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(queries.shape)


def working_bytes(config: ModelConfig, max_batch_tokens: int, context: int) -> int:
    """The most that `attend` holds at once: gathered keys and values of a chunk, its parts and masks."""
    chunk = min(max_batch_tokens, context)
    gathered = 2 * config.kv_heads * config.head_dim * context
    parts = 3 * chunk * config.heads * config.head_dim
    windows = [window for window in set(config.windows) if window is not None]
    masks = sum(chunk * min(context, window + chunk) for window in windows)
    return 4 * (gathered + parts) + 9 * masks  # a mask is made from an int32 and a bool of its size


def warm_up(config: ModelConfig, block_size: int, device: str = "cpu") -> None:
    """Runs a chunk, a chunk at a context, and rows once over a pool of one layer."""
    small = KVCache(config, 2, block_size, device)
    queries = torch.zeros(SHORT + 2, config.heads, config.head_dim, device=device)
    for start, length in ((0, SHORT + 1), (SHORT + 1, SHORT + 1), (0, 1)):
        blocks = [0, 1] * (2 * SHORT + 2)
        plan = plan_step([SliceSpan(start, length, blocks)], config, block_size, device)
        attend(queries[:length], small, 0, config.windows[0], plan)
