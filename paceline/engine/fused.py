"""A whole step as one call of compiled code, as CUDA graphs are on GPUs: from token ids to what is drawn, or
stays of drafts.

A pass over the weights leaves nothing of Python's in the caches: to plan a step, to ask for its parts and to draw from
what they yield takes three to five times what it does in a loop of its own, 1 ms of a 55M model's 7, 2 of its 37.
"""

from collections.abc import Sequence as Seq
from itertools import islice
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
from paceline.engine.verdict import to_judge

try:
    with one_process_at_a_time():
        from paceline.engine import fused_kernel
except (ImportError, ValueError):  # as in `linear`
    fused_kernel = None


KINDS = torch.float32, torch.bfloat16, torch.float16  # of a table, as `fused_kernel` counts them


class FusedStep:
    """Of a whole model, over its cache."""

    def __init__(self, decoder: Decoder, cache: KVCache, progress: np.ndarray) -> None:
        """`progress[0]` counts layers."""
        self.decoder, self.progress, config, table = decoder, progress, decoder.config, decoder.embedding.table
        self.source = np.array([*decoder.embedding.place, len(table), KINDS.index(table.dtype)])
        self.head = np.array([decoder.norm.weight.data_ptr(), *decoder.head.addresses], np.int64)
        self.layers, self.shape = decoder.lines(cache)
        self.windows = np.array(sorted(window or 0 for window in set(config.windows)), np.int64)
        self.turns = decoder.rotations.up_to(1)
        queries, pad = config.heads * config.head_dim, kernels.LINE // 4
        # floats of a row: hidden state, turns, where it is written to, heads, what they see; between linear layers
        self.widths = (
            config.hidden, config.head_dim, 2 * config.kv_heads, queries + 2 * config.kv_heads * config.head_dim,
            queries + pad,
        )  # fmt: skip
        self.inside, self.widest = config.intermediate + pad, max(config.hidden, config.intermediate, queries)
        self.most = 2 * LOGIT_ROWS  # of logits: what is planned for so many and a copy
        self.nothing = to_judge([], config.vocab_size, True)
        # those of wider steps are their own
        self.kept, self.addresses = self._memory(LOGIT_ROWS, kernels.rows_inside(LOGIT_ROWS, 1))

    @staticmethod
    def of(decoder: Decoder, cache: Any, progress: np.ndarray) -> "FusedStep | None":
        """None: its steps have to be asked for part by part."""
        whole = decoder.embedding is not None and isinstance(decoder.head, TiledLinear) and decoder.peers is None
        if decoder.device != "cpu" or not whole or decoder.addresses is None or not decoder.layers:
            return None
        return FusedStep(decoder, cache, progress) if fused_kernel else None

    def takes(self, jobs: Seq[Job]) -> bool:
        """Whether it can be done: not where someone asks about all of a prompt, a sequence has a fault or is longer
        than what is kept of rotations, or there are more logits than are made at a time."""
        rows = 0
        for job in jobs:
            span = job.span
            if job.error or span.read is None or span.start + span.length > Rotations.KEPT:
                return False
            rows += span.read * (1 + job.sequence.state.penalties.active)  # of those a copy may be made
        return len(jobs) > 0 and rows <= self.most

    def __call__(self, jobs: Seq[Job], block: bool) -> tuple[Tensor, list[tuple[Job, list[int]]]]:
        """Logits [rows, vocabulary]: a job that emits has those of its last token and of its drafts; and of such jobs,
        but for those whose rows penalties change, what is drawn from each row, or stays of a draft with the token
        behind it (judged as a block, or token by token). It is -1 where there is no distribution.
        """
        slices, ids, draws, drawn_from = list[Any](), list[int](), list[int](), list[Job]()
        places, streams, numbers, judged = list[int](), list[int](), list[Any](), list[Job]()
        end = read = 0
        for job in jobs:
            sequence, span, blocks, stop = job.sequence, job.span, job.sequence.blocks, job.span.start + job.span.length
            job.first_row = read
            alone = span.length == 1 or span.drafted
            slices.append((span.start, span.length, *blocks.buffer_info(), len(ids), alone, span.read))
            ids += sequence.tokens[span.start : stop]
            ids += job.draft
            if not span.read or sequence.state.penalties.active:
                pass
            elif job.draft_rows:
                judged.append(job)
            else:
                drawn_from.append(job)
                draws += range(read, read + span.read)
                places += range(stop - span.read + 1, stop + 1)
                streams += [sequence.state.stream] * span.read
                numbers += [sequence.state.numbers] * span.read
            end, read = max(end, stop), read + span.read
        rows, config, threads = len(ids), self.decoder.config, kernels.num_threads()
        apart, inside = kernels.apart(rows, threads), kernels.rows_inside(rows, threads)
        narrow = rows <= LOGIT_ROWS and not apart
        memory, addresses = (self.kept, self.addresses.copy()) if narrow else self._memory(rows, inside)
        if end > len(self.turns):
            self.turns = self.decoder.rotations.up_to(end)
        logits = torch.empty(read, config.vocab_size)
        space, own_space = kernels.spaces(rows, self.widest, threads, apart)
        addresses[kernels.SPACE] = kernels.workspace(space)
        drawn = np.empty(len(draws), np.int64)
        asked = to_judge(judged, config.vocab_size, block) if judged else self.nothing
        known = fused_kernel.run(
            threads, self.source, np.array(ids), config.norm_eps, self.layers, self.shape, self.windows,
            np.array(slices), addresses, own_space, apart, self.turns, self.head, logits.numpy(),
            np.array(draws, np.int64), np.array(places, np.int64), np.array(streams, np.uint64),
            np.array(numbers, np.float64).reshape(-1, 4), drawn, *asked,
        )  # fmt: skip
        if known < rows:
            raise OSError("an embedding cannot be read")
        tokens, verdicts = iter(drawn.tolist()), zip(judged, asked[-1].tolist(), strict=True)
        found = [(job, list(islice(tokens, job.span.read))) for job in drawn_from]
        return logits, [*found, *((job, [*job.draft[:kept], last]) for job, (kept, last) in verdicts)]

    def _memory(self, rows: int, inside: int) -> tuple[list[Tensor], np.ndarray]:
        """And where it is, with a place for the work space."""
        memory = [*(torch.empty(rows, width) for width in self.widths), torch.empty(inside, self.inside)]
        return memory, np.array([*(one.data_ptr() for one in memory), 0, self.progress.ctypes.data])
