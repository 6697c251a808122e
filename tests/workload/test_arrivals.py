"""Arrival processes have the rates and the burstiness that they were asked for."""

import numpy as np
import pytest

from paceline.workload.arrivals import gamma, merged, power_law, rate_and_cv, resampled


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_arrivals_have_their_rate_and_cv(cv):
    times = gamma(20.0, cv, 5000.0, seed=3)
    rate, found = rate_and_cv(times)
    assert rate == pytest.approx(20.0, rel=0.05 * cv) and found == pytest.approx(cv, rel=0.05)
    assert times[0] >= 0 and times[-1] < 5000 and (np.diff(times) >= 0).all()


def test_arrivals_are_a_function_of_their_seed():
    assert gamma(5, 2, 100, 1).tolist() == gamma(5, 2, 100, 1).tolist() != gamma(5, 2, 100, 2).tolist()
    assert len(gamma(0, 1, 100, 1)) == 0


@pytest.mark.parametrize(
    ("numbers", "key"), [((-1.0, 1.0, 1.0), "rate"), ((1.0, 0.0, 1.0), "cv"), ((1.0, 1.0, 0.0), "duration")]
)
def test_numbers_that_make_no_sense_are_named(numbers, key):
    with pytest.raises(ValueError, match=f"^{key}: "):
        gamma(*numbers, seed=0)


def test_power_law_shares():
    shares = power_law(64.0, 32)
    assert sum(shares) == pytest.approx(64) and shares[0] / shares[3] == pytest.approx(2)
    assert shares[0] == pytest.approx(6.437652429593184)  # of AlpaServe's S1
    assert power_law(8, 4, 0) == [2, 2, 2, 2]


def test_resampling_scales_rate_and_burstiness_and_keeps_the_course():
    calm, busy = gamma(5, 1.0, 600, 1), 600 + gamma(50, 1.0, 600, 2)
    times = np.concatenate([calm, busy])
    several = [resampled(times, 2.0, 3.0, 60.0, seed=seed) for seed in range(8)]
    for before, begin, end in ((calm, 0, 600), (busy, 600, 1200)):
        counts = [((one >= begin) & (one < end)).sum() for one in several]
        assert np.mean(counts) / len(before) == pytest.approx(2, rel=0.06)
    assert rate_and_cv(several[0][several[0] >= 600])[1] == pytest.approx(3.0, rel=0.25)
    assert all(one[0] >= times[0] and one[-1] <= times[-1] and (np.diff(one) >= 0).all() for one in several)
    sparse = gamma(0.5, 1.0, 6000, 3) + 1e9  # seconds since long ago
    counts = [len(resampled(sparse, 1.0, 8.0, 60.0, seed)) for seed in range(20)]
    assert np.mean(counts) == pytest.approx(len(sparse), rel=0.12)
    with pytest.raises(ValueError, match="^cv_scale: "):
        resampled(times, 1, 0, 60, 0)
    assert len(resampled(np.empty(0), 2, 2, 60, 0)) == 0
    assert len(resampled(np.arange(10, 14) / 10, 1, 1, 0.1, 0)), "1.0, 1.1 and so on may end in 1.3 or beyond it"


def test_merging_keeps_order_and_prefers_the_earlier_stream():
    times, owners = merged([np.array([1.0, 3.0]), np.array([1.0, 2.0]), np.empty(0)])
    assert times.tolist() == [1, 1, 2, 3] and owners.tolist() == [0, 1, 1, 0]
