"""Attention of single tokens over the paged KV cache, read in place: a Numba kernel for CPU.

torch has no paged attention on CPU: gathering the blocks first costs a write and a second read of every key and value,
and reading them is all that a decode does. Here each key row is read once for all query heads that share it.

The kernel runs in OpenMP's threads. torch's library of that name is loaded first, so both take turns on one pool.
"""

import functools
from collections.abc import Callable

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "nsz", "arcp"}  # everything but ignoring infinities and NaNs, which must come through
FLOATS_2D, FLOATS_3D, INTS, INTS_2D = types.float32[:, ::1], types.float32[:, :, ::1], types.int64[::1], types.int64[:, ::1]
SIGNATURE = types.void(
    FLOATS_2D, FLOATS_3D, FLOATS_3D, INTS, INTS_2D, INTS, INTS, types.float32, types.int64, FLOATS_2D
)


@intrinsic
def _float_of_bits(context, bits):  # noqa: ANN001, ANN202 - Numba's protocol
    """The float32 whose bits an int32 has."""

    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@njit(inline="always", fastmath=FAST)
def _exp(x: float) -> float:
    """e^x for x <= 0, float32, in operations that compile to vector instructions; relative error about 2e-7.

    x = n ln 2 + r, |r| <= ln 2 / 2: a Taylor polynomial in r, then n into the exponent (Cephes' expf).
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


@njit(inline="always", fastmath=FAST)
def _softmax(scores, count):  # noqa: ANN001, ANN202
    """scores[:count] to weights, in place."""
    peak = scores[0]
    for t in range(1, count):
        peak = max(peak, scores[t])
    total = np.float32(0.0)
    for t in range(count):
        weight = _exp(scores[t] - peak)
        scores[t] = weight
        total += weight
    inverse = np.float32(1.0) / total
    for t in range(count):
        scores[t] *= inverse


@functools.cache
def row_kernel(group: int, head_dim: int, block_size: int) -> Callable[..., None]:
    """The kernel for these sizes: constants, so that the inner loops become straight vector code.

    kernel(queries, keys, values, index, table, low, high, scale, threads, out): row index[i] of queries
    [tokens, heads * head_dim] over tokens [low[i], high[i]) of table[i], into out likewise. keys, values: one layer of
    the pool, [num_blocks, block_size, kv_heads * head_dim]. Everything contiguous.
    """

    @njit(nogil=True, fastmath=FAST)
    def score(query, keys, at, table, low, high, scores):  # noqa: ANN001, ANN202
        """Scores [group, high - low] of one key-value head, whose columns begin at `at`."""
        for b in range(low // block_size, (high - 1) // block_size + 1):
            block = keys[table[b]]
            base = b * block_size
            begin, end = max(low - base, 0), min(high - base, block_size)
            t = begin
            while t + 4 <= end:
                for g in range(group):
                    s0 = s1 = s2 = s3 = np.float32(0.0)
                    for d in range(head_dim):
                        q = query[g, d]
                        s0 += q * block[t, at + d]
                        s1 += q * block[t + 1, at + d]
                        s2 += q * block[t + 2, at + d]
                        s3 += q * block[t + 3, at + d]
                    p = base + t - low
                    scores[g, p], scores[g, p + 1], scores[g, p + 2], scores[g, p + 3] = s0, s1, s2, s3
                t += 4
            while t < end:
                for g in range(group):
                    s0 = np.float32(0.0)
                    for d in range(head_dim):
                        s0 += query[g, d] * block[t, at + d]
                    scores[g, base + t - low] = s0
                t += 1

    @njit(nogil=True, fastmath=FAST)
    def mix(scores, values, at, table, low, high, out):  # noqa: ANN001, ANN202
        """Adds the values, weighted by scores, to out [group, head_dim]."""
        for b in range(low // block_size, (high - 1) // block_size + 1):
            block = values[table[b]]
            base = b * block_size
            begin, end = max(low - base, 0), min(high - base, block_size)
            t = begin
            while t + 4 <= end:
                p = base + t - low
                for g in range(group):
                    w0, w1, w2, w3 = scores[g, p], scores[g, p + 1], scores[g, p + 2], scores[g, p + 3]
                    for d in range(head_dim):
                        out[g, d] += (
                            w0 * block[t, at + d]
                            + w1 * block[t + 1, at + d]
                            + w2 * block[t + 2, at + d]
                            + w3 * block[t + 3, at + d]
                        )
                t += 4
            while t < end:
                for g in range(group):
                    w0 = scores[g, base + t - low]
                    for d in range(head_dim):
                        out[g, d] += w0 * block[t, at + d]
                t += 1

    @njit(SIGNATURE, parallel=True, nogil=True, fastmath=FAST, cache=True)
    def kernel(queries, keys, values, index, table, low, high, scale, threads, out):  # noqa: ANN001, ANN202
        kv_heads = keys.shape[2] // head_dim
        items = index.shape[0] * kv_heads
        longest = (high - low).max()
        for thread in prange(threads):
            scores = np.empty((group, longest), np.float32)
            query = np.empty((group, head_dim), np.float32)
            mixed = np.empty((group, head_dim), np.float32)
            for item in range(thread, items, threads):
                row, head = item // kv_heads, item % kv_heads
                token, first, at = index[row], head * group * head_dim, head * head_dim
                for g in range(group):
                    for d in range(head_dim):
                        query[g, d] = queries[token, first + g * head_dim + d] * scale
                        mixed[g, d] = np.float32(0.0)
                score(query, keys, at, table[row], low[row], high[row], scores)
                for g in range(group):
                    _softmax(scores[g], high[row] - low[row])
                mix(scores, values, at, table[row], low[row], high[row], mixed)
                for g in range(group):
                    for d in range(head_dim):
                        out[token, first + g * head_dim + d] = mixed[g, d]

    return kernel
