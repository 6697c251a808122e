"""CUDA graphs of steps that only decode: what a GPU is to do is recorded once for each batch size, and then asked for
in one call. Without, a step of few rows waits for Python, which asks for every operation by itself.

Recorded operations read what they are to compute from the same memory each time, so a step is copied there. A batch
between two sizes is filled up with rows of a block that belongs to nobody. Untested on a GPU; what is copied where is
tested on the host.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.engine.gpu import PagedCache, PagedPlan

SIZES = (1, 2, 4, *range(8, 513, 8))

Pass = Callable[[Tensor, PagedPlan], Tensor]  # token ids [tokens] to hidden states [tokens, hidden]


class Graphs:
    """Of a model's pass over one token of each of up to `max_batch` sequences."""

    def __init__(self, run: Pass, cache: PagedCache, max_batch: int, context: int, counts_keys: bool):
        """`context`: the most tokens of a sequence. To be made under inference mode."""
        self.run, self.end, self.counts_keys = run, context, counts_keys
        most = next((size for size in SIZES if size >= max_batch), SIZES[-1])
        device, width = cache.pool.device, -(-context // cache.block_size)
        self.nobody = cache.num_blocks * cache.block_size  # the first row of the block behind all others
        # Token ids, positions and slots; how many tokens are there; block tables.
        self.rows = torch.zeros(3, most, dtype=torch.int64, device=device)
        self.rows[2] = self.nobody
        self.used = torch.ones(most, dtype=torch.int32, device=device)
        self.tables = torch.zeros(most, width, dtype=torch.int32, device=device)
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.pool: tuple[int, int] | None = None  # of memory, that all graphs work in: only one runs at a time
        self.sizes = [size for size in SIZES if size <= most]
        self.graphs = {size: self._record(size) for size in reversed(self.sizes)}

    def fit(self, plan: PagedPlan) -> bool:
        return plan.decodes and len(plan.used) <= self.sizes[-1] and plan.tables.shape[1] <= self.tables.shape[1]

    def __call__(self, tokens: Tensor, plan: PagedPlan) -> Tensor:
        """As `run`; what it yields holds until the next call."""
        count, blocks = plan.tables.shape
        size = self.sizes[int(np.searchsorted(self.sizes, count))]
        for row, values in zip(self.rows, (tokens, plan.positions, plan.slots), strict=True):
            row[:count] = values
        self.used[:count] = plan.used
        self.tables[:count, :blocks] = plan.tables
        self.rows[2, count:size] = self.nobody
        self.used[count:size] = 1
        return self.graphs[size]()[:count]

    def _pass(self, size: int) -> Tensor:
        tokens, positions, slots = self.rows[:, :size]
        used = self.used[:size]
        keys_begin = None
        if self.counts_keys:
            keys_begin = torch.zeros(size + 1, dtype=torch.int32, device=used.device)
            keys_begin[1:] = used.cumsum(0)
        plan = PagedPlan(
            positions, self.end, slots, self.starts[: size + 1], used, keys_begin, self.tables[:size], 1, None
        )
        return self.run(tokens, plan)

    def _record(self, size: int) -> Callable[[], Tensor]:
        self._pass(size)  # what libraries set up at first must not be recorded
        torch.cuda.synchronize(self.rows.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = self._pass(size)
        self.pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
