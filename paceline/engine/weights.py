"""The tensors of a safetensors checkpoint, memory-mapped."""

import mmap
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from paceline.engine.config import ModelError, read_json
from paceline.engine.tensor_files import INDEX, UNREAD, Entry, files_of, header, mapped

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """The tensors of a directory, by name. Pages count in the process only while they are in use."""

    def __init__(self, folder: Path | str):
        """Maps the files and checks every header. Raises ModelError."""
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self.maps: dict[Path, mmap.mmap] = {}
        self.used: set[str] = set()
        for file in files_of(self.folder):
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
        data = self.maps[path] = mapped(path)
        for name, entry in header(path, data).items():
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
