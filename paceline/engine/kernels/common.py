"""Numbers that kernels agree on, and how kernels are compiled."""

import inspect
from pathlib import Path

import numba
import torch  # noqa: F401  # before Numba's threads start, so that both use torch's OpenMP library
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.ufunc import parallel

from paceline import compiled, processor
from paceline.compiled import watched
from paceline.engine import addresses
from paceline.engine.host import cores
from paceline.processor import HAS_AMX, HAS_AVX512, HAS_VNNI, PROCESSOR, X86_64

if not X86_64:
    raise ImportError("these kernels are written for x86-64")  # torch's operators take their place
binding.initialize_native_asmparser()
numba.config.THREADING_LAYER = "omp"
parallel.NUM_THREADS = min(cores(), parallel.NUM_THREADS)  # Numba knows nothing of quotas
STARTED = numba.get_num_threads()  # starts them: a ValueError here and now where that layer cannot be had

# what kernels are made of: Numba would look at a kernel's own file only to see whether what it kept is out of date
FILES = *sorted(Path(__file__).parent.glob("*.py")), *(Path(one.__file__) for one in (addresses, compiled, processor))
VECTOR_BYTES = 64 if HAS_AVX512 else 32
ROWS, COLUMNS = 12 if HAS_AVX512 else 6, 32  # of a tile, at most
ALL_COLUMNS = 12 if HAS_AVX512 else 2  # rows up to which a tile has 32 columns; else it is one of 16 and one more
BYTE = 1 if HAS_VNNI else 2  # bytes of an activation in products of int8: VNNI takes bytes, else they have 16 bits
TOGETHER = 4 // BYTE  # int8 weights of a column that lie side by side
# of one of several: Zen 5 makes 223 GFLOP/s of tiles of 8 to 11 rows and 207 of 12; on Intel's front ends 12 are best
TALL = 11 if HAS_AVX512 and PROCESSOR.startswith("znver") else ROWS
MATRIX_ROWS, MATRIX_STEPS = 32, 16  # of a tile in matrix registers: at most, and at a time
# In matrix registers, see `matrix_tiles`: numbers of a row in a step, of bfloat16 and of bytes; bytes of a register;
# parts of a float32; bytes of a step of a panel: of those parts, of float32, and of the others
DEEP, DEEP_BYTES, TILE, PARTS = 32, 64, 1024, 3
PARTS_STEP, FLOAT_STEP, PANEL_STEP = 2 * PARTS * TILE, 4 * TILE, 2 * TILE
DEPTH_STEPS, SUMS_PANELS = 32, 16  # steps of a panel that all rows pass, at most, and panels with sums meanwhile
# bytes from weights in use to those fetched; lines a step if others made parts, and if there are none
FAR_AHEAD, SPLIT_FETCHES, WHOLE_FETCHES = 12288, 16, 32
ROW_FETCHES = 2  # and while a row of sums becomes outputs
LINE = 64  # bytes of the caches; rows of buffers lie one line more apart, since the first cache keeps few of rows that
# lie powers of 2 apart
ALONE = 16  # rows from which norms, rotations and the like are shared out to threads
# rows that pass a panel of weights together: with two panels they fit into the second cache; and at most, since matrix
# registers are done with weights before the next ones have come from memory
BLOCK = 192 // TALL * TALL
LARGEST_BLOCK = BLOCK * 3 // 2 if HAS_AMX else BLOCK
# bytes of a thread's own: sums of panels, and parts of weights, with a line before them
SUMS_SPACE = LARGEST_BLOCK * COLUMNS * 4 * (SUMS_PANELS if HAS_AMX else 1)
TILES_SPACE = SUMS_SPACE + (LINE + (DEPTH_STEPS + 1) * PARTS_STEP if HAS_AMX else 0)
STORE, ADD, GATE = 0, 1, 2  # what becomes of a product: see `products._finish`
# in place of the address of scales: weights are bfloat16; so are activations, which takes HAS_BF16
KEPT_BF16, ROUNDED_BF16 = 1, 2

# Not ignoring infinities and NaNs, which must come through; and no sums in another order ("reassoc") and no dividing by
# estimates ("arcp"), which LLVM does in one form of a loop and not in another: a row's bits would depend on the others
FAST = {"contract", "nsz"}
I64, F32, LONG = types.int64, types.float32, ir.IntType(64)
LONGS_1D, LONGS_2D = types.int64[::1], types.int64[:, ::1]


def kernel(signature=None, fastmath=FAST, **options):
    """Has a function compiled for that signature when it is imported, without one when it is first called."""

    def decorate(function):
        return watched(signature, *FILES)(njit(function, nogil=True, cache=True, fastmath=fastmath, **options))

    return decorate


def by_hand(*kinds):
    """An intrinsic of Numba with such arguments from a function that builds it: build(builder, *arguments)."""

    def make(build):
        def generate(context, builder, signature, arguments):
            build(builder, *arguments)
            return context.get_dummy_value()

        def define(context, *arguments):
            return types.void(*kinds), generate

        define.__name__, define.__doc__, define.__signature__ = build.__name__, build.__doc__, inspect.signature(build)
        return intrinsic(define)

    return make
