"""The project's own habits: one version, one set of pins, and documents that say what is there."""

import ast
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


def test_the_paper_map_names_what_is_there():
    names = re.findall(r"`([^`]*\.py)(?::([\w.]+))?`", (ROOT / "docs/paper-map.md").read_text())
    assert {path.split("/")[0] for path, _ in names} == {"paceline", "tests", "benchmarks", "examples"}
    for path, name in names:
        assert (ROOT / path).exists(), path
        assert not name or name in defined(ast.parse((ROOT / path).read_text()).body), f"{path}: {name}"


def defined(body: list[ast.stmt]) -> set[str]:
    """Functions, classes, their methods (`Class.method`) and constants."""
    names = set()
    for one in body:
        if isinstance(one, ast.ClassDef):
            names |= {one.name} | {f"{one.name}.{name}" for name in defined(one.body)}
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(one.name)
        elif isinstance(one, ast.Assign):
            names |= {target.id for target in one.targets if isinstance(target, ast.Name)}
    return names
