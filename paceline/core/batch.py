"""A batch has no phase: it is slices of sequences, whose linear layers run together."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.request import Sequence


class Slice(NamedTuple):
    """Tokens [start, start + length) of a sequence: a prompt chunk, a decode (1) or a verification (1 + num_draft)."""

    sequence: Sequence
    start: int
    length: int
    decode: bool
    emits: bool  # reaches the last known token, so the step yields a token
    num_draft: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


# percent: what a token of a verification takes beside the one before it, with which it reads (CPU, AVX2, a query head a
# key, 256 to 3,800 tokens: 4 to 9 of floats, 17 of half precision; more where heads share keys and contexts are long,
# see `engine.kernels.rows.most_of_run`; nobody has measured it on a GPU)
AGAIN = 12
FOLLOWED, FOLLOWED_OF = 32, 512  # steps in which a draft model follows prompts, of so many in a row without drafts


def follows(idle: int) -> bool:
    """Whether a draft model follows the prompts of a step: `idle` steps in a row, with it, have had no drafts.

    Where drafts do not pay it would read prompts for nothing; but sequences that it has not followed may have too much
    to read for a latency goal, and if none were followed nobody would draft again. The engine asks, and who counts what
    a draft model has not read (`speculation.lookahead`), each with its own count of the steps that both see.
    """
    return idle % FOLLOWED_OF < FOLLOWED


class StepShape(NamedTuple):
    """What a step's time depends on. Counts over the batch."""

    tokens: int = 0  # new ones: rows of the linear layers
    emits: int = 0  # slices that yield a token: rows of the head
    decodes: int = 0  # slices of one token, and the tokens of verifications
    decode_context: int = 0  # tokens that those read from the KV cache, `AGAIN` weighed
    chunk_context: int = 0  # likewise the longer slices
    chunk_pairs: int = 0  # query-key pairs of the longer slices: length * (2 start + length + 1) / 2 each
    chunks: int = 0  # how many longer slices

    def add(self, start: int, length: int, emits: bool, num_draft: int = 0) -> "StepShape":
        """The shape with one slice more. A verification counts as as many decodes as it has tokens."""
        if length == 1 + num_draft:
            context = self.decode_context + start + (length - 1) * start * AGAIN // 100
            return StepShape(
                self.tokens + length, self.emits + emits * length, self.decodes + length, context, *self[4:]
            )
        context = self.chunk_context + start
        pairs = self.chunk_pairs + length * (2 * start + length + 1) // 2
        return StepShape(
            self.tokens + length, self.emits + emits, self.decodes, self.decode_context, context, pairs, self.chunks + 1
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step of a group computes, as columns: index i of each is the i-th slice. Decodes come first."""

    id: int
    group: int
    requests: Seq[str]
    sequences: Seq[Sequence] = field(compare=False, repr=False)
    starts: Seq[int]
    lengths: Seq[int]
    emits: bytes  # 1: the slice reaches the last known token and yields one, or more where tokens are drafted
    num_decodes: int
    shape: StepShape
    predicted: float | None = None  # seconds in the engine, at the pace of late
    pace: float = 1.0  # of late, of steps without drafts: seconds over what the profile says
    preempted: tuple[Sequence, ...] = field(default=(), compare=False)  # lost their KV blocks for this batch
    drafts: Seq[int] | None = None  # tokens of each slice that are to be drafted, at most; None: nowhere any
    given_back: Seq[tuple[int, Seq[int]]] = ()  # groups and blocks of theirs whose memory goes back before the step

    @property
    def num_tokens(self) -> int:
        return self.shape.tokens

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The rows. Made when asked for: what happens every step goes over the columns."""
        drafts = self.drafts or [0] * len(self.starts)
        columns = zip(self.sequences, self.starts, self.lengths, self.emits, drafts, strict=True)
        return tuple(
            Slice(sequence, start, length, index < self.num_decodes, emits == 1, num_draft)
            for index, (sequence, start, length, emits, num_draft) in enumerate(columns)
        )


@dataclass(slots=True)
class StepResult:
    """What a batch yielded, by the index of the slice: a column, and lists of what is rare.

    Whoever runs the batch fills it in; nobody changes it after `Complete`.
    """

    tokens: bytearray  # emitted by each slice
    finished: list[tuple[int, str]] = field(default_factory=list)  # "stop" or "length": the sequence is done
    hashes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # of blocks that emitted tokens filled
    failed: list[int] = field(default_factory=list)  # nothing was computed: the sequence ends and shares no block
    seconds: float = 0.0  # that the engine took; 0 where nobody looked
    draft_seconds: float = 0.0  # of those, in which tokens were drafted
    drafted: bytearray = field(default_factory=bytearray)  # tokens that each slice drafted; empty: none did
