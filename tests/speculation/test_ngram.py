"""Drafts from the text so far."""

from random import Random

import numpy as np
import pytest

from paceline.speculation.ngram import propose


def draft(text: str, count: int, **limits: int) -> str:
    return "".join(map(chr, propose(np.array([ord(letter) for letter in text], np.int64), count, **limits)))


@pytest.mark.parametrize(
    "text, count, expected",
    [
        ("the cat sat. the c", 5, "at sa"),
        ("abXabYab", 1, "Y"),  # the last place
        ("1abX2abY1ab", 1, "X"),  # but one that agrees with more comes first
        ("xyzxyz", 5, "xyzxy"),  # on and on
        ("aaaa", 3, "aaa"),
        ("abcd", 3, ""),
        ("ab-b", 3, ""),  # one token is not enough
        ("", 3, ""),
        ("a", 3, ""),
        ("abab", 0, ""),
    ],
)
def test_what_followed_before(text: str, count: int, expected: str) -> None:
    assert draft(text, count) == expected


def test_how_many_tokens_must_agree() -> None:
    assert draft("ab-b", 1, shortest=1) == "-"
    assert draft("abcX.bcY.abc", 1, longest=3) == "X"
    assert draft("abcX.bcY.abc", 1, longest=2) == "Y"


def plain(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    for agreed in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, agreed - 1, -1):
            if tokens[end - agreed : end] == tokens[len(tokens) - agreed :]:
                for _ in range(count):
                    tokens = [*tokens, tokens[end]]
                    end += 1
                return tokens[-count:] if count else []
    return []


def test_against_a_search_by_definition() -> None:
    rng = Random(1)
    for _ in range(2000):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(0, 30))]
        count, shortest = rng.randrange(6), rng.randrange(1, 4)
        longest = shortest + rng.randrange(3)
        assert propose(np.array(tokens, np.int64), count, longest, shortest) == plain(tokens, count, longest, shortest)
