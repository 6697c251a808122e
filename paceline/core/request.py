"""Requests as the policies see them: numbers, never text, token ids or tensors."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency goals in seconds; None is no goal."""

    ttft: float | None = None  # time to first token
    tbt: float | None = None  # time between tokens
    deadline: float | None = None  # arrival to last token

    @property
    def whole(self) -> float | None:
        """For the first token, of an answer that comes whole: then a deadline is one, too."""
        return min((goal for goal in (self.ttft, self.deadline) if goal is not None), default=None)


NO_SLO = SLO()
MAX_DRAFT_TOKENS = 16  # a step, of a sequence
WARMER = 1e-5, 0.6, 1.1  # temperatures from which on the target is taken to agree less with drafts; below all is greedy
NUM_KINDS = len(WARMER) + 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from the model's distribution. Names and meanings are those of the OpenAI API and vLLM.

    Bounds are checked once, in the server's validator; the engine takes these values as they are.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # no end-of-sequence and no stop token id before this many
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # randomness is keyed by (seed, choice, position)
    seeded: bool = True  # the seed is the caller's: output must be a function of it, speculation or not
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()  # without the model's own end-of-sequence ids
    ignore_eos: bool = False
    logprobs: int | None = None  # top log-probabilities beside the chosen token's; 0 is the chosen one alone
    prompt_logprobs: int | None = None
    max_draft_tokens: int | None = None  # the most to draft in a step; None: as the model is served
    grammar: str = ""  # that the output is held to (`engine.grammar.grammar_of`); empty: none

    @property
    def kind(self) -> int:
        """Of sequences whose drafts are believed to be accepted alike until more is known: by temperature."""
        return bisect_right(WARMER, self.temperature)

    def stops(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Token ids that end the output, with those of the model."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, as a scheduler may see it. Its true output length is the executor's secret.

    Raises ValueError for a prompt without tokens: nothing could follow.
    """

    id: str
    prompt_tokens: int
    max_tokens: int  # an upper bound of the output
    arrival: float = 0.0  # seconds
    model: str = ""
    slo: SLO = NO_SLO
    prefix: tuple[int, ...] = ()  # chained hash of every full block of the prompt; empty: not to be cached
    max_draft_tokens: int = 0  # the most to draft in a step
    kind: int = 0  # `SamplingParams.kind`

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"a prompt needs at least one token, not {self.prompt_tokens}")


# Columns of a group's table of sequences, in tokens unless said otherwise
KNOWN = 0  # prompt and generated
COMPUTED = 1  # their KV is in the cache
SCHEDULED = 2  # computed or in flight
PROMPT = 3  # to compute before decoding (again): grows with every recomputation (rule M4)
HELD = 4  # KV blocks
IN_FLIGHT = 5  # batches that it is part of
HASHED = 6  # blocks whose hash is known
LIMIT = 7  # the most that may come to be known; so far a cache line
ASKED = 8  # the prompt as it came
SERIAL = 9  # submission order: breaks ties of equal arrival
COHORT = 10  # which batch it stays with, where batches are made of requests
PREEMPTIONS = 11  # how often it was
TAG = 12  # the simulator's name for it
HELD_BACK = 13  # why it may draft nothing in the step that it is part of: one of `UNPAID` to `MEMORY`
ENDED = 14  # it is dropped when the last batch that it is part of is done
NUM_COLUMNS = 16
# drafts are not worth their time; no goal would be held with them; no tokens of the budget are left for them; its next
# token is its last; there are no free blocks
UNPAID, BY_TIME, BY_BUDGET, AT_END, MEMORY = range(5)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: a step moves `computed` towards `known`. The only mutable noun.

    A handle: its numbers are a row of its group's table, where compiled code changes them.
    """

    request: Request
    slot: int  # its row
    row: memoryview  # int64
    table: memoryview  # int32: KV block ids, in position order; the first `num_blocks` are held
    ended: bool = False  # done, failed or cancelled: to be dropped when its last batch completes

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def known(self) -> int:
        return int(self.row[KNOWN])

    @property
    def computed(self) -> int:
        return int(self.row[COMPUTED])

    @property
    def scheduled(self) -> int:
        return int(self.row[SCHEDULED])

    @property
    def prompt(self) -> int:
        return int(self.row[PROMPT])

    @property
    def in_flight(self) -> int:
        return int(self.row[IN_FLIGHT])

    @property
    def preemptions(self) -> int:
        return int(self.row[PREEMPTIONS])

    @property
    def num_blocks(self) -> int:
        return int(self.row[HELD])

    def blocks(self, first: int = 0) -> list[int]:
        """Ids of those held, from the `first` on."""
        return self.table[first : self.num_blocks].tolist()

    @property
    def generated(self) -> int:
        return self.known - self.request.prompt_tokens

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt
