"""Runs the application on a port, until a signal: then drains, and leaves when the last stream has ended."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from errno import EADDRNOTAVAIL

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.runtime.api import Fleet
from paceline.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 2**10  # of the request line and all headers
HEAD_SECONDS = 30.0  # for them to arrive
KEEP_ALIVE_SECONDS = 30
BACKLOG = 2048
FLUSH_SECONDS = 30  # for clients to take the last bytes, after the last token
FORCED_SECONDS = 2.0  # to leave after a second signal
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose heads are bounded in size and in time; faults of it are answered with our envelope."""

    _cycles: tuple[RequestResponseCycle, ...] = ()  # requests of this connection that have no whole answer yet
    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)
        for cycle in self._cycles:  # all that were sent in advance, too
            cycle.disconnected = True
            cycle.message_event.set()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser gives up; answered with 400

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        self._cycles = (*(one for one in self._cycles if not one.response_complete), self.cycle)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():  # one long line: the parser has called nobody
            self._head_bytes += len(data)
            if self._head_bytes > 2 * MAX_HEAD_BYTES:
                self.send_400_response("the head of the request is too large")
        if self._timer is None and not self._answers:  # nothing but empty lines: they have ended the wait for a head
            self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, msg, code="invalid_http").encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes = True, 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    @property
    def _answers(self) -> bool:
        """Requests are under way."""
        return not all(one.response_complete for one in self._cycles)

    def _late(self) -> None:
        if self._answers:  # a next request may wait for the end of this one
            self._timer = self.loop.call_later(HEAD_SECONDS, self._late)
        else:
            self.transport.close()

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """Leaves the signals to `serve`, which answers them before the socket is closed."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # noqa: ANN201
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket that alone has the address but does not listen yet: connections are refused. Port 0 is any free one.
    Raises OSError, for an empty host, too, by which the system means all addresses."""
    if not host:
        raise OSError(EADDRNOTAVAIL, "no address; 0.0.0.0 is all of them")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        try:
            sock.bind((host, port))
        except OSError:  # somebody has it, or had it and its connections have not timed out: those may stay
            _share(sock, True)
            sock.bind((host, port))
            _share(sock, False)
    except OSError:
        sock.close()
        raise
    return sock


def _share(sock: socket.socket, shares: bool) -> None:
    """Whether it has its address beside connections that have ended, and others that share it: asked at `bind` and at
    `listen`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shares)


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: FastAPI,
    fleet: Fleet,
    sock: socket.socket,
    *,
    on_started: Callable[[str], None] = lambda url: None,
) -> bool:
    """Serves until SIGTERM or SIGINT, then drains: new requests get 503 and /ready says so, running ones end.

    Returns True when all of them have ended, False when a second signal asked to leave at once. `on_started` is told
    the URL when connections are taken. Main thread only.
    """
    url = url_of(sock)
    _share(sock, True)
    server = _Server(_configure(app))
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            on_started(url)
        return await _until_drained(app, fleet, server, serving, signals)
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        sock.close()
        await app.state.api.close()


def _configure(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


async def _until_drained(
    app: FastAPI, fleet: Fleet, server: _Server, serving: asyncio.Task[None], signals: asyncio.Queue[signal.Signals]
) -> bool:
    if await _comes_first(serving, signals):
        await serving  # raises what ended it
        return True
    app.state.api.hurry()
    draining = asyncio.create_task(_drain(fleet, server, serving))
    if await _comes_first(draining, signals):
        await draining
        return True
    draining.cancel()
    app.state.api.abort("the server is shutting down at once")
    server.should_exit = True
    if not (await asyncio.wait({serving}, timeout=FORCED_SECONDS / 2))[0]:
        server.force_exit = True
        await asyncio.wait({serving}, timeout=FORCED_SECONDS / 2)
    return False


async def _drain(fleet: Fleet, server: _Server, serving: asyncio.Task[None]) -> None:
    await fleet.drain()
    server.should_exit = True
    await asyncio.shield(serving)


async def _comes_first(task: asyncio.Task[None], signals: asyncio.Queue[signal.Signals]) -> bool:
    """Waits for the end of `task` or for a signal; True when it is the task."""
    signalled = asyncio.create_task(signals.get())
    await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    return task.done()
