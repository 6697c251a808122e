"""What a directory says of an encoder: BERT's config.json, and how sentence-transformers makes one vector of a text.

No torch here: the front end imports it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.engine.config import ENCODERS, ModelError, _Keys, read_json

POOLINGS = ("mean", "cls", "max")
# Keys that may have one value only, which is their default too.
FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}


def is_encoder(path: Path | str) -> bool:
    """Whether `path`/config.json names an encoder. Raises ModelError."""
    return any(name in ENCODERS for name in read_json(Path(path) / "config.json").get("architectures") or [])


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """One encoder, as numbers, and how the states of a text's tokens become its embedding."""

    vocab_size: int
    hidden: int  # numbers of an embedding too
    intermediate: int
    layers: int
    heads: int
    norm_eps: float
    positions: int  # rows of the table of positions
    token_types: int
    max_context: int  # tokens of a text, at most `positions`
    pooling: str  # one of POOLINGS
    normalize: bool  # to length 1

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def weight_bytes(self, quantization: str = "none") -> int:
        """Bytes of the weights that are held: all but the table of words, which stays in its file.

        Matrices are float32, or with "int8" a byte an element, a scale and a sum a row; the rest is float32.
        """
        matrices = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        rows = 5 * self.hidden + self.intermediate
        vectors = 4 * (self.layers * (rows + 4 * self.hidden) + (2 + self.max_context) * self.hidden)
        if quantization == "int8":
            return self.layers * (matrices + 8 * rows) + vectors
        return 4 * self.layers * matrices + vectors

    @staticmethod
    def load(path: Path | str) -> "EncoderConfig":
        """Reads config.json, and modules.json and what it names where they are there. Raises ModelError."""
        folder = Path(path)
        raw, where = read_json(folder / "config.json"), str(folder / "config.json")
        keys = _Keys(raw, {}, where)
        if raw.get("quantization_config"):
            raise ModelError(f"{where}: quantization_config: quantized checkpoints are not supported")
        for key, value in FIXED.items():
            if keys.get(key, value) != value:
                raise ModelError(f"{where}: {key} must be {value!r} for an encoder, not {raw[key]!r}")
        hidden, heads = keys.integer("hidden_size", 768), keys.integer("num_attention_heads", 12)
        if hidden % heads:
            raise ModelError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        positions = keys.integer("max_position_embeddings", 512)
        pooling, normalize = _modules(folder, hidden)
        return EncoderConfig(
            vocab_size=keys.integer("vocab_size", 30522),
            hidden=hidden,
            intermediate=keys.integer("intermediate_size", 3072),
            layers=keys.integer("num_hidden_layers", 12),
            heads=heads,
            norm_eps=keys.number("layer_norm_eps", 1e-12),
            positions=positions,
            token_types=keys.integer("type_vocab_size", 2),
            max_context=min(positions, _longest(folder, positions)),
            pooling=pooling,
            normalize=normalize,
        )


def _longest(folder: Path, positions: int) -> int:
    """Tokens of a text, as sentence_bert_config.json says."""
    file = folder / "sentence_bert_config.json"
    if not file.exists():
        return positions
    keys = _Keys(read_json(file), {}, str(file))
    if keys.flag("do_lower_case"):
        raise ModelError(f"{file}: do_lower_case must be false: tokenizer.json says how text is normalised")
    return keys.integer("max_seq_length", positions)


def _modules(folder: Path, hidden: int) -> tuple[str, bool]:
    """Pooling and whether its result is normalised; without modules.json the mean, as it is."""
    file = folder / "modules.json"
    if not file.exists():
        return "mean", False
    listed = read_json(file, list)
    try:
        kinds = [(module["type"].rsplit(".", 1)[-1], Path(module["path"])) for module in listed]
    except (TypeError, KeyError, AttributeError):
        raise ModelError(f"{file}: every module needs type and path") from None
    names = [kind for kind, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(f"{file}: modules must be Transformer, Pooling and perhaps Normalize, not {', '.join(names)}")
    if kinds[0][1] != Path():
        raise ModelError(f"{file}: the path of the Transformer must be empty, not {str(kinds[0][1])!r}")
    return _pooling(folder / kinds[1][1] / "config.json", hidden), names[-1] == "Normalize"


def _pooling(file: Path, hidden: int) -> str:
    """The one mode that is on: `pooling_mode` (sentence-transformers 6), or a `pooling_mode_...` that is true."""
    raw = read_json(file)
    width = raw.get("embedding_dimension", raw.get("word_embedding_dimension", hidden))
    if width != hidden:
        raise ModelError(f"{file}: word_embedding_dimension {width!r} is not hidden_size {hidden}")
    chosen = raw.get("pooling_mode")
    if chosen is None:
        prefix = "pooling_mode_"
        on = [key.removeprefix(prefix).removesuffix("_tokens") for key in raw if key.startswith(prefix) and raw[key]]
        chosen = ", ".join(on).replace("cls_token", "cls") or "mean"
    if chosen not in POOLINGS:
        raise ModelError(f"{file}: pooling_mode must be one of {', '.join(POOLINGS)}, not {chosen!r}")
    return chosen
