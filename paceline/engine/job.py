"""What the engine remembers of a sequence, and one slice of a step on its way to an output."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from paceline.core.drafter_name import NOBODY
from paceline.core.request import SamplingParams
from paceline.core.work import SliceOutput, SliceWork, TokenLogprobs
from paceline.engine.attention import SliceSpan
from paceline.engine.sampler import SamplingState

if TYPE_CHECKING:
    from paceline.engine.begun import Begun

T = TypeVar("T")


@dataclass(slots=True)
class EngineSequence:
    """What outlives a step."""

    tokens: array  # known: prompt and generated
    num_prompt: int
    stops: frozenset[int]  # ids that end it
    params: SamplingParams
    state: SamplingState | None  # where nobody samples or drafts, there is none
    fault: str = ""  # why it could not be learnt
    awaited: "Begun | None" = None  # the step that has a token more, in this row of its tokens
    row: int = 0
    blocks: array = field(default_factory=lambda: array("q"))  # ids, as NumPy reads them without a copy
    num_followed: int = 0  # tokens whose keys and values a draft model has
    num_filled: int = 0  # blocks that it is known to have filled


@dataclass(slots=True)
class Job:
    """One slice of a step."""

    work: SliceWork
    sequence: EngineSequence | None = None
    runs: bool = False  # it is computed, whether or not anything comes of it
    span: SliceSpan | None = None
    draft: list[int] = field(default_factory=list)
    draft_rows: list[Tensor] = field(default_factory=list)  # log-probabilities that those were drawn from, to judge by
    drafter: str = NOBODY  # whose draft it is, or `ERROR`
    accepted: int = 0  # of the draft
    begin: int = 0  # where its rows are among the step's hidden states
    first_row: int = 0  # and its logits among those of its part
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str = ""

    @property
    def end(self) -> int:
        """Known tokens that are computed when the step is done."""
        return self.work.start + self.work.length - self.work.num_draft

    @property
    def undrafted(self) -> bool:
        """Whether tokens are to be drafted for it, and none are."""
        return self.work.num_draft > 0 and not self.draft

    @property
    def coupled(self) -> bool:
        """Whether its tokens must be those without drafts: ordinary sampling judges the draft."""
        return self.sequence.state.greedy or self.sequence.params.seeded

    def output(self) -> SliceOutput:
        if self.error:
            return SliceOutput([], error=self.error)
        return SliceOutput(
            self.tokens, self.logprobs, self.prompt_logprobs, num_draft=len(self.draft), num_accepted=self.accepted,
            drafter=self.drafter,
        )  # fmt: skip

    def take(self, token: int, logprob: TokenLogprobs | None) -> bool:
        """Emits a token; True where the next row counts too, since it was computed behind this very token."""
        sequence, place = self.sequence, len(self.tokens)
        sequence.state.observe(token)
        sequence.tokens.append(token)
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        same = place < len(self.draft) and token == self.draft[place]
        self.accepted += same
        return same and token not in sequence.stops


def in_parts(items: Sequence[T], most: int, rows: Callable[[T], int]) -> Iterator[list[T]]:
    """Items of at most so many rows together, or one."""
    part: list[T] = []
    count = 0
    for item in items:
        count += rows(item)
        if part and count > most:
            yield part
            part, count = [], rows(item)
        part.append(item)
    if part:
        yield part
