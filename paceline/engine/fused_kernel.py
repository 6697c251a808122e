"""The kernel of `fused`: `decoder_layers` with all that a step has before and behind it."""

import numpy as np
from numba import carray, njit, prange, types

from paceline.compiled import linked
from paceline.engine.addresses import floats, longs, read_at
from paceline.engine.kernels.chunks import CHUNK_BEGIN, CHUNK_COUNT, CHUNK_FIELDS, CHUNK_START, CHUNK_TABLE
from paceline.engine.kernels.common import BLOCK, F32, I64, LONGS_1D, LONGS_2D, STORE, kernel
from paceline.engine.kernels.layers import (
    DIMS,
    HIDDEN,
    KV_HEADS,
    PLAN_FIELDS,
    Q_HEADS,
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
from paceline.engine.kernels.rows import most_of_run
from paceline.engine.kernels.threads import open_gate, own_space_of, wait
from paceline.engine.layout import BEGIN, BLOCKS, FIELDS, LENGTH, START, place_rows, place_tokens
from paceline.engine.sample_kernels import _as_float, draw_some
from paceline.engine.verdict_kernel import ASKED, describe_some, judge_some

ALONE, READ = FIELDS, FIELDS + 1  # of a slice, behind its layout: whether its tokens are rows; its last ones that count
FILE, FROM, COUNT, KIND, SOURCE = range(5)  # of the embedding: see `model.Embedding.place`; rows; what of
FLOAT32, BFLOAT16, FLOAT16 = range(3)
_FLOATS = types.float32[:, ::1]
_DRAWS = LONGS_1D, LONGS_1D, types.uint64[::1], types.float64[:, ::1], LONGS_1D
_PLAN = types.Tuple((LONGS_1D, LONGS_2D, LONGS_2D))


@linked
@kernel(_PLAN(LONGS_2D, LONGS_1D, LONGS_1D, I64))
def _attending(slices, shape, windows, threads):
    """Plans by window, and chunks, of these slices, by the rules of `attention.plan_step`; before them what they have
    the addresses of, to be held as long."""
    size, kv_heads, group = shape[SIZE_], shape[KV_HEADS], shape[Q_HEADS] // shape[KV_HEADS]
    alone, longer = slices[slices[:, ALONE] != 0], slices[slices[:, ALONE] == 0]
    plans, chunks = np.zeros((len(windows), PLAN_FIELDS), np.int64), np.empty((len(longer), CHUNK_FIELDS), np.int64)
    for w in range(len(windows)):  # arrays assigned to arrays take seconds to compile, here and below
        plans[w, WINDOW] = windows[w]
    for chunk, line in zip(chunks, longer):  # noqa: B905  # Numba knows nothing else
        chunk[CHUNK_BEGIN], chunk[CHUNK_COUNT] = line[BEGIN], line[LENGTH]
        chunk[CHUNK_START], chunk[CHUNK_TABLE] = line[START], line[BLOCKS]
    rows = alone[:, LENGTH].sum()
    if rows == 0:
        return np.zeros(1, np.int64), plans, chunks
    longest = (alone[:, START] + alone[:, LENGTH]).max()
    most = min(most_of_run(group, longest), alone[:, LENGTH].max(), (rows * kv_heads + threads - 1) // threads)
    own, width = (3 + len(windows)) * rows + 1, (longest + size - 1) // size
    held = np.zeros(own + rows * width, np.int64)
    index, ends, first, table = held[:rows], held[rows : 2 * rows], held[2 * rows : 3 * rows + 1], held[own:]
    runs = place_rows(alone, size, most, index, ends, table.reshape(rows, width), first)
    for w, window in enumerate(windows):
        low, seen = held[(3 + w) * rows + 1 :], longest
        if window:
            seen = min(longest, window + most - 1)
            for row in range(rows):
                low[row] = max(0, ends[row] - window)
        plan = plans[w]
        plan[ROW_INDEX], plan[ROW_TABLE], plan[ROW_WIDTH] = index.ctypes.data, table.ctypes.data, width
        plan[ROW_LOW], plan[ROW_HIGH], plan[RUN_FIRST] = low.ctypes.data, ends.ctypes.data, first.ctypes.data
        plan[RUN_COUNT], plan[RUN_MOST], plan[RUN_LONGEST] = runs, most, seen
    return held, plans, chunks


@njit(nogil=True)
def _of_half(bits):
    """A number of float16, as float32: its exponent is moved by 112, but for infinities and NaNs."""
    number = np.int32((bits & 0x7FFF) << 13)
    if number >= 0x0F800000:
        return _as_float(np.int32(number | 0x7F800000 | (bits & 0x8000) << 16))
    number = _as_float(number) * np.float32(2.0**112)
    return -number if bits & 0x8000 else number


@linked
@kernel(I64(LONGS_1D, LONGS_1D, I64, I64))
def _embedded(source, ids, hidden, into):
    """Fills [tokens, hidden] there; how many of them there are rows for."""
    x = carray(floats(into), (len(ids), hidden))
    size, halves = hidden * (4 if source[KIND] == FLOAT32 else 2), np.empty(hidden, np.uint16)
    for i in range(len(ids)):
        if ids[i] < 0 or ids[i] >= source[COUNT]:
            return i
        place = source[FROM] + ids[i] * size
        if source[FILE] < 0:
            row = carray(floats(place), (hidden,))
            for j in range(hidden):
                x[i, j] = row[j]
            continue
        room = x[i].ctypes.data if source[KIND] == FLOAT32 else halves.ctypes.data
        if read_at(source[FILE], room, size, place) != size:
            return i
        if source[KIND] == BFLOAT16:
            for j in range(hidden):
                x[i, j] = _as_float(np.int32(np.int32(halves[j]) << 16))
        elif source[KIND] == FLOAT16:
            for j in range(hidden):
                x[i, j] = _of_half(np.int32(halves[j]))
    return len(ids)


@linked
@kernel(types.Tuple((LONGS_1D, LONGS_2D))(LONGS_2D, I64, LONGS_1D, LONGS_1D, _FLOATS))
def _placed(slices, rows, shape, buffers, turns):
    """Fills TURNS and WHERE. Which rows are read, and the slices as the last layer sees them: of what is read."""
    dims, kv_heads = shape[DIMS], shape[KV_HEADS]
    positions, kept = np.empty(rows, np.int64), np.empty(slices[:, READ].sum(), np.int64)
    place_tokens(slices, shape[SIZE_], kv_heads, positions, carray(longs(buffers[WHERE]), (rows * kv_heads,)))
    turn = carray(floats(buffers[TURNS]), (rows, dims))
    for row in range(rows):
        for d in range(dims):
            turn[row, d] = turns[positions[row], d]
    last, at = slices[slices[:, READ] != 0], 0
    for line in last:
        skipped = line[LENGTH] - line[READ]
        line[START] += skipped
        line[BEGIN] += skipped
        line[LENGTH] = line[READ]
        line[ALONE] |= line[READ] == 1
        for row in range(line[READ]):
            kept[at] = line[BEGIN] + row
            at += 1
    return kept, last


@linked
@kernel(
    types.void(
        I64, I64, I64, F32, LONGS_2D, LONGS_1D, _PLAN, _PLAN, *[LONGS_1D] * 2, I64, types.boolean, LONGS_1D, _FLOATS,
        *_DRAWS, *ASKED,
    )
)  # fmt: skip
def _some(
    t, threads, rows, eps, layers, shape, plan, last, kept, buffers, own_space, apart, head, logits, draws, places,
    streams, numbers, drawn, judged, drafts, tokens, lanes, params, found, block, verdicts,
):  # fmt: skip
    """A thread's share of `run`."""
    hidden, vocabulary = shape[HIDDEN], logits.shape[1]
    gate = buffers[SPACE]
    own, shared = own_space_of(gate, t, threads, own_space), own_space_of(gate, threads, threads, own_space)
    turn = some_layers(
        t, threads, 0, rows, eps, layers, shape, plan[1], plan[2], last[1], last[2], kept, buffers, own_space, apart
    )
    if apart:
        turn = wait(gate, turn, threads)
    for first in range(0, len(kept), BLOCK):
        turn = some_linear(
            t, threads, gate, turn, buffers[X] + first * hidden * 4, hidden * 4, head[0], eps,
            min(BLOCK, len(kept) - first), hidden, head[1], head[2], head[3], vocabulary, STORE,
            logits[first:].ctypes.data, vocabulary * 4, shared, own,
        )  # fmt: skip
    bits = logits.view(np.int32)
    if len(draws):
        draw_some(logits, bits, draws, places, streams, numbers, drawn, t, threads)
    if len(judged):
        describe_some(logits, bits, judged, params, found, t, threads)
        wait(gate, turn, threads)
        judge_some(logits, bits, judged, drafts, tokens, lanes, params, found, block, verdicts, t, threads)


@kernel(
    I64(
        I64, *[LONGS_1D] * 2, F32, LONGS_2D, *[LONGS_1D] * 2, LONGS_2D, LONGS_1D, I64, types.boolean, _FLOATS,
        LONGS_1D, _FLOATS, *_DRAWS, *ASKED,
    ),
    fastmath=False, parallel=True,
)  # fmt: skip
def run(
    threads, source, ids, eps, layers, shape, windows, slices, buffers, own_space, apart, turns, head, logits, draws,
    places, streams, numbers, drawn, judged, drafts, tokens, lanes, params, found, block, verdicts,
):  # fmt: skip
    """Tokens ids int64 [rows] of slices int64 [slices, READ + 1], to logits [read, vocabulary] of the rows that are
    read, in order: of each slice so many, its last ones. Returns for how many of the tokens there are embeddings:
    unless that is all, nothing is done.

    source int64 [SOURCE]; eps, layers, shape, buffers, own_space, apart: as of `kernels.decoder_layers`. windows int64,
    ascending, 0: none; turns float32 [positions, dims]; head: addresses of norm, weights, scales and bias. Rows `draws`
    of logits are drawn from, by places, streams and numbers as of `sample_kernels.draw_rows`; the rest is as of
    `verdict_kernel.judge`.
    """
    rows = len(ids)
    known = _embedded(source, ids, shape[HIDDEN], buffers[X])
    if known < rows:
        return known
    kept, read = _placed(slices, rows, shape, buffers, turns)
    plan, last = _attending(slices, shape, windows, threads), _attending(read, shape, windows, threads)
    open_gate(buffers[SPACE], threads)
    for t in prange(threads):
        _some(
            t, threads, rows, eps, layers, shape, plan, last, kept, buffers, own_space, apart, head, logits, draws,
            places, streams, numbers, drawn, judged, drafts, tokens, lanes, params, found, block, verdicts,
        )  # fmt: skip
    return rows
