"""Attention of chunks of prompts over the paged cache, whose layout is that of `rows`."""

import numpy as np
from llvmlite import ir
from numba import carray, prange, types

from paceline.compiled import linked
from paceline.engine.addresses import floats as _floats
from paceline.engine.addresses import longs as _longs
from paceline.engine.kernels import vectors as v
from paceline.engine.kernels.common import COLUMNS, F32, I64, LINE, LONG, LONGS_2D, MATRIX_STEPS, by_hand, kernel
from paceline.engine.kernels.matrix_tiles import set_shape
from paceline.engine.kernels.memory import halves_to_bf16, recall
from paceline.engine.kernels.passes import product
from paceline.engine.kernels.threads import begin_shares, next_of
from paceline.engine.kernels.vectors import LOG2E, ROUNDS, SIDES, VECTOR, WHOLE
from paceline.processor import HAS_AMX, HAS_AVX512, HAS_BF16

QUERIES, BLOCK_ROWS, KEYS = 32, 256, 128  # chunk attention: least tokens and rows of a block of queries, and of keys
CHUNK_BEGIN, CHUNK_COUNT, CHUNK_START, CHUNK_TABLE, CHUNK_FIELDS = range(5)  # columns of a chunk's line
FETCHED = 16 if HAS_AVX512 else 8  # tokens whose keys, or values, a tile in vectors fetches ahead


def _softens(sides):
    """soften(scores, count, peaks, totals, outputs, dims): online softmax of 32 queries over scores [count, 32], which
    become weights; `count` is even. Or of 16 of them, with one of the `sides`.

    peaks[0:32] and totals[0:32] are of what came before, then with these; what came before in outputs [dims, 32]
    shrinks.
    """

    @by_hand(*[I64] * 6)
    def soften(builder, scores, count, peaks, totals, outputs, dims):
        def weigh(row, sums):
            line, after = builder.add(scores, builder.mul(row, LONG(COLUMNS * 4))), []
            for side, level, total in zip(sides, levels, sums, strict=True):
                weights = v.exp16(builder, builder.fsub(v.load(builder, line, side), level))  # 0 of -inf
                v.store(builder, weights, line, side)
                after.append(builder.fadd(weights, total))
            return after

        before, levels = _raise_peaks(builder, scores, count, peaks, sides)
        factors = [v.exp16(builder, builder.fsub(old, level)) for old, level in zip(before, levels, strict=True)]
        _shrink(builder, totals, LONG(1), factors)
        sums = v.loop(builder, count, [v.load(builder, totals, side) for side in sides], weigh)
        _store_sides(builder, sums, totals)
        _shrink(builder, outputs, dims, factors)

    return soften


_soften, _soften_narrow = _softens(SIDES), _softens(SIDES[:1])


@by_hand(*[I64] * 6)
def _soften_pairs(builder, scores, count, peaks, totals, outputs, dims):
    """As `_softens`, of scores times log2 e; weights are pairs of bfloat16, a line of them for two of scores.

    A weight is 2^t, t = score - peak rounded to a 128th: the whole part of t, and 127, is its exponent, and the seven
    bits of its fraction are looked up. Peaks are rounded up to whole numbers, so factors are powers of 2, mostly 1.
    What is not a number weighs nothing; where nothing else is, totals are 0.
    """
    if not HAS_BF16:  # then nobody uses it
        return
    table = [round((2 ** (i / 128) - 1) * 128) for i in range(128)]
    kind = ir.VectorType(ir.IntType(8), 64)
    low, high = (ir.Constant(kind, table[i : i + 64]) for i in (0, 64))
    ones = builder.bitcast(v.all16(0x3F803F80, WHOLE), VECTOR)

    def weigh(row, sums):
        line, after = builder.add(scores, builder.mul(row, LONG(2 * COLUMNS * 4))), []
        target = builder.add(scores, builder.mul(row, LONG(COLUMNS * 4)))
        for side, shift, total in zip(SIDES, shifts, sums, strict=True):
            scored = [v.load(builder, line, COLUMNS * 4 * i + side) for i in range(2)]
            placed = [v.fma(builder, score, v.all16(128.0), shift) for score in scored]
            first, second = (builder.bitcast(v.larger(builder, place, v.all16(ROUNDS)), WHOLE) for place in placed)
            first = builder.and_(first, v.all16(0xFFFF, WHOLE))
            pairs = builder.or_(first, builder.shl(second, v.all16(16, WHOLE)))
            name, index = "llvm.x86.avx512.vpermi2var.qi.512", builder.bitcast(pairs, kind)
            fractions = builder.bitcast(v.call(builder, name, kind, low, index, high), WHOLE)
            exponents = builder.and_(pairs, v.all16(0xFF80FF80, WHOLE))
            weights = builder.or_(exponents, builder.and_(fractions, v.all16(0x007F007F, WHOLE)))
            weights = builder.bitcast(weights, VECTOR)
            v.store(builder, weights, target, side)
            add = ir.InlineAsm(ir.FunctionType(VECTOR, [VECTOR] * 3), "vdpbf16ps $2, $1, $0", "=v,v,v,0", False)
            after.append(builder.call(add, [weights, ones, total]))
        return after

    before, levels = _raise_peaks(builder, scores, count, peaks, SIDES, whole=True)
    shifts = [v.fma(builder, level, v.all16(-128.0), v.all16(ROUNDS + 127 * 128)) for level in levels]
    factors = []
    for old, level in zip(before, levels, strict=True):
        fall = builder.fptosi(v.larger(builder, builder.fsub(old, level), v.all16(-127.0)), WHOLE)
        exponent = builder.shl(builder.add(fall, v.all16(127, WHOLE)), v.all16(23, WHOLE))
        factors.append(builder.bitcast(exponent, VECTOR))
    changed = builder.or_(*(builder.fcmp_ordered("!=", factor, v.all16(1.0)) for factor in factors))
    some = ir.IntType(16)
    with builder.if_then(builder.icmp_unsigned("!=", builder.bitcast(changed, some), some(0)), likely=False):
        _shrink(builder, totals, LONG(1), factors)
        _shrink(builder, outputs, dims, factors)
    sums = v.loop(builder, builder.lshr(count, LONG(1)), [v.load(builder, totals, side) for side in SIDES], weigh)
    _store_sides(builder, sums, totals)


def _raise_peaks(builder, scores, count, peaks, sides, whole=False):
    """peaks[0:32] of 32 queries, or what of them is on those `sides`, become the largest of them and of scores
    [count, 32], rounded up if `whole`; what they were, and what they are, or 0 for those that are endless."""

    def larger(row, values):
        line = builder.add(scores, builder.mul(row, LONG(2 * COLUMNS * 4)))
        new = [v.load(builder, line, place) for place in (*sides, *(COLUMNS * 4 + side for side in sides))]
        return [v.larger(builder, score, value) for score, value in zip(new, values, strict=True)]

    before = [v.load(builder, peaks, side) for side in sides]
    found = v.loop(builder, builder.lshr(count, LONG(1)), [*before, *before], larger)
    tops = [v.larger(builder, *both) for both in zip(found[: len(sides)], found[len(sides) :], strict=True)]
    if whole:
        tops = [v.call(builder, "llvm.ceil.v16f32", VECTOR, top) for top in tops]
    _store_sides(builder, tops, peaks)
    endless = [builder.fcmp_ordered("==", top, v.all16(float("-inf"))) for top in tops]
    return before, [builder.select(none, v.all16(0.0), top) for none, top in zip(endless, tops, strict=True)]


def _store_sides(builder, values, place):
    for side, value in zip(SIDES, values, strict=False):
        v.store(builder, value, place, side)


def _shrink(builder, lines, count, factors):
    """Lines [count, 32] times a factor a column, of as many as there are."""

    def shrink(row, nothing):
        line = builder.add(lines, builder.mul(row, LONG(COLUMNS * 4)))
        for side, factor in zip(SIDES, factors, strict=False):
            v.store(builder, builder.fmul(v.load(builder, line, side), factor), line, side)
        return []

    v.loop(builder, count, [], shrink)


@kernel(types.void(*[I64] * 7))
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


def _transposes(load=v.load_some, before=False, after=False):
    """transpose(sources, offset, left, scale, target, stride): 16 numbers, or `left`, at each of 16 addresses `sources`
    + offset, times scale, become columns of target, whose 16 lines are `stride` bytes apart.

    Or pairs of bfloat16: numbers at two of 32 addresses, if put together `before`, or two of 8 lines, if `after`.
    """

    def paired(builder, rows):
        return [v.pair(builder, *both) for both in zip(rows[::2], rows[1::2], strict=True)]

    @by_hand(I64, I64, I64, F32, I64, I64)
    def transpose(builder, sources, offset, left, scale, target, stride):
        every, mask, rows = v.spread(builder, scale), v.mask(builder, left), []
        for i in range(32 if before else 16):
            source = builder.add(v.load(builder, sources, 8 * i, LONG), offset)
            rows.append(builder.fmul(load(builder, source, mask), every))
        rows = paired(builder, rows) if before else rows
        v.exchange(builder, rows)
        for i, row in enumerate(paired(builder, rows) if after else rows):
            v.store(builder, row, builder.add(target, builder.mul(stride, LONG(i))))

    return transpose


_transpose_floats, _transpose_halves = _transposes(), _transposes(v.load_halves)
_transpose_pairs, _transpose_to_pairs = _transposes(v.load_halves, before=True), _transposes(after=True)


@kernel(types.void(types.boolean, *[I64] * 5, F32, *[I64] * 3))
def _queries_to_columns(bf16, queries, stride, rows, group, dims, scale, sources, target, panel):
    """Rows of queries, times scale, to panels [dims, 32], `panel` bytes apart; `sources` is for 16 addresses."""
    source, together = carray(_longs(sources), (16,)), 2 if bf16 else 1
    for column in range(0, (rows + COLUMNS - 1) // COLUMNS * COLUMNS, 16):
        for i in range(16):  # in the columns that are left over something is computed, for nobody
            row = min(column + i, rows - 1)
            source[i] = queries + row // group * stride + row % group * dims * 4
        for d in range(0, dims, 16):
            to = target + column // COLUMNS * panel + (d // together * COLUMNS + column % COLUMNS) * 4
            if bf16:
                _transpose_to_pairs(sources, d * 4, dims - d, scale, to, COLUMNS * 4)
            else:
                _transpose_floats(sources, d * 4, dims - d, scale, to, COLUMNS * 4)


@kernel(types.void(*[I64] * 9))
def _list_next(listed, first, last, table, keys, values, block_stride, size, line):
    """Where keys [first, last) and their values are, but of no more than are read together: how many addresses, and
    then these, the last ones first, each of min(size, FETCHED) lines."""
    some = min(size, FETCHED)
    count = max(0, min(min(last - first, KEYS) // some, KEYS // FETCHED))
    place, places = carray(_longs(listed), (2 * count + 1,)), carray(_longs(table), (max(last, 1),))
    place[0] = 2 * count
    for i in range(count):
        token = first + (count - 1 - i) * some
        at = places[token // size] * block_stride + token % size * line
        place[1 + 2 * i], place[2 + 2 * i] = values + at, keys + at


@kernel(types.void(types.boolean, *[I64] * 15))
def _read_block(
    bf16, first, width, table, keys, values, block_stride, size, dims, element, sources, nothing, key, key_stride,
    value, value_stride,
):  # fmt: skip
    """Keys [first, first + width) to [width, dims] and their values to [dims, width]; `sources` is for 32 addresses, at
    `nothing` are zeros."""
    together, one = 2 if bf16 else 1, np.float32(1.0)
    places, source = carray(_longs(table), ((first + width + size - 1) // size,)), carray(_longs(sources), (32,))
    page, slot = first // size, first % size
    for low in range(0, width, 16 * together):
        for i in range(16 * together):
            source[i] = nothing  # the weights of these will be 0
            if low + i < width:
                at = places[page] * block_stride + slot * dims * element
                source[i] = values + at
                if bf16:
                    halves_to_bf16(key + (low + i) * key_stride, keys + at, dims)
                else:
                    recall(key + (low + i) * key_stride, keys + at, dims, element)
                slot += 1
                if slot == size:
                    page, slot = page + 1, 0
        for d in range(0, dims, 16):
            to = value + d * value_stride + low // together * 4
            if bf16:
                _transpose_pairs(sources, d * element, dims - d, one, to, value_stride)
            elif element == 2:
                _transpose_halves(sources, d * element, dims - d, one, to, value_stride)
            else:
                _transpose_floats(sources, d * element, dims - d, one, to, value_stride)


@kernel(types.void(*[I64] * 9))
def _columns_to_outputs(mixed, totals, rows, group, dims, sources, lines, out, out_stride):
    """Panels [dims, 32] over totals to rows of outputs; `lines` is for 32 of them, `sources` for 16 addresses."""
    spare, one = (dims + 15) // 16 * 16, np.float32(1.0)
    source, total = carray(_longs(sources), (16,)), carray(_floats(totals), (rows,))
    for row in range(rows):
        if row % COLUMNS == 0:
            for d in range(0, dims, 16):
                for i in range(16):
                    source[i] = mixed + (row // COLUMNS * spare + d + i) * COLUMNS * 4
                for column in range(0, COLUMNS, 16):
                    _transpose_floats(sources, column * 4, 16, one, lines + (column * spare + d) * 4, spare * 4)
        mix = carray(_floats(lines + row % COLUMNS * spare * 4), (dims,))
        share = one / total[row] if total[row] != 0 else np.float32(np.nan)  # 0: not one score was a number
        target = carray(_floats(out + row // group * out_stride + row % group * dims * 4), (dims,))
        for d in range(dims):
            target[d] = mix[d] * share


@linked
@kernel(types.void(*[I64] * 13, F32, *[I64] * 3))
def _attend_block(
    queries, stride, count, start, table, keys, values, block_stride, group, size, dims, element, window, scale, out,
    out_stride, work,
):  # fmt: skip
    """One block of queries of one key-value head. Scores are [keys, 32 queries], outputs [dims, 32 queries]: all is in
    32 columns, and values are turned as they are read, once for all queries.

    Keys and values that are kept in half precision are multiplied as bfloat16 where the processor can, in pairs: two
    dimensions of a key, one of two values.
    """
    bf16 = HAS_BF16 and element == 2 and dims % 16 == 0
    matrices, shape = bf16 and HAS_AMX and dims >= 2 * MATRIX_STEPS, 0
    together = 2 if bf16 else 1  # numbers of a step
    least = together * (MATRIX_STEPS if matrices else 2)  # keys that values are multiplied by together
    rows, last, spare = count * group, start + count, (dims + 15) // 16 * 16
    panels, depth = (rows + COLUMNS - 1) // COLUMNS, dims // together
    key_stride, value_stride = depth * 4 + LINE, KEYS // together * 4 + LINE
    query, query_panel = work, spare // together * COLUMNS * 4  # [panels, depth, 32]
    mixed = query + panels * query_panel  # [panels, spare, 32]
    scores = mixed + panels * spare * COLUMNS * 4  # [KEYS, 32]
    key = scores + KEYS * COLUMNS * 4
    value = key + KEYS * key_stride  # [spare, KEYS / together]
    lines = value + spare * value_stride  # [32, spare]: outputs of a panel; before, the first is of zeros
    peaks = lines + COLUMNS * spare * 4
    totals = peaks + panels * COLUMNS * 4
    following, nbytes = totals + panels * COLUMNS * 4, min(size, FETCHED) * dims * element  # see `product`
    carray(_floats(mixed), (panels * spare * COLUMNS,))[:] = np.float32(0.0)
    carray(_floats(peaks), (panels * COLUMNS,))[:] = np.float32(-np.inf)
    carray(_floats(totals), (panels * COLUMNS,))[:] = np.float32(0.0)
    carray(_floats(lines), (spare,))[:] = np.float32(0.0)
    sources = scores  # addresses, while there are no scores
    scale *= LOG2E if bf16 else np.float32(1.0)
    _queries_to_columns(bf16, queries, stride, rows, group, dims, scale, sources, query, query_panel)
    begin = max(0, start - window + 1) // KEYS * KEYS if window != 0 else 0
    for first in range(begin, last, KEYS):
        width = min(KEYS, last - first)
        _read_block(
            bf16, first, width, table, keys, values, block_stride, size, dims, element, sources, lines, key, key_stride,
            value, value_stride,
        )  # fmt: skip
        _list_next(following, first + KEYS, last, table, keys, values, block_stride, size, dims * element)
        for panel in range(panels):
            row = panel * COLUMNS
            several = min(COLUMNS, rows - row)
            narrow = several <= COLUMNS // 2 and not bf16
            lowest, highest = start + row // group, start + (row + several - 1) // group
            if first > highest or (window != 0 and first + width <= lowest - window + 1):
                continue
            seen = min(width, highest + 1 - first)
            whole = (seen + least - 1) // least * least
            asked = query + panel * query_panel
            carray(_floats(scores + seen * COLUMNS * 4), ((whole - seen) * COLUMNS,))[:] = np.float32(-np.inf)
            shape = product(
                matrices, bf16, narrow, shape, seen, key, key_stride, asked, depth, scores, True, following, nbytes
            )
            if first + seen > lowest + 1 or (window != 0 and first <= highest - window):
                _hide(scores, seen, start, first, group, row, window)
            mix = mixed + panel * spare * COLUMNS * 4
            if bf16:
                _soften_pairs(scores, whole, peaks + row * 4, totals + row * 4, mix, dims)
            elif narrow:
                _soften_narrow(scores, whole, peaks + row * 4, totals + row * 4, mix, dims)
            else:
                _soften(scores, whole, peaks + row * 4, totals + row * 4, mix, dims)
            shape = product(
                matrices, bf16, narrow, shape, dims, value, value_stride, scores, whole // together, mix, False,
                following, nbytes,
            )  # fmt: skip
    if matrices:
        set_shape(0)
    _columns_to_outputs(mixed, totals, rows, group, dims, sources, lines, out, out_stride)


@kernel(I64(I64, I64))
def _block_tokens(group, dims):
    """Of a block of queries. With AMX reading keys and values takes as long as what a hundred rows do with them."""
    return max(QUERIES, (2 * BLOCK_ROWS if HAS_AMX and dims <= 64 else BLOCK_ROWS) // group)


@kernel(I64(I64, I64))
def block_floats(group, dims):
    """What a block of queries works with, in floats: queries, outputs, maxima and sums, scores, keys, values, lines
    of these, addresses to fetch, and up to the next line of the caches."""
    spare = (dims + 15) // 16 * 16
    rows = (_block_tokens(group, dims) * group + COLUMNS - 1) // COLUMNS * COLUMNS
    kept = KEYS * (COLUMNS + dims + LINE // 4) + spare * (KEYS + LINE // 4) + 2 * (2 * KEYS // FETCHED + 1)
    return rows * (2 * spare + 2) + kept + COLUMNS * spare + LINE // 4


@linked
@kernel(types.void(*[I64] * 6, LONGS_2D, *[I64] * 8, F32, *[I64] * 3))
def some_blocks(
    t, threads, gate, turn, queries, stride, chunks, keys, values, group, kv_heads, size, dims, element, window, scale,
    out, out_stride, work,
):  # fmt: skip
    """What a thread takes of the blocks of chunks [n, CHUNK_FIELDS]; `work` is its own, `block_floats` of zeros or
    finite numbers. Heads come one after the other, the blocks of each the longest first, while its keys are in a cache.
    """
    work += -work % LINE
    per, lines = _block_tokens(group, dims), size * dims * element  # tokens of a block, bytes of a head in the cache's
    whole = 0
    for n in range(chunks.shape[0]):
        whole += (chunks[n, CHUNK_COUNT] + per - 1) // per * kv_heads
    begin_shares(gate, turn, t, threads)
    item, end, empty = next_of(gate, turn, t, threads, whole, 1, 0)
    while item < end:
        n, blocks = 0, (chunks[0, CHUNK_COUNT] + per - 1) // per
        while item >= blocks * kv_heads:
            item -= blocks * kv_heads
            n += 1
            blocks = (chunks[n, CHUNK_COUNT] + per - 1) // per
        head, first = item // blocks, (blocks - 1 - item % blocks) * per
        row, count, start = chunks[n, CHUNK_BEGIN] + first, chunks[n, CHUNK_COUNT] - first, chunks[n, CHUNK_START]
        _attend_block(
            queries + row * stride + head * group * dims * 4, stride, min(per, count), start + first,
            chunks[n, CHUNK_TABLE], keys + head * lines, values + head * lines, kv_heads * lines, group, size, dims,
            element, window, scale, out + row * out_stride + head * group * dims * 4, out_stride, work,
        )  # fmt: skip
        item, end, empty = next_of(gate, turn, t, threads, whole, 1, empty)


@kernel(parallel=True)  # compiled when first called: `decoder_layers` does without
def attend_chunk(
    queries, stride, count, start, table, keys, values, group, kv_heads, size, dims, element, window, scale, out,
    out_stride, threads,
):  # fmt: skip
    """A chunk: queries [count, ...] at positions from `start` on, causal, the last `window` tokens unless that is 0.

    As FlashAttention (Dao et al., 2022): blocks of queries pass over blocks of keys with a running maximum and sum. The
    rows of a block are those of all query heads that share the keys. Blocks of keys begin at multiples of KEYS, so a
    token's sums do not depend on how its prompt was cut.
    """
    chunks, counters = np.zeros((1, CHUNK_FIELDS), np.int64), np.zeros(LINE // 8 * (1 + threads), np.int64)
    chunks[0, CHUNK_COUNT], chunks[0, CHUNK_START], chunks[0, CHUNK_TABLE] = count, start, table
    for t in prange(threads):
        work = np.zeros(block_floats(group, dims), np.float32)
        some_blocks(
            t, threads, counters.ctypes.data, 0, queries, stride, chunks, keys, values, group, kv_heads, size, dims,
            element, window, scale, out, out_stride, work.ctypes.data,
        )  # fmt: skip
