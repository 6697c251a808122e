"""What was compiled is found again where it is still true, and only there."""

import gc
import importlib.util
import pickle
import sys
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from paceline.compiled import CORE, FLOATS, STAMP, Handle, Pointer, _made_of, place_for
from paceline.simulator import steps, world
from paceline.speculation import choice, costs, lookahead

SOURCE = """
from paceline.compiled import I64, entry, part

@part
def doubled(x):
    return {factor} * x

double = entry(I64, I64)(doubled)
"""
FACTOR = """
from numba import int64, njit
from paceline.compiled import linked

{how}
def multiplied(x):
    assert x >= 0
    return {factor} * x
"""
KEPT = """
from numba import int64, njit
from kept_factor import multiplied
from paceline.compiled import watched

@watched(int64(int64))
@njit(cache=True)
def times(x):
    return multiplied(x)
"""
WRITTEN = """
from numba import int64
from numba.extending import intrinsic

@intrinsic
def multiplied(context, x):
    def generate(context, builder, signature, arguments):
        return builder.mul(arguments[0], arguments[0].type({factor}))

    return int64(int64), generate
"""
CALLED = """
from pathlib import Path

import kept_factor
from numba import int64, njit
from paceline.compiled import watched

multiplied = kept_factor.multiplied

@watched({signature}, Path(kept_factor.__file__))
@njit(cache=True)
def times(x):
    return multiplied(x)
"""


def test_where_nothing_can_be_kept_it_is_kept_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    full, free = tmp_path / "file" / "folder", tmp_path / "free"
    assert place_for([full, free]) == "" and capsys.readouterr().err == ""
    made = Path(place_for([full, full]))
    assert made.is_dir() and made.stat().st_mode & 0o77 == 0 and "NUMBA_CACHE_DIR" in capsys.readouterr().err
    made.rmdir()


def test_an_index_that_nobody_can_read_is_thrown_away(tmp_path):
    """Numba looks for the classes that an older version kept before it sees that it is out of date."""
    assert imported(tmp_path, 2).double(4) == 8
    (index,) = tmp_path.glob("__pycache__/*.nbi")
    index.write_bytes(pickle.dumps(numba.__version__) + b"cpaceline.gone\nGone\n.")
    assert imported(tmp_path, 2).double(4) == 8
    assert b"Gone" not in index.read_bytes()


def test_a_part_is_not_for_python(tmp_path):
    with pytest.raises(KeyError):
        imported(tmp_path, 2).doubled(4)


def test_what_was_compiled_of_an_older_file_is_compiled_anew(tmp_path):
    imported(tmp_path, 2)
    assert imported(tmp_path, 30).double(4) == 120


@pytest.mark.parametrize("how", ["@njit", "@linked\n@njit(int64(int64), cache=True)"], ids=["copied", "linked"])
def test_what_numba_keeps_is_compiled_anew_after_changes_in_another_file(how, tmp_path):
    def kept(factor: int):
        module(tmp_path, "kept_factor", FACTOR.format(how=how, factor=factor))
        return module(tmp_path, "kept", KEPT).times

    assert kept(2)(4) == 8
    again = kept(2)
    assert again(4) == 8 and again.stats.cache_hits
    with pytest.raises(AssertionError):
        again(-1)
    assert kept(30)(4) == 120


@pytest.mark.parametrize("signature", ["int64(int64)", None])
def test_so_it_is_after_changes_in_a_file_that_writes_code(signature, tmp_path):
    def kept(factor: int):
        module(tmp_path, "kept_factor", WRITTEN.format(factor=factor))
        return module(tmp_path, "kept", CALLED.format(signature=signature)).times

    assert kept(2)(4) == 8
    again = kept(2)
    assert again(4) == 8 and again.stats.cache_hits
    assert kept(30)(4) == 120


def test_the_kernels_are_compiled_anew_after_changes_in_any_file_of_theirs():
    common = pytest.importorskip("paceline.engine.kernels.common")
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{common.__package__}.")]
    found = {one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    own = [one for one in found if one.__module__.startswith(f"{common.__package__}.")]
    stamps = [one._cache._cache_file._source_stamp for one in own]
    assert len(stamps) > 20
    for file in common.FILES:
        assert all((file.stat().st_mtime, file.stat().st_size) in stamp for stamp in stamps), file


def test_what_speculation_keeps_is_compiled_anew_after_changes_in_constants_of_the_core():
    kept = choice.choose_at_pace, costs.expected, lookahead.rests, lookahead.wake, lookahead.observe_seconds
    for file in CORE:
        stamp = (file.stat().st_mtime, file.stat().st_size)
        assert stamp in STAMP
        assert all(stamp in one._cache._cache_file._source_stamp for one in (*kept, lookahead.observe)), file


def test_compiling_leaves_no_garbage_where_nobody_looks_for_it(tmp_path):
    gc.collect()
    gc.disable()
    try:
        kept = gc.get_freeze_count()
        imported(tmp_path, 2)
        assert not gc.isenabled() and (gc.get_freeze_count() > 0) == (kept > 0)
        assert gc.collect() < 100
    finally:
        gc.enable()


def test_a_kind_with_other_fields_is_another():
    """Else code for one would be found in the cache for the other."""

    class Some(NamedTuple):
        a: np.ndarray
        b: np.ndarray

    one, same, other = Pointer(Some), Pointer(Some), Pointer(Some, b=FLOATS)
    assert one == same and one != other
    assert Handle(other, Some(np.zeros(1, np.int64), np.zeros(1))).fields.a == 0


def test_entry_points_know_the_files_of_the_arrays_that_they_work_on():
    names = {path.name for path in _made_of(steps._simulate.py_func)}
    assert names >= {"steps.py", "drafts.py", "lookahead.py", "dispatch.py", "moves.py", "state.py"}
    assert Path(world.__file__) in _made_of(steps._simulate.py_func)


def test_what_entry_points_call_says_whether_it_makes_arrays():
    """Or is compiled already, or put into its caller: else it is taken to be like whatever calls it first."""
    left, seen = [steps._simulate], set()
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            assert {"_nrt", "inline"} & one.targetoptions.keys() or not one._can_compile, one
            named = (one.py_func.__globals__.get(name) for name in one.py_func.__code__.co_names)
            left += [other for other in named if isinstance(other, Dispatcher)]
    assert choice.choose in seen


def imported(folder: Path, factor: int):
    return module(folder, "double", SOURCE.format(factor=factor))


def module(folder: Path, name: str, source: str):
    """Imported anew; a file that would stay as it is is not written."""
    path = folder / f"{name}.py"
    if not path.exists() or path.read_text() != source:
        path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
