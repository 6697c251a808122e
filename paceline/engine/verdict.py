"""Drafts that were drawn at random meet the target's logits (`speculation.rejection`).

On CPUs compiled code has the logits as they are (`verdict_kernel`); elsewhere both are tensors of log-probabilities.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.work import SliceWork
from paceline.engine import sampler
from paceline.engine.compiling import one_process_at_a_time
from paceline.engine.job import EngineSequence, Job
from paceline.engine.keyed_random import ACCEPT, LAST, lane_key, uniform
from paceline.engine.penalties import undo
from paceline.engine.sampler import SamplingState
from paceline.speculation import rejection

try:
    with one_process_at_a_time():
        from paceline.engine import verdict_kernel
except (ImportError, ValueError):  # as in `linear`
    verdict_kernel = None


def judged(jobs: Sequence[Job], logits: Tensor, block: bool) -> list[tuple[int, int]]:
    """Of each job how many drafted tokens stay, and the one that follows them, -1 where it has no distribution.

    logits float32 [any, vocabulary], those of a job from `first_row` on; afterwards they are as they were, bit for bit.
    """
    states, drafts = [job.sequence.state for job in jobs], [job.draft for job in jobs]
    rows = [job.first_row + n for job in jobs for n in range(1 + len(job.draft))]
    if sampler.stock(logits) or verdict_kernel is None:
        target = logits[rows]
        sampler.to_log_probs(target, states, drafts)
        return _by_log_probs(jobs, target, block)
    numbers, before = logits.contiguous().numpy(), []
    try:
        for n, state in sampler.penalised(states, drafts):
            before.append((numbers[rows[n]], state.penalties.apply(numbers[rows[n]])))
        vocab = numbers.shape[1]
        asked = to_judge(jobs, vocab, block)
        verdict_kernel.judge(numbers, numbers.view(np.int32), *asked, sampler.threads(len(rows) * vocab))
    finally:
        for row, values in before:
            undo(row, values)
    return [(kept, token) for kept, token in asked[-1].tolist()]


def to_judge(jobs: Sequence[Job], vocab: int, block: bool) -> tuple:
    """What `verdict_kernel.judge` is asked about logits; the last one is where it answers."""
    lines, addresses, tokens = list[tuple[int, int, int, int]](), list[int](), list[int]()
    for job in jobs:
        assert len(job.draft_rows) == len(job.draft)
        for row in job.draft_rows:
            assert row.shape == (vocab,) and row.is_contiguous() and row.dtype == torch.float32
            addresses.append(row.data_ptr())
        lines.append((job.first_row, len(tokens), len(job.draft), job.end))
        tokens += job.draft
    states = [job.sequence.state for job in jobs]
    return (
        np.array(lines, np.int64).reshape(-1, 4), np.array(addresses, np.int64), np.array(tokens, np.int64),
        np.array([state.stream for state in states], np.uint64),
        np.array([state.numbers for state in states], np.float64).reshape(-1, 4),
        np.empty((len(tokens) + len(lines), 5)), block, np.empty((len(lines), 2), np.int64),
    )  # fmt: skip


def _by_log_probs(jobs: Sequence[Job], target: Tensor, block: bool) -> list[tuple[int, int]]:
    accept, last = (
        [lane_key(job.sequence.state.stream, lane, job.end) for job in jobs] for lane in (ACCEPT, LAST)
    )
    return rejection.verify(
        rejection.LogProbs(target, torch.stack([row for job in jobs for row in job.draft_rows])),
        [token for job in jobs for token in job.draft],
        [len(job.draft) for job in jobs],
        [uniform(stream, n) for stream, job in zip(accept, jobs, strict=True) for n in range(len(job.draft))],
        lambda log_weights: sampler.draw(log_weights, last, [0] * len(last)),
        block,
    )


def warm_up(vocab_size: int, device: str = "cpu") -> None:
    """Compiles or loads what a verdict needs."""
    row, state = torch.zeros(1, vocab_size, device=device), SamplingState(SamplingParams(), vocab_size, (), (), ())
    sequence = EngineSequence(array("q"), 0, frozenset(), state.params, state)
    draft = list(row.repeat(2, 1).log_softmax(1))
    job = Job(SliceWork(0, 0, 3, True, 0, [], num_draft=2), sequence, draft=[0, 0], draft_rows=draft)
    judged([job], row.repeat(3, 1), True)
