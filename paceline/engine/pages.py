"""Memory in pages of 2 MiB, where the system gives them when asked (Linux).

A step reads all weights, and in pages of 4 KiB the processor looks up an address every 64 lines: one core of an Intel
Xeon (Cascade Lake) took 13.6 ms to pass one row over 138 MB of weights, in large pages 12.4.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LINUX = hasattr(mmap, "MADV_HUGEPAGE")
LARGE = 2 << 20  # bytes of a page
SHARED, APART = 64 << 20, 64  # bytes of a mapping that tensors share; where one begins is a multiple of the second
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h

_local = threading.local()  # room: the rest of a mapping that is shared; None or missing: none is


def zeros(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of zeros; pages take memory when they are first touched."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if not LINUX or not nbytes:
        return torch.zeros(shape, dtype=dtype)
    room: Tensor | None = getattr(_local, "room", None)
    if room is None or nbytes > SHARED:
        return _large(nbytes).view(dtype).view(shape)
    if len(room) < nbytes:
        room = _large(SHARED)
    _local.room = room[-(-nbytes // APART) * APART :]
    return room[:nbytes].view(dtype).view(shape)


@contextmanager
def side_by_side() -> Iterator[None]:
    """What `zeros` makes in this thread meanwhile shares large pages: a matrix of less than one is in none else.

    The system has a mapping back when the last tensor in it is gone, and what `give_back` is told before. Up to LARGE
    bytes of the last page that is touched of each are nobody's.
    """
    before, _local.room = getattr(_local, "room", None), torch.empty(0, dtype=torch.uint8)
    try:
        yield
    finally:
        _local.room = before


def give_back(tensor: Tensor) -> None:
    """To the system, the pages that are all of a tensor of `zeros`, which nobody reads or writes any more."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    begin, end = -(-begin // LARGE) * LARGE, end // LARGE * LARGE
    if LINUX and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _large(nbytes: int) -> Tensor:
    """Bytes from the beginning of a large page on. What is left at their end is in small ones."""
    memory = _mapped(nbytes + LARGE)  # which may begin anywhere
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin, large = -whole.data_ptr() % LARGE, nbytes // LARGE * LARGE
    if large:
        memory.madvise(mmap.MADV_HUGEPAGE, begin, large)
    return whole[begin : begin + nbytes]


def reserved(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> tuple[mmap.mmap, Tensor]:
    """Zeros in small pages, which `madvise(MADV_DONTNEED)` returns to the system one by one, and the memory itself.

    A large page of which a part is returned stays whole until the system is short of memory.
    """
    memory = _mapped(dtype.itemsize * torch.Size(shape).numel())
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, torch.frombuffer(memory, dtype=dtype).view(shape)


def _mapped(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages


def keep_heap() -> None:
    """From now on the C library's heap keeps what steps take and give back, where that library can.

    It returns what is free at the end of the heap beyond 128 KiB or twice the largest mapping that was freed: in a
    rank of two the system mapped and zeroed 13 MB of it anew for every step of 512 tokens of a 55M model.
    """
    if option := getattr(ctypes.CDLL(None), "mallopt", None):
        option(M_TRIM_THRESHOLD, 1 << 30)
        option(M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes


def trim_heap() -> None:
    """Returns what loading left in the C library's heap (110 to 190 MiB measured) where that library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
