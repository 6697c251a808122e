"""What one sequence's parameters do to its logits before the temperature, kept up to date token by token.

In vLLM's order: logit_bias and the ban on stopping before min_tokens; repetition penalty (prompt and output: positive
logits are divided, others multiplied); frequency and presence penalties (output only). All of it touches a few ids,
so a state holds those ids and their counts and never rescans a sequence. Ids outside the vocabulary cannot be drawn
and are dropped.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.request import SamplingParams


class SeenTokens:
    """Distinct ids seen so far and how often each was generated (0: in the prompt only). Arrays grow by doubling."""

    def __init__(self, prompt: Iterable[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        seen = sorted({token for token in prompt if 0 <= token < vocab_size})
        self._slot = {token: slot for slot, token in enumerate(seen)}
        self._ids = np.array(seen + [0] * 64, np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """Counts one generated token."""
        if not 0 <= token < self._vocab_size:
            return
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1.0

    @property
    def ids(self) -> np.ndarray:
        """int64 [n]"""
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> np.ndarray:
        """float32 [n]: times generated"""
        return self._counts[: len(self._slot)]


class Penalties:
    """Every logit change of one sequence. `active` says whether the next row is touched at all."""

    def __init__(self, params: SamplingParams, vocab_size: int, eos_ids: Iterable[int], prompt: Sequence[int]) -> None:
        self._params = params
        self.generated = 0
        self._penalise = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        if self._penalise:
            self._seen = SeenTokens(prompt if params.repetition_penalty != 1.0 else (), vocab_size)
        bias: dict[int, float] = {}
        for token, value in params.logit_bias:
            if 0 <= token < vocab_size:
                bias[token] = bias.get(token, 0.0) + value
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
        self._stops = np.array(sorted(token for token in stops if 0 <= token < vocab_size), np.int64)

    def observe(self, token: int) -> None:
        """A generated token became known."""
        self.generated += 1
        if self._penalise:
            self._seen.add(token)

    @property
    def active(self) -> bool:
        """Whether `apply` would change anything."""
        return self._penalise or len(self._bias) > 0 or self._must_go_on

    @property
    def _must_go_on(self) -> bool:
        return self.generated < self._params.min_tokens and len(self._stops) > 0

    def apply(self, row: np.ndarray) -> None:
        """Changes `row` (float32 [vocab]) in place."""
        params = self._params
        if len(self._bias):
            row[self._bias_ids] += self._bias
        if self._must_go_on:
            row[self._stops] = -np.inf
        if self._penalise:
            ids, counts = self._seen.ids, self._seen.counts
            values = row[ids]
            if params.repetition_penalty != 1.0:
                penalty = np.float32(params.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            values -= np.float32(params.frequency_penalty) * counts
            values -= np.float32(params.presence_penalty) * (counts > 0)
            row[ids] = values
