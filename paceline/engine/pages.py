"""Memory in pages of 2 MiB, where the system gives them when asked (Linux).

A step reads all weights, and in pages of 4 KiB the processor looks up an address every 64 lines: one core of an Intel
Xeon (Cascade Lake) took 13.6 ms to pass one row over 138 MB of weights, in large pages 12.4.
"""

import mmap

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of zeros; pages take memory when they are first touched."""
    memory = mmap.mmap(-1, max(1, torch.Size(shape).numel() * dtype.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[: torch.Size(shape).numel()].view(shape)
