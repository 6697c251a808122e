"""Finds cases made by running other implementations. They are data from outside and not part of the project."""

import os
from pathlib import Path

DEFAULT = Path(__file__).parents[1] / ".." / "shared" / "reference"


def root() -> Path:
    return Path(os.environ.get("PACELINE_REFERENCE", DEFAULT))


def cases(folder: str) -> list[Path]:
    """Case files under the reference folder. Missing: an error where they must be there, else an empty list."""
    found = sorted((root() / folder).glob("*.json"))
    if not found and ("PACELINE_REFERENCE" in os.environ or os.environ.get("CI") == "true"):
        raise FileNotFoundError(f"PACELINE_REFERENCE: no cases in {root() / folder}")
    return found

