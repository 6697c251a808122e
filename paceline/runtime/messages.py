"""What the front end and a worker say to each other: msgpack over a socket pair, nothing else.

All workers of a group get the same messages.
"""

import msgspec

from paceline.core.work import EngineInfo, NewSequence, SliceOutput, SliceWork


class Step(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """Run one batch of a model. Its sequences in `dropped` are forgotten first."""

    model: int  # of those that the worker has
    batch: int
    new: list[NewSequence]
    slices: list[SliceWork]
    dropped: list[int]


class GiveBack(msgspec.Struct, array_like=True, frozen=True, tag="give_back"):
    """Return the memory of KV blocks of a model to the system: steps of other models that follow need it."""

    model: int
    blocks: list[int]


class Load(msgspec.Struct, array_like=True, frozen=True, tag="load"):
    """Load a model, beside the steps of others; Ready or Failed follows."""

    model: int


class Unload(msgspec.Struct, array_like=True, frozen=True, tag="unload"):
    """Forget a model and all its sequences."""

    model: int


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """Leave the loop and exit 0."""


class StepDone(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """A batch is done; seconds of the forward pass, of sampling, and of drafting, which is part of the first.

    Of a group of several workers one says so.
    """

    model: int
    batch: int
    outputs: list[SliceOutput]
    forward_s: float
    sample_s: float
    draft_s: float


class Advanced(msgspec.Struct, array_like=True, frozen=True, tag="advanced"):
    """A batch has left the first of several stages."""

    model: int
    batch: int


class Loading(msgspec.Struct, array_like=True, frozen=True, tag="loading"):
    """Progress of loading a model's weights."""

    model: int
    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """A model is loaded and its KV pool allocated, in so many seconds."""

    model: int
    info: EngineInfo
    load_s: float


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, tag="beat"):
    """Sent by a thread several times a second; `progress` counts layers run, so a stuck step shows."""

    progress: int
    busy: bool


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """A model cannot be loaded: one line for the user, and whether what was given is to blame."""

    model: int
    reason: str
    bad_input: bool


ToWorker = Step | GiveBack | Load | Unload | Shutdown
FromWorker = StepDone | Advanced | Loading | Ready | Heartbeat | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
