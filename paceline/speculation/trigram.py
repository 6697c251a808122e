"""A trigram table: which tokens followed which two in a text, as a proper distribution.

A draft that costs next to nothing and, unlike prompt lookup, always has one. Counts of two tokens of context give what
they are sure of to those of one, and those to single tokens (Witten and Bell, 1991): a context that was followed by t
different tokens in c places leaves t / (t + c) to the shorter one. So every token has some probability.
"""

import numpy as np
from numpy.typing import NDArray

Ints, Floats = NDArray[np.int64], NDArray[np.float32]


class Trigrams:
    """Of a text of tokens."""

    def __init__(self, tokens: Ints, vocabulary: int) -> None:
        """tokens [n], at least 3, each below `vocabulary` (at most 2**20). Raises ValueError."""
        if len(tokens) < 3:
            raise ValueError(f"a trigram table needs a text of 3 tokens or more, not {len(tokens)}")
        assert vocabulary <= 2**20 and tokens.min() >= 0 and tokens.max() < vocabulary
        self.vocabulary = vocabulary
        counts = np.bincount(tokens, minlength=vocabulary)
        seen, total = np.count_nonzero(counts), len(tokens)
        self._single = ((counts + seen / vocabulary) / (total + seen)).astype(np.float32)
        pairs = tokens[:-1] * vocabulary + tokens[1:]
        self._levels = [np.unique(some, return_counts=True) for some in (pairs, pairs[:-1] * vocabulary + tokens[2:])]

    @property
    def nbytes(self) -> int:
        return self._single.nbytes + sum(part.nbytes for level in self._levels for part in level)

    def probabilities(self, contexts: Ints) -> Floats:
        """What follows the last two tokens, contexts [rows, 2] (-1: there is none): [rows, vocabulary], sums of 1."""
        rows = np.tile(self._single, (len(contexts), 1))
        for row, (before, last) in zip(rows, contexts.tolist(), strict=True):
            for (keys, counts), context in zip(self._levels, (last, before * self.vocabulary + last), strict=True):
                begin, end = np.searchsorted(keys, (context * self.vocabulary, (context + 1) * self.vocabulary))
                if begin == end:
                    break
                some = counts[begin:end]
                whole = end - begin + some.sum()
                row *= (end - begin) / whole
                row[keys[begin:end] - context * self.vocabulary] += some / whole
        return rows
