"""How other processes of ours are started: the interpreter, and where its packages are."""

import os
import sys
from pathlib import Path

PYTHON = (sys.executable, "-P")  # without what lies where the user happens to be: a checkpoint may have its torch.py


def packages() -> dict[str, str]:
    """The environment by which such a process finds what this one does."""
    places = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}
