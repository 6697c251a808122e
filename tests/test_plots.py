"""Pictures of results are drawn from what is kept of them."""

import json
from shutil import copy

import pytest

from benchmarks.plots import PICTURES, RESULTS, draw, panels

KEPT = [path for path in sorted(RESULTS.glob("*.json")) if json.loads(path.read_text()).get("benchmark") in PICTURES]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_every_result_has_a_picture_with_all_that_it_shows(path):
    assert path.with_suffix(".png").stat().st_size < 80_000
    rows = panels(json.loads(path.read_text()))
    assert rows and all(rows)
    for panel in (panel for row in rows for panel in row):
        assert panel.bars and panel.measure and all(panel.bars.values())
        assert {place for place, _ in panel.goals} <= {"", *panel.bars}


def test_every_benchmark_with_a_picture_has_a_result():
    assert {json.loads(path.read_text())["benchmark"] for path in KEPT} == set(PICTURES)


def test_a_picture_is_drawn_from_the_result_alone(tmp_path):
    copy(RESULTS / "scheduler.json", tmp_path / "s.json")
    draw(tmp_path / "s.json")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "m.json").write_text('{"benchmark": "memory"}')
    draw(tmp_path / "m.json")
    assert not (tmp_path / "m.png").exists(), "it has none"
