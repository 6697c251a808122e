"""Memory in pages of 2 MiB, where the system gives them when asked (Linux).

A step reads all weights, and in pages of 4 KiB the processor looks up an address every 64 lines: one core of an Intel
Xeon (Cascade Lake) took 13.6 ms to pass one row over 138 MB of weights, in large pages 12.4.
"""

import ctypes
import mmap

import torch
from torch import Tensor

LINUX = hasattr(mmap, "MADV_HUGEPAGE")
LARGE = 2 << 20  # bytes of a page
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def zeros(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of zeros; pages take memory when they are first touched."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if not LINUX or not nbytes:
        return torch.zeros(shape, dtype=dtype)
    # A mapping may begin anywhere, so one large page more is mapped. What is left at the end is in small ones.
    memory = _mapped(nbytes + LARGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin, large = -whole.data_ptr() % LARGE, nbytes // LARGE * LARGE
    if large:
        memory.madvise(mmap.MADV_HUGEPAGE, begin, large)
    return whole[begin : begin + nbytes].view(dtype).view(shape)


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
