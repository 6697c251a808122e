"""The engine of a checkpoint: a decoder or an encoder."""

from pathlib import Path
from typing import Any

from paceline.core.drafter_name import DrafterName
from paceline.core.work import Engine
from paceline.engine.config import ModelConfig, ModelError, draft_config
from paceline.engine.encoder_config import EncoderConfig, is_encoder
from paceline.engine.parallel import Place, part_of
from paceline.engine.precision import precision


def load_engine(
    path: Path, *, drafter: str = "ngram", early_exit_layers: int | None = None, draft_quantization: str | None = None,
    **options: Any,
) -> Engine:  # fmt: skip
    """As config.json's architectures say, with the options of `ModelRunner.load`. Raises ModelError."""
    if not is_encoder(path):
        from paceline.engine.runner import ModelRunner  # what the other kind does not need takes memory

        return ModelRunner.load(
            path, drafter=drafter, early_exit_layers=early_exit_layers, draft_quantization=draft_quantization, **options
        )
    if drafter != "ngram" or early_exit_layers is not None or draft_quantization is not None:
        raise ModelError(f"drafter: {path} is an encoder, which has no tokens to draft")
    from paceline.engine.encoder import EncoderRunner

    return EncoderRunner.load(path, **options)


def weight_bytes(
    path: Path, place: Place, *, device: str = "cpu", dtype: str = "auto", quantization: str = "none",
    drafter: str = "ngram", early_exit_layers: int | None = None, draft_quantization: str | None = None,
) -> int:  # fmt: skip
    """Of what a worker holds, with options of `ModelRunner.load`: its part, and the first one what it drafts by. Raises
    ModelError."""
    if is_encoder(path):
        return EncoderConfig.load(path).weight_bytes(quantization) // place.parallel.devices
    held = precision(device, dtype, quantization, path).weights
    part = part_of(ModelConfig.load(path), place, held)
    own = part.weight_bytes(held) + (part.config.table_bytes if len(part.embedding) else 0)
    drafts = DrafterName.parse(drafter)
    draft = draft_config(drafts, path, early_exit_layers, place.parallel.devices)
    if draft is None or place.number > 0:
        return own
    folder = Path(drafts.path) if drafts.kind == "model" else path
    held = precision(device, dtype, draft_quantization or quantization, folder).weights
    return own + draft.weight_bytes(held) + draft.table_bytes
