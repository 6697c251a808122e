"""Attention of single tokens over the paged KV cache, read in place: a Numba kernel for CPU.

torch has no paged attention on CPU: gathering the blocks first costs a write and a second read of every key and value,
and reading them is all that a decode does. Here each key row is read once for all query heads that share it.

The kernel runs in OpenMP's threads: torch's library of that name is loaded first, so both take turns on one pool.
Compiled once per machine (Numba's cache), about 5 s.
"""

import numba
import numpy as np
import torch  # noqa: F401 - before Numba's threads start, so that both use torch's OpenMP library
from numba import njit, prange, types
from numba.extending import intrinsic

numba.config.THREADING_LAYER = "omp"
numba.get_num_threads()  # starts them: a ValueError here and now where that layer cannot be had

FAST = {"reassoc", "contract", "nsz", "arcp"}  # everything but ignoring infinities and NaNs, which must come through
# Unsigned: Numba tests a signed index for being negative, and that keeps loops from being vectorised.
ZERO, ONE, TWO, THREE, FOUR = (np.uint64(n) for n in range(5))
FLOATS, FLOATS_2D = types.float32[::1], types.float32[:, ::1]
INTS, INTS_2D, SIZE = types.int64[::1], types.int64[:, ::1], types.uint64
BLOCK = (FLOATS, FLOATS, FLOATS, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE)


@intrinsic
def _float_of_bits(context, bits):  # noqa: ANN001, ANN202 - Numba's protocol
    """The float32 whose bits an int32 has."""

    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@njit(nogil=True, fastmath=FAST, cache=True, inline="always")
def _exp(x: float) -> float:
    """e^x for x <= 0, float32, in operations that compile to vector instructions; relative error below 1e-7.

    x = n ln 2 + r, |r| <= ln 2 / 2: a polynomial in r (the one of Cephes' expf), then n into the exponent's bits.
    """
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(types.void(*BLOCK), nogil=True, fastmath=FAST, cache=True)
def _score(query, keys, scores, at, begin, end, column, width, group, dims):  # noqa: ANN001, ANN202
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


@njit(types.void(FLOATS, SIZE, SIZE), nogil=True, fastmath=FAST, cache=True)
def _softmax(scores, at, count):  # noqa: ANN001, ANN202
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


@njit(types.void(*BLOCK), nogil=True, fastmath=FAST, cache=True)
def _mix(out, values, scores, at, begin, end, column, width, group, dims):  # noqa: ANN001, ANN202
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
    nogil=True, fastmath=FAST, cache=True,
)  # fmt: skip
def _one_head(query, keys, values, table, head, kv_heads, low, high, size, scores, out, group, dims):  # noqa: ANN001, ANN202
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


@njit(
    types.void(FLOATS_2D, FLOATS, FLOATS, INTS, INTS_2D, INTS, INTS, types.float32, *(types.int64,) * 4, FLOATS_2D),
    parallel=True, nogil=True, fastmath=FAST, cache=True,
)  # fmt: skip
def attend_rows(
    queries, keys, values, index, table, low, high, scale, kv_heads, size, dims, threads, out  # noqa: ANN001
):  # noqa: ANN201
    """Row i of queries [rows, heads * dims] over tokens [low[i], high[i]) of table[i], into row index[i] of out.

    keys, values: one layer of the pool, [num_blocks, kv_heads, size, dims] flat. Threads take items in turn: rows
    should come longest first.
    """
    group_dims = queries.shape[1] // kv_heads
    items, longest = index.shape[0] * kv_heads, (high - low).max()
    for thread in prange(threads):
        scores = np.empty(group_dims // dims * longest, np.float32)
        query, mixed = np.empty(group_dims, np.float32), np.empty(group_dims, np.float32)
        for item in range(thread, items, threads):
            row, head = item // kv_heads, item % kv_heads
            token, first = index[row], head * group_dims
            for d in range(group_dims):
                query[d] = queries[row, first + d] * scale
                mixed[d] = np.float32(0.0)
            _one_head(
                query, keys, values, table[row], np.uint64(head), np.uint64(kv_heads), np.uint64(low[row]),
                np.uint64(high[row]), np.uint64(size), scores, mixed, np.uint64(group_dims // dims), np.uint64(dims),
            )  # fmt: skip
            for d in range(group_dims):
                out[token, first + d] = mixed[d]
