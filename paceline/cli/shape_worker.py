"""A worker of a shape that is measured: it loads its part of a model and runs the steps that it is told.

python -m paceline.cli.shape_worker GROUP_OPTIONS_JSON

Lines of JSON. First it says {"weight_bytes": N, "working_bytes": N} or {"error": TEXT}; then to each
[[[start, length, emits], ...], runs] what the runs took in this worker, in seconds, without waiting for other stages.
"""

import json
import sys

import msgspec

from paceline.cli.worker import GroupOptions, loads


def main(arguments: list[str]) -> int:
    group = msgspec.json.decode(arguments[0], type=GroupOptions)
    try:
        engine = loads(group)[0](lambda done, total: None)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        say({"error": str(error) or type(error).__name__})
        return 1
    from paceline.engine.profiler import Bench

    bench = Bench(engine)
    say({"weight_bytes": engine.info.weight_bytes, "working_bytes": engine.info.working_bytes})
    for line in sys.stdin:
        slices, runs = json.loads(line)
        say([bench.once(slices) for _ in range(runs)])
    return 0


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
