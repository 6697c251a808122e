"""How code is compiled, by Numba: parts, entry points made of them, and pointers to the arrays that they work on."""

# mypy: ignore-errors
# (what extends Numba has no types)

import atexit
import gc
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from llvmlite.binding import Linkage, add_symbol
from numba import config, njit, types
from numba.core.cgutils import get_or_insert_function, if_unlikely
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.imputils import lower_getattr_generic
from numba.core.typed_passes import NativeLowering
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, models, register_model, unbox
from numba.misc.appdirs import user_cache_dir

import paceline.processor  # noqa: F401  # asks for matrix registers before anything is compiled

F = TypeVar("F", bound=Callable[..., Any])
# where Numba keeps what is compiled
BESIDE, USERS = Path(__file__).parent / "__pycache__", Path(user_cache_dir("numba", appauthor=False))


def place_for(folders: Sequence[Path]) -> str:
    """Empty if something can be kept in one of the folders; else another one, for as long as this process runs."""
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return ""
    made = tempfile.mkdtemp(prefix="paceline-compiled-")
    maker = os.getpid()
    atexit.register(lambda: maker == os.getpid() and shutil.rmtree(made, ignore_errors=True))
    where = " nor ".join(map(str, folders))
    text = f"neither {where} can be written to, so code is compiled at every start; NUMBA_CACHE_DIR can name a folder"
    print(f"paceline: {text}", file=sys.stderr)
    return made


if not config.CACHE_DIR:  # Numba refuses to import what it cannot keep
    config.CACHE_DIR = place_for([BESIDE, USERS])
    if config.CACHE_DIR:
        os.environ["NUMBA_CACHE_DIR"] = config.CACHE_DIR  # of the processes that are started from here


def array_of(kind: Any, dimensions: int) -> Any:
    return types.Array(kind, dimensions, "C")


VOID, BOOL, I64, I32, F64, F32 = types.void, types.boolean, types.int64, types.int32, types.float64, types.float32
U8 = types.uint8
INTS, FLOATS, INTS_2D, FLOATS_2D = array_of(I64, 1), array_of(F64, 1), array_of(I64, 2), array_of(F64, 2)
BYTES, BOOLS = array_of(U8, 1), array_of(BOOL, 1)


class Pointer(types.Type):
    """To a named tuple of arrays and other pointers, which belong to somebody else.

    As arguments all of them would be copied in every call.
    """

    def __init__(self, kind: type, **others: Any) -> None:
        """`others`: the fields that are not arrays of integers, in one dimension."""
        super().__init__(f"paceline.{kind.__name__}")
        self.fields = {name: others.get(name, INTS) for name in kind._fields}
        _PUT[self] = entry(VOID, I64, types.Tuple(list(self.fields.values())))(_put)

    @property
    def key(self) -> Any:
        """What makes it the same type: what was compiled for other fields is not to be found in the cache."""
        return self.name, tuple(self.fields.items())


_PUT: dict[Pointer, Callable[[int, Any], None]] = {}  # a kind's fields to an address


@register_model(Pointer)
class _Model(models.OpaqueModel):
    pass


@infer_getattr
class _Attributes(AttributeTemplate):
    key = Pointer

    def generic_resolve(self, kind: Any, name: str) -> Any:
        return kind.fields.get(name)


@lower_getattr_generic(Pointer)
def _load(context: Any, builder: Any, kind: Any, pointer: Any, name: str) -> Any:
    return builder.load(_place(context, builder, kind.fields.values(), pointer, list(kind.fields).index(name)))


def _place(context: Any, builder: Any, kinds: Any, pointer: Any, index: int) -> Any:
    """Where a field is in what the pointer points to."""
    layout = ir.LiteralStructType([context.get_value_type(kind) for kind in kinds])
    first, at = (ir.Constant(ir.IntType(32), number) for number in (0, index))
    return builder.gep(builder.bitcast(pointer, layout.as_pointer()), [first, at])


@intrinsic
def _store(typing: Any, address: Any, fields: Any) -> Any:
    """Puts them where compiled code finds them, without a claim to the memory of arrays."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        for index, kind in enumerate(fields.types):
            value = builder.extract_value(arguments[1], index)
            if not isinstance(kind, Pointer):
                array = context.make_array(kind)(context, builder, value)
                array.meminfo, array.parent = (x.type(None) for x in (array.meminfo, array.parent))
                value = array._getvalue()
            builder.store(value, _place(context, builder, fields.types, pointer, index))

    return types.void(address, fields), generate


def tuple_of(*kinds: Any) -> Any:
    return types.Tuple(kinds)


class Handle:
    """A named tuple as compiled code takes it. It holds the arrays, so that they live as long; to be made anew when one
    of them is another."""

    def __init__(self, kind: Pointer, fields: Any) -> None:
        self._numba_type_ = kind
        self.fields = fields
        sizes = (1 if isinstance(one, Pointer) else 5 + 2 * one.ndim for one in kind.fields.values())
        self._memory = np.zeros(sum(sizes), np.int64)
        self.address = self._memory.ctypes.data
        _PUT[kind](self.address, tuple(fields))


@unbox(Pointer)
def _unbox(kind: Any, handle: Any, c: Any) -> Any:
    address = c.pyapi.object_getattr_string(handle, "address")
    pointer = c.pyapi.long_as_voidptr(address)
    c.pyapi.decref(address)
    return NativeValue(pointer)


def _stamp(*files: Path) -> tuple[tuple[float, int], ...]:
    return tuple((stat.st_mtime, stat.st_size) for stat in (file.stat() for file in files))


_ROOT = Path(__file__).parent
CORE = _ROOT / "core/batch.py", _ROOT / "core/request.py"  # whose constants are compiled into what imports them
# what entry points of the scheduler are made of, constants too, as it was when the first of it was imported
STAMP = _stamp(
    Path(__file__), *sorted((_ROOT / "batching").glob("*.py")), *CORE, _ROOT / "latency/step_time.py"
)  # fmt: skip


def _made_of(function: Callable[..., Any]) -> list[Path]:
    """The files of a function, of the compiled ones that those know of, and of the classes that they name."""
    found, functions = set[Path](), [function]
    while functions:
        known = functions.pop()
        if (path := Path(known.__code__.co_filename)) not in found:
            found.add(path)
            for one in known.__globals__.values():
                if hasattr(one, "py_func"):
                    functions.append(one.py_func)
                elif isinstance(one, type) and one.__module__.startswith("paceline."):
                    found.add(Path(sys.modules[one.__module__].__file__))
    return sorted(found)


@cache
def _tell() -> None:
    """Once, to whoever looks."""
    if sys.stderr and sys.stderr.isatty():
        print("compiling, once on this machine: up to a minute", file=sys.stderr, flush=True)


class _Kept(JITCodeLibrary):
    """A part's code as it is before optimisation. Numba would optimise it with all that it calls, and make machine
    code of it; for what is only compiled again in what calls it, that took a quarter of the time."""

    def finalize(self) -> None:
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            for library in self._linking_libraries:
                self._reload_init.update(library._reload_init)
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)
            for function in self._final_module.functions:
                if not function.is_declaration and function.linkage is Linkage.external:
                    function.linkage = Linkage.linkonce_odr
            self._shared_module = self._final_module
        return self._shared_module


@register_pass(mutates_CFG=True, analysis_only=False)
class _Offered(LoweringPass):
    """Has callers find what was lowered: Numba looks by a builtin function of its own. This one fails when called."""

    _name = "paceline_offered"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        library = state["library"]
        state.cr = state.cr._replace(cfunc={}.popitem)
        state.targetctx.insert_user_function(state.cr.cfunc, state.cr.fndesc, [library])
        state.reload_init.extend(library._reload_init)
        return True


class _Part(CompilerBase):
    """Lowers, and leaves the rest to the entry points."""

    def define_pipelines(self) -> list[Any]:
        state = self.state
        state.flags.no_compile = True
        state["library"] = _Kept(state.targetctx.codegen(), state.func_id.func_qualname)
        passes = DefaultPassBuilder.define_nopython_pipeline(state)
        passes.add_pass_after(_Offered, NativeLowering)
        passes.finalize()
        return [passes]


def part(function: F) -> F:
    """Compiled as a part of the entry points that call it. It makes no arrays, and calls nothing that returns new ones,
    so nobody counts who holds which: that took a third to a half of a simulation's time."""
    return _compiled(function, False, no_cpython_wrapper=True, pipeline_class=_Part)


def making(function: F) -> F:
    """A part that makes arrays, or calls what returns new ones."""
    return _compiled(function, True, no_cpython_wrapper=True, pipeline_class=_Part)


def _compiled(function: F, counting: bool, **options: Any) -> F:
    return njit(function, no_cfunc_wrapper=True, error_model="numpy", _nrt=counting, **options)


def plain(function: F) -> F:
    """A part by itself, interpreted: for what happens rarely and calls no other part."""
    return function.py_func


def entry(*signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an entry point of a part. (result, arguments...). Compiled when imported, or from Numba's cache: never
    while serving.

    Numba looks at an entry point's own file only to see whether what it cached is out of date; here at all of them.
    """
    result, *arguments = signature

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = _compiled(function.py_func, function.targetoptions["_nrt"], cache=True)
        file = compiled._cache._cache_file
        file._source_stamp = STAMP + _stamp(*_made_of(function.py_func))
        try:
            file._load_index()
        except Exception:  # of an older version: Numba looks for its types before it looks at the stamp
            Path(file._index_path).unlink(missing_ok=True)
        if not Path(file._index_path).exists():
            _tell()
        return _only(compiled, result(*arguments))

    return decorate


def watched(signature: Any, *others: Path) -> Callable[[F], F]:
    """Has a function that Numba keeps compiled when it is imported (without a signature: when it is first called), and
    anew after changes in any of what it is made of. Parts that are in its own file are not to be kept, unless they are
    watched as well.

    `others`: files of constants, and of what is no function of Numba's, but writes code that it compiles.
    """

    def decorate(function: F) -> F:
        files = sorted({*_made_of(function.py_func), *others})
        function._cache._cache_file._source_stamp = _stamp(*files)
        return _only(function, signature) if signature else function

    return decorate


def _only(function: F, signature: Any) -> F:
    """Compiled for this signature, and no other. What is there before that is no garbage: it would be looked through
    again and again, as Numba makes objects by the million. They are garbage soon, and have to go even where somebody
    wants no garbage to be looked for, or keeps what is made."""
    collects, kept = gc.isenabled(), gc.get_freeze_count()
    gc.freeze()
    gc.enable()
    try:
        function.compile(signature)
        if function.stats.cache_misses:
            gc.collect()
    finally:
        if not kept:
            gc.unfreeze()
        if not collects:
            gc.disable()
    function.disable_compile()
    return function


def linked(function: F) -> F:
    """Has what Numba compiled of a function called by its name, in what is compiled after it: Numba itself compiles a
    copy of a function and of all that it calls into every caller, and into a parallel one four."""
    [made] = function.overloads.values()
    library, described = attrgetter("library", "fndesc")(made)
    name = f"{function.__module__}.{function.__qualname__}"
    add_symbol(name, library.get_pointer_to_function(described.llvm_func_name))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        result, kinds, by = signature.return_type, signature.args, context.call_conv
        callee = get_or_insert_function(builder.module, by.get_function_type(result, kinds), name)
        status, value = by.call_function(builder, callee, result, kinds, arguments)
        with if_unlikely(builder, status.is_error):
            by.return_status_propagate(builder, status)
        return value

    def define(context: Any, *arguments: Any) -> Any:
        return made.signature, generate

    first, taken = inspect.signature(define).parameters["context"], inspect.signature(function.py_func)
    define.__name__, define.__doc__ = name, function.__doc__
    define.__signature__ = taken.replace(parameters=[first, *taken.parameters.values()])
    call = intrinsic(define)
    call.py_func = function.py_func
    return call


@part
def _put(address: int, fields: Any) -> None:
    _store(address, fields)
