"""Tiles, cliffs and the knee are found in noisy tables whose truth is known."""

import numpy as np
import pytest

from paceline.latency.tiles import find_cliffs, find_knee, find_tiles, padded, sweep_widths


def noisy(truth, widths, noise: float, seed: int) -> dict[int, float]:
    """Medians of seven repeats each, as the profiler keeps them."""
    rng = np.random.default_rng(seed)
    return {n: truth(n) * float(np.median(1 + noise * rng.standard_normal(7))) for n in widths}


def stairs(tiles, fixed: float = 0.01, token: float = 0.0005, pair: float = 1e-8):
    """A floor for reading the weights, then time by padded rows."""
    return lambda n: max(fixed, token * padded(n, tiles)) + pair * n * n


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tiles", [((1, 1),), ((1, 8),), ((1, 1), (33, 8)), ((1, 1), (65, 64)), ((1, 1), (129, 128))])
def test_tiles_are_found_in_noise(tiles, seed):
    times = noisy(stairs(tiles, fixed=0.002), sweep_widths(512), 0.02, seed)
    found = find_tiles(times)
    assert [padded(n, found) for n in range(256, 513)] == [padded(n, tiles) for n in range(256, 513)]


def test_small_tiles_before_larger_ones():
    tiles = ((1, 4), (33, 8))
    assert find_tiles(noisy(stairs(tiles, fixed=0.0), sweep_widths(512), 0.003, 1)) == tiles


def test_noise_alone_is_no_tile():
    for seed in range(20):
        assert find_tiles(noisy(lambda n: 0.01 + 0.0005 * n, sweep_widths(256), 0.03, seed)) == ((1, 1),)
        assert find_tiles(noisy(lambda n: 0.01, sweep_widths(256), 0.03, seed)) == ((1, 1),)


def test_too_few_widths_show_no_tile():
    assert find_tiles({1: 0.1, 2: 0.1}) == ((1, 1),)


def test_cliffs_are_the_rises_between_neighbours():
    times = {63: 1.0, 64: 1.01, 65: 1.31, 100: 2.0, 128: 2.2, 129: 2.9}
    cliffs = find_cliffs(times, 0.1)
    assert [c.tokens for c in cliffs] == [64, 128]
    assert cliffs[0].rise == pytest.approx(0.297, abs=1e-3)


@pytest.mark.parametrize(("maximum", "knee"), [(512, 216), (64, 56), (5, 5)])
def test_the_knee_is_the_first_width_near_the_best_rate(maximum, knee):
    def seconds(n):
        return 0.02 + 0.001 * padded(n, ((1, 8),))

    assert find_knee(seconds, 8, maximum) == knee
    rates = [w / seconds(w) for w in range(8, maximum + 1, 8)] or [1.0]
    assert maximum < 8 or knee / seconds(knee) >= 0.95 * max(rates) > (knee - 8) / seconds(max(1, knee - 8))


def test_padding_by_regime():
    tiles = ((1, 4), (33, 8))
    assert [padded(n, tiles) for n in (1, 4, 5, 32, 33, 40, 41)] == [4, 4, 8, 32, 40, 40, 48]
