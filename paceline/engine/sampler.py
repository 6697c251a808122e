"""Drawing tokens from logits: every sampling parameter of a batch of rows, in float32, each row on its own.

Order, as in vLLM: logit_bias and min_tokens, repetition, frequency and presence penalties (`penalties`), temperature,
min_p, top_k, top_p over what is left, renormalised; at least one token stays, and of equal logits the lowest ids.
Temperature below 1e-5 is greedy: the argmax of the penalised logits, lowest id first. Otherwise the token is
argmax(logits / T + G) over the survivors with keyed Gumbel noise (`keyed_random`): the same function of (logits,
parameters, seed, choice, position) in any batch, and the one that coupled speculation shares.

Logprobs are of the raw distribution (log_softmax of the logits as the model gave them).

A row without a distribution (a NaN, +inf, or nothing above -inf) yields token -1 for itself; the caller fails that
sequence alone. Nothing is raised, and no row changes another.

On a CPU the work is done by the kernels of `sample_kernels` (exact, no sorting); elsewhere, or without Numba, by
torch operations (`stock_sampler`), which draw the same tokens up to rounding.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from paceline.core.request import SamplingParams
from paceline.core.work import TokenLogprobs
from paceline.engine import stock_sampler
from paceline.engine.compiling import one_process_at_a_time
from paceline.engine.grammar import Grammar
from paceline.engine.keyed_random import stream_key
from paceline.engine.penalties import Penalties, undo

try:
    with one_process_at_a_time():
        from paceline.engine import sample_kernels
except ImportError:  # Numba does not support every platform
    sample_kernels = None

GREEDY_BELOW = 1e-5  # as in vLLM
PARALLEL = 2**19  # logits of a step from which on waking the other threads costs less than it saves


class SamplingState:
    """What sampling remembers of one sequence: its noise stream, its parameters as numbers, its penalties."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        prompt: Sequence[int],
        generated: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        """`generated` is what is already known beyond the prompt: an engine may have been lost on the way."""
        self.params = params
        self.stream = stream_key(params.seed, params.choice)
        self.greedy = params.temperature < GREEDY_BELOW
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self.numbers = (params.temperature, params.top_p, params.min_p, top_k)
        self.penalties = Penalties(params, vocab_size, eos_ids, prompt, grammar)
        for token in generated:
            self.penalties.observe(token)

    def observe(self, token: int) -> None:
        """A generated token became known."""
        self.penalties.observe(token)

    def forget(self, token: int) -> None:
        """It was a drafted one, and the last of those observed."""
        self.penalties.forget(token)


def sample(
    logits: torch.Tensor, states: list[SamplingState], positions: list[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token per row of logits float32 [rows, vocab]; -1 where a row has no distribution.

    During the call penalised rows are changed in place; when it returns the logits are as they were, bit for bit.
    positions[i] is the absolute index in its sequence of the token to be drawn. Logprobs only for rows that asked
    (`params.logprobs` is not None) and have a token. States do not change: `observe` is the caller's to call.
    """
    if not states:
        return [], []
    if stock(logits):
        tokens = _draw_stock(logits, states, positions)
    else:
        array = _array(logits)
        with _penalised(array, states):
            tokens = _draw_kernel(array, states, positions)
    return tokens, logprobs(logits, states, tokens)


def asked(logits: torch.Tensor, states: list[SamplingState], positions: list[int]) -> torch.Tensor:
    """What `sample` draws for states without penalties, int64 [rows]; it does not wait for the device."""
    return stock_sampler.draw(logits.float(), [s.stream for s in states], positions, [s.numbers for s in states])


def logprobs(logits: torch.Tensor, states: list[SamplingState], tokens: list[int]) -> list[TokenLogprobs | None]:
    """Of tokens[row] in each row of logits, where the row's state asks for it and it has a token."""
    asked = [i for i, state in enumerate(states) if state.params.logprobs is not None and tokens[i] >= 0]
    entries: list[TokenLogprobs | None] = [None] * len(states)
    if asked:
        top = max(states[i].params.logprobs or 0 for i in asked)
        for i, entry in zip(asked, _describe(logits, asked, [tokens[i] for i in asked], top), strict=True):
            entries[i] = _shortened(entry, states[i].params.logprobs or 0)
    return entries


def to_log_probs(logits: torch.Tensor, states: list[SamplingState], drafts: list[list[int]]) -> None:
    """Rows of logits float32 [rows, vocab] become log-probabilities of what `sample` draws from: after penalties, at
    the temperature, -inf for what filters remove. A greedy row is sure of its token; without a distribution it is NaN.

    states[i] has 1 + len(drafts[i]) rows, one behind the other: each knows one drafted token more than the one before.
    """
    for row, state in penalised(states, drafts):
        _penalise(logits[row], state)
    params = [state.numbers for state, draft in zip(states, drafts, strict=True) for _ in range(1 + len(draft))]
    if stock(logits):
        logits.copy_(stock_sampler.log_probs(logits, params))
    else:
        array = logits.numpy()
        sample_kernels.log_prob_rows(array, array.view(np.int32), np.array(params, np.float64), threads(array.size))


def penalised(states: list[SamplingState], drafts: list[list[int]]) -> Iterator[tuple[int, SamplingState]]:
    """Each of those rows that penalties change, with its state, to which the drafted tokens before it are known
    meanwhile."""
    begin = 0
    for state, draft in zip(states, drafts, strict=True):
        observed = 0
        try:
            while state.penalties.active:  # what is not does not become it
                yield begin + observed, state
                if observed == len(draft):
                    break
                state.observe(draft[observed])
                observed += 1
        finally:
            for token in reversed(draft[:observed]):
                state.forget(token)
        begin += 1 + len(draft)


def draw(log_weights: torch.Tensor, streams: list[int], positions: list[int]) -> list[int]:
    """A token for each row of log-weights float32 [rows, vocab], which need not be normalised; -1 where it has none."""
    numbers = [(1.0, 1.0, 0.0, 0)] * len(streams)
    if stock(log_weights):
        return stock_sampler.draw(log_weights, streams, positions, numbers).tolist()
    return _draw_rows(_array(log_weights), streams, positions, numbers)


def prompt_logprobs(logits: torch.Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Of each row of logits float32 [rows, vocab]: the log-probability of tokens[row], its rank, the `top` likeliest.

    A row without a distribution gives TokenLogprobs(-1, nan, 0, [], []).
    """
    return _describe(logits, list(range(len(tokens))), tokens, top) if tokens else []


def warm_up(vocab_size: int, device: str = "cpu") -> None:
    """Compiles or loads what `sample` and `prompt_logprobs` need, so that the first request does not wait for it."""
    params = SamplingParams(temperature=1.0, top_p=0.5, logprobs=1)
    state = SamplingState(params, vocab_size, (), (), ())
    sample(torch.zeros(1, vocab_size, device=device), [state], [0])
    to_log_probs(torch.zeros(1, vocab_size, device=device), [state], [[]])


def _draw_kernel(array: np.ndarray, states: list[SamplingState], positions: list[int]) -> list[int]:
    """Draws of array float32 [rows, vocab] as it is."""
    if all(state.greedy for state in states):
        return _argmax(array)
    return _draw_rows(array, [state.stream for state in states], positions, [state.numbers for state in states])


def _draw_rows(
    array: np.ndarray, streams: list[int], positions: list[int], numbers: list[tuple[float, float, float, int]]
) -> list[int]:
    tokens = np.empty(len(array), np.int64)
    sample_kernels.draw_rows(
        array, array.view(np.int32), np.arange(len(array)), np.array(positions, np.int64), np.array(streams, np.uint64),
        np.array(numbers, np.float64), tokens, threads(array.size),
    )  # fmt: skip
    return tokens.tolist()


def threads(size: int) -> int:
    """For so many logits."""
    return torch.get_num_threads() if size >= PARALLEL else 1


def _argmax(array: np.ndarray) -> list[int]:
    """The lowest id of each row's largest logit; -1 where that is a NaN (NumPy's argmax finds it) or infinite."""
    tokens = array.argmax(axis=1).tolist()
    return [token if math.isfinite(array.item(row, token)) else -1 for row, token in enumerate(tokens)]


@contextmanager
def _penalised(array: np.ndarray, states: list[SamplingState]) -> Iterator[None]:
    """Inside, the rows are as their penalties want them; afterwards as they were. No row is copied."""
    before = []
    try:
        for row, state in enumerate(states):
            if state.penalties.active:
                before.append((array[row], state.penalties.apply(array[row])))
        yield
    finally:
        for row, values in before:
            undo(row, values)


def _draw_stock(logits: torch.Tensor, states: list[SamplingState], positions: list[int]) -> list[int]:
    """The same in torch operations on the logits' device; penalised rows take a detour over the host."""
    logits = logits.float()
    touched = [i for i, state in enumerate(states) if state.penalties.active]
    if touched:
        logits = logits.clone()
        for i in touched:
            _penalise(logits[i], states[i])
    return asked(logits, states, positions).tolist()


def _penalise(row: torch.Tensor, state: SamplingState) -> None:
    """Changes a row [vocab] as the penalties want it, on whatever device it is."""
    changed = row.cpu()  # the row itself where it is there
    state.penalties.apply(changed.numpy())
    row.copy_(changed)


def _describe(logits: torch.Tensor, rows: list[int], tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Raw logprobs of tokens[i] in row rows[i], with the `top` likeliest."""
    top = min(top, logits.shape[1])
    if stock(logits):
        return stock_sampler.describe(logits[rows].float(), tokens, top)
    array, n = _array(logits), len(rows)
    chosen, ranks = np.full(n, np.nan), np.zeros(n, np.int64)
    top_ids, top_logprobs = np.empty((n, top), np.int64), np.empty((n, top))
    index, ids = np.array(rows, np.int64), np.array(tokens, np.int64)
    sample_kernels.describe_rows(array, array.view(np.int32), index, ids, top, chosen, ranks, top_ids, top_logprobs)
    columns = zip(tokens, chosen.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True)
    return [TokenLogprobs(*column) if column[2] else TokenLogprobs(-1, float("nan"), 0, [], []) for column in columns]


def _shortened(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    if len(entry.top_ids) <= top:
        return entry
    return TokenLogprobs(entry.token, entry.logprob, entry.rank, entry.top_ids[:top], entry.top_logprobs[:top])


def stock(logits: torch.Tensor) -> bool:
    """Whether torch operations do the work."""
    return logits.device.type != "cpu" or sample_kernels is None


def _array(logits: torch.Tensor) -> np.ndarray:
    """The logits' own memory where it is float32 and contiguous, else a copy."""
    return logits.detach().float().contiguous().numpy()
