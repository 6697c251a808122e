"""Signs of life of a worker process."""

import time

from paceline.runtime.messages import FromWorker, Heartbeat

SILENT_S = 1.5  # without a heartbeat, or busy without progress, for so long: it is taken to hang


class Pulse:
    """When a worker last gave a sign that it moves: a result, or a heartbeat while it is idle or has gone on since."""

    def __init__(self) -> None:
        self._last = self._worked = time.monotonic()
        self._progress = -1

    def heard(self, message: FromWorker) -> None:
        now = time.monotonic()
        if not isinstance(message, Heartbeat):
            self._last = self._worked = now
            return
        moves = message.progress != self._progress
        if moves or not message.busy:
            self._last = now
        if moves or message.busy:
            self._worked = now
        self._progress = message.progress

    def forgive(self, seconds: float) -> None:
        self._last += seconds
        self._worked += seconds

    @property
    def responsive(self) -> bool:
        return self.silent_s < SILENT_S

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._last

    @property
    def idle_s(self) -> float:
        """Since it last computed something or said so; waiting for another worker is none of that."""
        return time.monotonic() - self._worked
