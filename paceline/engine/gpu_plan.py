"""A step's slices on a GPU: laid out on the host, then copied to the device.

What our own kernels are asked for are tiles of rows; FlashAttention takes slices; and where neither reads pages, slices
of one length are gathered together.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.engine.attention import SliceSpan, rows_read

SHORT = 16  # tokens of a slice whose keys are read in parts
PROGRAMS = 264  # that keep a GPU busy: two for each of its multiprocessors
MOST_PARTS = 16
GATHERED = 2**16  # tokens of keys and values that are gathered at a time


class Reads(NamedTuple):
    """What reads pages here, and how."""

    block_size: int
    kernels: ModuleType | None  # ours; None: torch's FlashAttention
    counts_keys: bool = False  # it wants to know where keys begin though a block table says so: FlashAttention 2 does


class Heads(NamedTuple):
    """What attention has to know of a model."""

    queries: int
    kv: int
    dims: int
    dtype: torch.dtype
    windows: set[int | None]


class Gathered(NamedTuple):
    """Slices of one length whose keys and values are gathered together."""

    rows: Tensor  # [slices * length] of the step's
    table: Tensor  # [slices, blocks]
    masks: dict[int | None, Tensor | None]  # by window, [slices, 1, length, tokens]; None: causal, from token 0 on


class Tiles(NamedTuple):
    """Rows that our own kernels take together: which slice, and its first row there."""

    slices: Tensor  # [tiles] int32
    rows: Tensor  # [tiles] int32
    parts: int  # in which their keys are read side by side


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """One step's metadata. Slices are runs of rows; of each `used` tokens are there once it has been written."""

    positions: Tensor  # [tokens]
    end: int  # all of them are below
    slots: Tensor  # [tokens], rows of a layer's pages
    starts: Tensor  # [slices + 1] int32, among the step's rows
    used: Tensor  # [slices] int32
    keys_begin: Tensor | None  # [slices + 1] int32, sums of `used`, where `Reads.counts_keys`
    tables: Tensor  # [slices, most blocks] int32, padded with block 0
    longest: int  # rows of a slice
    few: Tiles | None = None  # of short slices, and
    many: Tiles | None = None  # of others, for our own kernels
    gathered: list[Gathered] | None = None  # neither they nor FlashAttention read pages
    kept: Tensor | None = None  # which tokens are read; None: all


@dataclass(frozen=True, slots=True)
class Layout:
    """A step's slices, on the host: what `PagedPlan` has on the device."""

    lengths: np.ndarray  # [slices]
    ends: np.ndarray  # [slices], tokens that are there once the slice has been written
    starts: np.ndarray  # [slices + 1]
    tables: np.ndarray  # [slices, most blocks]
    positions: np.ndarray  # [tokens]
    slots: np.ndarray  # [tokens]
    few: list[np.ndarray]  # of tiles of short slices: slices and first rows; nothing without our own kernels
    many: list[np.ndarray]
    block_size: int
    heads: Heads
    by: Reads | None
    kept: np.ndarray | None  # which tokens are read; None: all

    @property
    def decodes(self) -> bool:
        """Whether each slice is one token."""
        return len(self.positions) == len(self.lengths)

    def on(self, device: str) -> PagedPlan:
        parts = [self.starts, self.ends, self.tables.ravel(), *self.few, *self.many]
        if self.by and self.by.counts_keys:
            parts.append(np.concatenate(([0], self.ends.cumsum())))
        # Two copies, not seven.
        ints = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device, non_blocking=True)
        longs = torch.from_numpy(np.stack((self.positions, self.slots))).to(device, non_blocking=True)
        starts, used, tables, *others = ints.split([part.size for part in parts])
        few = many = None
        if self.few:
            few, many = (
                Tiles(slices, rows, parts_of(len(rows), self.heads.kv) if at == 0 else 1) if len(rows) else None
                for at, (slices, rows) in enumerate((others[:2], others[2:4]))
            )
        plan = PagedPlan(
            positions=longs[0],
            end=int(self.ends.max()),
            slots=longs[1],
            starts=starts,
            used=used,
            keys_begin=others[-1] if self.by and self.by.counts_keys else None,
            tables=tables.view(self.tables.shape),
            longest=int(self.lengths.max()),
            few=few,
            many=many,
            gathered=None if self.by else [],
            kept=None if self.kept is None else torch.from_numpy(self.kept).to(device, non_blocking=True),
        )
        if plan.gathered is not None:
            # No slice is left without a mask where torch would copy keys for the query heads that share them.
            folds = self.heads.queries != self.heads.kv and self.heads.dtype == torch.float32
            for slices in _alike(self.lengths, self.ends):
                end = self.ends[slices[0]]
                whole = len(slices) == 1 and self.lengths[slices[0]] == end and not folds
                tokens = -(-int(end) // self.block_size) * self.block_size
                plan.gathered.append(
                    _gather(plan, slices, self.starts, tokens, self.block_size, whole, self.heads.windows)
                )
        return plan


def lay_out(spans: list[SliceSpan], heads: Heads, block_size: int, by: Reads | None) -> Layout:
    lengths = np.array([span.length for span in spans])
    ends = np.array([span.start + span.length for span in spans])
    counts = -(-ends // block_size)
    tables = np.zeros((len(spans), counts.max()), np.int64)
    for row, span, count in zip(tables, spans, counts.tolist(), strict=True):
        row[:count] = span.blocks[:count]
    starts = np.concatenate(([0], lengths.cumsum()))
    if starts[-1] == len(spans):
        owner, positions = starts[:-1], ends - 1
    else:
        owner = np.repeat(np.arange(len(spans)), lengths)
        positions = np.arange(len(owner)) - starts[owner] + (ends - lengths)[owner]
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    few: list[np.ndarray] = []
    many: list[np.ndarray] = []
    if by and by.kernels:
        group, short = heads.queries // heads.kv, lengths <= SHORT
        few = _tiles(lengths, short, by.kernels.few_tile(group).rows // group)
        many = _tiles(lengths, ~short, by.kernels.many_tile(group, heads.dtype).rows // group)
    kept = rows_read(spans)
    return Layout(lengths, ends, starts, tables, positions, slots, few, many, block_size, heads, by, kept)


def _tiles(lengths: np.ndarray, chosen: np.ndarray, size: int) -> list[np.ndarray]:
    """Tiles of `size` rows of the chosen slices: each one's slice, and its first row there."""
    slices = np.flatnonzero(chosen)
    counts = -(-lengths[slices] // size)
    before = np.repeat(counts.cumsum() - counts, counts)
    return [np.repeat(slices, counts), (np.arange(len(before)) - before) * size]


def parts_of(tiles: int, kv_heads: int) -> int:
    """Parts of the keys of so many tiles: enough programs to keep a GPU busy."""
    return min(MOST_PARTS, max(1, PROGRAMS // (tiles * kv_heads)))


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
