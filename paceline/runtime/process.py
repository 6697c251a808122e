"""A worker process seen from the front end: started, spoken to, watched, ended."""

import asyncio
import contextlib
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.runtime import messages
from paceline.runtime.channel import FrontEnd
from paceline.runtime.fork_server import Forked, fork_server
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
        self.process: Forked | None = None
        self._channel = FrontEnd(self._receive)
        self._waiter: asyncio.Task[None] | None = None
        self._stopped = False
        self.pulse = Pulse()

    async def start(self) -> None:
        _, module, *arguments = self.command  # after -m
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = await fork_server(module).fork(arguments, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        self.pulse = Pulse()
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=ours)
        self._waiter = asyncio.create_task(self._wait())
        if self._stopped:  # meanwhile
            self.kill()

    def send(self, frame: bytes) -> None:
        self._channel.send(frame)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else -1

    def kill(self) -> None:
        if self.process:
            self.process.kill()

    async def stop(self, patience_s: float = 5.0) -> None:
        self.on_exit, self._stopped = lambda process, code: None, True
        if self._waiter:
            self.send(messages.encode(Shutdown()))
            await asyncio.wait([self._waiter], timeout=patience_s)
            self.kill()
            await self._waiter

    async def _wait(self) -> None:
        assert self.process is not None
        code = await self.process.ended()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._channel.closed.wait(), LAST_WORDS_S)
        self._channel.close()
        self.on_exit(self, code)

    def _receive(self, frame: bytes) -> None:
        message = messages.decode_from_worker(frame)
        self.pulse.heard(message)
        if not isinstance(message, Heartbeat):
            self.on_message(self, message)
