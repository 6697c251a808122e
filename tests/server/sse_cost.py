"""Measures what a streamed token costs the front end: `python -m tests.server.sse_cost` prints microseconds of CPU.

A real server (uvloop, httptools) and 32 streaming clients in another process. The fake engine pushes one token into
every stream and goes on when all are written: one chunk per sequence and step. The kernel's part of a send is included.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import uvloop

from paceline.core.work import SliceOutput
from paceline.server.serve import bind, serve
from tests.server.conftest import build, free_port, make_tokenizer

STREAMS = 32
STEPS = 220


def client(port: int, body: str) -> None:
    """Opens all streams, reads until they end, and checks that every token came in its own chunk."""
    socks = []
    request = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    for _ in range(STREAMS):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(f"{request}content-length: {len(body)}\r\n\r\n{body}".encode())
        socks.append(sock)
    frames = 0
    for sock in socks:
        text = b""
        while data := sock.recv(1 << 20):
            text += data
        frames += text.count(b"data: ")
    if frames < STREAMS * STEPS:
        sys.exit(f"only {frames} chunks came")


async def measure(extra: str) -> tuple[float, float]:
    """Microseconds of CPU per chunk: in the sinks, and in all."""
    server = build(make_tokenizer())
    fleet, port = server.fleet, free_port()
    fleet.paused = True
    fleet.script = server.tokenizer.encode("the quick brown fox jumps over the lazy dog", False)
    task = asyncio.create_task(serve(server.app, fleet, bind("127.0.0.1", port)))
    while not await asyncio.to_thread(_listening, port):
        await asyncio.sleep(0.01)
    body = f'{{"prompt":"hello","max_tokens":{STEPS},"stream":true{extra}}}'
    child = subprocess.Popen([sys.executable, "-m", "tests.server.sse_cost", str(port), body])
    while len(fleet.running) < STREAMS:
        await asyncio.sleep(0.01)
    fleet._task.cancel()
    await asyncio.sleep(0.2)
    sequences = list(fleet.running.values())
    fleet.running.clear()
    sinks = 0.0
    tokens = [[fleet.token(s.params, i) for i in range(STEPS)] for s in sequences]
    began = time.process_time()
    for step in range(STEPS):
        finish = "length" if step == STEPS - 1 else None
        start = time.perf_counter()
        for seq, ids in zip(sequences, tokens, strict=True):
            lps = [fleet.logprob(ids[step], seq.params.logprobs)] if seq.params.logprobs is not None else []
            seq.sink.push(SliceOutput([ids[step]], lps), finish)
        sinks += time.perf_counter() - start
        for _ in range(4):
            await asyncio.sleep(0)
    total = time.process_time() - began
    assert await asyncio.to_thread(child.wait) == 0
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    return sinks / (STREAMS * STEPS) * 1e6, total / (STREAMS * STEPS) * 1e6


def _listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    if len(sys.argv) == 3:
        client(int(sys.argv[1]), sys.argv[2])
        return
    for name, extra in (
        ("plain", ""),
        ("4 stop strings", ',"stop":["zzzz","yyyy","\\n\\n\\n","###"]'),
        ("logprobs 5", ',"logprobs":5'),
    ):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sinks, total = runner.run(measure(extra))
        print(f"{name:16} sinks {sinks:5.1f} us, with JSON and send {total:5.1f} us per sequence and step")


if __name__ == "__main__":
    main()
