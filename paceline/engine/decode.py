"""Steps of decodes and verifications alone, as one call of compiled code: the CPU's counterpart of CUDA graphs.

Layers leave nothing of Python's in a cache: to plan a step, to ask for its parts and to draw from what they yield took
1.2 ms beside 6 ms of passes over weights, and three to five times what the same takes in a loop of its own.
"""

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engine.compiling import one_process_at_a_time
from paceline.engine.job import Job
from paceline.engine.kv_cache import KVCache
from paceline.engine.linear import TiledLinear, kernels
from paceline.engine.load_plan import LOGIT_ROWS
from paceline.engine.model import Decoder
from paceline.engine.rope import Rotations


@cache
def _compiled() -> Any:
    """Its kernel, compiled, or read from where Numba keeps it, when it is first asked for; None on processors that it
    cannot run on."""
    try:
        with one_process_at_a_time():
            from paceline.engine import decode_kernel
    except (ImportError, ValueError):  # as in `linear`
        return None
    return decode_kernel.run


class DecodePass:
    """Of a whole model, over its cache."""

    def __init__(self, decoder: Decoder, cache: KVCache, progress: np.ndarray) -> None:
        """`progress[0]` counts layers."""
        self.decoder, self.progress, config = decoder, progress, decoder.config
        self.head = np.array([decoder.norm.weight.data_ptr(), *decoder.head.addresses], np.int64)
        self.layers, self.shape = decoder.lines(cache)
        self.windows = np.array(sorted(window or 0 for window in set(config.windows)), np.int64)
        self.group, self.turns = config.heads // config.kv_heads, decoder.rotations.up_to(1)
        queries, pad = config.heads * config.head_dim, kernels.LINE // 4
        # floats of a row: its turns, where it is written to, heads, what they attend to, between the linear layers
        self.widths = (
            config.head_dim, 2 * config.kv_heads, queries + 2 * config.kv_heads * config.head_dim, queries + pad,
            config.intermediate + pad,
        )  # fmt: skip
        self.widest = max(config.hidden, config.intermediate, queries)
        self.room, self.last = 0, config.vocab_size

    @staticmethod
    def of(decoder: Decoder, cache: Any, progress: np.ndarray) -> "DecodePass | None":
        """None: its steps have to be asked for part by part."""
        whole = decoder.embedding is not None and isinstance(decoder.head, TiledLinear) and decoder.peers is None
        if decoder.device != "cpu" or not whole or decoder.addresses is None or not decoder.layers:
            return None
        return DecodePass(decoder, cache, progress) if _compiled() else None

    def takes(self, jobs: Seq[Job]) -> bool:
        """Whether all of these are single tokens, and drafts behind them, that somebody wants the next tokens of."""
        rows = 0
        for job in jobs:
            span = job.span
            rows += span.length
            if span.length != 1 + len(job.draft) or not job.work.emits or span.read is None or job.error:
                return False
            if span.start + span.length > Rotations.KEPT:
                return False
        return 0 < rows <= LOGIT_ROWS

    def __call__(self, jobs: Seq[Job], draws: bool) -> tuple[Tensor, list[int]]:
        """Logits [rows, vocabulary], and if wanted what is drawn from each row with the noise of its position, -1 where
        there is no distribution. A job's rows are those of its last token and of its drafts."""
        slices, ids, streams, places, numbers = list[Any](), list[int](), list[int](), list[int](), list[Any]()
        end = most = 0
        for job in jobs:
            sequence, span, state = job.sequence, job.span, job.sequence.state
            job.first_row = len(ids)
            slices.append((span.start, span.length, sequence.blocks.buffer_info()[0], len(sequence.blocks), len(ids)))
            ids += sequence.tokens[span.start :]
            ids += job.draft
            end, most = max(end, span.start + span.length), max(most, span.length)
            if draws:
                streams += [state.stream] * span.length
                places += range(span.start + 1, span.start + span.length + 1)
                numbers += [state.numbers] * span.length
        rows, config, threads = len(ids), self.decoder.config, kernels.num_threads()
        if rows > self.room:
            self._grow(rows)
        if end > len(self.turns):
            self.turns = self.decoder.rotations.up_to(end)
        if most > 1:
            most = min(most, kernels.most_of_run(self.group, end), -(-rows * config.kv_heads // threads))
        x, logits = self.decoder.embedding.rows(ids), torch.empty(rows, self.last)
        space, own_space = kernels.spaces(rows, self.widest, threads)
        self.buffers[0], self.buffers[kernels.SPACE] = x.data_ptr(), kernels.workspace(space)
        drawn = np.empty(len(places), np.int64)
        _compiled()(
            threads, config.norm_eps, self.layers, self.shape, self.windows, np.array(slices), most, self.buffers,
            own_space, self.turns, self.head, logits.numpy(), np.array(streams, np.uint64), np.array(places, np.int64),
            np.array(numbers, np.float64).reshape(-1, 4), drawn,
        )  # fmt: skip
        return logits, drawn.tolist()

    def _grow(self, rows: int) -> None:
        self.room, self.memory = rows, [torch.empty(rows, width) for width in self.widths]
        self.buffers = np.array([0, *(one.data_ptr() for one in self.memory), 0, self.progress.ctypes.data])
