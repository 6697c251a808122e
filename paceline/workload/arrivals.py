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

    One process of Gamma gaps whose rate and CV are those of the window of `window` seconds that it is in, both scaled.
    Raises ValueError.
    """
    for name, value in (("rate_scale", rate_scale), ("cv_scale", cv_scale), ("window", window)):
        if not value > 0:
            raise ValueError(f"{name}: {value} is not above 0")
    if len(times) < 2 or times[-1] <= times[0]:
        return times.copy()
    begin, end = float(times[0]), float(times[-1])
    edges = np.arange(begin, end, window)
    edges = np.append(edges[edges < end], end)  # rounding may bring one more
    counts = np.histogram(times, edges)[0] * rate_scale
    # gaps in units of what is expected between two arrivals, and when each unit is over; from long before the first
    random, ends = np.random.RandomState(seed), np.cumsum(counts)
    at = -50.0 * cv_scale**2 * 4
    found = []
    for index, last in enumerate(ends.tolist()):
        some = times[(times >= edges[index]) & (times <= edges[index + 1])]
        cv = max(rate_and_cv(some)[1] * cv_scale, 1e-2)
        while at < last:
            gaps = random.gamma(1 / cv**2, cv**2, size=max(16, int(1.2 * (last - at))))
            units = at + np.cumsum(gaps)
            kept = units[units < last]
            found.append(kept)
            if len(kept) < len(units):
                at = float(units[len(kept)])
                if at < ends[-1]:
                    found.append(units[len(kept) : len(kept) + 1])
                break
            at = float(units[-1])
    units = np.concatenate(found)
    arrivals: Floats = np.interp(units[units >= 0], np.append(0.0, ends), edges)
    return arrivals


def merged(streams: Sequence[Floats]) -> tuple[Floats, NDArray[np.int32]]:
    """All arrivals in order of time (of equal ones the earlier stream first), and the stream of each."""
    times = np.concatenate([np.empty(0), *streams])
    owners = np.repeat(np.arange(len(streams), dtype=np.int32), [len(stream) for stream in streams])
    order = np.argsort(times, kind="stable")
    return times[order], owners[order]
