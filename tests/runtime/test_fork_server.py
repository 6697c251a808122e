"""Where workers come from, and what becomes of them when that is lost."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from paceline.core.request import SamplingParams
from paceline.runtime import process
from paceline.runtime.fork_server import ForkServer
from paceline.runtime.process import Local
from tests.runtime.test_fleet import Collector, expected, fleet, until


@pytest.fixture
def server():
    server = ForkServer()
    yield server
    server.leave(None)
    assert server.pid == -1


def started(server: ForkServer, *command: str):
    """A worker's pid and, behind it, its exit code."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        life = server.fork(None, command, theirs)
    with life, life.makefile() as lines:
        yield from map(int, lines)


MODULE = """
import os
PRELOAD = ("colorsys",)
def main(arguments):
    print(arguments, os.getsid(0) == os.getpid())
    if arguments[0] == "exit":
        raise SystemExit(int(arguments[1]))
    if arguments[0] == "raise":
        raise ValueError(arguments[1])
    return 3
"""


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("-m", "some_worker", "return", "é"), 3, "['return', 'é', '"),
        (("-m", "some_worker", "exit", "5"), 5, "True"),
        (("-m", "some_worker", "raise", "a reason"), 1, "ValueError: a reason"),
        (("-m", "no_worker"), 1, "No module named no_worker"),
        (("-c", "import os; os._exit(7)"), 7, ""),
        (("-c", "import os; os.kill(os.getpid(), 9)"), -9, ""),
    ],
)
def test_what_ends_says_how(server, tmp_path, monkeypatch, capfd, command, code, said):
    (tmp_path / "some_worker.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pid, ended = started(server, *command)
    assert pid > 0 and ended == code and not Path(f"/proc/{pid}").exists()
    out, err = capfd.readouterr()
    assert said in out + err


def test_it_is_there_as_long_as_somebody_holds_it(server):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for holder in "ab":
            server.fork(holder, ["-c", ""], theirs).close()
    pid = server.pid
    server.leave("a")
    assert server.pid == pid and Path(f"/proc/{pid}").exists()
    server.leave("b")
    assert server.pid == -1 and not Path(f"/proc/{pid}").exists()


async def test_workers_survive_the_server_and_another_one_forks_those_after_them():
    async with fleet(delay=0.005) as running:
        sink, workers, pid = Collector(), running.workers[0], Local.forks.pid
        running.submit("toy", [1, 2], SamplingParams(max_tokens=60), sink)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(sink.tokens) > 20)
        assert not workers.losses
        os.kill(workers.pids[0], signal.SIGKILL)
        await sink.done.wait()
        assert sink.tokens == expected([1, 2], 60) and workers.losses == 1 and Local.forks.pid not in (pid, -1)


async def test_a_worker_for_whom_nobody_waits_is_replaced():
    async with fleet(delay=0.005) as running:
        sink, workers = Collector(), running.workers[0]
        running.submit("toy", [1, 2], SamplingParams(max_tokens=60), sink)
        await until(lambda: len(sink.tokens) > 20)
        (pid,) = workers.pids
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        await until(lambda: workers.losses == 1)
        await sink.done.wait()
        assert sink.tokens == expected([1, 2], 60)
        await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_a_server_that_hangs_is_replaced_with_the_worker_that_it_does_not_fork(monkeypatch):
    monkeypatch.setattr("paceline.runtime.workers.LOAD_HANG_S", 0.5)
    async with fleet() as running:
        pid = Local.forks.pid
        os.kill(pid, signal.SIGSTOP)
        os.kill(running.workers[0].pids[0], signal.SIGKILL)
        await until(lambda: running.workers[0].losses == 2 and running.ready)
        assert Local.forks.pid != pid


async def test_a_stop_ends_a_worker_that_is_not_there_yet(monkeypatch):
    monkeypatch.setattr(process.WorkerProcess.stop, "__defaults__", (0.1,))
    async with fleet() as running:
        os.kill(Local.forks.pid, signal.SIGSTOP)
        os.kill(running.workers[0].pids[0], signal.SIGKILL)
        await until(lambda: running.workers[0].losses)
    async with asyncio.timeout(5):
        await until(lambda: Local.forks.pid == -1)
