"""Structured output: which tokens may come next for the text to become one of a grammar, such as JSON of a schema.

llguidance knows the answer for each prefix, and takes tokens back, so a grammar follows drafted tokens like everything
else that depends on what came before. No torch here: a helper process of the front end checks what clients ask for
before anything is queued.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer as Backend

MOST_BYTES = 32 << 10  # of a schema, or what else says what a text may be
WHITESPACE = r"[ \n]{0,8}"  # between JSON's tokens: a small model could go on with blanks for ever
OPTIONS = {  # all, so that a schema's own `x-guidance` changes none
    "whitespace_pattern": WHITESPACE, "whitespace_flexible": True, "item_separator": ",", "key_separator": ":",
    "coerce_one_of": False, "lenient": False,
}  # fmt: skip
KEPT = 16  # compiled grammars of a model
# Most grammars within these are compiled in at most a few hundred milliseconds, and a step's mask found in less. Some
# take minutes: those that clients ask for are checked by `server.grammar_check` first.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000, step_lexer_fuel=100_000, step_max_items=20_000, max_grammar_size=50_000,
    max_lexer_states=20_000, verbose_errors=False,
)  # fmt: skip
ANY_BYTES = LLTokenizer("byte")  # each a token
Changes = list[tuple[np.ndarray, np.ndarray]]


def grammar_of(form: str, text: str) -> str:
    """The grammar, as `SamplingParams` has it, of JSON of a schema ("json"), or of what matches a regular expression
    ("regex"). Raises ValueError where no text can be held to it, or finding its next tokens might take too long.

    Grammars in words of their own are not for clients: rules that name each other end the process (llguidance 1.9.1
    goes through 3,600 of them, 27 KiB, on the stack of a thread), or take it minutes.
    """
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    if form == "json":
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)
    else:
        grammar = LLMatcher.grammar_from_regex(text)
    matcher = LLMatcher(ANY_BYTES, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # which finds out whether there is any text
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return grammar


class Grammars:
    """Makes the grammars of a model's sequences. A grammar is compiled in a thread of its own, beside the passes of the
    prompt: what may follow it is the first thing that anybody has to know."""

    def __init__(self, tokenizer: Path | None, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """`tokenizer`: the file, None where there is none."""
        self.eos_ids = tuple(eos_ids)
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._fault = "the model has no tokenizer.json, or no end of sequence"
        if tokenizer is not None and self.eos_ids:
            text = tokenizer.read_text(encoding="utf-8")
            known = 1 + max(Backend.from_str(text).get_vocab(with_added_tokens=True).values(), default=-1)
            try:
                self._tokenizer = LLTokenizer(text, n_vocab=max(known, vocab_size), eos_token=list(self.eos_ids))
            except ValueError as error:  # it serves all but structured output
                self._fault = f"the model's tokens do not stand for bytes ({error})"
        self._compiled: dict[str, Future[LLMatcher]] = {}  # the newest last
        self.compiled = 0  # so far: progress, for who waits for several
        self._compiler = ThreadPoolExecutor(1, "grammars")

    def of(self, grammar: str) -> "Grammar":
        """Raises ValueError where a model has no tokenizer or no end."""
        if self._tokenizer is None:
            raise ValueError(f"structured output: {self._fault}")
        compiled = self._compiled.pop(grammar, None) or self._compiler.submit(self._compile, grammar)
        self._compiled[grammar] = compiled
        if len(self._compiled) > KEPT:
            del self._compiled[next(iter(self._compiled))]
        return Grammar(compiled, self._vocab_size, self.eos_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        self.compiled += 1
        if matcher.is_error():
            raise ValueError(f"structured output: {matcher.get_error()}")
        return matcher


class Grammar:
    """Where one sequence's text is in its grammar. All but its making waits until the grammar is compiled, and raises
    ValueError if it cannot be."""

    def __init__(self, compiled: Future[LLMatcher], vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._compiled, self._vocab_size, self._eos_ids = compiled, vocab_size, frozenset(eos_ids)
        self._tokens: list[int] = []  # observed
        self._ends = 0  # ends of sequence among them: the matcher does not count those

    @cached_property
    def _matcher(self) -> LLMatcher:
        return self._compiled.result().deep_copy()

    @property
    def complete(self) -> bool:
        """Only the end of the sequence may follow."""
        return self._ends > 0 or self._matcher.is_stopped()

    def observe(self, token: int) -> None:
        self._tokens.append(token)
        if token in self._eos_ids:
            self._ends += 1
        else:
            self._matcher.consume_token(token)

    def forget(self, token: int) -> None:
        """Takes back the last `observe` that has not been taken back."""
        self._tokens.pop()
        if token in self._eos_ids:
            self._ends -= 1
        elif self._matcher.is_error():  # for ever: it starts again, without what was drafted
            self._matcher = self._compiled.result().deep_copy()
            self._matcher.consume_tokens([known for known in self._tokens if known not in self._eos_ids])
        else:
            self._matcher.rollback(1)

    def apply(self, row: np.ndarray) -> Changes:
        """Bans in `row` (float32 [vocab]) what must not follow; what `penalties.undo` needs. Raises ValueError where
        the text has left the grammar or has grown too complex for it."""
        if self._ends:
            allowed = np.zeros(self._vocab_size, np.uint8)
            allowed[list(self._eos_ids)] = 1
        else:
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise ValueError(f"structured output: {self._matcher.get_error()}")
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._vocab_size]
        banned = np.flatnonzero(allowed == 0)
        before = [(banned, row[banned])]
        row[banned] = -np.inf
        return before
