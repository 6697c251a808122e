"""An asyncio loop whose clock is virtual: sleeping takes no time, and the time is exactly what was asked for."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.SelectSelector):
    """Instead of waiting, moves the loop's clock to the next timer."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None):
        if timeout is None:
            raise RuntimeError("the virtual loop has nothing left to wait for")
        if timeout > 0:
            self.loop.now = self.loop._scheduled[0].when()
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
