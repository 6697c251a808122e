"""Which devices compute: the processor, or NVIDIA GPUs. Found without torch, which takes memory of one."""

import os
from itertools import takewhile
from pathlib import Path
from typing import Literal

Accelerator = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]  # engine.config.DTYPES
KVDType = Literal["auto", "float32", "float16"]  # engine.config.KV_DTYPES

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES, DRIVER = Path("/dev"), Path("/proc/driver/nvidia/gpus")


def gpus() -> list[str]:
    """Those that this process may use, as CUDA names them: a list ends with a name that starts with a minus."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return list(takewhile(lambda name: name and not name.startswith("-"), named.split(",")))
    found = [path for path in DEVICES.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    return [str(index) for index in range(len(found))]  # CUDA counts what it sees; the files have other numbers


def gpu_name() -> str:
    """The first one's in its maker's words."""
    for path in sorted(DRIVER.glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                return line.split(":", 1)[1].strip()
    return "NVIDIA GPU"


def check(accelerator: Accelerator, devices: int) -> None:
    """Raises ValueError where there are not so many of them."""
    if accelerator == "cpu":
        return
    found = len(gpus())
    if not found:
        raise ValueError(f"device: no NVIDIA GPU is visible here (/dev/nvidia0, {VISIBLE}); valid is cpu")
    if devices > found:
        raise ValueError(f"device: {devices} GPUs are needed, and {found} are visible here")
