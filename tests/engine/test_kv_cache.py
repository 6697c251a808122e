"""The paged pool, its index arithmetic, attention's masks, and how the pool is sized."""

import math

import pytest
import torch

from paceline.engine import attention, kv_cache
from paceline.engine.attention import SliceSpan, attend, plan_step
from paceline.engine.config import ModelConfig, ModelError, RopeConfig
from paceline.engine.kv_cache import KVCache, block_rows, pool_blocks, resident_bytes, token_rows


def config(window: int | None = None, heads: int = 6, kv_heads: int = 2) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=50, hidden=48, intermediate=64, layers=2, heads=heads,
        kv_heads=kv_heads, head_dim=8, norm_eps=1e-6, max_context=512, tied=True, qkv_bias=False, out_bias=False,
        mlp_bias=False, qk_norm=False, windows=(window, window), rope=RopeConfig(), eos_ids=(2,), bos_id=None,
    )  # fmt: skip


def test_what_is_written_is_gathered_in_token_order() -> None:
    cache, generator = KVCache(config(), 10, 4), torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 11, 2, 8, generator=generator)
    table = torch.tensor([7, 2, 5])
    cache.write(1, token_rows(torch.arange(11), table, 4, 2), keys, values)
    got = cache.gather(1, block_rows(table, 2).flatten())
    for ours, theirs in zip(got, (keys, values), strict=True):
        assert torch.equal(ours[:, :11], theirs.transpose(0, 1))
        assert not ours[:, 11:].any()  # never written: zeros
    assert not cache.gather(0, block_rows(table, 2).flatten())[0].any()


def plain_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None):
    """One head group at a time, straight from the definition. All [tokens, heads, dim]."""
    out, group = torch.empty_like(queries), queries.shape[1] // keys.shape[1]
    for i in range(queries.shape[0]):
        low = 0 if window is None else max(0, start + i + 1 - window)
        for head in range(queries.shape[1]):
            k, v = keys[low : start + i + 1, head // group], values[low : start + i + 1, head // group]
            out[i, head] = torch.softmax(k @ queries[i, head] / math.sqrt(8), 0) @ v
    return out


@pytest.mark.parametrize("gathered", [False, True], ids=["in-place", "gathered"])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 1000])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (7, 1)])
def test_attention_of_a_mixed_step(
    heads: tuple[int, int], window: int | None, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gathered:
        monkeypatch.setattr(attention, "cpu_attention", None)
    model = config(window, *heads)
    cache, generator = KVCache(model, 64, 4), torch.Generator().manual_seed(2)
    free = torch.randperm(64, generator=generator).tolist()
    parts = [(0, 20), (13, 30), (40, 1), (0, 1), (25, 6), (31, 1), (3, 9)]  # (start, length)
    spans, queries, expected = [], [], []
    for start, length in parts:
        blocks = [free.pop() for _ in range(-(-(start + length) // 4))]
        q = torch.randn(length, heads[0], 8, generator=generator)
        k, v = torch.randn(2, start + length, heads[1], 8, generator=generator)
        cache.write(0, token_rows(torch.arange(start + length), torch.tensor(blocks), 4, heads[1]), k, v)
        spans.append(SliceSpan(start, length, blocks))
        queries.append(q)
        expected.append(plain_attention(q, k, v, start, window))
    got = attend(torch.cat(queries), cache, 0, window, plan_step(spans, model, 4))
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    model, cache = config(), KVCache(config(), 4, 4)
    keys = torch.zeros(9, 2, 8)
    keys[:, :, 0] = torch.linspace(-400, 400, 9)[:, None]
    values = torch.arange(9.0)[:, None, None].expand(9, 2, 8)
    cache.write(0, token_rows(torch.arange(9), torch.tensor([0, 1, 2]), 4, 2), keys, values)
    queries = torch.ones(1, 6, 8)
    got = attend(queries, cache, 0, None, plan_step([SliceSpan(8, 1, [0, 1, 2])], model, 4))
    torch.testing.assert_close(got, plain_attention(queries, keys, values, 8, None))


def test_a_nan_stays_with_its_sequence() -> None:
    model, cache = config(), KVCache(config(), 4, 4)
    for block, value in ((0, float("nan")), (1, 1.0)):
        new = torch.full((3, 2, 8), value)
        cache.write(0, token_rows(torch.arange(3), torch.tensor([block]), 4, 2), new, new)
    plan = plan_step([SliceSpan(2, 1, [0]), SliceSpan(2, 1, [1])], model, 4)
    got = attend(torch.ones(2, 6, 8), cache, 0, None, plan)
    assert got[0].isnan().all() and torch.equal(got[1], torch.ones(6, 8))


def test_the_pool_takes_what_memory_leaves() -> None:
    block = config().kv_bytes_per_token * 4
    assert block == 2 * 2 * 2 * 8 * 4 * 4
    assert pool_blocks(config(), 4, used=1000, memory=1000 + 7 * block + 5, useful_tokens=10**6) == 7
    assert pool_blocks(config(), 4, used=1000, memory=10**9, useful_tokens=9) == 3


def test_the_default_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    block = config().kv_bytes_per_token * 4
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 1 << 50)
    assert pool_blocks(config(), 4, used=0, memory=None, useful_tokens=10**12) == kv_cache.DEFAULT_POOL // block
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 100 * block)
    used = resident_bytes() + 20 * block
    assert 60 <= pool_blocks(config(), 4, used=used, memory=None, useful_tokens=10**12) <= 80


def test_too_little_memory_is_said_at_the_start() -> None:
    with pytest.raises(ModelError, match="not enough memory: 1 MiB are needed beside the KV cache and 0 MiB remain"):
        pool_blocks(config(), 4, used=1 << 20, memory=1 << 20, useful_tokens=100)


def test_resident_bytes_sees_this_process() -> None:
    assert 10 << 20 < resident_bytes() < kv_cache.available_bytes() + resident_bytes()
