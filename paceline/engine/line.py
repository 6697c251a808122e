"""Tensors from one worker of a group to another on the same machine, one way: through memory that both have, and a
Unix socket on which the one who waits is woken.

gloo's messages go through a thread on either side and are copied twice more. As `exchange` it only works where stores
are seen in the order in which they are made (x86).
"""

import mmap
import os
import socket
import struct
import time
from pathlib import Path

from torch import Tensor

RING = 32 << 20  # bytes; pages that were never used take no memory
PIECE = 1 << 18  # of a message, so that the other end copies while the next one is written
HEAD = 64  # bytes before the ring, of which the first number is how far it was read
PLACE = struct.Struct("<q")
WAIT_S = 50e-6


class Line:
    """One of its ends. Places are counted from the beginning of time: place p is byte p % RING."""

    def __init__(self, connection: socket.socket, descriptor: int) -> None:
        memory = memoryview(mmap.mmap(descriptor, HEAD + RING))
        os.close(descriptor)
        self._socket, self._ring, self._read = connection, memory[HEAD:], memory[:HEAD].cast("q")
        self._written = 0

    def send(self, x: Tensor) -> None:
        """x: contiguous. Waits for the other end only when the ring is full."""
        data = memoryview(x.numpy()).cast("B")
        for begin in range(0, len(data), PIECE):
            piece = data[begin : begin + PIECE]
            place = self._room(len(piece))
            at = place % RING
            self._ring[at : at + len(piece)] = piece
            self._written = place + len(piece)
            self._socket.sendall(PLACE.pack(place))

    def _room(self, size: int) -> int:
        """A place for so many bytes, which do not go over the end."""
        place = self._written
        if self._read[0] == place or place % RING + size > RING:  # all was read: bytes that are still in the cache
            place = -(-place // RING) * RING
        while self._read[0] < self._written and place + size - self._read[0] > RING:
            time.sleep(WAIT_S)
        return place

    def receive(self, x: Tensor) -> None:
        """Fills x, which is contiguous. Raises ConnectionError when the other worker is gone."""
        data = memoryview(x.numpy()).cast("B")
        for begin in range(0, len(data), PIECE):
            said = self._socket.recv(PLACE.size, socket.MSG_WAITALL)
            if len(said) < PLACE.size:
                raise ConnectionError("another worker of the group is gone")
            piece = data[begin : begin + PIECE]
            (place,) = PLACE.unpack(said)
            at = place % RING
            piece[:] = self._ring[at : at + len(piece)]
            self._read[0] = place + len(piece)


class Door:
    """Where the one who receives waits for the other, who may come before it looks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(1)

    def open(self) -> Line:
        connection, _ = self._socket.accept()
        self._socket.close()
        self.path.unlink()
        _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
        return Line(connection, descriptor)


def call(path: Path) -> Line:
    """The end of the one who sends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    descriptor = os.memfd_create("paceline")
    os.ftruncate(descriptor, HEAD + RING)
    socket.send_fds(connection, [b"\0"], [descriptor])
    return Line(connection, descriptor)
