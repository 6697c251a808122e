"""What one sequence's parameters do to its logits before the temperature, kept up to date token by token.

In vLLM's order: logit_bias and the ban on stopping before min_tokens; repetition penalty (prompt and output: positive
logits are divided, others multiplied); frequency and presence penalties (output only). All of it touches a few ids,
so a state holds those ids and their counts and never rescans a sequence. Ids outside the vocabulary cannot be drawn
and are dropped. A grammar (`grammar`) bans what it does not allow, last of all.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.request import SamplingParams
from paceline.engine.grammar import Grammar


class SeenTokens:
    """Distinct ids seen so far and what each is charged for having been generated. Arrays grow by doubling."""

    def __init__(self, prompt: Iterable[int], vocab_size: int, presence: float, frequency: float) -> None:
        """A token generated n > 0 times is charged presence + n * frequency."""
        self._vocab_size, self._presence, self._frequency = vocab_size, presence, frequency
        seen = sorted({token for token in prompt if 0 <= token < vocab_size})
        self._slot = {token: slot for slot, token in enumerate(seen)}
        self._num_prompt = len(seen)
        self._times: dict[int, int] = {}
        self._ids = np.array(seen + [0] * 64, np.int64)
        self._charges = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """Counts one generated token."""
        if not 0 <= token < self._vocab_size:
            return
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._charges = np.concatenate([self._charges, np.zeros_like(self._charges)])
        times = self._times[token] = self._times.get(token, 0) + 1
        self._ids[slot] = token
        self._charges[slot] = self._presence + times * self._frequency

    def remove(self, token: int) -> None:
        """Takes back the last `add` that has not been taken back."""
        if not 0 <= token < self._vocab_size:
            return
        slot, times = self._slot[token], self._times[token] - 1
        self._times[token] = times
        self._charges[slot] = self._presence + times * self._frequency if times else 0.0
        if not times and slot >= self._num_prompt:
            del self._slot[token]  # it was the last to come in

    @property
    def ids(self) -> np.ndarray:
        """int64 [n]"""
        return self._ids[: len(self._slot)]

    @property
    def charges(self) -> np.ndarray:
        """float32 [n]: to be subtracted from the logits; 0 for what is in the prompt only"""
        return self._charges[: len(self._slot)]


class Penalties:
    """Every logit change of one sequence. `active` says whether the next row is touched at all."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_ids: Iterable[int],
        prompt: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        self._params, self._grammar = params, grammar
        self.generated = 0
        self._penalise = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        if self._penalise:
            counted = prompt if params.repetition_penalty != 1.0 else ()
            self._seen = SeenTokens(counted, vocab_size, params.presence_penalty, params.frequency_penalty)
        bias: dict[int, float] = {}
        for token, value in params.logit_bias:
            if 0 <= token < vocab_size:
                bias[token] = bias.get(token, 0.0) + value
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        stops = params.stops(eos_ids)
        self._stops = np.array(sorted(token for token in stops if 0 <= token < vocab_size), np.int64)

    def observe(self, token: int) -> None:
        """A generated token became known."""
        self.generated += 1
        if self._penalise:
            self._seen.add(token)
        if self._grammar:
            self._grammar.observe(token)

    def forget(self, token: int) -> None:
        """Takes back the last `observe` that has not been taken back."""
        self.generated -= 1
        if self._penalise:
            self._seen.remove(token)
        if self._grammar:
            self._grammar.forget(token)

    @property
    def active(self) -> bool:
        """Whether `apply` would change anything."""
        return self._penalise or len(self._bias) > 0 or self._grammar is not None or self._must_go_on

    @property
    def _must_go_on(self) -> bool:
        if self.generated >= self._params.min_tokens or not len(self._stops):
            return False
        return self._grammar is None or not self._grammar.complete

    def apply(self, row: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Changes `row` (float32 [vocab]) in place; what `undo` needs to put it back."""
        params, before = self._params, []
        if len(self._bias_ids):
            before.append((self._bias_ids, row[self._bias_ids]))
            row[self._bias_ids] += self._bias
        if self._must_go_on:
            before.append((self._stops, row[self._stops]))
            row[self._stops] = -np.inf
        if self._penalise:
            ids, values = self._seen.ids, row[self._seen.ids]
            before.append((ids, values))
            if params.repetition_penalty != 1.0:
                penalty = np.float32(params.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            row[ids] = values - self._seen.charges
        return before + self._grammar.apply(row) if self._grammar else before


def undo(row: np.ndarray, before: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Puts back, bit for bit, what `Penalties.apply` changed."""
    for ids, values in reversed(before):
        row[ids] = values
