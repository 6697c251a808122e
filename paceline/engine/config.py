"""What a checkpoint directory says of itself: config.json and generation_config.json as one frozen value.

Keys and their defaults are those of Hugging Face's classes, in both styles: `rope_scaling` beside
`rope_theta` (old) and `rope_parameters` (transformers 5). Nothing from the directory is ever run (`auto_map`).
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.drafter_name import DrafterName


class ModelError(ValueError):
    """A checkpoint that cannot be served: the message names the file, the key or tensor, and what would be valid."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs between the supported decoders; a missing key takes the default of the original class."""

    qkv_bias: bool | str  # a config key, or fixed
    out_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool = False  # RMS norm over each head's query and key, before the rotation
    window: str = "none"  # all: `sliding_window` in every layer; if_used: if so asked; layers: as `layer_types` say
    experts: tuple[str, ...] = ()  # names in the checkpoint: of the block, an expert's gate, up and down; none: dense
    expert_intermediate: str = "intermediate_size"  # a config key
    norm_topk: bool | str = True
    defaults: tuple[tuple[str, Any], ...] = ()


SMALL_TABLE = 64 << 20  # bytes

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("attention_bias", "attention_bias", "mlp_bias"),
    "MistralForCausalLM": Architecture(
        False, False, False, window="all",
        defaults=(("num_key_value_heads", 8), ("sliding_window", 4096), ("max_position_embeddings", 131072)),
    ),
    "Qwen2ForCausalLM": Architecture(
        True, False, False, window="layers",
        defaults=(("num_key_value_heads", 32), ("sliding_window", 4096), ("max_position_embeddings", 32768)),
    ),
    "Qwen3ForCausalLM": Architecture(
        "attention_bias", "attention_bias", False, qk_norm=True, window="layers",
        defaults=(
            ("num_key_value_heads", 32), ("sliding_window", 4096), ("max_position_embeddings", 32768),
            ("head_dim", 128),
        ),
    ),
    "MixtralForCausalLM": Architecture(
        False, False, False, window="all", experts=("block_sparse_moe", "w1", "w3", "w2"),
        defaults=(
            ("num_key_value_heads", 8), ("max_position_embeddings", 131072), ("rms_norm_eps", 1e-5),
            ("rope_theta", 1e6), ("num_local_experts", 8), ("num_experts_per_tok", 2),
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "attention_bias", "attention_bias", False, qk_norm=True, window="if_used",
        experts=("mlp", "gate_proj", "up_proj", "down_proj"), expert_intermediate="moe_intermediate_size",
        norm_topk="norm_topk_prob",
        defaults=(
            ("num_key_value_heads", 4), ("sliding_window", 4096), ("max_position_embeddings", 32768),
            ("moe_intermediate_size", 768), ("num_local_experts", 128), ("num_experts_per_tok", 8),
        ),
    ),
}  # fmt: skip

ENCODERS = ("BertForMaskedLM", "BertModel")  # `encoder_config` reads these

QUANTIZATIONS = ("none", "int8")
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("float32", "float16")  # of keys and values, on CPUs
KEPT_BFLOAT16 = "kept_bfloat16"
# What weights are held in: on CPUs float32 ("none"), int8, bfloat16 as in the checkpoint where all is computed in
# float32, or bfloat16 that is asked for; on GPUs float32 or half of it, in which those compute.
PRECISIONS = (*QUANTIZATIONS, "bfloat16", "float16", KEPT_BFLOAT16)

ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how positions are stretched beyond the trained length."""

    theta: float = 10000.0
    kind: str = "default"  # a key of ROPE_TYPES
    factor: float = 1.0
    original_context: int = 0  # tokens
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder, as numbers. `windows[i]` is how many positions back (itself included) layer i sees; None is all.

    In the layers that `sparse` lists, a router sends each token to `experts_per_token` of `experts` MLPs.
    """

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int  # tokens, unless more are asked for
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    eos_ids: tuple[int, ...]
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    sparse: frozenset[int] = frozenset()
    norm_topk: bool = True  # the weights of a token's experts sum to 1
    stretched: int = 0  # tokens that may be asked for, where it is more than `max_context`

    def kv_bytes_per_token(self, dtype: str = "float32") -> int:
        """Bytes of key and value in all layers, each number one of DTYPES."""
        return 2 * dtype_bytes(dtype) * self.layers * self.kv_heads * self.head_dim

    def weight_bytes(self, quantization: str = "none") -> int:
        """Bytes of the weights that are held: all but the embedding table (`table_bytes`).

        Matrices are float32, or of two bytes an element, or with "int8" of one, a scale and a sum a row; the rest is
        float32. `quantization`, here and below, is one of PRECISIONS.
        """
        layers = sum(self.layer_bytes(layer, quantization) for layer in range(self.layers))
        return layers + matrix_bytes(self.vocab_size, self.hidden, quantization) + 4 * self.hidden

    @property
    def table_bytes(self) -> int:
        """Of the embedding table, where a CPU holds it: what drafts in one call needs it there. 0:
        it stays there."""
        size = 4 * self.vocab_size * self.hidden
        return size if size <= SMALL_TABLE else 0

    def layer_bytes(self, layer: int, quantization: str = "none", experts: int | None = None) -> int:
        """Of one layer, with so many of its experts (None: all). A router is float32."""
        matrices = self.layer_matrices(layer, self.experts if experts is None else experts)
        vectors = 2 * self.hidden + 2 * self.head_dim * self.qk_norm + self.hidden * self.out_bias
        vectors += (self.heads + 2 * self.kv_heads) * self.head_dim * self.qkv_bias
        if layer in self.sparse:
            vectors += self.experts * self.hidden
        else:
            vectors += (2 * self.intermediate + self.hidden) * self.mlp_bias
        return sum(matrix_bytes(*shape, quantization) for shape in matrices) + 4 * vectors

    def layer_matrices(self, layer: int, experts: int) -> list[tuple[int, int]]:
        """[out, in] of a layer's linear layers without a router, with so many experts where it has them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner, count = (self.expert_intermediate, experts) if layer in self.sparse else (self.intermediate, 1)
        mlp = [(2 * inner, self.hidden), (self.hidden, inner)]
        return [(queries + 2 * keys, self.hidden), (self.hidden, queries), *mlp * count]

    def exit_layers(self, asked: int | None) -> int:
        """The layers behind which early exit drafts; None: a quarter of all. Raises ModelError."""
        layers = max(1, self.layers // 4) if asked is None else asked
        if not 1 <= layers < self.layers:
            raise ModelError(f"early_exit_layers: {layers} is not from 1 to {self.layers - 1}")
        return layers

    def first(self, layers: int) -> "ModelConfig":
        """Of the model that ends after so many."""
        sparse = frozenset(layer for layer in self.sparse if layer < layers)
        return replace(self, layers=layers, windows=self.windows[:layers], sparse=sparse)

    @staticmethod
    def load(path: Path | str) -> "ModelConfig":
        """Reads `path`/config.json (and generation_config.json). Raises ModelError."""
        folder = Path(path)
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return _parse(raw, read_json(generation) if generation.exists() else {}, str(folder / "config.json"))


def draft_config(drafter: DrafterName, target: Path, exit_layers: int | None, devices: int) -> ModelConfig | None:
    """Of what the first of a target's devices holds to draft by, beside its part of the target.

    A draft model, or for early exit the first layers, which a single device has anyway. Raises ModelError.
    """
    if drafter.kind == "model":
        return ModelConfig.load(drafter.path)
    if drafter.kind == "early_exit" and devices > 1:
        config = ModelConfig.load(target)
        return config.first(config.exit_layers(exit_layers))
    return None


def dtype_bytes(dtype: str) -> int:
    """Of a number, of one of DTYPES."""
    return 4 if dtype == "float32" else 2


def matrix_bytes(rows: int, columns: int, quantization: str) -> int:
    """Of a linear layer's weights, in one of PRECISIONS."""
    if quantization == "int8":
        return rows * (columns + 8)
    return rows * columns * (4 if quantization == "none" else 2)


def read_json(path: Path, kind: type = dict) -> Any:
    """A JSON object (or with `kind` a list) from a file. Raises ModelError, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, kind):
        names = {dict: "object", list: "list"}
        raise ModelError(f"{path}: must hold a JSON {names[kind]}, not {type(value).__name__}")
    return value


class _Keys:
    """Typed access to the keys of one config file, with the architecture's defaults beneath."""

    def __init__(self, raw: dict[str, Any], defaults: dict[str, Any], where: str):
        self.raw, self.defaults, self.where = raw, defaults, where

    def get(self, key: str, default: Any = None) -> Any:
        return self.raw.get(key, self.defaults.get(key, default))

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(f"{self.where}: {key} must be a whole number of at least {least}, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{self.where}: {key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: bool | str, default: bool = False) -> bool:
        if isinstance(key, bool):
            return key
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value


def named_eos(generation: dict[str, Any], config: dict[str, Any]) -> Any:
    """What ends a sequence by generation_config.json, or else by config.json: ids, one, or None."""
    named = generation.get("eos_token_id")
    return config.get("eos_token_id") if named is None else named


def _parse(raw: dict[str, Any], generation: dict[str, Any], where: str) -> ModelConfig:
    name, rules = _architecture(raw, where)
    keys = _Keys(raw, dict(rules.defaults), where)
    _refuse_unsupported(raw, keys, where)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    # An explicit null means "as many as heads"; a missing key is the class's default.
    kv_heads = keys.integer("num_key_value_heads", heads)
    head_dim = keys.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim must be even for rotary embeddings, not {head_dim}")
    max_context = keys.integer("max_position_embeddings", 2048)
    rope, stretched = _rope(keys, max_context)
    return ModelConfig(
        architecture=name,
        vocab_size=keys.integer("vocab_size"),
        hidden=hidden,
        intermediate=keys.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        max_context=max_context,
        stretched=stretched,
        tied=keys.flag("tie_word_embeddings"),
        qkv_bias=keys.flag(rules.qkv_bias),
        out_bias=keys.flag(rules.out_bias),
        mlp_bias=keys.flag(rules.mlp_bias),
        qk_norm=rules.qk_norm,
        windows=_windows(keys, rules, layers),
        rope=rope,
        eos_ids=_token_ids(named_eos(generation, raw), "eos_token_id", where),
        **_experts(keys, rules, layers),
    )


def _experts(keys: _Keys, rules: Architecture, layers: int) -> dict[str, Any]:
    """The fields of a mixture of experts; none for a dense model."""
    if not rules.experts:
        return {}
    name = "num_experts" if "num_experts" in keys.raw else "num_local_experts"  # before transformers 5, and since
    experts, per_token = keys.integer(name), keys.integer("num_experts_per_tok")
    if per_token > experts:
        raise ModelError(f"{keys.where}: num_experts_per_tok must be from 1 to {name} {experts}, not {per_token}")
    dense = keys.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
        raise ModelError(f"{keys.where}: mlp_only_layers must list layers from 0 to {layers - 1}, not {dense!r}")
    step = keys.integer("decoder_sparse_step", 1)
    return dict(
        experts=experts,
        experts_per_token=per_token,
        expert_intermediate=keys.integer(rules.expert_intermediate),
        sparse=frozenset(layer for layer in range(step - 1, layers, step) if layer not in dense),
        norm_topk=keys.flag(rules.norm_topk),
    )


def _architecture(raw: dict[str, Any], where: str) -> tuple[str, Architecture]:
    listed = raw.get("architectures") or []
    for name in listed:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    found = ", ".join(map(str, listed)) or f"none (model_type {raw.get('model_type', 'missing')})"
    supported = f"{', '.join(sorted(ARCHITECTURES))}; for embeddings {', '.join(ENCODERS)}"
    raise ModelError(f"{where}: architectures: {found} is not supported; supported are {supported}")


def _refuse_unsupported(raw: dict[str, Any], keys: _Keys, where: str) -> None:
    if raw.get("quantization_config"):
        raise ModelError(f"{where}: quantization_config: quantized checkpoints are not supported")
    if keys.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act must be silu, not {raw['hidden_act']!r}")


def _windows(keys: _Keys, rules: Architecture, layers: int) -> tuple[int | None, ...]:
    if rules.window == "none" or keys.get("sliding_window") is None:
        return (None,) * layers
    if rules.window in ("layers", "if_used") and not keys.flag("use_sliding_window"):
        return (None,) * layers
    window = keys.integer("sliding_window")
    if rules.window != "layers":
        return (window,) * layers
    kinds = keys.get("layer_types")
    if kinds is None:
        first = keys.integer("max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(known):
        raise ModelError(f"{keys.where}: layer_types must list {layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _rope(config: _Keys, max_context: int) -> tuple[RopeConfig, int]:
    """And for how many tokens it says it is: yarn is often added to a config that keeps the trained length (Qwen)."""
    raw, where = config.raw, config.where
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ModelError(f"{where}: rope_scaling must be an object, not {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"{where}: rope_type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    keys = _Keys(given, {}, f"{where}: rope_scaling")
    for key in ROPE_TYPES[kind]:
        if given.get(key) is None:
            raise ModelError(f"{where}: rope_type {kind} needs {key}")
    if keys.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise ModelError(f"{where}: partial_rotary_factor other than 1 is not supported")
    original = keys.integer("original_max_position_embeddings", max_context)
    factor = given.get("factor")  # yarn may leave it out
    optional = {
        key: None if given.get(key) is None else keys.number(key, 1.0)
        for key in ("attention_factor", "mscale", "mscale_all_dim")
    }
    rope = RopeConfig(
        theta=keys.number("rope_theta", config.number("rope_theta", 10000.0)),
        kind=kind,
        factor=max_context / original if factor is None else keys.number("factor", 1.0),
        original_context=original,
        low_freq_factor=keys.number("low_freq_factor", 1.0),
        high_freq_factor=keys.number("high_freq_factor", 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=keys.flag("truncate", True),
        **optional,
    )
    says = kind == "yarn" and "original_max_position_embeddings" in given
    return rope, int(original * rope.factor) if says else 0


def _token_ids(value: Any, key: str, where: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise ModelError(f"{where}: {key} must be a token id or a list of them, not {value!r}")
    return tuple(ids)
