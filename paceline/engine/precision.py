"""Which numbers a device holds weights in, and keys and values."""

from pathlib import Path
from typing import NamedTuple

from paceline.engine.config import DTYPES, KEPT_BFLOAT16, KV_DTYPES, QUANTIZATIONS, ModelError
from paceline.engine.tensor_files import is_bfloat16
from paceline.processor import HAS_TILES


class Precision(NamedTuple):
    weights: str  # one of `config.PRECISIONS`
    kv: str  # of keys and values, one of `config.DTYPES`


def precision(
    device: str, dtype: str, quantization: str, path: Path | None, kv_cache_dtype: str = "auto",
    key: str = "quantization",
) -> Precision:  # fmt: skip
    """What the model of the checkpoint in `path` is held in (None: of one in float32).

    `dtype` "auto" is bfloat16 on GPUs. CPUs compute in float32 then, and weights that are bfloat16 in the checkpoint
    stay it; "float32" makes floats of them. "bfloat16" makes that of all weights but int8, and of what they are
    multiplied by where the processor multiplies pairs of it. With `kv_cache_dtype` "auto" keys and values are as
    what is computed in, but in half precision beside int8 and "bfloat16", where much more is rounded. Raises
    ModelError, with the `key` that `quantization` has.
    """
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"{key}: {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if kv_cache_dtype not in ("auto", *KV_DTYPES):
        raise ModelError(f"kv-cache-dtype: {kv_cache_dtype!r} is not one of auto, {', '.join(KV_DTYPES)}")
    if device == "cpu":
        able = ("auto", "float32", "bfloat16") if HAS_TILES else ("auto", "float32")
        if dtype not in able:
            raise ModelError(f"dtype: this processor does not compute in {dtype}; valid are {', '.join(able)}")
        weights = quantization
        if HAS_TILES and quantization == "none":
            if dtype == "bfloat16":
                weights = "bfloat16"
            elif dtype == "auto" and path is not None and is_bfloat16(path):
                weights = KEPT_BFLOAT16
        kv = "float16" if weights in ("int8", "bfloat16") else "float32"
        return Precision(weights, kv if kv_cache_dtype == "auto" else kv_cache_dtype)
    if quantization != "none":
        raise ModelError(f"{key}: {quantization} is for CPUs; on {device} only none is valid")
    if kv_cache_dtype != "auto":
        raise ModelError(f"kv-cache-dtype: {kv_cache_dtype} is for CPUs; on {device} only auto is valid")
    held = {"auto": "bfloat16" if device.startswith("cuda") else "float32"}.get(dtype, dtype)
    return Precision(held.replace("float32", "none"), held)
