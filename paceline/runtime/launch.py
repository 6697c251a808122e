"""How the workers of a group are started: as processes of this machine (`process.Local`), or on the nodes of a cluster
(`ray_process.RayLauncher`)."""

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.runtime.messages import FromWorker
from paceline.runtime.pulse import Pulse


class Process(Protocol):
    """A worker process seen from the front end. Calls back on the event loop."""

    pulse: Pulse

    async def start(self) -> None:
        """It answers with Loading, Ready or Failed. Raises OSError where it cannot be started."""

    def send(self, frame: bytes) -> None:
        """A `ToWorker`, encoded."""

    @property
    def pid(self) -> int:
        """On the machine where it runs; -1: it was never started."""

    def kill(self) -> None:
        """Ends the process at once; `on_exit` follows."""

    async def stop(self, patience_s: float = 5.0) -> None:
        """Asks the process to leave, then makes it. `on_exit` is not called."""


OnMessage = Callable[[Process, FromWorker], None]
OnExit = Callable[[Process, int], None]  # with the exit code, below 0 where there is none


class Launcher(Protocol):
    """Has room for the workers of one group."""

    reason: str  # why there is no room for them, as far as is known
    lost: bool  # it is because a device was lost, or takes no worker

    async def meeting(self, workers: int) -> str | None:
        """A URL at which so many workers find each other (empty: there is only one), once there is room for all; None
        after a while without: ask again. Raises OSError where there can be none just now."""

    def process(self, number: int, command: Sequence[str], on_message: OnMessage, on_exit: OnExit) -> Process:
        """Of the group's workers one, not yet started. `command`: arguments to the Python interpreter there."""

    def close(self) -> None:
        """All processes have been stopped."""
