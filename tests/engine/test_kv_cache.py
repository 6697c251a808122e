"""The paged pool, its index arithmetic, attention's masks, and how the pool is sized."""

import math

import numpy as np
import pytest
import torch

from paceline.engine import attention, kv_cache
from paceline.engine.attention import SliceSpan, attend, plan_step
from paceline.engine.config import ModelConfig, ModelError, RopeConfig
from paceline.engine.host import resident_bytes
from paceline.engine.kv_cache import KVCache, block_rows, pool_blocks
from paceline.engine.linear import Norm


def config(window: int | None = None, heads: int = 6, kv_heads: int = 2, dims: int = 8) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=50, hidden=48, intermediate=64, layers=2, heads=heads,
        kv_heads=kv_heads, head_dim=dims, norm_eps=1e-6, max_context=512, tied=True, qkv_bias=False, out_bias=False,
        mlp_bias=False, qk_norm=False, windows=(window, window), rope=RopeConfig(), eos_ids=(2,),
    )  # fmt: skip


@pytest.mark.parametrize("dims", [2, 6, 8])
def test_what_is_written_is_gathered_in_token_order(dims: int) -> None:
    cache, generator = KVCache(config(dims=dims), 10, 4), torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 11, 2, dims, generator=generator)
    table = torch.tensor([7, 2, 5])
    cache.write(1, written(11, [7, 2, 5]), keys, values)
    got = cache.gather(1, block_rows(table, 2).flatten())
    for ours, theirs in zip(got, (keys, values), strict=True):
        assert torch.equal(ours[:, :11], theirs.transpose(0, 1))
        assert not ours[:, 11:].any()  # never written: zeros
    assert not cache.gather(0, block_rows(table, 2).flatten())[0].any()


def plain_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None):
    """Straight from the definition. All [tokens, heads, dim]."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (one.repeat_interleave(group, 1) for one in (keys, values))
    own, others = start + torch.arange(len(queries))[:, None], torch.arange(len(keys))
    hidden = (others > own) | (others <= own - (window or len(keys)))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(queries.shape[2])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def written(count: int, table: list[int], kv_heads: int = 2, size: int = 4) -> torch.Tensor:
    """Rows of the first `count` tokens of a sequence with this table."""
    positions = np.arange(count)
    heads = np.array(table)[positions // size][:, None] * kv_heads + np.arange(kv_heads)
    return torch.from_numpy((heads * size + (positions % size)[:, None]).ravel())


def unturned(tokens: int, dims: int = 8) -> torch.Tensor:
    return torch.ones(tokens, 1, dims // 2, dtype=torch.complex64)


def mixed_step(
    model: ModelConfig, parts: list[tuple[int, int]], dtype: torch.dtype, blocks: int = 64, size: int = 4,
    multiplied: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `attend` gives for slices (start, length) of random sequences, and what it should; `multiplied`: what keys,
    values and queries are rounded to."""
    cache, generator = KVCache(model, blocks, size, dtype=dtype), torch.Generator().manual_seed(2)
    free = torch.randperm(blocks, generator=generator).tolist()
    spans, heads, expected = [], [], []
    for start, length in parts:
        table = [free.pop() for _ in range(-(-(start + length) // size))]
        q = torch.randn(length, model.heads, model.head_dim, generator=generator)
        k, v = torch.randn(2, start + length, model.kv_heads, model.head_dim, generator=generator)
        if start:
            cache.write(0, written(start, table, model.kv_heads, size), k[:start], v[:start])
        spans.append(SliceSpan(start, length, table))
        heads.append(torch.cat([q, k[start:], v[start:]], dim=1).flatten(1))
        scale = math.sqrt(model.head_dim)
        q = (q / scale).to(multiplied).float() * scale
        k, v = (one.to(dtype).to(multiplied).float() for one in (k, v))
        expected.append(plain_attention(q, k, v, start, model.windows[0]))
    plan, whole = plan_step(spans, model, size), torch.cat(heads)
    got = attend(whole, unturned(whole.shape[0], model.head_dim), None, cache, 0, model.windows[0], plan)
    return got, torch.cat(expected).flatten(1)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@DTYPES
@pytest.mark.parametrize("way", ["in-place", "rows-in-place", "gathered"])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 1000])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (7, 1)])
def test_attention_of_a_mixed_step(
    heads: tuple[int, int], window: int | None, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "gathered":
        monkeypatch.setattr(attention, "kernels", None)
    elif way == "rows-in-place" and attention.kernels:  # as on a processor without AVX-512
        monkeypatch.setattr(attention.kernels, "HAS_TILES", False)
    parts = [(0, 20), (13, 30), (40, 1), (0, 1), (25, 6), (31, 1), (3, 9)]
    got, expected = mixed_step(config(window, *heads), parts, dtype)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dims", [24, 64, 80])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (16, 8), (8, 8), (3, 1), (4, 1), (7, 1), (9, 1)])
def test_attention_of_single_tokens(
    heads: tuple[int, int], dims: int, window: int | None, dtype: torch.dtype
) -> None:
    """In blocks of the size that is used, of which the last one has any number of tokens."""
    parts = [(at, 1) for at in (0, 3, 7, 15, 16, 22, 31, 46, 61)]
    got, expected = mixed_step(config(window, *heads, dims), parts, dtype, size=16)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("way", ["in-place", "rows-in-place"])
@pytest.mark.parametrize("size", [3, 6, 16])
@pytest.mark.parametrize("dims", [2, 6, 10, 22])
def test_attention_of_heads_and_blocks_of_odd_sizes(
    dims: int, size: int, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that end within a vector, or within four numbers, and blocks whose size is no power of two."""
    if way == "rows-in-place" and attention.kernels:
        monkeypatch.setattr(attention.kernels, "HAS_TILES", False)
    parts = [(0, 20), (13, 150), (40, 1), (0, 1), (25, 6), (31, 1), (3, 9), (158, 1)]
    got, expected = mixed_step(config(None, 7, 1, dims), parts, dtype, blocks=200, size=size)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("window", [None, 100, 130])
@pytest.mark.parametrize("dims", [8, 64, 80])
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)])
def test_attention_of_long_chunks(heads: tuple[int, int], dims: int, window: int | None, dtype: torch.dtype) -> None:
    """Where keys and values are multiplied in pairs, logarithms of weights are rounded to a 128th, they to 8 bits."""
    parts = [(0, 129), (300, 150), (127, 33), (256, 128), (0, 2), (1, 3), (130, 5), (140, 16), (150, 17)]
    pairs = dtype == torch.float16 and dims % 16 == 0 and attention.kernels and attention.kernels.HAS_BF16
    multiplied, error = (torch.bfloat16, (1 + math.log(2)) * 2**-8) if pairs else (torch.float32, 2e-5)
    got, expected = mixed_step(config(window, *heads, dims), parts, dtype, 400, multiplied=multiplied)
    torch.testing.assert_close(got, expected, rtol=error, atol=error)
    if pairs:  # errors of many weights cancel out
        assert (got - expected).square().mean().sqrt() < 2**-8 / 5


@DTYPES
@pytest.mark.skipif(attention.kernels is None or not attention.kernels.HAS_TILES, reason="torch's attention is used")
def test_the_bits_of_a_prompt_do_not_depend_on_its_chunks(dtype: torch.dtype) -> None:
    model, generator = config(None, 6, 2, 64), torch.Generator().manual_seed(3)
    heads, blocks = torch.randn(300, 10 * 64, generator=generator), list(range(75))

    def run(*cuts: int) -> torch.Tensor:
        cache, parts = KVCache(model, 75, 4, dtype=dtype), []
        for begin, end in zip((0, *cuts), (*cuts, 300), strict=True):
            plan = plan_step([SliceSpan(begin, end - begin, blocks)], model, 4)
            turns = unturned(end - begin, 64)
            parts.append(attend(heads[begin:end].clone(), turns, None, cache, 0, None, plan))
        return torch.cat(parts)

    whole = run()
    for cuts in ((9,), (128, 256), (100, 150, 290), (2, 5, 13, 21, 200, 202, 298)):
        assert torch.equal(run(*cuts), whole)


@DTYPES
@pytest.mark.skipif(attention.kernels is None, reason="keys are gathered, and sums are torch's")
@pytest.mark.parametrize("window", [None, 3, 30])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (7, 1)])
@pytest.mark.parametrize("most", [None, 4])
def test_the_bits_of_a_verification_are_those_of_single_tokens(
    most: int | None, heads: tuple[int, int], window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a sequence pass over its keys together, where scores are many so many at a time; others have the same
    prefix, or end where it begins."""
    if most:
        monkeypatch.setattr(attention.kernels, "most_of_run", lambda group, longest: most)
    model, generator = config(window, *heads), torch.Generator().manual_seed(4)
    prefix, past = list(range(6)), torch.randn(2, 24, model.kv_heads, model.head_dim, generator=generator)
    tables = [[*prefix, 6, 7, 8], [*prefix, 9, 10], [*prefix, 11], [*prefix, 12, 13, 14]]
    spans = [SliceSpan(24, length, table, True) for length, table in zip((11, 6, 1, 9), tables, strict=True)]
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    queries = torch.randn(sum(span.length for span in spans), width, generator=generator)

    def attended(cache: KVCache, rows: torch.Tensor, some: list[SliceSpan]) -> torch.Tensor:
        turns, plan = unturned(len(rows), model.head_dim), plan_step(some, model, 4)
        return attend(rows.clone(), turns, None, cache, 0, model.windows[0], plan)

    caches = [KVCache(model, 16, 4, dtype=dtype) for _ in range(2)]
    for cache in caches:
        cache.write(0, written(24, prefix, model.kv_heads), *past)
    singles, row = [], 0
    for span in spans:
        for at in range(span.length):
            singles.append(attended(caches[0], queries[row : row + 1], [SliceSpan(24 + at, 1, span.blocks)]))
            row += 1
    assert torch.equal(attended(caches[1], queries, spans), torch.cat(singles))
    monkeypatch.setattr(attention.kernels, "num_threads", lambda: 2)
    rows = plan_step(spans, model, 4).rows[model.windows[0]]
    assert torch.diff(rows.first[: rows.runs + 1]).tolist() == ([4, 4, 3, 3, 3, 3, 3, 3, 1] if most else [11, 9, 6, 1])
    monkeypatch.setattr(attention.kernels, "num_threads", lambda: 99)  # all of whom should have something to do
    rows = plan_step(spans, model, 4).rows[model.windows[0]]
    assert rows.most == -(-27 * model.kv_heads // 99) < 4


@DTYPES
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dims", [6, 8, 24, 64])  # turned one by one, by 16, and both
@pytest.mark.parametrize("normed", [False, True])
def test_both_ways_to_norm_rotate_and_store_agree(
    normed: bool, dims: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, model = torch.Generator().manual_seed(4), config(None, 6, 2, dims)
    heads, ones = torch.randn(rows, 10 * dims, generator=generator), torch.ones(rows, 1, dims // 2)
    turns = torch.polar(ones, torch.randn(rows, 1, dims // 2, generator=generator))
    norms = tuple(Norm(torch.rand(dims, generator=generator) + 0.5, 1e-6) for _ in range(2)) if normed else None
    results = []
    for module in (attention.kernels, None):
        monkeypatch.setattr(attention, "kernels", module)
        cache, own = KVCache(model, 30, 4, dtype=dtype), heads.clone()
        attend(own, turns, norms, cache, 1, None, plan_step([SliceSpan(3, rows, list(range(20, 9, -1)))], model, 4))
        results.append((own, cache.pool))
    assert results[0][1].any() and not torch.equal(results[0][0], heads)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=max(1e-5, torch.finfo(ours.dtype).eps), atol=1e-5)


def last_token(keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Row `heads` of a token with this query, key and value [1, heads, dims]."""
    return torch.cat([query, keys[-1:], values[-1:]], dim=1).flatten(1)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    model, cache = config(), KVCache(config(), 4, 4)
    keys = torch.zeros(9, 2, 8)
    keys[:, :, 0] = torch.linspace(-400, 400, 9)[:, None]
    values = torch.arange(9.0)[:, None, None].expand(9, 2, 8)
    cache.write(0, written(9, [0, 1, 2]), keys, values)
    queries = torch.ones(1, 6, 8)
    plan = plan_step([SliceSpan(8, 1, [0, 1, 2])], model, 4)
    got = attend(last_token(keys, values, queries), unturned(1), None, cache, 0, None, plan)
    torch.testing.assert_close(got, plain_attention(queries, keys, values, 8, None).flatten(1))


def test_a_nan_stays_with_its_sequence() -> None:
    model, cache = config(), KVCache(config(), 4, 4)
    heads = []
    for block, value in ((0, float("nan")), (1, 1.0)):
        new = torch.full((3, 2, 8), value)
        cache.write(0, written(3, [block]), new, new)
        heads.append(last_token(new, new, torch.ones(1, 6, 8)))
    plan = plan_step([SliceSpan(2, 1, [0]), SliceSpan(2, 1, [1])], model, 4)
    got = attend(torch.cat(heads), unturned(2), None, cache, 0, None, plan)
    assert got[0].isnan().all() and torch.equal(got[1], torch.ones(48))


@DTYPES
def test_a_nan_in_a_chunk_reaches_its_token_and_those_behind(dtype: torch.dtype) -> None:
    model, generator = config(None, 6, 2, 64), torch.Generator().manual_seed(5)
    heads = torch.randn(40, 10 * 64, generator=generator)
    heads[20] = float("nan")
    plan = plan_step([SliceSpan(0, 40, list(range(10)))], model, 4)
    got = attend(heads, unturned(40, 64), None, KVCache(model, 10, 4, dtype=dtype), 0, None, plan)
    assert got[20:].isnan().all()


@DTYPES
def test_a_chunk_attends_to_one_key_where_scores_are_enormous(dtype: torch.dtype) -> None:
    """Up to 1e7, and as far below nothing: peaks are whole numbers then, and weights are put together from integers."""
    model, generator = config(None, 2, 2, 64), torch.Generator().manual_seed(7)
    heads, chosen = torch.zeros(40, 6, 64), torch.arange(40) // 2
    heads[:, 4:] = torch.randn(40, 2, 64, generator=generator).bfloat16()
    heads[torch.arange(40), 2:4, torch.arange(40)] = 8.0  # a dimension for every key
    heads[:, :2] = -1e7
    heads[torch.arange(40), :2, chosen] = 1e7 * torch.rand(40, 1, generator=generator)
    plan, values = plan_step([SliceSpan(0, 40, list(range(10)))], model, 4), heads[chosen, 4:].flatten(1)
    got = attend(heads.flatten(1), unturned(40, 64), None, KVCache(model, 10, 4, dtype=dtype), 0, None, plan)
    torch.testing.assert_close(got, values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [None, 8])
def test_what_a_token_does_not_see_weighs_nothing(window: int | None) -> None:
    """Not even next to nothing: that would be denormal sums, which are 20 times slower."""
    model, generator = config(window, 6, 2, 64), torch.Generator().manual_seed(6)
    heads, plan = torch.randn(40, 10 * 64, generator=generator), plan_step([SliceSpan(0, 40, range(10))], model, 4)
    plain = attend(heads.clone(), unturned(40, 64), None, KVCache(model, 10, 4), 0, window, plan)
    heads[20, 8 * 64 :] = 1e38  # a value
    got = attend(heads, unturned(40, 64), None, KVCache(model, 10, 4), 0, window, plan)
    blind = [row for row in range(40) if row < 20 or (window and row >= 20 + window)]
    assert torch.equal(got[blind], plain[blind]) and (got[20] > 1e30).any()


def test_memory_of_blocks_comes_back_and_that_of_their_neighbours_stays() -> None:
    model = config(None, 6, 2, 64)
    assert kv_cache.can_lend(model, 16, "cpu") and not kv_cache.can_lend(config(), 4, "cpu"), "less than a page"
    cache = KVCache(model, 4096, 16, lends=True)
    block = cache.pool.numel() * 4 // 4096
    before = resident_bytes()
    cache.pool[:, :, ::2] = 1.0  # every other block: in pages of 2 MiB that would be all
    assert resident_bytes() - before == pytest.approx(2048 * block, rel=0.05)
    gone = [*range(0, 1000, 4), *range(1001, 4096)]
    cache.give_back(gone)
    kept = [n for n in range(0, 4096, 2) if n not in gone]
    assert resident_bytes() - before == pytest.approx(len(kept) * block, abs=0.05 * 2048 * block)
    assert not cache.pool[:, :, gone].any() and (cache.pool[:, :, kept] == 1.0).all()


def test_the_pool_takes_what_memory_leaves() -> None:
    token = config().kv_bytes_per_token()
    block = token * 4
    assert block == 2 * 2 * 2 * 8 * 4 * 4 == 2 * config().kv_bytes_per_token("float16") * 4
    assert pool_blocks(token, 4, used=1000, memory=1000 + 7 * block + 5, useful_tokens=10**6) == 7
    assert pool_blocks(token, 4, used=1000, memory=10**9, useful_tokens=9) == 3


def test_the_default_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    block = config().kv_bytes_per_token() * 4
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 1 << 50)
    most = pool_blocks(config().kv_bytes_per_token(), 4, used=0, memory=None, useful_tokens=10**12)
    assert most == kv_cache.DEFAULT_POOL // block
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 100 * block)
    used = resident_bytes() + 20 * block
    assert 60 <= pool_blocks(config().kv_bytes_per_token(), 4, used=used, memory=None, useful_tokens=10**12) <= 80


def test_too_little_memory_is_said_at_the_start() -> None:
    with pytest.raises(ModelError, match="not enough memory: 1 MiB are needed beside the KV cache and 0 MiB remain"):
        pool_blocks(config().kv_bytes_per_token(), 4, used=1 << 20, memory=1 << 20, useful_tokens=100)


def test_resident_bytes_sees_this_process() -> None:
    assert 10 << 20 < resident_bytes() < kv_cache.available_bytes() + resident_bytes()
