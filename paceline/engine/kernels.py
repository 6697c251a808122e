"""Kernels of the CPU path: linear layers with what comes before and after, rotations, attention over the paged cache.

All products are made of one tile, up to 8 rows of activations times 32 columns of packed weights, whose 16 vector
accumulators stay in registers while the weights stream by once: what 8 rows cost is what one costs. Sums run over the
inner dimension in one order whatever the number of rows, so a sequence's bits do not depend on its batch.

Tiles are written in LLVM's intermediate language, since no loop that a compiler sees keeps its sums in registers this
way; Numba compiles it all once per machine (some 10 s, cached). Addresses are passed instead of arrays: taking an array
apart costs a microsecond a call. One file on purpose: Numba's cache notices changes only in a kernel's own file.
"""

import functools
import platform
import threading

import numba
import numpy as np
import torch  # noqa: F401 - before Numba's threads start, so that both use torch's OpenMP library
from llvmlite import binding, ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic

if platform.machine() not in ("x86_64", "AMD64"):
    raise ImportError("these kernels are written for x86-64")  # torch's operators take their place
numba.config.THREADING_LAYER = "omp"
numba.get_num_threads()  # starts them: a ValueError here and now where that layer cannot be had

FEATURES = binding.get_host_cpu_features()
HAS_AVX512 = all(FEATURES.get(name, False) for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq"))
HAS_VNNI = HAS_AVX512 and FEATURES.get("avx512vnni", False)

ROWS, COLUMNS = 8, 32  # of a tile
DEPTH = 2048  # weights of a panel that stay in the second cache while all rows pass: DEPTH x COLUMNS floats
ALONE = 16  # rows from which norms, rotations and the like are shared out to threads
QUERIES, BLOCK_ROWS, KEYS = 32, 128, 128  # chunk attention: least tokens and rows of a block of queries, and of keys
BLOCK = 512  # rows that pass a panel of weights together
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


def _tiles(integer: bool):
    """tiles(rows, a, a_stride, w, w_stride, steps, c, c_stride): c[rows, 32] += a[rows, steps] w[steps, 32].

    Addresses and strides in bytes; `steps` is even. Floats, or for `integer` 4 unsigned bytes of `a` and 4 signed bytes
    of every column of `w` a step, summed in int32 (VNNI). Eight rows at a time, then what is left.
    """
    scalar = ir.IntType(32) if integer else ir.FloatType()
    vector, long = ir.VectorType(scalar, 16), ir.IntType(64)
    name = "llvm.x86.avx512.vpdpbusd.512" if integer else "llvm.fma.v16f32"

    @intrinsic
    def tiles(context, rows, a, a_stride, w, w_stride, steps, c, c_stride):
        def generate(context, builder, signature, arguments):
            rows, a, a_stride, w, w_stride, steps, c, c_stride = arguments
            module = builder.module
            multiply = module.globals.get(name) or ir.Function(module, ir.FunctionType(vector, [vector] * 3), name)

            def at(address, kind, *offsets):
                for offset in offsets:
                    address = builder.add(address, offset if isinstance(offset, ir.Value) else long(offset))
                return builder.inttoptr(address, kind.as_pointer())

            def tile(count, a, c, following):
                """One tile of `count` rows where the builder stands, then on to `following`."""
                a_rows = [builder.add(a, builder.mul(a_stride, long(row))) for row in range(count)]
                c_rows = [builder.add(c, builder.mul(c_stride, long(row))) for row in range(count)]
                places = [at(row, vector, half) for row in c_rows for half in (0, 64)]
                entry, loop, end = builder.block, builder.append_basic_block("step"), builder.append_basic_block("end")
                begin = [builder.load(place, align=4) for place in places]
                builder.branch(loop)
                builder.position_at_end(loop)
                step = builder.phi(long)
                sums = [builder.phi(vector) for _ in begin]
                now = list(sums)
                for ahead in (0, 1):
                    here = builder.add(step, long(ahead))
                    line, column = builder.mul(here, w_stride), builder.mul(here, long(4))
                    weights = [builder.load(at(w, vector, line, half), align=4) for half in (0, 64)]
                    for row in range(count):
                        value = everywhere(builder.load(at(a_rows[row], scalar, column), align=4))
                        for half, weight in enumerate(weights):
                            total = now[2 * row + half]
                            operands = [total, value, weight] if integer else [value, weight, total]
                            now[2 * row + half] = builder.call(multiply, operands)
                after = builder.add(step, long(2))
                for phi, first, last in zip((step, *sums), (long(0), *begin), (after, *now), strict=True):
                    phi.add_incoming(first, entry)
                    phi.add_incoming(last, loop)
                builder.cbranch(builder.icmp_unsigned("<", after, steps), loop, end)
                builder.position_at_end(end)
                for place, total in zip(places, now, strict=True):
                    builder.store(total, place, align=4)
                builder.branch(following)
                return end

            def everywhere(value):
                undefined = ir.Constant(vector, ir.Undefined)
                one = builder.insert_element(undefined, value, ir.IntType(32)(0))
                return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16))

            entry = builder.block
            head, eight, few, done = (builder.append_basic_block(name) for name in ("head", "eight", "few", "done"))
            builder.branch(head)
            builder.position_at_end(head)
            left, a_now, c_now = builder.phi(long), builder.phi(long), builder.phi(long)
            builder.cbranch(builder.icmp_signed(">=", left, long(ROWS)), eight, few)
            builder.position_at_end(eight)
            end = tile(ROWS, a_now, c_now, head)
            builder.position_before(end.terminator)
            moved = [
                builder.sub(left, long(ROWS)),
                builder.add(a_now, builder.mul(a_stride, long(ROWS))),
                builder.add(c_now, builder.mul(c_stride, long(ROWS))),
            ]
            for phi, first, last in zip((left, a_now, c_now), (rows, a, c), moved, strict=True):
                phi.add_incoming(first, entry)
                phi.add_incoming(last, end)
            builder.position_at_end(few)
            choice = builder.switch(left, done)
            for count in range(1, ROWS):
                block = builder.append_basic_block(f"rows{count}")
                choice.add_case(long(count), block)
                builder.position_at_end(block)
                tile(count, a_now, c_now, done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return tiles


_float_tiles, _byte_tiles = _tiles(integer=False), _tiles(integer=HAS_VNNI)  # without VNNI there are no int8 weights


@njit(types.void(*[I64] * 8), **OPTIONS)
def _product(rows, a, a_stride, w, w_stride, steps, c, c_stride):
    _float_tiles(rows, a, a_stride, w, w_stride, steps, c, c_stride)


@njit(types.void(*[I64] * 8), **OPTIONS)
def _byte_product(rows, a, a_stride, w, w_stride, steps, c, c_stride):
    _byte_tiles(rows, a, a_stride, w, w_stride, steps, c, c_stride)


@intrinsic
def _gate(context, sums, bias):
    """sums[0:16] = silu(g) * v with g = sums[0:16] + bias[0:16], v = sums[16:32] + bias[16:32]; exponentials as `_exp`.

    As vector instructions by hand: a loop of 16 over memory that may overlap stays scalar, ten times slower.
    """

    def generate(context, builder, signature, arguments):
        vector, whole = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.IntType(32), 16)

        def call(name, *operands):
            known = builder.module.globals.get(name)
            kind = ir.FunctionType(vector, [vector] * len(operands))
            return builder.call(known or ir.Function(builder.module, kind, name), operands)

        def at(address, offset):
            return builder.inttoptr(builder.add(address, ir.IntType(64)(offset)), vector.as_pointer())

        def both(offset):
            return builder.fadd(*(builder.load(at(address, offset), align=4) for address in arguments))

        def all16(value, kind=vector):
            return ir.Constant(kind, [value] * 16)

        gate, value = both(0), both(64)
        x = builder.fneg(call("llvm.fabs.v16f32", gate))
        x = builder.select(builder.fcmp_ordered("<", x, all16(-87.0)), all16(-87.0), x)
        scaled = call("llvm.fma.v16f32", x, all16(float(np.float32(1.4426950408889634))), all16(0.5))
        n = call("llvm.floor.v16f32", scaled)
        r = call("llvm.fma.v16f32", n, all16(-0.693359375), x)
        r = call("llvm.fma.v16f32", n, all16(float(np.float32(2.12194440e-4))), r)
        p = all16(float(EXP[0]))
        for coefficient in EXP[1:]:
            p = call("llvm.fma.v16f32", p, r, all16(float(coefficient)))
        p = builder.fadd(call("llvm.fma.v16f32", builder.fmul(p, r), r, r), all16(1.0))
        power = builder.shl(builder.add(builder.fptosi(n, whole), all16(127, whole)), all16(23, whole))
        small = builder.fmul(p, builder.bitcast(power, vector))
        above = builder.select(builder.fcmp_ordered(">=", gate, all16(0.0)), all16(1.0), small)
        sigmoid = builder.fdiv(above, builder.fadd(small, all16(1.0)))
        builder.store(builder.fmul(builder.fmul(gate, sigmoid), value), at(arguments[0], 0), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


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


@njit(types.void(*[I64] * 4, F32, I64, I64, I64), **OPTIONS)
def _norm_rows(x, stride, width, norm, eps, out, begin, end):
    """Rows [begin, end) of x, normed by their root mean square and `norm` [width], to out [rows, width]."""
    weight = carray(_floats(norm), (width,))
    for row in range(begin, end):
        source = carray(_floats(x + row * stride), (width,))
        target = carray(_floats(out + row * width * 4), (width,))
        total = np.float32(0.0)
        for i in range(width):
            total += source[i] * source[i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            target[i] = source[i] * scale * weight[i]


@njit(types.void(*[I64] * 7), **OPTIONS)
def _quantize_rows(x, stride, width, out, scales, begin, end):
    """Rows [begin, end) of x to bytes out [rows, width]: 128 + x / scale, with a scale a row: its largest over 127."""
    scale_of = carray(_floats(scales), (end,))
    for row in range(begin, end):
        source = carray(_floats(x + row * stride), (width,))
        target = carray(_bytes(out + row * width), (width,))
        bits, largest = carray(_ints(x + row * stride), (width,)), np.int32(0)
        for i in range(width):  # as integers: the order is that of the absolute values, and a NaN is above them all
            largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
        peak = _float_of_bits(largest)
        scale_of[row] = peak / np.float32(127.0)
        inverse = np.float32(127.0) / peak if peak != np.float32(0.0) else np.float32(0.0)
        for i in range(width):
            target[i] = np.uint8(np.int32(np.rint(source[i] * inverse)) + np.int32(128))


@njit(types.void(*[I64] * 8), **OPTIONS)
def _finish(sums, rows, first, width, kind, c, c_stride, bias):
    """Products sums [rows, 32] of a panel to columns [first, first + width) of c.

    STORE: as they are; ADD: added to c; GATE: the panel holds 16 gates and their 16 values, to silu(gate) * value.
    """
    b = carray(_floats(bias), (COLUMNS,))
    for row in range(rows):
        value = carray(_floats(sums + row * COLUMNS * 4), (COLUMNS,))
        target = carray(_floats(c + row * c_stride + first * 4), (width,))
        if kind == GATE:
            _gate(sums + row * COLUMNS * 4, bias)
            target[:] = value[:width]
        elif kind == ADD:
            for i in range(width):
                target[i] += value[i] + b[i]
        else:
            for i in range(width):
                target[i] = value[i] + b[i]


@njit(types.void(*[I64] * 15), **OPTIONS)
def _panels(
    t, threads, a, a_stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, sums
):
    """A thread's share of the panels of a product: a [rows, inner], prepared, times w to c [rows, outer]."""
    columns = 16 if kind == GATE else COLUMNS
    panels = (outer + columns - 1) // columns
    counts = sums + BLOCK * COLUMNS * 4
    row_scale = carray(_floats(scales), (rows,))
    for top in range(0, rows, BLOCK):
        count = min(BLOCK, rows - top)
        for p in range(panels * t // threads, panels * (t + 1) // threads):
            if w_scale == 0:
                carray(_floats(sums), (count * COLUMNS,))[:] = np.float32(0.0)
                for depth in range(0, inner, DEPTH):
                    at = w + (p * inner + depth) * COLUMNS * 4
                    here, steps = a + top * a_stride + depth * 4, min(DEPTH, inner - depth)
                    _product(count, here, a_stride, at, COLUMNS * 4, steps, sums, COLUMNS * 4)
            else:
                carray(_ints(counts), (count * COLUMNS,))[:] = 0
                here, at = a + top * a_stride, w + p * inner * COLUMNS
                _byte_product(count, here, a_stride, at, COLUMNS * 4, inner // 4, counts, COLUMNS * 4)
                scale = carray(_floats(w_scale + p * COLUMNS * 4), (COLUMNS,))
                excess = carray(_ints(w_scale + (panels + p) * COLUMNS * 4), (COLUMNS,))
                for row in range(count):
                    whole = carray(_ints(counts + row * COLUMNS * 4), (COLUMNS,))
                    value = carray(_floats(sums + row * COLUMNS * 4), (COLUMNS,))
                    for i in range(COLUMNS):
                        value[i] = np.float32(whole[i] - excess[i]) * (scale[i] * row_scale[top + row])
            width = min(columns, outer - p * columns)
            _finish(sums, count, p * columns, width, kind, c + top * c_stride, c_stride, bias + p * COLUMNS * 4)


@njit(I64(*[I64] * 7, F32, *[I64] * 11), **OPTIONS)
def _linear(
    t, threads, gate, turn, x, x_stride, norm, eps, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, shared,
    own,
):  # fmt: skip
    """A thread's share of `linear`; returns the turn. Of few rows every thread prepares all, for itself."""
    a, stride, scales = x, x_stride, x
    if norm != 0 or w_scale != 0:
        few = rows < ALONE
        base = own + 2 * BLOCK * COLUMNS * 4 if few else shared
        begin, end = (0, rows) if few else (rows * t // threads, rows * (t + 1) // threads)
        if norm != 0:
            _norm_rows(a, stride, inner, norm, eps, base, begin, end)
            a, stride = base, inner * 4
        if w_scale != 0:
            quantized, scales = base + rows * inner * 4, base + rows * inner * 5
            _quantize_rows(a, stride, inner, quantized, scales, begin, end)
            a, stride = quantized, inner
        if not few:
            turn = _wait(gate, turn, threads)
    _panels(t, threads, a, stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, own)
    return turn


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
        _linear(
            t, threads, space, 0, x, x_stride, norm, eps, rows, inner, w, w_scale, bias, outer, kind, c, c_stride,
            shared, own,
        )  # fmt: skip


# Attention. Keys and values of a layer: [num_blocks, kv_heads, size, dims], the rows of a head in a block together.


@njit(types.void(*[I64] * 6, F32, *[I64] * 6), **OPTIONS)
def _rotate_rows(
    heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, begin, end
):
    width = (q_heads + 2 * kv_heads) * dims * 4
    for row in range(begin, end):
        turn = carray(_floats(turns + row * dims * 4), (dims,))
        place = carray(_longs(where + row * kv_heads * 8), (kv_heads,))
        for head in range(q_heads + kv_heads):
            address = heads + row * width + head * dims * 4
            pairs = carray(_floats(address), (dims,))
            norm = q_norm if head < q_heads else k_norm
            if norm != 0:
                _norm_rows(address, 0, dims, norm, eps, address, 0, 1)
            for i in range(0, dims, 2):
                real, imaginary = pairs[i], pairs[i + 1]
                pairs[i] = real * turn[i] - imaginary * turn[i + 1]
                pairs[i + 1] = real * turn[i + 1] + imaginary * turn[i]
            if head >= q_heads:
                target = carray(_floats(keys + place[head - q_heads] * dims * 4), (dims,))
                target[:] = pairs
        for head in range(kv_heads):
            target = carray(_floats(values + place[head] * dims * 4), (dims,))
            target[:] = carray(_floats(heads + row * width + (q_heads + kv_heads + head) * dims * 4), (dims,))


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


@njit(types.void(*[I64] * 12, F32, *[I64] * 7), **OPTIONS)
def _some_rows(
    t, threads, queries, stride, keys, values, index, table, width, low, high, rows, scale, group, kv_heads, size, dims,
    out, query, scores,
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
        mixed = carray(_floats(out + (row_of[row] * kv_heads + head) * group * dims * 4), (group * dims,))
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
            size, dims, out, own.ctypes.data, own.ctypes.data + group * dims * 4,
        )  # fmt: skip


@njit(types.void(I64, I64, I64, F32), **OPTIONS)
def _fill(scores, low, high, value):
    """KEYS scores, but for those in [low, high)."""
    carray(_floats(scores), (low,))[:] = value
    carray(_floats(scores + high * 4), (KEYS - high,))[:] = value


@njit(F32(I64), **OPTIONS)
def _peak(scores):
    """The largest of KEYS scores: in 16 lanes, since one maximum over all would not become vector instructions."""
    lanes = np.full(16, np.float32(-np.inf))
    for begin in range(0, KEYS, 16):
        some = carray(_floats(scores + begin * 4), (16,))
        for i in range(16):
            lanes[i] = max(lanes[i], some[i])
    return lanes.max()


@njit(types.void(*[I64] * 12, F32, *[I64] * 3), **OPTIONS)
def _attend_block(
    queries, stride, count, start, table, keys, values, block_stride, group, size, dims, window, scale, out, out_stride,
    work,
):  # fmt: skip
    """One block of queries of one key-value head."""
    rows, last, spare = count * group, start + count, (dims + COLUMNS - 1) // COLUMNS * COLUMNS
    places = carray(_longs(table), ((last + size - 1) // size,))
    query = work
    mixed = query + rows * dims * 4
    scores = mixed + rows * spare * 4
    key = scores + rows * KEYS * 4  # [KEYS / 32, dims, 32]
    value = key + KEYS * dims * 4  # [KEYS, spare]
    peaks = carray(_floats(value + KEYS * spare * 4), (rows,))
    totals = carray(_floats(value + (KEYS * spare + rows) * 4), (rows,))
    for row in range(rows):
        source = carray(_floats(queries + row // group * stride + row % group * dims * 4), (dims,))
        carray(_floats(query + row * dims * 4), (dims,))[:] = source * scale
        carray(_floats(mixed + row * spare * 4), (spare,))[:] = np.float32(0.0)
        peaks[row], totals[row] = np.float32(-np.inf), np.float32(0.0)
    begin = max(0, start - window + 1) // KEYS * KEYS if window != 0 else 0
    for first in range(begin, last, KEYS):
        width = min(KEYS, last - first)
        for j in range(width):
            at = places[(first + j) // size] * block_stride + (first + j) % size * dims * 4
            source = carray(_floats(keys + at), (dims,))
            for d in range(dims):
                carray(_floats(key + ((j // COLUMNS * dims + d) * COLUMNS + j % COLUMNS) * 4), (1,))[0] = source[d]
            carray(_floats(value + j * spare * 4), (dims,))[:] = carray(_floats(values + at), (dims,))
        carray(_floats(scores), (rows * KEYS,))[:] = np.float32(0.0)
        for panel in range((width + COLUMNS - 1) // COLUMNS):
            at = key + panel * dims * COLUMNS * 4
            blind = max(0, first + panel * COLUMNS - start) * group  # rows that are before all of these keys
            _product(
                max(0, rows - blind), query + blind * dims * 4, dims * 4, at, COLUMNS * 4, dims,
                scores + (blind * KEYS + panel * COLUMNS) * 4, KEYS * 4,
            )  # fmt: skip
        for row in range(rows):
            position = start + row // group
            low = max(0, position - window + 1 - first) if window != 0 else 0
            high = max(low, min(width, position + 1 - first))
            at = scores + row * KEYS * 4
            _fill(at, low, high, np.float32(-np.inf))
            peak, total = max(peaks[row], _peak(at)), np.float32(0.0)
            if low < high:
                score = carray(_floats(at), (KEYS,))
                for j in range(KEYS):
                    score[j] = _exp(score[j] - peak)
                    total += score[j]
                _fill(at, low, high, np.float32(0.0))
                mix, shrink = carray(_floats(mixed + row * spare * 4), (spare,)), _exp(peaks[row] - peak)
                for d in range(spare):
                    mix[d] *= shrink
                peaks[row], totals[row] = peak, totals[row] * shrink + total
            else:
                _fill(at, 0, 0, np.float32(0.0))
        for panel in range(spare // COLUMNS):
            at = panel * COLUMNS * 4
            _product(rows, scores, KEYS * 4, value + at, spare * 4, width + width % 2, mixed + at, spare * 4)
    for row in range(rows):
        target = carray(_floats(out + row // group * out_stride + row % group * dims * 4), (dims,))
        target[:] = carray(_floats(mixed + row * spare * 4), (dims,)) * (np.float32(1.0) / totals[row])


@njit(I64(I64, I64), **OPTIONS)
def block_floats(group, dims):
    """What a block of queries works with, in floats: queries, outputs, scores, maxima, sums, keys and values."""
    spare = (dims + COLUMNS - 1) // COLUMNS * COLUMNS
    return max(QUERIES, BLOCK_ROWS // group) * group * (dims + spare + KEYS + 2) + KEYS * (dims + spare)


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
    x, heads, mixed, inside = buffers[X], buffers[HEADS], buffers[MIXED], buffers[INSIDE]
    gate, own, shared = buffers[SPACE], buffers[SPACE] + 64 + t * own_space, buffers[SPACE] + 64 + threads * own_space
    mine = np.empty(group * (dims + plans[:, ROW_LONGEST].max()), np.float32)
    work = np.zeros(block_floats(group, dims) if chunks.shape[0] else 1, np.float32)
    begin, end = rows * t // threads, rows * (t + 1) // threads
    turn = 0
    for index in range(layers.shape[0]):
        layer = layers[index]
        plan = plans[layer[LAYER_WINDOW]]
        keys, values = layer[LAYER_KEYS], layer[LAYER_VALUES]
        turn = _linear(
            t, threads, gate, turn, x, hidden * 4, layer[INPUT_NORM], eps, rows, hidden, layer[QKV], layer[QKV + 1],
            layer[QKV + 2], width, STORE, heads, width * 4, shared, own,
        )  # fmt: skip
        turn = _wait(gate, turn, threads)
        _rotate_rows(
            heads, q_heads, kv_heads, dims, layer[Q_NORM], layer[K_NORM], eps, buffers[TURNS], buffers[WHERE], keys,
            values, begin, end,
        )  # fmt: skip
        turn = _wait(gate, turn, threads)
        if plan[ROW_COUNT]:
            _some_rows(
                t, threads, heads, width * 4, keys, values, plan[ROW_INDEX], plan[ROW_TABLE], plan[ROW_WIDTH],
                plan[ROW_LOW], plan[ROW_HIGH], plan[ROW_COUNT], scale, group, kv_heads, shape[SIZE_], dims, mixed,
                mine.ctypes.data, mine.ctypes.data + group * dims * 4,
            )  # fmt: skip
        for number in range(chunks.shape[0]):
            chunk = chunks[number]
            first = chunk[CHUNK_BEGIN]
            _some_blocks(
                t, threads, heads + first * width * 4, width * 4, chunk[CHUNK_COUNT], chunk[CHUNK_START],
                chunk[CHUNK_TABLE], keys, values, group, kv_heads, shape[SIZE_], dims, plan[WINDOW], scale,
                mixed + first * q_heads * dims * 4, q_heads * dims * 4, work.ctypes.data,
            )  # fmt: skip
        turn = _wait(gate, turn, threads)
        turn = _linear(
            t, threads, gate, turn, mixed, q_heads * dims * 4, 0, eps, rows, q_heads * dims, layer[OUT], layer[OUT + 1],
            layer[OUT + 2], hidden, ADD, x, hidden * 4, shared, own,
        )  # fmt: skip
        turn = _wait(gate, turn, threads)
        turn = _linear(
            t, threads, gate, turn, x, hidden * 4, layer[POST_NORM], eps, rows, hidden, layer[GATE_UP],
            layer[GATE_UP + 1], layer[GATE_UP + 2], inner, GATE, inside, inner * 4, shared, own,
        )  # fmt: skip
        turn = _wait(gate, turn, threads)
        turn = _linear(
            t, threads, gate, turn, inside, inner * 4, 0, eps, rows, inner, layer[DOWN], layer[DOWN + 1],
            layer[DOWN + 2], hidden, ADD, x, hidden * 4, shared, own,
        )  # fmt: skip
        turn = _wait(gate, turn, threads)
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
    own = 2 * BLOCK * COLUMNS * 4 + ALONE * (5 * widest + 64)
    return 64 + threads * own + rows * (5 * widest + 64), own


@functools.cache
def _together(threads: int) -> int:
    """`threads` if that many really run at the same time, as those that wait for each other must; else 1."""
    names = np.zeros(threads, np.int64)
    _who(names)
    return threads if len(set(names.tolist())) == threads else 1


def num_threads() -> int:
    """As many as torch uses."""
    return _together(min(torch.get_num_threads(), numba.get_num_threads()))
