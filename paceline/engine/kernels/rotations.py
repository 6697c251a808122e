"""Rotary embeddings, and the keys and values of new tokens."""

import numpy as np
from numba import carray, prange, types

from paceline.compiled import linked
from paceline.engine.addresses import floats as _floats
from paceline.engine.addresses import longs as _longs
from paceline.engine.kernels import vectors as v
from paceline.engine.kernels.common import ALONE, F32, I64, by_hand, kernel
from paceline.engine.kernels.inputs import norm_row
from paceline.engine.kernels.memory import keep


@by_hand(I64, I64)
def _turn16(builder, pairs, turn):
    """pairs[0:16] times turn[0:16], both 8 complex numbers, in place."""
    pair, turned, lanes = v.load(builder, pairs), v.load(builder, turn), np.arange(16)
    real, imaginary = (v.pick(builder, turned, turned, lanes // 2 * 2 + part) for part in (0, 1))
    along = builder.fmul(pair, real)
    cross = builder.fmul(v.pick(builder, pair, pair, lanes ^ 1), imaginary)
    both = builder.fsub(along, cross), builder.fadd(along, cross)
    v.store(builder, v.pick(builder, *both, lanes + lanes % 2 * 16), pairs)


@linked
@kernel(types.void(*[I64] * 6, F32, *[I64] * 7))
def rotate_rows(
    heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, element, begin, end
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
                norm_row(address, dims, norm, eps, address)
            for i in range(0, dims - 15, 16):
                _turn16(address + i * 4, at_turn + i * 4)
            for i in range(dims // 16 * 16, dims, 2):
                real, imaginary = pairs[i], pairs[i + 1]
                pairs[i] = real * turn[i] - imaginary * turn[i + 1]
                pairs[i + 1] = real * turn[i + 1] + imaginary * turn[i]
            if head >= q_heads:
                keep(keys + place[head - q_heads] * dims * element, address, dims, element)
        for head in range(kv_heads):
            address = heads + row * width + (q_heads + kv_heads + head) * dims * 4
            keep(values + place[head] * dims * element, address, dims, element)


@kernel(parallel=True)  # compiled when first called: `decoder_layers` does without
def rotate_and_store(
    heads, rows, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, element, threads
):
    """heads [rows, q_heads + 2 kv_heads, dims]: queries and keys normed (unless 0) and rotated, keys and values stored.

    turns [rows, dims / 2] complex; where [rows, kv_heads]: rows of dims in the layer's keys and values, whose numbers
    have `element` bytes.
    """
    if rows < ALONE:
        rotate_rows(
            heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, element, 0, rows
        )
    else:
        for t in prange(threads):
            begin, end = rows * t // threads, rows * (t + 1) // threads
            rotate_rows(
                heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, element, begin, end
            )
