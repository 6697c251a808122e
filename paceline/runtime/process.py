"""A worker process seen from the front end: started, spoken to, watched, ended."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.runtime import messages
from paceline.runtime.channel import FrontEnd
from paceline.runtime.launch import OnExit, OnMessage
from paceline.runtime.messages import Heartbeat, Shutdown
from paceline.runtime.pulse import Pulse

LAST_WORDS_S = 1.0  # what a process said before it ended is read for so long at most


class Local:
    """Worker processes on this machine (`launch.Launcher`)."""

    def __init__(self) -> None:
        self.reason, self.lost = "", False
        self._folder: Path | None = None

    async def meeting(self, workers: int) -> str | None:
        if workers == 1:
            return ""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        return f"file://{self._folder / secrets.token_hex(8)}"

    def process(self, number: int, command: Sequence[str], on_message: OnMessage, on_exit: OnExit) -> "WorkerProcess":
        return WorkerProcess(command, on_message, on_exit)

    def close(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class WorkerProcess:
    """One process and a socket that only the two share (`launch.Process`)."""

    def __init__(self, command: Sequence[str], on_message: OnMessage, on_exit: OnExit) -> None:
        self.command = list(command)
        self.on_message, self.on_exit = on_message, on_exit
        self.process: asyncio.subprocess.Process | None = None
        self._channel = FrontEnd(self._receive)
        self._waiter: asyncio.Task[None] | None = None
        self.pulse = Pulse()

    async def start(self) -> None:
        self.pulse = Pulse()
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
        self._channel.send(frame)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else -1

    def kill(self) -> None:
        if self.process and self.process.returncode is None:
            self.process.kill()

    async def stop(self, patience_s: float = 5.0) -> None:
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
        self.pulse.heard(message)
        if not isinstance(message, Heartbeat):
            self.on_message(self, message)
