"""The project's own habits: one version, one set of pins, and documents that say what is there."""

import re
import tomllib
from pathlib import Path

import paceline

ROOT = Path(__file__).parents[1]


def test_the_changelog_knows_the_version():
    assert f"## {paceline.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["cluster"]]
    names = {re.match(r"[A-Za-z0-9_.-]+", item).group().lower().replace("_", "-") for item in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert names <= pins, names - pins
    assert "torch==2.13.0" in lines


def test_the_readme_links_to_what_exists():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
