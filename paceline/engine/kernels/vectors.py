"""Vector instructions by hand: loops over memory that may overlap stay scalar, ten times slower."""

import numpy as np
from llvmlite import ir

from paceline.engine.kernels.common import LONG, VECTOR_BYTES
from paceline.processor import HAS_AVX512, HAS_BF16

# of e^r, |r| <= ln 2 / 2, from the highest power on: the best of degree 5 that are 1 in 0, to 9.2e-8
EXP = 8.290229365e-3, 4.189839214e-2, 1.666764021e-1, 4.999914467e-1, 9.999997020e-1, 1.0
LOG2E = np.float32(1.4426950408889634)
FLOAT, VECTOR, WHOLE = ir.FloatType(), ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.IntType(32), 16)
LANES = ir.Constant(WHOLE, list(range(16)))
HALVES, SHORTS = ir.VectorType(ir.HalfType(), 16), ir.VectorType(ir.IntType(16), 16)
SUMS = VECTOR_BYTES // 4  # that a register holds
SIDES = 0, 64  # where 16 of 32 floats begin
ROUNDS = 12582912.0  # 1.5 * 2^23: what is added to it is rounded, and a whole number in its last bits


def at(builder, address, offset=0, kind=VECTOR):
    """A pointer to what lies `offset` bytes behind an address."""
    return builder.inttoptr(builder.add(address, LONG(offset)) if offset else address, kind.as_pointer())


def load(builder, address, offset=0, kind=VECTOR):
    return builder.load(at(builder, address, offset, kind), align=4)


def store(builder, value, address, offset=0):
    builder.store(value, at(builder, address, offset, value.type), align=4)


def call(builder, name, result, *operands):
    """Of a function of LLVM."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), operands)


def fma(builder, *operands):
    kind = operands[0].type
    return call(builder, f"llvm.fma.v{kind.count}f32", kind, *operands)


def all16(value, kind=VECTOR):
    return ir.Constant(kind, [value] * 16)


def spread(builder, number):
    """16 times a number."""
    lanes = ir.Constant(ir.VectorType(number.type, 16), ir.Undefined)
    one = builder.insert_element(lanes, number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, all16(0, WHOLE))


def pick(builder, first, second, lanes):
    """Numbers of two vectors; those of the second one are numbered on."""
    kind = ir.VectorType(ir.IntType(32), len(lanes))
    return builder.shuffle_vector(first, second, ir.Constant(kind, [int(lane) for lane in lanes]))


def mask(builder, left):
    """A mask of the first `left` lanes, all where it is above 16; None of None."""
    return left and builder.icmp_signed("<", LANES, spread(builder, builder.trunc(left, ir.IntType(32))))


def load_some(builder, address, mask):
    """16 numbers, 0 where `mask` is not set (None: it is, everywhere); those are not read."""
    if mask is None:
        return load(builder, address)
    zeros = ir.Constant(VECTOR, None)
    name = "llvm.masked.load.v16f32.p0"
    return call(builder, name, VECTOR, at(builder, address), ir.IntType(32)(4), mask, zeros)


def store_some(builder, value, address, mask):
    if mask is None:
        store(builder, value, address)
        return
    none, name = ir.VoidType(), "llvm.masked.store.v16f32.p0"
    call(builder, name, none, value, at(builder, address), ir.IntType(32)(4), mask)


def load_shorts(builder, address, mask):
    """As `load_some`, of numbers of 16 bits."""
    place, whole, zeros = at(builder, address, 0, SHORTS), ir.IntType(16), ir.Constant(SHORTS, None)
    if mask is None:
        return builder.load(place, align=2)

    def load(builder, place, mask):
        return call(builder, "llvm.masked.load.v16i16.p0", SHORTS, place, ir.IntType(32)(2), mask, zeros)

    if HAS_AVX512:
        return load(builder, place, mask)
    name = "paceline.load_shorts"  # a function, since without masks for such numbers there is a branch for each
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(SHORTS, [place.type, mask.type]), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block())
        with inside.if_then(inside.icmp_unsigned("==", inside.bitcast(function.args[1], whole), whole(0xFFFF))):
            inside.ret(inside.load(function.args[0], align=2))
        inside.ret(load(inside, *function.args))
    return builder.call(function, [place, mask])


def load_halves(builder, address, mask):
    """As `load_some`, of half-precision numbers."""
    return builder.fpext(builder.bitcast(load_shorts(builder, address, mask), HALVES), VECTOR)


def store_halves(builder, value, address, mask):
    """As `store_some`, rounded to half precision."""
    store_shorts(builder, builder.bitcast(builder.fptrunc(value, HALVES), SHORTS), address, mask)


def store_bf16(builder, value, address, mask):
    """As `store_some`, rounded to bfloat16."""
    store_shorts(builder, bf16(builder, value), address, mask)


def store_shorts(builder, bits, address, mask):
    place, name = at(builder, address, 0, SHORTS), "llvm.masked.store.v16i16.p0"
    if mask is None:
        builder.store(bits, place, align=2)
    else:
        call(builder, name, ir.VoidType(), bits, place, ir.IntType(32)(2), mask)


def bf16(builder, value):
    """The bits of 16 floats, rounded to bfloat16. Without such instructions nobody uses it."""
    if not HAS_BF16:
        return ir.Constant(SHORTS, None)
    kind = ir.FunctionType(SHORTS, [VECTOR])
    return builder.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v", False), [value])


def pair(builder, low, high):
    """16 times two floats, rounded to bfloat16, in 32 bits. As `bf16`."""
    if not HAS_BF16:
        return ir.Constant(VECTOR, None)
    shorts = ir.VectorType(ir.IntType(16), 32)
    kind = ir.FunctionType(shorts, [VECTOR, VECTOR])
    both = builder.call(ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", False), [low, high])
    return builder.bitcast(pick(builder, both, both, np.arange(32) // 2 + np.arange(32) % 2 * 16), VECTOR)


def loop(builder, count, firsts, turn):
    """values = turn(i, values) for i in range(count), count > 0, beginning with `firsts`; returns the last ones."""
    entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    i, values = builder.phi(LONG), [builder.phi(first.type) for first in firsts]
    afters, last = turn(i, values), builder.block
    more = builder.add(i, LONG(1))
    for phi, before, after in zip([i, *values], [LONG(0), *firsts], [more, *afters], strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(after, last)
    builder.cbranch(builder.icmp_signed("<", more, count), loop, end)
    builder.position_at_end(end)
    return afters


def over(builder, count, each, firsts, turn, masks=HAS_AVX512):
    """values = turn(i, left, values) for every `each`, a power of 2, of `count` numbers; returns the last ones.

    `left` is how many there are from these on, or None where all are there; with `masks`, which cost little with
    AVX-512 alone, never None.
    """
    bits = LONG(each.bit_length() - 1)
    if masks:
        parts = builder.lshr(builder.add(count, LONG(each - 1)), bits)
        return loop(builder, parts, firsts, lambda i, now: turn(i, builder.sub(count, builder.shl(i, bits)), now))

    def where(condition, values, build):
        before = builder.block
        with builder.if_then(condition):
            afters, after = build(values), builder.block
        joined = [builder.phi(value.type) for value in values]
        for phi, old, new in zip(joined, values, afters, strict=True):
            phi.add_incoming(old, before)
            phi.add_incoming(new, after)
        return joined

    whole = builder.lshr(count, bits)
    left = builder.sub(count, builder.shl(whole, bits))
    some, more = (builder.icmp_signed(">", number, LONG(0)) for number in (whole, left))
    values = where(some, firsts, lambda values: loop(builder, whole, values, lambda i, now: turn(i, None, now)))
    return where(more, values, lambda values: turn(whole, left, values))


def each_of(builder, choice, cases):
    """Runs cases[choice](), which build nothing that is used later."""
    done = builder.append_basic_block("done")
    which = builder.switch(choice, done)
    for number, case in enumerate(cases):
        block = builder.append_basic_block(f"case{number}")
        which.add_case(LONG(number), block)
        builder.position_at_end(block)
        case()
        builder.branch(done)
    builder.position_at_end(done)


def exp16(builder, x):
    """e^x of 16 numbers up to 88, relative error below 2e-7; 0 below -87.7, where it is denormal.

    x = n ln 2 + r, |r| <= ln 2 / 2: a polynomial in r, then n into the exponent's bits. n, rounded, is in the last bits
    of x / ln 2 + ROUNDS.
    """
    x = larger(builder, all16(-88.0), x)  # n = -127: the power is 0
    shifted = fma(builder, x, all16(float(LOG2E)), all16(ROUNDS))
    n, r = builder.fsub(shifted, all16(ROUNDS)), x
    for part in -0.693359375, 2.12194440e-4:
        r = fma(builder, n, all16(float(np.float32(part))), r)
    first, *others = EXP
    p = all16(float(np.float32(first)))
    for coefficient in others:
        p = fma(builder, p, r, all16(float(np.float32(coefficient))))
    power = builder.shl(builder.add(builder.bitcast(shifted, WHOLE), all16(127, WHOLE)), all16(23, WHOLE))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def fetch_line(builder, address, write: int = 0, cache: int = 2):
    """Has a line of a cache, 1 or 2, ready that will be read or written soon."""
    byte, whole = ir.IntType(8), ir.IntType(32)
    place = at(builder, address, 0, byte)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, whole(write), whole(4 - cache), whole(1))


def larger(builder, new, old):
    return builder.select(builder.fcmp_ordered(">", new, old), new, old)


def across(builder, value, join):
    """What `join` makes of all 16 numbers of a vector, in each of them."""
    for bit in (8, 4, 2, 1):
        value = join(value, pick(builder, value, value, np.arange(16) ^ bit))
    return value


def exchange(builder, rows):
    """Transposes 16 vectors of 16 in place."""
    lanes = np.arange(16)
    for bit in (1, 2, 4, 8):  # exchanges this bit of a number's row and column
        for i in (i for i in range(16) if not i & bit):
            pair, other = (rows[i], rows[i | bit]), (lanes & bit > 0) * 16
            rows[i], rows[i | bit] = (pick(builder, *pair, (lanes & ~bit | own) + other) for own in (0, bit))
