"""What goes into a controller (inputs) and what comes out (events): values, so runs can be logged and compared."""

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.batch import StepResult
from paceline.core.request import Request


@dataclass(frozen=True, slots=True)
class Complete:
    """A batch is done."""

    group: int
    batch: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class Reset:
    """A group lost its KV cache (its worker was restarted): everything it ran is recomputed."""

    group: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A request arrives; `admitted`: with one that was accepted before, so that a full queue is no reason to refuse."""

    request: Request
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request is not wanted any more."""

    request: str


Input = Complete | Reset | Submit | Cancel


class Event(NamedTuple):
    """Something that a controller decided or noted, at `time` seconds."""

    kind: str  # accepted rejected started preempted tokens finished cancelled failed
    time: float
    group: int
    request: str = ""
    tokens: int = 0  # emitted ("tokens", "finished"), batch width ("started")
    detail: tuple[tuple[str, int, int], ...] | str = ""  # slices as (request, start, length), or the reason
