"""Numba kernels of the sampler, one row at a time: exact, without sorting and without a softmax of the whole row.

Why a row needs so little work (V = 32k: microseconds, not milliseconds):

* **Unfiltered rows** are argmax(d + G) with d = (logit - peak) / T. A vectorised pass computes the token's hash and an
  upper bound of G from the bits of the hash (the float's exponent and mantissa read as a piecewise linear log2), and
  only blocks whose bound beats the best exact score so far are scanned with real logarithms.
* **top_p alone**: draw from the whole row first. The argmax over all tokens is the argmax over the nucleus whenever it
  lies in the nucleus, which happens with probability >= top_p and costs one masked sum to decide. Otherwise the
  nucleus lies strictly above the token drawn: that is the prefix to search, and it holds the needed mass by construction.
* **top_k, min_p**: block maxima give a floor that at least k tokens reach; the few candidates are gathered in id order.
* Thresholds (the k-th largest, the end of the nucleus) are found by bisection over order-preserving integer keys with
  vectorised counts and sums, so ties, infinities and any distribution take the same bounded number of passes.

Everything is per row and in a fixed order: the same bits for any batch. `logits` come twice, as float32 and as the int32
view of the same memory.
"""

import math

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

BLOCK = 64
GREEDY_BELOW = 1e-5
SLACK = 1e-3  # covers the float32 rounding of the bound for every score that can still win
EMPTY = np.int32(-(2**31))
SIGN = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)
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
def _flip(x):
    """Float bits to an int32 in the floats' order, and back."""
    return np.int32(x ^ (np.int32(x >> np.int32(31)) & SIGN))


@njit(nogil=True, cache=True)
def _mix64(x):
    x = np.uint64((x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    x = np.uint64((x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(x ^ (x >> np.uint64(31)))


@njit(nogil=True, cache=True)
def _position_key(stream, position):
    return _mix64(np.uint64(stream + np.uint64(position + 1) * np.uint64(0x9E3779B97F4A7C15)))


@njit(nogil=True, cache=True)
def _token_hash(low, high, token):
    x = np.uint32(token) ^ low
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(17))) * np.uint32(0xED5AD4BB))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(11))) + high)
    x = np.uint32(x * np.uint32(0xAC4C1B51))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x31848BAB))
    return np.uint32(x ^ np.uint32(x >> np.uint32(14)))


@njit(nogil=True, cache=True)
def _gumbel(h):
    return -math.log(-math.log1p(-(np.float64(np.uint32(~h)) + 0.5) * 2.0**-32))


@njit(nogil=True, cache=True, fastmath=FAST)
def _gumbel_bound(h):
    """At least G: log2 is concave, so the line through powers of two lies below it."""
    bits = _as_bits(np.float32(np.int32(np.uint32(~h) >> np.uint32(1))))
    return np.float32(109.51656) - np.float32(bits) * np.float32(8.262958e-08)  # ln2 * 158, ln2 / 2^23


@njit(nogil=True, cache=True)
def _summary(bits, maxima):
    """Fills maxima [blocks] with each block's largest key; returns the largest of all, and whether the row has a NaN."""
    peak, magnitude = EMPTY, np.int32(0)
    for b in range(maxima.shape[0]):
        block = bits[b * BLOCK : (b + 1) * BLOCK]
        top = EMPTY
        for j in range(block.shape[0]):
            x = block[j]
            top = max(top, _flip(x))
            magnitude = max(magnitude, np.int32(x & SIGN))
        maxima[b] = top
        peak = max(peak, top)
    return peak, magnitude > INFINITE


@njit(nogil=True, cache=True)
def _first(row, maxima, value):
    """The lowest id with this value, which is the row's largest."""
    for b in range(maxima.shape[0]):
        if _as_float(_flip(maxima[b])) == value:
            for i in range(b * BLOCK, min(row.shape[0], (b + 1) * BLOCK)):
                if row[i] == value:
                    return i
    return -1


@njit(nogil=True, cache=True, fastmath=FAST)
def _bound_block(block, start, low, high, peak, inverse, bounds):
    """Upper bounds of d + G of one block, and the largest of them."""
    top = np.float32(-np.inf)
    for j in range(block.shape[0]):
        h = _token_hash(low, high, np.uint32(start + j))
        bound = (block[j] - peak) * inverse + _gumbel_bound(h)
        bounds[j] = bound
        top = max(top, bound)
    return top


@njit(nogil=True, cache=True)
def _race(row, low, high, peak, temperature, bounds):
    """The argmax over the whole row of (logit - peak) / T + G; the lowest id of equals."""
    inverse = np.float32(1.0 / temperature)
    winner, best = -1, -np.inf
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        if _bound_block(block, np.uint32(start), low, high, peak, inverse, bounds) + SLACK <= best:
            continue
        for j in range(block.shape[0]):
            if bounds[j] + SLACK > best:
                noise = _gumbel(_token_hash(low, high, np.uint32(start + j)))
                score = (np.float64(block[j]) - np.float64(peak)) / temperature + noise
                if score > best:
                    winner, best = start + j, score
    return winner


@njit(nogil=True, cache=True)
def _race_among(ids, keys, n, low, high, peak, temperature):
    """The same argmax over n candidates in id order."""
    winner, best = -1, -np.inf
    for i in range(n):
        h = _token_hash(low, high, np.uint32(ids[i]))
        scaled = (np.float64(_as_float(_flip(keys[i]))) - np.float64(peak)) / temperature
        if scaled + _gumbel_bound(h) + SLACK > best:
            score = scaled + _gumbel(h)
            if score > best:
                winner, best = ids[i], score
    return winner


@njit(nogil=True, cache=True, fastmath=FAST)
def _exp(x):
    """exp of a float32 x <= 0 to a few 1e-8 relative (Cephes); below -87 it stays at 1e-38."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * _as_float(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(nogil=True, cache=True, fastmath=FAST)
def _block_masses(block, peak, inverse, pivot):
    total, above = np.float32(0.0), np.float32(0.0)
    for j in range(block.shape[0]):
        weight = _exp((block[j] - peak) * inverse)
        total += weight
        above += weight if block[j] > pivot else np.float32(0.0)
    return total, above


@njit(nogil=True, cache=True)
def _masses(row, peak, inverse, pivot):
    """Sums of exp((logit - peak) * inverse): over the row, and over logits above the pivot."""
    total, above = 0.0, 0.0
    for start in range(0, row.shape[0], 4 * BLOCK):
        a, b = _block_masses(row[start : start + 4 * BLOCK], peak, inverse, pivot)
        total += np.float64(a)
        above += np.float64(b)
    return total, above


@njit(nogil=True, cache=True)
def _count_from(keys, threshold):
    count = np.int32(0)
    for i in range(keys.shape[0]):
        count += np.int32(keys[i] >= threshold)
    return count


@njit(nogil=True, cache=True, fastmath=FAST)
def _block_mass_from(keys, weights, threshold):
    mass = np.float32(0.0)
    for i in range(keys.shape[0]):
        mass += weights[i] if keys[i] >= threshold else np.float32(0.0)
    return mass


@njit(nogil=True, cache=True)
def _mass_from(keys, weights, threshold):
    mass = 0.0
    for start in range(0, keys.shape[0], 4 * BLOCK):
        stop = start + 4 * BLOCK
        mass += np.float64(_block_mass_from(keys[start:stop], weights[start:stop], threshold))
    return mass


@njit(nogil=True, cache=True)
def _kth_largest(keys, k):
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
def _gather(bits, maxima, floor, ids, keys):
    """Writes ids and keys of all tokens whose key is at least `floor`, in id order; returns how many."""
    n = 0
    for b in range(maxima.shape[0]):
        if maxima[b] >= floor:
            for i in range(b * BLOCK, min(bits.shape[0], (b + 1) * BLOCK)):
                key = _flip(bits[i])
                if key >= floor:
                    ids[n], keys[n] = i, key
                    n += 1
    return n


@njit(nogil=True, cache=True)
def _keep_largest(ids, keys, n, k):
    """Moves the k largest of n candidates to the front, in id order; of equals the lowest ids stay."""
    if k >= n:
        return n
    threshold = _kth_largest(keys[:n], k)
    equals = k - (_count_from(keys[:n], threshold + np.int32(1)) if threshold < SIGN else 0)
    kept = 0
    for i in range(n):
        if keys[i] > threshold or (keys[i] == threshold and equals > 0):
            equals -= keys[i] == threshold
            ids[kept], keys[kept] = ids[i], keys[i]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def _largest(bits, maxima, k, floor, ids, keys):
    """Gathers the k tokens of highest logit among those of key >= floor (k = 0: all of them)."""
    if 0 < k <= maxima.shape[0]:
        floor = max(floor, _kth_largest(maxima, k))
    n = _gather(bits, maxima, floor, ids, keys)
    return _keep_largest(ids, keys, n, k) if k > 0 else n


@njit(nogil=True, cache=True)
def _keep_nucleus(ids, keys, weights, n, needed):
    """Keeps the shortest prefix, by descending key and then ascending id, whose mass reaches `needed`."""
    low, high = np.int64(EMPTY), np.int64(SIGN) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if _mass_from(keys[:n], weights[:n], np.int32(middle)) >= needed:
            low = middle
        else:
            high = middle
    threshold = np.int32(low)
    mass = _mass_from(keys[:n], weights[:n], threshold + np.int32(1))
    kept = 0
    for i in range(n):
        if keys[i] == threshold and mass < needed:
            mass += np.float64(weights[i])
        elif keys[i] <= threshold:
            continue
        ids[kept], keys[kept] = ids[i], keys[i]
        kept += 1
    return kept


@njit(nogil=True, cache=True)
def _weigh(keys, weights, n, peak, inverse):
    """Writes exp((logit - peak) * inverse) of the candidates; returns their sum."""
    for i in range(n):
        weights[i] = _exp((_as_float(_flip(keys[i])) - peak) * inverse)
    return _mass_from(keys[:n], weights[:n], EMPTY)


@njit(nogil=True, cache=True)
def _draw_filtered(row, bits, maxima, scratch, peak, low, high, temperature, top_p, min_p, top_k):
    """min_p, then top_k, then top_p over what is left, renormalised; then the race among the survivors."""
    ids, keys, weights = scratch
    floor = EMPTY
    if min_p > 0.0:
        floor = _flip(_as_bits(np.float32(peak + temperature * math.log(min_p))))
    n = _largest(bits, maxima, top_k, min(floor, _flip(_as_bits(peak))), ids, keys)
    if top_p < 1.0 and n > 1:
        total = _weigh(keys, weights, n, peak, np.float32(1.0 / temperature))
        n = _keep_nucleus(ids, keys, weights, n, max(top_p * total, 1e-30))
    return _race_among(ids, keys, n, low, high, peak, temperature)


@njit(nogil=True, cache=True)
def _draw_nucleus(row, bits, maxima, scratch, bounds, peak, low, high, temperature, top_p):
    """top_p alone: draw from everything, keep it if it lies in the nucleus, else search the nucleus above it."""
    ids, keys, weights = scratch
    inverse = np.float32(1.0 / temperature)
    winner = _race(row, low, high, peak, temperature, bounds)
    pivot = row[winner]
    total, above = _masses(row, peak, inverse, pivot)
    equals = 0
    for i in range(winner):
        equals += row[i] == pivot
    above += equals * np.float64(_exp((pivot - peak) * inverse))
    needed = max(top_p * total, 1e-30)
    if above < needed:
        return winner
    n = _gather(bits, maxima, _flip(_as_bits(pivot)), ids, keys)
    _weigh(keys, weights, n, peak, inverse)
    n = _keep_nucleus(ids, keys, weights, n, needed)
    return _race_among(ids, keys, n, low, high, peak, temperature)


@njit(nogil=True, cache=True)
def draw_rows(logits, bits, rows, streams, positions, params, tokens):
    """tokens[i] = the draw of row rows[i], or -1 where the row has no distribution (a NaN, +inf, or only -inf).

    logits float32 / bits int32 [batch, vocab]; rows, positions int64 [n]; streams uint64 [n]; params float64 [n, 4]:
    temperature, top_p, min_p, top_k (0 is off); tokens int64 [n].
    """
    vocab = logits.shape[1]
    maxima = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
    bounds = np.empty(BLOCK, np.float32)
    scratch = (np.empty(vocab, np.int64), np.empty(vocab, np.int32), np.empty(vocab, np.float32))
    for i in range(rows.shape[0]):
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
        if top_k > 0 or min_p > 0.0:
            tokens[i] = _draw_filtered(
                row, row_bits, maxima, scratch, peak, low, high, temperature, top_p, min_p, top_k
            )
        elif top_p < 1.0:
            tokens[i] = _draw_nucleus(row, row_bits, maxima, scratch, bounds, peak, low, high, temperature, top_p)
        else:
            tokens[i] = _race(row, low, high, peak, temperature, bounds)


@njit(nogil=True, cache=True)
def describe_rows(logits, bits, rows, tokens, top, chosen, ranks, top_ids, top_logprobs):
    """Log-probabilities of row rows[i]'s raw distribution: of tokens[i] with its rank, and of the `top` likeliest.

    chosen float64 [n]; ranks int64 [n] (0 marks a row without a distribution); top_ids int64, top_logprobs float64
    [n, top], likeliest first, lower ids first among equals.
    """
    vocab = logits.shape[1]
    maxima = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
    ids, keys = np.empty(vocab, np.int64), np.empty(vocab, np.int32)
    for i in range(rows.shape[0]):
        row, row_bits = logits[rows[i]], bits[rows[i]]
        key, has_nan = _summary(row_bits, maxima)
        peak = _as_float(_flip(key))
        if has_nan or not np.isfinite(peak):
            ranks[i] = 0
            continue
        value = row[tokens[i]]
        total, _ = _masses(row, peak, np.float32(1.0), value)
        norm = np.float64(peak) + math.log(total)
        chosen[i] = np.float64(value) - norm
        higher = np.int32(0)
        for j in range(vocab):
            higher += np.int32(row[j] > value)
        ranks[i] = 1 + higher
        if top > 0:
            n = _largest(row_bits, maxima, top, EMPTY, ids, keys)
            order = np.sort(-((keys[:n].astype(np.int64) << 32) - ids[:n]))
            for j in range(n):
                token = (order[j] & 0xFFFFFFFF)
                top_ids[i, j] = token
                top_logprobs[i, j] = np.float64(row[token]) - norm
