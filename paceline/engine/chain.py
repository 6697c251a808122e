"""Passes of a small decoder over single tokens, each behind the token that the one before drew, in one call.

A draft model's pass can take less time than asking for it: of 0.5 ms from one drafted token of the built-in pair to the
next all that it computes takes 0.02. So what a step drafts is one call of compiled code: embeddings, layers, head,
log-probabilities and draws with the noise of their places, as `drafters.TokenByToken` has them one by one.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from paceline.engine import chain_kernel, kernels
from paceline.engine.drafters import Link
from paceline.engine.kv_cache import KVCache
from paceline.engine.linear import TiledLinear
from paceline.engine.model import Decoder, HeldEmbedding

ALONE = 2 << 20  # products of a pass up to which one thread is faster than several that wait for each other
NO_CHUNKS = np.zeros((0, kernels.CHUNK_FIELDS), np.int64)
ALL = (1.0, 1.0, 0.0, 0)  # `SamplingState.numbers` that leave a distribution as it is


class Chain:
    """Of one model, over its cache."""

    def __init__(self, decoder: Decoder, cache: KVCache, progress: np.ndarray) -> None:
        self.decoder, self.cache, self.progress, config = decoder, cache, progress, decoder.config
        self.table, self.turns = decoder.embedding.table.numpy(), decoder.rotations.up_to(1)
        self.head = np.array([decoder.norm.weight.data_ptr(), *decoder.head.addresses, config.vocab_size], np.int64)
        self.layers, self.shape = decoder.lines(cache)
        queries, pad = config.heads * config.head_dim, kernels.LINE // 4
        self.windows = [window or 0 for window in sorted(set(config.windows), key=lambda window: window or 0)]
        self.products, self.widest = config.weight_bytes("int8"), max(config.hidden, config.intermediate, queries)
        # floats of a row: hidden state, turns, rows written, heads, what they attend to, between the linear layers
        self.widths = (
            config.hidden, config.head_dim, 2 * config.kv_heads, queries + 2 * config.kv_heads * config.head_dim,
            queries + pad, config.intermediate + pad,
        )  # fmt: skip
        self._grow(1)

    @staticmethod
    def of(decoder: Decoder, cache: KVCache, progress: np.ndarray) -> "Chain | None":
        """None: it has to be asked pass by pass."""
        held = isinstance(decoder.embedding, HeldEmbedding) and isinstance(decoder.head, TiledLinear)
        return Chain(decoder, cache, progress) if held and decoder.layers and decoder.addresses is not None else None

    def _grow(self, rows: int) -> None:
        """Room for so many sequences."""
        self.every, self.first = np.arange(rows), np.arange(rows + 1)
        self.seen = np.zeros((1 + len(self.windows), rows), np.int64)
        self.memory, self.whole = [torch.empty(rows, width) for width in self.widths], np.array([ALL] * rows)
        self.buffers = np.array([*(one.data_ptr() for one in self.memory), 0, self.progress.ctypes.data])
        self.plans = np.zeros((len(self.windows), kernels.PLAN_FIELDS), np.int64)
        self.plans[:, kernels.WINDOW], self.plans[:, kernels.ROW_INDEX] = self.windows, self.every.ctypes.data
        self.plans[:, kernels.ROW_HIGH] = self.seen.ctypes.data
        self.plans[:, kernels.RUN_FIRST], self.plans[:, kernels.RUN_MOST] = self.first.ctypes.data, 1
        self.plans[:, kernels.ROW_LOW] = [seen.ctypes.data for seen in self.seen[1:]]

    def draw(self, links: Seq[Link], keep: bool) -> list[tuple[list[int], Seq[Tensor]]]:
        """What is drawn for each, -1 where there was no distribution (nothing behind that counts), and if it is to
        `keep` them the log-probabilities [vocabulary] that each is drawn from."""
        order = sorted(range(len(links)), key=lambda i: -links[i].passes)
        some, rows = [links[i] for i in order], len(links)
        passes, end = [link.passes for link in some], max(link.start + link.passes for link in some)
        if rows > len(self.every):
            self._grow(rows)
        if end > len(self.turns):
            self.turns = self.decoder.rotations.up_to(end)
        fed = np.array([link.given + [0] * (passes[0] - len(link.given)) for link in some])
        tables = np.zeros((rows, -(-end // self.cache.block_size)), np.int64)
        for table, link in zip(tables, some, strict=True):
            held = link.blocks[: len(table)]
            table[: len(held)] = held
        logits = torch.empty(passes[0] if keep else 1, rows, self.decoder.config.vocab_size)
        threads = 1 if rows * self.products <= ALONE else kernels.num_threads()
        space, own_space = kernels.spaces(rows, self.widest, threads)
        self.buffers[kernels.SPACE] = kernels.workspace(space)
        drawn = np.empty_like(fed)
        chain_kernel.run(
            threads, self.decoder.config.norm_eps, self.layers, self.shape, self.plans, NO_CHUNKS, self.every,
            self.buffers, own_space, np.array([sum(most > k for most in passes) for k in range(passes[0])]),
            np.array([(link.start, len(link.given) - 1, link.place) for link in some]), fed, tables, self.table,
            self.turns, self.head, logits.numpy(), np.array([link.stream for link in some], np.uint64),
            np.array([link.numbers for link in some], np.float64), self.whole, drawn, self.seen,
        )  # fmt: skip
        found: list[tuple[list[int], Seq[Tensor]]] = [([], ())] * rows
        tokens, kept = drawn.tolist(), logits.flatten(0, 1).unbind() if keep else ()
        for row, (i, link) in enumerate(zip(order, some, strict=True)):
            first, last = len(link.given) - 1, link.passes
            found[i] = tokens[row][first:last], kept[first * rows + row : last * rows : rows]
        return found
