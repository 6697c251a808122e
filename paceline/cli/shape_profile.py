"""What a model's steps take in a shape, stage by stage, measured with the engines that serve it.

Every worker is a process of its own with its part of the model, its threads and its peers, as in serving; only who
tells it what to run is another. A step runs several times in a row, so the stages of a pipeline work at the same time,
as they do under load. What a stage took is its own time, without waiting for the stage before.
"""

import json
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple, TextIO

import msgspec

from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Parallel
from paceline.engine.config import ModelConfig, ModelError
from paceline.engine.encoder_config import EncoderConfig, is_encoder
from paceline.runtime.fork_server import Forked, fork_server

SIDES = (1, 2, 4)  # tensor ranks that are tried
SETTLED = 0.02  # seconds of one step in a row
LEAST_ROUNDS, MOST_ROUNDS = 2, 12  # after a first one, which compiles kernels
MOST_RUNS = 16  # of a step in a row
SEED = 1

Slices = list[tuple[int, int, bool]]  # start, length, whether it yields a token
Stages = tuple[float, ...]  # seconds in each
Progress = Callable[[float, float], None]  # seconds gone, seconds in all


def shapes_of(path: Path, quantization: str, devices: int) -> list[Parallel]:
    """Those of at most so many devices that the model can be divided into; (1,1) first."""
    from paceline.engine.encoder import encoder_part
    from paceline.engine.parallel import Place, part_of

    config = EncoderConfig.load(path) if is_encoder(path) else ModelConfig.load(path)
    pipelines = [2**n for n in range(devices.bit_length())]
    found = []
    for shape in (Parallel(p, t) for p in pipelines for t in SIDES if p * t <= devices):
        try:
            if isinstance(config, EncoderConfig):
                encoder_part(config, Place(shape))
            else:
                part_of(config, Place(shape), quantization)
        except ModelError:
            continue
        found.append(shape)
    return found


class Worker(NamedTuple):
    process: Forked
    connection: socket.socket
    answers: TextIO


class Shape:
    """A model on the workers of one shape. Use as a context manager."""

    def __init__(self, options: WorkerOptions, parallel: Parallel) -> None:
        self.parallel = parallel
        self.weight_bytes: list[int] = []  # of each stage: a device's
        self.working_bytes = 0  # of a device, beside weights and KV: the process, and its largest step
        self._group = GroupOptions((options,), parallel)
        self._workers: list[Worker] = []

    def __enter__(self) -> "Shape":
        """Raises ValueError where the model cannot be loaded so, RuntimeError where a worker ends."""
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        meeting = f"file://{self._folder.name}/meeting" if self.parallel.devices > 1 else ""
        self._log = (Path(self._folder.name) / "log").open("w+")
        try:
            for number in range(self.parallel.devices):
                own = msgspec.structs.replace(self._group, number=number, meeting=meeting)
                arguments, log = [msgspec.json.encode(own).decode()], self._log.fileno()
                ours, theirs = socket.socketpair()
                with theirs:
                    process = fork_server("paceline.cli.shape_worker").fork_now(arguments, theirs.fileno(), log)
                self._workers.append(Worker(process, ours, ours.makefile("r")))
            told = self._answers()
            if errors := [one["error"] for one in told if "error" in one]:
                raise ValueError(f"{errors[0]} (in shape {self.parallel})")
            self.weight_bytes = [max(one["weight_bytes"] for one in stage) for stage in self._by_stage(told)]
            self.working_bytes = max(one["working_bytes"] for one in told)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
            worker.answers.close()
            worker.connection.close()
        self._log.close()
        self._folder.cleanup()

    def run(self, slices: Slices, runs: int) -> list[Stages]:
        """What each of so many runs in a row took."""
        line = json.dumps([slices, runs]) + "\n"
        for worker in self._workers:
            with suppress(OSError):  # it has ended, which its answer tells
                worker.connection.sendall(line.encode())
        ranks = (zip(*stage, strict=True) for stage in self._by_stage(self._answers()))
        return list(zip(*(map(max, stage) for stage in ranks), strict=True))

    def _by_stage(self, rows: list) -> list[list]:
        return [rows[at : at + self.parallel.tensor] for at in range(0, len(rows), self.parallel.tensor)]

    def _answers(self) -> list:
        """A line of each worker: all of them, for when one ends the others wait for it without end."""
        answers: dict[int, object] = {}
        with selectors.DefaultSelector() as waiting:
            for number, worker in enumerate(self._workers):
                waiting.register(worker.answers, selectors.EVENT_READ, number)
            while len(answers) < len(self._workers):
                for key, _ in waiting.select():
                    line = ""
                    with suppress(ConnectionResetError):  # it had not read all
                        line = key.fileobj.readline()
                    if not line:
                        self._log.seek(0)
                        last = (self._log.read().strip().splitlines() or ["it said nothing"])[-1]
                        raise RuntimeError(f"a worker in shape {self.parallel} ended while it was measured: {last}")
                    answers[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
        return [answers[number] for number in range(len(self._workers))]


def measure(jobs: Sequence[tuple[Shape, Slices]], seconds: float, progress: Progress) -> list[list[Stages]]:
    """Each job several times, spread over about so many seconds, in turns in a random order: the machine drifts.

    Of each job what its turns took; a turn is the median of a few runs in a row.
    """
    begin, rng, turns = time.perf_counter(), Random(SEED), [list[Stages]() for _ in jobs]
    runs = []
    for shape, slices in jobs:
        shape.run(slices, 1)
        first = max(shape.run(slices, 1)[0])
        least = 1 if shape.parallel.pipeline == 1 else 1 + shape.parallel.pipeline  # all stages are busy in between
        runs.append(max(least, min(MOST_RUNS, int(SETTLED / max(first, 1e-6)))))
        progress(min(seconds, time.perf_counter() - begin), seconds)
    for turn in range(MOST_ROUNDS):
        order = list(range(len(jobs)))
        rng.shuffle(order)
        for index in order:
            gone = time.perf_counter() - begin
            if turn >= LEAST_ROUNDS and gone > seconds:
                return turns
            shape, slices = jobs[index]
            some = shape.run(slices, runs[index])
            turns[index].append(tuple(map(median, zip(*some, strict=True))))
            progress(min(seconds, gone), seconds)
    return turns
