"""Outcomes: goals are judged one by one, figures are those of the columns."""

import csv

import numpy as np
import pytest

from paceline.core.request import NO_SLO, SLO
from paceline.metrics.outcomes import COLUMNS, Outcomes, report

NAN = np.nan


def made() -> Outcomes:
    """A one-shot model, and one whose requests yield 5 tokens, 1 and none."""
    return Outcomes(
        ("one", "many"), np.array([0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, -1]), np.array([0.0, 1, 2, 3, 4]),
        np.array([0.5, 2.0, 2.5, 3.1, NAN]), np.array([0.5, 2.0, 4.5, 3.1, 4.0]), np.array([9, 9, 10, 10, 10]),
        np.array([0, 0, 5, 1, 0]), np.array([0, 0, 0, 0, 1], np.uint8), {1: np.array([0.4, 0.4, 0.2, 1.0])},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "many", "met"),
    [
        (NO_SLO, NO_SLO, [1, 1, 1, 1, 0]),
        (SLO(deadline=0.7), SLO(ttft=0.2), [1, 0, 0, 1, 0]),
        (NO_SLO, SLO(tbt=0.5), [1, 1, 1, 1, 0]),
        (NO_SLO, SLO(tbt=0.49), [1, 1, 0, 1, 0]),
        (NO_SLO, SLO(deadline=2.4), [1, 1, 0, 1, 0]),
    ],
)
def test_a_request_must_meet_all_its_goals(one, many, met):
    assert made().met([one, many]).astype(int).tolist() == met


def test_the_file_has_the_agreed_columns(tmp_path):
    made().save(tmp_path / "r.csv", [SLO(deadline=0.7), NO_SLO])
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and [row["slo_met"] for row in rows] == ["true", "false", "true", "true", "false"]
    assert rows[4]["status"] == "rejected" and rows[4]["group"] == rows[4]["first_token"] == ""
    assert float(rows[2]["finish"]) == 4.5 and rows[2]["output_tokens"] == "5" and rows[2]["model"] == "many"


def test_the_report_is_that_of_the_columns():
    whole = report(made(), [SLO(deadline=0.7), NO_SLO])
    assert whole["requests"] == 5 and whole["attainment"] == 0.6 and whole["goodput"] == pytest.approx(3 / 4.5)
    one, many = whole["models"]["one"], whole["models"]["many"]
    assert one["attainment"] == 0.5 and one["latency"]["p50"] == 0.75 and "ttft" not in one
    assert many["status"] == {"ok": 2, "rejected": 1, "cancelled": 0, "failed": 0}
    assert many["ttft"]["p50"] == pytest.approx(0.3) and many["tbt"]["p99"] == pytest.approx(0.982)
    assert many["tokens_per_s"] == pytest.approx(6 / 2.5)


def test_nobody_asked():
    empty = Outcomes(("a",), *(np.empty(0, np.int64),) * 2, *(np.empty(0),) * 3, *(np.empty(0, np.int64),) * 2,
                     np.empty(0, np.uint8))  # fmt: skip
    part = report(empty, [NO_SLO])
    assert part["attainment"] == 1.0 and part["goodput"] == 0.0 and part["latency"]["p99"] is None
