"""Attention of single tokens over the paged cache.

Keys and values of a layer: [num_blocks, kv_heads, size, dims], the rows of a head in a block together.
"""

import functools

import numpy as np
from llvmlite import ir
from numba import carray, prange, types
from numba.extending import register_jitable

from paceline.compiled import linked
from paceline.engine.addresses import floats as _floats
from paceline.engine.addresses import longs as _longs
from paceline.engine.kernels import vectors as v
from paceline.engine.kernels.common import F32, I64, LONG, by_hand, kernel
from paceline.engine.kernels.memory import copy
from paceline.engine.kernels.vectors import SUMS
from paceline.processor import HAS_AVX512

# Bytes of a token's heads that are read together, of scores meanwhile, and from what is in use to what is fetched: a
# core of a Zen 3 in a virtual machine reads 2 KiB here and there with 6 GB/s, 4 with 7, 8 with 9, 32 with 11, which is
# what it reads everything in order with
NEIGHBOURS, MOST_SCORES, NEAR = 32768, 1 << 17, 4096 if HAS_AVX512 else 2048
# Keys and values are float32 or half precision: how 16 of them are read, and the power of 2 of an element's bytes.
ELEMENTS_KEPT = (v.load_some, 2), (v.load_halves, 1)
HEADS = (4, 2, 1) if HAS_AVX512 else (2, 1)  # query heads that share keys and values and are computed together
# heads, and keys, that are scored together: so many sums are in registers
SCORED = *((heads, SUMS // heads) for heads in HEADS), *((heads, 1) for heads in HEADS), (1, 4)


def _forms(make, shapes):
    """make(load, shift, *shape)() for each precision and shape."""
    return [functools.partial(make, *kept, *shape) for kept in ELEMENTS_KEPT for shape in shapes]


@by_hand(*[I64] * 7)
def _score_some(builder, form, query, keys, dims, ahead, scores, width):
    """Products of query [heads, dims] and keys [rows, dims] to scores[h * width : h * width + rows] of each head; what
    lies `ahead` bytes from the keys is fetched meanwhile. Heads and rows by `form`.

    Sums run in the same order whatever it is: SUMS lanes over dims, then over the lanes.
    """

    def build(load, shift, heads, rows):
        def add(i, left, sums):
            mask = v.mask(builder, left)
            place, parts = builder.add(query, builder.shl(i, LONG(6))), []
            for _ in range(heads):
                parts.append(v.load_some(builder, place, mask))
                place = builder.add(place, builder.shl(dims, LONG(2)))
            place, after = builder.add(keys, builder.shl(i, LONG(4 + shift))), list(sums)
            for row in range(rows):
                v.fetch_line(builder, builder.add(place, ahead))
                key = load(builder, place, mask)
                for head, part in enumerate(parts):
                    which = head * rows + row
                    for first in range(0, 16, SUMS):
                        lanes = range(first, first + SUMS)
                        pair = (v.pick(builder, one, one, lanes) for one in (part, key))
                        after[which] = v.fma(builder, *pair, after[which])
                place = builder.add(place, builder.shl(dims, LONG(shift)))
            return after

        zeros, lanes = ir.Constant(ir.VectorType(ir.FloatType(), SUMS), None), np.arange(SUMS)
        sums, bit = v.over(builder, dims, 16, [zeros] * (heads * rows), add), SUMS // 2
        while bit:  # this bit of a lane says from which vector its sum is, while there are two
            two = len(sums) > bit
            pairs = zip(sums[:bit], sums[bit:], strict=True) if two else [(total, total) for total in sums]
            other = (lanes & bit > 0) * SUMS if two else 0
            sums = [
                builder.fadd(v.pick(builder, *pair, lanes | other), v.pick(builder, *pair, lanes ^ bit | other))
                for pair in pairs
            ]
            bit //= 2
        for head in range(heads):
            own = v.pick(builder, sums[0], sums[0], range(head * rows, (head + 1) * rows))
            v.store(builder, own, builder.add(scores, builder.mul(width, LONG(4 * head))))

    v.each_of(builder, form, _forms(build, SCORED))


@by_hand(I64, I64)
def _weigh(builder, scores, count):
    """Softmax of scores[0:count] in place; 16 numbers behind them are lost."""
    parts, nothing = builder.lshr(builder.add(count, LONG(15)), LONG(4)), v.all16(float("-inf"))
    v.store(builder, nothing, builder.add(scores, builder.shl(count, LONG(2))))

    def place(i):
        return builder.add(scores, builder.shl(i, LONG(6)))

    def weigh(i, sums):
        weight = v.exp16(builder, builder.fsub(v.load(builder, place(i)), peak))
        v.store(builder, weight, place(i))
        return [builder.fadd(sums[0], weight)]

    def share(i, values):
        v.store(builder, builder.fmul(v.load(builder, place(i)), inverse), place(i))
        return []

    (peak,) = v.loop(builder, parts, [nothing], lambda i, old: [v.larger(builder, v.load(builder, place(i)), *old)])
    peak = v.across(builder, peak, functools.partial(v.larger, builder))
    (total,) = v.loop(builder, parts, [v.all16(0.0)], weigh)
    inverse = builder.fdiv(v.all16(1.0), v.across(builder, total, builder.fadd))
    v.loop(builder, parts, [], share)


@by_hand(*[I64] * 8)
def _mix_some(builder, form, weights, width, values, count, dims, ahead, out):
    """out[h, dims] += weights[h * width :][:count] values[count, dims] of each head, 64 or fewer dims at a time; what
    lies `ahead` bytes from the values is fetched meanwhile. Heads by `form`."""

    def build(load, shift, heads):
        together = 4 if HAS_AVX512 else 4 // heads  # vectors of a row: so many sums are in registers

        def part(i, left, nothing):
            firsts = [builder.add(builder.mul(i, LONG(16 * together)), LONG(16 * j)) for j in range(together)]
            masks = [v.mask(builder, left and builder.sub(dims, first)) for first in firsts]

            def add(t, sums):
                row = builder.add(values, builder.shl(builder.mul(t, dims), LONG(shift)))
                place, every = builder.add(weights, builder.shl(t, LONG(2))), []
                for _ in range(heads):
                    every.append(v.spread(builder, v.load(builder, place, 0, ir.FloatType())))
                    place = builder.add(place, builder.shl(width, LONG(2)))
                after = list(sums)
                for j, (first, mask) in enumerate(zip(firsts, masks, strict=True)):
                    place = builder.add(row, builder.shl(first, LONG(shift)))
                    v.fetch_line(builder, builder.add(place, ahead))
                    value = load(builder, place, mask)
                    for head, weight in enumerate(every):
                        which = head * together + j
                        after[which] = v.fma(builder, weight, value, after[which])
                return after

            lines = [builder.add(out, builder.shl(builder.mul(dims, LONG(head)), LONG(2))) for head in range(heads)]
            places = [builder.add(line, builder.shl(first, LONG(2))) for line in lines for first in firsts]
            masks_of = masks * heads
            before = [v.load_some(builder, place, mask) for place, mask in zip(places, masks_of, strict=True)]
            for value, place, mask in zip(v.loop(builder, count, before, add), places, masks_of, strict=True):
                v.store_some(builder, value, place, mask)
            return []

        v.over(builder, dims, 16 * together, [], part)

    v.each_of(builder, form, _forms(build, [(heads,) for heads in HEADS]))


@kernel(I64(I64), inline="always")
def scores_of(count):
    """Floats that the scores of so many tokens take, whole vectors and one more."""
    return (count + 15) // 16 * 16 + 16


@kernel(types.void(*[I64] * 9))
def _score(form, query, keys, count, dims, element, ahead, scores, width):
    """Products of query [HEADS[form], dims] with keys [count, dims] to scores[h * width : h * width + count]."""
    row, kept = 0, len(SCORED) * (element == 2)
    while row < count:
        shape, left = form, count - row
        if left < SCORED[form][1]:
            shape = len(SCORED) - 1 if HEADS[form] == 1 and left >= SCORED[-1][1] else len(HEADS) + form
        _score_some(kept + shape, query, keys + row * dims * element, dims, ahead, scores + row * 4, width)
        row += SCORED[shape][1]


@register_jitable
def most_of_run(group: int, longest: int) -> int:
    """Rows whose scores of so many tokens stay in the second cache, for one key-value head."""
    return max(1, MOST_SCORES // (4 * group * (longest + 32)))


@kernel(I64(*[I64] * 7))
def heads_together(runs, most, kv_heads, group, longest, block, threads):
    """Key-value heads of a run that a thread attends to together, since what a block has of them is in a row: as many
    as fill NEIGHBOURS, where their scores stay in the second cache and all threads have at least two such items."""
    heads, scores = 1, 4 * most * group * scores_of(longest)
    while (
        heads * block < NEIGHBOURS and kv_heads % (2 * heads) == 0 and 2 * heads * scores <= MOST_SCORES
        and runs * kv_heads >= 4 * heads * threads
    ):  # fmt: skip
        heads *= 2
    return heads


@kernel(types.void(*[I64] * 17))
def _some_heads(
    query, keys, values, table, head, heads, kv_heads, low, high, run, size, scores, out, group, dims, element,
    following,
):  # fmt: skip
    """A run's query heads of key-value heads [head, head + heads), token i over tokens [low[i], high[i]); adds to out.
    Queries and out are [heads, run, group, dims].

    What all of the run see of a block is read once for all; each number is made as if its token were alone.

    The processor's own fetching ends where what is read does not go on. So line by line, as a head's part of a block is
    read, what comes a little later is fetched, and with the last head's what the first one has in the next block, at
    last in that at `following` (0: none): many at once would be more than a core can wait for.
    """
    lows, highs = carray(_longs(low), (run,)), carray(_longs(high), (run,))
    lowest, highest, latest, least = lows[0], highs[0], lows[0], highs[0]
    for i in range(1, run):
        lowest, latest = min(lowest, lows[i]), max(latest, lows[i])
        highest, least = max(highest, highs[i]), min(least, highs[i])
    first, last, width = lowest // size, (highest - 1) // size, scores_of(highest - lowest)
    places, block = carray(_longs(table), (last + 1,)), size * dims * element
    for part in (keys, values):
        for b in range(first, last + 1):
            some = run if latest <= b * size and (b + 1) * size <= least else 1
            for h in range(heads):
                start = part + (places[b] * kv_heads + head + h) * block
                after = following
                if h + 1 < heads:
                    after = start + min(block, NEAR)
                elif b < last:
                    after = part + (places[b + 1] * kv_heads + head) * block
                elif part == keys:
                    after = values + (places[first] * kv_heads + head) * block
                ahead = after - start if after != 0 else 0
                for row in range(0, run, some):
                    begin, end = max(b * size, lows[row]), min((b + 1) * size, highs[row])
                    g, of_row, score = 0, (h * run + row) * group, scores + (begin - lowest) * 4
                    here = start + (begin - b * size) * dims * element
                    while g < some * group and begin < end:
                        form = 0
                        while HEADS[form] > some * group - g:
                            form += 1
                        mine, to = score + (of_row + g) * width * 4, (of_row + g) * dims * 4
                        if part == keys:
                            _score(form, query + to, here, end - begin, dims, element, ahead, mine, width)
                        else:
                            kept = len(HEADS) * (element == 2)
                            _mix_some(kept + form, mine, width, here, end - begin, dims, ahead, out + to)
                        ahead, g = 0, g + HEADS[form]
        for h in range(heads if part == keys else 0):
            for row in range(run):
                for g in range(group):
                    score = scores + (((h * run + row) * group + g) * width + lows[row] - lowest) * 4
                    _weigh(score, highs[row] - lows[row])


@linked
@kernel(types.void(*[I64] * 14, F32, *[I64] * 8))
def some_rows(
    t, threads, heads, queries, stride, keys, values, index, table, width, low, high, first, runs, scale, group,
    kv_heads, size, dims, element, out, out_stride, own,
):  # fmt: skip
    """A thread's share of `attend_rows`, so many key-value heads at a time; `own` is for `row_floats`."""
    bounds, numbers, parts = carray(_longs(first), (runs + 1,)), group * dims, kv_heads // heads
    row_of = carray(_longs(index), (bounds[runs],))
    for item in range(t, runs * parts, threads):
        part = item // runs  # by heads: what others of a sequence read is then still in the caches
        at = (item + part) % runs  # not the same ones for a thread every time: some read much more than others
        begin, run = bounds[at], bounds[at + 1] - bounds[at]
        query, mixed = own, own + heads * run * numbers * 4
        for h in range(heads):
            for i in range(run):
                to = (h * run + i) * numbers * 4
                source = queries + row_of[begin + i] * stride + (part * heads + h) * numbers * 4
                scaled, plain = carray(_floats(query + to), (numbers,)), carray(_floats(source), (numbers,))
                for d in range(numbers):
                    scaled[d] = plain[d] * scale
                carray(_floats(mixed + to), (numbers,))[:] = np.float32(0.0)
        later = item + threads
        then, following = (later % runs + later // runs) % runs, 0
        if later < runs * parts:
            then = bounds[then + 1] - 1
            place = carray(_longs(table + then * width * 8), (width,))[carray(_longs(low), (then + 1,))[then] // size]
            following = keys + (place * kv_heads + later // runs * heads) * size * dims * element
        _some_heads(
            query, keys, values, table + (begin + run - 1) * width * 8, part * heads, heads, kv_heads, low + begin * 8,
            high + begin * 8, run, size, mixed + heads * run * numbers * 4, mixed, group, dims, element, following,
        )  # fmt: skip
        for h in range(heads):
            for i in range(run):
                target = out + row_of[begin + i] * out_stride + (part * heads + h) * numbers * 4
                copy(target, mixed + (h * run + i) * numbers * 4, numbers * 4)


@kernel(I64(*[I64] * 5), inline="always")
def row_floats(heads, most, group, dims, longest):
    """Of a thread that attends to runs: queries, what they attend to, and scores of the longest."""
    return heads * most * group * (2 * dims + scores_of(longest))


@kernel(parallel=True)  # compiled when first called: `decoder_layers` does without
def attend_rows(
    queries, stride, keys, values, index, table, width, low, high, first, runs, most, longest, scale, group, kv_heads,
    size, dims, element, threads, out,
):  # fmt: skip
    """Single tokens: queries[index[i]] over tokens [low[i], high[i]) of table[i] [width], to out[index[i]].

    Rows [first[r], first[r + 1]), up to `most`, are a run: of one sequence, whose keys and values are read once for all
    of them, as for the `group` of query heads that share them. `longest`: tokens that a run sees in all. Keys are read
    in place: torch has no paged attention on CPU, and gathering would write and read every key once more. Threads take
    runs in turn: the longest should come first.
    """
    heads = heads_together(runs, most, kv_heads, group, longest, size * dims * element, threads)
    for t in prange(threads):
        own = np.empty(row_floats(heads, most, group, dims, longest), np.float32)
        some_rows(
            t, threads, heads, queries, stride, keys, values, index, table, width, low, high, first, runs, scale, group,
            kv_heads, size, dims, element, out, kv_heads * group * dims * 4, own.ctypes.data,
        )  # fmt: skip
