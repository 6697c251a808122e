"""A worker of a shape that is measured: it loads its part of a model and runs the steps that it is told. A program of
`runtime.fork_server`, with the group's options in JSON and the descriptor of a socket.

Lines of JSON. First it says {"weight_bytes": N, "working_bytes": N} or {"error": TEXT}; then to each
[[[start, length, emits], ...], runs] what the runs took in this worker, in seconds, without waiting for other stages.
"""

import json
import socket

import msgspec

from paceline.cli import worker
from paceline.cli.worker import GroupOptions, loads

prepare = worker.prepare


def main(arguments: list[str]) -> None:
    group = msgspec.json.decode(arguments[0], type=GroupOptions)
    with socket.socket(fileno=int(arguments[1])) as connection, connection.makefile("rw") as lines:

        def say(what: object) -> None:
            print(json.dumps(what), file=lines, flush=True)

        try:
            engine = loads(group)[0](lambda done, total: None)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            say({"error": str(error) or type(error).__name__})
            return
        from paceline.engine.profiler import Bench

        bench = Bench(engine)
        say({"weight_bytes": engine.info.weight_bytes, "working_bytes": engine.info.working_bytes})
        for line in lines:
            slices, runs = json.loads(line)
            say([bench.once(slices) for _ in range(runs)])
