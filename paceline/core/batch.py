"""A batch has no phase: it is slices of sequences, whose linear layers run together."""

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.request import Sequence


class Slice(NamedTuple):
    """Tokens [start, start + length) of a sequence: a prompt chunk, a decode (1) or a verification (1 + num_draft)."""

    sequence: Sequence
    start: int
    length: int
    decode: bool
    emits: bool  # reaches the last known token, so the step yields a token
    num_draft: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


class StepShape(NamedTuple):
    """What a step's time depends on. Counts over the batch."""

    tokens: int = 0  # new ones: rows of the linear layers
    emits: int = 0  # slices that yield a token: rows of the head
    decodes: int = 0  # slices of one token
    decode_context: int = 0  # tokens that those read from the KV cache
    chunk_context: int = 0  # likewise the longer slices
    chunk_pairs: int = 0  # query-key pairs of the longer slices: length * (2 start + length + 1) / 2 each

    def add(self, start: int, length: int, emits: bool) -> "StepShape":
        """The shape with one slice more."""
        if length == 1:
            return StepShape(
                self.tokens + 1, self.emits + emits, self.decodes + 1, self.decode_context + start, *self[4:]
            )
        context = self.chunk_context + start
        pairs = self.chunk_pairs + length * (2 * start + length + 1) // 2
        return StepShape(
            self.tokens + length, self.emits + emits, self.decodes, self.decode_context, context, pairs
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step of a group computes."""

    id: int
    group: int
    slices: tuple[Slice, ...]
    preempted: tuple[Sequence, ...] = ()  # lost their KV blocks when this batch was composed

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.slices)

    @property
    def shape(self) -> StepShape:
        shape = StepShape()
        for item in self.slices:
            shape = shape.add(item.start, item.length, item.emits)
        return shape


class SliceResult(NamedTuple):
    """What a slice yielded."""

    tokens: int = 0  # tokens emitted
    finish: str | None = None  # "stop" or "length" when the sequence is done
    hashes: tuple[int, ...] = ()  # chained hashes of blocks that the emitted tokens filled
    failed: bool = False  # nothing was computed: the sequence ends, and what its blocks hold is not to be shared


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the batch's slices."""

    slices: tuple[SliceResult, ...]
