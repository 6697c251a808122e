import pytest

from paceline.core.batch import StepShape
from paceline.latency.texts import TextTimes

TIMES = TextTimes({8: {1: (1.0, 2.0), 4: (2.0, 3.0)}, 16: {1: (2.0, 6.0), 4: (4.0, 7.0), 2: (3.0, 3.0)}})


def test_between_lengths_it_is_linear_in_every_stage():
    assert TIMES.at(8) == TIMES.seconds[8] and TIMES.at(16) == TIMES.seconds[16]
    assert TIMES.at(14) == {1: pytest.approx((1.75, 5.0)), 4: pytest.approx((3.5, 6.0))}  # nobody knows of two texts


def test_beyond_what_was_measured_it_is_the_nearest():
    assert TIMES.at(1) == TIMES.seconds[8] and TIMES.at(999) == TIMES.seconds[16]


def test_a_step_of_any_texts_takes_what_so_many_tokens_took():
    step = TIMES.by_tokens(128)
    by_tokens = {8: 3.0, 16: 8.0, 32: 8.0, 64: 11.0, 24: 8.0, 48: 9.5, 4: 3.0, 128: 22.0}  # slower ones cover faster
    assert {tokens: step.linear[tokens] for tokens in by_tokens} == pytest.approx(by_tokens)
    assert step.seconds(StepShape(256, 4)) == pytest.approx(44.0)
