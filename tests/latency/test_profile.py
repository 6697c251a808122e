"""A profile of measured steps whose truth is known."""

from random import Random

import pytest

from paceline.core.batch import StepShape
from paceline.latency.profile import Measured, Percentiles, summarize
from paceline.latency.roofline import Roofline
from paceline.latency.tiles import padded, sweep_widths

FLOOR = Roofline(10, 10, 10, 10, 10, 1e9, 1e9)


def test_disturbed_runs_do_not_count_as_low():
    assert Measured(StepShape(), [19.0, 10.0, 18.0]).low == 10.0
    assert Measured(StepShape(), [19.0, 10.0, 18.0, 10.4, 19.0, 10.6]).low == pytest.approx(10.2)
    assert Measured(StepShape(), [5.0]).low == 5.0


def test_spread_is_against_the_other_runs():
    assert Measured(StepShape(), [1.0]).spread() == []
    assert Measured(StepShape(), [1.0, 2.0]).spread() == [1.0, 0.5]


def truth(shape: StepShape) -> float:
    rows = padded(shape.tokens, ((1, 8),))
    return 0.01 + 0.0002 * rows + 0.004 * (rows > 128) + 1e-5 * shape.decodes + 2e-8 * shape.decode_context


def measured(shape: StepShape, rng: Random) -> Measured:
    """Nine runs with 1 % of noise; in two of them somebody else computes."""
    factors = [rng.gauss(1, 0.01) * (1.9 if i in (3, 7) else 1) for i in range(9)]
    return Measured(shape, [truth(shape) * factor for factor in factors])


def test_a_profile_says_what_is_there():
    rng = Random(4)
    sweep = [measured(StepShape().add(0, width, True), rng) for width in sweep_widths(512, 8)]

    def mix() -> Measured:
        shape = StepShape()
        for _ in range(rng.randint(1, 60)):
            shape = shape.add(rng.randint(0, 3000), 1, True)
        return measured(shape.add(0, rng.choice((8, 64, 128, 256)), True), rng)

    profile = summarize(sweep, [mix() for _ in range(60)], [mix() for _ in range(40)], FLOOR)
    assert profile.tile == 8 and profile.max_tokens == 512
    assert profile.knee == pytest.approx(360, abs=56) and profile.knee % 8 == 0
    rise = profile.widths[129] / profile.widths[128] - 1
    assert rise == pytest.approx(0.157, abs=0.03)
    assert profile.step_time.decode_context == pytest.approx(2e-8, rel=0.2)
    assert profile.floor == pytest.approx(truth(StepShape().add(0, 1, True)), rel=0.02)
    assert profile.error.p50 < 0.03 and profile.noise.p50 < 0.03
    assert profile.error.p95 > 0.4 and profile.noise.p95 > 0.4  # the runs that were disturbed


def test_percentiles():
    assert Percentiles.of([0.0, 1.0, 2.0]) == Percentiles(1.0, 1.9)
