"""Batch jobs through the controller in one process, with a toy model that sees every wrong block."""

import random

import pytest

from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.batching.policies import POLICIES
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.runtime.offline import Offline, Output
from tests.runtime.test_fleet import expected
from tests.runtime.toy_worker import POISON, ToyEngine


def offline(budget: int = 16, num_blocks: int = 24, policy: str = "paceline", ahead: int = 0) -> Offline:
    limits = SchedulerConfig(token_budget=budget, block_size=4, num_blocks=num_blocks)
    return Offline(ToyEngine(num_blocks), GroupConfig(scheduler=limits, policy=policy, ahead=ahead))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_blocks", [14, 400])
def test_every_policy_runs_an_engine(policy, num_blocks):
    rng = random.Random(6)
    shared = [rng.randrange(900) for _ in range(8)]
    prompts = [shared * (i % 2) + [rng.randrange(900) for _ in range(rng.randint(1, 12))] for i in range(12)]
    job = offline(6, num_blocks, policy)
    outputs = job.generate(prompts, [SamplingParams(max_tokens=15)] * 12)
    assert [o.tokens for o in outputs] == [expected(p, 15) for p in prompts]
    job.controller.groups[0].scheduler.check()


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("num_blocks", [14, 400])
def test_tokens_do_not_depend_on_budget_or_preemption(budget, num_blocks):
    rng = random.Random(5)
    prompts = [[rng.randrange(900) for _ in range(rng.randint(1, 20))] for _ in range(12)]
    job = offline(budget, num_blocks)
    outputs = job.generate(prompts, [SamplingParams(max_tokens=20)] * 12)
    assert [o.tokens for o in outputs] == [expected(p, 20) for p in prompts]
    assert not job.engine.tokens, "the engine was told to forget"


def test_what_preempted_sequences_find_again_is_no_hit():
    job, preempted = offline(num_blocks=10), []
    job.on_step = lambda batch, *_: preempted.extend(batch.preempted)
    job.generate([list(range(10 * i, 10 * i + 8)) for i in range(4)], [SamplingParams(max_tokens=16)] * 4)
    assert preempted and job.controller.groups[0].scheduler.cached_tokens == 0


def test_requests_arrive_over_time_and_idle_time_is_skipped():
    arrivals = [0.0, 0.0, 5000.0, 90000.0]
    outputs = offline().generate([[1], [2], [3], [4]], [SamplingParams(max_tokens=4)] * 4, arrivals)
    assert [o.tokens for o in outputs] == [expected([i], 4) for i in (1, 2, 3, 4)]
    for output, arrival in zip(outputs, arrivals, strict=True):
        assert output.times == sorted(output.times) and arrival <= output.times[0] < output.times[-1] < arrival + 1000


def test_jobs_take_turns_step_by_step_and_who_stops_leaves_nothing_in_the_engine():
    prompts, params = [[1, 2, 3], [4, 5]], [SamplingParams(max_tokens=6)] * 2
    jobs = [offline(), offline()]
    outputs = [[Output(), Output()] for _ in jobs]
    whole, broken = (job.steps(prompts, params, some, [0.0, 0.0]) for job, some in zip(jobs, outputs, strict=True))
    for _ in range(3):
        next(whole), next(broken)
    assert all(job.engine.tokens for job in jobs)
    broken.close()
    assert [len(list(whole)), jobs[0].engine.tokens, jobs[1].engine.tokens] == [3, {}, {}]
    assert [o.tokens for o in outputs[0]] == [expected(p, 6) for p in prompts]
    assert [o.tokens for o in outputs[1]] == [expected(p, 6)[:3] for p in prompts]


@pytest.mark.parametrize("steps", range(1, 8))
def test_who_stops_between_steps_composed_ahead_leaves_nothing_either(steps):
    job = offline(ahead=1)
    outputs = [Output(), Output()]
    params = [SamplingParams(max_tokens=count) for count in (3, 30)]
    flow = job.steps([[1, 2], [3, 4]], params, outputs, [0.0, 0.0])
    for _ in range(steps):
        next(flow)
    flow.close()
    assert not job.engine.tokens


def test_the_controller_knows_of_what_kind_a_request_is():
    params, job = [SamplingParams(max_tokens=4, temperature=one) for one in (0.0, 1.0)], offline()
    flow = job.steps([[1], [2]], params, [Output(), Output()], [0.0, 0.0])
    next(flow)
    assert [one.request.kind for _, one in job.controller.sequences.values()] == [one.kind for one in params]
    flow.close()


def test_one_bad_sequence_fails_alone():
    outputs = offline().generate([[1], [POISON], [2]], [SamplingParams(max_tokens=4)] * 3)
    assert outputs[1].error == "poisoned" and not outputs[1].tokens
    assert outputs[0].tokens == expected([1], 4) and outputs[2].tokens == expected([2], 4)


def test_what_a_failed_sequence_left_in_its_blocks_is_not_shared():
    job = offline()
    prefix = list(range(12))
    assert job.generate([[*prefix, POISON]], [SamplingParams(max_tokens=4)])[0].error
    assert job.generate([[*prefix, 7]], [SamplingParams(max_tokens=4)])[0].tokens == expected([*prefix, 7], 4)


def test_a_prompt_that_never_fits_is_named_and_changes_nothing():
    job = offline(num_blocks=4)
    with pytest.raises(ValueError, match="prompt 1"):
        job.generate([[1], [1] * 30], [SamplingParams(max_tokens=4)] * 2)
    assert job.generate([[1]], [SamplingParams(max_tokens=4)])[0].tokens == expected([1], 4)


def test_a_job_takes_any_number_of_prompts():
    goal = GoalBudget((0.03,) * 16, (0.0,) * 6, tile=1, knee=16, maximum=16, tbt=0.001)  # not one that can be met
    limits = SchedulerConfig(token_budget=16, max_batch=1, block_size=4, num_blocks=24)
    config = GroupConfig(("one",), limits, max_waiting=1, budget=goal, admission=True)
    outputs = Offline(ToyEngine(24), config).generate([[i] for i in range(5)], [SamplingParams(max_tokens=4)] * 5)
    assert [o.tokens for o in outputs] == [expected([i], 4) for i in range(5)]
