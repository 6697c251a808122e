"""What goes into a controller (inputs) and what comes out (events): values, so runs can be logged and compared."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.batch import Batch, StepResult
from paceline.core.request import Request


@dataclass(frozen=True, slots=True)
class Complete:
    """A batch is done."""

    group: int
    batch: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class Advance:
    """A batch has left the first stage of its group's pipeline, where the next one can begin."""

    group: int
    batch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A group lost its workers and with them its KV cache: it takes no step until it is `Back`.

    Everything it ran is recomputed, by other groups that have the model or by itself when it is back. One that is lost
    `for_good` leaves at once: what no other group can take stays with it until it is cancelled.
    """

    group: int
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class Back:
    """A lost group's workers are there again, or have loaded its model, which took so many seconds."""

    group: int
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Retire:
    """A group is to leave: it takes no more requests, and what has not begun goes to others that have the model."""

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


Input = Complete | Advance | Lost | Back | Retire | Submit | Cancel


class Emitted(NamedTuple):
    """What a completed batch yielded: columns over its requests, without those that had ended before."""

    requests: Seq[str]
    tokens: bytes


class Unreachable(NamedTuple):
    """Why a request is rejected whose goals no group can meet: seconds to its first token ("ttft") or between tokens
    ("tbt"), as expected and as the goal."""

    what: str
    expected: float
    goal: float


class Event(NamedTuple):
    """Something that a controller decided or noted, at `time` seconds."""

    kind: str  # accepted rejected started preempted moved load unload retired tokens finished cancelled failed
    time: float
    group: int
    request: str = ""  # the batch's number, where it is about a batch ("started", "tokens")
    tokens: int = 0  # width ("started"), emitted ("tokens", "finished")
    detail: Batch | Emitted | Unreachable | str = ""  # the batch ("started"), its yield ("tokens"), or the reason
