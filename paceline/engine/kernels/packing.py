"""Packing: rows as they lie in a file become panels of `linear`."""

import functools

import numpy as np
import torch
from llvmlite import ir
from numba import carray, prange, types

from paceline.compiled import linked
from paceline.engine.addresses import ints as _ints
from paceline.engine.addresses import longs as _longs
from paceline.engine.kernels import vectors as v
from paceline.engine.kernels.common import BYTE, COLUMNS, I64, LONG, by_hand, kernel
from paceline.engine.kernels.memory import copy
from paceline.engine.kernels.vectors import SHORTS, VECTOR, WHOLE

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # what rows may be of
SIZES = (4, 2, 2)  # bytes of one
LINES = 16  # of a panel that are made together
# What a thread works with, in bytes: lines, then of the rows of a panel sums, peaks, factors and scales.
TOTALS, PEAKS, FACTORS, SCALES, PACKING = (LINES * COLUMNS * 4 + 4 * COLUMNS * i for i in range(5))


def _numbers(builder, element, address, count):
    """16 numbers of a row as float32, exactly; those from `count` (None: 16) on are 0 and not read."""
    mask = v.mask(builder, count)
    if element == 0:
        return v.load_some(builder, address, mask)
    if element == 2:
        return v.load_halves(builder, address, mask)
    bits = builder.zext(v.load_shorts(builder, address, mask), WHOLE)
    return builder.bitcast(builder.shl(bits, v.all16(16, WHOLE)), VECTOR)


def _rounded(builder, element, address, left, factor):
    """64 numbers of a row, of which so many are left, times a factor, rounded to int8: 16 lanes of four."""
    every, parts = v.spread(builder, factor), []
    for first in range(0, 64, 16):
        place = builder.add(address, LONG(first * SIZES[element]))
        value = builder.fmul(_numbers(builder, element, place, builder.sub(left, LONG(first))), every)
        whole = builder.fptosi(v.call(builder, "llvm.nearbyint.v16f32", VECTOR, value), WHOLE)
        parts.append(builder.trunc(whole, ir.VectorType(ir.IntType(8), 16)))
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(count)))
        parts = [builder.shuffle_vector(*pair, lanes) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return builder.bitcast(parts[0], WHOLE)


@by_hand(*[I64] * 8)
def _lines(builder, element, integer, sources, offset, count, factors, sums, target):
    """16 lines of half a panel: what is `offset` numbers behind 16 addresses becomes columns of target [16, 32].

    Lines are of numbers as float32; for `integer` of four numbers each, times their row's factor and rounded to int8,
    which are added to the row's sum; without VNNI a line has two of each of the 32 rows and then the other two. Those
    from `count` on are 0.
    """

    def build(kind, quantized):
        rows, bytes_ = [], builder.mul(offset, LONG(SIZES[kind]))
        for i in range(16):
            source = builder.add(v.load(builder, sources, 8 * i, LONG), bytes_)
            if quantized:
                rows.append(_rounded(builder, kind, source, count, v.load(builder, factors, 4 * i, ir.FloatType())))
            else:
                rows.append(builder.bitcast(_numbers(builder, kind, source, count), WHOLE))
        v.exchange(builder, rows)
        total = v.load(builder, sums, 0, WHOLE)
        for i, row in enumerate(rows):
            if quantized and BYTE == 2:
                for pair, bits in enumerate((row, builder.lshr(row, v.all16(16, WHOLE)))):
                    v.store(builder, builder.trunc(bits, SHORTS), target, 4 * COLUMNS * i + 2 * COLUMNS * pair)
            else:
                v.store(builder, row, target, 4 * COLUMNS * i)
            for left in (24, 16, 8, 0) if quantized else ():
                one = builder.ashr(builder.shl(row, v.all16(left, WHOLE)), v.all16(24, WHOLE))
                total = builder.add(total, one)
        if quantized:
            v.store(builder, total, sums)

    forms = [functools.partial(build, kind, quantized) for quantized in (False, True) for kind in ELEMENTS.values()]
    v.each_of(builder, builder.add(builder.mul(integer, LONG(len(ELEMENTS))), element), forms)


@by_hand(*[I64] * 4)
def _peak(builder, element, source, count, target):
    """The largest magnitude of a row, NaN if there is one: in the order of their bits, which is the same."""

    def build(kind):
        def larger(i, left, values):
            place = builder.add(source, builder.mul(builder.shl(i, LONG(4)), LONG(SIZES[kind])))
            bits = builder.bitcast(_numbers(builder, kind, place, left), WHOLE)
            bits = builder.and_(bits, v.all16(0x7FFFFFFF, WHOLE))
            return [builder.select(builder.icmp_signed(">", bits, values[0]), bits, values[0])]

        (top,) = v.over(builder, count, 16, [v.all16(0, WHOLE)], larger)
        v.store(builder, v.call(builder, "llvm.vector.reduce.umax.v16i32", ir.IntType(32), top), target)

    v.each_of(builder, element, [functools.partial(build, kind) for kind in ELEMENTS.values()])


@by_hand(I64, I64, I64)
def _scales(builder, peaks, factors, scales):
    """Of 32 rows, in the operations of `linear.quantize`: 127 times 1 / peak, 0 of 0 and of NaN, and peak / 127."""
    for half in (0, 64):
        peak = v.load(builder, peaks, half)
        factor = builder.fmul(builder.fdiv(v.all16(1.0), peak), v.all16(127.0))
        factor = builder.select(builder.fcmp_ordered(">", peak, v.all16(0.0)), factor, v.all16(0.0))
        v.store(builder, factor, factors, half)
        v.store(builder, builder.fdiv(peak, v.all16(127.0)), scales, half)


@kernel(types.void(*[I64] * 4), fastmath=False)
def _put(made, place, nbytes, differs):
    """Copies to `place`, or sets `differs` where something else is there."""
    if differs == 0:
        copy(place, made, nbytes)
        return
    ours, theirs, different = carray(_ints(made), (nbytes // 4,)), carray(_ints(place), (nbytes // 4,)), 0
    for i in range(nbytes // 4):
        different |= ours[i] ^ theirs[i]
    if different != 0:
        carray(_longs(differs), (1,))[0] = 1


@linked
@kernel(types.void(*[I64] * 12), fastmath=False)
def _some_panels(begin, end, panels, pitch, rows, element, inner, integer, target, scales, differs, own):
    """A thread's share of `pack`; `own` is its work space."""
    each = 4 if integer else 1  # numbers of a row in a line
    lines = inner // each
    for panel in range(begin, end):
        if differs != 0 and carray(_longs(differs), (1,))[0] != 0:
            return
        sources = rows + panel * COLUMNS * 8
        if integer:
            source = carray(_longs(sources), (COLUMNS,))
            for i in range(COLUMNS):
                _peak(element, source[i], inner, own + PEAKS + i * 4)
            _scales(own + PEAKS, own + FACTORS, own + SCALES)
            carray(_ints(own + TOTALS), (COLUMNS,))[:] = 0
        for line in range(0, lines, LINES):
            count = min(LINES, lines - line)
            place = target + panel * pitch + line * COLUMNS * 4
            made = place if count == LINES and differs == 0 else own
            for half in (0, 64):
                _lines(
                    element, integer, sources + 2 * half, line * each, (lines - line) * each, own + FACTORS + half,
                    own + TOTALS + half, made + (half // 2 if integer and BYTE == 2 else half),
                )  # fmt: skip
            if made != place:
                _put(made, place, count * COLUMNS * 4, differs)
        if integer:
            sums = carray(_ints(own + TOTALS), (COLUMNS,))
            for i in range(COLUMNS):
                sums[i] *= 128
            _put(own + SCALES, scales + panel * COLUMNS * 4, COLUMNS * 4, differs)
            _put(own + TOTALS, scales + (panels + panel) * COLUMNS * 4, COLUMNS * 4, differs)


@kernel(types.void(*[I64] * 10), fastmath=False, parallel=True)
def pack(panels, pitch, rows, element, inner, integer, target, scales, differs, threads):
    """Rows of `inner` numbers at the addresses `rows` [panels, 32] to [panels, inner, 32] at `target`, where panels are
    `pitch` bytes apart.

    `element` is one of ELEMENTS. For `integer` to panels of int8 as `linear` takes them, each row by its own scale, and
    at `scales` [2, panels, 32] the scales and 128 times the sums of the rows. With `differs` nothing is written there:
    that is set to 1 where anything but this is there already.
    """
    for t in prange(threads):
        own = np.empty(PACKING, np.uint8)
        begin, end = panels * t // threads, panels * (t + 1) // threads  # neighbours: threads share few large pages
        _some_panels(begin, end, panels, pitch, rows, element, inner, integer, target, scales, differs, own.ctypes.data)
