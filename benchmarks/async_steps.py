"""Streams of a small model behind a server on one GPU: steps composed before the last one's tokens are known, and not.

Both servers are up and take turns, each with the same requests. The clients are one process of plain sockets.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from statistics import median

import numpy as np
import torch

from benchmarks.checkpoints import checkpoint
from benchmarks.http_streams import ready

CASES = ["llama-3.2-1b", "small"]
DEVICE, DTYPE = "cuda", "bf16"
STREAMS, TURNS = (1, 8, 32, 128), 3
PROMPT, OUTPUT = 512, 256
KINDS = {"async": "--async-scheduling", "in turn": "--no-async-scheduling"}
BLOCKS = 128 * -(-(PROMPT + OUTPUT) // 16) + 1024


async def stream(port: int, model: str, prompt: list[int], temperature: float = 0.0) -> list[float]:
    """When each token of a completion came, in seconds."""
    asked = {"max_tokens": OUTPUT, "temperature": temperature, "ignore_eos": True, "stream": True}
    body = json.dumps({"model": model, "prompt": prompt, **asked}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
    times, done = list[float](), False
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
        done = done or line.startswith(b"data: [DONE]")
    writer.close()
    assert done, "the stream broke off"
    return times


async def streams(port: int, model: str, prompts: list[list[int]], temperature: float = 0.0) -> dict[str, float]:
    """What so many at once get."""
    begin = time.perf_counter()
    every = await asyncio.gather(*(stream(port, model, prompt, temperature) for prompt in prompts))
    end = max(times[-1] for times in every)
    gaps = sorted(later - earlier for times in every for earlier, later in pairwise(times))
    firsts = [times[0] - begin for times in every]
    return {
        "tokens_s": len(prompts) * OUTPUT / (end - begin),
        "sum_of_tokens_s": sum(OUTPUT / (times[-1] - begin) for times in every),  # the last one's end does not decide
        "decoding_tokens_s": sum(len(times) - 1 for times in every) / (end - median(times[0] for times in every)),
        "p50_tbt_ms": 1e3 * median(gaps),
        "p99_tbt_ms": 1e3 * gaps[int(0.99 * len(gaps))],
        "mean_ttft_ms": 1e3 * sum(firsts) / len(firsts),
    }


def run(model: str) -> dict:
    path = str(checkpoint(model, DTYPE))
    command = [sys.executable, "-m", "paceline.cli.main", "serve", path, "--port", "0", "--device", DEVICE]
    command += ["--num-blocks", str(BLOCKS), "--context", "2048", "--served-model-name", "m", "--max-batch", "128"]
    servers = {
        kind: subprocess.Popen([*command, option], stderr=subprocess.PIPE, text=True) for kind, option in KINDS.items()
    }
    try:
        ports = {kind: ready(server) for kind, server in servers.items()}
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        return {"gpu": gpu} | measure(ports)
    finally:
        for server in servers.values():
            server.send_signal(signal.SIGTERM)
        for server in servers.values():
            server.wait(30)


def measure(ports: dict[str, int]) -> dict:
    """Medians over turns, by the number of streams."""
    rng, found = np.random.default_rng(1), {kind: {} for kind in KINDS}
    for port in ports.values():  # what is compiled or set up by a first request
        asyncio.run(streams(port, "m", [[7] * 20] * 4))
    for count in STREAMS:
        turns = {kind: [] for kind in KINDS}
        for turn in range(TURNS):
            prompts = rng.integers(300, 8000, (count, PROMPT)).tolist()
            for kind in list(KINDS)[:: -1 if turn % 2 else 1]:
                turns[kind].append(asyncio.run(streams(ports[kind], "m", prompts)))
        for kind, some in turns.items():
            found[kind][str(count)] = {name: round(median(one[name] for one in some), 3) for name in some[0]}
        print(f"  {count} streams: " + ", ".join(f"{kind} {found[kind][str(count)]}" for kind in KINDS), flush=True)
    return {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "device": DEVICE, "dtype": DTYPE} | found
