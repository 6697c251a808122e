"""How rows pass a panel of weights: in which tiles, and what is fetched meanwhile."""

import numpy as np
from numba import carray, types

from paceline.engine.addresses import floats as _floats
from paceline.engine.addresses import longs as _longs
from paceline.engine.kernels.common import (
    ALL_COLUMNS,
    BLOCK,
    COLUMNS,
    I64,
    LINE,
    MATRIX_ROWS,
    MATRIX_STEPS,
    ROWS,
    TALL,
    kernel,
)
from paceline.engine.kernels.matrix_tiles import bf16_matrix_tile, set_shape
from paceline.engine.kernels.tiles import bf16_tile, byte_tile, float_tile, mixed_tile, narrow_tile
from paceline.processor import HAS_AMX, HAS_AVX512

AHEAD = 4096  # bytes from weights in use to those that are fetched meanwhile, where one pass takes all rows; for more
# than two of them twice as many: a core that computes more looks less far ahead by itself


# Each compiled once: what they are used in would hold a copy.


@kernel(types.void(*[I64] * 10))
def float_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    float_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@kernel(types.void(*[I64] * 10))
def _narrow_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    narrow_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@kernel(types.void(*[I64] * 10))
def byte_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    byte_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@kernel(types.void(*[I64] * 10))
def bf16_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    bf16_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@kernel(types.void(*[I64] * 10))
def mixed_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    mixed_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@kernel(I64(I64, types.boolean), inline="always")
def height_of(left, matrices):
    """Of the next tile, with so many rows left: all are about equal, since a low one takes as long as one of 6, and
    matrix registers keep their shape."""
    most, tall = (MATRIX_ROWS, MATRIX_ROWS) if matrices else (ROWS, TALL)  # of the only one, and of one of several
    return left if left <= most else (left - 1) // ((left + tall - 1) // tall) + 1


@kernel(I64(I64, I64), inline="always")
def shaped(rows, shape):
    """What matrix registers are ready for from now on, if `shape` is what they were."""
    if rows != shape:
        set_shape(rows)
    return rows


@kernel(I64(I64), inline="always")
def block_of(rows):
    """Of rows that go through linear layers together: equal parts, since few rows cost what many do."""
    tall = MATRIX_ROWS if HAS_AMX else TALL
    parts = max((rows + (BLOCK // 2 if HAS_AMX else BLOCK - 1)) // BLOCK, 1)
    return ((rows + parts - 1) // parts + tall - 1) // tall * tall


@kernel(I64(types.boolean, types.boolean, types.boolean, *[I64] * 7, types.boolean, I64, I64))
def product(matrices, bf16, narrow, shape, rows, a, a_stride, w, steps, c, fresh, following, nbytes):
    """c[rows, 32] += a[rows, steps] w[steps, 32] of floats, or of `bf16` two a step, that are in a cache. If `fresh` c
    is written and not added to. If `narrow` 16 columns will do, of floats.

    Takes and returns what `set_shape` was told last; what is left of `steps` is not for matrix registers. Each tile in
    vectors fetches `nbytes` that are needed next, or some of their lines if it has few steps; `following`: how many
    such there are, and then where. The last goes first, and off the list.
    """
    line, whole, row = COLUMNS * 4, steps // MATRIX_STEPS * MATRIX_STEPS if matrices else 0, 0
    left = carray(_longs(following), (1,))
    if fresh and not matrices:
        carray(_floats(c), (rows * COLUMNS,))[:] = np.float32(0.0)
    while row < rows:
        height = height_of(rows - row, matrices)
        here, sums = a + row * a_stride, c + row * line
        if matrices:
            shape = shaped(height, shape)
            bf16_matrix_tile(height, here, a_stride, w, line, whole, sums, line, fresh)
        for low in range(0, height if whole < steps else 0, ROWS):
            some, rest, weights = min(height - low, ROWS), here + low * a_stride + whole * 4, w + whole * line
            ahead, gap = w, 0
            if left[0] > 0:
                ahead = carray(_longs(following), (left[0] + 1,))[left[0]]
                gap = nbytes // steps // (1 if narrow or HAS_AVX512 else 2)
                left[0] -= 1
            if bf16:
                bf16_rows(some, rest, a_stride, weights, line, steps - whole, sums + low * line, line, ahead, gap)
            elif narrow:
                _narrow_rows(some, rest, a_stride, weights, line, steps - whole, sums + low * line, line, ahead, gap)
            else:
                float_rows(some, rest, a_stride, weights, line, steps - whole, sums + low * line, line, ahead, gap)
        row += height
    return shape


@kernel(types.UniTuple(I64, 3)(*[I64] * 4))
def fetching(rows, w, nbytes, following):
    """`ahead` and `gap` of the first tile of rows that pass weights w, and how far the next one's `ahead` is.

    Those at `following` are needed next: every pass fetches its share. A single pass fetches what it needs itself soon.
    """
    halves = 1 if HAS_AVX512 or rows <= ALL_COLUMNS else 2
    passes = ((rows + TALL - 1) // TALL if rows > ROWS else 1) * halves
    if passes == 1:
        return w + (AHEAD if rows <= 2 else 2 * AHEAD), 2 * LINE, 0
    part = nbytes // passes // LINE * LINE
    return following, part // (nbytes // (2 * LINE)) + 1, part * halves
