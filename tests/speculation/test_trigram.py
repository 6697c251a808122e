"""Trigram tables: proper distributions, those of the counts."""

from collections import Counter

import numpy as np
import pytest

from paceline.speculation.trigram import Trigrams

TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 2, 4, 4, 4, 2]


def by_hand(context: tuple[int, int], vocabulary: int) -> list[float]:
    """Witten and Bell's estimate, from counts."""
    shares = [1 / vocabulary] * vocabulary
    for length in range(3):
        if length and context[-length:] not in {tuple(TEXT[i : i + length]) for i in range(len(TEXT) - length)}:
            break
        behind = [i + length for i in range(len(TEXT) - length) if tuple(TEXT[i : i + length]) == context[2 - length :]]
        follows = Counter(TEXT[i] for i in behind)
        total = len(follows) + sum(follows.values())
        shares = [(follows[t] + len(follows) * share) / total for t, share in enumerate(shares)]
    return shares


@pytest.mark.parametrize("vocabulary", [5, 9])
def test_every_context_is_that_of_the_counts(vocabulary):
    table = Trigrams(np.array(TEXT), vocabulary)
    contexts = [(a, b) for a in range(-1, vocabulary) for b in range(vocabulary)]
    rows = table.probabilities(np.array(contexts))
    assert rows.dtype == np.float32 and rows.min() > 0 and np.allclose(rows.sum(1), 1, atol=1e-6)
    for context, row in zip(contexts, rows, strict=True):
        assert row.tolist() == pytest.approx(by_hand(context, vocabulary), rel=1e-5), context


def test_what_followed_is_likely():
    rows = Trigrams(np.array(TEXT), 9).probabilities(np.array([[0, 1], [4, 4]]))
    assert rows.argmax(1).tolist() == [2, 4] and rows[0, 2] > 0.4


def test_a_text_of_two_tokens_is_refused():
    with pytest.raises(ValueError, match="3 tokens or more, not 2"):
        Trigrams(np.array([1, 2]), 4)
