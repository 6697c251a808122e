"""CUDA graphs of steps: what a GPU is to do is recorded once for each number of rows, and then asked for in one call.
Without, a step of few rows waits for Python, which asks for every operation by itself.

Recorded operations read what they are to compute from the same memory each time, so a step is copied there, all at
once. A step between two sizes is filled up with rows of a block that belongs to nobody. Steps that only decode have
graphs of their own; those of other hybrid batches, which our own kernels allow, have room for as many decodes as there
can be, and some chunks.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from paceline.engine import machine
from paceline.engine.gpu import PagedCache
from paceline.engine.gpu_plan import Heads, Layout, PagedPlan, Reads, Tiles, parts_of

SIZES = (1, 2, 4, *range(8, 513, 8))
CHUNKS = 4  # of a hybrid batch

Pass = Callable[[Tensor, PagedPlan], Tensor]  # token ids [tokens] to hidden states [tokens, hidden]


class Graphs:
    """Of a model's pass over one token of each of up to `max_batch` sequences, and over up to `max_tokens` tokens."""

    def __init__(
        self, run: Pass, cache: PagedCache, max_batch: int, max_tokens: int, context: int, heads: Heads, by: Reads
    ):
        """`context`: the most tokens of a sequence. To be made under inference mode."""
        self.run, self.end, self.by, self.kv_heads, self.device = run, context, by, heads.kv, str(cache.pool.device)
        self.sizes = _up_to(max_batch)
        self.hybrid = _up_to(max_tokens) if by.kernels else []
        group = heads.queries // heads.kv
        self.tile = by.kernels.many_tile(group, heads.dtype).rows // group if by.kernels else 1  # tokens of a chunk's
        self.nobody = cache.num_blocks * cache.block_size  # the first row of the block behind all others
        self.slices, self.width = self.sizes[-1], -(-context // cache.block_size)
        most, rows, tiles = self.slices, max(self.sizes + self.hybrid), self._room(SIZES[-1])
        # The tables are last: of them only those of the step's slices are copied.
        sizes = {
            "tokens": rows, "positions": rows, "slots": rows, "starts": most + 2, "used": most + 1,
            "few slices": tiles[0], "few rows": tiles[0], "many slices": tiles[1], "many rows": tiles[1],
            "tables": (most + 1) * self.width,
        }  # fmt: skip
        self.host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=self.device.startswith("cuda"))
        bounds = list(zip(sizes, accumulate(sizes.values(), initial=0), accumulate(sizes.values()), strict=False))
        self.own = {name: self.host.numpy()[begin:end] for name, begin, end in bounds}
        self.own["slots"][:], self.own["used"][:] = self.nobody, 1
        self.ints = self.host.to(self.device)
        self.there = {name: self.ints[begin:end] for name, begin, end in bounds}
        self.before_tables = bounds[-1][1]
        self.copied: Callable[[], object] = lambda: None
        self.every = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self.first = torch.zeros(most, dtype=torch.int32, device=self.device)
        self.pool: tuple[int, int] | None = None  # of memory, that all graphs work in: only one runs at a time
        self.decodes = {size: self._record(partial(self._decodes, size)) for size in reversed(self.sizes)}
        self.chunks = {size: self._record(partial(self._hybrid, size)) for size in reversed(self.hybrid)}

    def _room(self, rows: int) -> tuple[int, int]:
        """Tiles of short slices and of others that a graph of a hybrid batch of so many rows has room for."""
        return min(rows, 2 * self.slices), rows // self.tile + CHUNKS

    def fit(self, layout: Layout) -> bool:
        rows, (slices, blocks) = len(layout.positions), layout.tables.shape
        if slices > self.slices or blocks > self.width:
            return False
        if layout.decodes:
            return True
        if not self.hybrid or rows > self.hybrid[-1]:
            return False
        room = self._room(_size(self.hybrid, rows))
        return len(layout.few[0]) <= room[0] and len(layout.many[0]) <= room[1]

    def __call__(self, tokens: Tensor, layout: Layout) -> Tensor:
        """As `run`, of ids on the host or on the device; what it yields holds until the next call."""
        self.copied()  # the last step's
        own, rows, (slices, blocks) = self.own, len(layout.positions), layout.tables.shape
        size = _size(self.sizes if layout.decodes else self.hybrid, rows)
        if tokens.device.type == "cpu":
            own["tokens"][:rows] = tokens.numpy()
        own["positions"][:rows] = layout.positions
        own["slots"][:rows] = layout.slots
        own["slots"][rows:size] = self.nobody
        own["used"][:slices] = layout.ends
        own["used"][slices:] = 1 if layout.decodes else 0
        own["tables"].reshape(-1, self.width)[:slices, :blocks] = layout.tables
        if not layout.decodes:
            own["starts"][: slices + 1] = layout.starts
            own["starts"][slices + 1 :] = rows
            for name, (at, first) in (("few", layout.few), ("many", layout.many)):
                own[f"{name} slices"][: len(at)] = at
                own[f"{name} slices"][len(at) :] = self.slices  # which has no tokens
                own[f"{name} rows"][: len(at)] = first
        end = self.before_tables + slices * self.width
        self.ints[:end].copy_(self.host[:end], non_blocking=True)
        self.copied = machine.mark(self.device)
        if tokens.device.type != "cpu":
            self.there["tokens"][:rows] = tokens
        return (self.decodes if layout.decodes else self.chunks)[size]()[:rows]

    def _decodes(self, size: int) -> Tensor:
        there, keys_begin, few = self.there, None, None
        used = there["used"][:size]
        if self.by.kernels:
            few = Tiles(self.every[:size], self.first[:size], parts_of(size, self.kv_heads))
        elif self.by.counts_keys:
            keys_begin = torch.zeros(size + 1, dtype=torch.int32, device=used.device)
            keys_begin[1:] = used.cumsum(0)
        plan = PagedPlan(
            there["positions"][:size], self.end, there["slots"][:size].long(), self.every[: size + 1], used, keys_begin,
            there["tables"].view(-1, self.width)[:size], 1, few,
        )  # fmt: skip
        return self.run(there["tokens"][:size], plan)

    def _hybrid(self, size: int) -> Tensor:
        there, (few, many) = self.there, self._room(size)
        plan = PagedPlan(
            there["positions"][:size], self.end, there["slots"][:size].long(), there["starts"], there["used"], None,
            there["tables"].view(-1, self.width), size,
            Tiles(there["few slices"][:few], there["few rows"], parts_of(few, self.kv_heads)),
            Tiles(there["many slices"][:many], there["many rows"], 1),
        )  # fmt: skip
        return self.run(there["tokens"][:size], plan)

    def _record(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        make()  # what libraries set up at first must not be recorded
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = make()
        self.pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def _up_to(most: int) -> list[int]:
    """Sizes for so many rows, or as many as there are graphs for."""
    return [size for before, size in zip((0, *SIZES), SIZES, strict=False) if before < most]


def _size(sizes: list[int], rows: int) -> int:
    return sizes[int(np.searchsorted(sizes, rows))]
