"""All layers in one parallel region."""

import numpy as np
from numba import carray, prange, types

from paceline.compiled import linked
from paceline.engine.addresses import longs as _longs
from paceline.engine.kernels.chunks import block_floats, some_blocks
from paceline.engine.kernels.common import (
    ADD,
    F32,
    GATE,
    I64,
    LARGEST_BLOCK,
    LINE,
    LONGS_1D,
    LONGS_2D,
    STORE,
    TILES_SPACE,
    kernel,
)
from paceline.engine.kernels.memory import copy
from paceline.engine.kernels.passes import block_of
from paceline.engine.kernels.products import some_linear
from paceline.engine.kernels.rotations import rotate_rows
from paceline.engine.kernels.rows import heads_together, row_floats, some_rows
from paceline.engine.kernels.threads import open_gate, own_space_of, wait

# Columns of a layer's line in the table of addresses, and of a window's line in a step's plan.
QKV, OUT, GATE_UP, DOWN = 0, 3, 6, 9  # weights, their scales (or 0), bias
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, LAYER_KEYS, LAYER_VALUES, LAYER_WINDOW, LAYER_FIELDS = range(12, 20)
HIDDEN, INNER, Q_HEADS, KV_HEADS, DIMS, SIZE_, ELEMENT, SHAPE_FIELDS = range(8)  # the last: bytes of a kept number
WINDOW, ROW_INDEX, ROW_TABLE, ROW_WIDTH, ROW_LOW, ROW_HIGH, RUN_FIRST, RUN_COUNT, RUN_MOST, RUN_LONGEST = range(10)
PLAN_FIELDS = 10
X, TURNS, WHERE, HEADS, MIXED, INSIDE, SPACE, PROGRESS, BUFFER_FIELDS = range(9)


@linked
@kernel(I64(*[I64] * 4, F32, LONGS_2D, LONGS_1D, *[LONGS_2D] * 4, LONGS_1D, LONGS_1D, I64, types.boolean))
def some_layers(
    t, threads, turn, rows, eps, layers, shape, plans, chunks, last_plans, last_chunks, kept, buffers, own_space, apart
):  # fmt: skip
    """A thread's share of `decoder_layers`, in the order of the model; returns the turn.

    Of products a thread has a part of the columns, so that few rows read the weights once. If `apart` it has a part of
    the rows: what it reads is then what it wrote, in its own caches, and it only waits before and after attention.
    """
    hidden, inner, q_heads, kv_heads, dims = shape[HIDDEN], shape[INNER], shape[Q_HEADS], shape[KV_HEADS], shape[DIMS]
    width, group, scale = (q_heads + 2 * kv_heads) * dims, q_heads // kv_heads, np.float32(1.0 / np.sqrt(dims))
    size, element = shape[SIZE_], shape[ELEMENT]
    mixed_stride, inside_stride = q_heads * dims * 4 + LINE, inner * 4 + LINE
    x, heads, mixed, inside = buffers[X], buffers[HEADS], buffers[MIXED], buffers[INSIDE]
    gate = buffers[SPACE]
    own, shared = own_space_of(gate, t, threads, own_space), own_space_of(gate, threads, threads, own_space)
    longest = max(plans[:, RUN_LONGEST].max(), last_plans[:, RUN_LONGEST].max())
    runs = max(plans[:, RUN_COUNT].max(), last_plans[:, RUN_COUNT].max())
    most = max(plans[:, RUN_MOST].max(), last_plans[:, RUN_MOST].max())
    together = heads_together(runs, most, kv_heads, group, longest, size * dims * element, threads)
    mine = np.empty(row_floats(together, most, group, dims, longest), np.float32)
    work = np.zeros(block_floats(group, dims) if chunks.shape[0] else 1, np.float32)
    begin, end = rows * t // threads, rows * (t + 1) // threads
    part, parts, at, low, high, prepared, between = t, threads, gate, 0, rows, shared, inside
    if apart:
        part, parts, at, low, high, prepared = 0, 1, gate + t * LINE, begin, end, own + TILES_SPACE
        between += t * LARGEST_BLOCK * inside_stride
    block = block_of(high - low)
    for index in range(layers.shape[0]):
        layer, narrows = layers[index], index + 1 == layers.shape[0] and kept.shape[0] < rows
        plan = last_plans[layer[LAYER_WINDOW]] if narrows else plans[layer[LAYER_WINDOW]]
        some_chunks = last_chunks if narrows else chunks
        keys, values = layer[LAYER_KEYS], layer[LAYER_VALUES]
        for first in range(low, high, block):
            turn = some_linear(
                part, parts, at, turn, x + first * hidden * 4, hidden * 4, layer[INPUT_NORM], eps,
                min(block, high - first), hidden, layer[QKV], layer[QKV + 1], layer[QKV + 2], width, STORE,
                heads + first * width * 4, width * 4, prepared, own,
            )  # fmt: skip
        rotate_rows(
            heads, q_heads, kv_heads, dims, layer[Q_NORM], layer[K_NORM], eps, buffers[TURNS], buffers[WHERE], keys,
            values, element, begin, end,
        )  # fmt: skip
        turn = wait(gate, turn, threads)
        if plan[RUN_COUNT]:
            some_rows(
                t, threads, together, heads, width * 4, keys, values, plan[ROW_INDEX], plan[ROW_TABLE],
                plan[ROW_WIDTH], plan[ROW_LOW], plan[ROW_HIGH], plan[RUN_FIRST], plan[RUN_COUNT], scale, group,
                kv_heads, size, dims, element, mixed, mixed_stride, mine.ctypes.data,
            )  # fmt: skip
        if some_chunks.shape[0]:
            some_blocks(
                t, threads, gate, turn, heads, width * 4, some_chunks, keys, values, group, kv_heads, size, dims,
                element, plan[WINDOW], scale, mixed, mixed_stride, work.ctypes.data,
            )  # fmt: skip
        turn = wait(gate, turn, threads)
        if narrows:
            rows = kept.shape[0]
            part, parts, at, low, high, prepared, between = t, threads, gate, 0, rows, shared, inside
            block = block_of(max(rows, 1))
            if t == 0:
                for row in range(rows):
                    copy(mixed + row * mixed_stride, mixed + kept[row] * mixed_stride, q_heads * dims * 4)
                    copy(x + row * hidden * 4, x + kept[row] * hidden * 4, hidden * 4)
            turn = wait(gate, turn, threads)
        for first in range(low, high, block):
            count, some = min(block, high - first), x + first * hidden * 4
            turn = some_linear(
                part, parts, at, turn, mixed + first * mixed_stride, mixed_stride, 0, eps, count, q_heads * dims,
                layer[OUT], layer[OUT + 1], layer[OUT + 2], hidden, ADD, some, hidden * 4, prepared, own,
            )  # fmt: skip
            turn = some_linear(
                part, parts, at, turn, some, hidden * 4, layer[POST_NORM], eps, count, hidden, layer[GATE_UP],
                layer[GATE_UP + 1], layer[GATE_UP + 2], inner, GATE, between, inside_stride, prepared, own,
            )  # fmt: skip
            turn = some_linear(
                part, parts, at, turn, between, inside_stride, 0, eps, count, inner, layer[DOWN], layer[DOWN + 1],
                layer[DOWN + 2], hidden, ADD, some, hidden * 4, prepared, own,
            )  # fmt: skip
        if t == 0:
            carray(_longs(buffers[PROGRESS]), (1,))[0] += 1
    return turn


@kernel(
    types.void(I64, F32, LONGS_2D, LONGS_1D, *[LONGS_2D] * 4, LONGS_1D, LONGS_1D, I64, types.boolean, I64),
    parallel=True,
)  # fmt: skip
def decoder_layers(
    rows, eps, layers, shape, plans, chunks, last_plans, last_chunks, kept, buffers, own_space, apart, threads
):  # fmt: skip
    """All layers over the hidden states X [rows, hidden], in place: what `Decoder.run` does layer by layer.

    Where fewer rows are `kept` the last layer has a plan of its own, and they are the first rows of X in the end.
    """
    open_gate(buffers[SPACE], threads)
    for t in prange(threads):
        some_layers(
            t, threads, 0, rows, eps, layers, shape, plans, chunks, last_plans, last_chunks, kept, buffers, own_space,
            apart,
        )  # fmt: skip
