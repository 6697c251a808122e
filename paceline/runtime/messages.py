"""What the front end and a worker say to each other: msgpack over a `ipc://` socket, nothing else.

A group of several workers gets the same messages.
"""

import msgspec

from paceline.core.work import EngineInfo, NewSequence, SliceOutput, SliceWork


class Step(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """Run one batch. Sequences in `dropped` are forgotten first."""

    batch: int
    new: list[NewSequence]
    slices: list[SliceWork]
    dropped: list[int]


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """Leave the loop and exit 0."""


class StepDone(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """A batch is done; seconds of the forward pass, of sampling, and of drafting, which is part of the first."""

    batch: int
    outputs: list[SliceOutput]
    forward_s: float
    sample_s: float
    draft_s: float


class Loading(msgspec.Struct, array_like=True, frozen=True, tag="loading"):
    """Progress of loading weights."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The model is loaded and the KV pool allocated."""

    info: EngineInfo


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, tag="beat"):
    """Sent by a thread several times a second; `progress` counts layers run, so a stuck step shows."""

    progress: int
    busy: bool


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The worker cannot start: one line for the user, and whether what it was given is to blame."""

    reason: str
    bad_input: bool


ToWorker = Step | Shutdown
FromWorker = StepDone | Loading | Ready | Heartbeat | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
