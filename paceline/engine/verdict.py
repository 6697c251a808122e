"""Drafts that were drawn at random meet the target's logits: `speculation.rejection.Pair` without copies.

A row of the target is its logits and five numbers (`sample_kernels.describe_targets`): so of what has the size of the
vocabulary only the last tokens' weights are made, a row for each request. Elsewhere than on CPUs, both are tensors of
log-probabilities.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.engine import sampler
from paceline.engine.penalties import undo
from paceline.engine.sampler import SamplingState, sample_kernels
from paceline.speculation.rejection import Cut, LogProbs, Pair, verify


@contextmanager
def compared(
    logits: Tensor, rows: Sequence[int], states: list[SamplingState], drafts: list[list[int]], draft_rows: list[Tensor]
) -> Iterator[Pair]:
    """These rows of logits float32 [any, vocab], 1 + len(drafts[i]) of them for states[i], against what was drafted
    with `draft_rows`, log-probabilities [vocab] each. Afterwards the logits are as they were, bit for bit."""
    if sampler.stock(logits):
        target = logits[list(rows)]
        sampler.to_log_probs(target, states, drafts)
        yield LogProbs(target, torch.stack(draft_rows))
        return
    array, before = logits.contiguous().numpy(), []
    try:
        for n, state in sampler.penalised(states, drafts):
            before.append((array[rows[n]], state.penalties.apply(array[rows[n]])))
        yield _Logits(array, np.array(rows, np.int64), sampler.row_numbers(states, drafts), draft_rows)
    finally:
        for row, values in before:
            undo(row, values)


def warm_up(vocab_size: int, device: str = "cpu") -> None:
    """Compiles or loads what a verdict needs."""
    row, state = torch.zeros(1, vocab_size, device=device), SamplingState(SamplingParams(), vocab_size, (), (), ())
    with compared(row.repeat(3, 1), [0, 1, 2], [state], [[0, 0]], [*row.repeat(2, 1).log_softmax(1)]) as pair:
        verify(pair, [0, 0], [2], [1.0, 1.0], lambda weights: [0], True)


class _Logits:
    def __init__(
        self, logits: np.ndarray, rows: np.ndarray, params: list[tuple[float, float, float, int]], drafts: list[Tensor]
    ) -> None:
        vocab = logits.shape[1]
        assert all(row.shape == (vocab,) and row.is_contiguous() and row.dtype == torch.float32 for row in drafts)
        self.logits, self.bits, self.rows = logits, logits.view(np.int32), rows
        self.found, self.drafts = np.empty((len(rows), 5)), np.array([row.data_ptr() for row in drafts], np.int64)
        self.threads = sampler.threads(len(rows) * vocab)
        sample_kernels.describe_targets(
            logits, self.bits, rows, np.array(params, np.float64), self.found, self.threads
        )

    def log_ratios(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        ratios, some = np.empty(len(tokens)), np.array(rows, np.int64)
        ids = np.array(tokens, np.int64)
        sample_kernels.log_ratios(
            self.logits, self.bits, self.rows[some], self.found[some], self.drafts, ids, ratios
        )
        return ratios.tolist()

    def excess(self, rows: Sequence[int], drafts: Sequence[int], weights: Sequence[float]) -> list[float]:
        masses, some, chosen = np.empty(len(rows)), np.array(rows, np.int64), np.array(drafts, np.int64)
        sample_kernels.excess_masses(
            self.logits, self.rows[some], self.found[some], self.drafts[chosen], np.array(weights, np.float64), masses,
            self.threads,
        )  # fmt: skip
        return masses.tolist()

    def last(self, rows: Sequence[int], cut: Sequence[Cut]) -> Tensor:
        last, some = torch.empty(len(rows), self.logits.shape[1]), np.array(rows, np.int64)
        drafts, weights = np.zeros(len(rows), np.int64), np.ones(len(rows))
        for place, draft, weight in cut:
            drafts[place], weights[place] = self.drafts[draft], weight
        sample_kernels.last_weights(
            self.logits, self.rows[some], self.found[some], drafts, weights, last.numpy(), self.threads
        )
        return last
