"""Drafts in virtual time: how many tokens are drafted in a step, what that takes, and which of them stay.

How many is decided by what decides live (`speculation.choice`), on a machine at its usual pace. A drafted token
stays with the same probability everywhere, if those before it do: a number of its own for each request and place in its
output says whether, so that the same tokens stay however many are drafted.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.batching.moves import goal_of_step, pending, width_without_drafts
from paceline.batching.state import (
    ADAPTIVE,
    DRAFT,
    DRAFTING,
    LENGTH,
    RUNNING,
    SLOT,
    SPENT,
    START,
    TOKEN_BUDGET,
    Floats,
    Ints,
    State,
)
from paceline.compiled import making, part
from paceline.core.request import KNOWN, LIMIT, MAX_DRAFT_TOKENS, NUM_KINDS, TAG
from paceline.latency.step_time import StepTime
from paceline.speculation.choice import THRESHOLDS, choose, following
from paceline.speculation.costs import Costs, expected, reading
from paceline.speculation.lookahead import observe, rests
from paceline.speculation.times import SIZES

LOW_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """Who drafts for a group's model, and how well."""

    most: int  # tokens for a sequence in a step
    acceptance: float  # probability that one stays, if those before it do
    costs: Costs | None = None  # of the draft model's steps; None: drafting costs nothing to speak of (n-grams)
    adaptive: bool = True  # as many as pay, else as many as there is room for


class Drafts(NamedTuple):
    """Of all groups; what is known of acceptance changes (`Lookahead`)."""

    most: Ints  # [groups]; 0: nobody drafts
    acceptance: Floats  # [groups]
    linear: Floats  # seconds of steps by tokens, of targets and draft models, one behind the other
    ends: Ints  # [2 groups + 1] where those of each end, target and draft model in turn
    more: Floats  # [2 groups, 2]: seconds for a token, and for a token that it reads
    counts: NDArray[np.float64]  # [groups, slots, 2, MAX_DRAFT_TOKENS + 1]
    group: NDArray[np.float64]  # [groups, NUM_KINDS, 2, MAX_DRAFT_TOKENS + 1]
    kinds: Ints  # [groups, slots]
    unread: Ints  # [groups, slots] tokens that the draft model has not read
    idle: Ints  # [groups] steps in a row in which nobody drafted
    rest: Ints  # [groups, 2 + slots] steps in which nobody is to draft, of how many sequences, and of which
    thresholds: Floats
    verifying: Floats  # [sequences, tokens] 1 for each size: as profiles say
    drafting: Floats  # likewise, of the first pass and others


def of_groups(drafts: Sequence[SimulatedDrafts | None], targets: Sequence[StepTime], slots: int) -> Drafts:
    """`slots`: the most sequences of a group."""
    costs = [
        one for own, time in zip(drafts, targets, strict=True)
        for one in (Costs.of(time), (own and own.costs or Costs([0.0])).drafting)
    ]  # fmt: skip
    some = [own.most if own else 0 for own in drafts]
    by_slot = len(drafts), slots * any(some)
    return Drafts(
        np.array(some, np.int64),
        np.array([own.acceptance if own else 0.0 for own in drafts], np.float64),
        np.array([seconds for one in costs for seconds in one.linear], np.float64),
        np.cumsum([0, *(len(one.linear) for one in costs)]),
        np.array([(one.token, one.context) for one in costs], np.float64).reshape(-1, 2),
        np.zeros((*by_slot, 2, MAX_DRAFT_TOKENS + 1)),
        np.zeros((len(drafts), NUM_KINDS, 2, MAX_DRAFT_TOKENS + 1)),
        np.zeros(by_slot, np.int64),
        np.zeros(by_slot, np.int64),
        np.zeros(len(drafts), np.int64),
        np.zeros((len(drafts), 2 + slots * any(some)), np.int64),
        THRESHOLDS,
        np.ones((SIZES, SIZES)),
        np.ones(2),
    )


@part
def chance(one: int, other: int) -> float:
    """A number from 0 to 1 for these two, the same every time and as if drawn at random."""
    mixed = (one * 0x9E3779B1 + other * 0x85EBCA6B) & LOW_BITS
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & LOW_BITS
    return (mixed ^ (mixed >> 16)) / (LOW_BITS + 1.0)


@part
def num_staying(r: int, left: int, drafted: int, acceptance: float) -> int:
    """Of so many tokens drafted for request r, of whose output `left` are to come."""
    count = 0
    while count < drafted and chance(r, left - count) < acceptance:
        count += 1
    return count


@part
def draft(d: Drafts, g: int, s: State) -> None:
    """Before a step is composed: how many tokens are worth it, as `Scheduler.compose` asks."""
    s.factors[SPENT] = 0.0
    if s.now[DRAFTING] > 0 and s.limits[ADAPTIVE] > 0:
        own, budget = d.ends[2 * g], s.limits[TOKEN_BUDGET]
        running, waits = s.running[: s.now[RUNNING]], pending(s, budget, False)
        if rests(d.rest[g], running, waits):
            return
        budget = width_without_drafts(s, waits)
        middle, end = d.ends[2 * g + 1], d.ends[2 * g + 2]
        s.factors[SPENT], _, _ = choose(
            s.numbers, s.drafts, running, d.counts[g], d.group[g], d.kinds[g], d.unread[g], waits, budget,
            goal_of_step(s), 0.0, 0.0, d.idle[g], 0, d.linear[own:middle], d.more[2 * g, 0],
            d.more[2 * g, 1], d.linear[middle:end], d.more[2 * g + 1, 0], d.more[2 * g + 1, 1], d.verifying,
            d.drafting, d.thresholds, s.chosen, d.rest[g],
        )  # fmt: skip


@making
def seconds_of_drafts(d: Drafts, g: int, s: State, at: int, count: int) -> float:
    """What drafting, and reading prompts for it, takes in the step composed at this place of the ring."""
    step, read, drafts, unread, prompts = s.steps[at], 0, 0, 0, 0
    drafted = np.zeros(count, np.uint8)
    for i in range(count):
        if step[DRAFT, i] > 0:
            drafted[drafts] = step[DRAFT, i]
            read += step[START, i]
            unread += d.unread[g, step[SLOT, i]]
            drafts += 1
        elif step[LENGTH, i] > 1 and s.drafts[step[SLOT, i]] > 0:
            prompts += step[LENGTH, i]
    own, middle, end = d.ends[2 * g], d.ends[2 * g + 1], d.ends[2 * g + 2]
    if drafts == 0:
        return following(d.idle[g] + 1, prompts, d.drafting, d.linear[middle:end])
    first, further, _ = expected(
        drafted[:drafts], unread, read, d.linear[own:middle], d.more[2 * g, 0], d.more[2 * g, 1],
        d.linear[middle:end], d.more[2 * g + 1, 0], d.more[2 * g + 1, 1],
    )  # fmt: skip
    return first + further + reading(d.linear[middle:end], drafts, prompts)


@making
def judge(d: Drafts, g: int, s: State, at: int) -> None:
    """The step at this place of the ring is done: which of its drafts stay, and what is learnt of it."""
    step, emits, count = s.steps[at], s.emits[at], s.sizes[at]
    for i in range(count):
        slot, drafted = step[SLOT, i], step[DRAFT, i]
        if drafted > 0:
            left = s.numbers[slot, LIMIT] - s.numbers[slot, KNOWN]
            emits[i] = 1 + num_staying(s.numbers[slot, TAG], left, drafted, d.acceptance[g])
    observe(
        step[SLOT, :count], step[LENGTH, :count] - step[DRAFT, :count], step[DRAFT, :count],
        step[DRAFT, :count].astype(np.uint8), emits[:count], d.counts[g], d.group[g], d.kinds[g], d.unread[g],
        d.idle[g : g + 1],
    )  # fmt: skip
