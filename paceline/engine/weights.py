"""Safetensors checkpoints, memory-mapped: one file or shards with an index. Never pickle, never code.

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

import torch
from torch import Tensor

from paceline.engine.config import ModelError, read_json

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
UNREAD = {"I64": 8}  # bytes of an element: positions 0, 1, 2, ..., which checkpoints of old encoders carry
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


class Checkpoint:
    """The tensors of a directory, by name. Pages count in the process only while they are in use."""

    def __init__(self, folder: Path | str):
        """Maps the files and checks every header. Raises ModelError."""
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self.maps: dict[Path, mmap.mmap] = {}
        self.used: set[str] = set()
        for file in _files(self.folder):
            self._open(file)
        self._check_index()

    @property
    def total_bytes(self) -> int:
        return sum(entry.end - entry.begin for entry in self.entries.values())

    def view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in place, in the file's dtype. Raises ModelError when it is missing or has another shape."""
        entry = self.entries.get(name)
        if entry is None:
            raise ModelError(f"{self.folder}: tensor {name} is missing")
        if entry.shape != shape:
            raise ModelError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}")
        if entry.dtype in UNREAD:
            raise ModelError(f"{entry.file}: tensor {name} has dtype {entry.dtype}; supported are {', '.join(DTYPES)}")
        self.used.add(name)
        return torch.frombuffer(
            self.maps[entry.file], dtype=DTYPES[entry.dtype], count=prod(shape), offset=entry.begin
        ).view(shape)

    def place(self, name: str) -> tuple[Path, int]:
        """The tensor's file, and the byte at which it begins there."""
        return self.entries[name].file, self.entries[name].begin

    def nbytes(self, name: str) -> int:
        entry = self.entries.get(name)
        return entry.end - entry.begin if entry else 0

    def release(self, name: str) -> None:
        """Gives the tensor's pages back to the system; they are read again from the file when needed."""
        entry = self.entries[name]
        first = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self.maps[entry.file].madvise(mmap.MADV_DONTNEED, first, entry.end - first)

    def refuse_unused(self, ignored: tuple[str, ...], elsewhere: tuple[str, ...] = ()) -> None:
        """Raises ModelError for tensors that the model never asked for: the config does not describe this file.

        Not for those that end like `ignored`, nor for those that begin like `elsewhere`.
        """
        unused = [name for name in self.entries if name not in self.used and not name.endswith(ignored)]
        unused = [name for name in unused if not name.startswith(elsewhere)]
        if unused:
            file = self.entries[unused[0]].file
            more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
            raise ModelError(f"{file}: tensor {unused[0]}{more} is not part of the model that config.json describes")

    def _open(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                # A private writable mapping: torch wants a writable buffer; pages that are only read stay the file's.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be mapped: {error}") from None
        self.maps[path] = data
        for name, entry in _header(path, data).items():
            if name in self.entries:
                raise ModelError(f"{path}: tensor {name} is also in {self.entries[name].file.name}")
            self.entries[name] = entry

    def _check_index(self) -> None:
        index = self.folder / INDEX
        if not index.exists() or (self.folder / "model.safetensors").exists():
            return
        for name, file in read_json(index)["weight_map"].items():
            entry = self.entries.get(name)
            if entry is None or entry.file.name != file:
                raise ModelError(f"{self.folder / file}: tensor {name} is not there, though {INDEX} says so")


def _files(folder: Path) -> list[Path]:
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


def _header(path: Path, data: mmap.mmap) -> dict[str, Entry]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MAX_HEADER):
        raise ModelError(f"{path}: not a safetensors file, or cut off within its header")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError as error:
        raise ModelError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + size, len(data)) for name, fields in header.items()}


def _entry(path: Path, name: str, fields: Any, start: int, size: int) -> Entry:
    try:
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        begin, end = fields["data_offsets"]
        valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise ModelError(f"{path}: tensor {name} has a malformed header entry")
    if dtype not in DTYPES and dtype not in UNREAD:
        raise ModelError(f"{path}: tensor {name} has dtype {dtype}; supported are {', '.join(DTYPES)}")
    if end - begin != prod(shape) * (UNREAD.get(dtype) or DTYPES[dtype].itemsize):
        raise ModelError(f"{path}: tensor {name}: {end - begin} bytes for shape {list(shape)} of {dtype}")
    if start + end > size:
        raise ModelError(f"{path}: cut off: tensor {name} ends at byte {start + end} of {size}")
    return Entry(path, dtype, shape, start + begin, start + end)
