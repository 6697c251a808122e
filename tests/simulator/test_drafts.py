"""Simulated drafts keep their law, and what they cost: tokens a step, seconds of drafting, the stage that drafts."""

import numpy as np
import pytest

from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.latency.step_time import StepTime
from paceline.simulator.drafts import SimulatedDrafts
from paceline.simulator.steps import run
from paceline.simulator.world import Requests, Served, SimulatedGroup, Steps
from paceline.speculation.costs import Costs

STEP = StepTime(tuple(0.01 + 1e-4 * n for n in range(65)), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
TOKENS = 4001


def alone(drafts: SimulatedDrafts | None, stages: int = 1, requests: int = 1) -> tuple[Served, Steps]:
    """Requests that have the group for themselves, one after the other."""
    limits = SchedulerConfig(token_budget=64, num_blocks=1000)
    group = SimulatedGroup(GroupConfig(("m",), limits, pipeline=stages), STEP, 1 / stages, drafts)
    far, many = np.full(requests, np.inf), np.ones(requests, np.int64)
    arrivals = 1e4 * np.arange(requests)
    return run([group], ["m"], Requests(arrivals, 0 * many, 16 * many, TOKENS * many, far, far))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("most", [1, 4])
def test_tokens_a_step_follow_the_formula(most, acceptance):
    """Leviathan et al., 2023, equation 1."""
    served, steps = alone(SimulatedDrafts(most, acceptance, adaptive=False))
    expected = sum(acceptance**n for n in range(most + 1))
    assert served.tokens[0] == TOKENS == served.gap_ends[0] + 1
    assert (TOKENS - 1) / (len(steps.took) - 1) == pytest.approx(expected, rel=0.03)


def test_the_same_tokens_stay_however_many_are_drafted():
    """So a draft that is too long only adds to what a shorter one gains."""
    steps = [len(alone(SimulatedDrafts(most, 0.7, adaptive=False))[1].took) for most in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True) and steps[0] > 1.5 * steps[-1]


def test_drafting_takes_its_time():
    """Every pass of the draft model reads the 16 tokens of the prompt."""
    _, steps = alone(SimulatedDrafts(3, 1.0, Costs((0.0, 0.002), 1e-4, 1e-5), adaptive=False))
    assert steps.took[1] == pytest.approx(STEP.linear[4])
    assert steps.drafting[1] == pytest.approx(3 * (0.002 + 1e-4 + 16e-5))
    assert steps.left[1, 0] - steps.left[0, 0] == pytest.approx(steps.took[1] + steps.drafting[1])
    _, free = alone(SimulatedDrafts(3, 1.0, adaptive=False))
    assert not free.drafting.any() and len(free.drafting) == len(free.took)
    assert len(alone(None)[1].drafting) == 0


def test_draft_models_catch_up():
    """Where all tokens stay there is one that the draft model has not seen."""
    _, steps = alone(SimulatedDrafts(3, 1.0, Costs((0.0, *(0.001 * n for n in range(1, 9))))))
    assert steps.drafting[2:-1] == pytest.approx(0.004)


def test_the_first_stage_drafts():
    _, steps = alone(SimulatedDrafts(3, 1.0, Costs((0.0, 0.002)), adaptive=False), stages=2)
    first, second = steps.left[1]
    begin = steps.left[0, 1]
    assert steps.took[1] == pytest.approx(STEP.linear[4] / 2) and steps.drafting[1] == pytest.approx(0.006)
    assert first - begin == pytest.approx(STEP.linear[4] / 2 + 0.006)
    assert second - first == pytest.approx(STEP.linear[4] / 2)


@pytest.mark.parametrize(("acceptance", "slower"), [(0.0, 1.02), (0.95, 0.5)])
def test_the_lookahead_drafts_what_pays(acceptance, slower):
    """And where it does not, a request later nobody does: what is learnt stays with the group."""
    plain, drafting = alone(None, requests=3), alone(SimulatedDrafts(4, acceptance), requests=3)
    times = [served.finish - 1e4 * np.arange(3) for served, _ in (plain, drafting)]
    assert times[1][-1] < slower * times[0][-1]
