"""A worker process of ours, of a group whose last one raises in every pass over a request with a certain seed."""

from paceline.cli import worker
from paceline.runtime.workers import Seat

POISON = 666


def command(group: worker.GroupOptions, seat: Seat) -> list[str]:
    """Arguments to the Python interpreter."""
    return ["-m", "tests.engine.poisoned_worker", group.command(seat)[-1]]


prepare = worker.prepare


def main(arguments: list[str]) -> None:
    from paceline.engine.runner import ModelRunner

    forward = ModelRunner._forward

    def poisoned(runner, jobs):
        last = runner.peers.place.number == runner.peers.place.parallel.devices - 1
        if last and any(job.sequence.params.seed == POISON for job in jobs):
            raise RuntimeError("poisoned")
        return forward(runner, jobs)

    ModelRunner._forward = poisoned
    worker.main(arguments)
