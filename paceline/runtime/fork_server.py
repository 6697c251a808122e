"""Processes that begin where their imports end: one process imports a program, and is forked for each that runs it.

The standard library's fork server would import the front end's main module into each of them, and Numba's OpenMP
refuses to run in a child of the process that loaded it. So a process is forked twice, and the one between ends at once:
then the front end, as the nearest subreaper above it, is its parent.

python -m paceline.runtime.fork_server MODULE DESCRIPTOR
"""

import asyncio
import atexit
import ctypes
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol, cast

from setproctitle import setproctitle

from paceline.python import PYTHON, packages

MOST = 2**17  # bytes of a request; Linux takes more of them as one message
LONGEST_S = 600.0  # to import and fork; the first import of all compiles kernels
AGAIN_S = 30.0  # to fork once more
STREAMS = (1, 2)  # where a process writes as who asked for it does by then
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Program(Protocol):
    """A module whose processes a server forks."""

    def prepare(self) -> None:
        """Imports what all of its processes need. Starts no thread."""

    def main(self, arguments: list[str]) -> None:
        """Runs in the forked process; the last argument is the descriptor that it was given."""


class Forked:
    """A process whose parent we have become."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, cast(int | None, None)  # below 0: minus the signal that ended it

    def wait(self) -> int:
        """Blocks until it has ended. For one caller, which is not `ended`."""
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody who waits for any child was told
            self.returncode = 255
        return self.returncode

    async def ended(self) -> int:
        """The same in a thread of its own, for one caller."""
        loop, end = asyncio.get_running_loop(), asyncio.Event()

        def wait() -> None:
            self.wait()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end.set)

        threading.Thread(target=wait, daemon=True).start()
        await end.wait()
        return cast(int, self.returncode)

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # whoever waits is about to say so
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Seen from the front end: of one program, started when it is needed, in the environment of then, and again when
    it is gone."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._patience_s = LONGEST_S

    def start(self) -> None:
        """Returns before it has imported anything. Raises OSError."""
        if self._process and self._process.poll() is None:
            return
        if ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0):
            raise OSError("the system has no subreapers, which Linux has since 3.4")
        self.close()
        for stream in range(3):  # one that is closed would be taken by a socket
            with suppress(OSError):
                os.fstat(stream)
                continue
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", __name__, self.module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # no threads at forks
                env={"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"} | os.environ | packages(),
                start_new_session=True,  # the terminal's Ctrl-C is for the front end, which drains
            )
        self._patience_s = LONGEST_S

    async def fork(self, arguments: Sequence[str], descriptor: int) -> Forked:
        """A process that runs the program's `main`, and has a copy of the descriptor. Raises OSError."""
        for told in self._asked(arguments, [descriptor, *STREAMS]):
            told.setblocking(False)
            with suppress(TimeoutError):
                answer = asyncio.get_running_loop().sock_recv(told, 16)
                if pid := await asyncio.wait_for(answer, self._patience_s):
                    return self._forked(pid)
        raise OSError(f"{self.module} cannot be imported or forked")

    def fork_now(self, arguments: Sequence[str], descriptor: int, log: int) -> Forked:
        """The same, blocking; what the process writes goes to `log`."""
        for told in self._asked(arguments, [descriptor, log, log]):
            told.settimeout(self._patience_s)
            with suppress(TimeoutError):
                if pid := told.recv(16):
                    return self._forked(pid)
        raise OSError(f"{self.module} cannot be imported or forked")

    def _forked(self, pid: bytes) -> Forked:
        self._patience_s = AGAIN_S  # it has imported everything
        return Forked(int(pid))

    def _asked(self, arguments: Sequence[str], descriptors: Sequence[int]) -> Iterator[socket.socket]:
        """Where the process will tell its id: twice, for what ended a worker may have ended the server."""
        for _ in range(2):
            self.start()
            assert self._socket
            server, (ours, theirs) = self._process, socket.socketpair()
            with ours:
                with theirs, suppress(BrokenPipeError, ConnectionResetError):
                    request = json.dumps(list(arguments)).encode()
                    socket.send_fds(self._socket, [request], [theirs.fileno(), *descriptors])
                yield ours
            if server is self._process:  # else others have replaced it, and wait for the new one
                self.close()

    def close(self) -> None:
        """Ends the server, not what it has forked."""
        if self._process and self._socket:
            self._socket.close()
            self._process.kill()
            self._process.wait()


@functools.cache
def fork_server(module: str) -> ForkServer:
    """The one of this process, which ends it when it ends."""
    server = ForkServer(module)
    atexit.register(server.close)
    return server


def serve(requests: socket.socket) -> list[str] | None:
    """Forks at each request. Returns in forked processes, with the program's arguments; None: nobody asks any more."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MOST, 2 + len(STREAMS))
        if not request:
            return None
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            requests.close()
            while os.getppid() == parent:
                time.sleep(1e-4)
            told, given, *streams = descriptors
            for ours, stream in zip(streams, STREAMS, strict=True):
                os.dup2(ours, stream)
                os.close(ours)
            with suppress(BrokenPipeError):  # who asked does not wait any more
                os.write(told, str(os.getpid()).encode())
            os.close(told)
            return [*json.loads(request), str(given)]
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def main(module: str, descriptor: int) -> None:
    setproctitle(f"{__spec__.name}: {module.rpartition('.')[2]}")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored nobody can be waited for
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to all at once: the front end drains first
    program = cast(Program, importlib.import_module(module))
    program.prepare()
    with socket.socket(fileno=descriptor) as requests:
        arguments = serve(requests)
    if arguments:
        setproctitle(" ".join([module, *arguments]))
        program.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
