"""Copies, and how keys and values are kept: as floats or in half precision."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.engine.kernels import vectors as v
from paceline.engine.kernels.common import I64, LONG, by_hand, kernel


@by_hand(I64, I64, I64)
def copy(builder, target, source, nbytes):
    """As C's memcpy: assigning one slice to another loops over single numbers, in case they overlap."""
    cgutils.raw_memcpy(builder, *(v.at(builder, place, 0, ir.IntType(8)) for place in (target, source)), nbytes, 1)


def _converts(load, store, source_bytes, target_bytes):
    """convert(target, source, count): so many numbers, in whichever precision `load` and `store` have."""

    @by_hand(I64, I64, I64)
    def convert(builder, target, source, count):
        def some(i, left, nothing):
            first, mask = builder.shl(i, LONG(4)), v.mask(builder, left)
            value = load(builder, builder.add(source, builder.mul(first, LONG(source_bytes))), mask)
            store(builder, value, builder.add(target, builder.mul(first, LONG(target_bytes))), mask)
            return []

        v.over(builder, count, 16, [], some, False)

    return convert


_narrow = _converts(v.load_some, v.store_halves, 4, 2)
_widen = _converts(v.load_halves, v.store_some, 2, 4)
halves_to_bf16 = _converts(v.load_halves, v.store_bf16, 2, 2)


@kernel(types.void(I64, I64, I64, I64), inline="always")
def keep(target, source, count, element):
    """Writes floats as keys or values, of `element` bytes."""
    if element == 2:
        _narrow(target, source, count)
    else:
        copy(target, source, count * 4)


@kernel(types.void(I64, I64, I64, I64), inline="always")
def recall(target, source, count, element):
    """Reads keys or values as floats."""
    if element == 2:
        _widen(target, source, count)
    else:
        copy(target, source, count * 4)
