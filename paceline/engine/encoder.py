"""BERT encoders: whole texts in, one vector each out. `EncoderRunner` satisfies `core.work.Engine`.

One forward runs over the flattened tokens of all texts of a step: linear layers see them all at once, attention is
per text, over all of its tokens. There is no KV: a text is one slice, and its embedding comes with the step. In a group
of several workers each has a part of the layers, and of their heads and inner columns (`parallel`).
"""

import gc
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.work import EngineInfo, NewSequence, SliceOutput, SliceWork
from paceline.engine import machine, pages
from paceline.engine.config import ModelError
from paceline.engine.encoder_config import EncoderConfig
from paceline.engine.job import in_parts
from paceline.engine.kv_cache import MemoryPlan, held_bytes
from paceline.engine.linear import Linear, best_kind, kernels, make_linear
from paceline.engine.model import Embedding, load_embedding
from paceline.engine.parallel import Peers, Place, inner_columns, stage_layers, times, vocabulary_of
from paceline.engine.precision import precision
from paceline.engine.reader import Progress, Reader, Rows
from paceline.engine.weights import Checkpoint

# What an encoder has no use for: buffers, the pooler (of next-sentence prediction) and the head of a masked model.
IGNORED = (
    "position_ids", "pooler.dense.weight", "pooler.dense.bias", "predictions.bias", "decoder.weight", "decoder.bias",
    "transform.dense.weight", "transform.dense.bias", "transform.LayerNorm.weight", "transform.LayerNorm.bias",
    "transform.LayerNorm.gamma", "transform.LayerNorm.beta", "seq_relationship.weight", "seq_relationship.bias",
)  # fmt: skip
KEPT = 32 << 20  # bytes that steps leave behind, in the allocator and as oneDNN's compiled kernels


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Over the last dimension."""

    weight: Tensor  # [hidden]
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Layer:
    """One encoder layer; norms come after the sums."""

    qkv: Linear  # hidden -> 3 hidden
    out: Linear  # hidden -> hidden
    attention_norm: LayerNorm
    up: Linear  # hidden -> intermediate
    down: Linear  # intermediate -> hidden
    norm: LayerNorm


@dataclass(frozen=True, slots=True)
class Words:
    """What a first stage begins with."""

    table: Embedding
    positions: Tensor  # [max_context, hidden], with the row of token type 0, which every token has
    norm: LayerNorm

    def __call__(self, texts: Seq[Seq[int]]) -> Tensor:
        """Texts as token ids to states [tokens, hidden]."""
        x = self.table(torch.tensor([token for text in texts for token in text], device=self.positions.device))
        return self.norm(x.add_(torch.cat([self.positions[: len(text)] for text in texts])))


class Encoder:
    """A model's weights and its forward pass; or a worker's part of them, which `peers` have the rest of."""

    def __init__(
        self, config: EncoderConfig, words: Words | None, layers: list[Layer], heads: int, peers: Peers | None
    ):
        """`config` is of the whole model, `heads` are those of the part. Only a first stage has words."""
        self.config, self.words, self.layers, self.heads, self.peers = config, words, layers, heads, peers
        self.sums = peers is not None and peers.place.parallel.tensor > 1

    def forward(self, texts: Seq[Seq[int]], progress: np.ndarray) -> Tensor | None:
        """Texts as token ids to their embeddings [texts, hidden] float32; None in all stages but the last.

        progress[0] counts layers.
        """
        lengths = [len(text) for text in texts]
        x = self.words(texts) if self.words is not None else self.peers.receive(sum(lengths), self.config.hidden)
        for layer in self.layers:
            x = layer.attention_norm(self._add(x, layer.out, self._attend(layer.qkv(x), lengths)))
            x = layer.norm(self._add(x, layer.down, F.gelu(layer.up(x))))
            progress[0] += 1
        if self.peers and not self.peers.place.last:
            return self.peers.send(x)
        pooled = torch.stack([self._pool(states) for states in x.split(lengths)])
        return F.normalize(pooled, dim=1) if self.config.normalize else pooled

    def _add(self, x: Tensor, linear: Linear, inner: Tensor) -> Tensor:
        """x and what a layer makes of its inner columns; where others have the rest of those, theirs too."""
        return x.add_(self.peers.sum_(linear(inner))) if self.sums else linear(inner, add_to=x)

    def _attend(self, qkv: Tensor, lengths: list[int]) -> Tensor:
        """Queries, keys and values of some heads [tokens, 3 heads head_dim] to what each token sees of its own text."""
        size, mixed, begin = self.config.head_dim, [], 0
        for length, some in groupby(lengths):  # neighbours of one length go together: calls cost more than short texts
            end = begin + length * len(list(some))
            heads = qkv[begin:end].view(-1, length, 3, self.heads, size).permute(2, 0, 3, 1, 4)
            mixed.append(F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, self.heads * size))
            begin = end
        return torch.cat(mixed)

    def _pool(self, states: Tensor) -> Tensor:
        """Of one text: [tokens, hidden] to [hidden]."""
        if self.config.pooling == "cls":
            return states[0]
        return states.amax(dim=0) if self.config.pooling == "max" else states.mean(dim=0)


class _Loader:
    """Builds an Encoder from a checkpoint, tensor by tensor."""

    def __init__(self, checkpoint: Checkpoint, config: EncoderConfig, device: str, kind: str, progress: Progress):
        self.checkpoint, self.config, self.device = checkpoint, config, device
        self.reader = Reader(checkpoint, device, kind, progress)
        self.prefix = "bert." if "bert.embeddings.word_embeddings.weight" in checkpoint.entries else ""

    def read(self, name: str, *shape: int) -> Tensor:
        return self.reader.read(self.prefix + name, shape)

    def norm(self, name: str) -> LayerNorm:
        old = f"{self.prefix}{name}.gamma" in self.checkpoint.entries  # names of the first, TensorFlow checkpoints
        parts = ("gamma", "beta") if old else ("weight", "bias")
        weight, bias = (self.read(f"{name}.{part}", self.config.hidden) for part in parts)
        return LayerNorm(weight, bias, self.config.norm_eps)

    def linear(self, names: list[str], rows: int, columns: int, own: range) -> Linear:
        """One layer from the `own` of so many rows of several of the checkpoint's."""
        return self.reader.fused([Rows(self.prefix + name, rows, own) for name in names], columns, bias=True)

    def inner(self, name: str, columns: int, own: range, rank: int) -> Linear:
        """A layer from the `own` of so many inner columns to states."""
        return self.reader.inner(self.prefix + name, self.config.hidden, columns, own, True, rank)

    def layer(self, index: int, place: Place, heads: range) -> Layer:
        name, hidden, intermediate = f"encoder.layer.{index}", self.config.hidden, self.config.intermediate
        parts = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        rows, inner = times(heads, self.config.head_dim), inner_columns(intermediate, place)
        return Layer(
            qkv=self.linear(parts, hidden, hidden, rows),
            out=self.inner(f"{name}.attention.output.dense", hidden, rows, place.rank),
            attention_norm=self.norm(f"{name}.attention.output.LayerNorm"),
            up=self.linear([f"{name}.intermediate.dense"], intermediate, hidden, inner),
            down=self.inner(f"{name}.output.dense", intermediate, inner, place.rank),
            norm=self.norm(f"{name}.output.LayerNorm"),
        )

    def words(self, place: Place, peers: Peers | None) -> Words:
        config, table = self.config, f"{self.prefix}embeddings.word_embeddings.weight"
        shape, own = (config.vocab_size, config.hidden), vocabulary_of(config.vocab_size, place)
        words = load_embedding(self.checkpoint, table, shape, self.device, own, peers)
        positions = self.read("embeddings.position_embeddings.weight", config.positions, config.hidden)
        types = self.read("embeddings.token_type_embeddings.weight", config.token_types, config.hidden)
        return Words(words, positions[: config.max_context] + types[0], self.norm("embeddings.LayerNorm"))

    def encoder(self, peers: Peers | None) -> Encoder:
        config, place = self.config, peers.place if peers else Place()
        layers, heads = encoder_part(config, place)
        words = self.words(place, peers) if place.first else None
        held = [self.layer(index, place, heads) for index in layers]
        others = [f"encoder.layer.{index}." for index in range(config.layers) if index not in layers]
        others += ["embeddings."] * (words is None)
        self.checkpoint.refuse_unused(IGNORED, tuple(self.prefix + name for name in others))
        self.reader.finish()
        return Encoder(config, words, held, len(heads), peers)


def encoder_part(config: EncoderConfig, place: Place) -> tuple[range, range]:
    """Layers and heads that a worker holds. Raises ModelError."""
    stages, ranks = place.parallel.pipeline, place.parallel.tensor
    if config.heads % ranks:
        raise ModelError(f"parallel.tensor: {ranks} ranks cannot divide {config.heads} heads")
    layers = stage_layers([0.0, *[1.0] * config.layers, 0.0], stages)[place.stage]
    own = config.heads // ranks
    return layers, range(place.rank * own, (place.rank + 1) * own)


@pages.side_by_side()
def load_encoder(
    checkpoint: Checkpoint,
    config: EncoderConfig,
    *,
    device: str = "cpu",
    kind: str | None = None,
    progress: Progress = lambda done, total: None,
    peers: Peers | None = None,
) -> Encoder:
    """Loads and packs the weights, or with `peers` this worker's part of them. `kind` is a key of `linear.KINDS`, None
    the best here. Raises ModelError."""
    return _Loader(checkpoint, config, device, kind or best_kind(device), progress).encoder(peers)


class EncoderRunner:
    """A loaded encoder. `step` is to be called from one thread."""

    draft_s = 0.0
    overlaps = False

    def __init__(self, encoder: Encoder, info: EngineInfo, max_tokens: int):
        """`max_tokens`: of a forward pass; a longer text goes alone."""
        self.encoder, self.info, self.max_tokens, self.peers = encoder, info, max_tokens, encoder.peers
        place = self.peers.place if self.peers else Place()
        self.first, self.answers = place.first, place.number == place.answers
        self.texts: dict[int, list[int]] = {}
        self._progress = np.zeros(1, np.int64)

    @property
    def progress(self) -> int:
        return int(self._progress[0]) + (kernels.moved() if kernels else 0)

    @property
    def waiting(self) -> bool:
        return self.peers is not None and self.peers.waiting

    @staticmethod
    def load(
        path: Path | str,
        *,
        max_batch_tokens: int,
        max_batch: int,
        device: str = "cpu",
        memory: int | None = None,
        num_blocks: int | None = None,
        most_blocks: int | None = None,
        block_size: int = 16,
        context: int | None = None,
        threads: int | None = None,
        quantization: str = "none",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        share: float = 1.0,
        reserve: int = 0,
        lent: int | None = None,
        peers: Peers | None = None,
        progress: Progress = lambda done, total: None,
    ) -> "EncoderRunner":
        """Loads a checkpoint directory; options as of `ModelRunner.load`, but there is no KV, and all devices compute
        in float32. Raises ModelError.

        Blocks take no memory here, they only count tokens: without `num_blocks` as many as `max_batch` texts need.
        """
        machine.require(device)
        dtype = "float32" if dtype == "auto" else dtype
        quantization = precision(device, dtype, quantization, None, kv_cache_dtype).weights
        if quantization not in ("none", "int8"):
            raise ModelError(f"dtype: encoders compute in float32, not in {dtype}; valid are auto and float32")
        config = EncoderConfig.load(path)
        if context is not None and not 1 <= context <= config.max_context:
            raise ModelError(f"{path}: context must be from 1 to {config.max_context} tokens, not {context}")
        context = context or config.max_context
        num_blocks = num_blocks or max_batch * -(-context // block_size)
        checkpoint = Checkpoint(path)
        machine.use_threads(threads)
        kind = best_kind(device, quantization)
        _warm_up(kind, device)
        place, held = peers.place if peers else Place(), 0
        if device != "cpu" and place.first:  # it holds the rows of the embedding, too, in float32 at most
            held = 4 * config.hidden * len(vocabulary_of(config.vocab_size, place))
        plan = MemoryPlan(
            baseline=held_bytes(device),
            weights=config.weight_bytes(quantization) // place.parallel.devices + held,
            kv=0,
            activations=activation_bytes(config, max(max_batch_tokens, context)),
        )
        if memory is not None and plan.total > memory:
            raise ModelError(f"not enough memory: {plan.total >> 20} MiB are needed, more than {memory >> 20} MiB")
        encoder = load_encoder(checkpoint, config, device=device, kind=kind, progress=progress, peers=peers)
        pages.trim_heap()
        pages.keep_heap()
        fits = min(context, num_blocks * block_size)
        info = EngineInfo(num_blocks, block_size, plan.weights, plan.kv, plan.total, fits, config.vocab_size)
        return EncoderRunner(encoder, info, max_batch_tokens)

    def give_back(self, blocks: Seq[int]) -> None:
        """There is no KV."""

    def release(self) -> None:
        """Gives its memory back; it is not used any more."""
        del self.encoder
        gc.collect()
        pages.trim_heap()

    @torch.inference_mode()
    def step(
        self, new: Seq[NewSequence], slices: Seq[SliceWork], dropped: Seq[int]
    ) -> tuple[list[SliceOutput], float, float]:
        """Forgets `dropped`, learns `new`, runs `slices`, each a whole text whose embedding is its output.

        Outputs in order, seconds of forward pass and of sampling, which there is none of.
        """
        started, waited = perf_counter(), self.peers.waited_s if self.peers else 0.0
        for name in dropped:
            self.texts.pop(name, None)
        self.texts |= {sequence.id: sequence.tokens for sequence in new}
        outputs = {work.id: SliceOutput([], error=self._fault(work)) for work in slices}
        valid = [work.id for work in slices if not outputs[work.id].error]
        valid.sort(key=lambda name: len(self.texts[name]))
        for some in in_parts(valid, self.max_tokens, lambda name: len(self.texts[name])):
            outputs |= zip(some, self._run([self.texts[name] for name in some]), strict=True)
        seconds = perf_counter() - started - (self.peers.waited_s - waited if self.peers else 0.0)
        return [outputs[work.id] for work in slices] if self.answers else [], seconds, 0.0

    def _fault(self, work: SliceWork) -> str:
        """Why the slice cannot be run; empty: it can."""
        tokens, vocabulary = self.texts.get(work.id), self.encoder.config.vocab_size
        if tokens is None:
            return f"sequence {work.id} is not known"
        if (work.start, work.length) != (0, len(tokens)) or not work.emits:
            return f"tokens [{work.start}, {work.start + work.length}) of {len(tokens)}: an encoder takes whole texts"
        if not 1 <= len(tokens) <= self.info.context:
            return f"{len(tokens)} tokens: a text must have from 1 to {self.info.context}"
        if not all(0 <= token < vocabulary for token in tokens):
            return f"token ids must be from 0 to {vocabulary - 1}"
        return ""

    def _run(self, texts: list[list[int]]) -> list[SliceOutput]:
        """A fault that belongs to one text is its answer alone."""
        try:
            embeddings = self.encoder.forward(texts, self._progress)
            if embeddings is None:
                return [SliceOutput([])] * len(texts)
            rows = embeddings.cpu().numpy().astype("<f4", copy=False)
        except Exception as error:
            if self.peers:
                raise
            if len(texts) > 1:
                return [output for text in texts for output in self._run([text])]
            return [SliceOutput([], error=f"{type(error).__name__}: {error}")]
        return [
            SliceOutput([0], embedding=row.tobytes()) if np.isfinite(row).all()
            else SliceOutput([], error="the embedding is NaN or infinite")
            for row in rows
        ]  # fmt: skip


def activation_bytes(config: EncoderConfig, tokens: int) -> int:
    """The most that a forward pass over so many tokens holds: states, heads and what attention makes of them, or both
    sides of the activation; and the work space of our kernels."""
    space = 0
    if "tiled" in best_kind("cpu"):
        space = kernels.spaces(tokens, max(config.hidden, config.intermediate), kernels.num_threads())[0]
    row = 2 * config.hidden + max(5 * config.hidden, 2 * config.intermediate)
    return 4 * row * tokens + space + KEPT


def _warm_up(kind: str, device: str) -> None:
    """Runs each kind of operation once: libraries are loaded before memory is measured."""
    x = torch.zeros(32, 32, device=device)
    x = F.gelu(make_linear(kind, x, x[0])(x))
    F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
