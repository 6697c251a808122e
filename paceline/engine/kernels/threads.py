"""Threads that wait for each other, and what they work in.

One parallel region holds many steps, since to start one costs 10 to 50 us.
"""

import functools
import threading
import weakref

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, prange, types
from numba.extending import intrinsic
from torch import Tensor

from paceline.engine import pages
from paceline.engine.addresses import longs as _longs
from paceline.engine.kernels.common import (
    ALONE,
    DEEP,
    I64,
    LARGEST_BLOCK,
    LINE,
    LONG,
    LONGS_1D,
    MATRIX_ROWS,
    PARTS,
    STARTED,
    TILES_SPACE,
    kernel,
)
from paceline.processor import HAS_AMX

APART = 128  # rows of a thread from which it passes these alone through a layer, see `some_layers`
SPINS = 1024  # looks at a gate before a core is offered to others; a power of 2


@intrinsic
def wait(context, gate, turn, threads):
    """Returns turn + 1 when all threads have come here; `gate` counts arrivals and starts at 0, as `turn` does.

    A waiting thread keeps its core for some microseconds and then offers it to others: on a busy machine the thread it
    waits for may need that core.
    """

    def generate(context, builder, signature, arguments):
        gate, turn, threads = arguments
        module = builder.module

        def function(name, kind):
            return module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, []), name)

        counter = builder.inttoptr(gate, LONG.as_pointer())
        builder.atomic_rmw("add", counter, LONG(1), "seq_cst")
        after = builder.add(turn, LONG(1))
        target = builder.mul(after, threads)
        entry = builder.block
        look, spin, offer, end = (builder.append_basic_block(name) for name in ("look", "spin", "offer", "end"))
        builder.branch(look)
        builder.position_at_end(look)
        spins = builder.phi(LONG)
        here = builder.load_atomic(counter, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", here, target), end, spin)
        builder.position_at_end(spin)
        builder.call(function("llvm.x86.sse2.pause", ir.VoidType()), [])
        more = builder.add(spins, LONG(1))
        full = builder.icmp_signed("==", builder.and_(more, LONG(SPINS - 1)), LONG(0))
        builder.cbranch(full, offer, look)
        builder.position_at_end(offer)
        builder.call(function("sched_yield", ir.IntType(32)), [])
        builder.branch(look)
        spins.add_incoming(LONG(0), entry)
        spins.add_incoming(more, spin)
        spins.add_incoming(more, offer)
        builder.position_at_end(end)
        return after

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def _next(context, counter):
    """Adds one to a counter; returns what it was."""

    def generate(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], LONG.as_pointer())
        return builder.atomic_rmw("add", counter, LONG(1), "monotonic")

    return types.int64(types.int64), generate


TURNS_AHEAD = LINE // 8  # counters of a thread: of what was taken of its share, in this turn and the next ones


@kernel(types.void(I64, I64))
def open_gate(space, threads):
    """To be called before a parallel region whose threads wait for each other and share works at `space`: a line for
    the gate, then one for each thread's counters."""
    carray(_longs(space), (TURNS_AHEAD * (1 + threads),))[:] = 0


@kernel(I64(I64, I64, I64, I64), inline="always")
def own_space_of(space, t, threads, own_space):
    """Where a thread's own work space begins, or with t = threads what they share."""
    return space + LINE * (1 + threads) + t * own_space


@kernel(types.void(*[I64] * 4), inline="always")
def begin_shares(gate, turn, t, threads):
    """Makes a thread's counters ready for the turns to come. Between two works in shares are fewer turns than there are
    counters, so this turn's was made ready by the work before, or with the gate. One that works alone has no turns."""
    counters = carray(_longs(gate + LINE * (1 + t)), (TURNS_AHEAD,))
    for i in range(0 if threads == 1 else 1, TURNS_AHEAD):
        counters[(turn + i) % TURNS_AHEAD] = 0


@kernel(types.UniTuple(I64, 3)(*[I64] * 7))
def next_of(gate, turn, t, threads, count, each, empty):
    """What a thread does next of `count` things, `each` at a time: [begin, end), empty when all are done or in hand,
    and how many shares it has found `empty`, its own first. So none waits long for one that others have slowed down."""
    while empty < threads:
        share = (t + empty) % threads
        begin, end = count * share // threads, count * (share + 1) // threads
        counter = gate + LINE * (1 + share) + turn % TURNS_AHEAD * 8
        if threads > 1:
            begin += each * _next(counter)
        else:  # without waiting until all that was written is there
            begin += each * carray(_longs(counter), (1,))[0]
            carray(_longs(counter), (1,))[0] += 1
        if begin < end:
            return begin, min(begin + each, end), empty
        empty += 1
    return 0, 0, empty


@kernel(types.void(LONGS_1D), parallel=True)
def _who(names):
    for t in prange(names.shape[0]):
        names[t] = numba.get_thread_id()


_local = threading.local()
_gates: dict[int, weakref.ref[Tensor]] = {}  # by thread, its work space


def workspace(nbytes: int) -> int:
    """Address of that many bytes, aligned, that belong to the calling thread until its next call."""
    size = getattr(_local, "size", 0)
    if size < nbytes:
        _local.memory, _local.size = pages.zeros((nbytes + LINE,), torch.uint8), nbytes
        _gates[threading.get_ident()] = weakref.ref(_local.memory)
    address: int = _local.memory.data_ptr()
    return address + -address % LINE


def moved() -> int:
    """For who watches from another thread: a number that changes as products and blocks of attention are done, of
    which one layer can have seconds. It is what gates and shares have counted."""
    held = [memory for known in list(_gates.values()) if (memory := known()) is not None]
    heads = (memory.numpy()[: min(len(memory), 64 * LINE) // 8 * 8] for memory in held)
    return sum(int(head.view(np.int64).sum()) for head in heads) % 2**32


def apart(rows: int, threads: int) -> bool:
    """Whether threads pass so many rows through the layers apart: see `some_layers`."""
    return threads > 1 and rows >= APART * threads


def rows_inside(rows: int, threads: int) -> int:
    """Of what is between the halves of an MLP: those of a block, or of each thread's block."""
    return threads * LARGEST_BLOCK if apart(rows, threads) else min(rows, LARGEST_BLOCK)


def spaces(rows: int, widest: int, threads: int, apart: bool = False) -> tuple[int, int]:
    """Bytes of work space that `linear` needs in all, and of it each thread's own; `apart`: see `some_layers`."""
    one = 4 * widest + LINE
    row = max(one, PARTS * 2 * (widest + DEEP) if HAS_AMX else 0) + 4
    alone = LARGEST_BLOCK if apart else MATRIX_ROWS if HAS_AMX else ALONE
    own = TILES_SPACE + -(-(one + LINE + alone * row) // LINE) * LINE
    return (2 + threads) * LINE + threads * (own + one) + -(-min(rows, LARGEST_BLOCK) // 16) * 16 * row, own


@functools.cache
def _together(threads: int) -> int:
    """`threads` if that many really run at the same time, as those that wait for each other must; else 1."""
    names = np.zeros(threads, np.int64)
    _who(names)
    return threads if len(set(names.tolist())) == threads else 1


def num_threads() -> int:
    """As many as torch uses."""
    return _together(min(torch.get_num_threads(), STARTED))
