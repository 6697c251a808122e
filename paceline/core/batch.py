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
