"""Arrival processes: Poisson and Gamma, power-law shares of models, recorded arrivals made denser or burstier.

AlpaServe (section 6.1) describes traffic by its rate and by the coefficient of variation (CV) of the gaps: Gamma gaps
with CV 1 are Poisson arrivals, larger CVs are bursts.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def gamma(rate: float, cv: float, duration: float, seed: int) -> Floats:
    """Arrival times in [0, duration) seconds with independent Gamma gaps; the first arrival is the first gap.

    The same (rate, cv, seed) give the same arrivals whatever the duration, as far as that goes, up to the size of the
    blocks in which gaps are drawn. Raises ValueError.
    """
    if not rate >= 0:
        raise ValueError(f"rate: {rate} is not at least 0 requests/s")
    if not cv > 0:
        raise ValueError(f"cv: {cv} is not above 0")
    if not duration > 0:
        raise ValueError(f"duration: {duration} is not above 0 seconds")
    if rate == 0:
        return np.empty(0)
    random = np.random.RandomState(seed)  # whose streams are fixed for good
    shape, scale, block = 1 / cv**2, cv**2 / rate, max(int(rate * duration * 1.2), 1)
    parts, last = [], 0.0
    while last < duration:
        gaps = random.gamma(shape, scale, size=block)
        gaps[0] += last
        parts.append(np.cumsum(gaps))
        last = parts[-1][-1]
    times = np.concatenate(parts)
    return times[times < duration]


def power_law(total: float, count: int, exponent: float = 0.5) -> list[float]:
    """Shares of `total` that fall with the rank as rank**-exponent (AlpaServe's skewed traffic)."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return [float(share) for share in total * weights / weights.sum()]


def rate_and_cv(times: Floats) -> tuple[float, float]:
    """Requests/s between the first and the last arrival, and the CV of the gaps; (0, 1) of fewer than three."""
    if len(times) < 3 or times[-1] <= times[0]:
        return 0.0, 1.0
    gaps = np.diff(times)
    return len(gaps) / float(times[-1] - times[0]), float(gaps.std() / gaps.mean())


def resampled(times: Floats, rate_scale: float, cv_scale: float, window: float, seed: int) -> Floats:
    """Recorded arrivals with so many times their rate and their CV, window by window (AlpaServe, section 6.2).

    In each window of `window` seconds, Gamma arrivals of its own rate and CV, both scaled. Raises ValueError.
    """
    for name, value in (("rate_scale", rate_scale), ("cv_scale", cv_scale), ("window", window)):
        if not value > 0:
            raise ValueError(f"{name}: {value} is not above 0")
    found, end = [], float(times[-1]) if len(times) else 0.0
    for index in range(int(end // window) + 1):
        begin = index * window
        some = times[(times >= begin) & (times < begin + window)]
        _, cv = rate_and_cv(some)
        span = min(window, end - begin)
        if len(some) and span > 0:
            rate = len(some) / span * rate_scale
            found.append(begin + gamma(rate, max(cv * cv_scale, 1e-2), span, seed + index))
    return np.concatenate(found) if found else np.empty(0)


def merged(streams: Sequence[Floats]) -> tuple[Floats, NDArray[np.int32]]:
    """All arrivals in order of time (of equal ones the earlier stream first), and the stream of each."""
    times = np.concatenate([np.empty(0), *streams])
    owners = np.repeat(np.arange(len(streams), dtype=np.int32), [len(stream) for stream in streams])
    order = np.argsort(times, kind="stable")
    return times[order], owners[order]
