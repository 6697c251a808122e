"""BERT encoders: whole texts in, one vector each out. `EncoderRunner` satisfies `core.work.Engine`.

One forward runs over the flattened tokens of all texts of a step: linear layers see them all at once, attention is
per text, over all of its tokens. There is no KV: a text is one slice, and its embedding comes with the step.
"""

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
from paceline.engine.config import ModelError
from paceline.engine.encoder_config import EncoderConfig
from paceline.engine.job import in_parts
from paceline.engine.kv_cache import MemoryPlan, resident_bytes, trim_heap
from paceline.engine.linear import QUANTIZATIONS, Linear, best_kind, kernels, make_linear
from paceline.engine.model import Embedding, Progress
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


class Encoder:
    """A model's weights and its forward pass."""

    def __init__(
        self, config: EncoderConfig, words: Embedding, positions: Tensor, norm: LayerNorm, layers: list[Layer]
    ):
        """`positions` [max_context, hidden]: with the row of token type 0, which every token has."""
        self.config, self.words, self.positions, self.norm, self.layers = config, words, positions, norm, layers

    def forward(self, texts: Seq[Seq[int]], progress: np.ndarray) -> Tensor:
        """Texts as token ids to their embeddings [texts, hidden] float32. progress[0] counts layers."""
        lengths = [len(text) for text in texts]
        device = self.positions.device
        x = self.words(torch.tensor([token for text in texts for token in text], device=device))
        x = self.norm(x.add_(torch.cat([self.positions[:length] for length in lengths])))
        for layer in self.layers:
            x = layer.attention_norm(layer.out(self._attend(layer.qkv(x), lengths), add_to=x))
            x = layer.norm(layer.down(F.gelu(layer.up(x)), add_to=x))
            progress[0] += 1
        pooled = torch.stack([self._pool(states) for states in x.split(lengths)])
        return F.normalize(pooled, dim=1) if self.config.normalize else pooled

    def _attend(self, qkv: Tensor, lengths: list[int]) -> Tensor:
        """Queries, keys and values [tokens, 3 hidden] to what each token sees of its own text [tokens, hidden]."""
        config, mixed, begin = self.config, [], 0
        for length, some in groupby(lengths):  # neighbours of one length go together: calls cost more than short texts
            end = begin + length * len(list(some))
            heads = qkv[begin:end].view(-1, length, 3, config.heads, config.head_dim).permute(2, 0, 3, 1, 4)
            mixed.append(F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, config.hidden))
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
        self.checkpoint, self.config, self.device, self.kind = checkpoint, config, device, kind
        self.progress, self.done = progress, 0
        self.prefix = "bert." if "bert.embeddings.word_embeddings.weight" in checkpoint.entries else ""

    def read(self, name: str, *shape: int) -> Tensor:
        value = self.checkpoint.read(self.prefix + name, shape)
        self.done += self.checkpoint.nbytes(self.prefix + name)
        self.progress(self.done, self.checkpoint.total_bytes)
        return value.to(self.device)

    def norm(self, name: str) -> LayerNorm:
        old = f"{self.prefix}{name}.gamma" in self.checkpoint.entries  # names of the first, TensorFlow checkpoints
        parts = ("gamma", "beta") if old else ("weight", "bias")
        weight, bias = (self.read(f"{name}.{part}", self.config.hidden) for part in parts)
        return LayerNorm(weight, bias, self.config.norm_eps)

    def linear(self, names: list[str], rows: int, columns: int) -> Linear:
        """One layer from several of the checkpoint, of so many rows each."""
        weight = torch.cat([self.read(f"{name}.weight", rows, columns) for name in names])
        bias = torch.cat([self.read(f"{name}.bias", rows) for name in names])
        return make_linear(self.kind, weight, bias)

    def layer(self, index: int) -> Layer:
        name, hidden, intermediate = f"encoder.layer.{index}", self.config.hidden, self.config.intermediate
        heads = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        return Layer(
            qkv=self.linear(heads, hidden, hidden),
            out=self.linear([f"{name}.attention.output.dense"], hidden, hidden),
            attention_norm=self.norm(f"{name}.attention.output.LayerNorm"),
            up=self.linear([f"{name}.intermediate.dense"], intermediate, hidden),
            down=self.linear([f"{name}.output.dense"], hidden, intermediate),
            norm=self.norm(f"{name}.output.LayerNorm"),
        )

    def encoder(self) -> Encoder:
        config = self.config
        table = f"{self.prefix}embeddings.word_embeddings.weight"
        words = Embedding(self.checkpoint, table, (config.vocab_size, config.hidden), self.device)
        positions = self.read("embeddings.position_embeddings.weight", config.positions, config.hidden)
        types = self.read("embeddings.token_type_embeddings.weight", config.token_types, config.hidden)
        norm = self.norm("embeddings.LayerNorm")
        layers = [self.layer(index) for index in range(config.layers)]
        self.checkpoint.refuse_unused(IGNORED)
        self.progress(self.checkpoint.total_bytes, self.checkpoint.total_bytes)
        return Encoder(config, words, positions[: config.max_context] + types[0], norm, layers)


def load_encoder(
    checkpoint: Checkpoint,
    config: EncoderConfig,
    *,
    device: str = "cpu",
    kind: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Encoder:
    """Loads and packs the weights. `kind` is a key of `linear.KINDS`, None the best here. Raises ModelError."""
    return _Loader(checkpoint, config, device, kind or best_kind(device), progress).encoder()


class EncoderRunner:
    """A loaded encoder. `step` is to be called from one thread."""

    draft_s = 0.0

    def __init__(self, encoder: Encoder, info: EngineInfo, max_tokens: int):
        """`max_tokens`: of a forward pass; a longer text goes alone."""
        self.encoder, self.info, self.max_tokens = encoder, info, max_tokens
        self.texts: dict[int, list[int]] = {}
        self._progress = np.zeros(1, np.int64)

    @property
    def progress(self) -> int:
        return int(self._progress[0])

    @staticmethod
    def load(
        path: Path | str,
        *,
        max_batch_tokens: int,
        max_batch: int,
        device: str = "cpu",
        memory: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        context: int | None = None,
        threads: int | None = None,
        quantization: str = "none",
        progress: Progress = lambda done, total: None,
    ) -> "EncoderRunner":
        """Loads a checkpoint directory; options as of `ModelRunner.load`. Raises ModelError.

        Blocks take no memory here, they only count tokens: without `num_blocks` as many as `max_batch` texts need.
        """
        if quantization not in QUANTIZATIONS:
            raise ModelError(f"quantization: {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        config = EncoderConfig.load(path)
        if context is not None and not 1 <= context <= config.max_context:
            raise ModelError(f"{path}: context must be from 1 to {config.max_context} tokens, not {context}")
        context = context or config.max_context
        num_blocks = num_blocks or max_batch * -(-context // block_size)
        checkpoint = Checkpoint(path)
        if threads is not None:
            torch.set_num_threads(threads)
        kind = best_kind(device, quantization)
        _warm_up(kind, device)
        plan = MemoryPlan(
            baseline=resident_bytes() if device == "cpu" else 0,
            weights=config.weight_bytes(quantization),
            kv=0,
            activations=activation_bytes(config, max(max_batch_tokens, context)),
        )
        if memory is not None and plan.total > memory:
            raise ModelError(f"not enough memory: {plan.total >> 20} MiB are needed, more than {memory >> 20} MiB")
        encoder = load_encoder(checkpoint, config, device=device, kind=kind, progress=progress)
        trim_heap()
        fits = min(context, num_blocks * block_size)
        info = EngineInfo(num_blocks, block_size, plan.weights, plan.kv, plan.total, fits, config.vocab_size)
        return EncoderRunner(encoder, info, max_batch_tokens)

    @torch.inference_mode()
    def step(
        self, new: Seq[NewSequence], slices: Seq[SliceWork], dropped: Seq[int]
    ) -> tuple[list[SliceOutput], float, float]:
        """Forgets `dropped`, learns `new`, runs `slices`, each a whole text whose embedding is its output.

        Outputs in order, seconds of forward pass and of sampling, which there is none of.
        """
        started = perf_counter()
        for name in dropped:
            self.texts.pop(name, None)
        self.texts |= {sequence.id: sequence.tokens for sequence in new}
        outputs = {work.id: SliceOutput([], error=self._fault(work)) for work in slices}
        valid = [work.id for work in slices if not outputs[work.id].error]
        valid.sort(key=lambda name: len(self.texts[name]))
        for some in in_parts(valid, self.max_tokens, lambda name: len(self.texts[name])):
            outputs |= zip(some, self._run([self.texts[name] for name in some]), strict=True)
        return [outputs[work.id] for work in slices], perf_counter() - started, 0.0

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
            rows = self.encoder.forward(texts, self._progress).cpu().numpy().astype("<f4", copy=False)
        except Exception as error:
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
