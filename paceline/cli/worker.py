"""The program of a worker process: joins the engine to the runtime's loop. Started by the front end, not by people: by
its `runtime.fork_server`, or on another node as

python -m paceline.cli.worker OPTIONS_JSON DESCRIPTOR
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import msgspec

from paceline.cli.accelerators import VISIBLE, gpus
from paceline.cli.lasting import lasting
from paceline.core.cluster import Parallel
from paceline.core.work import Engine, EngineInfo
from paceline.runtime.worker import Load, serve
from paceline.runtime.workers import Seat


class WorkerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that a worker loads, and the limits it plans its memory for. Bytes and tokens."""

    path: str
    max_batch_tokens: int
    max_batch: int
    device: str = "cpu"  # or cuda: the only GPU that this worker sees
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    memory: int | None = None
    num_blocks: int | None = None
    most_blocks: int | None = None  # with those that the worker's other models lend it
    block_size: int = 16
    context: int | None = None
    threads: int | None = None
    quantization: str = "none"
    drafter: str = "ngram"  # `DrafterName`; of requests that are to have drafts
    early_exit_layers: int | None = None
    draft_quantization: str | None = None  # of a draft model; None: as its target
    share: float = 1.0  # of what memory is left for KV
    lends: bool = False  # what its part of the memory has left, to the other models of the worker


class GroupOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group's models and its shape, and which of its workers this one is."""

    models: tuple[WorkerOptions, ...]
    parallel: Parallel = Parallel()  # noqa: RUF009
    number: int = 0
    meeting: str = ""
    resident: tuple[bool, ...] = ()  # models that stay loaded; empty: all
    check: bool = True
    devices: tuple[int, ...] = ()  # of each worker the GPU, among those that are visible here; empty: as they are seen

    def command(self, seat: Seat) -> list[str]:
        """Arguments to the Python interpreter."""
        models = tuple(
            options if blocks is None else msgspec.structs.replace(options, num_blocks=blocks[0], most_blocks=blocks[1])
            for options, blocks in zip(self.models, seat.blocks, strict=True)
        )
        own = msgspec.structs.replace(
            self, models=models, number=seat.number, meeting=seat.meeting, resident=seat.resident, check=seat.check
        )
        return ["-m", "paceline.cli.worker", msgspec.json.encode(own).decode()]


def main(arguments: list[str]) -> None:
    group = msgspec.json.decode(arguments[0], type=GroupOptions)
    if group.devices:
        os.environ[VISIBLE] = gpus()[group.devices[group.number]]  # before torch looks
    serve(int(arguments[1]), loads(group), group.resident, group.check)


@cache
def prepare() -> None:
    """Imports what every engine needs: torch, Numba, kernels."""
    with lasting():
        from numba.np.ufunc import parallel

        # its own is shared with forks, and who is killed may hold it
        parallel._backend_init_process_lock = threading.RLock()
        import paceline.engine.load
        import paceline.engine.parallel  # noqa: F401


def loads(group: GroupOptions) -> list[Load]:
    """How each of the models is loaded, one after the other: with room left for the weights of those after it, and
    again with as many KV blocks as the first time."""
    peers, infos = None, dict[int, EngineInfo]()

    def load(index: int, options: WorkerOptions, progress: Callable[[int, int], None]) -> Engine:
        nonlocal peers
        prepare()  # where that was not done before, it takes seconds: heartbeats go by then
        from paceline.engine.load import load_engine, weight_bytes
        from paceline.engine.parallel import Peers, Place

        place = Place(group.parallel, group.number)
        if group.meeting and peers is None:
            peers = Peers(place, group.meeting, options.device)
        later = 0
        for other in group.models[index + 1 :]:
            with suppress(ValueError):  # it will say so itself
                later += weight_bytes(
                    Path(other.path), place, device=other.device, dtype=other.dtype, quantization=other.quantization,
                    drafter=other.drafter, early_exit_layers=other.early_exit_layers,
                    draft_quantization=other.draft_quantization,
                )  # fmt: skip
        fields = {name: getattr(options, name) for name in options.__struct_fields__ if name not in ("path", "lends")}
        if index in infos:
            fields["num_blocks"] = infos[index].num_blocks
        lent = sum(info.kv_bytes for info in infos.values() if info.block_bytes) if options.lends else None
        engine = load_engine(Path(options.path), progress=progress, peers=peers, reserve=later, lent=lent, **fields)
        infos[index] = engine.info
        return engine

    return [partial(load, index, options) for index, options in enumerate(group.models)]


if __name__ == "__main__":
    main(sys.argv[1:])
