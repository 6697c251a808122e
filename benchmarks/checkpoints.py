"""Random-weights checkpoints of the benchmark shapes, made once and kept in `.bench/`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def checkpoint(shape: str, dtype: str = "fp32") -> Path:
    """The directory of a checkpoint of this shape, made when it is not there."""
    path = ROOT / ".bench" / (shape if dtype == "fp32" else f"{shape}-{dtype}")
    if not (path / "config.json").exists():
        path.parent.mkdir(exist_ok=True)
        subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "make_model.py"), shape, str(path), "--dtype", dtype], check=True
        )
    return path
