"""Signals and connections: draining, leaving at once, and heads of requests that never end."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from paceline.server import serve as module
from paceline.server.serve import bind, serve, url_of
from tests.server.conftest import build, make_tokenizer, wait_for
from tests.server.test_http import check_envelope
from tests.server.test_streaming import events

ROOT = Path(__file__).resolve().parents[2]
LONG = {"prompt": "hello", "max_tokens": 60, "stream": True}


class Process:
    """`drain_server`, started, with a client."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.server.drain_server"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.process.stderr.read() if self.process.stderr else ""
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def process() -> Iterator[Process]:
    started = Process()
    yield started
    started.client.close()
    if started.process.poll() is None:
        started.process.kill()
        started.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(process: Process, number: signal.Signals) -> None:
    """Not ready at once, new requests 503, the running stream complete, then exit 0."""
    assert process.client.get("/ready").status_code == 200
    with process.client.stream("POST", "/v1/completions", json={**LONG, "n": 2}) as stream:
        pieces = stream.iter_text()
        text = next(pieces)
        process.process.send_signal(number)
        with httpx.Client(base_url=process.url) as other:  # a new connection: the port is still open
            wait_for(lambda: other.get("/ready").status_code == 503)
            refused = other.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert other.get("/health").status_code == 200
        text += "".join(pieces)
    found = events(text)
    assert found[-1] == "[DONE]" and sum('"finish_reason":"length"' in event for event in found) == 2
    assert process.end() == (0, "drained\n", "")


def test_a_second_signal_leaves_at_once(process: Process) -> None:
    with process.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 200}) as stream:
        pieces = stream.iter_text()
        text = next(pieces)
        process.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=process.url) as other:
            wait_for(lambda: other.get("/ready").status_code == 503)
        process.process.send_signal(signal.SIGTERM)
        text += "".join(pieces)
    assert "shutting down" in events(text)[-1] and "[DONE]" not in text
    assert process.end() == (1, "forced\n", "")


def test_an_idle_server_leaves_promptly(process: Process) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert process.client.post("/v1/chat/completions", json=chat).status_code == 200  # a template helper is running
    process.process.terminate()
    assert process.end() == (0, "drained\n", "")


def test_an_address_in_use_is_an_error() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError):
            bind("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        module._share(sock, True)
        sock.listen()
        with pytest.raises(OSError):
            bind("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            sock.accept()[0].close()
            assert client.recv(1) == b""
    with bind("127.0.0.1", port) as sock:  # while what is left of the connection times out
        with pytest.raises(OSError):
            bind("127.0.0.1", port)
        module._share(sock, True)
        sock.listen()


def exchange(url: str, data: bytes) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as sock:
        try:
            sock.sendall(data)
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
        except ConnectionError:
            pass
        return answer


def test_heads_are_bounded(process: Process) -> None:
    line = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    many = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(100))
    endless = b"x-long: " + b"y" * 400_000
    for data in (line + many + b"\r\n", line + endless, b"GET /" + b"y" * 400_000, b"\x16\x03\x01 nonsense\r\n\r\n"):
        answer = exchange(process.url, data)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    body = exchange(process.url, b"nonsense\r\n\r\n").partition(b"\r\n\r\n")[2]
    check_envelope(httpx.Response(400, content=body).json())
    assert process.client.get("/health").status_code == 200


async def test_a_client_that_leaves_a_request_sent_in_advance_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a head that comes late, behind an answer under way, does not end that; empty lines keep no connection."""
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.1)
    server = build(make_tokenizer(), step_s=0.02)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(server.app, server.fleet, bind("127.0.0.1", 0), on_started=started.set_result))
    parts = urlsplit(await started)
    body = b'{"prompt": [5], "max_tokens": %d, "stream": true, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    server.fleet.paused = True
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head % len(body % 200) + body % 200 + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    while not server.fleet.running:
        await asyncio.sleep(0.01)
    writer.close()
    async with asyncio.timeout(5):
        while server.fleet.running:
            await asyncio.sleep(0.01)
    server.fleet.paused = False
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head % len(body % 20) + body % 20 + b"GET /health HTTP/1.1\r\nHost:")
    answer = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)
    assert answer.count(b"data: ") > 15
    writer.close()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    writer.write(b"\r\n")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(serving, 10)


async def test_a_head_that_does_not_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.05)
    server = build(make_tokenizer())
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(server.app, server.fleet, bind("127.0.0.1", 0), on_started=started.set_result))
    parts = urlsplit(await started)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost:")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(100), 5)).startswith(b"HTTP/1.1 200")
    writer.close()
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(serving, 10)
