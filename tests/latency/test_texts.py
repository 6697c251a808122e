import pytest

from paceline.latency.texts import TextTimes

TIMES = TextTimes({8: {1: (1.0, 2.0), 4: (2.0, 3.0)}, 16: {1: (2.0, 6.0), 4: (4.0, 7.0), 2: (3.0, 3.0)}})


def test_between_lengths_it_is_linear_in_every_stage():
    assert TIMES.at(8) == TIMES.seconds[8] and TIMES.at(16) == TIMES.seconds[16]
    assert TIMES.at(14) == {1: pytest.approx((1.75, 5.0)), 4: pytest.approx((3.5, 6.0))}  # nobody knows of two texts


def test_beyond_what_was_measured_it_is_the_nearest():
    assert TIMES.at(1) == TIMES.seconds[8] and TIMES.at(999) == TIMES.seconds[16]
