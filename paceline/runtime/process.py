"""A worker process seen from the front end: started, spoken to, watched, ended."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

import zmq

from paceline.runtime import messages
from paceline.runtime.messages import FromWorker, Heartbeat, Shutdown, ToWorker

SILENT_S = 1.5  # without a heartbeat for so long the process is taken to hang
STUCK_S = 1.8  # likewise a busy one whose progress stands still


class WorkerProcess:
    """One process and its two sockets in `directory` (0700). Calls back on the event loop."""

    def __init__(
        self,
        command: Sequence[str],
        directory: str,
        name: str,
        on_message: Callable[[FromWorker], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self.command, self.name = list(command), name
        self.on_message, self.on_exit = on_message, on_exit
        self.address = f"ipc://{directory}/{name}"
        self.process: asyncio.subprocess.Process | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._channels: list[Channel] = []
        self._waiter: asyncio.Task[None] | None = None
        self._last_beat = 0.0
        self._last_move = 0.0
        self._progress = -1

    async def start(self) -> None:
        """Binds the sockets and starts the process; it answers with Loading, Ready or Failed. Raises OSError."""
        self._last_beat = self._last_move = time.monotonic()
        self._channels = [
            Channel(self._context, zmq.PAIR, self.address, self._receive),
            Channel(self._context, zmq.PULL, self.address + "-beat", self._receive),
        ]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.command,
            self.address,
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")},
            start_new_session=True,  # the terminal's Ctrl-C is for the front end, which drains
        )
        self._waiter = asyncio.create_task(self._wait())

    def send(self, message: ToWorker) -> None:
        self._channels[0].send(messages.encode(message))

    @property
    def responsive(self) -> bool:
        """Heartbeats come, and a busy worker's steps move."""
        now = time.monotonic()
        return now - self._last_beat < SILENT_S and now - self._last_move < STUCK_S

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
        self.on_exit = lambda _: None
        if self.process and self.process.returncode is None:
            with contextlib.suppress(zmq.ZMQError, IndexError):
                self.send(Shutdown())
            try:
                await asyncio.wait_for(self.process.wait(), patience_s)
            except TimeoutError:
                self.process.send_signal(signal.SIGKILL)
                await self.process.wait()
        if self._waiter:
            await self._waiter
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = []

    async def _wait(self) -> None:
        assert self.process is not None
        code = await self.process.wait()
        try:
            if self._channels:
                self._channels[0].drain()  # last words
        finally:
            self.close()
            self.on_exit(code)

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
            self.on_message(message)


class Channel:
    """A bound ZMQ socket on the event loop. Its file descriptor is edge-triggered: drain after every wake and send."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, receive: Callable[[bytes], None]
    ) -> None:
        self._socket = context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._path = address.removeprefix("ipc://")
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.drain)

    def send(self, frame: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the peer has died and its exit is about to be seen
            self._socket.send(frame, zmq.NOBLOCK)
        self._loop.call_soon(self.drain)

    def drain(self) -> None:
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frame)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
