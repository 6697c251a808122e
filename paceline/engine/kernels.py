"""Kernels of the CPU path: linear layers with what comes before and after, rotations, attention over the paged cache.

All products are made of one tile, up to 12 rows of activations times 32 columns of packed weights, whose 24 vector
accumulators stay in registers while the weights stream by once: what 12 rows cost is what one costs. While more rows
pass the same weights again, from the cache, the next ones are fetched from memory, in equal parts a pass. Sums run over
the inner dimension in one order whatever the number of rows, so a sequence's bits do not depend on its batch.

Tiles are written in assembly, since no loop that a compiler sees keeps its sums in registers this way with so few other
instructions; Numba compiles them once per machine (30 s, cached). Addresses are passed instead of arrays: taking
an array apart costs a microsecond a call. One file on purpose: Numba's cache notices changes only in a kernel's own
file.
"""

import functools
import platform
import threading

import numba
import numpy as np
import torch  # noqa: F401 - before Numba's threads start, so that both use torch's OpenMP library
from llvmlite import binding, ir
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

if platform.machine() not in ("x86_64", "AMD64"):
    raise ImportError("these kernels are written for x86-64")  # torch's operators take their place
binding.initialize_native_asmparser()
numba.config.THREADING_LAYER = "omp"
numba.get_num_threads()  # starts them: a ValueError here and now where that layer cannot be had

FEATURES = binding.get_host_cpu_features()
HAS_AVX512 = all(FEATURES.get(name, False) for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq"))
HAS_VNNI = HAS_AVX512 and FEATURES.get("avx512vnni", False)

ROWS, FEWER, COLUMNS = 12, 8, 32  # of a tile; of one for what is left, before a lower one
HEIGHTS = (*range(1, FEWER + 1), ROWS)
REGISTERS = "%rdi", "%rsi", "%rdx", "%rcx", "%r8", "%r9", "%r10", "%r11", "%rax"  # a tile's arguments
SCRATCH = "%r12", "%r13", "%r14", "%r15"
AHEAD = 4096  # bytes from weights in use to those that are fetched meanwhile, where one pass takes all rows
LINE = 64  # bytes of the caches; rows of buffers lie one line more apart, since the first cache keeps few of rows that
# lie powers of 2 apart
DEPTH = 1024  # weights of a panel that stay in the second cache while all rows pass: DEPTH x COLUMNS floats
ALONE = 16  # rows from which norms, rotations and the like are shared out to threads
QUERIES, BLOCK_ROWS, KEYS = 32, 256, 128  # chunk attention: least tokens and rows of a block of queries, and of keys
BLOCK = 192  # rows that pass a panel of weights together: with two panels they fit into the second cache
SPINS = 1024  # looks at a gate before a core is offered to others; a power of 2
STORE, ADD, GATE = 0, 1, 2  # what becomes of a product: see `_finish`

FAST = {"reassoc", "contract", "nsz", "arcp"}  # everything but ignoring infinities and NaNs, which must come through
I64, F32 = types.int64, types.float32
OPTIONS = {"nogil": True, "fastmath": FAST, "cache": True}
EXP = tuple(np.float32(c) for c in (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
))  # fmt: skip
# Unsigned: Numba tests a computed signed index for being negative, and that keeps loops from being vectorised.
ZERO, ONE, TWO, THREE, FOUR = (np.uint64(n) for n in range(5))
FLOATS, INTS, SIZE = types.float32[::1], types.int64[::1], types.uint64
CHUNK = (FLOATS, FLOATS, FLOATS, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE)


# Memory by address


def _pointer(element):
    @intrinsic
    def pointer(context, address):
        kind = types.CPointer(element)

        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return pointer


_floats, _ints, _bytes, _longs = (_pointer(kind) for kind in (types.float32, types.int32, types.uint8, types.int64))


@intrinsic
def _float_of_bits(context, bits):
    """The float32 whose bits an int32 has."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@intrinsic
def _copy(context, target, source, nbytes):
    """As C's memcpy: assigning one slice to another loops over single numbers, in case they overlap."""

    def generate(context, builder, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@njit(inline="always", **OPTIONS)
def _exp(x):
    """e^x for x <= 0, float32, in operations that compile to vector instructions; relative error below 1e-7.

    x = n ln 2 + r, |r| <= ln 2 / 2: a polynomial in r (the one of Cephes' expf), then n into the exponent's bits.
    """
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = EXP[0]
    for coefficient in EXP[1:]:
        p = p * r + coefficient
    p = p * r * r + r + np.float32(1.0)
    return p * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


# The tile


def _assembly(rows: int, integer: bool, across: bool) -> str:
    """A tile: the sums of row r are in registers 2 r and 2 r + 1, a step's weights in 24 and 25."""
    a, stride, w, w_stride, steps, c, c_stride, ahead, gap = REGISTERS
    four, eight, three, place = SCRATCH  # a four and eight rows on, three strides, where a row of sums is in memory
    multiply, everywhere = ("vpdpbusd", "vpbroadcastd") if integer else ("vfmadd231ps", "vbroadcastss")
    bases = (a,) if across else (a, four, eight)[: (rows + 3) // 4]

    def sums(line: str) -> list[str]:
        """`line` for every half of a row of sums, with its address and its register."""
        lines = [f"movq {c}, {place}"]
        for row in range(rows):
            lines += [line.format(f"{64 * half}({place})", f"%zmm{2 * row + half}") for half in (0, 1)]
            lines.append(f"addq {c_stride}, {place}")
        return lines

    lines = [f"leaq ({stride},{stride},2), {three}", f"leaq ({a},{stride},4), {four}"]
    lines += [f"leaq ({four},{stride},4), {eight}", *sums("vmovups {}, {}"), "1:"]
    for step, here in enumerate((f"({w})", f"({w},{w_stride})")):
        lines += [f"vmovups {here}, %zmm24", f"vmovups 64{here}, %zmm25"]
        lines += [f"prefetcht0 ({ahead})", f"prefetcht0 64({ahead})", f"addq {gap}, {ahead}"]
        for row in range(rows):
            index = ("", f",{stride}", f",{stride},2", f",{three}")[step if across else row % 4]
            value = f"{4 * row}({a}{index})" if across else f"{4 * step}({bases[row // 4]}{index})"
            one = f"%zmm{26 + row % 6}"
            if index or integer or row % 4:
                lines.append(f"{everywhere} {value}, {one}")
            else:
                one = value + "{{1to16}}"  # fewer instructions, more loads: for some rows
            for half in (0, 1):
                first, second = (f"%zmm{24 + half}", one) if integer else (one, f"%zmm{24 + half}")
                lines.append(f"{multiply} {first}, {second}, %zmm{2 * row + half}")
    on = [f"leaq ({a},{stride},2), {a}"] if across else [f"addq $$8, {base}" for base in bases]
    lines += [f"leaq ({w},{w_stride},2), {w}", *on, f"subq $$2, {steps}", "jg 1b"]
    return "\n".join([*lines, *sums("vmovups {1}, {0}")]).replace("{{1to16}}", "{1to16}")


def _tile_of(integer: bool = False, across: bool = False):
    """tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap): c[rows, 32] += a[rows, steps] w[steps, 32].

    Addresses and strides in bytes; `rows` is one of HEIGHTS, `steps` is even. Floats, or for `integer` 4 unsigned bytes
    of `a` and 4 signed bytes of every column of `w` a step, summed in int32 (VNNI). `across`: a is [steps, rows] in
    memory. Every step fetches two lines at `ahead`, which then moves on by `gap`.
    """
    long = ir.IntType(64)
    changed = [f"={{{register[1:]}}}" for register in REGISTERS]
    kept = [str(index) for index in range(len(REGISTERS))]
    lost = [f"~{{{register[1:]}}}" for register in SCRATCH] + [f"~{{zmm{i}}}" for i in range(32)]
    constraint = ",".join([*changed, *kept, *lost, "~{memory}", "~{flags}"])
    function = ir.FunctionType(ir.LiteralStructType([long] * len(REGISTERS)), [long] * len(REGISTERS))

    @intrinsic
    def tile(context, rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
        def generate(context, builder, signature, arguments):
            done = builder.append_basic_block("done")
            choice = builder.switch(arguments[0], done)
            for count in HEIGHTS if HAS_AVX512 else ():  # elsewhere nobody calls it, and the assembler refuses it
                block = builder.append_basic_block(f"rows{count}")
                choice.add_case(long(count), block)
                builder.position_at_end(block)
                builder.call(ir.InlineAsm(function, _assembly(count, integer, across), constraint, True), arguments[1:])
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return tile


_float_tile, _across_tile = _tile_of(), _tile_of(across=True)
_byte_tile = _tile_of(integer=HAS_VNNI)  # without VNNI there are no int8 weights


# Each compiled once: what they are used in would hold a copy.


@njit(types.void(*[I64] * 10), **OPTIONS)
def _float_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    _float_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@njit(types.void(*[I64] * 10), **OPTIONS)
def _across_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    _across_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@njit(types.void(*[I64] * 10), **OPTIONS)
def _byte_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    _byte_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@njit(I64(I64), inline="always", **OPTIONS)
def _height(left):
    """Of the next tile, with so many rows left."""
    return ROWS if left >= ROWS else min(left, FEWER)


@njit(I64(I64), inline="always", **OPTIONS)
def _block(rows):
    """Of rows that go through linear layers together: equal parts, since few rows cost what many do."""
    parts = (rows + BLOCK - 1) // BLOCK
    return ((rows + parts - 1) // parts + ROWS - 1) // ROWS * ROWS


@njit(types.void(*[I64] * 8), **OPTIONS)
def _product(rows, a, a_stride, w, w_stride, steps, c, c_stride):
    """c[rows, 32] += a[rows, steps] w[steps, 32] of floats that are in a cache: nothing has to be fetched ahead."""
    row = 0
    while row < rows:
        height = _height(rows - row)
        _float_rows(height, a + row * a_stride, a_stride, w, w_stride, steps, c + row * c_stride, c_stride, w, 0)
        row += height


@njit(types.void(*[I64] * 8), **OPTIONS)
def _product_across(rows, a, a_stride, w, w_stride, steps, c, c_stride):
    """The same with a [steps, rows]."""
    row = 0
    while row < rows:
        height = _height(rows - row)
        _across_rows(height, a + row * 4, a_stride, w, w_stride, steps, c + row * c_stride, c_stride, w, 0)
        row += height


@njit(types.UniTuple(I64, 3)(*[I64] * 4), **OPTIONS)
def _fetching(rows, w, nbytes, following):
    """`ahead` and `gap` of the first tile of rows that pass weights w, and how far the next one's `ahead` is.

    Those at `following` are needed next: every pass fetches its share. A single pass fetches what it needs itself soon.
    """
    left = rows % ROWS
    passes = rows // ROWS + left // FEWER + (left % FEWER > 0)
    if passes == 1:
        return w + AHEAD, 2 * LINE, 0
    part = nbytes // passes // LINE * LINE
    return following, part // (nbytes // (2 * LINE)) + 1, part


# Rows of 32 sums, as vector instructions by hand: loops over memory that may overlap stay scalar, ten times slower.

VECTOR, WHOLE, LONG = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.IntType(32), 16), ir.IntType(64)


def _all16(value, kind=VECTOR):
    return ir.Constant(kind, [value] * 16)


def _call16(builder, name, *operands):
    known = builder.module.globals.get(name)
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(operands))
    return builder.call(known or ir.Function(builder.module, kind, name), operands)


def _exp16(builder, x):
    """`_exp` of 16 numbers <= 0; n comes rounded from the last bits of x / ln 2 + 1.5 x 2^23."""
    fma, bits = "llvm.fma.v16f32", WHOLE
    x = builder.select(builder.fcmp_ordered(">", _all16(-87.0), x), _all16(-87.0), x)
    shifted = _call16(builder, fma, x, _all16(float(np.float32(1.4426950408889634))), _all16(12582912.0))
    power = builder.sub(builder.bitcast(shifted, bits), _all16(0x4B400000, bits))
    n = builder.sitofp(power, VECTOR)
    r = _call16(builder, fma, n, _all16(-0.693359375), x)
    r = _call16(builder, fma, n, _all16(float(np.float32(2.12194440e-4))), r)
    p = _all16(float(EXP[0]))
    for coefficient in EXP[1:]:
        p = _call16(builder, fma, p, r, _all16(float(coefficient)))
    p = builder.fadd(_call16(builder, fma, builder.fmul(p, r), r, r), _all16(1.0))
    power = builder.shl(builder.add(power, _all16(127, bits)), _all16(23, bits))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def _last_of_row(kind: int, integer: bool):
    """finish(sums, bias, excess, scales, scale, target): 32 sums become outputs at `target`, by `kind` as in `_finish`.

    Sums of `integer` are int32 and stand for (sums - excess) * scales * scale, all but `scale` a number a column.
    """

    @intrinsic
    def finish(context, sums, bias, excess, scales, scale, target):
        def generate(context, builder, signature, arguments):
            sums, bias, excess, scales, scale, target = arguments

            def at(address, half, kind=VECTOR):
                return builder.inttoptr(builder.add(address, LONG(64 * half)), kind.as_pointer())

            def load(address, half, kind=VECTOR):
                return builder.load(at(address, half, kind), align=4)

            def value(half):
                if not integer:
                    return builder.fadd(load(sums, half), load(bias, half))
                one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scale, ir.IntType(32)(0))
                every = builder.shuffle_vector(one, one, _all16(0, WHOLE))
                counts = builder.sub(load(sums, half, WHOLE), load(excess, half, WHOLE))
                product = builder.fmul(builder.sitofp(counts, VECTOR), builder.fmul(load(scales, half), every))
                return builder.fadd(product, load(bias, half))

            outputs = [value(0), value(1)]
            if kind == GATE:
                gate = outputs[0]
                small = _exp16(builder, builder.fneg(_call16(builder, "llvm.fabs.v16f32", gate)))
                above = builder.select(builder.fcmp_ordered(">=", gate, _all16(0.0)), _all16(1.0), small)
                sigmoid = builder.fdiv(above, builder.fadd(small, _all16(1.0)))
                outputs = [builder.fmul(builder.fmul(gate, sigmoid), outputs[1])]
            for half, output in enumerate(outputs):
                if kind == ADD:
                    output = builder.fadd(output, load(target, half))
                builder.store(output, at(target, half), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(i64, i64, i64, i64, types.float32, i64), generate

    return finish


_store_floats, _add_floats, _gate_floats = (_last_of_row(kind, False) for kind in (STORE, ADD, GATE))
_store_bytes, _add_bytes, _gate_bytes = (_last_of_row(kind, True) for kind in (STORE, ADD, GATE))


@intrinsic
def _fetch_to_write(context, address):
    """Has a line of the caches ready that will be written soon: 24 lines that have to come first cost 200 ns."""

    def generate(context, builder, signature, arguments):
        byte, whole = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [builder.inttoptr(arguments[0], byte), whole(1), whole(3), whole(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _soften(context, scores, count, peaks, totals, shrink):
    """Online softmax of 32 queries over scores [count, 32], which become weights.

    peaks[0:32] and totals[0:32] are of what came before, then with these; what came before shrinks by shrink[0:32].
    """

    def generate(context, builder, signature, arguments):
        scores, count, peaks, totals, shrink = arguments
        halves = 0, 1

        def at(address, half):
            return builder.inttoptr(builder.add(address, LONG(64 * half)), VECTOR.as_pointer())

        def load(address):
            return [builder.load(at(address, half), align=4) for half in halves]

        def over(firsts, turn):
            """A loop over the rows: `turn(place, half, value so far)` gives the next value; returns the last ones."""
            entry, loop, end = builder.block, builder.append_basic_block("row"), builder.append_basic_block("end")
            builder.branch(loop)
            builder.position_at_end(loop)
            row, values = builder.phi(LONG), [builder.phi(VECTOR) for _ in halves]
            line = builder.add(scores, builder.mul(row, LONG(COLUMNS * 4)))
            afters = [turn(at(line, half), half, values[half]) for half in halves]
            more = builder.add(row, LONG(1))
            for phi, begin, last in zip([row, *values], [LONG(0), *firsts], [more, *afters], strict=True):
                phi.add_incoming(begin, entry)
                phi.add_incoming(last, loop)
            builder.cbranch(builder.icmp_signed("<", more, count), loop, end)
            builder.position_at_end(end)
            return afters

        def larger(place, half, value):
            score = builder.load(place, align=4)
            return builder.select(builder.fcmp_ordered(">", score, value), score, value)

        def weigh(place, half, total):
            score = builder.load(place, align=4)
            weight = _exp16(builder, builder.fsub(score, levels[half]))  # e^-87 of -inf: lost in a sum above 1
            builder.store(weight, place, align=4)
            return builder.fadd(total, weight)

        before = load(peaks)
        tops = over(before, larger)
        endless = [builder.fcmp_ordered("==", top, _all16(float("-inf"))) for top in tops]
        levels = [builder.select(none, _all16(0.0), top) for none, top in zip(endless, tops, strict=True)]
        factors = [_exp16(builder, builder.fsub(old, level)) for old, level in zip(before, levels, strict=True)]
        kept = [builder.fmul(old, factor) for old, factor in zip(load(totals), factors, strict=True)]
        for values, place in ((tops, peaks), (over(kept, weigh), totals), (factors, shrink)):
            for half in halves:
                builder.store(values[half], at(place, half), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


# Threads that wait for each other: one parallel region holds many steps, since to start one costs 10 to 50 us.


@intrinsic
def _wait(context, gate, turn, threads):
    """Returns turn + 1 when all threads have come here; `gate` counts arrivals and starts at 0, as `turn` does.

    A waiting thread keeps its core for some microseconds and then offers it to others: on a busy machine the thread it
    waits for may need that core.
    """

    def generate(context, builder, signature, arguments):
        gate, turn, threads = arguments
        long, module = ir.IntType(64), builder.module

        def function(name, kind):
            return module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, []), name)

        counter = builder.inttoptr(gate, long.as_pointer())
        builder.atomic_rmw("add", counter, long(1), "seq_cst")
        after = builder.add(turn, long(1))
        target = builder.mul(after, threads)
        entry = builder.block
        look, spin, offer, end = (builder.append_basic_block(name) for name in ("look", "spin", "offer", "end"))
        builder.branch(look)
        builder.position_at_end(look)
        spins = builder.phi(long)
        here = builder.load_atomic(counter, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", here, target), end, spin)
        builder.position_at_end(spin)
        builder.call(function("llvm.x86.sse2.pause", ir.VoidType()), [])
        more = builder.add(spins, long(1))
        full = builder.icmp_signed("==", builder.and_(more, long(SPINS - 1)), long(0))
        builder.cbranch(full, offer, look)
        builder.position_at_end(offer)
        builder.call(function("sched_yield", ir.IntType(32)), [])
        builder.branch(look)
        spins.add_incoming(long(0), entry)
        spins.add_incoming(more, spin)
        spins.add_incoming(more, offer)
        builder.position_at_end(end)
        return after

    return types.int64(types.int64, types.int64, types.int64), generate


# Linear layers


@njit(types.void(*[I64] * 4, F32, *[I64] * 4), **OPTIONS)
def _norm_rows(x, stride, width, norm, eps, out, out_stride, begin, end):
    """Rows [begin, end) of x, normed by their root mean square and `norm` [width], to out."""
    weight = carray(_floats(norm), (width,))
    for row in range(begin, end):
        source = carray(_floats(x + row * stride), (width,))
        target = carray(_floats(out + row * out_stride), (width,))
        total = np.float32(0.0)
        for i in range(width):
            total += source[i] * source[i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            target[i] = source[i] * scale * weight[i]


@njit(types.void(*[I64] * 8), **OPTIONS)
def _quantize_rows(x, stride, width, out, out_stride, scales, begin, end):
    """Rows [begin, end) of x to bytes out: 128 + x / scale, with a scale a row: its largest over 127."""
    scale_of = carray(_floats(scales), (end,))
    for row in range(begin, end):
        source = carray(_floats(x + row * stride), (width,))
        target = carray(_bytes(out + row * out_stride), (width,))
        bits, largest = carray(_ints(x + row * stride), (width,)), np.int32(0)
        for i in range(width):  # as integers: the order is that of the absolute values, and a NaN is above them all
            largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
        peak = _float_of_bits(largest)
        scale_of[row] = peak / np.float32(127.0)
        inverse = np.float32(127.0) / peak if peak != np.float32(0.0) else np.float32(0.0)
        for i in range(width):
            target[i] = np.uint8(np.int32(np.rint(source[i] * inverse)) + np.int32(128))


@njit(types.void(*[I64] * 11), **OPTIONS)
def _finish(sums, rows, width, kind, target, stride, bias, integer, excess, scales, row_scales):
    """Products sums [rows, 32] of a panel to target [rows, width], with bias and scales.

    STORE: as they are; ADD: added to it; GATE: the panel holds 16 gates and their 16 values, to silu(gate) * value.
    """
    scale_of = carray(_floats(row_scales), (rows,))
    whole = width == (16 if kind == GATE else COLUMNS)
    for row in range(rows):
        here = sums + row * COLUMNS * 4
        there = target + row * stride if whole else here
        scale = scale_of[row] if integer else np.float32(0.0)
        if kind == GATE:
            if integer:
                _gate_bytes(here, bias, excess, scales, scale, there)
            else:
                _gate_floats(here, bias, excess, scales, scale, there)
        elif kind == ADD and whole:
            if integer:
                _add_bytes(here, bias, excess, scales, scale, there)
            else:
                _add_floats(here, bias, excess, scales, scale, there)
        elif integer:
            _store_bytes(here, bias, excess, scales, scale, there)
        else:
            _store_floats(here, bias, excess, scales, scale, there)
        if not whole:
            value, output = carray(_floats(here), (width,)), carray(_floats(target + row * stride), (width,))
            for i in range(width):
                output[i] = value[i] + (output[i] if kind == ADD else np.float32(0.0))


@njit(types.void(*[I64] * 15), **OPTIONS)
def _panels(
    t, threads, a, a_stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, sums
):
    """A thread's share of the panels of a product: a [rows, inner], prepared, times w to c [rows, outer]."""
    columns = 16 if kind == GATE else COLUMNS
    panels = (outer + columns - 1) // columns
    integer = w_scale != 0
    size = 1 if integer else 4
    parts = (inner * size + DEPTH * 4 - 1) // (DEPTH * 4)
    depth = ((inner + parts - 1) // parts + 7) // 8 * 8
    for p in range(panels * t // threads, panels * (t + 1) // threads):
        width = min(columns, outer - p * columns)
        scale, excess = w_scale + p * COLUMNS * 4, w_scale + (panels + p) * COLUMNS * 4
        for first in range(0, inner, depth):
            deep = min(depth, inner - first)
            at, nbytes = w + (p * inner + first) * COLUMNS * size, deep * COLUMNS * size
            ahead, gap, part = _fetching(rows, at, nbytes, at + nbytes)
            row = 0
            while row < rows:
                height = _height(rows - row)
                here, place = a + row * a_stride + first * size, sums + row * COLUMNS * 4
                target = c + row * c_stride + p * columns * 4
                if first == 0:
                    carray(_floats(place), (height * COLUMNS,))[:] = np.float32(0.0)
                if first + deep == inner:
                    for i in range(height):
                        _fetch_to_write(target + i * c_stride)
                        _fetch_to_write(target + i * c_stride + (width - 1) * 4)
                if integer:
                    _byte_rows(height, here, a_stride, at, COLUMNS * 4, deep // 4, place, COLUMNS * 4, ahead, gap)
                else:
                    _float_rows(height, here, a_stride, at, COLUMNS * 4, deep, place, COLUMNS * 4, ahead, gap)
                if first + deep == inner:
                    _finish(
                        place, height, width, kind, target, c_stride, bias + p * COLUMNS * 4, integer, excess, scale,
                        scales + row * 4,
                    )  # fmt: skip
                row += height
                ahead += part


@njit(I64(*[I64] * 7, F32, *[I64] * 11), **OPTIONS)
def _linear(
    t, threads, gate, turn, x, x_stride, norm, eps, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, shared,
    own,
):  # fmt: skip
    """A thread's share of a block of rows of `linear`; returns the turn. Few rows every thread prepares for itself."""
    a, stride, scales = x, x_stride, x
    if norm != 0 or w_scale != 0:
        few = rows < ALONE
        base = own + BLOCK * COLUMNS * 4 if few else shared
        begin, end = (0, rows) if few else (rows * t // threads, rows * (t + 1) // threads)
        if norm != 0:
            _norm_rows(a, stride, inner, norm, eps, base, inner * 4 + LINE, begin, end)
            a, stride = base, inner * 4 + LINE
        if w_scale != 0:
            quantized = base + rows * (inner * 4 + LINE)
            scales = quantized + rows * (inner + LINE)
            _quantize_rows(a, stride, inner, quantized, inner + LINE, scales, begin, end)
            a, stride = quantized, inner + LINE
        if not few:
            turn = _wait(gate, turn, threads)
    _panels(t, threads, a, stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, own)
    return _wait(gate, turn, threads)


@njit(types.void(*[I64] * 3, F32, *[I64] * 12), parallel=True, **OPTIONS)
def linear(
    x, x_stride, norm, eps, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, space, own_space, threads,
):  # fmt: skip
    """x [rows, inner], normed first unless `norm` is 0, times packed w, to c [rows, outer]. For GATE a panel gives 16.

    w: [panels, inner, 32] float32, bias [panels, 32]. Unless `w_scale` is 0, w is [panels, inner / 4, 32, 4] int8 and
    w_scale [panels, 32] multiplies its columns; rows of x become bytes, each with its own scale. Behind w_scale lies
    128 times the sum of every column, int32 [panels, 32], since bytes are 128 above the values they stand for.
    """
    carray(_longs(space), (1,))[0] = 0
    for t in prange(threads):
        own = space + 64 + t * own_space
        shared = space + 64 + threads * own_space
        turn, block = 0, _block(rows)
        for first in range(0, rows, block):
            turn = _linear(
                t, threads, space, turn, x + first * x_stride, x_stride, norm, eps, min(block, rows - first), inner, w,
                w_scale, bias, outer, kind, c + first * c_stride, c_stride, shared, own,
            )  # fmt: skip


# Attention. Keys and values of a layer: [num_blocks, kv_heads, size, dims], the rows of a head in a block together.


@intrinsic
def _turn16(context, pairs, turn):
    """pairs[0:16] times turn[0:16], both 8 complex numbers, in place."""

    def generate(context, builder, signature, arguments):
        places = [builder.inttoptr(address, VECTOR.as_pointer()) for address in arguments]
        pairs, turn = (builder.load(place, align=4) for place in places)

        def pick(value, other, indices):
            return builder.shuffle_vector(value, other, ir.Constant(WHOLE, [int(index) for index in indices]))

        lanes = np.arange(16)
        real, imaginary = pick(turn, turn, lanes // 2 * 2), pick(turn, turn, lanes // 2 * 2 + 1)
        along, cross = builder.fmul(pairs, real), builder.fmul(pick(pairs, pairs, lanes ^ 1), imaginary)
        both = pick(builder.fsub(along, cross), builder.fadd(along, cross), lanes + lanes % 2 * 16)
        builder.store(both, places[0], align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(types.void(*[I64] * 6, F32, *[I64] * 6), **OPTIONS)
def _rotate_rows(
    heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, begin, end
):
    width = (q_heads + 2 * kv_heads) * dims * 4
    for row in range(begin, end):
        at_turn = turns + row * dims * 4
        turn = carray(_floats(at_turn), (dims,))
        place = carray(_longs(where + row * kv_heads * 8), (kv_heads,))
        for head in range(q_heads + kv_heads):
            address = heads + row * width + head * dims * 4
            pairs = carray(_floats(address), (dims,))
            norm = q_norm if head < q_heads else k_norm
            if norm != 0:
                _norm_rows(address, 0, dims, norm, eps, address, 0, 0, 1)
            for i in range(0, dims - 15, 16):
                _turn16(address + i * 4, at_turn + i * 4)
            for i in range(dims // 16 * 16, dims, 2):
                real, imaginary = pairs[i], pairs[i + 1]
                pairs[i] = real * turn[i] - imaginary * turn[i + 1]
                pairs[i + 1] = real * turn[i + 1] + imaginary * turn[i]
            if head >= q_heads:
                _copy(keys + place[head - q_heads] * dims * 4, address, dims * 4)
        for head in range(kv_heads):
            address = heads + row * width + (q_heads + kv_heads + head) * dims * 4
            _copy(values + place[head] * dims * 4, address, dims * 4)


@njit(parallel=True, **OPTIONS)  # compiled when first called: `decoder_layers` does without
def rotate_and_store(
    heads, rows, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, threads
):
    """heads [rows, q_heads + 2 kv_heads, dims]: queries and keys normed (unless 0) and rotated, keys and values stored.

    turns [rows, dims / 2] complex; where [rows, kv_heads]: rows of dims in the layer's keys and values.
    """
    if rows < ALONE:
        _rotate_rows(heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, 0, rows)
    else:
        for t in prange(threads):
            begin, end = rows * t // threads, rows * (t + 1) // threads
            _rotate_rows(heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, begin, end)


@njit(types.void(*CHUNK), **OPTIONS)
def _score(query, keys, scores, at, begin, end, column, width, group, dims):
    """Products of query [group, dims] with rows [begin, end) of the block at `at`, as scores[g * width + column + row].

    Four rows at a time, so that a query is loaded once for them.
    """
    t = begin
    while t + FOUR <= end:
        k0 = at + t * dims
        k1, k2, k3 = k0 + dims, k0 + TWO * dims, k0 + THREE * dims
        for g in range(group):
            q = g * dims
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for d in range(dims):
                s0 += query[q + d] * keys[k0 + d]
                s1 += query[q + d] * keys[k1 + d]
                s2 += query[q + d] * keys[k2 + d]
                s3 += query[q + d] * keys[k3 + d]
            p = g * width + column + t
            scores[p], scores[p + ONE], scores[p + TWO], scores[p + THREE] = s0, s1, s2, s3
        t += FOUR
    while t < end:
        k0 = at + t * dims
        for g in range(group):
            s0 = np.float32(0.0)
            for d in range(dims):
                s0 += query[g * dims + d] * keys[k0 + d]
            scores[g * width + column + t] = s0
        t += ONE


@njit(types.void(FLOATS, SIZE, SIZE), **OPTIONS)
def _softmax(scores, at, count):
    """scores[at : at + count] to weights, in place."""
    peak = scores[at]
    for t in range(count):
        peak = max(peak, scores[at + t])
    total = np.float32(0.0)
    for t in range(count):
        weight = _exp(scores[at + t] - peak)
        scores[at + t] = weight
        total += weight
    inverse = np.float32(1.0) / total
    for t in range(count):
        scores[at + t] *= inverse


@njit(types.void(*CHUNK), **OPTIONS)
def _mix(out, values, scores, at, begin, end, column, width, group, dims):
    """Adds rows [begin, end) of the block at `at`, weighted by their scores, to out [group * dims]."""
    t = begin
    while t + FOUR <= end:
        v0 = at + t * dims
        v1, v2, v3 = v0 + dims, v0 + TWO * dims, v0 + THREE * dims
        for g in range(group):
            p, o = g * width + column + t, g * dims
            w0, w1, w2, w3 = scores[p], scores[p + ONE], scores[p + TWO], scores[p + THREE]
            for d in range(dims):
                out[o + d] += w0 * values[v0 + d] + w1 * values[v1 + d] + w2 * values[v2 + d] + w3 * values[v3 + d]
        t += FOUR
    while t < end:
        for g in range(group):
            w0 = scores[g * width + column + t]
            for d in range(dims):
                out[g * dims + d] += w0 * values[at + t * dims + d]
        t += ONE


@njit(
    types.void(FLOATS, FLOATS, FLOATS, INTS, SIZE, SIZE, SIZE, SIZE, SIZE, FLOATS, FLOATS, SIZE, SIZE),
    **OPTIONS,
)  # fmt: skip
def _one_head(query, keys, values, table, head, kv_heads, low, high, size, scores, out, group, dims):
    """One token's query heads of one key-value head over tokens [low, high); adds to out."""
    width, first, last = high - low, low // size, (high - ONE) // size
    for b in range(first, last + ONE):
        at = (np.uint64(table[b]) * kv_heads + head) * size * dims
        begin, end = max(b * size, low) - b * size, min((b + ONE) * size, high) - b * size
        # The column of the block's row 0 is negative (wraps) when the window begins within the block; its sum is not.
        _score(query, keys, scores, at, begin, end, b * size - low, width, group, dims)
    for g in range(group):
        _softmax(scores, g * width, width)
    for b in range(first, last + ONE):
        at = (np.uint64(table[b]) * kv_heads + head) * size * dims
        begin, end = max(b * size, low) - b * size, min((b + ONE) * size, high) - b * size
        _mix(out, values, scores, at, begin, end, b * size - low, width, group, dims)


@njit(types.void(*[I64] * 12, F32, *[I64] * 8), **OPTIONS)
def _some_rows(
    t, threads, queries, stride, keys, values, index, table, width, low, high, rows, scale, group, kv_heads, size, dims,
    out, out_stride, query, scores,
):  # fmt: skip
    """A thread's share of `attend_rows`; `query` and `scores` are its own: group * dims, group * longest floats."""
    row_of = carray(_longs(index), (rows,))
    begin, end = carray(_longs(low), (rows,)), carray(_longs(high), (rows,))
    tables = carray(_longs(table), (rows, width))
    pool = (np.int64(1) << np.int64(60),)  # carray wants a size; the table says what is read
    own = carray(_floats(query), (group * dims,))
    for item in range(t, rows * kv_heads, threads):
        row, head = item // kv_heads, item % kv_heads
        source = carray(_floats(queries + row_of[row] * stride + head * group * dims * 4), (group * dims,))
        mixed = carray(_floats(out + row_of[row] * out_stride + head * group * dims * 4), (group * dims,))
        own[:] = source * scale
        mixed[:] = np.float32(0.0)
        _one_head(
            own, carray(_floats(keys), pool), carray(_floats(values), pool), tables[row], np.uint64(head),
            np.uint64(kv_heads), np.uint64(begin[row]), np.uint64(end[row]), np.uint64(size),
            carray(_floats(scores), pool), mixed, np.uint64(group), np.uint64(dims),
        )  # fmt: skip


@njit(parallel=True, **OPTIONS)  # compiled when first called: `decoder_layers` does without
def attend_rows(
    queries, stride, keys, values, index, table, width, low, high, rows, scale, group, kv_heads, size, dims, threads,
    out,
):  # fmt: skip
    """Single tokens: queries[index[i]] over tokens [low[i], high[i]) of table[i] [width], to out[index[i]].

    Keys are read in place, each once for the `group` of query heads that share it: torch has no paged attention on CPU,
    and gathering would write and read every key once more. Threads take items in turn: rows should come longest first.
    """
    longest = (carray(_longs(high), (rows,)) - carray(_longs(low), (rows,))).max()
    for t in prange(threads):
        own = np.empty(group * (dims + longest), np.float32)
        _some_rows(
            t, threads, queries, stride, keys, values, index, table, width, low, high, rows, scale, group, kv_heads,
            size, dims, out, kv_heads * group * dims * 4, own.ctypes.data, own.ctypes.data + group * dims * 4,
        )  # fmt: skip


@njit(types.void(*[I64] * 7), **OPTIONS)
def _hide(scores, count, lowest, first, group, row, window):
    """Scores [count, 32] of keys from position `first` on that are not for a query: -inf. Column i is that of query
    row `row` + i, at position lowest + (row + i) // group."""
    score = carray(_floats(scores), (count * COLUMNS,))
    for i in range(COLUMNS):
        position = lowest + (row + i) // group
        for j in range(max(0, position + 1 - first), count):
            score[j * COLUMNS + i] = np.float32(-np.inf)
        if window != 0:
            for j in range(0, min(count, position - window + 1 - first)):
                score[j * COLUMNS + i] = np.float32(-np.inf)


@intrinsic
def _transpose16(context, sources, offset, scale, target):
    """16 numbers at each of the 16 addresses `sources` + offset, times scale, become columns of target [16, 32]."""

    def generate(context, builder, signature, arguments):
        sources, offset, scale, target = arguments
        one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scale, ir.IntType(32)(0))
        every = builder.shuffle_vector(one, one, _all16(0, WHOLE))
        rows = []
        for i in range(16):
            source = builder.load(builder.inttoptr(builder.add(sources, LONG(8 * i)), LONG.as_pointer()))
            place = builder.inttoptr(builder.add(source, offset), VECTOR.as_pointer())
            rows.append(builder.fmul(builder.load(place, align=4), every))
        for bit in (1, 2, 4, 8):  # exchanges this bit of a number's row and column
            for i in (i for i in range(16) if not i & bit):
                upper, lower = rows[i], rows[i | bit]
                for row, own in ((i, 0), (i | bit, bit)):
                    lanes = [(lane & ~bit | own) + (16 if lane & bit else 0) for lane in range(16)]
                    rows[row] = builder.shuffle_vector(upper, lower, ir.Constant(WHOLE, lanes))
        for i, row in enumerate(rows):
            place = builder.add(target, LONG(4 * COLUMNS * i))
            builder.store(row, builder.inttoptr(place, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@njit(types.void(*[I64] * 12, F32, *[I64] * 3), **OPTIONS)
def _attend_block(
    queries, stride, count, start, table, keys, values, block_stride, group, size, dims, window, scale, out, out_stride,
    work,
):  # fmt: skip
    """One block of queries of one key-value head. Scores are [keys, 32 queries]: all that follows is in 32 columns."""
    rows, last, spare = count * group, start + count, (dims + COLUMNS - 1) // COLUMNS * COLUMNS
    panels, key_stride = (rows + COLUMNS - 1) // COLUMNS, dims * 4 + LINE
    places = carray(_longs(table), ((last + size - 1) // size,))
    query = work  # [panels, dims, 32]
    mixed = query + panels * dims * COLUMNS * 4  # [panels * 32, spare]
    scores = mixed + panels * COLUMNS * spare * 4  # [KEYS, 32]
    key = scores + KEYS * COLUMNS * 4
    value = key + KEYS * key_stride  # [KEYS, spare]
    peaks = value + KEYS * spare * 4
    totals = peaks + panels * COLUMNS * 4
    shrink = totals + panels * COLUMNS * 4
    carray(_floats(mixed), (panels * COLUMNS * spare,))[:] = np.float32(0.0)
    carray(_floats(peaks), (panels * COLUMNS,))[:] = np.float32(-np.inf)
    carray(_floats(totals), (panels * COLUMNS,))[:] = np.float32(0.0)
    source = carray(_longs(scores), (16,))  # not yet in use
    for column in range(0, panels * COLUMNS, 16):
        for i in range(16):  # in the columns that are left over something is computed, for nobody
            row = min(column + i, rows - 1)
            source[i] = queries + row // group * stride + row % group * dims * 4
        target = query + (column // COLUMNS * dims * COLUMNS + column % COLUMNS) * 4
        for d in range(0, dims - 15, 16):
            _transpose16(scores, d * 4, scale, target + d * COLUMNS * 4)
        for d in range(dims // 16 * 16, dims):
            line = carray(_floats(target + d * COLUMNS * 4), (16,))
            for i in range(16):
                line[i] = carray(_floats(source[i]), (dims,))[d] * scale
    begin = max(0, start - window + 1) // KEYS * KEYS if window != 0 else 0
    for first in range(begin, last, KEYS):
        width = min(KEYS, last - first)
        for j in range(width):
            at = places[(first + j) // size] * block_stride + (first + j) % size * dims * 4
            _copy(key + j * key_stride, keys + at, dims * 4)
            _copy(value + j * spare * 4, values + at, dims * 4)
        if width % 2:  # products take keys by two; this one's weight will be 0
            carray(_floats(value + width * spare * 4), (spare,))[:] = np.float32(0.0)
        for panel in range(panels):
            row = panel * COLUMNS
            several = min(COLUMNS, rows - row)
            lowest, highest = start + row // group, start + (row + several - 1) // group
            if first > highest or (window != 0 and first + width <= lowest - window + 1):
                continue
            seen = min(width, highest + 1 - first)
            even = seen + seen % 2
            carray(_floats(scores), (even * COLUMNS,))[:] = np.float32(0.0)
            _product(
                seen, key, key_stride, query + panel * dims * COLUMNS * 4, COLUMNS * 4, dims, scores, COLUMNS * 4
            )
            if first + seen > lowest + 1 or (window != 0 and first <= highest - window):
                _hide(scores, seen, start, first, group, row, window)
            _soften(scores, seen, peaks + row * 4, totals + row * 4, shrink)
            factor = carray(_floats(shrink), (COLUMNS,))
            for i in range(several):
                mix = carray(_floats(mixed + (row + i) * spare * 4), (spare,))
                for d in range(spare):
                    mix[d] *= factor[i]
            for at in range(0, spare * 4, COLUMNS * 4):
                _product_across(
                    several, scores, COLUMNS * 4, value + at, spare * 4, even, mixed + row * spare * 4 + at, spare * 4
                )
    total = carray(_floats(totals), (rows,))
    for row in range(rows):
        mix, share = carray(_floats(mixed + row * spare * 4), (dims,)), np.float32(1.0) / total[row]
        target = carray(_floats(out + row // group * out_stride + row % group * dims * 4), (dims,))
        for d in range(dims):
            target[d] = mix[d] * share


@njit(I64(I64, I64), **OPTIONS)
def block_floats(group, dims):
    """What a block of queries works with, in floats: queries, outputs, scores, keys, values, maxima, sums, factors."""
    spare = (dims + COLUMNS - 1) // COLUMNS * COLUMNS
    rows = (max(QUERIES, BLOCK_ROWS // group) * group + COLUMNS - 1) // COLUMNS * COLUMNS
    return rows * (dims + spare + 2) + KEYS * (COLUMNS + dims + LINE // 4 + spare) + COLUMNS


@njit(types.void(*[I64] * 14, F32, *[I64] * 3), **OPTIONS)
def _some_blocks(
    t, threads, queries, stride, count, start, table, keys, values, group, kv_heads, size, dims, window, scale, out,
    out_stride, work,
):  # fmt: skip
    """A thread's share of `attend_chunk`; `work` is its own, `block_floats` of zeros or finite numbers."""
    per = max(QUERIES, BLOCK_ROWS // group)  # tokens of a block
    blocks = (count + per - 1) // per
    for item in range(t, blocks * kv_heads, threads):
        block, head = blocks - 1 - item // kv_heads, item % kv_heads  # longest first
        first = block * per
        _attend_block(
            queries + first * stride + head * group * dims * 4, stride, min(per, count - first), start + first, table,
            keys + head * size * dims * 4, values + head * size * dims * 4, kv_heads * size * dims * 4, group, size,
            dims, window, scale, out + first * out_stride + head * group * dims * 4, out_stride, work,
        )  # fmt: skip


@njit(parallel=True, **OPTIONS)  # compiled when first called: `decoder_layers` does without
def attend_chunk(
    queries, stride, count, start, table, keys, values, group, kv_heads, size, dims, window, scale, out, out_stride,
    threads,
):  # fmt: skip
    """A chunk: queries [count, ...] at positions from `start` on, causal, the last `window` tokens unless that is 0.

    As FlashAttention (Dao et al., 2022): blocks of queries pass over blocks of keys with a running maximum and sum. The
    rows of a block are those of all query heads that share the keys. Blocks of keys begin at multiples of KEYS, so a
    token's sums do not depend on how its prompt was cut.
    """
    for t in prange(threads):
        work = np.zeros(block_floats(group, dims), np.float32)
        _some_blocks(
            t, threads, queries, stride, count, start, table, keys, values, group, kv_heads, size, dims, window, scale,
            out, out_stride, work.ctypes.data,
        )  # fmt: skip


# All layers in one parallel region

# Columns of a layer's line in the table of addresses, and of a window's and a chunk's line in a step's plan.
QKV, OUT, GATE_UP, DOWN = 0, 3, 6, 9  # weights, their scales (or 0), bias
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, LAYER_KEYS, LAYER_VALUES, LAYER_WINDOW, LAYER_FIELDS = range(12, 20)
HIDDEN, INNER, Q_HEADS, KV_HEADS, DIMS, SIZE_, SHAPE_FIELDS = range(7)
WINDOW, ROW_INDEX, ROW_TABLE, ROW_WIDTH, ROW_LOW, ROW_HIGH, ROW_COUNT, ROW_LONGEST, PLAN_FIELDS = range(9)
CHUNK_BEGIN, CHUNK_COUNT, CHUNK_START, CHUNK_TABLE, CHUNK_FIELDS = range(5)
X, TURNS, WHERE, HEADS, MIXED, INSIDE, SPACE, PROGRESS, BUFFER_FIELDS = range(9)
LONGS_1D, LONGS_2D = types.int64[::1], types.int64[:, ::1]


@njit(types.void(I64, I64, I64, F32, LONGS_2D, LONGS_1D, LONGS_2D, LONGS_2D, LONGS_1D, I64), **OPTIONS)
def _layers(t, threads, rows, eps, layers, shape, plans, chunks, buffers, own_space):
    """A thread's share of `decoder_layers`, in the order of the model."""
    hidden, inner, q_heads, kv_heads, dims = shape[HIDDEN], shape[INNER], shape[Q_HEADS], shape[KV_HEADS], shape[DIMS]
    width, group, scale = (q_heads + 2 * kv_heads) * dims, q_heads // kv_heads, np.float32(1.0 / np.sqrt(dims))
    mixed_stride, inside_stride = q_heads * dims * 4 + LINE, inner * 4 + LINE
    x, heads, mixed, inside = buffers[X], buffers[HEADS], buffers[MIXED], buffers[INSIDE]
    gate, own, shared = buffers[SPACE], buffers[SPACE] + 64 + t * own_space, buffers[SPACE] + 64 + threads * own_space
    mine = np.empty(group * (dims + plans[:, ROW_LONGEST].max()), np.float32)
    work = np.zeros(block_floats(group, dims) if chunks.shape[0] else 1, np.float32)
    begin, end = rows * t // threads, rows * (t + 1) // threads
    turn, block = 0, _block(rows)
    for index in range(layers.shape[0]):
        layer = layers[index]
        plan = plans[layer[LAYER_WINDOW]]
        keys, values = layer[LAYER_KEYS], layer[LAYER_VALUES]
        for first in range(0, rows, block):
            turn = _linear(
                t, threads, gate, turn, x + first * hidden * 4, hidden * 4, layer[INPUT_NORM], eps,
                min(block, rows - first), hidden, layer[QKV], layer[QKV + 1], layer[QKV + 2], width, STORE,
                heads + first * width * 4, width * 4, shared, own,
            )  # fmt: skip
        _rotate_rows(
            heads, q_heads, kv_heads, dims, layer[Q_NORM], layer[K_NORM], eps, buffers[TURNS], buffers[WHERE], keys,
            values, begin, end,
        )  # fmt: skip
        turn = _wait(gate, turn, threads)
        if plan[ROW_COUNT]:
            _some_rows(
                t, threads, heads, width * 4, keys, values, plan[ROW_INDEX], plan[ROW_TABLE], plan[ROW_WIDTH],
                plan[ROW_LOW], plan[ROW_HIGH], plan[ROW_COUNT], scale, group, kv_heads, shape[SIZE_], dims, mixed,
                mixed_stride, mine.ctypes.data, mine.ctypes.data + group * dims * 4,
            )  # fmt: skip
        for number in range(chunks.shape[0]):
            chunk = chunks[number]
            first = chunk[CHUNK_BEGIN]
            _some_blocks(
                t, threads, heads + first * width * 4, width * 4, chunk[CHUNK_COUNT], chunk[CHUNK_START],
                chunk[CHUNK_TABLE], keys, values, group, kv_heads, shape[SIZE_], dims, plan[WINDOW], scale,
                mixed + first * mixed_stride, mixed_stride, work.ctypes.data,
            )  # fmt: skip
        turn = _wait(gate, turn, threads)
        for first in range(0, rows, block):
            count, some = min(block, rows - first), x + first * hidden * 4
            turn = _linear(
                t, threads, gate, turn, mixed + first * mixed_stride, mixed_stride, 0, eps, count, q_heads * dims,
                layer[OUT], layer[OUT + 1], layer[OUT + 2], hidden, ADD, some, hidden * 4, shared, own,
            )  # fmt: skip
            turn = _linear(
                t, threads, gate, turn, some, hidden * 4, layer[POST_NORM], eps, count, hidden, layer[GATE_UP],
                layer[GATE_UP + 1], layer[GATE_UP + 2], inner, GATE, inside, inside_stride, shared, own,
            )  # fmt: skip
            turn = _linear(
                t, threads, gate, turn, inside, inside_stride, 0, eps, count, inner, layer[DOWN], layer[DOWN + 1],
                layer[DOWN + 2], hidden, ADD, some, hidden * 4, shared, own,
            )  # fmt: skip
        if t == 0:
            carray(_longs(buffers[PROGRESS]), (1,))[0] += 1


@njit(
    types.void(I64, F32, LONGS_2D, LONGS_1D, LONGS_2D, LONGS_2D, LONGS_1D, I64, I64), parallel=True, **OPTIONS
)
def decoder_layers(rows, eps, layers, shape, plans, chunks, buffers, own_space, threads):
    """All layers over the hidden states X [rows, hidden], in place: what `Decoder.forward` does layer by layer."""
    carray(_longs(buffers[SPACE]), (1,))[0] = 0
    for t in prange(threads):
        _layers(t, threads, rows, eps, layers, shape, plans, chunks, buffers, own_space)


@njit(types.void(LONGS_1D), parallel=True, **OPTIONS)
def _who(names):
    for t in prange(names.shape[0]):
        names[t] = numba.get_thread_id()


_local = threading.local()


def workspace(nbytes: int) -> int:
    """Address of that many bytes, aligned, that belong to the calling thread until its next call."""
    size = getattr(_local, "size", 0)
    if size < nbytes:
        _local.memory, _local.size = torch.empty(nbytes + 64, dtype=torch.uint8), nbytes
    address: int = _local.memory.data_ptr()
    return address + -address % 64


def spaces(rows: int, widest: int, threads: int) -> tuple[int, int]:
    """Bytes of work space that `linear` needs in all, and of it each thread's own."""
    row = 5 * widest + 2 * LINE + 4
    own = BLOCK * COLUMNS * 4 + -(-ALONE * row // LINE) * LINE
    return LINE + threads * own + min(rows, BLOCK) * row, own


@functools.cache
def _together(threads: int) -> int:
    """`threads` if that many really run at the same time, as those that wait for each other must; else 1."""
    names = np.zeros(threads, np.int64)
    _who(names)
    return threads if len(set(names.tolist())) == threads else 1


def num_threads() -> int:
    """As many as torch uses."""
    return _together(min(torch.get_num_threads(), numba.get_num_threads()))
