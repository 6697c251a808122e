"""32 concurrent streaming HTTP clients against the offline engine, and the time per step outside the model.

The clients are one process of plain sockets at a low priority, as if they were on another machine; server and offline
engine take turns on the same requests.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request

from benchmarks import workload
from benchmarks.checkpoints import checkpoint
from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline

CLIENTS, PROMPT, OUTPUT, ROUNDS = 32, 64, 48, 3
PORT, BLOCKS = 8765, 1024


async def client(path: str, prompt: list[int], model: str) -> int:
    """Streams one completion; returns its tokens."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    assert b" 200 " in answer.split(b"\r\n", 1)[0] and b"data: [DONE]" in answer, answer[:300]
    return int(re.search(rb'"completion_tokens":(\d+)', answer).group(1))


async def clients(prompts: list[list[int]], model: str) -> int:
    return sum(await asyncio.gather(*(client("/v1/completions", prompt, model) for prompt in prompts)))


def metrics() -> dict[str, float]:
    """Steps, and their seconds by part, ever."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics").read().decode()
    found = dict(re.findall(r'^paceline_step_seconds_total\{.*part="(\w+)"\} (\S+)$', text, re.M))
    found["steps"] = re.search(r"^paceline_steps_total\S* (\S+)$", text, re.M).group(1)
    return {name: float(value) for name, value in found.items()}


def wait_ready(server: subprocess.Popen, minutes: int = 2) -> None:
    for _ in range(300 * minutes):
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready").status == 200:
                return
        except OSError:
            assert server.poll() is None, "the server ended"
            time.sleep(0.2)
    raise TimeoutError(f"the server is not ready after {minutes} minutes")


def ready(server: subprocess.Popen) -> int:
    """The port of a server that was to take a free one, as soon as it is ready; what it says later is passed on."""
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if found := re.search(r"ready in .* at http://\S+:(\d+)/v1", line):
            threading.Thread(target=shutil.copyfileobj, args=(server.stderr, sys.stderr), daemon=True).start()
            return int(found.group(1))
    raise SystemExit("the server does not start")


def run(model: str) -> dict:
    path = str(checkpoint(model))
    offline = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.http_streams", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
    )
    command = ["-m", "paceline.cli.main", "serve", path, "--port", str(PORT), "--num-blocks", str(BLOCKS)]
    server = subprocess.Popen([sys.executable, *command])
    try:
        assert offline.stdout.readline().strip() == "ready"
        wait_ready(server)
        os.nice(10 - os.nice(0))
        return measure(offline, model)
    finally:
        offline.stdin.close()
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        offline.wait(30)


def measure(offline: subprocess.Popen, model: str) -> dict:
    vocabulary = 32768
    rates = {"http": [], "offline": []}
    asyncio.run(clients([p[:8] for p in workload.prompts(vocabulary)], model))
    before = metrics()
    for turn in range(ROUNDS):
        offline.stdin.write("go\n")
        offline.stdin.flush()
        rates["offline"].append(CLIENTS * OUTPUT / float(offline.stdout.readline()))
        # other tokens in every round: nothing comes from the prefix cache
        prompts = [[(t + turn) % 7700 + 300 for t in p[:PROMPT]] for p in workload.prompts(vocabulary)][:CLIENTS]
        begin = time.perf_counter()
        tokens = asyncio.run(clients(prompts, model))
        rates["http"].append(tokens / (time.perf_counter() - begin))
        print(f"  round {turn}: offline {rates['offline'][-1]:.1f}, http {rates['http'][-1]:.1f} tokens/s", flush=True)
    parts = {key: value - before.get(key, 0.0) for key, value in metrics().items()}
    steps = parts.pop("steps")
    per_step = {part: round(1e6 * seconds / steps) for part, seconds in parts.items()}
    ratios = sorted(h / o for h, o in zip(rates["http"], rates["offline"], strict=True))
    return {
        "clients": CLIENTS,
        "tokens_s": {name: [round(r, 1) for r in values] for name, values in rates.items()},
        "ratio_median": round(ratios[len(ratios) // 2], 3),
        "steps": int(steps),
        "microseconds_per_step": per_step,
        "microseconds_outside_the_model": sum(value for part, value in per_step.items() if part != "forward"),
        "goal_microseconds": 1000 + 20 * CLIENTS,
    }


def offline_engine(path: str) -> None:
    """Runs the clients' requests without a server, once for every line on standard input; prints seconds."""
    runner = ModelRunner.load(path, max_batch_tokens=512, max_batch=256, num_blocks=BLOCKS)
    config = GroupConfig(scheduler=SchedulerConfig(max_batch=256, num_blocks=BLOCKS))
    prompts = [p[:PROMPT] for p in workload.prompts(runner.decoder.config.vocab_size)][:CLIENTS]
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        Offline(runner, config).generate(prompts, [workload.greedy(OUTPUT)] * CLIENTS)
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    offline_engine(sys.argv[1])
