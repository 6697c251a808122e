"""Both ends of the socket pair between the front end and a worker: messages are a length (4 bytes) and msgpack.

Plain sockets rather than a message library: its I/O threads cost two more wake-ups each way, and on two busy cores
each of them may wait for a core (docs/log.md).
"""

import asyncio
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import cast

LENGTH = struct.Struct("<I")
MOST = 2**18  # bytes to take at once


def pack(frame: bytes) -> bytes:
    return LENGTH.pack(len(frame)) + frame


class FrontEnd(asyncio.Protocol):
    """The event loop's end. `closed` is set when the other end is gone and everything it said was delivered."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self.closed = asyncio.Event()
        self._receive = receive
        self._buffer = bytearray()
        self._early: list[bytes] = []  # sent before the connection was there
        self._transport: asyncio.WriteTransport | None = None

    def send(self, frame: bytes) -> None:
        """Never blocks. What is sent to a dead process is dropped: its exit is about to be seen."""
        if self._transport is None:
            self._early.append(frame)
        elif not self._transport.is_closing():
            self._transport.write(pack(frame))

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        """Closes without waiting for what was sent."""
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        early, self._early = self._early, []
        for frame in early:
            self.send(frame)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            self._receive(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class WorkerEnd:
    """The worker's end: blocks. Any thread may send."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))  # the lowest number that is free: `select` needs one
        os.close(descriptor)
        self._socket.set_inheritable(False)
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Raises OSError when the front end is gone."""
        with self._sending:
            self._socket.sendall(pack(frame))

    def receive(self) -> bytes | None:
        """The next message; None when the front end is gone."""
        buffer = self._buffer
        while len(buffer) < LENGTH.size or len(buffer) < (end := LENGTH.size + LENGTH.unpack_from(buffer)[0]):
            try:
                data = self._socket.recv(MOST)
            except ConnectionResetError:  # it has not read all that we sent
                return None
            if not data:
                return None
            buffer += data
        frame = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        return frame

    def waits(self, seconds: float) -> bool:
        """Whether within that time something is there to `receive`."""
        return len(self._buffer) > 0 or bool(select.select([self._socket], [], [], seconds)[0])
