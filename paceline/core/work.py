"""What a driver asks of an engine and what it gets back: the half of a step that has token ids and block ids.

Sequences are named by small integers that the driver gives out. The engine keeps each sequence's token ids and block
table; work carries only what is new. What is made for every slice of every step is a named tuple: three times cheaper
to make than a frozen dataclass, and an array in messages.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.core.drafter_name import NOBODY
from paceline.core.request import SamplingParams

WATERMARK = 0.01  # share of a model's KV blocks that admission leaves free

@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the engine has not seen (or has lost with its process)."""

    id: int
    tokens: Seq[int]  # prompt, and what was generated before an engine was lost
    num_prompt: int
    params: SamplingParams


class SliceWork(NamedTuple):
    """Compute tokens [start, start + length); blocks[first_block:] of the sequence's table become `blocks`.

    The last `num_draft` of them are not known: as many, or fewer, are to be drafted and verified. `fresh` are tokens
    that the sequence got since its last slice, for workers that did not sample them.
    """

    id: int
    start: int
    length: int
    emits: bool
    first_block: int
    blocks: list[int]
    num_draft: int = 0
    fresh: Seq[int] = ()


class TokenLogprobs(NamedTuple):
    """Log-probability (natural) of one position's token, its rank (1 is the likeliest) and the likeliest tokens."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class SliceOutput(NamedTuple):
    """What one slice gave."""

    tokens: list[int]  # emitted: drafted ones that stay, and one more
    logprobs: Seq[TokenLogprobs] = ()  # per emitted token, when asked for
    prompt_logprobs: Seq[TokenLogprobs] = ()  # of prompt tokens [start + 1, end + 1), likewise
    error: str = ""  # this sequence failed; the others of the step did not
    num_draft: int = 0  # tokens drafted
    num_accepted: int = 0  # of those, emitted
    embedding: bytes = b""  # float32, little endian; an encoder's, whose one token stands for it
    drafter: str = NOBODY  # who drafted them, of `drafter_name.DRAFTERS`


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine offers. Sizes in bytes and tokens."""

    num_blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes: int
    planned_bytes: int  # predicted peak of the whole process: weights, KV, activations, interpreter
    context: int
    vocab_size: int
    most_blocks: int | None = None  # with those that other models on the device lend it; None: no more than its own
    block_bytes: tuple[int, ...] = ()  # of a block at each worker, where models lend each other memory
    undrafted: str = ""  # why nobody drafts, where a draft model was to

    @property
    def working_bytes(self) -> int:
        """Of the process, beside weights and KV."""
        return self.planned_bytes - self.weight_bytes - self.kv_bytes


Outcome = tuple[list[SliceOutput], float, float]  # as of `Engine.step`


class BegunStep(Protocol):
    """One that a device has been asked for."""

    draft_s: float  # seconds of its forward pass in which tokens were drafted

    @property
    def done(self) -> bool:
        """Whether `finish` does not wait for the device."""
        ...

    def finish(self) -> Outcome:
        """To be called once, in the order in which steps began."""
        ...


class Engine(Protocol):
    """One model on one device, or a worker's part of it."""

    info: EngineInfo
    progress: int  # counts layers and heads run since the start: shows a step that is stuck
    waiting: bool  # for another worker of its group
    first: bool  # where its group's steps begin: the first stage
    answers: bool  # its outputs are those of its group; other workers have none
    draft_s: float  # seconds of the last step's forward pass in which tokens were drafted
    overlaps: bool  # it is `Overlapping`, as it was loaded

    def step(self, new: Seq[NewSequence], slices: Seq[SliceWork], dropped: Seq[int]) -> Outcome:
        """Forgets `dropped`, learns `new`, runs `slices`: outputs in order, seconds of forward pass and of sampling
        (but for what is drawn or judged in the same call as the pass)."""
        ...

    def give_back(self, blocks: Seq[int]) -> None:
        """Returns the memory of blocks that no sequence has to the system; their content is lost."""
        ...

    def release(self) -> None:
        """Gives its memory back; it is not used any more."""
        ...


class Overlapping(Engine, Protocol):
    """An engine whose steps can begin before the last one's tokens are known: a device knows them."""

    def learn(self, new: Seq[NewSequence], dropped: Seq[int]) -> None:
        """Forgets `dropped`, learns `new`, which the next step may run."""
        ...

    def follows(self, slices: Seq[SliceWork]) -> bool:
        """Whether a step of these slices can begin, and not wait for the device, before the last one is finished."""
        ...

    def begin(self, slices: Seq[SliceWork]) -> BegunStep:
        """As `step`, until the device has been asked for what does not depend on tokens that it has yet to sample."""
        ...
