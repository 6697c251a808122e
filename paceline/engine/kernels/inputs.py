"""What rows become before a product: normed, whole numbers, parts of bfloat16."""

import functools

from llvmlite import ir

from paceline.engine.kernels import vectors as v
from paceline.engine.kernels.common import BYTE, DEEP, DEEP_BYTES, F32, I64, LONG, PARTS, TILE, by_hand
from paceline.engine.kernels.vectors import FLOAT, SHORTS, VECTOR, WHOLE
from paceline.processor import HAS_AMX


@by_hand(I64, I64, I64, F32, I64)
def norm_row(builder, x, width, norm, eps, out):
    """x [width], normed by its root mean square and `norm` [width], to out."""
    parts = range(4)  # vectors at a time, whose sums are added in the end

    def places(i, left):
        first = builder.shl(i, LONG(8))
        masks = [v.mask(builder, left and builder.sub(left, LONG(16 * part))) for part in parts]
        return [builder.add(first, LONG(64 * part)) for part in parts], masks

    def square(i, left, sums):
        values = [v.load_some(builder, builder.add(x, at), mask) for at, mask in zip(*places(i, left), strict=True)]
        return [v.fma(builder, value, value, total) for value, total in zip(values, sums, strict=True)]

    def scaled(i, left, nothing):
        for at, mask in zip(*places(i, left), strict=True):
            value, weight = (v.load_some(builder, builder.add(base, at), mask) for base in (x, norm))
            value = builder.fmul(builder.fmul(value, every), weight)
            v.store_some(builder, value, builder.add(out, at), mask)
        return []

    sums = v.over(builder, width, 64, [v.all16(0.0)] * 4, square, False)
    total = v.across(builder, functools.reduce(builder.fadd, sums), builder.fadd)
    mean = builder.fdiv(builder.extract_element(total, ir.IntType(32)(0)), builder.sitofp(width, FLOAT))
    root = v.call(builder, "llvm.sqrt.f32", FLOAT, builder.fadd(mean, eps))
    every = v.spread(builder, builder.fdiv(FLOAT(1.0), root))
    v.over(builder, width, 64, [], scaled, False)


@by_hand(I64, I64, I64, I64)
def quantize_row(builder, x, width, out, scale):
    """x [width] to out, in BYTE bytes: 128 + x / scale, with the scale that is written: its largest over 127. Behind
    them up to 15 more are written. With AMX to one of 16 rows of [width / DEEP_BYTES, 16, DEEP_BYTES]."""
    bits, shift = ir.VectorType(ir.IntType(8 * BYTE), 16), LONG((16 * BYTE).bit_length() - 1)

    def place(i):
        return builder.add(x, builder.shl(i, LONG(6)))

    def there(i):
        if not HAS_AMX:
            return builder.shl(i, shift)
        step, within = (divide(i, LONG(DEEP_BYTES // 16)) for divide in (builder.udiv, builder.urem))
        return builder.add(builder.mul(step, LONG(TILE)), builder.shl(within, shift))

    def larger(one, other):  # as integers: the order is that of absolute values, and a NaN is above them all
        return builder.select(builder.icmp_signed(">", one, other), one, other)

    def look(i, left, values):
        value = builder.bitcast(v.load_some(builder, place(i), v.mask(builder, left)), WHOLE)
        return [larger(builder.and_(value, v.all16(0x7FFFFFFF, WHOLE)), values[0])]

    (found,) = v.over(builder, width, 16, [v.all16(0, WHOLE)], look, False)
    found = builder.bitcast(v.across(builder, found, larger), VECTOR)
    peak = builder.extract_element(found, ir.IntType(32)(0))
    builder.store(builder.fdiv(peak, FLOAT(127.0)), v.at(builder, scale, 0, FLOAT), align=4)
    inverse = builder.fdiv(FLOAT(127.0), peak)
    inverse = builder.select(builder.fcmp_unordered("!=", peak, FLOAT(0.0)), inverse, FLOAT(0.0))
    every = v.spread(builder, inverse)

    def whole(i, left, nothing):
        value = builder.fmul(v.load_some(builder, place(i), v.mask(builder, left)), every)
        value = builder.add(v.call(builder, "llvm.lrint.v16i32.v16f32", WHOLE, value), v.all16(128, WHOLE))
        target = v.at(builder, builder.add(out, there(i)), 0, bits)
        builder.store(builder.trunc(value, bits), target, align=BYTE)
        return []

    v.over(builder, width, 16, [], whole, False)


def _split_row_of(wide: bool, parts: int = PARTS):
    """split(x, width, out): the first so many parts of x [width], filled up with zeros, to out: to one of 16 rows of
    [width / DEEP, parts, 16, DEEP] bfloat16, or if `wide` to [width / DEEP, parts, DEEP] as float32. Without AMX only
    one part of a row is of use, [width], behind which up to 31 zeros are written."""

    @by_hand(I64, I64, I64)
    def split(builder, x, width, out):
        each = 4 * DEEP if wide else TILE if HAS_AMX else 2 * DEEP

        def some(i, left, nothing):
            source = builder.add(x, builder.shl(i, LONG(7)))
            target = builder.add(out, builder.mul(i, LONG(parts * each)))
            for half in (0, 1):
                mask = v.mask(builder, left and builder.sub(left, LONG(16 * half)))
                rest = v.load_some(builder, builder.add(source, LONG(64 * half)), mask)
                for part in range(parts):
                    bits = v.bf16(builder, rest)
                    number = builder.bitcast(builder.shl(builder.zext(bits, WHOLE), v.all16(16, WHOLE)), VECTOR)
                    if wide:
                        v.store(builder, number, target, each * part + 64 * half)
                    else:
                        builder.store(bits, v.at(builder, target, each * part + 32 * half, SHORTS), align=2)
                    rest = builder.fsub(rest, number)
            return []

        v.over(builder, width, DEEP, [], some)

    return split


split_row, widen_row, round_row = _split_row_of(False), _split_row_of(True), _split_row_of(False, 1)
