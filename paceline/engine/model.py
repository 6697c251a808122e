"""The decoder: one config-driven stack for Llama 2 and 3, Mistral, Qwen2 and Qwen3.

One forward runs over the flattened tokens of a hybrid batch: linear layers see all tokens at once, so that weights are
read once a step (SARATHI, section 3), and attention is per slice. Weights are computed with in float32. The code takes
a device; it was run and measured on CPU only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.engine.attention import StepPlan, attend
from paceline.engine.config import ModelConfig
from paceline.engine.kv_cache import KVCache
from paceline.engine.linear import LINEARS, Linear, best_kind, padded_rows
from paceline.engine.rope import frequencies, interleave, rotate_, rotations
from paceline.engine.weights import Checkpoint

Progress = Callable[[int, int], None]  # bytes loaded, bytes in all

# Buffers that old checkpoints carry and that follow from the config, and the head of a tied model.
IGNORED = ("rotary_emb.inv_freq", "masked_bias", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Query and key rows of `qkv` (and their norms) are interleaved for `rotate_`."""

    qkv: Linear  # hidden -> (heads + 2 kv_heads) head_dim
    out: Linear  # heads head_dim -> hidden
    gate_up: Linear  # hidden -> 2 intermediate
    down: Linear  # intermediate -> hidden
    input_norm: Tensor  # [hidden]
    post_norm: Tensor  # [hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None


class Embedding:
    """Token embeddings, left in the mapped file on CPU: only the rows of a step are read and converted."""

    def __init__(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], device: str):
        table = checkpoint.view(name, shape)
        self.table = table if device == "cpu" else table.to(device)
        self.checkpoint, self.name = (checkpoint, name) if device == "cpu" else (None, name)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Token ids [tokens] to [tokens, hidden] float32."""
        rows = F.embedding(tokens, self.table).float()
        if self.checkpoint is not None:
            # The system maps 16 pages around each row; without this the whole table would be resident in time.
            self.checkpoint.release(self.name)
        return rows


class Decoder:
    """A model's weights and its forward pass."""

    def __init__(self, config: ModelConfig, embedding: Embedding, layers: list[Layer], norm: Tensor, head: Linear):
        self.config, self.embedding, self.layers, self.norm, self.head = config, embedding, layers, norm, head
        self.inv_freq, self.rope_factor = frequencies(config.rope, config.head_dim)
        self.inv_freq = self.inv_freq.to(norm.device)
        self.kind = next(kind for kind, cls in LINEARS.items() if isinstance(head, cls))

    def forward(
        self, tokens: Tensor, plan: StepPlan, cache: KVCache, tick: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Token ids [tokens] to hidden states [tokens, hidden] before the last norm; writes their keys and values."""
        count = tokens.shape[0]
        x = self.embedding(tokens)
        pad = padded_rows(count, self.kind) - count
        if pad:
            x = F.pad(x, (0, 0, 0, pad))
        turns = rotations(self.inv_freq, self.rope_factor, plan.positions)
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(x, x.shape[1:], layer.input_norm, self.config.norm_eps)
            x += self._attention(index, layer, normed, turns, plan, cache)
            normed = F.rms_norm(x, x.shape[1:], layer.post_norm, self.config.norm_eps)
            x += self._mlp(layer, normed)
            tick()
        return x[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] before the last norm to logits [rows, vocab] float32."""
        rows = hidden.shape[0]
        x = F.rms_norm(hidden, hidden.shape[1:], self.norm, self.config.norm_eps)
        pad = padded_rows(rows, self.kind) - rows
        return self.head(F.pad(x, (0, 0, 0, pad)) if pad else x)[:rows].float()

    def _attention(
        self, index: int, layer: Layer, x: Tensor, turns: Tensor, plan: StepPlan, cache: KVCache
    ) -> Tensor:
        config, count = self.config, turns.shape[0]
        heads = layer.qkv(x).unflatten(1, (-1, config.head_dim))  # [padded tokens, heads + 2 kv_heads, head_dim]
        queries, keys, values = heads[:count].split((config.heads, config.kv_heads, config.kv_heads), dim=1)
        if layer.q_norm is not None:
            queries = F.rms_norm(queries, (config.head_dim,), layer.q_norm, config.norm_eps)
            keys = F.rms_norm(keys, (config.head_dim,), layer.k_norm, config.norm_eps)
            rotate_(queries, turns)
            rotate_(keys, turns)
        else:
            rotate_(heads[:count, : config.heads + config.kv_heads], turns)
        cache.write(index, plan.rows_written, keys, values)
        mixed = attend(queries, cache, index, config.windows[index], plan).flatten(1)
        return layer.out(F.pad(mixed, (0, 0, 0, x.shape[0] - count)) if x.shape[0] > count else mixed)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=1)
        return layer.down(F.silu(gate).mul_(up))


class _Loader:
    """Builds a Decoder from a checkpoint, tensor by tensor: never more than one fused layer is held twice."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: str, kind: str, progress: Progress):
        self.checkpoint, self.config, self.device, self.linear = checkpoint, config, device, LINEARS[kind]
        self.progress, self.done = progress, 0

    def read(self, name: str, *shape: int, pairs: int = 0) -> Tensor:
        """A tensor in float32; with `pairs`, its rows are those of that many heads and are interleaved."""
        value = self.checkpoint.read(name, shape)
        self.done += self.checkpoint.nbytes(name)
        self.progress(self.done, self.checkpoint.total_bytes)
        return interleave(value, pairs) if pairs else value

    def fused(self, parts: list[tuple[str, int, int]], columns: int, bias: bool) -> Linear:
        """One linear layer from several of the checkpoint: (name, rows, heads to interleave or 0) each."""
        whole = torch.empty(sum(rows for _, rows, _ in parts), columns)
        biases = torch.empty(whole.shape[0]) if bias else None
        begin = 0
        for name, rows, pairs in parts:
            whole[begin : begin + rows] = self.read(f"{name}.weight", rows, columns, pairs=pairs)
            if biases is not None:
                biases[begin : begin + rows] = self.read(f"{name}.bias", rows, pairs=pairs)
            begin += rows
        return self.linear(whole.to(self.device), None if biases is None else biases.to(self.device))

    def layer(self, index: int) -> Layer:
        config, name = self.config, f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv = [(f"{attention}.q_proj", queries, config.heads), (f"{attention}.k_proj", keys, config.kv_heads)]
        qkv.append((f"{attention}.v_proj", keys, 0))
        gate_up = [(f"{mlp}.{part}_proj", config.intermediate, 0) for part in ("gate", "up")]
        norm = dict.fromkeys(("q_norm", "k_norm"))
        if config.qk_norm:
            norm = {key: self.read(f"{attention}.{key}.weight", config.head_dim, pairs=1) for key in norm}
        return Layer(
            qkv=self.fused(qkv, config.hidden, config.qkv_bias),
            out=self.fused([(f"{attention}.o_proj", config.hidden, 0)], queries, config.out_bias),
            gate_up=self.fused(gate_up, config.hidden, config.mlp_bias),
            down=self.fused([(f"{mlp}.down_proj", config.hidden, 0)], config.intermediate, config.mlp_bias),
            input_norm=self.read(f"{name}.input_layernorm.weight", config.hidden).to(self.device),
            post_norm=self.read(f"{name}.post_attention_layernorm.weight", config.hidden).to(self.device),
            **{key: None if value is None else value.to(self.device) for key, value in norm.items()},
        )


def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: str = "cpu",
    kind: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Decoder:
    """Loads and packs the weights. `kind` is a key of `linear.LINEARS`, None the best here. Raises ModelError."""
    loader = _Loader(checkpoint, config, device, kind or best_kind(device), progress)
    table = "model.embed_tokens"
    # The head is the largest matrix: it goes first, while little else is held beside its two copies.
    head = loader.fused([(table if config.tied else "lm_head", config.vocab_size, 0)], config.hidden, False)
    layers = [loader.layer(index) for index in range(config.layers)]
    norm = loader.read("model.norm.weight", config.hidden).to(device)
    embedding = Embedding(checkpoint, f"{table}.weight", (config.vocab_size, config.hidden), device)
    checkpoint.refuse_unused(IGNORED)
    progress(checkpoint.total_bytes, checkpoint.total_bytes)
    return Decoder(config, embedding, layers, norm, head)
