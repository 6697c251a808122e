"""Who drafts, as fleet files and command lines say it."""

from typing import NamedTuple

# who drafted, as outputs and metrics say it: nobody, nobody for a drafter failed, or a kind of drafter
NOBODY, ERROR, NGRAM, MODEL, EARLY_EXIT, TRIGRAM = DRAFTERS = ("", "error", "ngram", "model", "early_exit", "trigram")
FORMS = "ngram, early_exit, trigram:FILE or a model's source; ngram+ before the others has n-grams tried first"


class DrafterName(NamedTuple):
    """Parts of `[ngram+](ngram | early_exit | trigram:FILE | SOURCE)`."""

    kind: str  # ngram, early_exit, trigram or model
    path: str = ""  # of the text that a trigram table is made of; of the model
    lookup: bool = False  # n-grams first, and the other where they find nothing

    @staticmethod
    def parse(text: str) -> "DrafterName":
        """Raises ValueError for a name that says nothing."""
        rest = text.removeprefix("ngram+")
        lookup = rest != text
        if rest in ("ngram", "early_exit"):
            name = DrafterName(rest, "", lookup)
        elif rest.startswith("trigram:"):
            name = DrafterName("trigram", rest.removeprefix("trigram:"), lookup)
        else:
            name = DrafterName("model", rest, lookup)
        if name.kind in ("trigram", "model") and not name.path:
            raise ValueError(f"{text!r} is not {FORMS}")
        return name

    def __str__(self) -> str:
        last = {"model": self.path, "trigram": f"trigram:{self.path}"}.get(self.kind, self.kind)
        return "ngram+" * self.lookup + last
