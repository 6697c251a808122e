"""What a process keeps until it ends."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """What is made meanwhile, as by imports, stays. The garbage collector looks at none of it: not while it is made,
    which takes a sixth of the time that imports take, nor later, when all that runs would wait for it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
