"""Linear layers: rows of activations times packed weights, with what comes before and after."""

import numpy as np
from numba import carray, prange, types

from paceline.compiled import linked
from paceline.engine.addresses import floats as _floats
from paceline.engine.addresses import longs as _longs
from paceline.engine.kernels import vectors as v
from paceline.engine.kernels.common import (
    ADD,
    ALONE,
    BYTE,
    COLUMNS,
    DEEP,
    DEEP_BYTES,
    DEPTH_STEPS,
    F32,
    FAR_AHEAD,
    FLOAT_STEP,
    GATE,
    I64,
    LARGEST_BLOCK,
    LINE,
    LONG,
    MATRIX_ROWS,
    PANEL_STEP,
    PARTS,
    PARTS_STEP,
    ROUNDED_BF16,
    ROW_FETCHES,
    SPLIT_FETCHES,
    STORE,
    SUMS_PANELS,
    SUMS_SPACE,
    TILE,
    TILES_SPACE,
    WHOLE_FETCHES,
    by_hand,
    kernel,
)
from paceline.engine.kernels.inputs import norm_row, quantize_row, round_row, split_row, widen_row
from paceline.engine.kernels.matrix_tiles import (
    byte_panel_tile,
    kept_tile,
    one_kept_row,
    one_row,
    rounded_tile,
    set_shape,
    split_first,
    split_stream_tile,
    split_tile,
)
from paceline.engine.kernels.passes import (
    bf16_rows,
    block_of,
    byte_rows,
    fetching,
    float_rows,
    height_of,
    mixed_rows,
    shaped,
)
from paceline.engine.kernels.threads import begin_shares, next_of, open_gate, own_space_of, wait
from paceline.engine.kernels.vectors import FLOAT, SIDES, VECTOR, WHOLE
from paceline.processor import HAS_AMX

SPLIT_STREAMS = 3  # passes of rows up to which each makes the parts of weights itself: from the first cache it takes
# 240 ns a step of 32 rows with them; where one leaves them to others it takes 340, and these 210
TAKEN = 65536  # bytes of weights that a thread takes of a share, at least: whoever takes waits until all is written
DEPTH = 1024  # weights of a panel that stay in the second cache while all rows pass: DEPTH x COLUMNS floats


def _last_of_rows(kind: int, integer: bool):
    """finish(sums, rows, bias, excess, scales, row_scales, target, stride, ahead): sums [rows, 32] become outputs at
    `target`, rows of which are `stride` bytes apart, by `kind` as in `_finish`; what is `ahead` is fetched meanwhile.

    Sums of `integer` are int32 and stand for (sums - excess) * scales * row_scales, the last a number a row, the others
    one a column.
    """

    @by_hand(*[I64] * 9)
    def finish(builder, sums, rows, bias, excess, scales, row_scales, target, stride, ahead):
        added = [v.load(builder, bias, side) for side in SIDES]
        if integer:
            more = [v.load(builder, excess, side, WHOLE) for side in SIDES]
            factors = [v.load(builder, scales, side) for side in SIDES]

        def row(i, nothing):
            here = builder.add(sums, builder.mul(i, LONG(COLUMNS * 4)))
            there = builder.add(target, builder.mul(i, stride))
            if HAS_AMX:
                for line in range(ROW_FETCHES):
                    soon = builder.add(builder.mul(i, LONG(ROW_FETCHES * LINE)), LONG(line * LINE))
                    v.fetch_line(builder, builder.add(ahead, soon))
            if integer:
                every = v.spread(builder, v.load(builder, builder.add(row_scales, builder.shl(i, LONG(2))), 0, FLOAT))
                counts = [v.load(builder, here, side, WHOLE) for side in SIDES]
                counts = [builder.sitofp(builder.sub(*both), VECTOR) for both in zip(counts, more, strict=True)]
                by = [builder.fmul(factor, every) for factor in factors]
                outputs = [v.fma(builder, *three) for three in zip(counts, by, added, strict=True)]
            else:
                sums_of = [v.load(builder, here, side) for side in SIDES]
                outputs = [builder.fadd(*both) for both in zip(sums_of, added, strict=True)]
            if kind == GATE:
                gate = outputs[0]
                negative = builder.fneg(v.larger(builder, gate, v.all16(-88.0)))
                over = builder.fadd(v.exp16(builder, negative), v.all16(1.0))
                outputs = [builder.fdiv(builder.fmul(gate, outputs[1]), over)]
            for side, output in zip(SIDES, outputs, strict=False):
                if kind == ADD:
                    output = builder.fadd(output, v.load(builder, there, side))
                v.store(builder, output, there, side)
            return []

        v.loop(builder, rows, [], row)

    return finish


_store_floats, _add_floats, _gate_floats = (_last_of_rows(kind, False) for kind in (STORE, ADD, GATE))
_store_bytes, _add_bytes, _gate_bytes = (_last_of_rows(kind, True) for kind in (STORE, ADD, GATE))


@by_hand(I64)
def _fetch_to_write(builder, address):
    v.fetch_line(builder, address, 1, 1)


@kernel(types.void(*[I64] * 4), inline="always")
def _ask_to_write(target, stride, rows, width):
    """Has lines ready that `_finish` will write."""
    for i in range(rows):
        _fetch_to_write(target + i * stride)
        if width > 16:
            _fetch_to_write(target + i * stride + (width - 1) * 4)


@kernel(types.void(*[I64] * 12))
def _finish(sums, rows, width, kind, target, stride, bias, integer, excess, scales, row_scales, ahead):
    """Products sums [rows, 32] of a panel to target [rows, width], with bias and scales. With AMX weights that are
    `ahead` are fetched meanwhile.

    STORE: as they are; ADD: added to it; GATE: the panel holds 16 gates and their 16 values, to silu(gate) * value.
    """
    whole = width == (16 if kind == GATE else COLUMNS)
    there, apart = (target, stride) if whole else (sums, COLUMNS * 4)
    if kind == GATE:
        if integer:
            _gate_bytes(sums, rows, bias, excess, scales, row_scales, there, apart, ahead)
        else:
            _gate_floats(sums, rows, bias, excess, scales, row_scales, there, apart, ahead)
    elif kind == ADD and whole:
        if integer:
            _add_bytes(sums, rows, bias, excess, scales, row_scales, there, apart, ahead)
        else:
            _add_floats(sums, rows, bias, excess, scales, row_scales, there, apart, ahead)
    elif integer:
        _store_bytes(sums, rows, bias, excess, scales, row_scales, there, apart, ahead)
    else:
        _store_floats(sums, rows, bias, excess, scales, row_scales, there, apart, ahead)
    for row in range(0 if whole else rows):
        value = carray(_floats(sums + row * apart), (width,))
        output = carray(_floats(target + row * stride), (width,))
        for i in range(width):
            output[i] = value[i] + (output[i] if kind == ADD else np.float32(0.0))


@linked
@kernel(types.void(*[I64] * 17))
def _panels(
    t, threads, gate, turn, a, a_stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, sums
):
    """What a thread takes of a product's panels, in vectors: a [rows, inner], prepared, times w to c [rows, outer]."""
    columns = 16 if kind == GATE else COLUMNS
    panels = (outer + columns - 1) // columns
    integer, rounded, mixed = w_scale > ROUNDED_BF16, w_scale == ROUNDED_BF16, w_scale != 0
    # each: numbers of a step
    a_size, size, each = (BYTE, 1, 4) if integer else (2, 2, 2) if rounded else (4, 2, 2) if mixed else (4, 4, 1)
    parts = (inner + DEPTH * 4 // size - 1) // (DEPTH * 4 // size)
    depth = ((inner + parts - 1) // parts + 7) // 8 * 8
    together = max(1, TAKEN // (inner * COLUMNS * size))
    low, high, empty = next_of(gate, turn, t, threads, panels, together, 0)
    while low < high:
        for p in range(low, high):
            width = min(columns, outer - p * columns)
            scale, excess = w_scale + p * COLUMNS * 4, w_scale + (panels + p) * COLUMNS * 4
            for first in range(0, inner, depth):
                deep = min(depth, inner - first)
                steps = deep // each
                at, nbytes = w + (p * inner + first) * COLUMNS * size, deep * COLUMNS * size
                ahead, gap, part = fetching(rows, at, nbytes, at + nbytes)
                row = 0
                while row < rows:
                    height = height_of(rows - row, False)
                    here, place = a + row * a_stride + first * a_size, sums + row * COLUMNS * 4
                    target = c + row * c_stride + p * columns * 4
                    if first == 0:
                        carray(_floats(place), (height * COLUMNS,))[:] = np.float32(0.0)
                    if first + deep == inner:
                        _ask_to_write(target, c_stride, height, width)
                    if integer:
                        byte_rows(height, here, a_stride, at, COLUMNS * 4, steps, place, COLUMNS * 4, ahead, gap)
                    elif rounded:
                        bf16_rows(height, here, a_stride, at, COLUMNS * 4, steps, place, COLUMNS * 4, ahead, gap)
                    elif mixed:
                        mixed_rows(height, here, a_stride, at, COLUMNS * 4, steps, place, COLUMNS * 4, ahead, gap)
                    else:
                        float_rows(height, here, a_stride, at, COLUMNS * 4, steps, place, COLUMNS * 4, ahead, gap)
                    if first + deep == inner:
                        _finish(
                            place, height, width, kind, target, c_stride, bias + p * COLUMNS * 4, integer, excess,
                            scale, scales + row * 4, 0,
                        )  # fmt: skip
                    row += height
                    ahead += part
        low, high, empty = next_of(gate, turn, t, threads, panels, together, empty)


@kernel(I64(I64, types.boolean), inline="always")
def matrix_steps(inner, integer):
    """Of matrix registers, that so many numbers of a row take: the last one is filled up with zeros."""
    return (inner + DEEP_BYTES - 1) // DEEP_BYTES if integer else (inner + DEEP - 1) // DEEP


@kernel(I64(I64, types.boolean), inline="always")
def padded(inner, integer):
    """Numbers of a column of a panel, with those zeros."""
    return matrix_steps(inner, integer) * (DEEP_BYTES if integer else DEEP) if HAS_AMX else inner


@linked
@kernel(types.void(*[I64] * 17))
def _matrix_panels(
    t, threads, gate, turn, a, group, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, own
):
    """As `_panels` in matrix registers; a: what each 16 rows have become, `group` bytes from one to the next.

    Floats are the sum of parts: see `matrix_tiles`. Up to MATRIX_ROWS rows pass a thread's panels in one stream, so
    that parts of weights are made while others are used; of some more, each MATRIX_ROWS pass a panel in turn, in one
    stream, too. Of many rows the first ones leave the parts of DEPTH_STEPS of a panel's weights to the others. Where a
    panel has more steps, sums of some panels are kept meanwhile, since all parts of long rows would not stay in the
    second cache. Weights that are bfloat16 or bytes are their own only part, for all rows; so are rows that are rounded
    to either. A single row of parts, of which a has them in floats, is for vectors.
    """
    columns, size, passes = 16 if kind == GATE else COLUMNS, COLUMNS * 4, (rows + MATRIX_ROWS - 1) // MATRIX_ROWS
    integer, split, rounded = w_scale > ROUNDED_BF16, w_scale == 0, w_scale >= ROUNDED_BF16
    panels = (outer + columns - 1) // columns
    deep, parts, stream = matrix_steps(inner, integer), own + SUMS_SPACE + LINE, split and passes <= SPLIT_STREAMS
    a_step, w_step = TILE if rounded else TILE * PARTS, FLOAT_STEP if split else PANEL_STEP
    pieces = 1 if passes == 1 else (deep + DEPTH_STEPS - 1) // DEPTH_STEPS
    depth = (deep + pieces - 1) // pieces
    fetches = SPLIT_FETCHES if split else WHOLE_FETCHES
    together = SUMS_PANELS if pieces > 1 else max(1, min(TAKEN // (deep * w_step), SUMS_PANELS))
    gap = max(w_step // fetches // max(passes - 1 if split else passes, 1), 1)
    shape, slot, ready = 0, 0, 0  # ready: the weights whose first parts are made
    low, high, empty = next_of(gate, turn, t, threads, panels, together, 0)
    while low < high:
        for first in range(0, deep, depth):
            steps, fresh, last = min(depth, deep - first), first == 0, first + depth >= deep
            for p in range(low, high):
                at, width = w + (p * deep + first) * w_step, min(columns, outer - p * columns)
                scale, excess = w_scale + p * size, w_scale + (panels + p) * size
                fetched = at + (FAR_AHEAD if passes == 1 else deep * w_step)
                if passes == 1:  # of many rows there are lines enough to wait for
                    _ask_to_write(c + p * columns * 4, c_stride, rows, width)
                for row in range(0, rows, MATRIX_ROWS):
                    height, here = min(rows - row, MATRIX_ROWS), a + row // 16 * group + first * a_step
                    place = own + ((p - low) * LARGEST_BLOCK + row) * size
                    if rows > 1 or rounded:
                        shape = shaped(height, shape)
                    if integer:
                        byte_panel_tile(height, here, group, fetched, steps, place, at, gap, 0, fresh)
                    elif rounded:
                        rounded_tile(height, here, group, fetched, steps, place, at, gap, 0, fresh)
                    elif rows == 1 and split:
                        one_row(a, at, steps, place)
                    elif rows == 1:
                        one_kept_row(a, at, steps, place)
                    elif not split:
                        kept_tile(height, here, group, fetched, steps, place, at, gap, 0, fresh)
                    elif stream or row == 0:
                        again = stream and row + MATRIX_ROWS < rows or pieces > 1 and p + 1 == high
                        after, ring = at if again else at + deep * w_step, -1 if stream else 1
                        if at != ready:
                            split_first(at, parts + slot)
                        carray(_longs(parts - LINE), (1,))[0] = after
                        split_stream_tile(height, here, group, at, steps, place, parts, slot, ring, fresh)
                        if stream:
                            ready, slot = after, PARTS_STEP - slot if steps % 2 else slot
                    else:
                        split_tile(height, here, group, fetched, steps, place, parts, gap, 0, fresh)
                    if row or not split:
                        fetched += gap * fetches * steps
                    if last:
                        soon = at + steps * w_step + FAR_AHEAD if passes == 1 else place
                        _finish(
                            place, height, width, kind, c + row * c_stride + p * columns * 4, c_stride, bias + p * size,
                            integer, excess, scale, scales + row * 4, soon,
                        )  # fmt: skip
        low, high, empty = next_of(gate, turn, t, threads, panels, together, empty)
    if shape:
        set_shape(0)


@linked
@kernel(I64(*[I64] * 7, F32, *[I64] * 11))
def some_linear(
    t, threads, gate, turn, x, x_stride, norm, eps, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, shared,
    own,
):  # fmt: skip
    """A thread's share of a block of rows of `linear`; returns the turn. Few rows every thread prepares for itself. One
    that has them to itself (0 of 1) waits for nobody."""
    a, stride, scales, integer, rounded = x, x_stride, x, w_scale > ROUNDED_BF16, w_scale == ROUNDED_BF16
    plain, one = not (integer or rounded or HAS_AMX), inner * 4 + LINE
    if norm != 0 or not plain:
        few = rows <= MATRIX_ROWS if HAS_AMX else rows < ALONE
        begin, end = (0, rows) if few else (rows * t // threads, rows * (t + 1) // threads)
        normed = own + TILES_SPACE if few else shared + t * one  # a row, but where rows need nothing else
        a = own + TILES_SPACE + one if few else shared + threads * one
        a += -a % LINE
        stride = one if plain else inner * (BYTE if integer else 2) + LINE
        if HAS_AMX:  # of 16 rows
            stride = matrix_steps(inner, integer) * (TILE if integer or rounded else TILE * PARTS)
        scales = a + ((rows + 15) // 16 if HAS_AMX else rows) * stride
        for row in range(begin, end):
            here = x + row * x_stride
            if norm != 0:
                to = a + row * stride if plain else normed
                norm_row(here, inner, norm, eps, to)
                here = to
            place = a + (row // 16 * stride + row % 16 * LINE if HAS_AMX else row * stride)
            if integer:
                quantize_row(here, inner, place, scales + row * 4)
            elif rounded:
                round_row(here, inner, place)
            elif HAS_AMX and rows == 1:
                widen_row(here, inner, place)
            elif HAS_AMX:
                split_row(here, inner, place)
        if not few and threads > 1:
            turn = wait(gate, turn, threads)
    begin_shares(gate, turn, t, threads)
    if HAS_AMX:
        _matrix_panels(
            t, threads, gate, turn, a, stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, own
        )  # fmt: skip
    else:
        _panels(t, threads, gate, turn, a, stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, own)
    return wait(gate, turn, threads) if threads > 1 else turn


@kernel(types.void(*[I64] * 3, F32, *[I64] * 12), parallel=True)
def linear(
    x, x_stride, norm, eps, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, space, own_space, threads,
):  # fmt: skip
    """x [rows, inner], normed first unless `norm` is 0, times packed w, to c [rows, outer]. For GATE a panel gives 16.

    w: [panels, inner, 32] float32, bias [panels, 32]. If `w_scale` is KEPT_BF16 or ROUNDED_BF16, w is [panels,
    inner / 2, 32, 2] bfloat16, and with the second, for HAS_BF16, x is rounded to that, too. Unless it is one of
    these or 0, w is [panels, inner / 4, 32, 4] int8, or [panels, inner / 2, 32, 2] without VNNI, and w_scale
    [panels, 32] multiplies its columns; rows of x become whole numbers, each with its own scale. Behind w_scale lies
    128 times the sum of every column, int32 [panels, 32], since those numbers are 128 above the values they stand for.
    """
    open_gate(space, threads)
    for t in prange(threads):
        own = own_space_of(space, t, threads, own_space)
        shared = own_space_of(space, threads, threads, own_space)
        turn, block = 0, block_of(rows)
        for first in range(0, rows, block):
            turn = some_linear(
                t, threads, space, turn, x + first * x_stride, x_stride, norm, eps, min(block, rows - first), inner, w,
                w_scale, bias, outer, kind, c + first * c_stride, c_stride, shared, own,
            )  # fmt: skip
