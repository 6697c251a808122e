"""Kernels are compiled by one process at a time; the next ones find them in Numba's cache.

Not only to save the work: what two processes compile from the same source need not sum in the same order, and parts of
both in the cache would give two ways through the engine different bits.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Waits for other processes of this user. To be held while modules with compiled functions are imported.

    Where no file can be locked there is no waiting either: all works, but the first start should be one process's.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}.lock"
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError):  # not a POSIX system; nowhere to write
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield
    finally:
        os.close(lock)
