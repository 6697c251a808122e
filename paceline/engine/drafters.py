"""Who drafts tokens: prompt lookup, or a model of some kind, token by token.

A model that drafts is anything that has a distribution for the next token: a trigram table, the target's first layers,
a model of its own (`draft_models`). All sequences of a step are drafted for together, a pass for each place in the
draft. Several levels are one more idea: before a pass n-grams guess what the model will draft; the pass looks at the
guesses as well, and as far as the model draws them itself it has drafted several tokens at once. What it draws does not
depend on guesses, since the noise of every place is fixed before.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.drafter_name import MODEL, NGRAM, NOBODY
from paceline.engine import sampler
from paceline.engine.job import Job, in_parts
from paceline.engine.keyed_random import DRAFT, lane_key
from paceline.speculation import ngram
from paceline.speculation.trigram import Trigrams

SHORT = 2  # tokens of a slice that are faster as rows; a draft is not better for the bits of a chunk
KEPT_ROWS, KEPT = 256, 1 << 23  # distributions of a step that are kept to judge drafts by, or numbers: as bounds memory
Guess = Callable[[np.ndarray, int], list[int]]  # known tokens, and how many more are wanted at most


def most_kept(vocabulary: int) -> int:
    """Distributions that a step keeps to judge drafts by, of so many tokens each."""
    return max(KEPT_ROWS, KEPT // vocabulary)


class Drafter(Protocol):
    """Drafts for the sequences of a step, all together."""

    def propose(self, jobs: Seq[Job]) -> None:
        """Before the target computes these slices: fills in `draft` where it is empty, at most `work.num_draft` each,
        and `drafter`.

        Where a draft was chosen at random and is to be judged by rejection, `draft_rows` says from which distributions.
        """
        ...

    def settle(self, jobs: Seq[Job]) -> None:
        """The step is over, and it is known which tokens stayed."""
        ...


class PromptLookup:
    """`speculation.ngram`, sequence by sequence."""

    def propose(self, jobs: Seq[Job]) -> None:
        for job in jobs:
            if job.undrafted:
                job.draft = ngram.propose(np.frombuffer(job.sequence.tokens, np.int64), job.work.num_draft)
                job.drafter = NGRAM if job.draft else NOBODY

    def settle(self, jobs: Seq[Job]) -> None:
        pass


class InTurn:
    """Drafters of which each is asked where those before it had nothing."""

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters

    def propose(self, jobs: Seq[Job]) -> None:
        for drafter in self.drafters:
            drafter.propose(jobs)

    def settle(self, jobs: Seq[Job]) -> None:
        for drafter in self.drafters:
            drafter.settle(jobs)


@dataclass(slots=True)
class Part:
    """What a pass looks at of one sequence: tokens [start, start + length) of what is known, drafted, and guessed."""

    job: Job
    start: int
    length: int
    guess: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        known, end = self.job.sequence.tokens, self.start + self.length
        more = [*self.job.draft, *self.guess][max(0, self.start - len(known)) : max(0, end - len(known))]
        return [*known[self.start : end], *more]

    @property
    def read(self) -> int:
        """So many of them, the last ones: what may follow those is asked."""
        return 1 + len(self.guess) if self.job.work.num_draft else 0


class Link(NamedTuple):
    """What a chain draws for a sequence."""

    start: int  # the position of the first token that is given
    given: list[int]  # tokens; behind the last of them the first is drawn
    draws: int  # how many
    blocks: Seq[int]  # of its keys and values
    stream: int  # of the noise
    place: int  # in it of the first draw; those behind have the next ones
    numbers: tuple[float, float, float, int]  # of its `SamplingState`

    @property
    def passes(self) -> int:
        return len(self.given) + self.draws - 1


class Chained(Protocol):
    """`chain.Chain`."""

    def draw(self, links: Seq[Link], keep: bool) -> list[tuple[list[int], Seq[Tensor]]]: ...


class Distributions(Protocol):
    """A model as drafting needs it."""

    max_context: int  # tokens
    chain: Chained | None  # draws all of a draft in one call

    def forward(self, parts: Seq[Part]) -> Tensor:
        """A row for every token of the parts that is read, one part after the other."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """Some of those rows, to [rows, vocabulary of the target] float32: what may follow."""
        ...


class TokenByToken:
    """Drafts by a model, to which any token of a sequence may be shown without those before it."""

    def __init__(
        self, model: Distributions, logit_rows: int, most_kept: int, guess: Guess | None = None, name: str = MODEL
    ) -> None:  # fmt: skip
        """`logit_rows`: logits at a time; `most_kept`: as the function; `guess`: what the model may draft, to be looked
        at in the same pass; `name`: one of `DRAFTERS`."""
        self.model, self.logit_rows, self.name = model, logit_rows, name
        self.kept, self.most_kept = 0, most_kept  # distributions of this step
        self.guess = guess if model.chain is None else None  # a pass more takes less than a guess

    def propose(self, jobs: Seq[Job]) -> None:
        self.kept, parts = 0, self._first(jobs)
        drafting = [part.job for part in parts if part.job.undrafted]
        try:
            while parts := self._chain(parts):
                rows = self.model.forward(parts)
                ready = []
                for part, row in self._ready(parts):
                    self.kept += 0 if part.job.coupled else 1 + len(part.guess)
                    if part.job.coupled or self.kept <= self.most_kept:
                        ready.append((part, row))
                parts = [self._behind(job) for job in self._draw(ready, rows) if self._goes_on(job)]
        finally:
            for job in drafting:
                job.drafter = self.name if job.draft else NOBODY
                for token in reversed(job.draft):
                    job.sequence.state.forget(token)

    def settle(self, jobs: Seq[Job]) -> None:
        pass

    def _chain(self, parts: list[Part]) -> list[Part]:
        """Drafts in one call all that depends on nothing but the tokens before, if the model can; the other parts."""
        if (chain := self.model.chain) is None:
            return parts
        left = [part for part in parts if not _is_plain(part)]
        plain = [part for part in parts if _is_plain(part)] if len(left) < len(parts) else []
        for some in in_parts(plain, self.logit_rows, lambda part: 1):
            links = [self._link(part) for part in some]
            keep = not all(part.job.coupled for part in some)
            kept = self.kept + keep * len(links) * max(link.passes for link in links)
            if kept > self.most_kept:
                left += some
                continue
            self.kept = kept
            for part, (tokens, log_probs) in zip(some, chain.draw(links, keep), strict=True):
                _take(Part(part.job, part.start, part.length, tokens[:-1]), tokens, log_probs)
        return left

    def _link(self, part: Part) -> Link:
        sequence = part.job.sequence
        return Link(
            part.start, part.tokens, self._room(part.job), sequence.blocks, *_noise(part.job, 0), sequence.state.numbers
        )  # fmt: skip

    def _first(self, jobs: Seq[Job]) -> list[Part]:
        """What a round begins with: the last known token of each sequence that is to be drafted for."""
        return [self._behind(job) for job in jobs if job.undrafted and self._room(job) > 0]

    def _ready(self, parts: list[Part]) -> Iterator[tuple[Part, int]]:
        """Those of which the next token can be drawn, and the row of its distribution behind all guesses."""
        ends = np.cumsum([part.read for part in parts]) - 1
        return ((part, row) for part, row in zip(parts, ends.tolist(), strict=True) if part.job.work.num_draft)

    def _behind(self, job: Job) -> Part:
        """The last token, known or drafted, and guesses."""
        guess = self._guesses(job, job.work.num_draft)
        return Part(job, job.end + len(job.draft) - 1, 1 + len(guess), guess)

    def _guesses(self, job: Job, most: int) -> list[int]:
        """Tokens that may be drafted next, without the last one of a draft: nothing needs what follows that."""
        done, most, sequence = len(job.draft), min(most, self._room(job) - 1), job.sequence
        if self.guess is None or most < 1 or not sequence.state.greedy or sequence.params.grammar:
            return []  # drawn at random it is seldom right; a grammar may forbid it
        known = np.frombuffer(sequence.tokens, np.int64)
        return self.guess(np.concatenate([known, job.draft]) if done else known, most)

    def _goes_on(self, job: Job) -> bool:
        return job.draft[-1] not in job.sequence.stops and self._room(job) > 0

    def _room(self, job: Job) -> int:
        """Tokens that may still be drafted: the model reads all but the last within its context."""
        done = len(job.draft)
        return min(job.work.num_draft - done, self.model.max_context + 1 - job.end - done)

    def _draw(self, ready: list[tuple[Part, int]], rows: Tensor) -> list[Job]:
        """A token more for each, and further ones as far as guesses are right; those that may go on.

        As the target's tokens will be drawn: with the same parameters, behind the tokens drafted before; where the
        verdict is by coupling with the noise of the position, else with noise that nothing else uses.
        """
        drawn = []
        for some in in_parts(ready, self.logit_rows, lambda at: 1 + len(at[0].guess)):
            index = [row - n for part, row in some for n in range(len(part.guess), -1, -1)]
            log_probs = self.model.logits(rows.index_select(0, torch.tensor(index, device=rows.device)))
            parts = [part for part, _ in some]
            sampler.to_log_probs(log_probs, [part.job.sequence.state for part in parts], [p.guess for p in parts])
            noise = [_noise(part.job, n) for part in parts for n in range(1 + len(part.guess))]
            tokens = sampler.draw(log_probs, *zip(*noise, strict=True))
            alone = not any(part.job.coupled for part in parts)  # else rows that nobody needs would be kept with others
            begin = 0
            for part in parts:
                end = begin + 1 + len(part.guess)
                kept = log_probs[begin:end]
                if _take(part, tokens[begin:end], kept if alone else kept.clone()):
                    drawn.append(part.job)
                begin = end
        return drawn


def _is_plain(part: Part) -> bool:
    """Whether it is a short one, of all that is known of a sequence without penalties, to draft for."""
    job = part.job
    end = part.start + part.length == job.end + len(job.draft)
    return end and part.length <= SHORT and job.work.num_draft > 0 and not job.sequence.state.penalties.active


def _take(part: Part, tokens: list[int], rows: Tensor | Seq[Tensor]) -> bool:
    """Drafts the first of these tokens, and each behind a guess that was right. False: the model had nothing to say."""
    job = part.job
    for n, token in enumerate(tokens):
        if token < 0:
            return False
        job.draft.append(token)
        job.sequence.state.observe(token)
        if not job.coupled:
            job.draft_rows.append(rows[n])
        if token in job.sequence.stops or [token] != part.guess[n : n + 1]:
            break
    job.sequence.num_followed = job.end + len(job.draft) - 1
    return True


def _noise(job: Job, further: int) -> tuple[int, int]:
    """Stream and position of the noise that the next token but so many is drafted with."""
    stream, known, place = job.sequence.state.stream, job.end, len(job.draft) + further
    return (stream, known + place) if job.coupled else (lane_key(stream, DRAFT, known), place)


class TrigramModel:
    """`speculation.trigram` as a model: a token's row is that token and the one before."""

    max_context, chain = 2**31, None

    def __init__(self, table: Trigrams, device: str) -> None:
        self.table, self.device = table, device

    def forward(self, parts: Seq[Part]) -> Tensor:
        contexts = [pair for part in parts for pair in _pairs(part)]
        return torch.tensor(contexts)

    def logits(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(np.log(self.table.probabilities(rows.numpy()))).to(self.device)


def _pairs(part: Part) -> Iterator[tuple[int, int]]:
    tokens, before = part.tokens, Part(part.job, part.start - 1, 1).tokens if part.start else [-1]
    return zip([*before, *tokens[:-1]], tokens, strict=True)
