"""Rotary embedding, the paged KV cache and causal attention of one step's slices.

Everything that depends on the step and not on the layer (rows, block tables, masks) is made once, in `plan_step`, and
by the same rules in `fused_kernel`, where a step is one call. Slices of one token (decodes) and verifications are rows
of one batched operation; longer ones (prompt chunks) run one by one, and a token's bits do not depend on how long its
chunk was, if it was not alone. Query heads that share a key-value head are handled without copies. Our own kernels read
keys and values where they lie (`kernels`); on processors that they cannot run on torch's attention gets them gathered.
GPUs have `gpu.py` instead.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.engine import layout
from paceline.engine.config import ModelConfig
from paceline.engine.kv_cache import KVCache, block_rows
from paceline.engine.linear import Norm, kernels
from paceline.engine.rope import rotate_


class SliceSpan(NamedTuple):
    """Tokens [start, start + length) of a sequence with this block table."""

    start: int
    length: int
    blocks: Seq[int]
    drafted: bool = False  # its tokens are rows, so that their bits are those of single ones
    read: int | None = None  # its last tokens, of which somebody wants what the layers make; None: all

    @property
    def what_is_read(self) -> "SliceSpan":
        if self.read is None or self.read == self.length:
            return self
        return SliceSpan(self.start + self.length - self.read, self.read, self.blocks, self.drafted)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice that attends on its own: rows [begin, end) of the step, over tokens [first, start + length)."""

    begin: int
    end: int
    start: int  # the first row's position
    table: Tensor  # [blocks]
    first: int = 0  # where keys are gathered: a multiple of the block size; what lies before is outside the window
    index: Tensor | None = None  # of KVCache.gather
    mask: Tensor | None = None  # [rows, tokens] float32, 0 or -inf; None: causal, all tokens from 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens that attend one by one: row index[i] of the step sees tokens [low[i], high[i]) of table[i].

    Rows [first[r], first[r + 1]) are a run: neighbours in a sequence, for which its keys and values are read once.
    """

    index: Tensor
    table: Tensor  # [rows, most blocks], padded with block 0
    low: Tensor
    high: Tensor
    mask: Tensor | None  # [rows, 1, 1, tokens] float32; only where keys and values are gathered
    first: Tensor  # [runs + 1, or more]
    runs: int
    most: int  # rows of a run
    longest: int  # tokens that a run sees


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's metadata. Chunks and rows are kept by window size, since layers may differ in it."""

    positions: Tensor  # [tokens]
    end: int  # all of them are below
    rows_written: Tensor  # [tokens * kv_heads], of KVCache.write
    chunks: dict[int | None, list[Chunk]]
    rows: dict[int | None, Rows | None]
    kept: Tensor | None = None  # which tokens are read, in order; None: all
    last: "StepPlan | None" = None  # the same step, where only those attend

    def lines(self) -> tuple[np.ndarray, np.ndarray]:
        """The plan as `kernels.decoder_layers` takes it: addresses and sizes by window (None first), and by chunk."""
        plans = np.zeros((len(self.rows), kernels.PLAN_FIELDS), np.int64)
        for line, (window, rows) in zip(plans, sorted(self.rows.items(), key=lambda item: item[0] or 0), strict=True):
            line[kernels.WINDOW] = window or 0
            if rows is not None:
                line[kernels.ROW_INDEX], line[kernels.ROW_TABLE] = rows.index.data_ptr(), rows.table.data_ptr()
                line[kernels.ROW_WIDTH], line[kernels.ROW_LOW] = rows.table.shape[1], rows.low.data_ptr()
                line[kernels.ROW_HIGH], line[kernels.RUN_FIRST] = rows.high.data_ptr(), rows.first.data_ptr()
                line[kernels.RUN_COUNT], line[kernels.RUN_MOST] = rows.runs, rows.most
                line[kernels.RUN_LONGEST] = rows.longest
        chunks = next(iter(self.chunks.values()))
        whole = [(c.begin, c.end - c.begin, c.start, c.table.data_ptr()) for c in chunks]
        return plans, np.array(whole, np.int64).reshape(-1, kernels.CHUNK_FIELDS)


def plan_step(spans: list[SliceSpan], config: ModelConfig, block_size: int) -> StepPlan:
    """Prepares a step of these slices."""
    held = [span.blocks if isinstance(span.blocks, array) else array("q", span.blocks) for span in spans]
    begins = list(accumulate((span.length for span in spans), initial=0))
    slices = np.array([
        (span.start, span.length, blocks.buffer_info()[0], len(blocks), begin)
        for span, blocks, begin in zip(spans, held, begins, strict=False)
    ], np.int64)  # fmt: skip
    # Plain numbers: between passes over the weights a call of NumPy's takes ten microseconds or more.
    tokens, end = begins[-1], max(span.start + span.length for span in spans)
    positions, written = np.empty(tokens, np.int64), np.empty(tokens * config.kv_heads, np.int64)
    layout.place_tokens(slices, block_size, config.kv_heads, positions, written)
    step = torch.from_numpy(positions), end, torch.from_numpy(written)
    attending = _attending(spans, slices, config, block_size)
    kept = rows_read(spans)
    if kept is None:
        return StepPlan(*step, *attending)
    read = [span.what_is_read for span in spans]
    for line, span, some in zip(slices, spans, read, strict=True):
        if some is not span:
            skipped = span.length - some.length
            line[layout.START] += skipped
            line[layout.LENGTH] -= skipped
            line[layout.BEGIN] += skipped
    last = StepPlan(*step, *_attending(read, slices, config, block_size))
    return StepPlan(*step, *attending, torch.from_numpy(kept), last)


def rows_read(spans: list[SliceSpan]) -> np.ndarray | None:
    """Which of the step's tokens are read; None: all."""
    if all(span.what_is_read is span for span in spans):
        return None
    kept, end = list[int](), 0
    for span in spans:
        end += span.length
        kept += range(end - span.what_is_read.length, end)
    return np.array(kept, np.int64)


def _attending(
    spans: list[SliceSpan], slices: np.ndarray, config: ModelConfig, block_size: int
) -> tuple[dict[int | None, list[Chunk]], dict[int | None, Rows | None]]:
    """Chunks and rows of these slices, which have their lines, by window."""
    alone = [span.length == 1 or span.drafted for span in spans]
    mine, windows = [span for span, single in zip(spans, alone, strict=True) if single], set(config.windows)
    longest = max((span.start + span.length for span in mine), default=0)
    count, width = sum(span.length for span in mine), -(-longest // block_size)
    index, high, table = np.empty(count, np.int64), np.empty(count, np.int64), np.zeros((count, width), np.int64)
    first, runs, most = np.empty(count + 1, np.int64), 0, 1
    if count:
        if kernels is not None:
            most = kernels.most_of_run(config.heads // config.kv_heads, longest)
            most = min(most, max(span.length for span in mine), -(-count * config.kv_heads // kernels.num_threads()))
        some = slices if len(mine) == len(spans) else slices[alone]
        runs = layout.place_rows(some, block_size, most, index, high, table, first)
    own = (torch.from_numpy(index), torch.from_numpy(table), torch.from_numpy(high), torch.from_numpy(first))
    longer = [i for i, single in enumerate(alone) if spans[i].length and not single]
    chunks = [(int(slices[i, layout.BEGIN]), spans[i]) for i in longer]
    return {
        window: [_plan_chunk(*at, window, config.kv_heads, block_size) for at in chunks] for window in windows
    }, {
        window: _rows_within(window, *own, runs, most, high, longest, width * block_size) if count else None
        for window in windows
    }


def _plan_chunk(begin: int, span: SliceSpan, window: int | None, kv_heads: int, block_size: int) -> Chunk:
    start, length, blocks = span.start, span.length, span.blocks
    stop = start + length
    table = torch.from_numpy(np.array(blocks[: -(-stop // block_size)], np.int64))
    if _tiled():
        return Chunk(begin, begin + length, start, table)
    windowed = window is not None and window < stop
    first = max(0, start - window + 1) // block_size if windowed else 0
    index = block_rows(table[first:], kv_heads).flatten()
    first *= block_size
    # Without a window a causal chunk is computed in two parts, and needs no mask.
    mask = _mask(start, length, first, window) if windowed else None
    return Chunk(begin, begin + length, start, table, first, index, mask)


def _mask(start: int, length: int, first: int, window: int | None) -> Tensor:
    """[length, start + length - first]: 0 where row i, at position start + i, sees token first + j, else -inf."""
    back = torch.arange(start, start + length, dtype=torch.int32)[:, None]
    back = back - torch.arange(first, start + length, dtype=torch.int32)
    hidden = back < 0
    if window is not None:
        hidden |= back >= window
    return torch.zeros(back.shape).masked_fill_(hidden, float("-inf"))


def _rows_within(
    window: int | None, index: Tensor, table: Tensor, high: Tensor, first: Tensor, runs: int, most: int,
    ends: np.ndarray, longest: int, tokens: int,
) -> Rows:  # fmt: skip
    low = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    mask = None
    if kernels is None:
        token = np.arange(tokens)
        hidden = torch.from_numpy((token >= ends[:, None]) | (token < low[:, None]))
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
    seen = min(longest, window + most - 1 if window else longest)
    return Rows(index, table, torch.from_numpy(low), high, mask, first, runs, most, seen)


def _tiled() -> bool:
    return kernels is not None and kernels.HAS_TILES


def attend(
    heads: Tensor,
    turns: Tensor,
    norms: tuple[Norm, Norm] | None,
    cache: KVCache,
    layer: int,
    window: int | None,
    plan: StepPlan,
) -> Tensor:
    """heads [tokens, (heads + 2 kv_heads) head_dim]: queries, keys and values as projected (changed in place).

    Norms queries and keys if the model does, rotates them by `turns` [tokens, 1, head_dim / 2], stores keys and values;
    returns what the queries attend to, [tokens, heads * head_dim].
    """
    count, kv, dims = heads.shape[0], cache.kv_heads, cache.head_dim
    rows = plan.rows[window]
    split = heads.view(count, -1, dims)
    queries = split[:, : split.shape[1] - 2 * kv]
    if kernels is not None:
        _store_in_place(heads, turns, norms, cache, layer, plan)
    else:
        _store(split, turns, norms, cache, layer, plan)
    out = torch.empty(count, queries.shape[1] * dims)
    for chunk in plan.chunks[window]:
        if chunk.index is None:
            _chunk_in_place(heads, cache, layer, window, chunk, out)
        else:
            part = queries[chunk.begin : chunk.end]
            out[chunk.begin : chunk.end] = _chunk(part, cache, layer, chunk).flatten(1)
    if rows is None:
        return out
    if rows.mask is None:
        _rows_in_place(heads, cache, layer, rows, out)
    else:
        some = queries.index_select(0, rows.index)
        out.index_copy_(0, rows.index, _rows_gathered(some, cache, layer, rows).flatten(1))
    return out


def _store(
    split: Tensor, turns: Tensor, norms: tuple[Norm, Norm] | None, cache: KVCache, layer: int, plan: StepPlan
) -> None:
    kv, dims = cache.kv_heads, cache.head_dim
    queries, keys, values = split.split((split.shape[1] - 2 * kv, kv, kv), dim=1)
    if norms is not None:
        for part, norm in zip((queries, keys), norms, strict=True):
            part.copy_(F.rms_norm(part, (dims,), norm.weight, norm.eps))
    rotate_(split[:, :-kv], turns)
    cache.write(layer, plan.rows_written, keys, values)


def _store_in_place(
    heads: Tensor, turns: Tensor, norms: tuple[Norm, Norm] | None, cache: KVCache, layer: int, plan: StepPlan
) -> None:
    kv, dims = cache.kv_heads, cache.head_dim
    weights, eps = norm_addresses(norms), 0.0 if norms is None else norms[0].eps
    kernels.rotate_and_store(
        heads.data_ptr(), heads.shape[0], heads.shape[1] // dims - 2 * kv, kv, dims, *weights, eps, turns.data_ptr(),
        plan.rows_written.data_ptr(), *cache.addresses[layer], cache.element, kernels.num_threads(),
    )  # fmt: skip


def norm_addresses(norms: tuple[Norm, Norm] | None) -> tuple[int, int]:
    return (0, 0) if norms is None else (norms[0].weight.data_ptr(), norms[1].weight.data_ptr())


def _chunk_in_place(
    heads: Tensor, cache: KVCache, layer: int, window: int | None, chunk: Chunk, out: Tensor
) -> None:
    stride, kv, dims = heads.stride(0) * 4, cache.kv_heads, cache.head_dim
    kernels.attend_chunk(
        heads.data_ptr() + chunk.begin * stride, stride, chunk.end - chunk.begin, chunk.start, chunk.table.data_ptr(),
        *cache.addresses[layer], out.shape[1] // dims // kv, kv, cache.block_size, dims, cache.element, window or 0,
        dims**-0.5, out.data_ptr() + chunk.begin * out.stride(0) * 4, out.stride(0) * 4, kernels.num_threads(),
    )  # fmt: skip


def _rows_in_place(heads: Tensor, cache: KVCache, layer: int, rows: Rows, out: Tensor) -> None:
    kv, dims = cache.kv_heads, cache.head_dim
    kernels.attend_rows(
        heads.data_ptr(), heads.stride(0) * 4, *cache.addresses[layer], rows.index.data_ptr(), rows.table.data_ptr(),
        rows.table.shape[1], rows.low.data_ptr(), rows.high.data_ptr(), rows.first.data_ptr(), rows.runs, rows.most,
        rows.longest, dims**-0.5, out.shape[1] // dims // kv, kv, cache.block_size, dims, cache.element,
        kernels.num_threads(), out.data_ptr(),
    )  # fmt: skip


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
    their log-sum-exps, as FlashAttention joins its blocks.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before, before_lse = flash(queries, keys[:, :, :start], values[:, :, :start], 0.0, False)
    own, own_lse = flash(queries, keys[:, :, start:], values[:, :, start:], 0.0, True)
    return own.lerp_(before, torch.sigmoid(before_lse - own_lse)[..., None])


def _rows_gathered(queries: Tensor, cache: KVCache, layer: int, rows: Rows) -> Tensor:
    """Queries [rows, heads, head_dim], one token each: the heads of a group are the rows of one small product."""
    count, heads, head_dim = queries.shape
    kv_heads = cache.kv_heads
    index = block_rows(rows.table, kv_heads).flatten()
    keys, values = (part.view(count, kv_heads, -1, head_dim) for part in cache.gather(layer, index))
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, head_dim)
    mask = rows.mask.expand(-1, kv_heads, heads // kv_heads, -1)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(queries.shape)


def working_bytes(config: ModelConfig, max_batch_tokens: int, context: int) -> int:
    """The most that `attend` holds at once: the threads' blocks; or gathered keys and values, parts and masks."""
    chunk = min(max_batch_tokens, context)
    if _tiled():
        return 4 * kernels.num_threads() * kernels.block_floats(config.heads // config.kv_heads, config.head_dim)
    gathered = 3 * config.kv_heads * config.head_dim * context  # and in half precision, where they are kept so
    parts = 3 * chunk * config.heads * config.head_dim
    windows = [window for window in set(config.windows) if window is not None]
    masks = sum(chunk * min(context, window + chunk) for window in windows)
    return 4 * (gathered + parts) + 9 * masks  # a mask is made from an int32 and a bool of its size


def warm_up(config: ModelConfig, block_size: int) -> None:
    """Runs a chunk, a chunk at a context, and rows once over a pool of one layer."""
    small = KVCache(config, 2, block_size)
    heads = torch.zeros(2, (config.heads + 2 * config.kv_heads) * config.head_dim)
    turns = torch.zeros(2, 1, config.head_dim // 2, dtype=torch.complex64)
    for start, length in ((0, 2), (2, 2), (0, 1)):
        plan = plan_step([SliceSpan(start, length, [0, 1] * 4)], config, block_size)
        attend(heads[:length], turns[:length], None, small, 0, config.windows[0], plan)
