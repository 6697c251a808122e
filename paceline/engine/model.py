"""The decoder: one config-driven stack for Llama 2 and 3, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE.

One forward runs over the flattened tokens of a hybrid batch: linear layers see all tokens at once, so that weights are
read once a step (SARATHI, section 3), and attention is per slice. CPUs compute in float32, GPUs in what their linear
layers hold; attention is `attention`'s or `gpu`'s.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.engine import attention, gpu, machine, pages
from paceline.engine.attention import SliceSpan, StepPlan, norm_addresses
from paceline.engine.config import ARCHITECTURES, ModelConfig, ModelError
from paceline.engine.experts import Experts
from paceline.engine.gpu import PagedCache
from paceline.engine.gpu_plan import Layout, PagedPlan
from paceline.engine.graphs import Graphs
from paceline.engine.kv_cache import KVCache
from paceline.engine.linear import KINDS, Linear, Norm, TiledLinear, best_kind, kernels, make_linear
from paceline.engine.parallel import Part, Peers, part_of, times
from paceline.engine.reader import Progress, Reader, Rows
from paceline.engine.rope import Rotations, frequencies
from paceline.engine.weights import Checkpoint

# Buffers that old checkpoints carry and that follow from the config, and the head of a tied model.
IGNORED = ("rotary_emb.inv_freq", "masked_bias", "lm_head.weight")

EMBEDDING = "model.embed_tokens"

# Rows of a pass whose layers are asked for when the one before the last has been computed, so that progress is that of
# what has been computed: such a pass takes long, and a worker without progress for seconds is taken to hang. Passes of
# fewer rows are CUDA graphs; a GPU would compute them sooner than Python asks for them.
WIDE = 512

# Experts after which the heap is trimmed: copies of their size leave holes there that the next ones do not fit into, as
# much in all as the weights (0.9 GiB measured). A trim took 3 ms.
TRIM_EVERY = 4


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Query and key rows of `qkv` (and their norms) are interleaved for the rotation."""

    qkv: Linear  # hidden -> (heads + 2 kv_heads) head_dim
    out: Linear  # heads head_dim -> hidden
    gate_up: Linear | None  # hidden -> intermediate, gated
    down: Linear | None  # intermediate -> hidden
    input_norm: Norm  # [hidden]
    post_norm: Norm  # [hidden]
    head_norms: tuple[Norm, Norm] | None  # of queries and keys, [head_dim]
    experts: Experts | None = None  # in place of gate_up and down


class Embedding(Protocol):
    """Token ids [tokens] to [tokens, hidden], float32 on CPUs."""

    table: Tensor

    def __call__(self, tokens: Tensor) -> Tensor: ...

    @property
    def place(self) -> tuple[int, int]:
        """A file and where in it the table begins, or -1 and an address."""
        ...


Plan = StepPlan | Layout | PagedPlan


class FileEmbedding:
    """Token embeddings in the file: only the rows of a step are read and converted.

    Not through the file's mapping: there the system maps 16 pages around each row, so that in time the whole table is
    resident, or all of that is to be given back and mapped again in every step.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]):
        self.table = checkpoint.view(name, shape)
        self.path, self.begin = checkpoint.place(name)
        self.file = os.open(self.path, os.O_RDONLY)
        finalize(self, os.close, self.file)

    def __call__(self, tokens: Tensor) -> Tensor:
        count, width = self.table.shape
        size = width * self.table.element_size()
        rows = bytearray(len(tokens) * size)
        memory = memoryview(rows)
        for place, token in enumerate(tokens.tolist()):
            assert 0 <= token < count
            into = memory[place * size : (place + 1) * size]
            if os.preadv(self.file, (into,), self.begin + token * size) != size:
                raise OSError(f"{self.path}: it is shorter than it was")
        return torch.frombuffer(rows, dtype=self.table.dtype).view(-1, width).float()

    @property
    def place(self) -> tuple[int, int]:
        return self.file, self.begin


class HeldEmbedding:
    """Token embeddings on a device: a rank has those of its part of the vocabulary, and nothing for other tokens; the
    ranks add up what they have (Shoeybi et al., 2019, section 3)."""

    def __init__(self, table: Tensor, own: range, sum_: Callable[[Tensor], Tensor] | None):
        """`table` [own, hidden]; `sum_` over the ranks, in place; None: there are no others."""
        self.table, self.own, self.sum_ = table, own, sum_

    @property
    def place(self) -> tuple[int, int]:
        return -1, self.table.data_ptr()

    def __call__(self, tokens: Tensor) -> Tensor:
        if self.sum_ is None:
            return F.embedding(tokens, self.table)
        places = tokens - self.own.start
        away = (places < 0) | (places >= len(self.own))
        rows = F.embedding(places.masked_fill(away, 0), self.table)
        return self.sum_(rows.masked_fill_(away[:, None], 0.0))


def load_embedding(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], device: str, own: range, peers: Peers | None,
    dtype: torch.dtype = torch.float32, held: Tensor | None = None, hold: bool = False,
) -> Embedding:  # fmt: skip
    """`own`: the rows of this rank, where it holds any; `held`: those rows, if the head has them already; `hold`: all
    rows, on a CPU, too."""
    if device == "cpu" and not hold:
        return FileEmbedding(checkpoint, name, shape)
    if device == "cpu":
        return HeldEmbedding(checkpoint.view(name, shape).to(torch.float32, copy=True), range(shape[0]), None)
    rows = checkpoint.view(name, shape)[own.start : own.stop].to(device, dtype) if held is None else held
    return HeldEmbedding(rows, own, peers.sum_ if peers and len(own) < shape[0] else None)


class Decoder:
    """A model's weights and its forward pass; or a worker's part of them, which `peers` have the rest of."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding | None,
        layers: list[Layer],
        norm: Norm | None,
        head: Linear | None,
        device: str = "cpu",
        peers: Peers | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        """`config` is of the part. Only a first stage has an embedding, only a last one norm and head. `dtype` is that
        of hidden states."""
        self.config, self.embedding, self.layers, self.norm, self.head = config, embedding, layers, norm, head
        self.device, self.peers, self.dtype = device, peers, dtype
        self.graphs: Graphs | None = None  # of passes that only decode
        self.sums = peers is not None and peers.place.parallel.tensor > 1
        inv_freq, factor = frequencies(config.rope, config.head_dim)
        self.rotations = Rotations(inv_freq.to(self.device), factor)
        self.addresses = None if self.sums else self._addresses()

    def first(self, layers: int) -> "Decoder":
        """The model that ends after its first layers: the same weights, norm and head."""
        return Decoder(
            self.config.first(layers), self.embedding, self.layers[:layers], self.norm, self.head, self.device,
            dtype=self.dtype,
        )  # fmt: skip

    def record(self, cache: PagedCache, max_batch: int, max_tokens: int, context: int) -> None:
        """Has passes over single tokens of up to `max_batch` sequences, and over up to `max_tokens` tokens or WIDE, as
        CUDA graphs from now on, where there can be any: what a mixture of experts is to do, and how much is gathered,
        depends on what was computed before."""
        by = gpu.reads(self.device, self.dtype, self.config.head_dim)
        if by is None or self.config.sparse or self.peers or not self.layers:
            return
        progress, embedding = np.zeros(1, np.int64), self.embedding
        assert embedding is not None

        def run(tokens: Tensor, plan: PagedPlan) -> Tensor:
            return self.run(embedding(tokens), plan, cache, progress)

        heads = gpu.heads_of(self.config, self.dtype)
        self.graphs = Graphs(run, cache, max_batch, min(WIDE, max_tokens), context, heads, by)

    def plan(self, spans: list[SliceSpan], block_size: int) -> Plan:
        """Of a step of these slices."""
        if self.device == "cpu":
            return attention.plan_step(spans, self.config, block_size)
        return gpu.plan_step(spans, self.config, block_size, self.device, self.dtype)

    def _addresses(self) -> np.ndarray | None:
        """A line of `kernels.decoder_layers` for each layer; None where its kernels cannot run all of them."""
        windows = sorted(set(self.config.windows), key=lambda window: window or 0)
        lines = []
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            parts = (layer.qkv, layer.out, layer.gate_up, layer.down)
            if not all(isinstance(part, TiledLinear) for part in parts):
                return None
            line = [address for part in parts for address in part.addresses]
            line += [layer.input_norm.weight.data_ptr(), layer.post_norm.weight.data_ptr()]
            line += [*norm_addresses(layer.head_norms), 0, 0, windows.index(window)]
            lines.append(line)
        return np.array(lines, np.int64)

    def lines(self, cache: KVCache) -> tuple[np.ndarray, np.ndarray]:
        """`layers` and `shape` of `kernels.decoder_layers` over this cache."""
        assert self.addresses is not None
        config, layers = self.config, self.addresses.copy()
        layers[:, kernels.LAYER_KEYS : kernels.LAYER_VALUES + 1] = cache.address_table
        shape = (
            config.hidden, config.intermediate, config.heads, config.kv_heads, config.head_dim, cache.block_size,
            cache.element,
        )  # fmt: skip
        return layers, np.array(shape)

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache | PagedCache, progress: np.ndarray) -> Tensor:
        """Token ids [tokens], on the host or the device, to hidden states [tokens, hidden] before the last norm, of the
        tokens that are read (`SliceSpan`); writes keys and values of all.

        progress[0] counts layers, for those who watch from another thread.
        """
        assert self.embedding is not None
        if self.graphs is not None and self.graphs.fit(plan):
            progress[0] += len(self.layers)
            x = self.graphs(tokens, plan)
            if plan.kept is not None:
                x = x.index_select(0, torch.from_numpy(plan.kept).to(self.device, non_blocking=True))
            return x
        return self.run(self.embedding(tokens.to(self.device, non_blocking=True)), plan, cache, progress)

    def run(self, x: Tensor, plan: Plan, cache: KVCache | PagedCache, progress: np.ndarray) -> Tensor:
        """What the layers make of hidden states [tokens, hidden], which they change: of those that are read.

        Nothing but keys and values of the others is wanted of the last layer.
        """
        if isinstance(plan, Layout):
            plan = plan.on(self.device)
        if not self.layers:
            return x if plan.kept is None else x.index_select(0, plan.kept)
        turns = self.rotations(plan.positions, plan.end)
        if self.addresses is not None:
            return self._run_fused(x, turns, plan, cache, progress)
        attend = attention.attend if self.device == "cpu" else gpu.attend
        watched, done = self.device != "cpu" and len(x) > WIDE, lambda: None
        for index, layer in enumerate(self.layers):
            heads, narrows = layer.qkv(x, layer.input_norm), index + 1 == len(self.layers) and plan.kept is not None
            some = plan.last if narrows and isinstance(plan, StepPlan) else plan
            mixed = attend(heads, turns, layer.head_norms, cache, index, self.config.windows[index], some)
            if narrows:
                x, mixed = x.index_select(0, plan.kept), mixed.index_select(0, plan.kept)
            if len(x):
                self._add(x, partial(layer.out, mixed))
                if layer.experts is None:
                    self._add(x, partial(layer.down, layer.gate_up(x, layer.post_norm)))
                else:
                    self._add(x, partial(layer.experts, x, layer.post_norm))
            if watched:  # one layer is computed while the next is asked for
                done()
                done = machine.mark(self.device)
            progress[0] += 1
        return x

    def _add(self, x: Tensor, part: Callable[..., Tensor]) -> None:
        """Adds to x what a part of a layer yields; where others have the rest of it, theirs too."""
        if self.sums:
            x.add_(self.peers.sum_(part(add_to=torch.zeros_like(x))))
        else:
            part(add_to=x)

    def _run_fused(self, x: Tensor, turns: Tensor, plan: StepPlan, cache: KVCache, progress: np.ndarray) -> Tensor:
        """The same layers in one call of our kernels, bit for bit."""
        config, rows, threads = self.config, x.shape[0], kernels.num_threads()
        sizes = (config.heads + 2 * config.kv_heads) * config.head_dim, config.heads * config.head_dim
        pad, apart = kernels.LINE // 4, kernels.apart(rows, threads)
        inside_rows = kernels.rows_inside(rows, threads)
        widths = (rows, sizes[0]), (rows, sizes[1] + pad), (inside_rows, config.intermediate + pad)
        heads, mixed, inside = (torch.empty(count, width) for count, width in widths)
        space, own_space = kernels.spaces(rows, max(config.hidden, config.intermediate, sizes[1]), threads, apart)
        layers, shape = self.lines(cache)
        plans, chunks = plan.lines()
        last_plans, last_chunks = plan.last.lines() if plan.last else (plans, chunks)
        kept = np.arange(rows) if plan.kept is None else plan.kept.numpy()
        tensors = (x, turns, plan.rows_written, heads, mixed, inside)
        memory = [*(tensor.data_ptr() for tensor in tensors), kernels.workspace(space), progress.ctypes.data]
        kernels.decoder_layers(
            rows, config.norm_eps, layers, shape, plans, chunks, last_plans, last_chunks, kept,
            np.array(memory), own_space, apart, threads,
        )  # fmt: skip
        return x[: len(kept)]

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Hidden states [rows, hidden] before the last norm to logits [rows, vocab] float32.

        With tensor parallelism only the first rank has them, but all have to ask.
        """
        logits = self.head(hidden, self.norm).float()
        return self.peers.gather(logits, self.config.vocab_size) if self.sums else logits


class _Loader:
    """Builds a Decoder from a checkpoint, tensor by tensor: never more than one fused layer is held twice."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, part: Part, device: str, kind: str, progress: Progress
    ):
        """`config` is of the whole model."""
        self.config, self.part, self.device, self.kind = config, part, device, kind
        self.dtype = KINDS[kind].dtype
        self.reader = Reader(checkpoint, device, kind, progress)

    def norm(self, name: str, width: int, pairs: int = 0) -> Norm:
        return Norm(self.reader.read(f"{name}.weight", (width,), pairs=pairs), self.config.norm_eps)

    def mlp(self, gate: str, up: str, down: str, width: int, own: range, bias: bool) -> tuple[Linear, Linear]:
        """gate_up and down from the checkpoint's three, with `width` between them, of which this part has some."""
        hidden, rank = self.config.hidden, self.part.place.rank
        gate_up = self.reader.fused([Rows(gate, width, own), Rows(up, width, own)], hidden, bias, gated=True)
        return gate_up, self.reader.inner(down, hidden, width, own, bias, rank)

    def experts(self, index: int) -> Experts:
        """Of the experts of a layer those that this part has."""
        config, local = self.config, self.part.experts
        block, *parts = ARCHITECTURES[config.architecture].experts
        name = f"model.layers.{index}.{block}"
        router = self.reader.read(f"{name}.gate.weight", (config.experts, config.hidden))
        kind = "plain" if self.device != "cpu" else best_kind(self.device) if "int8" in self.kind else self.kind
        held = []
        for expert in local:
            names = (f"{name}.experts.{expert}.{part}" for part in parts)
            width = config.expert_intermediate
            held.append(self.mlp(*names, width, range(width), False))
            if len(held) % TRIM_EVERY == 0:
                pages.trim_heap()
        return Experts(make_linear(kind, router), held, local, config.experts_per_token, config.norm_topk)

    def layer(self, index: int) -> Layer:
        config, part, name = self.config, self.part, f"model.layers.{index}"
        attention, mlp, size = f"{name}.self_attn", f"{name}.mlp", config.head_dim
        queries, keys = config.heads * size, config.kv_heads * size
        own, own_keys = times(part.heads, size), times(part.kv_heads, size)
        qkv = [
            Rows(f"{attention}.q_proj", queries, own, len(part.heads)),
            Rows(f"{attention}.k_proj", keys, own_keys, len(part.kv_heads)),
            Rows(f"{attention}.v_proj", keys, own_keys),
        ]
        parts, experts = (None, None), None
        if index in config.sparse:
            experts = self.experts(index)
        else:
            names = (f"{mlp}.{one}_proj" for one in ("gate", "up", "down"))
            parts = self.mlp(*names, config.intermediate, part.inner, config.mlp_bias)
        norms = None
        if config.qk_norm:
            norms = tuple(self.norm(f"{attention}.{one}_norm", size, pairs=1) for one in "qk")
        return Layer(
            qkv=self.reader.fused(qkv, config.hidden, config.qkv_bias),
            out=self.reader.inner(f"{attention}.o_proj", config.hidden, queries, own, config.out_bias, part.place.rank),
            gate_up=parts[0],
            down=parts[1],
            input_norm=self.norm(f"{name}.input_layernorm", config.hidden),
            post_norm=self.norm(f"{name}.post_attention_layernorm", config.hidden),
            head_norms=norms,
            experts=experts,
        )


def _refuse_another_head(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises ModelError for a head of its own where config.json says that it is the embedding: which one is meant?"""
    names = "lm_head.weight", f"{EMBEDDING}.weight"
    parts = (checkpoint.view(name, (config.vocab_size, config.hidden)).split(1024) for name in names)
    if not all(torch.equal(some.float(), others.float()) for some, others in zip(*parts, strict=True)):
        raise ModelError(
            f"{checkpoint.folder / 'config.json'}: tie_word_embeddings: must be false, for lm_head.weight differs from "
            f"{names[1]}; or leave it out of the checkpoint"
        )
    for name in names:
        checkpoint.release(name)


@pages.side_by_side()
def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: str = "cpu",
    kind: str | None = None,
    progress: Progress = lambda done, total: None,
    part: Part | None = None,
    peers: Peers | None = None,
) -> Decoder:
    """Loads and packs the weights. `kind` is a key of `linear.KINDS`, None the best here; `part` of the model that
    `config` describes, None: all of it, and then there are no `peers`. Raises ModelError."""
    part = part or part_of(config)
    place, table = part.place, EMBEDDING
    if config.tied and checkpoint.nbytes("lm_head.weight") and not checkpoint.nbytes(f"{EMBEDDING}.weight"):
        table = "lm_head"  # `safetensors.torch.save_model` keeps one of two names
    loader = _Loader(checkpoint, config, part, device, kind or best_kind(device), progress)
    head = norm = embedding = None
    if place.last:
        if table == EMBEDDING and config.tied and checkpoint.nbytes("lm_head.weight"):
            _refuse_another_head(checkpoint, config)
        # The head is the largest matrix: it goes first, while little else is held beside the file's and ours.
        rows = Rows(table if config.tied else "lm_head", config.vocab_size, part.vocabulary)
        head, norm = loader.reader.fused([rows], config.hidden, False), loader.norm("model.norm", config.hidden)
    layers = [loader.layer(index) for index in part.layers]
    if place.first:
        shape = config.vocab_size, config.hidden
        held = head.weight if head is not None and config.tied and device != "cpu" else None
        embedding = load_embedding(
            checkpoint, f"{table}.weight", shape, device, part.embedding, peers, loader.dtype, held,
            config.table_bytes > 0,
        )  # fmt: skip
    others = [f"model.layers.{index}." for index in range(config.layers) if index not in part.layers]
    if config.sparse:
        block = ARCHITECTURES[config.architecture].experts[0]
        away = [expert for expert in range(config.experts) if expert not in part.experts]
        others += [f"model.layers.{index}.{block}.experts.{expert}." for index in config.sparse for expert in away]
    others += ["model.norm."] * (norm is None) + ["lm_head."] * (head is None) + [table] * (embedding is None)
    checkpoint.refuse_unused(IGNORED, tuple(others))
    loader.reader.finish()
    return Decoder(part.config, embedding, layers, norm, head, device, peers, loader.dtype)
