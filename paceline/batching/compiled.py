"""How the code that works on a group's state is compiled, by Numba: parts, and entry points made of them."""

# mypy: ignore-errors
# (what extends Numba has no types)

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.dispatcher import Dispatcher
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from paceline.batching.state import State

F = TypeVar("F", bound=Callable[..., Any])


def _array(kind: Any, dimensions: int) -> Any:
    return types.Array(kind, dimensions, "C")


VOID, BOOL, I64, F64, _I32 = types.void, types.boolean, types.int64, types.float64, types.int32
INTS, FLOATS, INTS_2D, FLOATS_2D = _array(I64, 1), _array(F64, 1), _array(I64, 2), _array(F64, 2)
BYTES = _array(types.uint8, 1)
_KINDS = {
    "factors": FLOATS, "numbers": INTS_2D, "times": FLOATS_2D, "steps": _array(I64, 3), "emits": _array(types.uint8, 2),
    "tables": _array(_I32, 2), "hashes": INTS_2D, "blocks": _array(_I32, 2), "buckets": _array(_I32, 1),
    "linear": FLOATS, "terms": FLOATS,
}  # fmt: skip
_FIELDS = {name: _KINDS.get(name, INTS) for name in State._fields}
_WHERE = {name: index for index, name in enumerate(_FIELDS)}


class _StateType(types.Type):
    """A pointer to the arrays, which belong to somebody else.

    As arguments all of them would be copied in every call, and where compiled code knows that an array can have owners
    it counts them, which took a third of the time.
    """


STATE = _StateType("paceline.State")


@register_model(_StateType)
class _Pointer(models.OpaqueModel):
    pass


@infer_getattr
class _Attributes(AttributeTemplate):
    key = _StateType

    def generic_resolve(self, kind: Any, name: str) -> Any:
        return _FIELDS.get(name)


@lower_getattr_generic(_StateType)
def _load(context: Any, builder: Any, kind: Any, pointer: Any, name: str) -> Any:
    return builder.load(_place(context, builder, pointer, name))


def _place(context: Any, builder: Any, pointer: Any, name: str) -> Any:
    """Where a field is in what the pointer points to."""
    layout = ir.LiteralStructType([context.get_value_type(kind) for kind in _FIELDS.values()])
    first, at = (ir.Constant(ir.IntType(32), number) for number in (0, _WHERE[name]))
    return builder.gep(builder.bitcast(pointer, layout.as_pointer()), [first, at])


@intrinsic
def _store(typing: Any, address: Any, state: Any) -> Any:
    """Puts the arrays where compiled code finds them, without a claim to their memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        for index, (name, kind) in enumerate(_FIELDS.items()):
            array = context.make_array(kind)(context, builder, builder.extract_value(arguments[1], index))
            array.meminfo, array.parent = (x.type(None) for x in (array.meminfo, array.parent))
            builder.store(array._getvalue(), _place(context, builder, pointer, name))

    return types.void(address, state), generate


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(STATE))

    return STATE(address), generate


def tuple_of(*kinds: Any) -> Any:
    return types.Tuple(kinds)


class Handle:
    """A state as compiled code takes it; it holds the state, so that its arrays live as long. To be made anew when that
    has grown."""

    _numba_type_ = STATE

    def __init__(self, state: State) -> None:
        self.state = state
        self._memory = np.zeros(sum(5 + 2 * kind.ndim for kind in _FIELDS.values()), np.int64)
        self.address = self._memory.ctypes.data
        _fill(self.address, state)


@unbox(_StateType)
def _unbox(kind: Any, handle: Any, c: Any) -> Any:
    address = c.pyapi.object_getattr_string(handle, "address")
    pointer = c.pyapi.long_as_voidptr(address)
    c.pyapi.decref(address)
    return NativeValue(pointer)


def _stamp(*files: Path) -> tuple[tuple[float, int], ...]:
    return tuple((stat.st_mtime, stat.st_size) for stat in (file.stat() for file in files))


_ROOT = Path(__file__).parents[1]
# everything that entry points are made of, as it was when the first of it was imported
STAMP = _stamp(
    *sorted((_ROOT / "batching").glob("*.py")), _ROOT / "core" / "request.py", _ROOT / "latency" / "step_time.py"
)


def _made_of(function: Callable[..., Any]) -> list[Path]:
    """The files of a function and of the compiled ones that those know of."""
    found, functions = set[Path](), [function]
    while functions:
        known = functions.pop()
        if (path := Path(known.__code__.co_filename)) not in found:
            found.add(path)
            functions += [one.py_func for one in known.__globals__.values() if isinstance(one, Dispatcher)]
    return sorted(found)


@cache
def _tell() -> None:
    """Once, to whoever looks."""
    if sys.stderr and sys.stderr.isatty():
        print("compiling the scheduler, once on this machine: half a minute", file=sys.stderr, flush=True)


def part(function: F) -> F:
    """Compiled as a part of the entry points that call it."""
    return njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")


def plain(function: F) -> F:
    """A part by itself, interpreted: for what happens rarely and calls no other part."""
    return function.py_func


def entry(*signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """(result, arguments...). Compiled when imported, or from Numba's cache: never while serving.

    Numba looks at an entry point's own file only to see whether what it cached is out of date; here at all of them.
    """
    result, *arguments = signature

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = njit(cache=True, no_cfunc_wrapper=True, error_model="numpy")(function)
        compiled._cache._cache_file._source_stamp = STAMP + _stamp(*_made_of(function))
        if not Path(compiled._cache._cache_file._index_path).exists():
            _tell()
        compiled.compile(result(*arguments))
        compiled.disable_compile()
        return compiled

    return decorate


@entry(VOID, I64, types.NamedTuple(tuple(_FIELDS.values()), State))
def _fill(address: int, state: State) -> None:
    _store(address, state)


@part
def state_at(address: int) -> State:
    """That of a `Handle`, by its address."""
    return _pointer(address)
