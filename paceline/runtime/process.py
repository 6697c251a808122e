"""A worker process seen from the front end: started, spoken to, watched, ended."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from paceline.runtime import messages
from paceline.runtime.channel import FrontEnd
from paceline.runtime.messages import FromWorker, Heartbeat, Shutdown

SILENT_S = 1.5  # without a heartbeat for so long the process is taken to hang
STUCK_S = 1.8  # likewise a busy one whose progress stands still
LAST_WORDS_S = 1.0  # what a process said before it ended is read for so long at most


class WorkerProcess:
    """One process and a socket that only the two share. Calls back on the event loop."""

    def __init__(
        self,
        command: Sequence[str],
        on_message: Callable[["WorkerProcess", FromWorker], None],
        on_exit: Callable[["WorkerProcess", int], None],
    ) -> None:
        self.command = list(command)
        self.on_message, self.on_exit = on_message, on_exit
        self.process: asyncio.subprocess.Process | None = None
        self._channel = FrontEnd(self._receive)
        self._waiter: asyncio.Task[None] | None = None
        self._last_beat = 0.0
        self._last_move = 0.0
        self._progress = -1

    async def start(self) -> None:
        """Starts the process; it answers with Loading, Ready or Failed. Raises OSError."""
        self._last_beat = self._last_move = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=ours)
            try:
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *self.command,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")},
                    start_new_session=True,  # the terminal's Ctrl-C is for the front end, which drains
                )
            except OSError:
                self._channel.close()
                raise
        self._waiter = asyncio.create_task(self._wait())

    def send(self, frame: bytes) -> None:
        """A `ToWorker`, encoded."""
        self._channel.send(frame)

    @property
    def responsive(self) -> bool:
        """Heartbeats come, and a busy worker's steps move."""
        now = time.monotonic()
        return now - self._last_beat < SILENT_S and now - self._last_move < STUCK_S

    def forgive(self, seconds: float) -> None:
        """The front end itself stood still for so long: nobody could be heard."""
        self._last_beat += seconds
        self._last_move += seconds

    @property
    def silent_s(self) -> float:
        """Seconds without any sign of progress."""
        return time.monotonic() - min(self._last_beat, self._last_move)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else -1

    def kill(self) -> None:
        """Ends the process at once; `on_exit` follows."""
        if self.process and self.process.returncode is None:
            self.process.kill()

    async def stop(self, patience_s: float = 5.0) -> None:
        """Asks the process to leave, then makes it. `on_exit` is not called."""
        self.on_exit = lambda process, code: None
        if self.process and self.process.returncode is None:
            self.send(messages.encode(Shutdown()))
            try:
                await asyncio.wait_for(self.process.wait(), patience_s)
            except TimeoutError:
                self.process.send_signal(signal.SIGKILL)
                await self.process.wait()
        if self._waiter:
            await self._waiter

    async def _wait(self) -> None:
        assert self.process is not None
        code = await self.process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._channel.closed.wait(), LAST_WORDS_S)
        self._channel.close()
        self.on_exit(self, code)

    def _receive(self, frame: bytes) -> None:
        message = messages.decode_from_worker(frame)
        now = time.monotonic()
        if isinstance(message, Heartbeat):
            self._last_beat = now
            if message.progress != self._progress or not message.busy:
                self._last_move = now
            self._progress = message.progress
        else:
            self._last_beat = self._last_move = now
            self.on_message(self, message)
