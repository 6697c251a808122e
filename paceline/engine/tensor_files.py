"""Where the tensors of a safetensors checkpoint lie: one file or shards with an index. Never pickle, never code.

The format: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://huggingface.co/docs/safetensors). It is read here and not by the library so that every fault names the tensor
and the file, and so that the pages of a tensor can be given back once it is converted.
"""

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from paceline.engine.config import ModelError, read_json

SIZES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of an element
UNREAD = {"I64": 8}  # positions 0, 1, 2, ..., which checkpoints of old encoders carry
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20  # bytes; the format's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


def files_of(folder: Path) -> list[Path]:
    """Of a checkpoint. Raises ModelError."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such directory")
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    index = folder / INDEX
    if index.exists():
        return _shards(index)
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise ModelError(
            f"{folder}: only {pickled[0]} and no .safetensors: pickled weights can run code and are never loaded; "
            "convert the checkpoint to safetensors"
        )
    raise ModelError(f"{folder}: neither model.safetensors nor {INDEX}")


def _shards(index: Path) -> list[Path]:
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to files")
    files = sorted(set(weights.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{index}: weight_map: {file!r} is not the name of a .safetensors file of this directory")
        if not (index.parent / file).exists():
            raise ModelError(f"{index.parent / file}: no such file, though {index.name} lists it")
    return [index.parent / file for file in files]


def mapped(path: Path) -> mmap.mmap:
    """A file of tensors, privately and writable, which torch wants: pages that are only read stay the file's. Raises
    ModelError."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be mapped: {error}") from None


def is_bfloat16(folder: Path) -> bool:
    """Whether all matrices of a checkpoint are; not of one that cannot be read: whoever loads it will say so."""
    matrices = []
    try:
        for path in files_of(folder):
            with mapped(path) as data:
                matrices += [entry.dtype for entry in header(path, data).values() if len(entry.shape) > 1]
    except ModelError:
        return False
    return set(matrices) == {"BF16"}


def header(path: Path, data: mmap.mmap) -> dict[str, Entry]:
    """The tensors of a file, by name. Raises ModelError."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MAX_HEADER):
        raise ModelError(f"{path}: not a safetensors file, or cut off within its header")
    try:
        fields = json.loads(data[8 : 8 + size])
    except ValueError as error:
        raise ModelError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    fields.pop("__metadata__", None)
    return {name: _entry(path, name, one, 8 + size, len(data)) for name, one in fields.items()}


def _entry(path: Path, name: str, fields: Any, start: int, size: int) -> Entry:
    try:
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        begin, end = fields["data_offsets"]
        valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise ModelError(f"{path}: tensor {name} has a malformed header entry")
    if dtype not in SIZES and dtype not in UNREAD:
        raise ModelError(f"{path}: tensor {name} has dtype {dtype}; supported are {', '.join(SIZES)}")
    if end - begin != prod(shape) * (SIZES.get(dtype) or UNREAD[dtype]):
        raise ModelError(f"{path}: tensor {name}: {end - begin} bytes for shape {list(shape)} of {dtype}")
    if start + end > size:
        raise ModelError(f"{path}: cut off: tensor {name} ends at byte {start + end} of {size}")
    return Entry(path, dtype, shape, start + begin, start + end)
