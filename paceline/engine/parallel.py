"""A worker's part of a model, and what the workers of a group say to each other.

A model is cut into pipeline stages of consecutive layers (AlpaServe, section 4.1), and every stage over tensor ranks
(Shoeybi et al., 2019, section 3): heads and the inner columns of the MLP are divided, each rank computes with its own,
and a sum over the ranks follows the attention and the MLP. Rows of the head are divided too, and those of the embedding
where a device holds them; on CPU no worker does: each reads the rows that it needs from the mapped file.

Worker 0, where tokens enter, drafts; the first rank of the last stage samples and answers for the group. Steps come to
all workers in the same order, so what they say to each other needs no names.
"""

import contextlib
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.core.cluster import Parallel
from paceline.core.drafter_name import DRAFTERS
from paceline.engine import exchange, machine
from paceline.engine.config import ModelConfig, ModelError
from paceline.engine.exchange import Exchange
from paceline.engine.job import Job
from paceline.engine.line import Door, Line, call
from paceline.placement.partition import cut

TIMEOUT = timedelta(days=1)  # a worker waits for its turn; those that hang are found by their heartbeats
TOKENS_A_LOGIT = 4  # about: between steps of prompts, where it is hundreds, and of decodes alone, where it is one
UNIT = 32  # columns of the MLP that are not divided further, where it has as many for every rank


@dataclass(frozen=True, slots=True)
class Place:
    """Worker `number` of a group: rank `number % tensor` of stage `number // tensor`."""

    parallel: Parallel = Parallel()
    number: int = 0

    @property
    def stage(self) -> int:
        return self.number // self.parallel.tensor

    @property
    def rank(self) -> int:
        return self.number % self.parallel.tensor

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.parallel.pipeline - 1

    @property
    def answers(self) -> int:
        """The worker that samples and answers for the group."""
        return (self.parallel.pipeline - 1) * self.parallel.tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker holds of a model."""

    place: Place
    config: ModelConfig  # of the part: its layers and heads
    layers: range  # of the model's
    heads: range
    kv_heads: range
    inner: range  # of the MLP
    experts: range  # or of those, all of each
    vocabulary: range  # rows of the head; empty in all stages but the last
    embedding: range  # rows of the embedding; empty in all stages but the first

    def weight_bytes(self, quantization: str) -> int:
        """Of the weights that the worker holds."""
        return replace(self.config, vocab_size=len(self.vocabulary)).weight_bytes(quantization)


def part_of(config: ModelConfig, place: Place = Place(), quantization: str = "none") -> Part:  # noqa: B008
    """Raises ModelError for a model that cannot be divided so."""
    stages, ranks, rank = place.parallel.pipeline, place.parallel.tensor, place.rank
    heads, kv_heads, vocabulary = config.heads, config.kv_heads, config.vocab_size
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        valid = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ModelError(
            f"parallel.tensor: {ranks} ranks cannot divide {heads} heads with {kv_heads} key-value heads; "
            f"possible are {', '.join(map(str, valid))}"
        )
    layers = stage_layers(costs(config, quantization), stages)[place.stage]
    inner = inner_columns(config.intermediate, place)
    experts = range(config.experts * rank // ranks, config.experts * (rank + 1) // ranks)
    rows = vocabulary_of(vocabulary, place)
    own_kv = kv_heads // ranks or 1
    first_kv = rank * kv_heads // ranks
    own = replace(
        config,
        layers=len(layers),
        windows=config.windows[layers.start : layers.stop],
        heads=heads // ranks,
        kv_heads=own_kv,
        intermediate=len(inner),
        experts=len(experts),
        sparse=frozenset(layer - layers.start for layer in config.sparse if layer in layers),
    )
    return Part(
        place,
        own,
        layers,
        range(rank * heads // ranks, (rank + 1) * heads // ranks),
        range(first_kv, first_kv + own_kv),
        inner,
        experts,
        rows if place.last else range(0),
        rows if place.first else range(0),
    )


def stage_layers(costs: list[float], stages: int) -> list[range]:
    """Layers of each stage, by the costs of embedding, layers and head, which may have a stage to themselves.

    Raises ModelError.
    """
    if stages > len(costs):
        raise ModelError(f"parallel.pipeline: {stages} stages for {len(costs) - 2} layers, embedding and head")
    bounds = [0, *(min(end - 1, len(costs) - 2) for end in cut(costs, stages))]
    return [range(*pair) for pair in pairwise(bounds)]


def vocabulary_of(size: int, place: Place) -> range:
    """Tokens whose rows of embedding and head a rank has, where it has any."""
    rank, ranks = place.rank, place.parallel.tensor
    return range(size * rank // ranks, size * (rank + 1) // ranks)


def inner_columns(count: int, place: Place) -> range:
    """Columns between the two products of an MLP that a rank has."""
    ranks = place.parallel.tensor
    unit = UNIT if count >= UNIT * ranks else 1
    bounds = [*(count * n // ranks // unit * unit for n in range(ranks)), count]
    return range(bounds[place.rank], bounds[place.rank + 1])


def times(some: range, size: int) -> range:
    """Rows of a matrix, of so many each."""
    return range(some.start * size, some.stop * size)


def costs(config: ModelConfig, quantization: str) -> list[float]:
    """Of embedding, layers and head, in bytes that one token reads; few tokens of a full pipeline's steps see the head.
    """
    layers = (config.layer_bytes(layer, quantization, config.experts_per_token) for layer in range(config.layers))
    return [0.0, *map(float, layers), replace(config, layers=0).weight_bytes(quantization) / TOKENS_A_LOGIT]


class Peers:
    """The other workers of the group. All calls block until they have what they need."""

    def __init__(self, place: Place, meeting: str, device: str = "cpu") -> None:
        """`meeting`: a URL at which the group's workers find each other (torch.distributed's `init_method`)."""
        self.place, self.device = place, device
        self.waited_s = 0.0  # for other stages, in all
        self.waiting = False
        tensor = place.parallel.tensor
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(
            backend, init_method=meeting, rank=place.number, world_size=place.parallel.devices, timeout=TIMEOUT
        )
        self._begin = place.stage * tensor  # the first worker of this stage
        groups = [dist.new_group(range(s * tensor, (s + 1) * tensor)) for s in range(place.parallel.pipeline)]
        self._stage = groups[place.stage]
        self._exchange: Exchange | None = None
        self._lines: dict[int, Line] = {}  # to and from others
        if device == "cpu" and meeting.startswith("file://") and exchange.possible():  # all are on one machine
            self._lines = self._connect(meeting.removeprefix("file://"))
            if tensor > 1:
                self._exchange = self._shared(f"{Path(meeting).name}-{place.stage}")
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # on their way
        if device != "cpu":
            self._meet()

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """Workers of which one tells the other something."""
        parallel = self.place.parallel
        pairs = {(0, other) for other in range(1, parallel.devices)}
        return sorted(pairs | {(one, one + parallel.tensor) for one in range(parallel.devices - parallel.tensor)})

    def _meet(self) -> None:
        """Talks to all once: NCCL connects those that talk when they first do, for longer than a step may take."""
        one = torch.zeros(1, device=self.device)
        dist.all_reduce(one)
        dist.all_reduce(one, group=self._stage)
        for a, b in self._pairs:
            if self.place.number == a:
                dist.send(one, b)
            elif self.place.number == b:
                dist.recv(one, a)
        machine.finish(self.device)

    def _connect(self, name: str) -> dict[int, Line]:
        """With those that this worker tells something or hears something from."""
        number, pairs = self.place.number, self._pairs
        doors = {a: Door(Path(f"{name}-{a}-{b}")) for a, b in pairs if b == number}
        dist.barrier()  # all listen
        lines = {b: call(Path(f"{name}-{a}-{b}")) for a, b in pairs if a == number}
        return lines | {a: door.open() for a, door in doors.items()}

    # Within a stage

    def _shared(self, name: str) -> Exchange | None:
        """None where rank 0 finds no room for it: the ranks' sums go by gloo then."""
        rank, ranks, found = self.place.rank, self.place.parallel.tensor, None
        if not rank:
            with contextlib.suppress(OSError):
                found = Exchange(name, rank, ranks)
        there = torch.tensor([found is not None])
        dist.broadcast(there, self._begin, group=self._stage)
        if not there:
            return None
        found = found or Exchange(name, rank, ranks)
        dist.barrier(self._stage)  # all have it
        if not rank:
            found.path.unlink()
        return found

    def sum_(self, x: Tensor) -> Tensor:
        """Over the ranks, in place."""
        if self._exchange is not None:
            return self._exchange.sum_(x)
        dist.all_reduce(x, group=self._stage)
        return x

    def gather(self, logits: Tensor, vocabulary: int) -> Tensor | None:
        """[rows, own part of the vocabulary] to [rows, vocabulary] at the first rank; None at the others."""
        ranks = self.place.parallel.tensor
        if ranks == 1:
            return logits
        width = -(-vocabulary // ranks)
        even = logits.new_zeros(logits.shape[0], width)
        even[:, : logits.shape[1]] = logits
        if self._exchange is not None:
            every = self._exchange.gather(even)
        else:
            parts = [torch.empty_like(even) for _ in range(ranks)] if self.place.rank == 0 else None
            dist.gather(even, parts, self._begin, group=self._stage)
            every = parts and torch.cat(parts, dim=1)
        if every is None:
            return None
        bounds = pairwise(vocabulary * n // ranks for n in range(ranks + 1))
        return torch.cat([every[:, n * width : n * width + b - a] for n, (a, b) in enumerate(bounds)], dim=1)

    # Between stages

    def send(self, hidden: Tensor) -> None:
        """To the next stage, which may take it later."""
        self._send(hidden, self.place.number + self.place.parallel.tensor)

    def receive(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Hidden states [rows, width] of the stage before."""
        x = torch.empty(rows, width, dtype=dtype, device=self.device)
        self._receive(x, self.place.number - self.place.parallel.tensor)
        return x

    def share_drafts(self, jobs: Seq[Job], seconds: float, vocabulary: int) -> float:
        """Tells all workers what worker 0 drafted, and the one that judges from which distributions.

        Returns the seconds that drafting took there.
        """
        asked = [job for job in jobs if job.work.num_draft]
        if not asked:
            return seconds
        width = max(job.work.num_draft for job in asked)
        answers = self.place.answers
        if self.place.number == 0:
            heads = [[len(job.draft), len(job.draft_rows), DRAFTERS.index(job.drafter)] for job in asked]
            lines = [
                [*head, *job.draft, *[0] * (width - len(job.draft))] for head, job in zip(heads, asked, strict=True)
            ]
            table = torch.tensor([[int(seconds * 1e9), *[0] * (2 + width)], *lines], device=self.device)
            for other in range(1, self.place.parallel.devices):
                self._send(table, other)
            rows = [row for job in asked for row in job.draft_rows]
            if rows and answers:
                self._send(torch.stack(rows), answers)
            return seconds
        table = torch.empty(1 + len(asked), 3 + width, dtype=torch.int64, device=self.device)
        self._receive(table, 0)
        (nanoseconds, *_), *lines = table.tolist()
        for job, (count, _, drafter, *tokens) in zip(asked, lines, strict=True):
            job.draft, job.drafter = tokens[:count], DRAFTERS[drafter]
        total = sum(line[1] for line in lines)
        if total and self.place.number == answers:
            every = torch.empty(total, vocabulary, device=self.device)
            self._receive(every, 0)
            parts = every.split([line[1] for line in lines])
            for job, part in zip(asked, parts, strict=True):
                job.draft_rows = list(part)
        return float(nanoseconds) * 1e-9

    def least(self, number: int) -> int:
        """Of what the workers say."""
        numbers = torch.tensor([number], device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def _send(self, x: Tensor, to: int) -> None:
        x, self.waiting = x.contiguous(), True  # where the other one has not read what came before
        if to in self._lines:
            self._lines[to].send(x)
        else:
            work = dist.isend(x, to)
            assert work is not None
            self._sent.append((work, x))
            # Before a worker gets a step, the step as many before as the pipeline is long has been answered for.
            while len(self._sent) > (1 + self.place.parallel.pipeline) * (1 + self.place.parallel.devices):
                self._sent.popleft()[0].wait()
        self.waiting = False

    def _receive(self, x: Tensor, source: int) -> None:
        begin, self.waiting = perf_counter(), True
        if source in self._lines:
            self._lines[source].receive(x)
        else:
            dist.recv(x, source)
            machine.finish(self.device)  # with NCCL it has only been asked for
        self.waiting = False
        self.waited_s += perf_counter() - begin
