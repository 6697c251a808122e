"""Attention on a GPU, with `attention`'s plan and calls. Untested on one: its torch operations are tested on the host.

    layer i:  pool[i, 0] keys, pool[i, 1] values  [num_blocks + 1, block_size, kv_heads, head_dim]

That is how torch's variable-length FlashAttention (Dao, 2023) reads keys and values in pages by a block table. Where
it does not, pages are gathered for `scaled_dot_product_attention`. The block behind all others belongs to nobody: rows
that fill up a graph's batch write there.

The device "cpu:0" is the host, computing as a GPU would.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.engine.attention import SliceSpan
from paceline.engine.config import ModelConfig
from paceline.engine.linear import Norm

varlen_attn: Callable[..., Tensor] | None = None  # torch's; `flash` imports it, which takes 67 MB

BLOCK = 16  # tokens, where attention does not ask for more
PAGES = (BLOCK, 256)  # sizes that FlashAttention's releases read: 2 only multiples of 256, 3 any
GATHERED = 2**16  # tokens of keys and values that are gathered at a time
MARGIN = 0.05  # of what attention gives in half precision


class Flash(NamedTuple):
    """How torch's FlashAttention reads pages here."""

    block_size: int
    counts_keys: bool  # it wants to know where keys begin though a block table says so: version 2 does, 3 refuses that


class PagedCache:
    """All layers' keys and values on a device."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, device: str, dtype: torch.dtype = torch.float32
    ):
        shape = (config.layers, 2, num_blocks + 1, block_size, config.kv_heads, config.head_dim)
        self._use(torch.zeros(shape, dtype=dtype, device=device))

    def _use(self, pool: Tensor) -> None:
        self.pool = pool
        self.num_blocks, self.block_size, self.kv_heads, self.head_dim = pool.shape[2] - 1, *pool.shape[3:]
        self.token_bytes = pool[:, :, 0, 0].nbytes

    def first(self, layers: int) -> "PagedCache":
        """The same memory, seen by a model that ends after these layers."""
        some = object.__new__(PagedCache)
        some._use(self.pool[:layers])
        return some


class Gathered(NamedTuple):
    """Slices of one length whose keys and values are gathered together."""

    rows: Tensor  # [slices * length] of the step's
    table: Tensor  # [slices, blocks]
    masks: dict[int | None, Tensor | None]  # by window, [slices, 1, length, tokens]; None: causal, from token 0 on


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """One step's metadata. Slices are runs of rows; of each `used` tokens are there once it has been written."""

    positions: Tensor  # [tokens]
    end: int  # all of them are below
    slots: Tensor  # [tokens], rows of a layer's pages
    starts: Tensor  # [slices + 1] int32, among the step's rows
    used: Tensor  # [slices] int32
    keys_begin: Tensor | None  # [slices + 1] int32, sums of `used`, where `Flash.counts_keys`
    tables: Tensor  # [slices, most blocks] int32, padded with block 0
    longest: int  # rows of a slice
    gathered: list[Gathered] | None  # None: FlashAttention reads pages

    @property
    def decodes(self) -> bool:
        """Whether each slice is one token."""
        return self.longest == 1


def plan_step(
    spans: list[SliceSpan], config: ModelConfig, block_size: int, device: str, dtype: torch.dtype
) -> PagedPlan:
    """Prepares a step of these slices."""
    folds = config.heads != config.kv_heads and dtype == torch.float32
    return _plan(spans, set(config.windows), block_size, device, flash(device, dtype, config.head_dim), folds)


def _plan(
    spans: list[SliceSpan], windows: set[int | None], block_size: int, device: str, reads: Flash | None, folds: bool
) -> PagedPlan:
    """`folds`: no slice is left without a mask, since torch would copy keys for the query heads that share them."""
    lengths = np.array([span.length for span in spans])
    ends = np.array([span.start + span.length for span in spans])
    counts = -(-ends // block_size)
    table = np.zeros((len(spans), counts.max()), np.int64)
    for row, span, count in zip(table, spans, counts, strict=True):
        row[:count] = span.blocks[:count]
    owner = np.repeat(np.arange(len(spans)), lengths)
    starts = np.concatenate(([0], lengths.cumsum()))
    positions = np.arange(len(owner)) - starts[owner] + (ends - lengths)[owner]
    slots = table[owner, positions // block_size] * block_size + positions % block_size
    keys_begin = np.concatenate(([0], ends.cumsum())) if reads and reads.counts_keys else ends[:0]
    # Two copies to the device, not seven.
    sizes = [len(starts), len(ends), len(keys_begin), table.size]
    ints = torch.from_numpy(np.concatenate((starts, ends, keys_begin, table.ravel())).astype(np.int32)).to(device)
    longs = torch.from_numpy(np.stack((positions, slots))).to(device)
    begin, used, keys, blocks = ints.split(sizes)
    plan = PagedPlan(
        positions=longs[0],
        end=int(ends.max()),
        slots=longs[1],
        starts=begin,
        used=used,
        keys_begin=keys if len(keys) else None,
        tables=blocks.view(table.shape),
        longest=int(lengths.max()),
        gathered=None if reads else [],
    )
    if plan.gathered is not None:
        for slices in _alike(lengths, ends):
            whole = len(slices) == 1 and lengths[slices[0]] == ends[slices[0]] and not folds
            tokens = int(counts[slices[0]]) * block_size
            plan.gathered.append(_gather(plan, slices, starts, tokens, block_size, whole, windows))
    return plan


def _alike(lengths: np.ndarray, ends: np.ndarray) -> Iterator[list[int]]:
    """Slices of the same length, the longest contexts first, as many together as GATHERED allows."""
    groups = defaultdict(list)
    for index in np.argsort(-ends, kind="stable").tolist():
        groups[int(lengths[index])].append(index)
    for group in groups.values():
        while group:
            count = max(1, GATHERED // int(ends[group[0]]))
            yield group[:count]
            group = group[count:]


def _gather(
    plan: PagedPlan, slices: list[int], starts: np.ndarray, tokens: int, block_size: int, whole: bool,
    windows: set[int | None],
) -> Gathered:  # fmt: skip
    """`tokens`: of each slice's keys; `whole`: one slice that is all there is of its sequence."""
    device = plan.positions.device
    rows = np.concatenate([np.arange(starts[one], starts[one + 1]) for one in slices])
    index = torch.from_numpy(rows).to(device)
    seen = plan.positions[index].view(len(slices), 1, -1, 1)
    token = torch.arange(tokens, device=device)
    masks: dict[int | None, Tensor | None] = {}
    for window in windows:
        visible = token <= seen
        if window is not None:
            visible &= token > seen - window
        masks[window] = None if whole and window is None else visible
    return Gathered(index, plan.tables[slices, : tokens // block_size], masks)


def block_size(device: str, heads: list[tuple[torch.dtype, int]]) -> int:
    """Tokens of a block that models with such keys and values, and heads of such sizes, can share there."""
    return max(reads.block_size if (reads := flash(device, *one)) else BLOCK for one in heads)


def working_bytes(config: ModelConfig, max_batch_tokens: int, context: int) -> int:
    """The most that gathered attention holds at once: keys and values, masks for each kind of window, and one of those
    for all query heads that share keys, as numbers too."""
    gathered = 2 * 4 * max(GATHERED, context) * config.kv_heads * config.head_dim
    masks = len(set(config.windows)) + 5 * config.heads // config.kv_heads
    return gathered + masks * max_batch_tokens * context


def warm_up(config: ModelConfig, block_size: int, device: str, dtype: torch.dtype) -> None:
    """`attention.warm_up` on a device. cuDNN, which plans anew for every shape of attention, is left out."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    small = PagedCache(config, 2, block_size, device, dtype)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    turns = torch.zeros(2, 1, config.head_dim // 2, dtype=torch.complex64, device=device)
    for start, length in ((0, 2), (2, 2), (0, 1)):
        plan = plan_step([SliceSpan(start, length, [0, 1])], config, block_size, device, dtype)
        heads = torch.zeros(length, width, device=device, dtype=dtype)
        attend(heads, turns[:length], None, small, 0, config.windows[0], plan)


def attend(
    heads: Tensor,
    turns: Tensor,
    norms: tuple[Norm, Norm] | None,
    cache: PagedCache,
    layer: int,
    window: int | None,
    plan: PagedPlan,
) -> Tensor:
    """`attention.attend` on a device: heads [tokens, (heads + 2 kv_heads) head_dim] to [tokens, heads * head_dim]."""
    kv, dims = cache.kv_heads, cache.head_dim
    split = heads.view(heads.shape[0], -1, dims)
    queries, keys, values = split.split((split.shape[1] - 2 * kv, kv, kv), dim=1)
    if norms is not None:
        queries, keys = (F.rms_norm(x, (dims,), n.weight, n.eps) for x, n in zip((queries, keys), norms, strict=True))
    queries, keys = rotated(queries, turns), rotated(keys, turns)
    pages = cache.pool[layer, 0], cache.pool[layer, 1]
    for page, new in zip(pages, (keys, values), strict=True):
        page.view(-1, kv, dims).index_copy_(0, plan.slots, new)
    if plan.gathered is None:
        return _flash(queries, pages, window, plan).flatten(1)
    return _attend_gathered(queries, pages, window, plan.gathered).flatten(1)


def rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """Heads [tokens, n, head_dim] with adjacent pairs, times turns [tokens, 1, head_dim / 2], computed in float32."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(heads.dtype)


def _flash(queries: Tensor, pages: tuple[Tensor, Tensor], window: int | None, plan: PagedPlan) -> Tensor:
    """One split of the keys: with more, version 2 writes wrong rows where queries are ragged
    (https://github.com/pytorch/pytorch/issues/194167), and bits would depend on what else is in the batch. A single
    query sees all keys, and only where it is told so do query heads that share them pass over them together."""
    assert varlen_attn is not None
    right = -1 if plan.decodes and window is None else 0
    return varlen_attn(
        queries, *pages, plan.starts, plan.keys_begin, plan.longest, plan.tables.shape[1] * pages[0].shape[1],
        window_size=(-1 if window is None else window - 1, right), enable_gqa=queries.shape[1] != pages[0].shape[2],
        seqused_k=plan.used, block_table=plan.tables, num_splits=1,
    )  # fmt: skip


def _attend_gathered(
    queries: Tensor, pages: tuple[Tensor, Tensor], window: int | None, parts: list[Gathered]
) -> Tensor:
    out = torch.empty_like(queries)
    for some in parts:
        out.index_copy_(0, some.rows, _attend_part(queries, pages, window, some))
    return out


def _attend_part(queries: Tensor, pages: tuple[Tensor, Tensor], window: int | None, some: Gathered) -> Tensor:
    """With a mask the query heads that share keys are rows of one product: torch would copy the keys for each."""
    mask, count, heads, kv = some.masks[window], len(some.table), queries.shape[1], pages[0].shape[2]
    asked = queries.index_select(0, some.rows).unflatten(0, (count, -1)).transpose(1, 2)  # [slices, heads, length, dim]
    keys, values = (page[some.table].flatten(1, 2).transpose(1, 2) for page in pages)
    length = asked.shape[2]
    if mask is None:
        keys, values = keys[:, :, :length], values[:, :, :length]
        out = F.scaled_dot_product_attention(asked, keys, values, is_causal=True, enable_gqa=heads != kv)
    else:
        asked = asked.reshape(count, kv, -1, asked.shape[3])
        out = F.scaled_dot_product_attention(asked, keys, values, mask.repeat(1, 1, heads // kv, 1))
        out = out.view(count, heads, length, -1)
    return out.transpose(1, 2).flatten(0, 1)


@cache
def flash(device: str, dtype: torch.dtype, head_dim: int) -> Flash | None:
    """How torch's FlashAttention reads pages of keys and values on this device, found by trying; None: it does not, or
    what it gives is wrong."""
    global varlen_attn
    if torch.device(device).type != "cuda" or dtype == torch.float32:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    for size in PAGES:
        for counts in (True, False):
            try:
                if _is_right(Flash(size, counts), device, dtype, head_dim):
                    return Flash(size, counts)
            except (RuntimeError, TypeError, ValueError):  # as its releases say that they do not
                continue
    return None


def _is_right(how: Flash, device: str, dtype: torch.dtype, head_dim: int) -> bool:
    """On a chunk at a context, a prompt and two decodes together, with and without a window, and on decodes alone: as
    gathered attention in float32."""
    noise = torch.Generator(device).manual_seed(1)
    pool = torch.randn(2, 6, how.block_size, 2, head_dim, device=device, generator=noise)
    decodes = [SliceSpan(5, 1, [3]), SliceSpan(how.block_size + 1, 1, [4, 0])]
    mixed = [SliceSpan(how.block_size - 3, 7, [5, 2]), SliceSpan(0, 9, [1]), *decodes]
    for spans, window in ((mixed, None), (mixed, 6), (decodes, None)):
        queries = torch.randn(sum(span.length for span in spans), 4, head_dim, device=device, generator=noise)
        plan, plain = (_plan(spans, {window}, how.block_size, device, reads, True) for reads in (how, None))
        got = _flash(queries.to(dtype), (pool[0].to(dtype), pool[1].to(dtype)), window, plan)
        want = _attend_gathered(queries, (pool[0], pool[1]), window, plain.gathered or [])
        if not torch.allclose(got.float(), want, atol=MARGIN, rtol=MARGIN):
            return False
    return True
