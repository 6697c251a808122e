"""Who drafts tokens: prompt lookup, a model beside the target, or the target's own first layers.

A draft model is an ordinary model. Its keys and values are in a pool of its own, in the blocks that the target has for
the same tokens, so one admission, one prefix cache and one preemption serve both. It follows prompts chunk by chunk, in
the steps in which the target computes them, as one hybrid batch. A round is "process what is known and not followed
yet, then a decode for every further token": this rule alone covers what a round before refused, a draft that was
accepted whole (its last token was never processed), steps without drafts, preemption and prefixes found in the cache.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.engine import sampler
from paceline.engine.attention import SliceSpan, plan_step
from paceline.engine.job import Job
from paceline.engine.keyed_random import DRAFT, lane_key
from paceline.engine.kv_cache import KVCache
from paceline.engine.model import Decoder
from paceline.engine.vocabulary import SharedVocabulary
from paceline.speculation import ngram

KEPT_ROWS = 256  # distributions of a step that are kept to judge drafts by: bounds their memory
Pending = list[tuple[Job, SliceSpan]]


class Drafter(Protocol):
    """Drafts for the sequences of a step, all together."""

    def propose(self, jobs: Seq[Job]) -> None:
        """Before the target computes these slices: fills in `draft`, at most `work.num_draft` tokens each.

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
            if job.work.num_draft:
                job.draft = ngram.propose(np.frombuffer(job.sequence.tokens, np.int64), job.work.num_draft)

    def settle(self, jobs: Seq[Job]) -> None:
        pass


class EarlyExit:
    """The target's first layers and its head, over the first layers of the target's cache.

    What they write there is what the target will write in the same step.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, progress: np.ndarray, logit_rows: int) -> None:
        """`progress[0]` counts layers; `logit_rows`: logits at a time."""
        self.decoder, self.cache, self.progress, self.logit_rows = decoder, cache, progress, logit_rows
        self.vocabulary: SharedVocabulary | None = None

    def propose(self, jobs: Seq[Job]) -> None:
        kept, pending = 0, self._first(jobs)
        drafting = [job for job, _ in pending if job.work.num_draft]
        try:
            while pending:
                hidden = self._forward(pending)
                ready = []
                for job, row in self._ready(pending):
                    kept += not job.coupled
                    if job.coupled or kept <= KEPT_ROWS:
                        ready.append((job, row))
                pending = [(job, self._behind(job)) for job in self._draw(ready, hidden) if self._goes_on(job)]
        finally:
            for job in drafting:
                for token in reversed(job.draft):
                    job.sequence.state.forget(token)

    def settle(self, jobs: Seq[Job]) -> None:
        pass

    def _first(self, jobs: Seq[Job]) -> Pending:
        """What a round begins with: the last token of each sequence that drafts, the only one not in the cache."""
        return [
            (job, SliceSpan(job.work.start, job.end - job.work.start, job.sequence.blocks))
            for job in jobs
            if job.work.num_draft and self._within_context(job.end)
        ]

    def _ready(self, pending: Pending) -> list[tuple[Job, int]]:
        """Those of which the next token can be drawn, and the row of its hidden states."""
        ends = np.cumsum([span.length for _, span in pending]) - 1
        return [(job, row) for (job, _), row in zip(pending, ends.tolist(), strict=True) if job.work.num_draft]

    def _behind(self, job: Job) -> SliceSpan:
        """The token drafted last."""
        return SliceSpan(job.end + len(job.draft) - 1, 1, job.sequence.blocks)

    def _goes_on(self, job: Job) -> bool:
        count, ended = len(job.draft), job.draft[-1] in job.sequence.stops
        return not ended and count < job.work.num_draft and self._within_context(job.end + count)

    def _within_context(self, tokens: int) -> bool:
        return tokens <= self.decoder.config.max_context

    def _forward(self, pending: Pending) -> Tensor:
        """Hidden states [tokens, hidden], one span after the other."""
        tokens = [token for job, span in pending for token in _tokens(job, span)]
        ids = torch.tensor(tokens, device=self.decoder.device)
        if self.vocabulary is not None:
            ids = self.vocabulary.to_draft[ids]
        plan = plan_step([span for _, span in pending], self.decoder.config, self.cache.block_size, self.decoder.device)
        return self.decoder.forward(ids, plan, self.cache, self.progress)

    def _draw(self, ready: list[tuple[Job, int]], hidden: Tensor) -> list[Job]:
        """One more token for each; those for which the model had a distribution.

        As the target's token will be drawn: with the same parameters, behind the tokens drafted before; where the
        verdict is by coupling with the noise of the position, else with noise that nothing else uses.
        """
        drawn = []
        for begin in range(0, len(ready), self.logit_rows):
            some = ready[begin : begin + self.logit_rows]
            rows = torch.tensor([row for _, row in some], device=hidden.device)
            log_probs = self.decoder.logits(hidden.index_select(0, rows))
            if self.vocabulary is not None:
                log_probs = self.vocabulary.to_target(log_probs)
            jobs = [job for job, _ in some]
            sampler.to_log_probs(log_probs, [job.sequence.state for job in jobs], [[]] * len(jobs))
            streams, places = zip(*(_noise(job) for job in jobs), strict=True)
            tokens = sampler.draw(log_probs, streams, places)
            alone = not any(job.coupled for job in jobs)  # else rows that nobody needs would be kept with others
            for job, token, row in zip(jobs, tokens, log_probs, strict=True):
                if token < 0:
                    continue
                drawn.append(job)
                job.draft.append(token)
                job.sequence.state.observe(token)
                if not job.coupled:
                    job.draft_rows.append(row if alone else row.clone())
        return drawn


class DraftModel(EarlyExit):
    """Another model, with its own cache in the target's blocks."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        progress: np.ndarray,
        logit_rows: int,
        max_tokens: int,
        vocabulary: SharedVocabulary | None,
    ) -> None:
        """`max_tokens`: of a pass; `vocabulary`: None where both models have the same."""
        super().__init__(decoder, cache, progress, logit_rows)
        self.max_tokens, self.vocabulary = max_tokens, vocabulary and vocabulary.to(decoder.device)
        self.filled = np.zeros(cache.num_blocks, bool)  # blocks whose tokens are all followed

    def _first(self, jobs: Seq[Job]) -> Pending:
        """What is known and not followed of the sequences that draft, and of prompts that may draft later.

        As much as one pass takes; sequences further behind catch up in several steps.
        """
        pending, room = [], self.max_tokens
        for job in jobs:
            self._note_blocks(job)
            sequence = job.sequence
            begin = sequence.num_followed = min(sequence.num_followed, job.work.start)
            follows = job.work.num_draft or job.end - job.work.start > 1
            if not follows or sequence.params.max_draft_tokens == 0 or not self._within_context(job.end):
                continue
            length = min(job.end - begin, room)
            room -= length
            if length:
                pending.append((job, SliceSpan(begin, length, sequence.blocks)))
        return pending

    def _ready(self, pending: Pending) -> list[tuple[Job, int]]:
        for job, span in pending:
            job.sequence.num_followed = span.start + span.length
        return [at for at in super()._ready(pending) if at[0].sequence.num_followed == at[0].end + len(at[0].draft)]

    def _note_blocks(self, job: Job) -> None:
        """Blocks new to the sequence: behind `start` they will be written to; before it they were found in the cache,
        where the draft model may have followed whoever filled them, or not."""
        work, sequence, size = job.work, job.sequence, self.cache.block_size
        found = work.start // size if work.first_block == 0 else 0
        self.filled[work.blocks[found:]] = False
        if work.first_block == 0:
            known = self.filled[work.blocks[:found]]
            sequence.num_filled = int(known.argmin()) if not known.all() else found
            sequence.num_followed = sequence.num_filled * size

    def settle(self, jobs: Seq[Job]) -> None:
        for job in jobs:
            sequence = job.sequence
            # of what was followed that which stayed: all known tokens but the last one, which nothing has computed
            sequence.num_followed = min(sequence.num_followed, len(sequence.tokens) - 1)
            filled = sequence.num_followed // self.cache.block_size
            if filled > sequence.num_filled:
                self.filled[sequence.blocks[sequence.num_filled : filled]] = True
                sequence.num_filled = filled


def _tokens(job: Job, span: SliceSpan) -> list[int]:
    """Of a span that lies in what is known, or is one drafted token."""
    known = job.sequence.tokens
    if span.start < len(known):
        return known[span.start : span.start + span.length].tolist()
    return [job.draft[span.start - len(known)]]


def _noise(job: Job) -> tuple[int, int]:
    """Stream and position of the noise that the next token is drafted with."""
    stream, known, place = job.sequence.state.stream, job.end, len(job.draft)
    return (stream, known + place) if job.coupled else (lane_key(stream, DRAFT, known), place)
