"""Finds cases made by running other implementations. They are data from outside and not part of the project."""

import os
from pathlib import Path

import pytest

DEFAULT = Path(__file__).parents[1] / ".." / "shared" / "reference"


def cases(folder: str) -> list[Path]:
    """Case files under the reference folder. Missing: an error where they must be there, else an empty list."""
    root = Path(os.environ.get("PACELINE_REFERENCE", DEFAULT))
    found = sorted((root / folder).glob("*.json"))
    if not found and ("PACELINE_REFERENCE" in os.environ or os.environ.get("CI") == "true"):
        raise FileNotFoundError(f"PACELINE_REFERENCE: no cases in {root / folder}")
    return found


def parameters(folder: str) -> list:
    """One test parameter a case; without cases one that skips and says so."""
    found = [pytest.param(path, id=path.stem) for path in cases(folder)]
    reason = "no reference cases here; set PACELINE_REFERENCE to their folder"
    return found or [pytest.param(None, id="missing", marks=pytest.mark.skip(reason=reason))]
