"""By how much steps with and without drafts differ from their profiles.

Some factors: what all steps take over their profiles, which changes often, as machines do; and relative to it what
drafting takes, what its first pass takes over the others (it pays for what is done once a step), and what steps with
drafts take in the target, in all, by their sequences and by their tokens: these hardly change. Where all steps have
drafts, nobody can tell the first from the others. A Kalman filter (Kalman, 1960) over their logarithms keeps account of
what is known: each wanders about 0, a step's is the sum of one to four of them, but for noise, which is learnt as well.
(Several passes are a sum of two products, which is taken for its tangent.) Steps that take far longer than believed
say little: somebody else had the processor.
"""

import math

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

import paceline.compiled  # noqa: F401  # says where compiled code is kept

Floats = NDArray[np.float64]
_F64, _FLOATS = types.float64, types.float64[::1]
SIZES = 8  # of steps with drafts, in sequences: 1, 2, up to 4, 8, 16, 32, 64, and more; in tokens, twice as many
# how far the logarithms wander, and the share of it that a step's wandering makes it forget
FAR = np.array([0.5, 0.4, 0.15, *2 * SIZES * [0.12], 0.3])
FAST = np.array([2e-3, *(len(FAR) - 1) * [2e-4]])
ALL = len(FAR)
NOISE, LEARNS = 0.1, 0.02  # of a step's logarithm, as is believed beforehand; share of the newest step in what is known
OUTLIER = 2.0  # standard deviations


class Times:
    def __init__(self) -> None:
        self.mean, self.covariance = np.zeros(ALL), np.diag(FAR**2)
        self.noise = np.full(2, NOISE**2)  # variances, of the target and of drafting

    @property
    def pace(self) -> float:
        """Of all steps."""
        return float(pace_of(self.mean))

    @property
    def verifying(self) -> Floats:
        """Relative to it, of the target in steps with drafts, by sequences and tokens (`of_sequences`, `of_tokens`)."""
        return verifying_of(self.mean)  # type: ignore[no-any-return]


@njit(_F64(_FLOATS), cache=True)
def pace_of(mean):  # type: ignore[no-untyped-def]
    return math.exp(mean[0])


@njit(_FLOATS(_FLOATS), cache=True)
def drafting_of(mean):  # type: ignore[no-untyped-def]
    """Of drafting, relative to the pace: its first pass and the others."""
    return np.exp(mean[1] + np.array([mean[-1], 0.0]))


@njit(_F64[:, ::1](_FLOATS), cache=True)
def verifying_of(mean):  # type: ignore[no-untyped-def]
    table = np.empty((SIZES, SIZES))
    for i in range(SIZES):
        for j in range(SIZES):
            table[i, j] = math.exp(mean[2] + mean[3 + i] + mean[3 + SIZES + j])
    return table


@njit(types.int64(types.int64), cache=True)
def of_sequences(count):  # type: ignore[no-untyped-def]
    size = 0
    while size < SIZES - 1 and count > 1 << size:
        size += 1
    return size


@njit(types.int64(types.int64), cache=True)
def of_tokens(count):  # type: ignore[no-untyped-def]
    return of_sequences((count + 1) // 2)


@njit(types.void(_FLOATS, _F64[:, ::1]), cache=True)
def forget_a_step(mean, covariance):  # type: ignore[no-untyped-def]
    """A step has passed: all may have wandered."""
    for i in range(ALL):
        mean[i] *= 1 - FAST[i]
        for j in range(ALL):
            covariance[i, j] *= (1 - FAST[i]) * (1 - FAST[j])
        covariance[i, i] += (2 - FAST[i]) * FAST[i] * FAR[i] ** 2


@njit(types.void(_FLOATS, _F64[:, ::1], _FLOATS, _F64, _FLOATS, types.int64), cache=True)
def learn(mean, covariance, noise, seen, weights, of):  # type: ignore[no-untyped-def]
    """A step took e^`seen` times its profile: so much of the logarithm of each factor, and this noise."""
    if of == 0:
        forget_a_step(mean, covariance)
    shared, variance, surprise = np.zeros(ALL), noise[of], seen
    for i in range(ALL):
        for j in range(ALL):
            shared[i] += covariance[i, j] * weights[j]
    for i in range(ALL):
        variance += weights[i] * shared[i]
        surprise -= weights[i] * mean[i]
    noise[of] = max(1e-6, noise[of] + LEARNS * (min(surprise**2, OUTLIER**2 * variance) - variance))
    variance = max(variance, (surprise / OUTLIER) ** 2)  # as noisy as it would have to be to be no outlier
    for i in range(ALL):
        mean[i] += shared[i] / variance * surprise
        for j in range(ALL):
            covariance[i, j] -= shared[i] * shared[j] / variance


@njit(
    types.void(_FLOATS, _F64[:, ::1], _FLOATS, _F64, types.int64, types.int64, _F64, _F64, _F64), cache=True
)  # fmt: skip
def observe_step(  # type: ignore[no-untyped-def]
    mean, covariance, noise, target, sequences, tokens, drafting, first, further
):
    """What a step of so many sequences took over its profile in the target, with so many tokens (0: no drafts).

    `drafting`: its seconds (0: nobody knows), where profiles say `first` in the first pass and `further` after it.
    """
    weights = np.zeros(ALL)
    weights[0] = 1.0
    if tokens > 0:
        weights[2] = weights[3 + of_sequences(sequences)] = weights[3 + SIZES + of_tokens(tokens)] = 1.0
    learn(mean, covariance, noise, math.log(max(target, 1e-9)), weights, 0)
    if drafting > 0 and first > 0:
        own = first * math.exp(mean[-1])
        share, believed = own / (own + further), math.log(own + further)
        weights[:] = 0.0
        weights[0] = weights[1] = 1.0
        weights[-1] = share
        seen = math.log(drafting) - believed + share * mean[-1]
        learn(mean, covariance, noise, seen, weights, 1)
