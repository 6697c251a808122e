"""Signs of life of a worker process."""

import time

from paceline.runtime.messages import FromWorker, Heartbeat

SILENT_S = 1.5  # without a heartbeat for so long the process is taken to hang
STUCK_S = 1.8  # likewise a busy one whose progress stands still


class Pulse:
    """When a worker was heard last, and when its steps moved last."""

    def __init__(self) -> None:
        self._last_beat = self._last_move = time.monotonic()
        self._progress = -1

    def heard(self, message: FromWorker) -> None:
        now = time.monotonic()
        self._last_beat = now
        if not isinstance(message, Heartbeat):
            self._last_move = now
            return
        if message.progress != self._progress or not message.busy:
            self._last_move = now
        self._progress = message.progress

    def forgive(self, seconds: float) -> None:
        self._last_beat += seconds
        self._last_move += seconds

    @property
    def responsive(self) -> bool:
        now = time.monotonic()
        return now - self._last_beat < SILENT_S and now - self._last_move < STUCK_S

    @property
    def silent_s(self) -> float:
        return time.monotonic() - min(self._last_beat, self._last_move)
