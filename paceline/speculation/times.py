"""By how much steps with and without drafts differ from their profiles.

Three factors: what all steps take over their profiles, which changes often, as machines do; and relative to it what
steps with drafts take in the target, and what drafting takes, which hardly change. Where all steps have drafts, nobody
can tell the first from the others. A Kalman filter (Kalman, 1960) over their logarithms keeps account of what is known:
each wanders about 0, a step's is the sum of two or one of them, but for noise, which is learnt as well. Steps that
take far longer than believed count as if they took somewhat longer: somebody else had the processor.
"""

import math

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_F64, _FLOATS = types.float64, types.float64[::1]
# how far the logarithms wander, and the share of it that a step's wandering makes it forget
FAR, FAST = np.array([0.5, 0.2, 0.4]), np.array([2e-3, 2e-4, 2e-4])
NOISE, LEARNS = 0.1, 0.02  # of a step's logarithm, as is believed beforehand; share of the newest step in what is known
OUTLIER = 2.0  # standard deviations


class Times:
    def __init__(self) -> None:
        self.mean, self.covariance = np.zeros(3), np.diag(FAR**2)
        self.noise = np.full(2, NOISE**2)  # variances, of the target and of drafting

    @property
    def pace(self) -> float:
        """Of all steps."""
        return math.exp(self.mean[0])

    @property
    def verifying(self) -> float:
        """Of the target in steps with drafts, relative to that."""
        return math.exp(self.mean[1])

    @property
    def drafting(self) -> float:
        return math.exp(self.mean[2])

    def observe(self, target: float, drafts: bool, drafting: float) -> None:
        """What a step took over its profile: in the target, with drafts or without, and drafting (0: nobody knows)."""
        learn(self.mean, self.covariance, self.noise, math.log(max(target, 1e-9)), 1 if drafts else 0, 0)
        if drafting > 0:
            learn(self.mean, self.covariance, self.noise, math.log(drafting), 2, 1)


@njit(types.void(_FLOATS, _F64[:, ::1], _FLOATS, _F64, types.int64, types.int64), cache=True)
def learn(mean, covariance, noise, seen, part, of):  # type: ignore[no-untyped-def]
    """A step took e^`seen` times its profile: the factor of all steps and that `part`'s, and this noise."""
    if of == 0:  # a step has passed
        for i in range(3):
            mean[i] *= 1 - FAST[i]
            for j in range(3):
                covariance[i, j] *= (1 - FAST[i]) * (1 - FAST[j])
            covariance[i, i] += (2 - FAST[i]) * FAST[i] * FAR[i] ** 2
    with_part = 1.0 if part > 0 else 0.0
    shared = covariance[:, 0] + with_part * covariance[:, part]
    variance = shared[0] + with_part * shared[part] + noise[of]
    most = OUTLIER * math.sqrt(variance)
    surprise = min(max(seen - mean[0] - with_part * mean[part], -most), most)
    noise[of] = max(1e-6, noise[of] + LEARNS * (surprise**2 - variance))
    for i in range(3):
        mean[i] += shared[i] / variance * surprise
        for j in range(3):
            covariance[i, j] -= shared[i] * shared[j] / variance
