"""Names of drafters."""

import pytest

from paceline.core.drafter_name import DrafterName


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ngram", DrafterName("ngram")),
        ("early_exit", DrafterName("early_exit")),
        ("trigram:a/b.txt", DrafterName("trigram", "a/b.txt")),
        ("builtin:coder-draft", DrafterName("model", "builtin:coder-draft")),
        ("ngram+/models/a+b", DrafterName("model", "/models/a+b", True)),
        ("ngram+trigram:x", DrafterName("trigram", "x", True)),
    ],
)
def test_a_name_says_who_drafts(text, name):
    assert DrafterName.parse(text) == name and str(name) == text


@pytest.mark.parametrize("text", ["", "ngram+", "trigram:"])
def test_a_name_that_says_nothing_is_refused(text):
    with pytest.raises(ValueError, match="is not ngram, early_exit, trigram:FILE or"):
        DrafterName.parse(text)
