"""The import rules of the design: layers point one way, policies know no clock, nothing is ever unpickled."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "paceline"
LAYERS = [
    {"core", "processor", "python"},
    {"latency", "compiled"},
    {"placement", "batching", "speculation", "workload", "metrics"},
    {"controller"},
    {"simulator", "runtime", "engine"},
    {"server"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
POLICY_LEVEL = LEVEL["controller"]
NOT_IN_POLICIES = {"time", "asyncio", "threading", "logging", "torch", "random", "secrets", "socket", "datetime"}
TENSOR_HALF = {"speculation/rejection.py"}  # the one exception, for torch
POLICY_LIBRARIES = {"numpy", "numba"}
NEVER = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
MODULES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def calls(path: Path) -> set[str]:
    """Dotted names that a module calls."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}


def package(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = package(path)
    if here in {"__init__", "builtin", "__main__"}:
        return
    assert here in LEVEL, f"{here} has no place in the layout"
    for name in imports(path):
        if not name.startswith("paceline."):
            continue
        there = name.split(".")[1]
        if there == "__version__":
            continue
        assert there == here or LEVEL[there] < LEVEL[here], f"{here} may not import {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_policies_know_no_clock_and_no_tensors(path):
    if LEVEL.get(package(path), 99) > POLICY_LEVEL:
        return
    allowed = {"torch"} if str(path.relative_to(ROOT)) in TENSOR_HALF else set()
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & (NOT_IN_POLICIES - allowed)
    if package(path) == "core":
        assert not roots & POLICY_LIBRARIES, "core is standard library only"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpickled(path):
    assert not {name.split(".")[0] for name in imports(path)} & NEVER
    assert not calls(path) & {"torch.load", "np.load", "numpy.load", "eval", "exec", "__import__"}


def test_the_rules_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import time\nfrom pickle import loads\nfrom paceline.server import app\n")
    bad.write_text(bad.read_text() + "import torch\ntorch.load('x')\n")
    assert imports(bad) == {"time", "pickle.loads", "paceline.server.app", "torch"}
    assert calls(bad) == {"torch.load"}
