"""Chat templates: messages to text, in a helper process that is killed when it takes too long or too much."""

import asyncio
import contextlib
import os
from typing import Any

import msgspec

from paceline.python import PYTHON, packages
from paceline.server.template_worker import Render, Rendered

TIME_LIMIT = 2.0  # seconds for one render
START_LIMIT = 20.0  # seconds for the process to start
MAX_CHARS = 2**20


class NoHelper(Exception):
    """The helper process does not start: nobody's messages are at fault."""


class _Ended(Exception):
    """The helper process ended during a render."""


class TemplateError(Exception):
    """The text could not be made. `by_template`: the template refuses these messages; otherwise it is at fault."""

    def __init__(self, reason: str, by_template: bool = False) -> None:
        super().__init__(reason)
        self.by_template = by_template


class ChatTemplate:
    """One checkpoint's template and its helper process, which starts with the first render and is shared by none.

    Belongs to one event loop. A render that passes a limit kills the process; the next one starts another.
    """

    def __init__(self, source: str, time_limit: float = TIME_LIMIT, max_chars: int = MAX_CHARS) -> None:
        self.source = source
        self._time_limit = time_limit
        self._max_chars = max_chars
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Rendered)

    async def render(self, **variables: Any) -> str:
        """The template's text for these variables. Raises `TemplateError` and `NoHelper`."""
        message = self._encoder.encode(Render(self.source, variables, self._max_chars))
        async with self._lock:
            try:
                answer = await self._ask(message)
            except _Ended:  # of something else, perhaps
                try:
                    answer = await self._ask(message)
                except _Ended:
                    raise TemplateError("its process ended") from None
        if answer.error:
            raise TemplateError(answer.error, answer.by_template)
        return answer.text

    async def _ask(self, message: bytes) -> Rendered:
        """Sends one message and gives the answer; whatever goes wrong, no half-read process is left behind."""
        done = False
        try:
            try:
                process = await self._running()
            except (asyncio.IncompleteReadError, OSError) as error:  # TimeoutError is one of these
                raise NoHelper(f"the process for chat templates does not start: {error}") from None
            async with asyncio.timeout(self._time_limit):
                answer = await _exchange(process, message)
            done = True
            return self._decoder.decode(answer)
        except TimeoutError:
            raise TemplateError(f"it took longer than {self._time_limit:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise _Ended from None
        finally:
            if not done:
                await self._stop()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            await self._stop()
            self._process = await asyncio.create_subprocess_exec(
                *(*PYTHON, "-m", "paceline.server.template_worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=packages() | {"LANG": "C.UTF-8", "TZ": os.environ.get("TZ", "")},
                start_new_session=True,
            )
            async with asyncio.timeout(START_LIMIT):  # an empty render answers when the imports are done
                await _exchange(self._process, self._encoder.encode(Render("", {}, 1)))
        return self._process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()

    async def close(self) -> None:
        """Ends the helper process."""
        async with self._lock:
            await self._stop()


async def _exchange(process: asyncio.subprocess.Process, message: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(len(message).to_bytes(4, "big") + message)
    await process.stdin.drain()
    return await process.stdout.readexactly(int.from_bytes(await process.stdout.readexactly(4), "big"))
