"""Numba kernels of the sampler, one row at a time: exact, without sorting and without a softmax of the whole row.

Why a row needs so little work (V = 32k: microseconds, not milliseconds):

* **Unfiltered rows** are argmax(d + G) with d = (logit - peak) / T. A vectorised pass computes the token's hash and an
  upper bound of G from the bits of the hash (the float's exponent and mantissa read as a piecewise linear log2), and
  only blocks whose bound beats the best exact score so far are scanned with real logarithms.
* **top_p alone**: draw from the whole row first. The argmax over all tokens is the argmax over the nucleus whenever it
  lies in the nucleus, which happens with probability >= top_p and costs one masked sum to decide. Otherwise the
  nucleus lies above the token drawn: that is the prefix to search, and it holds the needed mass by construction.
* **top_k**: the k-th largest block maximum is a floor that at least k tokens reach; few more do, and only blocks that
  reach it are read again. The same holds for min_p's floor.
* Thresholds (the k-th largest, the end of the nucleus) are found by bisection over order-preserving integer keys with
  vectorised counts and sums, so ties, infinities and any distribution take the same bounded number of passes.

A filter's result is two numbers (floor, last): logits above the floor survive, and those equal to it up to id `last`.
Everything is per row and in a fixed order: the same bits for any batch. `logits` come twice, as float32 and as the
int32 view of the same memory; a "key" is the int32 of a float in the floats' order (-0.0 just below 0.0).
One file on purpose: Numba's cache on disk notices a change only in the file that the compiled function is in. Who
builds on these from another one is `watched`.
"""

import math

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

from paceline.compiled import linked

BLOCK = 64  # tokens that share one maximum
WIDE = 256  # tokens whose bounds or weights are computed together
GREEDY_BELOW = 1e-5
SLACK = 1e-3  # covers the float32 rounding of the bound for every score that can still win
EMPTY = np.int32(-(2**31))
SIGN = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)
Floats = np.ndarray  # float32
Ints = np.ndarray  # int32: bits or keys
_ROW, _KEYS, _DOUBLES = types.float32[::1], types.int32[::1], types.float64[::1]
_ROWS, _BITS, _PARAMS = types.float32[:, ::1], types.int32[:, ::1], types.float64[:, ::1]
Scratch = tuple[Ints, Floats]  # keys [vocab + 1] and weights [vocab] of candidates
FAST = {"nnan", "nsz", "reassoc", "contract", "arcp"}


@intrinsic
def _as_bits(typing_context, value):  # noqa: ARG001
    """The int32 with the bits of a float32."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic
def _as_float(typing_context, value):  # noqa: ARG001
    """The float32 with the bits of an int32."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@njit(nogil=True, cache=True)
def _flip(x: np.int32) -> np.int32:
    """Float bits to an int32 in the floats' order, and back."""
    return np.int32(x ^ (np.int32(x >> np.int32(31)) & SIGN))


@njit(nogil=True, cache=True)
def _mix64(x: np.uint64) -> np.uint64:
    x = np.uint64((x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    x = np.uint64((x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(x ^ (x >> np.uint64(31)))


@njit(nogil=True, cache=True)
def _position_key(stream: np.uint64, position: int) -> np.uint64:
    return _mix64(np.uint64(stream + np.uint64(position + 1) * np.uint64(0x9E3779B97F4A7C15)))


@njit(nogil=True, cache=True)
def _token_hash(low: np.uint32, high: np.uint32, token: np.uint32) -> np.uint32:
    x = np.uint32(token) ^ low
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(17))) * np.uint32(0xED5AD4BB))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(11))) + high)
    x = np.uint32(x * np.uint32(0xAC4C1B51))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x31848BAB))
    return np.uint32(x ^ np.uint32(x >> np.uint32(14)))


@njit(nogil=True, cache=True)
def _gumbel(h: np.uint32) -> float:
    return -math.log(-math.log1p(-(np.float64(np.uint32(~h)) + 0.5) * 2.0**-32))


@njit(nogil=True, cache=True, fastmath=FAST)
def _gumbel_bound(h: np.uint32) -> np.float32:
    """At least G: log2 is concave, so the line through powers of two lies below it."""
    bits = _as_bits(np.float32(np.int32(np.uint32(~h) >> np.uint32(1))))
    return np.float32(109.51726) - np.float32(bits) * np.float32(8.262958e-08)  # ln2 * 158, ln2 / 2^23


@njit(nogil=True, cache=True)
def _summary(bits: Ints, maxima: Ints) -> tuple[np.int32, bool]:
    """Fills maxima [blocks] with each block's largest key; returns the largest, and whether the row has a NaN.

    Of floats the largest is the largest of their bits if it has no sign, else the least of their bits without one.
    """
    peak, highest, most = EMPTY, EMPTY, np.uint32(0)
    for b in range(maxima.shape[0]):
        block = bits[b * BLOCK : (b + 1) * BLOCK]
        top, least = EMPTY, np.uint32(0xFFFFFFFF)
        for j in range(block.shape[0]):
            x = block[j]
            top = max(top, x)
            least = min(least, np.uint32(x))
            most = max(most, np.uint32(x))
        highest = max(highest, top)
        maxima[b] = top if top >= np.int32(0) else _flip(np.int32(least))
        peak = max(peak, maxima[b])
    return peak, highest > INFINITE or most > np.uint32(0xFF800000)


@njit(nogil=True, cache=True)
def _first(row: Floats, maxima: Ints, value: np.float32) -> int:
    """The lowest id with this value, which is the row's largest."""
    for b in range(maxima.shape[0]):
        if _as_float(_flip(maxima[b])) == value:
            for i in range(b * BLOCK, min(row.shape[0], (b + 1) * BLOCK)):
                if row[i] == value:
                    return i
    return -1


@njit(nogil=True, cache=True, fastmath=FAST)
def _bound_block(
    block: Floats,
    start: np.uint32,
    low: np.uint32,
    high: np.uint32,
    peak: np.float32,
    inverse: np.float32,
    floor: np.int32,
    bounds: Floats,
) -> np.float32:
    """Upper bounds of d + G of one block, and the largest of them (as a key: LLVM vectorises integer maxima)."""
    top = EMPTY
    for j in range(block.shape[0]):
        h = _token_hash(low, high, np.uint32(start + j))
        bound = (block[j] - peak) * inverse + _gumbel_bound(h)
        bound = bound if _flip(_as_bits(block[j])) >= floor else np.float32(-np.inf)
        bounds[j] = bound
        top = max(top, _flip(_as_bits(bound)))
    return _as_float(_flip(top))


@njit(nogil=True, cache=True)
def _race(
    row: Floats,
    maxima: Ints,
    low: np.uint32,
    high: np.uint32,
    peak: np.float32,
    temperature: float,
    floor: np.int32,
    last: int,
    bounds: Floats,
) -> int:
    """The argmax of (logit - peak) / T + G; the lowest id of equals.

    Only logits whose key is at least `floor` take part, those equal to it only up to id `last`.
    """
    inverse = np.float32(1.0 / temperature)
    winner, best = -1, -np.inf
    width = WIDE if floor == EMPTY else BLOCK  # with a floor most blocks are passed over
    for start in range(0, row.shape[0], width):
        if maxima[start // BLOCK] < floor:
            continue
        block = row[start : start + width]
        if _bound_block(block, np.uint32(start), low, high, peak, inverse, floor, bounds) + SLACK <= best:
            continue
        for j in range(block.shape[0]):
            if bounds[j] + SLACK > best and (_flip(_as_bits(block[j])) != floor or start + j <= last):
                noise = _gumbel(_token_hash(low, high, np.uint32(start + j)))
                score = (np.float64(block[j]) - np.float64(peak)) / temperature + noise
                if score > best:
                    winner, best = start + j, score
    return winner


@njit(nogil=True, cache=True, fastmath=FAST)
def _exp(x: np.float32) -> np.float32:
    """exp of a float32 x <= 0 to 1e-7 (1 + |x|) relative, as 2^n times a polynomial; below -87 it stays at 1e-38."""
    x = max(x * np.float32(1.44269504), np.float32(-126.0))
    n = np.rint(x)
    f = x - n  # from -1/2 to 1/2, where this is the polynomial of least relative error, 2e-9
    y = np.float32(1.5345813e-4)
    y = y * f + np.float32(1.3399931e-3)
    y = y * f + np.float32(9.6184891e-3)
    y = y * f + np.float32(5.5503286e-2)
    y = y * f + np.float32(2.4022646e-1)
    y = y * f + np.float32(6.9314718e-1)
    y = y * f + np.float32(1.0)
    return _as_float(np.int32(_as_bits(y) + (np.int32(n) << np.int32(23))))


@njit(nogil=True, cache=True, fastmath=FAST)
def _take_logs(numbers: Floats) -> None:
    """log of each number, to a few 1e-8 of it or of 1, in place (Cephes); -inf of 0."""
    for j in range(numbers.shape[0]):
        bits = _as_bits(numbers[j])
        m = _as_float(np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000)))  # from 0.5 to 1
        small = m < np.float32(0.70710678)
        e = np.float32(np.int32(bits >> np.int32(23)) - np.int32(126)) - (np.float32(1.0) if small else np.float32(0.0))
        m = (m + m if small else m) - np.float32(1.0)
        y = np.float32(7.0376836292e-2)
        y = y * m - np.float32(1.1514610310e-1)
        y = y * m + np.float32(1.1676998740e-1)
        y = y * m - np.float32(1.2420140846e-1)
        y = y * m + np.float32(1.4249322787e-1)
        y = y * m - np.float32(1.6668057665e-1)
        y = y * m + np.float32(2.0000714765e-1)
        y = y * m - np.float32(2.4999993993e-1)
        y = y * m + np.float32(3.3333331174e-1)
        y = y * m * m * m + e * np.float32(-2.12194440e-4) - np.float32(0.5) * m * m
        value = m + y + e * np.float32(0.693359375)
        numbers[j] = value if bits > np.int32(0) else np.float32(-np.inf)


@njit(nogil=True, cache=True, fastmath=FAST)
def _block_mass(block: Floats, peak: np.float32, inverse: np.float32) -> np.float32:
    total = np.float32(0.0)
    for j in range(block.shape[0]):
        total += _exp((block[j] - peak) * inverse)
    return total


@njit(nogil=True, cache=True)
def _mass(row: Floats, peak: np.float32, inverse: np.float32) -> float:
    """Sum of exp((logit - peak) * inverse)."""
    total = 0.0
    for start in range(0, row.shape[0], WIDE):
        total += np.float64(_block_mass(row[start : start + WIDE], peak, inverse))
    return total


@njit(nogil=True, cache=True, fastmath=FAST)
def _block_masses(
    block: Floats, peak: np.float32, inverse: np.float32, pivot: np.float32
) -> tuple[np.float32, np.float32]:
    total, above = np.float32(0.0), np.float32(0.0)
    for j in range(block.shape[0]):
        weight = _exp((block[j] - peak) * inverse)
        total += weight
        above += weight if block[j] > pivot else np.float32(0.0)
    return total, above


@njit(nogil=True, cache=True)
def _masses(row: Floats, peak: np.float32, inverse: np.float32, pivot: np.float32) -> tuple[float, float]:
    """Sums of exp((logit - peak) * inverse): over the row, and over logits above the pivot."""
    total, above = 0.0, 0.0
    for start in range(0, row.shape[0], WIDE):
        a, b = _block_masses(row[start : start + WIDE], peak, inverse, pivot)
        total += np.float64(a)
        above += np.float64(b)
    return total, above


@njit(nogil=True, cache=True)
def _count_from(keys: Ints, threshold: np.int32) -> np.int32:
    count = np.int32(0)
    for i in range(keys.shape[0]):
        count += np.int32(keys[i] >= threshold)
    return count


@njit(nogil=True, cache=True, fastmath=FAST)
def _block_mass_from(keys: Ints, weights: Floats, threshold: np.int32) -> np.float32:
    mass = np.float32(0.0)
    for i in range(keys.shape[0]):
        mass += weights[i] if keys[i] >= threshold else np.float32(0.0)
    return mass


@njit(nogil=True, cache=True)
def _mass_from(keys: Ints, weights: Floats, threshold: np.int32) -> float:
    mass = 0.0
    for start in range(0, keys.shape[0], WIDE):
        stop = start + WIDE
        mass += np.float64(_block_mass_from(keys[start:stop], weights[start:stop], threshold))
    return mass


@njit(nogil=True, cache=True)
def _kth_largest(keys: Ints, k: int) -> np.int32:
    """The k-th largest of keys [n], 1 <= k <= n."""
    low, high = np.int64(EMPTY), np.int64(SIGN) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if _count_from(keys, np.int32(middle)) >= k:
            low = middle
        else:
            high = middle
    return np.int32(low)


@njit(nogil=True, cache=True)
def _gather(bits: Ints, maxima: Ints, floor: np.int32, keys: Ints) -> int:
    """Writes the keys of all tokens whose key is at least `floor`, in id order, to keys [vocab + 1]; how many."""
    n = 0
    for b in range(maxima.shape[0]):
        if maxima[b] >= floor:
            block = bits[b * BLOCK : (b + 1) * BLOCK]
            for j in range(block.shape[0]):
                key = _flip(block[j])
                keys[n] = key
                n += key >= floor
    return n


@njit(nogil=True, cache=True)
def _gather_largest(bits: Ints, maxima: Ints, k: int, floor: np.int32, keys: Ints) -> int:
    """Gathers the k largest keys among those of at least `floor` (k = 0: all), in id order, of equals the first."""
    if 0 < k <= maxima.shape[0]:
        floor = max(floor, _kth_largest(maxima, k))
    n = _gather(bits, maxima, floor, keys)
    if k == 0 or k >= n:
        return n
    threshold = _kth_largest(keys[:n], k)
    equals = k - _count_from(keys[:n], threshold + np.int32(1))  # a finite logit's key is far below 2^31
    kept = 0
    for i in range(n):
        if keys[i] > threshold or (keys[i] == threshold and equals > 0):
            equals -= keys[i] == threshold
            keys[kept] = keys[i]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def _weigh(keys: Ints, weights: Floats, n: int, peak: np.float32, inverse: np.float32) -> float:
    """Writes exp((logit - peak) * inverse) of the candidates; returns their sum."""
    for i in range(n):
        weights[i] = _exp((_as_float(_flip(keys[i])) - peak) * inverse)
    return _mass_from(keys[:n], weights[:n], EMPTY)


@njit(nogil=True, cache=True)
def _nucleus(keys: Ints, weights: Floats, needed: float, lowest: np.int32, highest: np.int32) -> tuple[np.int32, int]:
    """(threshold, equals): the shortest prefix whose mass reaches `needed` is every key above the threshold and the
    first `equals` of those equal to it. Keys and weights [n] in id order, keys between lowest and highest."""
    low, high = np.int64(lowest), np.int64(highest) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if _mass_from(keys, weights, np.int32(middle)) >= needed:
            low = middle
        else:
            high = middle
    threshold = np.int32(low)
    mass = _mass_from(keys, weights, threshold + np.int32(1))
    equals = 0
    for i in range(keys.shape[0]):
        if keys[i] == threshold and mass < needed:
            mass += np.float64(weights[i])
            equals += 1
    return threshold, equals


@njit(nogil=True, cache=True)
def _nth_equal(bits: Ints, maxima: Ints, key: np.int32, n: int) -> int:
    """The id of the n-th token (from 1) with this key; past the vocabulary if there are fewer."""
    for b in range(maxima.shape[0]):
        if maxima[b] >= key:
            for i in range(b * BLOCK, min(bits.shape[0], (b + 1) * BLOCK)):
                if _flip(bits[i]) == key:
                    n -= 1
                    if n == 0:
                        return i
    return bits.shape[0]


@njit(nogil=True, cache=True)
def _nucleus_floor(row: Floats, key: np.int32, inverse: np.float32, top_p: float) -> tuple[np.int32, float]:
    """A key that the whole nucleus reaches, so that few tokens are left to search; and the mass of the row."""
    peak, total = _as_float(_flip(key)), 0.0
    for depth in (3.0, 7.0, 12.0):
        pivot = np.float32(peak - depth / inverse)
        total, above = _masses(row, peak, inverse, pivot)
        if above >= _needed(top_p, total):
            return _flip(_as_bits(pivot)), total
    return EMPTY, total


@njit(nogil=True, cache=True)
def _survivors(
    row: Floats,
    bits: Ints,
    maxima: Ints,
    scratch: Scratch,
    key: np.int32,
    temperature: float,
    top_p: float,
    min_p: float,
    top_k: int,
) -> tuple[np.int32, int]:
    """(floor, last) of the tokens that min_p, then top_k, then top_p over the rest, renormalised, leave.

    They are those whose key is above `floor`, and those equal to it up to id `last`. `key` is the row's largest.
    """
    keys, weights = scratch
    peak = _as_float(_flip(key))
    floor = EMPTY
    if min_p > 0.0:
        floor = min(key, _flip(_as_bits(np.float32(peak + temperature * math.log(min_p)))))
        if top_k == 0 and top_p >= 1.0:
            return floor, bits.shape[0]
    inverse, total = np.float32(1.0 / temperature), 0.0
    if top_k == 0 and min_p <= 0.0:
        floor, total = _nucleus_floor(row, key, inverse, top_p)
    n = _gather_largest(bits, maxima, top_k, floor, keys)
    threshold, equals = EMPTY, 0
    if top_p < 1.0:
        mass = _weigh(keys, weights, n, peak, inverse)
        total = total if total > 0.0 else mass
        threshold, equals = _nucleus(keys[:n], weights[:n], _needed(top_p, total), floor, key)
    if equals == 0:  # all candidates stay
        threshold = _kth_largest(keys[:n], n)
        equals = n - _count_from(keys[:n], threshold + np.int32(1))
    return threshold, _nth_equal(bits, maxima, threshold, equals)


@njit(nogil=True, cache=True)
def _needed(top_p: float, total: float) -> float:
    """The mass a nucleus must reach: at least one token's, however small top_p is."""
    return max(top_p * total, 1e-30)


@njit(nogil=True, cache=True)
def _draw_nucleus(
    row: Floats,
    bits: Ints,
    maxima: Ints,
    scratch: Scratch,
    bounds: Floats,
    peak: np.float32,
    low: np.uint32,
    high: np.uint32,
    temperature: float,
    top_p: float,
) -> int:
    """top_p alone: draw from everything, keep it if it lies in the nucleus, else search the nucleus above it."""
    keys, weights = scratch
    inverse = np.float32(1.0 / temperature)
    winner = _race(row, maxima, low, high, peak, temperature, EMPTY, row.shape[0], bounds)
    pivot = row[winner]
    equals = 0
    for i in range(winner):
        equals += row[i] == pivot
    if pivot == peak and equals == 0:
        return winner
    total, above = _masses(row, peak, inverse, pivot)
    needed = _needed(top_p, total)
    if above + equals * np.float64(_exp((pivot - peak) * inverse)) < needed:
        return winner
    lowest = _flip(_as_bits(pivot))
    n = _gather(bits, maxima, lowest, keys)
    _weigh(keys, weights, n, peak, inverse)
    threshold, equals = _nucleus(keys[:n], weights[:n], needed, lowest, _flip(_as_bits(peak)))
    last = _nth_equal(bits, maxima, threshold, equals)
    return _race(row, maxima, low, high, peak, temperature, threshold, last, bounds)


@linked
@njit(
    types.void(
        _ROWS, _BITS, *[types.int64[::1]] * 2, types.uint64[::1], _PARAMS, types.int64[:], types.int64, types.int64
    ),
    nogil=True, cache=True,
)  # fmt: skip
def draw_some(
    logits: Floats,
    bits: Ints,
    rows: np.ndarray,
    positions: np.ndarray,
    streams: np.ndarray,
    params: np.ndarray,
    tokens: np.ndarray,
    first: int,
    step: int,
) -> None:
    """`draw_rows` for rows[i] with i = first, first + step, ..."""
    vocab = logits.shape[1]
    maxima = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
    bounds = np.empty(WIDE, np.float32)
    scratch = (np.empty(vocab + 1, np.int32), np.empty(vocab, np.float32))
    for i in range(first, rows.shape[0], step):
        row, row_bits = logits[rows[i]], bits[rows[i]]
        temperature, top_p, min_p, top_k = params[i, 0], params[i, 1], params[i, 2], np.int64(params[i, 3])
        key, has_nan = _summary(row_bits, maxima)
        peak = _as_float(_flip(key))
        if has_nan or not np.isfinite(peak):
            tokens[i] = -1
            continue
        if temperature < GREEDY_BELOW:
            tokens[i] = _first(row, maxima, peak)
            continue
        noise = _position_key(streams[i], positions[i])
        low, high = np.uint32(noise & np.uint64(0xFFFFFFFF)), np.uint32(noise >> np.uint64(32))
        if top_k == 0 and min_p <= 0.0 and top_p < 1.0:
            tokens[i] = _draw_nucleus(row, row_bits, maxima, scratch, bounds, peak, low, high, temperature, top_p)
            continue
        floor, last = EMPTY, vocab
        if top_k > 0 or min_p > 0.0:
            floor, last = _survivors(row, row_bits, maxima, scratch, key, temperature, top_p, min_p, top_k)
        tokens[i] = _race(row, maxima, low, high, peak, temperature, floor, last, bounds)


@njit(nogil=True, cache=True, parallel=True)
def draw_rows(
    logits: Floats,
    bits: Ints,
    rows: np.ndarray,
    positions: np.ndarray,
    streams: np.ndarray,
    params: np.ndarray,
    tokens: np.ndarray,
    threads: int,
) -> None:
    """tokens[i] = the draw of row rows[i], or -1 where that has no distribution (a NaN, +inf, or only -inf).

    logits float32 / bits int32 [any, vocab]; rows and positions int64 [n]; streams uint64 [n]; params float64 [n, 4]:
    temperature, top_p, min_p, top_k (0 is off); tokens int64 [n]. Threads take rows in turn.
    """
    if threads == 1:  # to wake the others on for nothing took 10 to 16 us
        draw_some(logits, bits, rows, positions, streams, params, tokens, 0, 1)
    else:
        for thread in prange(threads):
            draw_some(logits, bits, rows, positions, streams, params, tokens, thread, threads)


@njit(nogil=True, cache=True)
def _part(start: int, vocab: int, floor: int, last: int) -> tuple[int, np.int32]:
    """(stop, least): of tokens from `start` up to `stop` those stay whose key is at least this one."""
    if start <= last:
        return min(start + WIDE, last + 1, vocab), np.int32(floor)
    return min(start + WIDE, vocab), np.int32(floor + 1)  # a finite logit's key is far below 2^31


@njit(nogil=True, cache=True, fastmath=FAST)
def _block_mass_of(block: Floats, peak: np.float32, inverse: np.float32, least: np.int32) -> np.float32:
    mass = np.float32(0.0)
    for j in range(block.shape[0]):
        weight = _exp((block[j] - peak) * inverse)
        mass += weight if _flip(_as_bits(block[j])) >= least else np.float32(0.0)
    return mass


@njit(nogil=True, cache=True, fastmath=FAST)
def _block_log_probs(
    block: Floats, peak: np.float32, inverse: np.float32, shift: np.float32, least: np.int32
) -> None:
    for j in range(block.shape[0]):
        log_p = (block[j] - peak) * inverse - shift
        block[j] = log_p if _flip(_as_bits(block[j])) >= least else np.float32(-np.inf)


@linked
@njit(types.void(_ROW, _KEYS, _KEYS, types.Tuple((_KEYS, _ROW)), _DOUBLES, _DOUBLES), nogil=True, cache=True)
def describe_row(
    row: Floats, bits: Ints, maxima: Ints, scratch: Scratch, params: np.ndarray, found: np.ndarray
) -> None:
    """What a row's log-probabilities are made with: found[0:5] = peak, 1 / temperature, log of the mass, and the
    `floor` and `last` of the tokens that filters leave. A row without a distribution has a mass of NaN."""
    vocab = row.shape[0]
    temperature, top_p, min_p, top_k = params[0], params[1], params[2], np.int64(params[3])
    key, has_nan = _summary(bits, maxima)
    peak = _as_float(_flip(key))
    found[0], found[1], found[2], found[3], found[4] = peak, 1.0, np.nan, EMPTY, vocab
    if has_nan or not np.isfinite(peak):
        return
    if temperature < GREEDY_BELOW:  # sure of its token
        found[2], found[3], found[4] = 0.0, key, _nth_equal(bits, maxima, key, 1)
        return
    lowest = _flip(_as_bits(np.float32(-np.inf)))
    floor, last = lowest, -1  # what is left without filters
    if top_k > 0 or min_p > 0.0 or top_p < 1.0:
        floor, last = _survivors(row, bits, maxima, scratch, key, temperature, top_p, min_p, top_k)
        floor, last = (floor, last) if floor > lowest else (lowest, -1)
    inverse, mass, start = np.float32(1.0 / temperature), 0.0, 0
    if floor == lowest:
        mass, start = _mass(row, peak, inverse), vocab
    while start < vocab:
        stop, least = _part(start, vocab, floor, last)
        mass += np.float64(_block_mass_of(row[start:stop], peak, inverse, least))
        start = stop
    found[1], found[2], found[3], found[4] = inverse, math.log(mass), floor, last


@linked
@njit(types.void(_ROWS, _BITS, _PARAMS, types.int64, types.int64), nogil=True, cache=True)
def some_log_probs(logits: Floats, bits: Ints, params: np.ndarray, first: int, step: int) -> None:
    """`log_prob_rows` for rows first, first + step, ..."""
    vocab = logits.shape[1]
    maxima = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
    scratch = (np.empty(vocab + 1, np.int32), np.empty(vocab, np.float32))
    found = np.empty(5)
    for i in range(first, logits.shape[0], step):
        row = logits[i]
        describe_row(row, bits[i], maxima, scratch, params[i], found)
        peak, inverse, shift = np.float32(found[0]), np.float32(found[1]), np.float32(found[2])
        if np.isnan(shift):
            row[:] = np.nan
            continue
        floor, last, start = np.int64(found[3]), np.int64(found[4]), 0
        while start < vocab:
            stop, least = _part(start, vocab, floor, last)
            _block_log_probs(row[start:stop], peak, inverse, shift, least)
            start = stop


@njit(nogil=True, cache=True, parallel=True)
def log_prob_rows(logits: Floats, bits: Ints, params: np.ndarray, threads: int) -> None:
    """Rows of logits become log-probabilities of what `draw_rows` draws from: -inf for what filters remove.

    logits float32 / bits int32 [n, vocab]; params as there. A greedy row is sure of its token. A row without a
    distribution becomes NaN. Threads take rows in turn.
    """
    if threads == 1:
        some_log_probs(logits, bits, params, 0, 1)
    else:
        for thread in prange(threads):
            some_log_probs(logits, bits, params, thread, threads)


@njit(nogil=True, cache=True)
def _ranked(bits: Ints, maxima: Ints, floor: np.int32, last: int, n: int) -> np.ndarray:
    """int64 [n]: the tokens above `floor`, and equal to it up to id `last`, likeliest first; id in the low 32 bits."""
    order = np.empty(n, np.int64)
    found = 0
    for b in range(maxima.shape[0]):
        if maxima[b] >= floor:
            for i in range(b * BLOCK, min(bits.shape[0], (b + 1) * BLOCK)):
                key = _flip(bits[i])
                if key > floor or (key == floor and i <= last):
                    order[found] = i - (np.int64(key) << 32)
                    found += 1
    return np.sort(order)


@njit(nogil=True, cache=True)
def describe_rows(
    logits: Floats,
    bits: Ints,
    rows: np.ndarray,
    tokens: np.ndarray,
    top: int,
    chosen: np.ndarray,
    ranks: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
) -> None:
    """Log-probabilities of row rows[i]'s raw distribution: of tokens[i] with its rank, and of the `top` likeliest.

    chosen float64 [n]; ranks int64 [n] (0 marks a row without a distribution); top_ids int64, top_logprobs float64
    [n, top], likeliest first, lower ids first among equals.
    """
    vocab = logits.shape[1]
    maxima = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
    keys = np.empty(vocab + 1, np.int32)
    for i in range(rows.shape[0]):
        row, row_bits = logits[rows[i]], bits[rows[i]]
        key, has_nan = _summary(row_bits, maxima)
        peak = _as_float(_flip(key))
        if has_nan or not np.isfinite(peak):
            ranks[i] = 0
            continue
        value = row[tokens[i]]
        norm = np.float64(peak) + math.log(_mass(row, peak, np.float32(1.0)))
        chosen[i] = np.float64(value) - norm
        higher = np.int32(0)
        for j in range(vocab):
            higher += np.int32(row[j] > value)
        ranks[i] = 1 + higher
        if top > 0:
            n = _gather_largest(row_bits, maxima, top, EMPTY, keys)
            floor = _kth_largest(keys[:n], n)
            last = _nth_equal(row_bits, maxima, floor, n - _count_from(keys[:n], floor + np.int32(1)))
            order = _ranked(row_bits, maxima, floor, last, n)
            for j in range(n):
                token = order[j] & 0xFFFFFFFF
                top_ids[i, j] = token
                top_logprobs[i, j] = np.float64(row[token]) - norm
