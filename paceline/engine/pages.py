"""Memory in pages of 2 MiB, where the system gives them when asked (Linux).

A step reads all weights, and in pages of 4 KiB the processor looks up an address every 64 lines: one core of an Intel
Xeon (Cascade Lake) took 13.6 ms to pass one row over 138 MB of weights, in large pages 12.4.
"""

import ctypes
import mmap

import torch
from torch import Tensor

LINUX = hasattr(mmap, "MADV_HUGEPAGE")


def zeros(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of zeros; pages take memory when they are first touched."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if not LINUX or not nbytes:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_mapped(nbytes, mmap.MADV_HUGEPAGE), dtype=dtype).view(shape)


def reserved(shape: tuple[int, ...] | torch.Size) -> tuple[mmap.mmap, Tensor]:
    """Zeros in small pages, which `madvise(MADV_DONTNEED)` returns to the system one by one, and the memory itself.

    A large page of which a part is returned stays whole until the system is short of memory.
    """
    memory = _mapped(4 * torch.Size(shape).numel(), mmap.MADV_NOHUGEPAGE)
    return memory, torch.frombuffer(memory, dtype=torch.float32).view(shape)


def _mapped(nbytes: int, advice: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    memory.madvise(advice)
    return memory


def trim_heap() -> None:
    """Returns what loading left in the C library's heap (110 to 190 MiB measured) where that library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
