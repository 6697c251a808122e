"""Layers and tensors of a model from its checkpoint: linear layers are packed from the rows where they lie."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.engine.linear import KINDS, Linear, make_linear
from paceline.engine.rope import interleave
from paceline.engine.weights import Checkpoint

Progress = Callable[[int, int], None]  # bytes loaded, bytes in all


class Rows(NamedTuple):
    """Rows of a linear layer of the checkpoint that a part has."""

    name: str
    count: int  # in the checkpoint
    own: range
    pairs: int = 0  # heads among them whose rows are interleaved; 0: none


class Reader:
    """What it has read is given back to the system and counts as progress."""

    def __init__(self, checkpoint: Checkpoint, device: str, kind: str, progress: Progress):
        """`kind` of linear layers is a key of `linear.KINDS`."""
        self.checkpoint, self.device, self.kind = checkpoint, device, kind
        self.dtype = KINDS[kind].dtype
        self.progress, self.done, self.total = progress, 0, checkpoint.total_bytes

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = (), pairs: int = 0) -> Tensor:
        """A tensor or a part of it in the type that layers compute in; with `pairs`, its rows are of that many heads
        and are interleaved."""
        value = self.checkpoint.view(name, shape)[part]
        copy = (interleave(value, pairs).flatten(0, 2) if pairs else value).to(self.device, self.dtype, copy=True)
        self._finish(name)
        return copy

    def fused(self, parts: Sequence[Rows], columns: int, bias: bool, gated: bool = False) -> Linear:
        """One linear layer from rows of several of the checkpoint's, which have so many columns."""
        weights, biases = [], []
        for name, count, own, pairs in parts:
            some = (slice(own.start, own.stop),)
            weight = self.checkpoint.view(f"{name}.weight", (count, columns))[some]
            weights.append((interleave(weight, pairs) if pairs else weight).to(self.device))
            if bias:
                biases.append(self.read(f"{name}.bias", (count,), some, pairs))
        layer = make_linear(self.kind, weights, torch.cat(biases) if bias else None, gated)
        for rows in parts:
            self._finish(f"{rows.name}.weight")
        return layer

    def inner(self, name: str, rows: int, columns: int, own: range, bias: bool, rank: int) -> Linear:
        """A linear layer from its `own` of so many columns. The first rank adds the bias for all."""
        weight = self.checkpoint.view(f"{name}.weight", (rows, columns))[:, own.start : own.stop].to(self.device)
        biases = self.read(f"{name}.bias", (rows,)) if bias else None
        layer = make_linear(self.kind, [weight], None if rank else biases)
        self._finish(f"{name}.weight")
        return layer

    def finish(self) -> None:
        """What is left is not read: other parts of the model, and rows that are looked up in the file."""
        self.progress(self.total, self.total)

    def _finish(self, name: str) -> None:
        self.checkpoint.release(name)
        self.done += self.checkpoint.nbytes(name)
        self.progress(self.done, self.total)
