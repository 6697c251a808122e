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

from collections.abc import Sequence

import numpy as np
import torch

from paceline.core.request import SamplingParams
from paceline.core.work import TokenLogprobs
from paceline.engine import stock_sampler
from paceline.engine.keyed_random import stream_key
from paceline.engine.penalties import Penalties

try:
    from paceline.engine import sample_kernels
except ImportError:  # Numba does not support every platform
    sample_kernels = None

GREEDY_BELOW = 1e-5  # as in vLLM


class SamplingState:
    """What sampling remembers of one sequence: its noise stream, its parameters as numbers, its penalties."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        prompt: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        """`generated` is what is already known beyond the prompt: an engine may have been lost on the way."""
        self.params = params
        self.stream = stream_key(params.seed, params.choice)
        self.greedy = params.temperature < GREEDY_BELOW
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self.numbers = (params.temperature, params.top_p, params.min_p, top_k)
        self.penalties = Penalties(params, vocab_size, eos_ids, prompt)
        for token in generated:
            self.penalties.observe(token)

    def observe(self, token: int) -> None:
        """A generated token became known."""
        self.penalties.observe(token)


def sample(
    logits: torch.Tensor, states: list[SamplingState], positions: list[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token per row of logits float32 [rows, vocab], which stay as they are; -1 where a row has no distribution.

    positions[i] is the absolute index in its sequence of the token to be drawn. Logprobs only for rows that asked
    (`params.logprobs` is not None) and have a token. States do not change: `observe` is the caller's to call.
    """
    if not states:
        return [], []
    touched = [i for i, state in enumerate(states) if state.penalties.active]
    if logits.device.type != "cpu" or sample_kernels is None:
        tokens = _draw_stock(logits.float(), states, positions, touched)
    else:
        tokens = _draw_kernel(logits, states, positions, touched)
    asked = [i for i, state in enumerate(states) if state.params.logprobs is not None and tokens[i] >= 0]
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    if asked:
        top = max(states[i].params.logprobs or 0 for i in asked)
        for i, entry in zip(asked, _describe(logits, asked, [tokens[i] for i in asked], top), strict=True):
            logprobs[i] = _shortened(entry, states[i].params.logprobs or 0)
    return tokens, logprobs


def prompt_logprobs(logits: torch.Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Of each row of logits float32 [rows, vocab]: the log-probability of tokens[row], its rank, the `top` likeliest.

    A row without a distribution gives TokenLogprobs(-1, nan, 0, [], []).
    """
    return _describe(logits, list(range(len(tokens))), tokens, top) if tokens else []


def warm_up(vocab_size: int) -> None:
    """Compiles what `sample` and `prompt_logprobs` need, so that the first request does not wait for it."""
    params = SamplingParams(temperature=1.0, top_p=0.5, logprobs=1)
    sample(torch.zeros(1, vocab_size), [SamplingState(params, vocab_size, (), (), ())], [0])


def _draw_kernel(
    logits: torch.Tensor, states: list[SamplingState], positions: list[int], touched: list[int]
) -> list[int]:
    """Untouched rows are read where they are; touched ones are copied and penalised first."""
    array = _array(logits)
    if not touched:
        return _run_kernel(array, states, positions, list(range(len(states))))
    tokens = [-1] * len(states)
    changed = array[touched]
    for row, i in zip(changed, touched, strict=True):
        states[i].penalties.apply(row)
    drawn = _run_kernel(changed, [states[i] for i in touched], [positions[i] for i in touched], range(len(touched)))
    for i, token in zip(touched, drawn, strict=True):
        tokens[i] = token
    rest = sorted(set(range(len(states))) - set(touched))
    drawn = _run_kernel(array, [states[i] for i in rest], [positions[i] for i in rest], rest)
    for i, token in zip(rest, drawn, strict=True):
        tokens[i] = token
    return tokens


def _run_kernel(
    array: np.ndarray, states: list[SamplingState], positions: list[int], rows: Sequence[int]
) -> list[int]:
    """Draws rows[i] of array with states[i] at positions[i]."""
    tokens = np.empty(len(states), np.int64)
    sample_kernels.draw_rows(
        array,
        array.view(np.int32),
        np.array(rows, np.int64),
        np.array([state.stream for state in states], np.uint64),
        np.array(positions, np.int64),
        np.array([state.numbers for state in states], np.float64).reshape(-1, 4),
        tokens,
    )
    return tokens.tolist()


def _draw_stock(
    logits: torch.Tensor, states: list[SamplingState], positions: list[int], touched: list[int]
) -> list[int]:
    """The same in torch operations on the logits' device; penalised rows take a detour over the host."""
    if touched:
        logits = logits.clone()
        changed = logits[touched].cpu().numpy()
        for row, i in zip(changed, touched, strict=True):
            states[i].penalties.apply(row)
        logits[touched] = torch.from_numpy(changed).to(logits.device)
    return stock_sampler.draw(logits, [s.stream for s in states], positions, [s.numbers for s in states])


def _describe(logits: torch.Tensor, rows: list[int], tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Raw logprobs of tokens[i] in row rows[i], with the `top` likeliest."""
    top = min(top, logits.shape[1])
    if logits.device.type != "cpu" or sample_kernels is None:
        return stock_sampler.describe(logits[rows].float(), tokens, top)
    array, n = _array(logits), len(rows)
    chosen, ranks = np.full(n, np.nan), np.zeros(n, np.int64)
    top_ids, top_logprobs = np.empty((n, top), np.int64), np.empty((n, top))
    index, ids = np.array(rows, np.int64), np.array(tokens, np.int64)
    sample_kernels.describe_rows(
        array, array.view(np.int32), index, ids, top, chosen, ranks, top_ids, top_logprobs
    )
    columns = zip(tokens, chosen.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True)
    return [TokenLogprobs(*column) if column[2] else TokenLogprobs(-1, float("nan"), 0, [], []) for column in columns]


def _shortened(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    if len(entry.top_ids) <= top:
        return entry
    return TokenLogprobs(entry.token, entry.logprob, entry.rank, entry.top_ids[:top], entry.top_logprobs[:top])


def _array(logits: torch.Tensor) -> np.ndarray:
    """The logits' own memory where it is float32 and contiguous, else a copy."""
    return logits.detach().float().contiguous().numpy()
