"""The kernel of `chain`: a decoder's passes over single tokens, each fed what the one before drew."""

import numpy as np
from numba import carray, njit, prange, types

from paceline.compiled import linked
from paceline.engine.addresses import floats, longs
from paceline.engine.kernels.common import BLOCK, F32, I64, LONGS_1D, LONGS_2D, STORE, kernel
from paceline.engine.kernels.layers import (
    DIMS,
    HIDDEN,
    KV_HEADS,
    ROW_TABLE,
    ROW_WIDTH,
    RUN_COUNT,
    RUN_LONGEST,
    SIZE_,
    SPACE,
    TURNS,
    WHERE,
    WINDOW,
    X,
    some_layers,
)
from paceline.engine.kernels.products import some_linear
from paceline.engine.kernels.threads import open_gate, own_space_of, wait
from paceline.engine.sample_kernels import draw_some, some_log_probs

_TABLE, _NUMBERS = types.float32[:, ::1], types.float64[:, ::1]
TAKEN = (
    F32, LONGS_2D, LONGS_1D, LONGS_2D, LONGS_2D, LONGS_1D, LONGS_1D, I64, LONGS_1D, LONGS_2D, LONGS_2D, LONGS_2D,
    _TABLE, _TABLE, LONGS_1D, types.float32[:, :, ::1], types.uint64[::1], _NUMBERS, _NUMBERS, LONGS_2D, LONGS_2D,
)  # fmt: skip
START, FIRST, PLACE, FIELDS = range(4)  # of a sequence: first position, the first pass that draws, its noise


@njit(nogil=True)
def _feed(k, rows, shape, plans, buffers, lines, fed, drawn, tables, table, turns, seen):
    """What the layers work on in pass k: the token of each sequence, where it lies, and what it sees."""
    hidden, dims, kv_heads, size = shape[HIDDEN], shape[DIMS], shape[KV_HEADS], shape[SIZE_]
    x = carray(floats(buffers[X]), (rows, hidden))
    turn = carray(floats(buffers[TURNS]), (rows, dims))
    where = carray(longs(buffers[WHERE]), (rows, kv_heads))
    longest = 0
    for i in range(rows):
        if k > lines[i, FIRST]:
            fed[i, k] = max(drawn[i, k - 1], 0)
        position = lines[i, START] + k
        for j in range(hidden):
            x[i, j] = table[fed[i, k], j]
        for d in range(dims):
            turn[i, d] = turns[position, d]
        for head in range(kv_heads):
            where[i, head] = (tables[i, position // size] * kv_heads + head) * size + position % size
        seen[0, i] = position + 1
        for w in range(plans.shape[0]):
            seen[1 + w, i] = max(0, position + 1 - plans[w, WINDOW]) if plans[w, WINDOW] else 0
        longest = max(longest, position + 1)
    for w in range(plans.shape[0]):
        plans[w, RUN_COUNT] = rows
        plans[w, RUN_LONGEST] = min(longest, plans[w, WINDOW]) if plans[w, WINDOW] else longest


@linked
@kernel(types.void(I64, I64, *TAKEN), fastmath=False)
def _some(
    t, threads, eps, layers, shape, plans, chunks, every, buffers, own_space, counts, lines, fed, tables, table, turns,
    head, logits, streams, numbers, whole, drawn, seen,
):  # fmt: skip
    """A thread's share of `run`."""
    hidden, turn = shape[HIDDEN], 0
    norm, weights, scales, bias, vocabulary = head[0], head[1], head[2], head[3], head[4]
    gate = buffers[SPACE]
    own, shared = own_space_of(gate, t, threads, own_space), own_space_of(gate, threads, threads, own_space)
    places = np.empty(lines.shape[0], np.int64)
    for k in range(counts.shape[0]):
        rows, at, draws = counts[k], min(k, logits.shape[0] - 1), False
        if t == 0:
            _feed(k, rows, shape, plans, buffers, lines, fed, drawn, tables, table, turns, seen)
        turn = wait(gate, turn, threads)
        turn = some_layers(
            t, threads, turn, rows, eps, layers, shape, plans, chunks, plans, chunks, every[:rows], buffers, own_space,
            False,
        )  # fmt: skip
        for i in range(rows):
            draws |= k >= lines[i, FIRST]
            places[i] = lines[i, PLACE] + k - lines[i, FIRST]
        if draws:
            for first in range(0, rows, BLOCK):
                turn = some_linear(
                    t, threads, gate, turn, buffers[X] + first * hidden * 4, hidden * 4, norm, eps,
                    min(BLOCK, rows - first), hidden, weights, scales, bias, vocabulary, STORE,
                    logits[at, first:].ctypes.data, vocabulary * 4, shared, own,
                )  # fmt: skip
            some, bits = logits[at, :rows], logits[at, :rows].view(np.int32)
            some_log_probs(some, bits, numbers, t, threads)
            draw_some(some, bits, every[:rows], places[:rows], streams[:rows], whole, drawn[:, k], t, threads)
        turn = wait(gate, turn, threads)


@kernel(types.void(I64, *TAKEN), fastmath=False, parallel=True)
def run(
    threads, eps, layers, shape, plans, chunks, every, buffers, own_space, counts, lines, fed, tables, table, turns,
    head, logits, streams, numbers, whole, drawn, seen,
):  # fmt: skip
    """Pass k is over the first counts[k] sequences. drawn[:, k] are its tokens (-1: there is no distribution), which
    the next one is fed where nothing is in `fed` for it, and logits[k] become the log-probabilities that those are
    drawn from; there may be room for those of one pass alone.

    eps, layers, shape, plans (of rows, which are all of them), chunks (none), buffers, own_space: as of
    `kernels.decoder_layers`; `every` [rows] counts. int64: counts [passes], lines [rows, FIELDS], fed and drawn [rows,
    passes], tables [rows, blocks], seen [1 + windows, rows], where `plans` look; table [vocabulary, hidden] and turns
    [positions, dims] float32; head: addresses of norm, weights, scales and bias, and the vocabulary; logits float32
    [passes or 1, rows, vocabulary]; streams uint64 [rows]; numbers float64 [rows, 4] as in
    `sample_kernels.draw_rows`, and `whole` those that take all.
    """
    open_gate(buffers[SPACE], threads)
    for w in range(plans.shape[0]):  # to slices a parallel kernel would assign in parallel
        plans[w, ROW_TABLE], plans[w, ROW_WIDTH] = tables.ctypes.data, tables.shape[1]
    if threads == 1:
        _some(
            0, 1, eps, layers, shape, plans, chunks, every, buffers, own_space, counts, lines, fed, tables, table,
            turns, head, logits, streams, numbers, whole, drawn, seen,
        )  # fmt: skip
    else:
        for t in prange(threads):
            _some(
                t, threads, eps, layers, shape, plans, chunks, every, buffers, own_space, counts, lines, fed, tables,
                table, turns, head, logits, streams, numbers, whole, drawn, seen,
            )  # fmt: skip
