"""A worker process seen from the front end: started, spoken to, watched, ended."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.runtime import messages
from paceline.runtime.channel import FrontEnd
from paceline.runtime.fork_server import ForkServer
from paceline.runtime.launch import OnExit, OnMessage
from paceline.runtime.messages import Heartbeat, Shutdown
from paceline.runtime.pulse import Pulse

LAST_WORDS_S = 1.0  # what a process said before it ended is read for so long at most


class Local:
    """Worker processes on this machine (`launch.Launcher`)."""

    forks = ForkServer()

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
        return WorkerProcess(self, command, on_message, on_exit)

    def close(self) -> None:
        self.forks.leave(self)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class WorkerProcess:
    """One process and a socket that only the two share (`launch.Process`)."""

    def __init__(self, launcher: Local, command: Sequence[str], on_message: OnMessage, on_exit: OnExit) -> None:
        self.launcher, self.command = launcher, command
        self.on_message, self.on_exit = on_message, on_exit
        self.pid, self.ended = -1, asyncio.Event()
        self._killed = False
        self._channel = FrontEnd(self._receive)
        self._waiter: asyncio.Task[None] | None = None
        self.pulse = Pulse()

    async def start(self) -> None:
        self.pulse = Pulse()
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=ours)
            try:
                life = self.launcher.forks.fork(self.launcher, self.command, theirs)
            except OSError:
                self._channel.close()
                raise
        self._waiter = asyncio.create_task(self._wait(life))

    def send(self, frame: bytes) -> None:
        self._channel.send(frame)

    def kill(self) -> None:
        self._killed = True
        if self.ended.is_set():
            return
        if self.pid < 0:  # what should fork it hangs
            self.launcher.forks.end()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def stop(self, patience_s: float = 5.0) -> None:
        self.on_exit = lambda process, code: None
        if self._waiter:
            self.send(messages.encode(Shutdown()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), patience_s)
            self.kill()
            await self._waiter

    async def _wait(self, life: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=life)
        self.pid = int(await reader.readline() or -1)
        if self._killed and self.pid > 0:  # it was on its way
            self.kill()
        code = await reader.readline()
        if not code and self.pid > 0:  # who waits for it was lost
            self.kill()
        self.ended.set()
        writer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._channel.closed.wait(), LAST_WORDS_S)
        self._channel.close()
        self.on_exit(self, int(code or -signal.SIGKILL))

    def _receive(self, frame: bytes) -> None:
        message = messages.decode_from_worker(frame)
        self.pulse.heard(message)
        if not isinstance(message, Heartbeat):
            self.on_message(self, message)
