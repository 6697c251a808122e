"""Batching policies by name: each composes one step out of the scheduler's moves.

The published ones are in their papers' order and terms; under memory pressure all follow rules M1-M5 (`scheduler`),
which the published code does not.
"""

from collections import deque
from collections.abc import Callable

from paceline.batching.scheduler import Policy, Scheduler, SchedulerConfig
from paceline.core.request import Request, Sequence

PATIENCE_S = 60.0  # a prompt without a goal counts as one that wants its first token after so long


class RequestLevel:
    """A batch runs until all its members have ended; only then does the next one begin (FasterTransformer)."""

    def __init__(self) -> None:
        self._batches: deque[list[Sequence]] = deque()  # one per pipeline stage at most, the first to come back first

    def __call__(self, scheduler: Scheduler) -> None:
        for _ in range(len(self._batches)):
            batch = [member for member in self._batches.popleft() if member.blocks]
            idle = not any(member.in_flight for member in batch)
            if batch:
                self._batches.append(batch)
            if batch and idle:
                scheduler.decode_each(batch)
                return
        batch = []
        while sequence := scheduler.admit():
            scheduler.chunk(sequence)
            batch.append(sequence)
        if batch:
            self._batches.append(batch)


def orca(scheduler: Scheduler) -> None:
    """Iteration-level batching (Orca, OSDI'22): decodes, and whole new prompts; reserves memory for the longest."""
    scheduler.decode()
    while sequence := scheduler.admit():
        scheduler.chunk(sequence)


def prefill_first(scheduler: Scheduler) -> None:
    """Prompts before decodes, never both in a batch (vLLM before 2024, SOSP'23).

    At most `max_num_batched_tokens` of prompts a step; a longer prompt goes alone.
    """
    left = scheduler.config.max_num_batched_tokens
    while scheduler.waiting and (scheduler.waiting[0].known <= left or not scheduler.width):
        sequence = scheduler.admit()
        if sequence is None:
            break
        left -= scheduler.chunk(sequence)
    if not scheduler.width:
        scheduler.decode()


def prefill_first_padded(scheduler: Scheduler) -> None:
    """`prefill_first` as Vidur has it: prompts count as long as the longest of the step, and a step of a
    pipeline takes at most its share of `max_batch`."""
    config = scheduler.config
    most = max(1, config.max_batch // scheduler.pipeline)
    count, longest = 0, 0
    while scheduler.waiting and count < most:
        longest = max(longest, scheduler.waiting[0].known)
        if count and longest * (count + 1) > config.max_num_batched_tokens:
            break
        sequence = scheduler.admit()
        if sequence is None:
            break
        scheduler.chunk(sequence)
        count += 1
    if not count:
        scheduler.decode(most)


def sarathi_2023(scheduler: Scheduler) -> None:
    """Decode-maximal batches (SARATHI, 2023, section 4.3): all decodes and one chunk of a fixed size."""
    scheduler.decode()
    one_chunk(scheduler, scheduler.config.token_budget - scheduler.num_drafted)


def sarathi_2023_tile_aligned(scheduler: Scheduler) -> None:
    """The same, but the whole batch is a chunk wide, if that leaves a token of the prompt (section 4.4)."""
    scheduler.decode()
    one_chunk(scheduler, max(1, scheduler.room()))


def one_chunk(scheduler: Scheduler, most: int) -> None:
    """Of the first prompt that is under way, or of a new one."""
    if sequence := next(iter(scheduler.idle_prompts()), None) or scheduler.admit():
        scheduler.chunk(sequence, most)


def sarathi_serve(scheduler: Scheduler) -> None:
    """Stall-free batching (Sarathi-Serve, OSDI'24, Algorithm 3).

    Every decode rides in every batch and costs one token of the budget; then unfinished prompts, then new ones get
    chunks of what is left. The budget is the width of the batch, not of a chunk; more decodes than the budget all run.

    Differs from the published code in that a chunk is never negative.
    """
    # lines 6-8: pack all the decodes
    scheduler.decode()
    left = scheduler.room()
    # lines 9-12: then the prompts that are under way
    left = chunks(scheduler, left)
    # lines 13-20: then new requests, first come first served
    new_chunks(scheduler, left)


def chunks(scheduler: Scheduler, left: int) -> int:
    """Of the prompts that are under way, in order, `left` tokens in all; returns what is left of those."""
    for sequence in scheduler.idle_prompts():
        if left <= 0:
            break
        left -= scheduler.chunk(sequence, left)
    return left


def new_chunks(scheduler: Scheduler, left: int) -> None:
    """Of waiting prompts, `left` tokens in all."""
    while left > 0 and (sequence := scheduler.admit()):
        left -= scheduler.chunk(sequence, left)


class ChunkedPrefillOnly:
    """Ablation of Sarathi-Serve (OSDI'24, table 4): batches of chunks and of decodes alternate, never mixed.

    New prompts come in only when none is under way.
    """

    def __init__(self) -> None:
        self._chunks_last = False

    def __call__(self, scheduler: Scheduler) -> None:
        for chunks_now in (not self._chunks_last, self._chunks_last):
            if not chunks_now:
                scheduler.decode()
            elif scheduler.idle_prompts():
                chunks(scheduler, scheduler.room())
            else:
                new_chunks(scheduler, scheduler.room())
            if scheduler.width:
                self._chunks_last = chunks_now
                return


def paceline(scheduler: Scheduler) -> None:
    """Sarathi-Serve's stall-free batches, for pipelines and for goals. Ours; not in a paper.

    * Decodes are spread evenly over the micro-batches of a pipeline; published code gives all to the first free one.
      A ready decode is left out of fewer batches than there are stages, since as many shares take all.
    * A step is composed when the first stage is free for it, so that it takes what has come meanwhile.
    * Chunks of one prompt follow each other through the pipeline, so a long prompt fills it alone.
    * Prompts, running or waiting, go by the time at which their first token is wanted: a short one with a goal is not
      stuck behind a long one, and nobody starves.

    With one stage and without goals the batches are those of `sarathi_serve`.
    """
    if scheduler.pipeline == 1:
        scheduler.decode()
    else:
        scheduler.decode(-(-scheduler.num_decoding // scheduler.pipeline), longest=True)
    left = scheduler.room()
    while left > 0 and (sequence := scheduler.next_prompt()):
        left -= scheduler.chunk(sequence, left)


def first_token_wanted(request: Request) -> tuple[float, ...]:
    """When, in seconds; among equals the first come is first served."""
    goal = PATIENCE_S if request.slo.ttft is None else request.slo.ttft
    return request.arrival + goal, request.arrival


def chunk_and_decodes(config: SchedulerConfig) -> int:
    return config.token_budget + config.max_batch


def whole_prompts(config: SchedulerConfig) -> int:
    return config.max_num_batched_tokens + config.max_batch


POLICIES: dict[str, Callable[[], Policy]] = {
    "request_level": lambda: Policy(RequestLevel(), reserves=True, widest=whole_prompts),
    "orca": lambda: Policy(orca, reserves=True, widest=whole_prompts),
    "prefill_first": lambda: Policy(prefill_first, widest=whole_prompts),
    "prefill_first_padded": lambda: Policy(prefill_first_padded, widest=whole_prompts),
    "sarathi_2023": lambda: Policy(sarathi_2023, widest=chunk_and_decodes),
    "sarathi_2023_tile_aligned": lambda: Policy(sarathi_2023_tile_aligned, widest=chunk_and_decodes),
    "sarathi_serve": lambda: Policy(sarathi_serve),
    "chunked_prefill_only": lambda: Policy(ChunkedPrefillOnly()),
    "paceline": lambda: Policy(paceline, late=True, place=first_token_wanted),
}
ALIASES = {
    "ft": "request_level",
    "vllm": "prefill_first",
    "vllm__alt": "prefill_first_padded",
    "sarathi_s23": "sarathi_2023",
    "sarathi_s23_tile_aligned": "sarathi_2023_tile_aligned",
}


def policy(name: str) -> Policy:
    """A policy with its state, for one group. Raises ValueError for an unknown name."""
    known = ALIASES.get(name, name)
    if known not in POLICIES:
        raise ValueError(f"policy: {name!r} is not one of {', '.join(sorted([*POLICIES, *ALIASES]))}")
    return POLICIES[known]()
