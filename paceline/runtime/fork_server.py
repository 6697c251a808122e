"""Worker processes are forked off one process that has imported what they need: torch and the kernels take seconds to
import and 200 MB, which workers then share, and one that takes the place of another is there at once.

python -m paceline.runtime.fork_server DESCRIPTOR
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

LONGEST = 2**20  # bytes of a command
Main = Callable[[list[str]], int]


class ForkServer:
    """The front end's side: there as long as somebody holds it, and again after it was lost."""

    def __init__(self) -> None:
        self._holders: set[Any] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else -1

    def fork(self, holder: Any, command: Sequence[str], channel: socket.socket) -> socket.socket:
        """Starts a worker with these arguments to the Python interpreter and, behind them, its descriptor of `channel`.

        Returns a socket that says the worker's pid and, when it has ended, its exit code, a line each. Raises OSError.
        """
        self._holders.add(holder)
        ours, theirs = socket.socketpair()
        message, descriptors = json.dumps(list(command)).encode(), [channel.fileno(), theirs.fileno()]
        with theirs:
            try:
                socket.send_fds(self._control or self._start(), [message], descriptors)
            except ConnectionError:
                self.end()
                socket.send_fds(self._start(), [message], descriptors)
        return ours

    def leave(self, holder: Any) -> None:
        """Its workers have ended."""
        self._holders.discard(holder)
        if not self._holders:
            self.end()

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        policy = os.environ.get("OMP_WAIT_POLICY", "passive")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.runtime.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_WAIT_POLICY": policy, "OPENBLAS_NUM_THREADS": "1"},  # no threads when it forks
                start_new_session=True,  # the terminal's Ctrl-C is for the front end, which drains
            )
        return self._control

    def end(self) -> None:
        """At once, whatever it does; workers stay, and who needs another one starts it again."""
        if self._control:
            self._control.close()
            self._control = None
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


def main(descriptor: int) -> None:
    """Forks until the front end is gone; what is left of its workers ends by itself."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries them
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LONGEST, 2)
        if not message:
            return
        command = json.loads(message)
        start = prepared(command)
        channel, life = descriptors[0], socket.socket(fileno=descriptors[1])
        if not os.fork():
            control.close()
            attend(command, channel, life, start)
        os.close(channel)
        life.close()


def attend(command: list[str], channel: int, life: socket.socket, start: Main | None) -> None:
    """The process between server and worker, which waits for the worker's end, whatever becomes of the server.

    It also makes the worker no child of the process that loaded the kernels, in which Numba would not run parallel
    ones (GNU OpenMP's threads do not survive a fork; here none has begun).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        life.close()
        become(command, channel, start)
    os.close(channel)
    with contextlib.suppress(OSError):  # nobody asks any more
        life.sendall(b"%d\n" % pid)
        life.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def prepared(command: list[str]) -> Main | None:
    """The `main` of a module that says what else to import (`PRELOAD`), after that is done; None: of no such."""
    if command[0] != "-m":
        return None
    try:
        module = importlib.import_module(command[1])
        for name in module.PRELOAD:
            importlib.import_module(name)
        start: Main = module.main
    except Exception:  # as a program of its own it says what is wrong
        return None
    gc.collect()
    gc.freeze()  # else a collection in a worker copied the pages of all that was imported
    return start


def become(command: list[str], channel: int, start: Main | None) -> None:
    """What the forked process does; it does not return."""
    os.setsid()
    code: Any = 1
    try:
        if start is None:
            os.set_inheritable(channel, True)
            os.execv(sys.executable, [sys.executable, *command, str(channel)])
        code = start([*command[2:], str(channel)])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
