"""Tensor ranks of one machine show each other their numbers in shared memory.

A layer has two sums over the ranks, of a few kilobytes in a decode. By gloo, where each rank waits for threads of both,
one took 0.5 to 1.6 ms on two cores (median; P90 4 ms); here it takes 30 to 60 us: a rank writes, says so, and looks
until the others have. It only works where stores are seen in the order in which they are made (x86), and spins: a rank
needs a core of its own, and gives it up when the others are late.
"""

import mmap
import os
import platform
import time
from pathlib import Path

import torch
from torch import Tensor

FLOATS = 1 << 20  # of a rank at a time
LINE = 64  # bytes
PATIENCE = 2000  # looks, about 100 us, before others may have the core
NAP_S = 50e-6  # for so long; where ranks only yielded, other threads of the machine were up to 90 ms late (Linux 6.18)
FOLDER = Path("/dev/shm")


def possible() -> bool:
    return platform.machine() == "x86_64" and FOLDER.is_dir() and os.access(FOLDER, os.W_OK)


class Exchange:
    """Of the ranks of one stage. Every rank makes the same calls in the same order."""

    def __init__(self, name: str, rank: int, ranks: int) -> None:
        """`name` of a file that rank 0 makes here; to be removed when all ranks have it. Raises OSError where rank 0
        finds no room for it (a container's /dev/shm often has 64 MB)."""
        self.rank, self.ranks, self.path = rank, ranks, FOLDER / name
        self._turn = 0
        size = ranks * LINE + 2 * ranks * FLOATS * 4
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if rank == 0 else 0)
        descriptor = os.open(self.path, flags, 0o600)
        try:
            if rank == 0:
                os.posix_fallocate(descriptor, 0, size)  # who writes where there is no room is killed
            memory = mmap.mmap(descriptor, size)
        except OSError:
            if rank == 0:
                self.path.unlink()
            raise
        finally:
            os.close(descriptor)
        self._turns = memoryview(memory)[: ranks * LINE].cast("q")
        floats = torch.frombuffer(memory, dtype=torch.float32, offset=ranks * LINE)
        self._slots = floats.view(2, ranks, FLOATS)  # taken in turns: who writes again knows that all have read

    def __call__(self, own: Tensor) -> Tensor:
        """own: at most FLOATS float32 numbers, [n]. Those of all ranks [ranks, n], to be read before the next call."""
        self._turn += 1
        slots = self._slots[self._turn % 2, :, : own.numel()]
        slots[self.rank] = own
        turn, turns, step = self._turn, self._turns, LINE // 8
        turns[self.rank * step] = turn
        for other in range(0, self.ranks * step, step):
            looks = 0
            while turns[other] < turn:
                looks += 1
                if looks > PATIENCE:
                    time.sleep(NAP_S)
        return slots

    def sum_(self, x: Tensor) -> Tensor:
        """Over the ranks, in place; in their order, so that all have the same bits."""
        for part in x.view(-1).split(FLOATS):
            torch.sum(self(part), dim=0, out=part)
        return x

    def gather(self, rows: Tensor) -> Tensor | None:
        """[n, width] of each rank to [n, ranks * width] at rank 0; None at the others."""
        width, out = rows.shape[1], []
        for part in rows.split(max(1, FLOATS // width)):
            every = self(part.reshape(-1))
            if self.rank == 0:
                out.append(every.view(self.ranks, -1, width).transpose(0, 1).reshape(-1, self.ranks * width))
        return torch.cat(out) if self.rank == 0 else None
