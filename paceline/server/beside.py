"""Work that would hold up everybody's streams, in a thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE = 4096  # characters, tokens or numbers: a few milliseconds at most
# One request's at a time: a token takes some 500 bytes while its text is encoded. What is Python's own holds the event
# loop up for 5 ms at a time.
_THREAD = ThreadPoolExecutor(1, "beside")
Result = TypeVar("Result")


async def beside(size: int, work: Callable[[], Result]) -> Result:
    """What `work` on so many characters, tokens or numbers gives; the event loop goes on meanwhile if they are many."""
    return work() if size <= INLINE else await asyncio.get_running_loop().run_in_executor(_THREAD, work)
