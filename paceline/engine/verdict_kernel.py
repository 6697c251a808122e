"""Verdicts in compiled code: `speculation.rejection` by its own rules, request by request.

A row of the target is its logits and five numbers (`sample_kernels.describe_row`), a row of the draft log-probabilities
at an address: so of what has the size of the vocabulary a thread makes the last token's weights, and what filters need.
"""

import math
from pathlib import Path

import numpy as np
from numba import carray, njit, prange, types

from paceline.compiled import linked, watched
from paceline.engine import addresses, keyed_random
from paceline.engine.addresses import floats
from paceline.engine.keyed_random import ACCEPT, GOLDEN, LAST
from paceline.engine.sample_kernels import (
    BLOCK,
    FAST,
    WIDE,
    Floats,
    Ints,
    _as_bits,
    _exp,
    _flip,
    _mix64,
    _part,
    _position_key,
    _take_logs,
    describe_row,
    draw_some,
)
from paceline.speculation import rejection

FILES = Path(keyed_random.__file__), Path(addresses.__file__)  # of numbers, and of what writes code: see `watched`
ROW, BEGIN, LENGTH, KNOWN, FIELDS = range(5)  # of a request: its logits, its drafted tokens, how many, tokens known
KEPT, TOKEN, VERDICT = range(3)  # drafted tokens that stay, and the one behind, -1 where there is no distribution
chances, first_open = njit(nogil=True)(rejection.chances), njit(nogil=True)(rejection.first_open)
settled, stay = njit(nogil=True)(rejection.settled), njit(nogil=True)(rejection.stay)

_ROWS, _BITS, _LINES, _NUMBERS = types.float32[:, ::1], types.int32[:, ::1], types.int64[:, ::1], types.float64[:, ::1]
_IDS, _STREAMS = types.int64[::1], types.uint64[::1]
ASKED = _LINES, _IDS, _IDS, _STREAMS, _NUMBERS, _NUMBERS, types.boolean, _LINES  # what is asked about logits


@njit(nogil=True)
def _lane_key(stream: np.uint64, lane: int, known: int) -> np.uint64:
    return _position_key(_mix64(stream ^ _mix64(np.uint64(lane) * np.uint64(GOLDEN))), known)


@linked
@watched(types.void(_ROWS, _BITS, _LINES, _NUMBERS, _NUMBERS, types.int64, types.int64), *FILES)
@njit(nogil=True, cache=True)
def describe_some(
    logits: Floats, bits: Ints, lines: np.ndarray, params: np.ndarray, found: np.ndarray, first: int, step: int
) -> None:
    """Fills in `found` of rows first, first + step, ... of all that the requests have."""
    vocab, row = logits.shape[1], 0
    maxima = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
    scratch = (np.empty(vocab + 1, np.int32), np.empty(vocab, np.float32))
    for i in range(lines.shape[0]):
        for at in range(lines[i, ROW], lines[i, ROW] + lines[i, LENGTH] + 1):
            if row % step == first:
                describe_row(logits[at], bits[at], maxima, scratch, params[i], found[row])
            row += 1


@njit(nogil=True)
def _log_ratio(row: Floats, bits: Ints, found: np.ndarray, draft: Floats, token: int) -> float:
    """log target(token) - log draft(token)."""
    key = _flip(bits[token])
    stays = key > found[3] or (key == found[3] and token <= found[4])
    log_p = (np.float64(row[token]) - found[0]) * found[1] if stays else -np.inf
    return log_p - found[2] - np.float64(draft[token])


@njit(nogil=True, fastmath=FAST)
def _block_excess(
    block: Floats, draft: Floats, peak: np.float32, inverse: np.float32, factor: np.float32, least: np.int32,
    above: Floats,
) -> np.float32:  # fmt: skip
    """above[j] = max(0, factor * e^((block[j] - peak) * inverse) - e^draft[j]), and their sum."""
    mass = np.float32(0.0)
    for j in range(block.shape[0]):
        target = factor * _exp((block[j] - peak) * inverse)
        target = target if _flip(_as_bits(block[j])) >= least else np.float32(0.0)
        rest = max(np.float32(0.0), target - _exp(draft[j]))
        above[j] = rest
        mass += rest
    return mass


@njit(nogil=True)
def _excess(row: Floats, found: np.ndarray, draft: Floats, weight: float, above: Floats) -> float:
    """The mass of max(0, weight * target - draft), and itself in `above` [vocab]; `draft` is too, or has a place for
    WIDE at a time."""
    vocab, mass, start = row.shape[0], 0.0, 0
    if np.isnan(found[2]):
        above[:] = np.nan
        return np.nan
    peak, inverse, factor = np.float32(found[0]), np.float32(found[1]), np.float32(weight * math.exp(-found[2]))
    floor, last = np.int64(found[3]), np.int64(found[4])
    while start < vocab:
        stop, least = _part(start, vocab, floor, last)
        drafted = draft[start:stop] if draft.shape[0] >= vocab else draft
        mass += np.float64(_block_excess(row[start:stop], drafted, peak, inverse, factor, least, above[start:stop]))
        start = stop
    return mass


@linked
@watched(types.void(_ROWS, _BITS, *ASKED, types.int64, types.int64), *FILES)
@njit(nogil=True, cache=True)
def judge_some(
    logits: Floats, bits: Ints, lines: np.ndarray, drafts: np.ndarray, tokens: np.ndarray, streams: np.ndarray,
    params: np.ndarray, found: np.ndarray, block: bool, verdicts: np.ndarray, first: int, step: int,
) -> None:  # fmt: skip
    """`judge` for requests first, first + step, ..., of which `found` is known."""
    vocab = logits.shape[1]
    last, nothing = np.empty((1, vocab), np.float32), np.full(WIDE, -np.inf, np.float32)
    whole, here, drawn = np.array([[1.0, 1.0, 0.0, 0.0]]), np.zeros(1, np.int64), np.empty(1, np.int64)
    for i in range(first, lines.shape[0], step):
        row, begin, length, known = lines[i, ROW], lines[i, BEGIN], lines[i, LENGTH], lines[i, KNOWN]
        accepts, lasts = _lane_key(streams[i], ACCEPT, known), _lane_key(streams[i], LAST, known)
        ratios, uniforms, accept, weights = np.empty(length), np.empty(length), np.empty(length), np.ones(length + 1)
        of = found[begin + i :]  # requests before have a row more than tokens drafted
        for n in range(length):
            draft = carray(floats(drafts[begin + n]), (vocab,))
            ratios[n] = _log_ratio(logits[row + n], bits[row + n], of[n], draft, tokens[begin + n])
            uniforms[n] = np.float64(_position_key(accepts, n) >> np.uint64(11)) * 2.0**-53
        chances(ratios, block, accept, weights)
        if block:
            for n in range(first_open(accept, uniforms), length - 1):
                if uniforms[n] < accept[n]:
                    draft = carray(floats(drafts[begin + n + 1]), (vocab,))
                    excess = _excess(logits[row + n + 1], of[n + 1], draft, accept[n], last[0])
                    accept[n] = settled(accept[n], excess)
        kept, mass = stay(accept, uniforms, block), 0.0
        if kept < length:
            draft = carray(floats(drafts[begin + kept]), (vocab,))
            mass = _excess(logits[row + kept], of[kept], draft, weights[kept], last[0])
        if not (mass > 0.0 and np.isfinite(mass)):  # nothing was refused, or rounding has left nothing: see `Pair.last`
            _excess(logits[row + kept], of[kept], nothing, 1.0, last[0])
        if not np.isnan(of[kept, 2]):
            _take_logs(last[0])
        draw_some(last, last.view(np.int32), here, here, np.full(1, lasts), whole, drawn, 0, 1)
        verdicts[i, KEPT], verdicts[i, TOKEN] = kept, drawn[0]


@watched(types.void(_ROWS, _BITS, *ASKED, types.int64), *FILES)
@njit(nogil=True, cache=True, parallel=True)
def judge(
    logits: Floats, bits: Ints, lines: np.ndarray, drafts: np.ndarray, tokens: np.ndarray, streams: np.ndarray,
    params: np.ndarray, found: np.ndarray, block: bool, verdicts: np.ndarray, threads: int,
) -> None:  # fmt: skip
    """verdicts[i] int64 [VERDICT] of request i, whose rows lie one behind the other.

    logits float32 / bits int32 [any, vocab]; lines int64 [requests, FIELDS]; drafts: addresses of the rows float32
    [vocab] that tokens int64 [drafted] were drawn from; streams uint64 [requests], of which lanes are taken; params
    float64 [requests, 4] as in `sample_kernels.draw_rows`; found: memory, float64 [drafted + requests, 5].
    """
    if threads == 1:
        describe_some(logits, bits, lines, params, found, 0, 1)
        judge_some(logits, bits, lines, drafts, tokens, streams, params, found, block, verdicts, 0, 1)
    else:
        for thread in prange(threads):
            describe_some(logits, bits, lines, params, found, thread, threads)
        for thread in prange(threads):
            judge_some(logits, bits, lines, drafts, tokens, streams, params, found, block, verdicts, thread, threads)
