"""What the server sees of the runtime: submit token ids with a sink, cancel, watch."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.core.events import Event
from paceline.core.request import NO_SLO, SLO, SamplingParams
from paceline.core.work import EngineInfo, SliceOutput


class Rejected(Exception):
    """A request that is not taken; nothing was changed by asking."""


class Overloaded(Rejected):
    """The queue is full. `retry_after`: seconds until a place is expected."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the queue is full; a place is expected in {retry_after:.0f} s")
        self.retry_after = retry_after


class GoalUnreachable(Rejected):
    """No group can meet the request's latency goal: seconds until the first token ("ttft") or between two ("tbt")."""

    def __init__(self, what: str, expected: float, goal: float) -> None:
        expects = "the first token is expected in" if what == "ttft" else "tokens are expected every"
        super().__init__(f"{expects} {1e3 * expected:.4g} ms, the goal is {1e3 * goal:.4g} ms")
        self.what, self.expected, self.goal = what, expected, goal


class Unavailable(Rejected):
    """Draining, or the model is not loaded. `retry_after`: seconds; None where it never will be."""

    def __init__(self, reason: str, retry_after: float | None = 1.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class TooLong(Rejected):
    """The request can never fit the KV cache or the model's context."""


class Sink(Protocol):
    """Takes what a sequence yields. Called on the event loop, never concurrently; must not block or raise."""

    checks_stop: bool  # push may answer True

    def push(self, output: SliceOutput, finish: str | None) -> bool:
        """Takes the tokens of one step; `finish` is "stop" (end-of-sequence or stop token id: the last token), "length"
        or None. The answer True ends the sequence: its text ran into a stop string, or nobody wants it any more."""
        ...

    def fail(self, reason: str) -> None:
        """The sequence ended without a result: an error in the engine."""
        ...


# by `core.request.HELD_BACK`; then the engine found nothing, or failed to draft; the request wants no drafts; the draft
# model could not be loaded
IDLE = ("unpaid", "latency_goal", "budget", "last_token", "memory", "nothing_found", "error", "opted_out", "no_drafter")


class Drafted(NamedTuple):
    """What one decode of a model that is drafted for did in a step. Tokens."""

    idle: str = ""  # why nothing was drafted, one of `IDLE`
    drafter: str = ""  # one of `core.drafter_name.DRAFTERS`
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a group as measured: sizes in tokens and sequences, times in seconds."""

    group: int
    time: float  # when it was complete
    tokens: int
    sequences: int
    cached_tokens: int  # prompt tokens found in the prefix cache since the last record
    forward_s: float
    sample_s: float
    schedule_s: float  # controller: results applied and next batch composed
    messages_s: float  # encode, decode, socket, worker loop
    output_s: float  # sinks: detokenise, stop strings, server-sent events
    predicted_s: float | None = None  # of forward and sample together; None without a profile
    profiled_s: float | None = None  # as the profile has it; of groups of one stage, and without drafts
    draft_s: float = 0.0  # part of the forward pass
    drafts: Seq[Drafted] = ()
    others: bool = False  # when it was sent, other devices had a step under way
    before: bool = False  # its device's last step was another model's


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What a group has to do now: sequences, and KV blocks that they hold."""

    waiting: int
    running: int
    blocks_used: int
    blocks_total: int
    model: str = ""
    loads: int = 0  # of the model since it serves, by need or after a fault
    loads_s: float = 0.0  # seconds of all of them
    weight_bytes: int = 0  # that one of them loads


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """State of a served model: "loading", "ready", "restarting" or "failed"."""

    name: str
    state: str
    reason: str = ""
    info: EngineInfo | None = None


class Observer(Protocol):
    """Sees what happens; metrics are made of this and of nothing else."""

    def on_events(self, events: Seq[Event]) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...


class Fleet(Protocol):
    """Models on devices behind one queue each."""

    observers: list[Observer]

    def submit(
        self,
        model: str,
        tokens: Seq[int],
        params: SamplingParams,
        sink: Sink,
        *,
        namespace: str = "",
        slo: SLO = NO_SLO,
        admitted: bool = False,
        arrival: float | None = None,
    ) -> str:
        """Queues one sequence and returns its id. Raises `Overloaded`, `Unavailable`, `TooLong`,
        `GoalUnreachable` or KeyError (model).

        `namespace` separates prefix caches (one per API key). Prompt log-probabilities switch prefix hits off.
        `admitted`: it belongs to a request that was accepted; neither a full queue nor a drain refuses it. `arrival`:
        when the request came, by `time.monotonic`, and its goal for the first token counts from; None: now.
        """
        ...

    def full(self, model: str) -> bool:
        """Whether `submit` would raise `Overloaded` for the model's next sequence now."""
        ...

    def cancel(self, id: str) -> None:
        """Frees the sequence by the next step; its sink is not called again. Unknown or finished ids are ignored."""
        ...

    def status(self) -> list[ModelStatus]: ...

    def load(self) -> list[GroupLoad]:
        """By group, read at this moment."""
        ...

    @property
    def healthy(self) -> bool:
        """The worker answers and its steps move."""
        ...

    @property
    def ready(self) -> bool:
        """Healthy, loaded and not draining."""
        ...

    async def drain(self) -> None:
        """Refuses new requests at once and returns when the running ones are done."""
        ...
