"""Decoders that draft: the target's own first layers, or a model beside the target.

A draft model is an ordinary model. Its keys and values are in a pool of its own, in the blocks that the target has for
the same tokens, so one admission, one prefix cache and one preemption serve both. It follows prompts chunk by chunk, in
the steps in which the target computes them, as one hybrid batch, and few where nobody has drafted for a while. A round
is "process what is known and not followed yet, then a decode for every further token": this rule alone covers what a
round before refused, a draft that was accepted whole (its last token was never processed), steps without drafts,
prompts that were not followed, preemption and prefixes found in the cache.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.batch import follows
from paceline.core.drafter_name import MODEL
from paceline.engine.attention import SliceSpan
from paceline.engine.compiling import one_process_at_a_time
from paceline.engine.drafters import SHORT, Chained, Guess, Part, TokenByToken
from paceline.engine.gpu import PagedCache
from paceline.engine.job import Job
from paceline.engine.kv_cache import KVCache
from paceline.engine.model import Decoder
from paceline.engine.rope import Rotations
from paceline.engine.vocabulary import SharedVocabulary


@cache
def chains() -> Any:
    """`chain.Chain`, whose kernel is compiled, or read from where Numba keeps it, when it is first asked for; None on
    processors that it cannot run on."""
    try:
        with one_process_at_a_time():
            from paceline.engine.chain import Chain
    except (ImportError, ValueError):  # as in `linear`
        return None
    return Chain


def chain_of(decoder: Decoder, pool: KVCache | PagedCache, progress: np.ndarray) -> Chained | None:
    """None: its passes have to be asked for one by one."""
    if decoder.device != "cpu" or decoder.config.max_context > Rotations.KEPT:
        return None
    chain = chains()
    return chain and chain.of(decoder, pool, progress)  # type: ignore[no-any-return]


class DecoderModel:
    """A decoder and its cache, in the target's blocks.

    The first layers of the target are one, over the first layers of the target's cache: what they write there is what
    the target will write in the same step.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache | PagedCache, progress: np.ndarray,
        vocabulary: SharedVocabulary | None = None,
    ) -> None:  # fmt: skip
        """`progress[0]` counts layers; `vocabulary`: None where it is the target's."""
        self.decoder, self.cache, self.progress = decoder, cache, progress
        self.vocabulary = vocabulary and vocabulary.to(decoder.device)
        self.max_context = decoder.config.max_context
        self.chain = chain_of(decoder, cache, progress) if vocabulary is None else None

    def forward(self, parts: Seq[Part]) -> Tensor:
        decoder, size = self.decoder, self.cache.block_size
        ids = torch.tensor([token for part in parts for token in part.tokens])
        if self.vocabulary is not None:
            ids = self.vocabulary.to_draft[ids.to(decoder.device)]
        spans = [
            SliceSpan(
                part.start, part.length, part.job.sequence.blocks, bool(part.guess) or part.length <= SHORT, part.read
            )
            for part in parts
        ]
        return decoder.forward(ids, decoder.plan(spans, size), self.cache, self.progress)

    def logits(self, rows: Tensor) -> Tensor:
        logits = self.decoder.logits(rows)
        return logits if self.vocabulary is None else self.vocabulary.to_target(logits)


class DraftModel(TokenByToken):
    """A decoder with a cache of its own, which has to follow what it is to draft for."""

    def __init__(
        self, model: DecoderModel, logit_rows: int, most_kept: int, max_tokens: int, guess: Guess | None = None,
        name: str = MODEL,
    ) -> None:  # fmt: skip
        """`max_tokens`: of a pass."""
        super().__init__(model, logit_rows, most_kept, guess, name)
        self.max_tokens, self.block_size = max_tokens, model.cache.block_size
        self.filled = np.zeros(model.cache.num_blocks, bool)  # blocks whose tokens are all followed
        self.idle = 0  # steps in a row without drafts

    def _first(self, jobs: Seq[Job]) -> list[Part]:
        """What is known and not followed of the sequences that are drafted for, and of prompts that may be later: those
        that come while drafts are worth it.

        As much as one pass takes; sequences further behind catch up in several steps.
        """
        parts, room = [], self.max_tokens
        self.idle = 0 if any(job.undrafted for job in jobs) else self.idle + 1
        for job in jobs:
            self._note_blocks(job)
            sequence = job.sequence
            begin = sequence.num_followed = min(sequence.num_followed, job.work.start)
            wanted = job.undrafted or (follows(self.idle) and job.end - job.work.start > 1)
            if not wanted or sequence.params.max_draft_tokens == 0 or job.end > self.model.max_context:
                continue
            length = min(job.end - begin, room)
            guess = self._guesses(job, room - length) if job.undrafted and length == job.end - begin else []
            if length:
                parts.append(Part(job, begin, length + len(guess), guess))
            room -= length + len(guess)
        return parts

    def _ready(self, parts: list[Part]) -> Iterator[tuple[Part, int]]:
        for part in parts:
            part.job.sequence.num_followed = part.start + part.length - len(part.guess)
        return (at for at in super()._ready(parts) if _caught_up(at[0].job))

    def _note_blocks(self, job: Job) -> None:
        """Blocks new to the sequence: behind `start` they will be written to; before it they were found in the cache,
        where the draft model may have followed whoever filled them, or not."""
        work, sequence = job.work, job.sequence
        if not work.blocks:
            return
        found = work.start // self.block_size if work.first_block == 0 else 0
        self.filled[work.blocks[found:]] = False
        if work.first_block == 0:
            known = self.filled[work.blocks[:found]]
            sequence.num_filled = int(known.argmin()) if not known.all() else found
            sequence.num_followed = sequence.num_filled * self.block_size

    def settle(self, jobs: Seq[Job]) -> None:
        for job in jobs:
            sequence = job.sequence
            # of what was followed that which stayed: all known tokens but the last one, which nothing has computed
            sequence.num_followed = min(sequence.num_followed, len(sequence.tokens) - 1)
            filled = sequence.num_followed // self.block_size
            if filled > sequence.num_filled:
                self.filled[sequence.blocks[sequence.num_filled : filled]] = True
                sequence.num_filled = filled


def _caught_up(job: Job) -> bool:
    return job.sequence.num_followed == job.end + len(job.draft)
