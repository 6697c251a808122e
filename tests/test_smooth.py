"""Ratios and errors that `benchmarks/smooth.py` reports."""

from math import sqrt
from statistics import stdev
from types import SimpleNamespace

import pytest

from benchmarks.smooth import figures, over, p99, rate


def turns(*gaps_of_turns):
    """One answer a turn, with such gaps in seconds behind a first token at 1 s, which was asked for at 0.9 s."""
    answers = []
    for gaps in gaps_of_turns:
        times = [1.0]
        for gap in gaps:
            times.append(times[-1] + gap)
        answers.append([SimpleNamespace(begin=0.9, times=times)])
    return answers


def test_the_error_of_a_ratio_to_what_does_not_vary_is_that_of_a_mean():
    counts, none = (10, 13, 11, 18), turns(*[[0.1] * 9] * 4)
    ratio, error = over(turns(*([0.1] * (count - 1) for count in counts)), none, rate)
    assert ratio == pytest.approx(sum(counts) / 40, abs=1e-3)
    assert error == pytest.approx(stdev(counts) / 10 / sqrt(4), abs=1e-3)


def test_a_way_over_itself_is_one_for_sure_whatever_its_turns_differ_by():
    some = turns([0.1] * 9, [0.4] * 30, [0.2] * 5)
    assert over(some, some, rate) == over(some, some, p99) == [1.0, 0.0]


def test_figures_are_of_all_turns_together():
    some, none = turns([0.1] * 99 + [0.5], [0.1] * 99 + [0.7]), turns([0.2] * 100, [0.2] * 100)
    found = figures(some, none, 10.0)
    assert found["tokens_s"] == 10.1 and found["tokens_s_over_none"] == [1.0, 0.0]
    assert found["p99_gap_ms"] == 500.0 and found["p50_gap_ms"] == 100.0 and found["first_ms"] == 100.0
    assert found["p99_over_none"][0] == 2.5
