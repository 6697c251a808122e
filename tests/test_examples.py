"""Each example runs, and says what it is there to show."""

import re
import runpy
from pathlib import Path

import pytest

from tests.system.server import Server

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture
def said(monkeypatch, capsys):
    """What an example prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_each_is_short_says_what_it_is_and_is_tested():
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        assert text.startswith('"""') and f"python examples/{path.name}" in text and text.count("\n") < 40
        assert f'said("{path.name}"' in Path(__file__).read_text(), f"{path.name} is run by no test"


def test_offline(said):
    text = said("offline.py")
    turns, fewer, same = re.search(r"(\d+) turns, (\d+) with drafts; the same answers: (\w+)", text).groups()
    assert int(fewer) < int(turns) and same == "True" and "--- import os\nimport " in text


def test_client(said):
    with Server("builtin:coder") as server:
        text = said("client.py", server.url)
    assert "models: coder\n" in text and "ended: length" in text and re.search(r"\d+ tokens in, 48 out", text)


def test_placement(said):
    """Model parallelism absorbs bursts (AlpaServe, section 3)."""
    text = said("placement.py")
    shares = {name: [float(one) for one in re.findall(rf"{name} +attainment ([\d.]+)%", text)]
              for name in ("planned", "replicas", "round robin")}  # fmt: skip
    (steady, bursts), *others = shares.values()
    assert steady > 99 and "(2,1) on (0, 1) has a b" in text.split("bursts")[1].splitlines()[1]
    assert all(other[1] + 15 < bursts for other in others)


def test_scheduling(said):
    """Chunked prefills keep decodes going (Sarathi-Serve): whole prompts between tokens take several steps' time."""
    rows = {row.split()[0]: [float(cell) for cell in row.split()[1:]] for row in said("scheduling.py").splitlines()[1:]}
    first, late = ({name: row[column] for name, row in rows.items()} for column in (0, 2))
    for ours in ("sarathi_2023", "sarathi_serve", "paceline"):
        assert 4 * late[ours] < min(late["orca"], late["prefill_first"]) and 4 * first[ours] < first["request_level"]


def test_speculation(said):
    """Tokens of a step follow the formula; what they take is this machine's."""
    text = said("speculation.py")
    formula, measured = map(float, re.search(r"step: ([\d.]+) by the formula, ([\d.]+) measured", text).groups())
    acceptance = float(re.search(r"acceptance ([\d.]+)", text)[1])
    assert 0.3 < acceptance < 0.9 and measured > 1 and abs(formula / measured - 1) < 0.1
    assert "the same answer: True" in text and "speed-up: " in text
