"""A process for what a client or a checkpoint could make endless: it is killed when it takes too long or too much."""

import asyncio
import contextlib
import os
import signal

from paceline.python import PYTHON, packages

START_LIMIT = 20.0  # seconds for the process to start
BY_LIMITS = -signal.SIGXCPU, -signal.SIGABRT  # how one ends that takes too long, or more memory than there is


class NoHelper(Exception):
    """The process does not start: no message is at fault."""


class Ended(Exception):
    """The process ended before it had answered, by its limits or twice."""


class Helper:
    """Runs a module that calls `helper_process.answer_messages`, from the first message on; it is shared by none.

    Belongs to one event loop, and answers one message at a time. One that passes a limit ends the process; the next one
    starts another.
    """

    def __init__(self, module: str, time_limit: float) -> None:
        """`time_limit`: seconds of wall time for one message."""
        self.module, self.time_limit = module, time_limit
        self.process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def ask(self, message: bytes) -> bytes:
        """The answer. Raises `NoHelper`, `Ended` and `TimeoutError`; no half-read process is left behind."""
        async with self._lock:
            said = await self._said(message)
            if isinstance(said, int) and said not in BY_LIMITS:  # it ended of something else, perhaps
                said = await self._said(message)
            if isinstance(said, int):
                raise Ended
            return said

    async def _said(self, message: bytes) -> bytes | int:
        """The answer, or how the process ended."""
        done = False
        try:
            try:
                process = await self._running()
            except (asyncio.IncompleteReadError, OSError) as error:  # TimeoutError is one of these
                raise NoHelper(f"a helper process ({self.module}) does not start: {error}") from None
            async with asyncio.timeout(self.time_limit):
                answer = await _exchange(process, message)
            done = True
            return answer
        except TimeoutError:
            raise
        except (asyncio.IncompleteReadError, OSError):
            return await process.wait()
        finally:
            if not done:
                await self._stop()

    async def close(self) -> None:
        """Ends the process."""
        async with self._lock:
            await self._stop()

    async def _running(self) -> asyncio.subprocess.Process:
        if self.process is None or self.process.returncode is not None:
            await self._stop()
            self.process = await asyncio.create_subprocess_exec(
                *(*PYTHON, "-m", self.module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=packages() | {"LANG": "C.UTF-8", "TZ": os.environ.get("TZ", "")},
                start_new_session=True,
            )
            async with asyncio.timeout(START_LIMIT):
                await _exchange(self.process, b"")  # answered when the imports are done
        return self.process

    async def _stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def _exchange(process: asyncio.subprocess.Process, message: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(len(message).to_bytes(4, "big") + message)
    await process.stdin.drain()
    return await process.stdout.readexactly(int.from_bytes(await process.stdout.readexactly(4), "big"))
