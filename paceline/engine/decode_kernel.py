"""The kernel of `decode`: what `decoder_layers` does for single tokens, with all before and behind it."""

import numpy as np
from numba import carray, prange, types

from paceline.compiled import linked
from paceline.engine.addresses import floats, longs
from paceline.engine.kernels.common import BLOCK, F32, I64, LONGS_1D, LONGS_2D, STORE, kernel
from paceline.engine.kernels.layers import (
    CHUNK_FIELDS,
    DIMS,
    HIDDEN,
    KV_HEADS,
    PLAN_FIELDS,
    ROW_HIGH,
    ROW_INDEX,
    ROW_LOW,
    ROW_TABLE,
    ROW_WIDTH,
    RUN_COUNT,
    RUN_FIRST,
    RUN_LONGEST,
    RUN_MOST,
    SIZE_,
    SPACE,
    TURNS,
    WHERE,
    WINDOW,
    X,
    some_layers,
)
from paceline.engine.kernels.products import some_linear
from paceline.engine.layout import LENGTH, START, place_rows, place_tokens
from paceline.engine.sample_kernels import draw_some

_FLOATS = types.float32[:, ::1]
_DRAWS = types.uint64[::1], LONGS_1D, types.float64[:, ::1], LONGS_1D


@linked
@kernel(
    types.void(I64, I64, F32, LONGS_2D, LONGS_1D, *[LONGS_2D] * 2, *[LONGS_1D] * 2, I64, LONGS_1D, _FLOATS, *_DRAWS)
)
def _some(
    t, threads, eps, layers, shape, plans, chunks, held, buffers, own_space, head, logits, streams, places, numbers,
    drawn,
):  # fmt: skip
    """A thread's share of `run`; `held` is of `_place`."""
    rows, hidden, vocabulary = logits.shape[0], shape[HIDDEN], logits.shape[1]
    gate, own, shared = buffers[SPACE], buffers[SPACE] + 64 + t * own_space, buffers[SPACE] + 64 + threads * own_space
    turn = some_layers(
        t, threads, 0, rows, eps, layers, shape, plans, chunks, plans, chunks, held[:rows], buffers, own_space, False
    )
    for first in range(0, rows, BLOCK):
        turn = some_linear(
            t, threads, gate, turn, buffers[X] + first * hidden * 4, hidden * 4, head[0], eps, min(BLOCK, rows - first),
            hidden, head[1], head[2], head[3], vocabulary, STORE, logits[first:].ctypes.data, vocabulary * 4, shared,
            own,
        )  # fmt: skip
    if drawn.shape[0]:
        draw_some(logits, logits.view(np.int32), streams, places, numbers, drawn, t, threads)


@linked
@kernel(types.Tuple((LONGS_1D, LONGS_2D))(I64, *[LONGS_1D] * 2, LONGS_2D, I64, LONGS_1D, _FLOATS))
def _place(rows, shape, windows, slices, most, buffers, turns):
    """TURNS and WHERE of so many rows; `plans` of the layers, and what those have the addresses of, which are to be
    held as long, behind the numbers of all rows."""
    dims, kv_heads, size = shape[DIMS], shape[KV_HEADS], shape[SIZE_]
    longest = (slices[:, START] + slices[:, LENGTH]).max()
    width = (longest + size - 1) // size
    held = np.zeros((4 + len(windows)) * rows + rows + 1 + rows * width, np.int64)
    lines = held[: (4 + len(windows)) * rows].reshape(-1, rows)
    every, positions, index, ends, lows = lines[0], lines[1], lines[2], lines[3], lines[4:]
    first, table = held[lines.size :][: rows + 1], held[lines.size + rows + 1 :].reshape(rows, width)
    every[:] = np.arange(rows)
    place_tokens(slices, size, kv_heads, positions, carray(longs(buffers[WHERE]), (rows * kv_heads,)))
    turn = carray(floats(buffers[TURNS]), (rows, dims))
    for row in range(rows):
        turn[row] = turns[positions[row]]
    runs = place_rows(slices, size, most, index, ends, table, first)
    plans = np.zeros((len(windows), PLAN_FIELDS), np.int64)
    for w, window in enumerate(windows):
        plan, low, seen = plans[w], lows[w], longest
        if window:
            seen = min(longest, window + most - 1)
            for row in range(rows):
                low[row] = max(0, ends[row] - window)
        plan[WINDOW], plan[ROW_INDEX], plan[ROW_TABLE] = window, index.ctypes.data, table.ctypes.data
        plan[ROW_WIDTH], plan[ROW_LOW], plan[ROW_HIGH] = table.shape[1], low.ctypes.data, ends.ctypes.data
        plan[RUN_FIRST], plan[RUN_COUNT], plan[RUN_MOST], plan[RUN_LONGEST] = first.ctypes.data, runs, most, seen
    return held, plans


@kernel(
    types.void(
        I64, F32, LONGS_2D, *[LONGS_1D] * 2, LONGS_2D, I64, LONGS_1D, I64, _FLOATS, LONGS_1D, _FLOATS, *_DRAWS
    ),
    fastmath=False, parallel=True,
)  # fmt: skip
def run(
    threads, eps, layers, shape, windows, slices, most, buffers, own_space, turns, head, logits, streams, places,
    numbers, drawn,
):  # fmt: skip
    """Slices int64 [slices, layout.FIELDS] of hidden states X [rows, hidden], of which nobody sees what is behind it,
    to logits [rows, vocabulary].

    eps, layers, shape, buffers, own_space: as of `kernels.decoder_layers`. windows int64, ascending, 0 none; `most`
    rows of a slice read its keys together; turns float32 [positions, dims]; head: addresses of norm, weights, scales
    and bias. Unless `drawn` is empty every row is drawn from, by streams, places and numbers as of
    `sample_kernels.draw_rows`.
    """
    held, plans = _place(logits.shape[0], shape, windows, slices, most, buffers, turns)
    chunks = np.zeros((0, CHUNK_FIELDS), np.int64)
    carray(longs(buffers[SPACE]), (1,))[0] = 0
    for t in prange(threads):
        _some(
            t, threads, eps, layers, shape, plans, chunks, held, buffers, own_space, head, logits, streams, places,
            numbers, drawn,
        )  # fmt: skip
