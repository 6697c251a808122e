"""Entry point of a worker process: joins the engine to the runtime's loop. Started by the front end, not by people.

python -m paceline.cli.worker OPTIONS_JSON DESCRIPTOR
"""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.core.work import Engine
from paceline.runtime.worker import serve


class WorkerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker loads and the limits it plans its memory for. Bytes and tokens."""

    path: str
    max_batch_tokens: int
    max_batch: int
    device: str = "cpu"
    memory: int | None = None
    num_blocks: int | None = None
    block_size: int = 16
    context: int | None = None
    threads: int | None = None
    quantization: str = "none"
    drafter: str = "ngram"  # `DrafterName`; of requests that are to have drafts
    early_exit_layers: int | None = None

    def command(self, num_blocks: int | None) -> list[str]:
        """Arguments to the Python interpreter; `num_blocks` as an earlier worker of the same model had."""
        options = self if num_blocks is None else msgspec.structs.replace(self, num_blocks=num_blocks)
        return ["-m", "paceline.cli.worker", msgspec.json.encode(options).decode()]


def main(arguments: list[str]) -> int:
    options = msgspec.json.decode(arguments[0], type=WorkerOptions)

    def load(progress: Callable[[int, int], None]) -> Engine:
        from paceline.engine.load import load_engine  # torch takes a second: heartbeats go by then

        fields = {name: getattr(options, name) for name in options.__struct_fields__ if name != "path"}
        return load_engine(Path(options.path), progress=progress, **fields)

    return serve(int(arguments[1]), load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
