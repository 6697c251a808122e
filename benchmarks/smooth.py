"""Time between tokens at the clients of a server that drafts: without drafts, as steps yield them, and evenly.

A dialled pair behind a real port, drafted for as it pays. So many clients each stream one completion after the other,
of 64 to 256 tokens, so that prompts come while others decode. The ways are keys of the request, and take turns of a few
seconds on one server, in random order: what comes behind something else is a few per cent slower or faster by itself.
Two of them are without drafts, to show what two equal ones differ by. A gap is that between two tokens as a client
reads them; tokens of one message have none between them.
"""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import median, pvariance

from safetensors.torch import load_file, save_file

from benchmarks.dialled import VOCABULARY, pair
from benchmarks.http_streams import wait_ready

PORT, BLOCKS = 8765, 1024
PROMPT, OUTPUT = 64, (64, 256)  # tokens
CASES = ["small"]
EPS = {0.3: 0.23, 0.6: 0.106, 0.8: 0.049, 0.95: 0.008}  # of the dial, for about so much acceptance
LOADS = (1, 2, 4, 8, 16, 32)
WAYS = {"none": {"enabled": False}, "none again": {"enabled": False}, "at once": {"smooth": False}, "evenly": {}}
TURNS, WARM_S = 5, 2.0


def dialled(shape: str, eps: float) -> tuple[Path, Path]:
    """Target and draft, the dial turned in the target's file."""
    target, draft = pair(shape, 1)
    turned = target.with_name(f"{target.name}-{eps}")
    if not turned.exists():
        turned.mkdir()
        for file in target.iterdir():
            (turned / file.name).write_bytes(file.read_bytes())
        tensors = load_file(target / "model.safetensors")
        for name, tensor in tensors.items():
            if re.search(r"layers\.[1-9]\d*\..*(o_proj|down_proj)", name):
                tensor *= eps
        save_file(tensors, turned / "model.safetensors", metadata={"format": "pt"})
    return turned, draft


@contextmanager
def served(shape: str, eps: float) -> Iterator[None]:
    target, draft = dialled(shape, eps)
    fleet = target / "fleet.yaml"
    drafter = {"drafter": str(draft), "max_draft_tokens": 8}
    fleet.write_text(json.dumps({"models": [{"name": "m", "source": str(target), "speculation": drafter}]}))
    command = ["-m", "paceline.cli.main", "serve", str(fleet), "--port", str(PORT), "--num-blocks", str(BLOCKS)]
    server = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
    try:
        wait_ready(server, minutes=6)  # a profile of the model is made first
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


class Answer:
    """When a request was sent and when its tokens came, in seconds; `seed` draws it."""

    def __init__(self, way: str, seed: str) -> None:
        random = Random(seed)
        # not the same by any way: nothing comes from the prefix cache
        prompt = [300 + list(WAYS).index(way), *random.choices(range(300, VOCABULARY), k=PROMPT - 1)]
        self.length = random.randint(*OUTPUT)
        self.body = json.dumps({
            "model": "m", "prompt": prompt, "max_tokens": self.length, "ignore_eos": True, "logprobs": 0,
            "stream": True, "speculation": WAYS[way],
        }).encode()  # fmt: skip
        self.begin, self.times = 0.0, list[float]()

    async def read(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(self.body)}\r\n"
            self.begin = time.perf_counter()
            writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + self.body)
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    tokens = [
                        len(one["logprobs"]["tokens"]) for one in json.loads(line[6:])["choices"] if one["logprobs"]
                    ]
                    self.times += [time.perf_counter()] * sum(tokens)
            assert len(self.times) == self.length, f"{len(self.times)} of {self.length} tokens"
        finally:
            writer.close()


async def turn(way: str, clients: int, seconds: float, seed: str) -> list[Answer]:
    """What so many clients have after so long, the unfinished too; all ways are asked for the same."""
    answers: list[Answer] = []

    async def client(number: int) -> None:
        for n in count():
            answers.append(Answer(way, f"{seed}/{number}/{n}"))
            await answers[-1].read()

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if not task.cancel():
            raise task.exception() or AssertionError
    await asyncio.wait(tasks)
    await asyncio.sleep(0.2)  # the server hears of it
    return answers


def gaps_of(answers: list[Answer]) -> list[float]:
    return sorted(b - a for one in answers for a, b in pairwise(one.times))


def p99(turns: list[list[Answer]]) -> float:
    gaps = gaps_of([one for some in turns for one in some])
    return gaps[int(0.99 * len(gaps))]


def rate(turns: list[list[Answer]]) -> float:
    """Tokens a turn."""
    return sum(len(one.times) for some in turns for one in some) / len(turns)


def over(some: list[list[Answer]], none: list[list[Answer]], of: Callable[[list[list[Answer]]], float]) -> list[float]:
    """The ratio of two ways and its standard error, by leaving out each turn of both (a jackknife)."""
    left = [of(some[:i] + some[i + 1 :]) / of(none[:i] + none[i + 1 :]) for i in range(len(some))]
    error = math.sqrt((len(left) - 1) * pvariance(left))
    return [round(of(some) / of(none), 3), round(error, 3)]


def figures(turns: list[list[Answer]], none: list[list[Answer]], turn_s: float) -> dict:
    answers = [one for some in turns for one in some]
    gaps = gaps_of(answers)
    return {
        "tokens_s": round(rate(turns) / turn_s, 1),
        "tokens_s_over_none": over(turns, none, rate),
        "p50_gap_ms": round(1e3 * median(gaps), 1),
        "p99_gap_ms": round(1e3 * p99(turns), 1),
        "p99_over_none": over(turns, none, p99),
        "p999_gap_ms": round(1e3 * gaps[int(0.999 * len(gaps))], 1),
        "first_ms": round(1e3 * median(one.times[0] - one.begin for one in answers if one.times), 1),
    }


def drafted() -> tuple[float, float]:
    """First tokens of drafts, and how many of them were emitted, ever."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics").read().decode()
    found = (
        re.findall(rf'^paceline_spec_decode_{name}_tokens_per_pos_total\{{.*position="0".*\}} (\S+)$', text, re.M)
        for name in ("num_draft", "num_accepted")
    )
    tried, kept = (sum(map(float, some)) for some in found)
    return tried, kept


def run(shape: str) -> dict:
    os.nice(10 - os.nice(0))
    rows = []
    for dialled_to, eps in EPS.items():
        with served(shape, eps):
            for load in LOADS:
                turn_s = 2.0 + load / 8  # some answers are whole
                got, before = defaultdict[str, list[list[Answer]]](list), drafted()
                for n in range(TURNS + 1):
                    seed = f"{eps}/{load}/{n}"
                    for way in Random(seed).sample(list(WAYS), len(WAYS)):
                        some = asyncio.run(turn(way, load, turn_s if n else WARM_S, seed))
                        got[way] += [some] if n else []
                tried, kept = (b - a for a, b in zip(before, drafted(), strict=True))
                row: dict = {
                    "dialled": dialled_to,
                    "requests": load,
                    "accepted": round(kept / max(tried, 1), 3),
                    "drafts": int(tried),
                }
                rows.append(row | {way: figures(got[way], got["none"], turn_s) for way in WAYS})
                print(f"  {rows[-1]}", flush=True)
    return {"rows": rows}
