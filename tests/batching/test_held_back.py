"""Why decodes that might draft do not: each reason where it is true."""

from collections.abc import Callable
from functools import partial

import pytest

from paceline.batching.config import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.request import (
    AT_END,
    BY_BUDGET,
    BY_TIME,
    HELD_BACK,
    MEMORY,
    SLO,
    UNPAID,
    Request,
)
from paceline.runtime.api import IDLE
from paceline.simulator.driver import FixedOutputs, simulate
from paceline.speculation.costs import Costs
from paceline.speculation.lookahead import Lookahead

FLAT, STEEP = Costs([0.1] * 400), Costs([0.1 * n for n in range(400)])  # of a step; seconds
FREE, DEAR = Costs([0.0] * 400), Costs([0.0, *[0.05] * 399])  # of a drafted token


def reasons(
    requests: list[Request], lookahead: Callable[[], Lookahead] | None, **limits: int
) -> tuple[list[set[int]], bool]:
    """Of every step's decodes without drafts, and whether anything was drafted."""
    controller = Controller([GroupConfig(scheduler=SchedulerConfig(**limits), lookahead=lookahead)])
    found, drafted = list[set[int]](), False

    def look(batch) -> float:
        nonlocal drafted
        drafted |= batch.drafts is not None
        idle = (one for one in batch.slices if one.decode and not one.num_draft)
        found.append({one.sequence.row[HELD_BACK] for one in idle if one.sequence.request.max_draft_tokens})
        return 0.1

    outputs = FixedOutputs({one.id: one.max_tokens for one in requests}, lambda request, drafted: drafted)
    simulate(controller, requests, look, outputs)
    return found, drafted


def request(name: str, tokens: int = 16, tbt: float | None = None, prompt: int = 4) -> Request:
    return Request(name, prompt, tokens, slo=SLO(tbt=tbt), max_draft_tokens=4)


CHOOSING, FIXED = partial(Lookahead, FLAT, FREE), None


@pytest.mark.parametrize("lookahead", [CHOOSING, FIXED])
def test_a_last_token_is_nobodys_draft(lookahead):
    found, drafted = reasons([request("a", tokens=6), request("b", tokens=2)], lookahead)
    assert drafted and found[:2] == [set(), {AT_END}] and not any(found[2:])


def test_drafts_that_do_not_pay():
    found, _ = reasons([request("a", tokens=30), request("b", tokens=30)], partial(Lookahead, STEEP, DEAR))
    assert {UNPAID} in found and set.union(*found) <= {UNPAID, AT_END}


@pytest.mark.parametrize("goal", [0.11, 0.14])
def test_a_goal_that_no_draft_would_leave(goal):
    found, drafted = reasons([request("a", tbt=goal)], partial(Lookahead, FLAT, DEAR))
    assert not drafted and set.union(*found) == {BY_TIME, AT_END}


def test_a_goal_that_is_missed_anyway_holds_nobody_back():
    found, drafted = reasons([request("a", tbt=0.05)], partial(Lookahead, FLAT, DEAR))
    assert drafted and BY_TIME not in set.union(*found)


@pytest.mark.parametrize("lookahead", [CHOOSING, FIXED])
def test_a_budget_that_the_decodes_fill(lookahead):
    requests = [request(str(i), prompt=1) for i in range(8)]
    found, drafted = reasons(requests, lookahead, token_budget=8)
    assert not drafted and set.union(*found) == {BY_BUDGET, AT_END}


@pytest.mark.parametrize("lookahead", [CHOOSING, FIXED])
def test_blocks_that_are_short(lookahead):
    """Two prompts fill all blocks but one, whose token each needs in turn."""
    requests = [request("a", 8, prompt=8), request("b", 8, prompt=8)]
    found, _ = reasons(requests, lookahead, block_size=4, num_blocks=6, watermark=0.0)
    assert {MEMORY} in found and set.union(*found) <= {MEMORY, AT_END}


def test_every_reason_has_a_name():
    assert len({UNPAID, BY_TIME, BY_BUDGET, AT_END, MEMORY}) == 5 and IDLE.index("memory") == MEMORY
    assert (IDLE[UNPAID], IDLE[BY_TIME], IDLE[BY_BUDGET], IDLE[AT_END]) == (
        "unpaid", "latency_goal", "budget", "last_token",
    )  # fmt: skip
