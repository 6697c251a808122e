"""Pictures beside the results."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@contextmanager
def figure(name: str, columns: int, rows: int = 1) -> Iterator[list[Any]]:
    """Axes to draw on, kept as results/NAME.png."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained")
    yield list(picture.subplots(rows, columns, squeeze=False).flat)
    picture.savefig(RESULTS / f"{name}.png", dpi=70)
