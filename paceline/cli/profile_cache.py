"""Profiles by model and machine, as files (DESIGN, section 7: profile file) under `~/.cache/paceline/profiles`."""

import hashlib
import os
import sys
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from paceline import __version__
from paceline.cli.accelerators import Accelerator, DType, KVDType, gpu_name
from paceline.engine.host import cores
from paceline.engine.precision import precision
from paceline.latency.profile import Percentiles, Profile


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a profile holds for, beside the model."""

    cpu: str
    threads: int | None
    torch: str
    paceline: str
    gpu: str = ""  # where one computes, and in which type
    dtype: str = "auto"  # of weights, where a CPU computes
    kv_cache_dtype: str = "auto"

    @staticmethod
    def here(
        threads: int | None, accelerator: Accelerator = "cpu", dtype: DType = "auto", kv_cache_dtype: KVDType = "auto"
    ) -> "Device":
        gpu = f"{gpu_name()}, {dtype}" if accelerator == "cuda" else ""
        of_cpu = "auto" if accelerator == "cuda" else dtype
        own = threads or threads_of(1)
        return Device(cpu_name(), own, version("torch"), __version__, gpu, of_cpu, kv_cache_dtype)


class ProfileFile(msgspec.Struct, frozen=True):
    """Keys of `models` that are a planner's (`parallel`) are written, not read."""

    models: dict[str, Profile]
    device: Device
    error: Percentiles


def threads_of(devices: int | None) -> int | None:
    """Of each worker, where workers share the cores that this process may have."""
    return devices and max(1, cores() // devices)


MEASURED = 7  # changes when steps do: all of one is one call, drafts are, weights stay bfloat16


def cpu_name() -> str:
    """The processor in its maker's words."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def cache_file(model: Path, quantization: str, device: Device) -> Path:
    """Where the profile of the checkpoint directory `model` is kept, whether or not there is one."""
    config = (model / "config.json").read_bytes()
    held = quantization if device.gpu else precision("cpu", device.dtype, quantization, model, device.kv_cache_dtype)
    device = replace(device, dtype="auto", kv_cache_dtype="auto")  # `held` says it
    key = hashlib.sha256(config + msgspec.json.encode([MEASURED, held, device])).hexdigest()[:20]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "paceline" / "profiles" / f"{key}.json"


def document(name: str, profile: Profile, device: Device) -> dict[str, Any]:
    """What a profile file holds."""
    sizes = profile.roofline
    stage = {
        "pipeline": 1, "tensor": 1, "stage_weight_bytes": [sizes.weight_bytes + sizes.table_bytes],
        "working_bytes": sizes.working_bytes,
    }  # fmt: skip
    return {
        "models": {name: {"parallel": [stage]} | asdict(profile)},
        "device": device,
        "error": profile.error,
    }


def save(path: Path, name: str, profile: Profile, device: Device) -> None:
    """Writes the profile file of a model with steps. Raises OSError."""
    write(path, document(name, profile, device))


def write(path: Path, contents: dict[str, Any]) -> None:
    """Writes a profile file, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(contents), indent=1))
    partial.replace(path)


def read(path: Path) -> bytes | None:
    """What is kept there; None: nothing that can be read. If that is not for want of a file, it is said once."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _say(f"{path.parent}: profiles cannot be read: {error.strerror}")
        return None


@cache
def _say(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr)


def load(path: Path) -> Profile | None:
    """The profile in a file of one model; None without one (`read`). Raises ValueError for something else."""
    if (contents := read(path)) is None:
        return None
    try:
        file = msgspec.json.decode(contents, type=ProfileFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"profile: {path} is not a profile ({error}); delete it or profile again") from error
    return next(iter(file.models.values()))
