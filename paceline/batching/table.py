"""The decision state of a group: a row of numbers for each sequence, and the loops over all of them, compiled by Numba.

`numbers[slot]` is a sequence's row (columns: `core.request.KNOWN` and on); `running[:count]` are the slots of the
running ones in arrival order. What happens to every sequence in every step is a loop here; what happens to few
(admission, preemption, a block more, the end) is Python in `scheduler`, for the sequences that the loops list.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from paceline.core.request import (
    COMPUTED,
    HASHED,
    IN_FLIGHT,
    KNOWN,
    LIMIT,
    NUM_COLUMNS,
    PROMPT,
    ROOM,
    SCHEDULED,
    Request,
    Sequence,
)

Ints = NDArray[np.int64]
SLOT, START, LENGTH, DRAFT = range(4)  # rows of a step's columns; DRAFT: how many of LENGTH are to be drafted
NONE = np.inf  # no goal

_I64, _F64 = types.int64, types.float64
_INTS, _INTS_2D, _FLOATS, _BYTES = _I64[::1], _I64[:, ::1], _F64[::1], types.uint8[::1]


class Table:
    """Rows by slot, and the columns of the step that is being composed. Grows as sequences come."""

    def __init__(self, capacity: int = 256) -> None:
        self.numbers = np.zeros((capacity, NUM_COLUMNS), np.int64)
        self.tbt = np.full(capacity, NONE)  # goals, seconds
        self.drafts = np.zeros(capacity, np.int64)  # the most to draft in a step
        self.sequences = np.empty(capacity, object)
        self.ids = np.empty(capacity, object)
        self.running = np.zeros(capacity, np.int64)
        self.count = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._make_buffers(capacity)

    def add(self, request: Request, serial: int) -> Sequence:
        """A sequence with a row."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        row = memoryview(self.numbers[slot])
        row[KNOWN] = row[PROMPT] = request.prompt_tokens
        row[LIMIT] = request.prompt_tokens + request.max_tokens
        row[HASHED] = len(request.prefix)
        sequence = Sequence(request, serial, slot, row, hashes=list(request.prefix))
        self.sequences[slot], self.ids[slot] = sequence, request.id
        self.tbt[slot] = NONE if request.slo.tbt is None else request.slo.tbt
        self.drafts[slot] = request.max_draft_tokens
        return sequence

    def drop(self, sequence: Sequence) -> None:
        """Frees the row."""
        self.numbers[sequence.slot] = 0
        self.drafts[sequence.slot] = 0
        self.sequences[sequence.slot] = self.ids[sequence.slot] = None
        self._free.append(sequence.slot)

    def insert_running(self, index: int, sequence: Sequence) -> None:
        self.running[index + 1 : self.count + 1] = self.running[index : self.count].copy()
        self.running[index] = sequence.slot
        self.count += 1

    def remove_running(self, index: int) -> None:
        self.running[index : self.count - 1] = self.running[index + 1 : self.count].copy()
        self.count -= 1

    def longest_first(self) -> Ints:
        """Slots of the running sequences by the tokens that may still come, the most first, then in arrival order."""
        slots = self.running[: self.count]
        to_come = self.numbers[slots, LIMIT] - self.numbers[slots, KNOWN]
        return slots[np.argsort(-to_come, kind="stable")]

    def _make_buffers(self, capacity: int) -> None:
        self.step = np.zeros((4, capacity), np.int64)
        self.emits = np.zeros(capacity, np.uint8)
        self.listed = np.zeros(capacity, np.int64)  # what a loop leaves to Python

    def _grow(self) -> None:
        old = len(self.numbers)
        self._free = list(range(2 * old - 1, old - 1, -1))
        self.numbers = np.concatenate([self.numbers, np.zeros_like(self.numbers)])
        self.tbt = np.concatenate([self.tbt, np.full(old, NONE)])
        self.drafts = np.concatenate([self.drafts, np.zeros(old, np.int64)])
        self.sequences = np.concatenate([self.sequences, np.empty(old, object)])
        self.ids = np.concatenate([self.ids, np.empty(old, object)])
        self.running = np.concatenate([self.running, np.zeros(old, np.int64)])
        self._make_buffers(2 * old)
        for sequence in self.sequences[:old]:
            sequence.row = memoryview(self.numbers[sequence.slot])


def _tuple(kind: Any, count: int) -> Any:
    return types.UniTuple(kind, count)  # type: ignore[no-untyped-call]


def _compiled(*signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiled when imported, from Numba's cache but for the first time on a machine: never while serving."""
    result, *arguments = signature
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(result(*arguments), cache=True)
    return decorate


@_compiled(_tuple(_I64, 4), _INTS_2D, _INTS, _INTS, _I64, _I64, _I64, _I64, _INTS_2D, _INTS)
def ready_decodes(numbers, drafts, running, count, most, deep, block_size, step, listed):  # type: ignore[no-untyped-def]
    """Puts the decodes that are ready into `step`, the first `most` in the order of `running`.

    With each go the tokens to be drafted behind it: what the sequence allows (`drafts`) and may still come to know, at
    most `deep`; with `block_size` 0 what the blocks held can take.
    Returns how many decodes, how many of them (listed) need blocks first, how many blocks, and the tokens of all.
    """
    taken, short, needed, width = 0, 0, 0, 0
    for i in range(count):
        if taken == most:
            break
        slot = running[i]
        row = numbers[slot]
        if row[COMPUTED] < row[PROMPT] or row[IN_FLIGHT] > 0:
            continue
        draft = max(0, min(drafts[slot], deep, row[LIMIT] - row[KNOWN] - 1))
        if block_size == 0:
            draft = max(0, min(draft, row[ROOM] - row[COMPUTED] - 1))
        step[SLOT, taken] = slot
        step[START, taken] = row[COMPUTED]
        step[LENGTH, taken] = 1 + draft
        step[DRAFT, taken] = draft
        lacks = row[COMPUTED] + 1 + draft - row[ROOM]
        if lacks > 0:
            listed[short] = taken
            short += 1
            needed += 1 if block_size == 0 else (lacks + block_size - 1) // block_size
        taken += 1
        width += 1 + draft
    return taken, short, needed, width


@_compiled(_I64, _INTS_2D, _INTS, _I64)
def num_decoding(numbers, running, count):  # type: ignore[no-untyped-def]
    """Running sequences whose prompt is computed."""
    decoding = 0
    for i in range(count):
        row = numbers[running[i]]
        decoding += row[COMPUTED] >= row[PROMPT]
    return decoding


@_compiled(_F64, _INTS_2D, _FLOATS, _INTS, _I64)
def tightest_tbt(numbers, tbt, running, count):  # type: ignore[no-untyped-def]
    """The smallest goal among those that decode; infinity if nobody has one."""
    best = np.inf
    for i in range(count):
        slot = running[i]
        if numbers[slot, COMPUTED] >= numbers[slot, PROMPT]:
            best = min(best, tbt[slot])
    return best


@_compiled(_tuple(_I64, 7), _INTS_2D, _INTS_2D, _I64, _BYTES)
def depart(numbers, step, width, emits):  # type: ignore[no-untyped-def]
    """The first `width` slices are now in flight. Says in `emits` which will yield a token; returns the shape."""
    tokens, emitting, decodes, decode_context, chunk_context, pairs, chunks = 0, 0, 0, 0, 0, 0, 0
    for i in range(width):
        row = numbers[step[SLOT, i]]
        start, length = step[START, i], step[LENGTH, i]
        row[IN_FLIGHT] += 1
        row[SCHEDULED] = start + length
        emits[i] = start + length >= row[KNOWN]
        emitting += emits[i]
        tokens += length
        if length == 1 + step[DRAFT, i]:  # every token reads the whole context for itself
            decodes += length
            decode_context += length * start + length * (length - 1) // 2
            emitting += emits[i] * (length - 1)
        else:
            chunk_context += start
            pairs += length * (2 * start + length + 1) // 2
            chunks += 1
    return tokens, emitting, decodes, decode_context, chunk_context, pairs, chunks


@_compiled(_tuple(_I64, 2), _INTS_2D, _INTS_2D, _BYTES, _I64, _INTS)
def arrive(numbers, step, tokens, block_size, listed):  # type: ignore[no-untyped-def]
    """A step is done and slice i yielded tokens[i]; slot -1 is passed over. Lists the slices that filled a block with a
    known hash. Returns the sum of tokens, and how many are listed.

    Of a slice with drafted tokens those that did not stay are not computed, whatever the cache holds of them.
    """
    total, filled = 0, 0
    for i in range(step.shape[1]):
        slot = step[SLOT, i]
        if slot < 0:
            continue
        row = numbers[slot]
        end = step[START, i] + step[LENGTH, i]
        if step[DRAFT, i] > 0:
            end = step[START, i] + tokens[i]
            row[SCHEDULED] = end
        if row[COMPUTED] // block_size < min(end // block_size, row[HASHED]):
            listed[filled] = i
            filled += 1
        row[IN_FLIGHT] -= 1
        row[COMPUTED] = end
        row[KNOWN] += tokens[i]
        total += tokens[i]
    return total, filled
