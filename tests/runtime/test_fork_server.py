import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from paceline.runtime import fork_server
from paceline.runtime.fork_server import ForkServer
from paceline.server.template import ChatTemplate

PROGRAM = "tests.runtime.toy_program"
KILLED = f"""
import os, socket
from paceline.runtime.fork_server import ForkServer
server = ForkServer({PROGRAM!r})
ours, theirs = socket.socketpair()
print(server.fork_now(["0"], theirs.fileno(), 2).pid, server._process.pid, flush=True)
theirs.close()
assert b"prepared" in ours.recv(1 << 16)
os.kill(os.getpid(), 9)
"""
# what would keep forked processes from using a GPU, or from going on: a look at it, or a thread that they don't have
LOOKS = """
import os, sys, torch
def looks(*_): raise AssertionError("asks for a GPU")
for name in ("_cuda_init", "_cuda_getDeviceCount"):
    setattr(torch._C, name, looks)
for name in ("init", "_lazy_init", "is_available", "device_count"):
    setattr(torch.cuda, name, looks)
from paceline.cli.worker import prepare
prepare()
assert "paceline.engine.kernels.layers" in sys.modules
from numba.np.ufunc import parallel
assert parallel._is_initialized and "multiprocessing" not in type(parallel._backend_init_process_lock).__module__
print(len(os.listdir("/proc/self/task")))
"""


@asynccontextmanager
async def process(server: ForkServer, word: str):
    """One that was asked for, and what it tells; until the end it waits."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        with theirs:
            forked = await server.fork([word], theirs.fileno())
        yield forked, json.loads(await asyncio.get_running_loop().sock_recv(ours, 1 << 16))


@pytest.fixture
def server():
    server = ForkServer(PROGRAM)
    yield server
    server.close()


async def test_processes_are_ours_and_begin_where_their_imports_end(server):
    async with process(server, "3") as (one, told), process(server, "fall") as (other, told_by_it):
        assert told["parent"] == told_by_it["parent"] == os.getpid()
        assert (told["pid"], told_by_it["pid"]) == (one.pid, other.pid) and one.pid != other.pid
        assert told["prepared"] == told_by_it["prepared"] and len(told["prepared"]) == 1  # once, by the server
        assert told["sum"] == told_by_it["sum"] == 9900  # in threads of its own
        assert Path(f"/proc/{one.pid}/cmdline").read_bytes().startswith(f"{PROGRAM} 3 ".encode())  # what `ps` shows
        assert one.returncode is None
    assert await asyncio.wait_for(one.ended(), 10) == 3
    assert await asyncio.wait_for(other.ended(), 10) == -signal.SIGUSR2
    other.kill()  # it is gone: nobody else is hit


async def test_a_server_that_is_gone_is_replaced_and_its_processes_stay(server):
    async with process(server, "0") as (one, told):
        os.kill(told["prepared"][0], signal.SIGKILL)  # which may be seen when it is asked already
        async with process(server, "0") as (other, told_by_it):
            assert told_by_it["prepared"] != told["prepared"] and one.returncode is None
            other.kill()
            assert await asyncio.wait_for(other.ended(), 10) == -signal.SIGKILL
    assert await asyncio.wait_for(one.ended(), 10) == 0


async def test_what_lies_where_the_user_is_is_not_imported(tmp_path, monkeypatch):
    """A checkpoint, say, with a file that is called as a library is."""
    for name in ("json", "random", "torch", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    server = ForkServer(PROGRAM)
    async with process(server, "3") as (one, told):
        assert told["sum"] == 9900
    assert await asyncio.wait_for(one.ended(), 10) == 3
    server.close()
    template = ChatTemplate("fine")
    assert await template.render() == "fine"
    await template.helper.close()


async def test_a_program_that_cannot_be_imported_is_an_error():
    with pytest.raises(OSError, match="tests.runtime.no_program cannot be imported"):
        async with process(ForkServer("tests.runtime.no_program"), "0"):
            pass


async def test_all_who_wait_at_a_server_that_is_killed_are_served_by_the_next_one(server):
    async with process(server, "0") as (_, told), AsyncExitStack() as stack:
        server._process.send_signal(signal.SIGSTOP)
        waiting = [asyncio.create_task(stack.enter_async_context(process(server, "0"))) for _ in range(4)]
        await asyncio.sleep(0.1)
        server._process.kill()
        others = await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert {tuple(one["prepared"]) for _, one in others} == {(server._process.pid,)} != {tuple(told["prepared"])}
    assert [await asyncio.wait_for(forked.ended(), 10) for forked, _ in others] == [0] * 4


async def test_a_server_that_hangs_is_replaced(server, monkeypatch):
    monkeypatch.setattr(fork_server, "AGAIN_S", 1.0)
    async with process(server, "0"):
        hangs = server._process
        hangs.send_signal(signal.SIGSTOP)
        async with process(server, "0"):
            assert server._process is not hangs and hangs.returncode == -signal.SIGKILL


def test_a_server_ends_with_who_started_it():
    """Who is killed has no time to end anything."""
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in map(int, done.stdout.split()):
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            assert select.select([descriptor], [], [], 60)[0]
            os.close(descriptor)


def test_what_engines_import_can_be_forked():
    command, environment = [sys.executable, "-c", LOOKS], os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # as it has there
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr
