"""Attention on a GPU, with `attention`'s plan and calls.

    layer i:  pool[i, 0] keys, pool[i, 1] values  [num_blocks + 1, block_size, kv_heads, head_dim]

Keys and values are read in pages by our own kernels (`triton_kernels`); where there is no Triton by torch's
variable-length FlashAttention (Dao, 2023), where it takes a block table; else pages are gathered for
`scaled_dot_product_attention`. The block behind all others belongs to nobody: rows that fill up a graph's batch write
there.

The device "cpu:0" is the host, computing as a GPU would.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.engine import machine
from paceline.engine.attention import SliceSpan
from paceline.engine.config import ModelConfig
from paceline.engine.gpu_plan import GATHERED, PROGRAMS, Gathered, Heads, Layout, PagedPlan, Reads, lay_out
from paceline.engine.linear import Norm

varlen_attn: Callable[..., Tensor] | None = None  # torch's; `reads` imports it, which takes 67 MB

BLOCK = 16  # tokens, where attention does not ask for more
PAGES = (BLOCK, 256)  # sizes that FlashAttention's releases read: 2 only multiples of 256, 3 any
MARGIN = 0.05  # of what attention gives in half precision


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


def heads_of(config: ModelConfig, dtype: torch.dtype) -> Heads:
    return Heads(config.heads, config.kv_heads, config.head_dim, dtype, set(config.windows))


def plan_step(spans: list[SliceSpan], config: ModelConfig, block_size: int, device: str, dtype: torch.dtype) -> Layout:
    """Prepares a step of these slices."""
    return lay_out(spans, heads_of(config, dtype), block_size, reads(device, dtype, config.head_dim))


def block_size(device: str, heads: list[tuple[torch.dtype, int]]) -> int:
    """Tokens of a block that models with such keys and values, and heads of such sizes, can share there."""
    return max(by.block_size if (by := reads(device, *one)) else BLOCK for one in heads)


def working_bytes(config: ModelConfig, max_batch_tokens: int, context: int) -> int:
    """The most that gathered attention holds at once: keys and values, masks for each kind of window, and one of those
    for all query heads that share keys, as numbers too."""
    gathered = 2 * 4 * max(GATHERED, context) * config.kv_heads * config.head_dim
    masks = len(set(config.windows)) + 5 * config.heads // config.kv_heads
    return gathered + masks * max_batch_tokens * context


def warm_up(config: ModelConfig, block_size: int, device: str, dtype: torch.dtype) -> None:
    """`attention.warm_up` on a device. cuDNN, which plans anew for every shape of attention, is left out."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    small = PagedCache(config, 20, block_size, device, dtype)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    turns = torch.zeros(PROGRAMS, 1, config.head_dim // 2, dtype=torch.complex64, device=device)
    norm = Norm(torch.ones(config.head_dim, device=device, dtype=dtype), config.norm_eps)
    for window in heads_of(config, dtype).windows:
        for start, length, count in ((0, 20, 1), (2, 2, 1), (0, 1, 1), (0, 1, PROGRAMS)):
            spans = [SliceSpan(start, length, list(range(20)))] * count
            plan = plan_step(spans, config, block_size, device, dtype).on(device)
            heads = torch.zeros(length * count, width, device=device, dtype=dtype)
            attend(heads, turns[: length * count], (norm, norm) if config.qk_norm else None, small, 0, window, plan)


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
    pages = cache.pool[layer, 0], cache.pool[layer, 1]
    if plan.few or plan.many:
        kernels = machine.triton_kernels(str(heads.device))
        assert kernels is not None
        out = heads.new_empty(len(heads), heads.shape[1] - 2 * kv * dims)
        kernels.rotate_and_write(heads, turns, norms, *pages, plan.slots)
        kernels.attend(heads, *pages, out, window, plan.starts, plan.used, plan.tables, plan.few, plan.many)
        return out
    split = heads.view(heads.shape[0], -1, dims)
    queries, keys, values = split.split((split.shape[1] - 2 * kv, kv, kv), dim=1)
    if norms is not None:
        queries, keys = (F.rms_norm(x, (dims,), n.weight, n.eps) for x, n in zip((queries, keys), norms, strict=True))
    queries, keys = rotated(queries, turns), rotated(keys, turns)
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
    right = -1 if plan.longest == 1 and window is None else 0
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
        out = out.reshape(count, heads, length, -1)
    return out.transpose(1, 2).flatten(0, 1)


@cache
def reads(device: str, dtype: torch.dtype, head_dim: int) -> Reads | None:
    """What reads pages of keys and values on this device, found by trying; None: nothing does, or what it gives is
    wrong."""
    for by in _readers(device, dtype):
        try:
            if _is_right(by, device, dtype, head_dim):
                return by
        except Exception as error:  # each release has its own way to say that it does not
            if by.kernels:
                print(f"{device}: our kernels for heads of {head_dim} {dtype} do not run: {error}", file=sys.stderr)
    return None


def _readers(device: str, dtype: torch.dtype) -> Iterator[Reads]:
    global varlen_attn
    if (kernels := machine.triton_kernels(device)) is not None:
        yield Reads(BLOCK, kernels)
    if torch.device(device).type == "cuda" and dtype != torch.float32:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:  # torch before 2.10
            return
        for size in PAGES:
            yield from (Reads(size, None, counts) for counts in (True, False))


def _is_right(by: Reads, device: str, dtype: torch.dtype, head_dim: int) -> bool:
    """On a chunk at a context, a prompt and two decodes together, with and without a window, and on decodes alone: as
    gathered attention in float32."""
    noise = torch.Generator(device).manual_seed(1)
    size = by.block_size
    pool = torch.randn(2, 10, size, 2, head_dim, device=device, generator=noise)
    decodes = [SliceSpan(5, 1, [3]), SliceSpan(size + 1, 1, [4, 0])]
    mixed = [SliceSpan(size - 3, 7, [5, 2]), SliceSpan(size - 3, 25, [1, 6, 7, 8]), *decodes]
    for spans, window in ((mixed, None), (mixed, 6), (decodes, None)):
        heads = Heads(4, 2, head_dim, dtype, {window})
        queries = torch.randn(sum(span.length for span in spans), 4, head_dim, device=device, generator=noise)
        plan, plain = (lay_out(spans, heads, size, one).on(device) for one in (by, None))
        asked, pages = queries.to(dtype), (pool[0].to(dtype), pool[1].to(dtype))
        if by.kernels:
            got, where = torch.empty_like(asked), (plan.starts, plan.used, plan.tables, plan.few, plan.many)
            by.kernels.attend(asked.flatten(1), *pages, got.flatten(1), window, *where)
        else:
            got = _flash(asked, pages, window, plan)
        want = _attend_gathered(queries, (pool[0], pool[1]), window, plain.gathered or [])
        if not torch.allclose(got.float(), want, atol=MARGIN, rtol=MARGIN):
            return False
    return True
