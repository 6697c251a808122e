"""What every engine's process does: one JSON line in, one out. Standard library only: each has its own environment.

`python -m benchmarks.peers.NAME CHECKPOINT PRECISION OPTIONS CACHE` loads and says `{"about": ...}`. Then each
`{"prompts": [[id, ...], ...], "outputs": [n, ...]}` is one run: all prompts at once, greedy, exactly so many tokens.
Its answer is `{"tokens": [[id, ...], ...], "times": [[seconds since they were handed in, ...], ...]}`, or
`{"cannot": reason}`.
"""

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

THREADS = 2


class Engine(Protocol):
    about: str  # the settings that were chosen, in words

    def run(self, prompts: list[list[int]], outputs: list[int]) -> "Tokens": ...


class Tokens:
    """The tokens of each request and when they came."""

    def __init__(self, requests: int) -> None:
        self.begin = time.perf_counter()
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self.times: list[list[float]] = [[] for _ in range(requests)]

    def add(self, request: int, ids: list[int], now: float | None = None) -> None:
        """`now`: `perf_counter` when they came."""
        elapsed = (now or time.perf_counter()) - self.begin
        self.tokens[request] += ids
        self.times[request] += [elapsed] * len(ids)


def converted(cache: Path, name: str, make: Callable[[Path], Any]) -> Path:
    """The checkpoint in an engine's own format: `make(path)` writes it once, whole or not at all."""
    path = cache / name
    if not path.exists():
        part = cache / f"{name}.part"
        if part.is_dir():
            shutil.rmtree(part)
        make(part)
        part.rename(path)
    return path


def serve(load: Callable[[Path, str, dict, Path], Engine]) -> None:
    """Answers until the input ends. What engines print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    checkpoint, precision, options, cache = sys.argv[1:]

    def attempt(call: Callable[[], dict]) -> bool:
        try:
            reply = call()
        except Exception as error:  # whatever it is, it is this engine's answer
            traceback.print_exc()
            reply = {"cannot": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        return "cannot" not in reply

    engine: Any = None

    def start() -> dict:
        nonlocal engine
        engine = load(Path(checkpoint), precision, json.loads(options), Path(cache))
        return {"about": engine.about}

    def answer(request: dict) -> dict:
        result = engine.run(request["prompts"], request["outputs"])
        counts = [len(tokens) for tokens in result.tokens]
        assert counts == request["outputs"], f"{counts} tokens instead of {request['outputs']}"
        return {"tokens": result.tokens, "times": result.times}

    if attempt(start):
        for line in sys.stdin:
            request = json.loads(line)
            attempt(lambda request=request: answer(request))
