"""The opponent: an interpolated n-gram table with modified Kneser-Ney smoothing (Chen and Goodman 1999, section 3.5).

All arithmetic is on sorted arrays: an n-gram is one integer, its tokens being the digits in base `vocab`.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Level:
    """Counts of one order: sorted n-grams with their counts, sorted contexts with their mass and back-off mass."""

    grams: np.ndarray  # int64 [g]
    discounted: np.ndarray  # float64 [g], count minus its discount
    contexts: np.ndarray  # int64 [c], a gram without its last token
    total: np.ndarray  # float64 [c], sum of the counts
    left_over: np.ndarray  # float64 [c], sum of the discounts: the weight of the lower order


def build(tokens: np.ndarray, order: int, vocab: int) -> list[Level]:
    """Levels 1 to `order`. The highest counts occurrences, each lower one the distinct tokens to a gram's left."""
    grams, counts = np.unique(pack(tokens, order, vocab), return_counts=True)
    levels = [_level(grams, counts, vocab)]
    for size in range(order - 1, 0, -1):
        grams, counts = np.unique(grams % vocab**size, return_counts=True)
        levels.append(_level(grams, counts, vocab))
    return levels[::-1]


def pack(tokens: np.ndarray, order: int, vocab: int) -> np.ndarray:
    """The n-gram that ends at each position from order - 1 on, int64 [len(tokens) - order + 1]."""
    wide = tokens.astype(np.int64)
    grams = np.zeros(len(wide) - order + 1, dtype=np.int64)
    for offset in range(order):
        grams = grams * vocab + wide[offset : offset + len(grams)]
    return grams


def _level(grams: np.ndarray, counts: np.ndarray, vocab: int) -> Level:
    n1, n2, n3, n4 = (float((counts == n).sum()) or 1.0 for n in (1, 2, 3, 4))
    share = n1 / (n1 + 2 * n2)
    by_count = np.clip([0.0, 1 - 2 * share * n2 / n1, 2 - 3 * share * n3 / n2, 3 - 4 * share * n4 / n3], 0.0, None)
    discount = by_count[np.minimum(counts, 3)]
    contexts, first = np.unique(grams // vocab, return_index=True)
    total = np.add.reduceat(counts.astype(np.float64), first)
    return Level(grams, counts - np.minimum(discount, counts), contexts, total, np.add.reduceat(discount, first))


def probabilities(levels: list[Level], tokens: np.ndarray, vocab: int) -> np.ndarray:
    """P(token | the tokens before it) for every position from len(levels) - 1 on, float64."""
    highest = pack(tokens, len(levels), vocab)
    result = np.full(len(highest), 1.0 / vocab)
    for size, level in enumerate(levels, start=1):
        grams = highest % vocab**size
        count = _lookup(level.grams, level.discounted, grams)
        total = _lookup(level.contexts, level.total, grams // vocab)
        left_over = _lookup(level.contexts, level.left_over, grams // vocab)
        known = total > 0
        result[known] = (count[known] + left_over[known] * result[known]) / total[known]
    return result


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values[key] for each wanted key, 0 where the key is unknown."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)
