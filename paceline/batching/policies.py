"""Batching policies by name: each composes one step out of the moves.

The published ones are in their papers' order and terms; under memory pressure all follow rules M1-M5 (`moves`),
which the published code does not. All are compiled, with their moves, into one function, `compose`.
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Callable
from dataclasses import dataclass

from paceline.batching.budget import seconds_at_pace
from paceline.batching.config import SchedulerConfig
from paceline.batching.moves import (
    admit,
    all_within_goal,
    arrive,
    chunk,
    decode,
    decode_alone,
    depart,
    next_idle_prompt,
    next_prompt,
    num_decoding,
    num_drafted,
    num_waiting,
    pending,
    ring,
    room,
    takes_no_step,
)
from paceline.batching.pace import learn_share, learn_waits
from paceline.batching.state import (
    AHEAD,
    AT,
    BEGIN,
    BY_GOAL,
    CHUNKS_LAST,
    COHORTS,
    DECODES,
    ENTERING,
    FLYING,
    HEAD,
    KNEE,
    LANDED,
    LATE,
    LOST,
    MARGIN,
    MAX_BATCH,
    MAX_PROMPT_TOKENS,
    NEXT_BATCH,
    NEXT_COHORT,
    NEXT_SERIAL,
    NONE,
    PIPELINE,
    POLICY,
    PREEMPTED,
    PROMPTS,
    RUNNING,
    SEEN,
    SLICES,
    SPENT,
    TILE,
    TOKEN_BUDGET,
    WANTED,
    WIDTH,
    Bytes,
    State,
)
from paceline.compiled import part
from paceline.core.request import COHORT, IN_FLIGHT, KNOWN

PATIENCE_S = 60.0  # a prompt without a goal counts as one that wants its first token after so long
ALL = 1 << 62  # tokens, decodes
ROUNDS = 2  # of a pipeline that prompts are spread over


@part
def request_level(s: State) -> None:
    """A batch runs until all its members have ended; only then does the next one begin (FasterTransformer)."""
    now = s.now
    for _ in range(now[COHORTS]):
        cohort, members, idle = s.cohorts[0], 0, True
        for k in range(now[COHORTS] - 1):
            s.cohorts[k] = s.cohorts[k + 1]
        for k in range(now[RUNNING]):
            slot = s.running[k]
            if s.numbers[slot, COHORT] == cohort:
                s.listed[members] = slot
                members += 1
                idle &= s.numbers[slot, IN_FLIGHT] == 0
        s.cohorts[now[COHORTS] - 1] = cohort
        if members == 0:
            now[COHORTS] -= 1
        elif idle:
            for k in range(members):
                decode_alone(s, s.listed[k])
            return
    slot = admit(s)
    if slot >= 0:
        now[NEXT_COHORT] += 1
        s.cohorts[now[COHORTS]] = now[NEXT_COHORT]
        now[COHORTS] += 1
    while slot >= 0:
        chunk(s, slot, ALL)
        s.numbers[slot, COHORT] = now[NEXT_COHORT]
        slot = admit(s)


@part
def orca(s: State) -> None:
    """Iteration-level batching (Orca, OSDI'22): decodes, and whole new prompts; reserves memory for the longest."""
    decode(s, ALL)
    new_chunks(s, ALL)


@part
def prefill_first(s: State) -> None:
    """Prompts before decodes, never both in a batch (vLLM before 2024, SOSP'23).

    At most `max_num_batched_tokens` of prompts a step; a longer prompt goes alone. Where goals order them none joins
    that would make the first one late (AlpaServe, section 5: as many in a batch as the goals allow).
    """
    count, tokens, pairs, due = 0, 0, 0, 0.0
    begin, free = s.factors[BEGIN], s.clocks[s.limits[PIPELINE] - 1]
    while num_waiting(s) > 0 and joins(
        s, count, tokens, pairs, s.numbers[s.waiting[s.now[HEAD]], KNOWN], begin, free, due
    ):
        slot = admit(s)
        if slot < 0:
            break
        length, due = chunk(s, slot, ALL), due if count > 0 else s.times[slot, WANTED]
        count, tokens, pairs = count + 1, tokens + length, pairs + length * (length + 1) // 2
    if count == 0:
        decode(s, ALL)


@part
def joins(
    s: State, count: int, tokens: int, pairs: int, more: int, begin: float, free: float, due: float
) -> bool:  # fmt: skip
    """Whether a whole prompt of `more` tokens goes with others in a step of `prefill_first` that begins then, and
    finds the last stage free at a time; in a pipeline only where that costs it no time. Those are so many, of so many
    tokens and pairs of query and key; the first of them is wanted when it is `due`."""
    if count == 0:
        return True
    if count >= s.limits[MAX_BATCH] or tokens + more > s.limits[MAX_PROMPT_TOKENS]:
        return False
    if s.limits[BY_GOAL] == 0:
        return True
    late, own, stages = 1 + s.factors[MARGIN], more * (more + 1) // 2, s.limits[PIPELINE]
    took, before = seconds_of_whole(s, count + 1, tokens + more, pairs + own), seconds_of_whole(s, count, tokens, pairs)
    if stages > 1:  # behind these in a step of its own it may be done sooner
        alone = seconds_of_whole(s, 1, more, own)
        behind = max(begin + before + stages * alone, done(s, begin, free, before) + alone)
        if done(s, begin, free, took) > behind:
            return False
    return done(s, begin, free, late * took) <= due or done(s, begin, free, late * before) > due


@part
def done(s: State, begin: float, free: float, took: float) -> float:
    """When a step that takes so long in each stage leaves the last one, which is free for it then at the earliest.
    (Stages that it has to wait for in between are free earlier: steps take as long in all stages.)"""
    return max(begin + (s.limits[PIPELINE] - 1) * took, free) + took


@part
def seconds_of_whole(s: State, count: int, tokens: int, pairs: int) -> float:
    """Of a step of so many whole prompts."""
    return seconds_at_pace(s, (tokens, count, 0, 0, 0, pairs, count))


@part
def prefill_first_padded(s: State) -> None:
    """`prefill_first` as Vidur has it: prompts count as long as the longest of the step, and a step of a
    pipeline takes at most its share of `max_batch`."""
    most = max(1, s.limits[MAX_BATCH] // s.limits[PIPELINE])
    count, longest = 0, 0
    while num_waiting(s) > 0 and count < most:
        longest = max(longest, s.numbers[s.waiting[s.now[HEAD]], KNOWN])
        if count > 0 and longest * (count + 1) > s.limits[MAX_PROMPT_TOKENS]:
            break
        slot = admit(s)
        if slot < 0:
            break
        chunk(s, slot, ALL)
        count += 1
    if count == 0:
        decode(s, most)


@part
def sarathi_2023(s: State) -> None:
    """Decode-maximal batches (SARATHI, 2023, section 4.3): all decodes and one chunk of a fixed size."""
    decode(s, ALL)
    one_chunk(s, s.limits[TOKEN_BUDGET] - num_drafted(s))


@part
def sarathi_2023_tile_aligned(s: State) -> None:
    """The same, but the whole batch is a chunk wide, if that leaves a token of the prompt (section 4.4)."""
    decode(s, ALL)
    one_chunk(s, max(1, room(s)))


@part
def one_chunk(s: State, most: int) -> None:
    """Of the first prompt that is under way, or of a new one."""
    at = next_idle_prompt(s, 0)
    slot = s.prompts[at] if at >= 0 else admit(s)
    if slot >= 0:
        chunk(s, slot, most)


@part
def sarathi_serve(s: State) -> None:
    """Stall-free batching (Sarathi-Serve, OSDI'24, Algorithm 3).

    Every decode rides in every batch and costs one token of the budget; then unfinished prompts, then new ones get
    chunks of what is left. The budget is the width of the batch, not of a chunk; more decodes than the budget all run.

    Differs from the published code in that a chunk is never negative.
    """
    # lines 6-8: pack all the decodes
    decode(s, ALL)
    left = room(s)
    # lines 9-12: then the prompts that are under way
    left = chunks(s, left)
    # lines 13-20: then new requests, first come first served
    new_chunks(s, left)


@part
def chunks(s: State, left: int) -> int:
    """Of the prompts that are under way, in order, `left` tokens in all; returns what is left of those."""
    at = next_idle_prompt(s, 0)
    while left > 0 and at >= 0:
        slot = s.prompts[at]
        left -= chunk(s, slot, left)
        at = next_idle_prompt(s, at if s.prompts[at] != slot else at + 1)  # a prompt taken to its end has left
    return left


@part
def new_chunks(s: State, left: int) -> None:
    """Of waiting prompts, `left` tokens in all."""
    while left > 0:
        slot = admit(s)
        if slot < 0:
            break
        left -= chunk(s, slot, left)


@part
def chunked_prefill_only(s: State) -> None:
    """Ablation of Sarathi-Serve (OSDI'24, table 4): batches of chunks and of decodes alternate, never mixed.

    New prompts come in only when none is under way.
    """
    last = s.now[CHUNKS_LAST]
    for chunks_now in (1 - last, last):
        if chunks_now == 0:
            decode(s, ALL)
        elif next_idle_prompt(s, 0) >= 0:
            chunks(s, room(s))
        else:
            new_chunks(s, room(s))
        if s.now[WIDTH] > 0:
            s.now[CHUNKS_LAST] = chunks_now
            return


@part
def paceline(s: State) -> None:
    """Sarathi-Serve's stall-free batches, for pipelines and for goals. Ours; not in a paper.

    * Decodes are spread evenly over the micro-batches of a pipeline; published code gives all to the first free one.
      A ready decode is left out of fewer batches than there are stages, since as many shares take all. None is while
      prompts make steps as long as a goal between tokens allows: it would be late by a step.
    * A step is composed when the first stage is free for it, so that it takes what has come meanwhile.
    * Chunks of one prompt follow each other through the pipeline, so a long prompt fills it alone.
    * Where steps are profiled, prompts are spread over ROUNDS of a pipeline: as wide steps as the budget allows, and
      then narrow ones, are bubbles in other stages.
    * Prompts, running or waiting, go by the time at which their first token is wanted: a short one with a goal is not
      stuck behind a long one, and nobody starves.

    With one stage and without goals the batches are those of `sarathi_serve`.
    """
    stages = s.limits[PIPELINE]
    if stages == 1 or (s.now[PROMPTS] + num_waiting(s) > 0 and all_within_goal(s)):
        decode(s, ALL)
    else:
        decode(s, (num_decoding(s) + stages - 1) // stages, True)
    left = room(s)
    if left > 0 and spreads(s):
        left = even_share(s, s.now[WIDTH], pending(s, ROUNDS * stages * left, True), left)
    while left > 0:
        slot = next_prompt(s)
        if slot < 0:
            break
        left -= chunk(s, slot, left)


@part
def spreads(s: State) -> bool:
    """Whether prompts are spread over the pipeline (`even_share`)."""
    return s.limits[POLICY] == PACELINE and s.limits[PIPELINE] > 1 and s.limits[KNEE] > 0


@part
def even_share(s: State, width: int, prompts: int, most: int) -> int:
    """Tokens for a step of `width`, at most so many, where so many of prompts are spread evenly over the pipeline: over
    as many steps as bring them out of it soonest, at most ROUNDS. Steps are whole tiles."""
    stages, tile, share, soonest = s.limits[PIPELINE], s.limits[TILE], most, NONE
    for steps in range(max(1, (prompts + most - 1) // most), ROUNDS * stages + 1):
        each = (width + (prompts + steps - 1) // steps + tile - 1) // tile * tile
        took = (steps + stages - 1) * seconds_at_pace(s, (each, 0, 0, 0, 0, 0, 0))
        if took < soonest:
            share, soonest = each - width, took
    return min(share, most)


@dataclass(frozen=True, slots=True)
class Policy:
    """How the steps of a group are composed, beside the function of that name."""

    number: int
    reserves: bool = False  # admission takes the blocks of the longest sequence, and knows no watermark
    late: bool = False  # composes a step when the first stage of the pipeline is free for it, not before
    by_goal: bool = False  # prompts go by when their first token is wanted, else first come first served
    within_goals: bool = False  # prompts have what goals between tokens leave of a step (`moves.room`)
    # Tokens of a step to plan memory for; Orca and request-level batches know no bound but the cache.
    widest: Callable[[SchedulerConfig], int] = lambda config: max(config.token_budget, config.max_batch)


def chunk_and_decodes(config: SchedulerConfig) -> int:
    return config.token_budget + config.max_batch


def whole_prompts(config: SchedulerConfig) -> int:
    return config.max_num_batched_tokens + config.max_batch


PACELINE, SARATHI_SERVE, SARATHI_2023, TILE_ALIGNED, CHUNKED_ONLY, PREFILL_FIRST, PADDED, ORCA, REQUEST_LEVEL = range(9)
POLICIES = {
    "request_level": Policy(REQUEST_LEVEL, reserves=True, widest=whole_prompts),
    "orca": Policy(ORCA, reserves=True, widest=whole_prompts),
    "prefill_first": Policy(PREFILL_FIRST, widest=whole_prompts),
    "whole_prompts": Policy(PREFILL_FIRST, late=True, by_goal=True, widest=whole_prompts),
    "prefill_first_padded": Policy(PADDED, widest=whole_prompts),
    "sarathi_2023": Policy(SARATHI_2023, widest=chunk_and_decodes),
    "sarathi_2023_tile_aligned": Policy(TILE_ALIGNED, within_goals=True, widest=chunk_and_decodes),
    "sarathi_serve": Policy(SARATHI_SERVE, within_goals=True),
    "chunked_prefill_only": Policy(CHUNKED_ONLY, within_goals=True),
    "paceline": Policy(PACELINE, late=True, by_goal=True, within_goals=True),
}
ALIASES = {
    "ft": "request_level",
    "vllm": "prefill_first",
    "vllm__alt": "prefill_first_padded",
    "sarathi_s23": "sarathi_2023",
    "sarathi_s23_tile_aligned": "sarathi_2023_tile_aligned",
}


def policy(name: str) -> Policy:
    """Raises ValueError for an unknown name."""
    known = ALIASES.get(name, name)
    if known not in POLICIES:
        raise ValueError(f"policy: {name!r} is not one of {', '.join(sorted([*POLICIES, *ALIASES]))}")
    return POLICIES[known]


@part
def compose(s: State) -> int:
    """The next step of the group's policy, in flight from now on: how many slices, and in `s` all about them. 0: there
    is nothing to do, or it has to wait. `s.lost` says who lost its blocks for it."""
    now, number = s.now, s.limits[POLICY]
    now[LOST] = 0
    if takes_no_step(s):
        return 0
    now[AT] = now[NEXT_BATCH] % ring(s)
    while True:
        now[SLICES] = now[DECODES] = now[WIDTH] = now[PREEMPTED] = 0
        if number == PACELINE:
            paceline(s)
        elif number == SARATHI_SERVE:
            sarathi_serve(s)
        elif number == SARATHI_2023:
            sarathi_2023(s)
        elif number == TILE_ALIGNED:
            sarathi_2023_tile_aligned(s)
        elif number == CHUNKED_ONLY:
            chunked_prefill_only(s)
        elif number == PREFILL_FIRST:
            prefill_first(s)
        elif number == PADDED:
            prefill_first_padded(s)
        elif number == ORCA:
            orca(s)
        else:
            request_level(s)
        if now[SLICES] > 0 or now[PREEMPTED] == 0:
            break  # else what was preempted may come in again, in a step of its own (M5)
    if now[SLICES] > 0:
        depart(s)
        take_off(s)
        if s.limits[LATE] > 0 and s.limits[AHEAD] == 0:
            now[ENTERING] = now[NEXT_BATCH]
        now[NEXT_BATCH] += 1
    return now[SLICES]


@part
def take_off(s: State) -> None:
    """The step just composed is in flight: when it is expected to be done, and its stages to be free of it."""
    learn_waits(s)
    shape, end = s.shape, s.factors[BEGIN]
    took = seconds_at_pace(s, (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]))
    learn_share(s, end, took)
    for k in range(s.limits[PIPELINE]):
        end = max(end, s.clocks[k]) + took + (s.factors[SPENT] if k == 0 else 0.0)
        s.clocks[k] = end
    s.ends[s.now[AT]] = end
    s.now[FLYING] += 1


@part
def leave_first_stage(s: State, batch: int) -> None:
    """The batch is in the second one."""
    if s.now[ENTERING] == batch:
        s.now[ENTERING] = -1


@part
def land(s: State, batch: int, tokens: Bytes) -> int:
    """The batch is done, and its slices yielded so many tokens. Returns their sum."""
    leave_first_stage(s, batch)
    s.now[FLYING] -= 1
    s.now[SEEN] = s.now[NEXT_SERIAL]
    at, landed = batch % ring(s), s.factors[LANDED]
    slip = landed - s.ends[at]
    for k in range(ring(s)):  # what it took longer, those behind it wait
        s.ends[k] += slip
    for k in range(s.limits[PIPELINE]):
        s.clocks[k] = s.clocks[k] + slip if s.now[FLYING] > 0 else min(s.clocks[k], landed)
    return arrive(s, at, tokens)


@part
def wanted(arrival: float, ttft: float, by_goal: bool) -> float:
    """When a request's first token is, in seconds; prompts go in this order. `ttft`: infinity is no goal."""
    if not by_goal:
        return arrival
    return arrival + (ttft if ttft < NONE else PATIENCE_S)
