"""The arithmetic of SARATHI's tables."""

from benchmarks.sarathi_tables import Step, between
from paceline.core.batch import Batch


def test_between_the_ends_of_two_requests() -> None:
    """Several may end in one step, and none in others."""
    batch = Batch.__new__(Batch)  # nobody looks at it
    steps = [Step(batch, 2.0**n, finished) for n, finished in enumerate((0, 0, 1, 1, 3, 3, 4))]
    assert between(steps, 1, 2) == between(steps, 1, 3) == 8 + 16
    assert between(steps, 2, 4) == between(steps, 3, 4) == 32 + 64
    assert between(steps, 1, 4) == 8 + 16 + 32 + 64
