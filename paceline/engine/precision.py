"""Which numbers a device holds weights in."""

from pathlib import Path

from paceline.engine.config import DTYPES, KEPT_BFLOAT16, QUANTIZATIONS, ModelError
from paceline.engine.tensor_files import is_bfloat16
from paceline.processor import KEEPS_BF16


def precision(device: str, dtype: str, quantization: str, path: Path | None, key: str = "quantization") -> str:
    """Which of `config.PRECISIONS` it is for weights of the checkpoint in `path` (None: of some in float32).

    `dtype` "auto" is bfloat16 on GPUs. On CPUs, which compute in float32 whatever they hold, weights that are bfloat16
    there stay it, and "float32" makes floats of them. Raises ModelError, with the `key` that `quantization` has.
    """
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"{key}: {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if device == "cpu":
        if dtype not in ("auto", "float32"):
            raise ModelError(f"dtype: CPUs compute in float32, not in {dtype}; valid are auto and float32")
        keeps = KEEPS_BF16 and dtype == "auto" and quantization == "none"
        return KEPT_BFLOAT16 if keeps and path is not None and is_bfloat16(path) else quantization
    if quantization != "none":
        raise ModelError(f"{key}: {quantization} is for CPUs; on {device} only none is valid")
    half = "bfloat16" if device.startswith("cuda") else "float32"
    return {"auto": half}.get(dtype, dtype).replace("float32", "none")
