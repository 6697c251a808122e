"""Invariants of every run, whatever arrives and whatever the policy: budget, decodes, blocks, progress."""

import math
import random
from collections import Counter, deque
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.batching.policies import POLICIES
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch, StepResult, StepShape
from paceline.core.events import Advance, Back, Cancel, Complete, Event, Lost, Submit
from paceline.core.request import SLO, Request, Sequence
from paceline.simulator.driver import FixedOutputs, simulate
from paceline.speculation.choice import REST
from paceline.speculation.costs import Costs
from paceline.speculation.lookahead import Lookahead
from paceline.speculation.times import SIZES, of_tokens

TAKE_ALL_DECODES = {"orca", "sarathi_2023", "sarathi_2023_tile_aligned", "sarathi_serve", "paceline"}
KEEP_TO_THE_BUDGET = {"sarathi_serve", "paceline", "chunked_prefill_only"}
REQUESTS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 40), st.integers(1, 20), st.integers(0, 2), st.integers(0, 5)),
    min_size=1,
    max_size=14,
)
SLOW, FAST = Costs([10.0 + n for n in range(200)]), Costs([0.1] * 200)
LIMITS = st.builds(
    SchedulerConfig,
    token_budget=st.integers(1, 48),
    max_batch=st.integers(1, 8),
    block_size=st.sampled_from([1, 4, 16]),
    num_blocks=st.integers(4, 60),
    watermark=st.sampled_from([0.0, 0.05, 0.25]),
)


class Checked:
    """A latency model that looks at every batch, and at the scheduler behind it."""

    def __init__(self, controller: Controller) -> None:
        self.config = controller.groups[0].config
        self.scheduler = controller.groups[0].scheduler
        self.flights: dict[int, Batch] = {}

    def __call__(self, batch: Batch) -> int:
        scheduler, policy = self.scheduler, self.config.policy
        scheduler.check()
        if batch.id != max(scheduler.flying):  # in this turn another was composed ahead, behind it
            return 10 + batch.num_tokens
        decodes = [s for s in batch.slices if s.decode]
        if policy in KEEP_TO_THE_BUDGET:
            assert batch.num_tokens <= max(scheduler.config.token_budget, len(decodes))
        if policy.startswith("sarathi"):
            assert batch.num_tokens <= scheduler.policy.widest(scheduler.config), "memory is planned for that"
        if policy in TAKE_ALL_DECODES and scheduler.pipeline == 1:
            others = [s for s in scheduler.running if s.id not in batch.requests and s.scheduled >= s.prompt]
            assert not any(self.goes_on(s) for s in others), "a decode was skipped"
            assert not any(s.sequence.ended for s in decodes)
        assert len(scheduler.running) <= scheduler.config.max_batch
        assert len(scheduler.flying) <= scheduler.ring
        assert len(set(batch.requests)) == len(batch.requests), "a sequence is in a batch twice"
        for item in batch.slices:
            assert item.length >= 1
            assert item.end <= item.sequence.num_blocks * scheduler.config.block_size
            assert item.end == item.sequence.scheduled
            ahead = scheduler.ring > scheduler.pipeline
            assert item.sequence.in_flight == 1 or (policy == "paceline" and (ahead or not item.decode))
        size = scheduler.config.block_size
        written = [block for s in batch.slices for block in s.sequence.blocks()[s.start // size : -(-s.end // size)]]
        assert len(written) == len(set(written)), "two sequences write the same block"
        shape = StepShape()
        for item in batch.slices:
            shape = shape.add(item.start, item.length, item.emits, item.num_draft)
        assert batch.shape == shape
        return 10 + batch.num_tokens

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether it can have a token of a step that is composed now."""
        if sequence.in_flight == 0:
            return True
        about_to_know = self.config.ahead and sequence.scheduled == sequence.known and not sequence.ended
        request = sequence.request
        return about_to_know and sequence.known + 1 < request.prompt_tokens + request.max_tokens


def shared_prefixes(family: int, prompt: int, size: int) -> tuple[int, ...]:
    """Hashes of the full blocks; requests of a family share their beginning. Family 0 caches nothing."""
    return tuple(1000 * family + i for i in range(prompt // size)) if family else ()


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([(1, 0), (1, 1), (2, 0), (4, 0)]),
    REQUESTS,
    LIMITS,
    st.sets(st.integers(0, 13)),
    st.integers(0, 400),
    st.sampled_from([None, partial(Lookahead, SLOW, None), partial(Lookahead, SLOW, FAST)]),
)
def test_every_run_keeps_the_invariants(policy, depth, rows, limits, cancelled, cancel_time, lookahead):
    policy, (pipeline, ahead) = "paceline" if depth[1] else policy, depth
    config = GroupConfig(scheduler=limits, policy=policy, pipeline=pipeline, ahead=ahead, lookahead=lookahead)
    controller = Controller([config])
    requests = [
        Request(
            str(i),
            prompt,
            output,
            arrival=arrival,
            prefix=shared_prefixes(family, prompt, limits.block_size),
            max_draft_tokens=draft,
        )
        for i, (arrival, prompt, output, family, draft) in enumerate(rows)
    ]
    rng = random.Random(len(rows))
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests}, lambda request, drafted: rng.randint(0, drafted))
    cancels = [(cancel_time, str(i)) for i in cancelled]
    trace = simulate(controller, requests, Checked(controller), outputs, cancels)
    scheduler = controller.groups[0].scheduler
    assert not scheduler.waiting and not scheduler.running and not scheduler.prompts and not controller.sequences
    scheduler.check()
    assert scheduler.num_free_blocks == limits.num_blocks
    ends = {e.request: e.kind for e in trace if e.kind in ("finished", "rejected", "cancelled")}
    for request in requests:
        fits = scheduler.fits(request.prompt_tokens, request.max_tokens)
        assert ends[request.id] in (("finished", "cancelled") if fits else ("rejected",))
        assert ends[request.id] != "finished" or emitted(trace, request.id) == request.max_tokens


def emitted(trace: list[Event], request: str) -> int:
    columns = [e.detail for e in trace if e.kind == "tokens"]
    return sum(n for rows in columns for id, n in zip(rows.requests, rows.tokens, strict=True) if id == request)


def run(limits: SchedulerConfig, requests: list[Request], **options):
    controller = Controller([GroupConfig(scheduler=limits, **options)])
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests})
    trace = simulate(controller, requests, lambda batch: 10 + batch.num_tokens, outputs)
    return controller, trace


def test_a_prefix_hit_costs_no_budget():
    limits = SchedulerConfig(token_budget=8, block_size=4, num_blocks=64)
    prefix = tuple(range(8))
    requests = [Request("a", 33, 2, prefix=prefix), Request("b", 33, 2, arrival=1000, prefix=prefix)]
    controller, trace = run(limits, requests)
    widths = [e.tokens for e in trace if e.kind == "started" and e.time >= 1000]
    assert widths == [1, 1], "32 of 33 prompt tokens came from the cache"
    assert controller.groups[0].scheduler.cached_tokens == 32


def test_the_last_token_is_computed_even_if_all_blocks_are_cached():
    limits = SchedulerConfig(token_budget=64, block_size=4, num_blocks=64)
    prefix = tuple(range(8))
    _, trace = run(limits, [Request("a", 32, 1, prefix=prefix), Request("b", 32, 1, arrival=1000, prefix=prefix)])
    assert [e.tokens for e in trace if e.kind == "started"] == [32, 4]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prefix_hit_is_not_computed_under_any_policy(policy):
    limits = SchedulerConfig(token_budget=8, block_size=4, num_blocks=64)
    prefix = tuple(range(8))
    requests = [Request("a", 33, 2, prefix=prefix), Request("b", 33, 2, arrival=1000, prefix=prefix)]
    _, trace = run(limits, requests, policy=policy)
    assert [e.tokens for e in trace if e.kind == "started" and e.time >= 1000] == [1, 1]


def firsts(trace: list[Event]) -> list[str]:
    """Requests in the order of their first tokens."""
    columns = [e.detail for e in trace if e.kind == "tokens"]
    return list(dict.fromkeys(id for rows in columns for id, n in zip(rows.requests, rows.tokens, strict=True) if n))


def test_a_short_prompt_with_a_goal_is_not_stuck_behind_a_long_one():
    limits = SchedulerConfig(token_budget=16, num_blocks=1000)
    requests = [Request("long", 400, 1), Request("plain", 16, 1, arrival=20), Request("goal", 16, 1, arrival=30)]
    assert firsts(run(limits, requests)[1]) == ["long", "plain", "goal"]
    requests[2] = Request("goal", 16, 1, arrival=30, slo=SLO(ttft=20.0))
    controller, trace = run(limits, requests)
    assert firsts(trace) == ["goal", "long", "plain"]
    assert next(e.time for e in trace if e.kind == "finished") == 26 + 26 + 26, "in the next step after it came"


def test_nobody_starves_behind_goals():
    """One step is worth 26 s; a stream of short prompts with goals would never let the one without in."""
    limits = SchedulerConfig(token_budget=16, num_blocks=1000)
    stream = [Request(str(i), 16, 1, arrival=26.0 * i, slo=SLO(ttft=1.0)) for i in range(20)]
    order = firsts(run(limits, [Request("plain", 16, 1), *stream])[1])
    assert order.index("plain") == 3, "after 60 s it is as urgent as they are"


def test_chunks_of_one_prompt_follow_each_other_through_the_pipeline():
    stages = []
    controller = Controller([GroupConfig(scheduler=SchedulerConfig(token_budget=16), pipeline=3)])
    outputs = FixedOutputs({"a": 1})
    watch = lambda batch, times: stages.append(times)  # noqa: E731
    simulate(controller, [Request("a", 64, 1)], lambda batch: 10, outputs, watch=watch)
    assert [times[0] for times in stages] == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert stages[-1][-1] == (50, 60)


def slices(batch: Batch) -> list[tuple[str, int, int]]:
    return [(one.sequence.id, one.start, one.length) for one in batch.slices]


def test_a_step_is_composed_before_the_last_tokens_are_known():
    controller = Controller([GroupConfig(ahead=1)])
    _, batches = controller.turn([Submit(Request("a", 4, 3)), Submit(Request("b", 2, 9))], 0.0)
    assert [slices(batch) for batch in batches] == [[("a", 0, 4), ("b", 0, 2)], [("a", 4, 1), ("b", 2, 1)]]
    _, (third,) = controller.turn([Complete(0, 0, StepResult(bytearray([1, 1]), [(1, "stop")]))], 1.0)
    assert slices(third) == [("a", 5, 1)], "b has ended"
    assert list(controller.sequences) == ["a", "b"], "but is in the step before"
    events, batches = controller.turn([Complete(0, 1, StepResult(bytearray([1, 1])))], 2.0)
    assert list(controller.sequences) == ["a"] and events[0].tokens == 1, "what b got there is not counted"
    assert not batches, "a's last token is under way"
    controller.turn([Complete(0, 2, StepResult(bytearray([1]), [(0, "length")]))], 3.0)
    assert not controller.sequences
    controller.groups[0].scheduler.check()


@pytest.mark.parametrize(
    ("options", "draft", "ahead"),
    [({}, 0, 1), ({}, 2, 0), ({"scheduler": SchedulerConfig(block_size=4, num_blocks=2)}, 0, 0),
     ({"budget": GoalBudget((0.03,) * 60, (0.0,) * 6, tile=1, knee=60, maximum=60)}, 0, 0),
     ({"budget": GoalBudget((0.01,) * 60, (0.0,) * 6, tile=1, knee=60, maximum=60)}, 0, 1)],
    ids=["ahead", "drafts", "no free block", "long steps", "short steps"],
)  # fmt: skip
def test_what_is_composed_ahead_depends_on_no_token_and_delays_nobody_for_long(options, draft, ahead):
    controller = Controller([GroupConfig(**options, ahead=1)])
    _, batches = controller.turn([Submit(Request("a", 5, 1, max_draft_tokens=draft))], 0.0)
    assert len(batches) == 1, "its only token is under way"
    controller = Controller([GroupConfig(**options, ahead=1)])
    _, batches = controller.turn([Submit(Request("a", 5, 3, max_draft_tokens=draft))], 0.0)
    assert len(batches) == 1 + ahead


def test_a_group_at_rest_goes_ahead_and_asks_first_when_it_is_over():
    lookahead = Lookahead(Costs([0.001 * abs(3 * n - 2) for n in range(600)]), None)  # a token more is three steps
    limits = SchedulerConfig(token_budget=64)
    controller = Controller([GroupConfig(scheduler=limits, lookahead=lambda: lookahead, ahead=1)])
    _, batches = controller.turn([Submit(Request("a", 8, 200, max_draft_tokens=4))], 0.0)
    flying, most = batches, []
    for now in range(1, 100):
        done = flying.pop(0)
        result = StepResult(bytearray([1]), seconds=0.001, drafted=bytes(done.drafts or [0]))
        _, batches = controller.turn([Complete(0, done.id, result)], float(now))
        assert all(batch.drafts is None or len(flying) == 0 for batch in batches), "whoever drafts has to be known"
        flying += batches
        most.append(len(flying))
    assert set(most) == {1, 2} and most.count(2) > 60
    assert lookahead.rest[0] <= REST + 1 and lookahead._resting <= 2
    controller.groups[0].scheduler.check()


@pytest.mark.parametrize(("seconds", "ahead"), [(0.03, 0), (0.01, 1)], ids=["long", "short"])
def test_without_a_profile_the_last_step_says_how_long_steps_are(seconds, ahead):
    controller = Controller([GroupConfig(scheduler=SchedulerConfig(token_budget=16), ahead=1)])
    controller.turn([Submit(Request("a", 64, 3))], 0.0)
    for number in range(2):
        result = StepResult(bytearray([0]), seconds=seconds)
        _, batches = controller.turn([Complete(0, number, result)], 1.0 + number)
    assert len(batches) == 1 and len(controller.groups[0].scheduler.flying) == 1 + ahead


def test_the_goal_of_who_is_about_to_decode_counts_ahead():
    budget = GoalBudget(tuple(0.0003 * n for n in range(61)), (0.0,) * 6, tile=1, knee=60, maximum=60)
    controller = Controller([GroupConfig(scheduler=SchedulerConfig(token_budget=60), budget=budget, ahead=1)])
    hasty = Request("a", 5, 3, slo=SLO(tbt=0.006))
    _, batches = controller.turn([Submit(hasty), Submit(Request("b", 200, 3))], 0.0)
    assert [batch.num_tokens for batch in batches] == [60, 20], "a's prompt is in flight, and its decode in the second"


def test_of_models_on_a_device_one_alone_goes_ahead():
    controller = Controller([GroupConfig((name,), device=0, ahead=1) for name in "ab"])
    _, batches = controller.turn([Submit(Request("1", 4, 9, model="a"))], 0.0)
    assert [batch.group for batch in batches] == [0, 0]
    _, batches = controller.turn([Submit(Request("2", 4, 9, model="b"))], 0.5)
    assert not batches
    _, batches = controller.turn([Complete(0, 0, StepResult(bytearray([1])))], 1.0)
    assert not batches, "there is one in flight"
    _, batches = controller.turn([Complete(0, 1, StepResult(bytearray([1])))], 2.0)
    assert [batch.group for batch in batches] == [1]


@pytest.mark.parametrize("options", [{"pipeline": 2}, {"policy": "orca"}])
def test_other_policies_and_pipelines_do_not_go_ahead(options):
    with pytest.raises(ValueError, match="ahead: 1 is for the policy paceline and one stage; valid is 0"):
        GroupConfig(ahead=1, **options)


def test_prompts_are_spread_over_the_pipeline():
    """As wide as the knee, a prompt of 120 tokens would be two steps, and out of four stages after 5 x 70 s."""
    budget, stages = GoalBudget(tuple(10.0 + n for n in range(61)), (0.0,) * 6, tile=1, knee=60, maximum=60), []
    controller, outputs = Controller([GroupConfig(pipeline=4, budget=budget)]), FixedOutputs({"a": 1})
    watch = lambda batch, times: stages.append(times)  # noqa: E731
    simulate(controller, [Request("a", 120, 1)], lambda batch: 10 + batch.num_tokens, outputs, watch=watch)
    assert [times[0] for times in stages] == [(30 * n, 30 * (n + 1)) for n in range(6)]
    assert stages[-1][-1] == (8 * 30, 9 * 30)


@pytest.mark.parametrize(("policy", "width"), [("paceline", 2), ("sarathi_serve", 6)])
def test_decodes_are_spread_over_the_pipeline(policy, width):
    requests = [Request(str(i), 4, 60) for i in range(6)]
    _, trace = run(SchedulerConfig(), requests, policy=policy, pipeline=3)
    widths = [e.tokens for e in trace if e.kind == "started"]
    assert widths[20:40] == [width] * 20


def test_a_cancelled_prompt_with_chunks_in_flight_is_dropped_when_the_last_is_back():
    controller = Controller([GroupConfig(scheduler=SchedulerConfig(token_budget=16), pipeline=3)])
    _, (first,) = controller.turn([Submit(Request("a", 64, 1))], 0.0)
    scheduler = controller.groups[0].scheduler
    scheduler.advance(first.id)
    second = controller.next_batch(0, 1.0)
    assert [(s.start, s.end) for s in second.slices] == [(16, 32)]
    assert [e.kind for e in controller.cancel("a", 2.0)] == ["cancelled"]
    assert controller.cancel("a", 2.0) == []
    controller.complete(0, first.id, StepResult(bytearray(1)), 3.0)
    assert controller.sequences and scheduler.running, "a worker still writes to its blocks"
    scheduler.advance(second.id)
    assert controller.next_batch(0, 3.0) is None, "nobody wants the third chunk"
    controller.complete(0, second.id, StepResult(bytearray(1)), 4.0)
    assert not controller.sequences and not scheduler.running
    scheduler.check()


def short_of_blocks() -> Controller:
    """The decode of `a` needs a block; `b`, which came later, is in flight and holds what is left."""
    limits = SchedulerConfig(block_size=4, num_blocks=6)
    controller = Controller([GroupConfig(scheduler=limits, pipeline=2)])
    scheduler = controller.groups[0].scheduler
    _, (first,) = controller.turn([Submit(Request("a", 12, 9))], 0.0)
    scheduler.advance(first.id)
    _, (second,) = controller.turn([Submit(Request("b", 12, 9))], 1.0)
    controller.complete(0, first.id, StepResult(bytearray([1])), 2.0)
    scheduler.advance(second.id)
    return controller


def test_preemption_is_told_even_if_nothing_can_run():
    events, batches = short_of_blocks().turn([], 2.0)
    assert [(e.kind, e.request) for e in events] == [("preempted", "a")] and not batches


def test_a_step_that_only_preempted_is_not_the_last():
    """What was preempted makes room for a prompt that is wanted earlier: it comes in at once."""
    controller = short_of_blocks()
    controller.submit(Request("c", 12, 1, arrival=1.5, slo=SLO(ttft=1.0)), 2.0)
    events, (batch,) = controller.turn([], 2.0)
    assert [e.kind for e in events] == ["preempted", "started"]
    assert (events[0].request, list(batch.requests)) == ("a", ["c"])


BUDGET = GoalBudget(tuple(10.0 + n for n in range(100)), (0.0,) * 6, tile=1, knee=8, maximum=100)


def test_the_budget_is_that_of_the_goals():
    """A step takes 10 s and 1 s a token; whoever decodes wants a token every 16 s."""
    limits = SchedulerConfig(token_budget=10)
    requests = [Request("a", 4, 5, slo=SLO(tbt=16.0)), Request("b", 30, 2, arrival=5)]
    _, trace = run(limits, requests, budget=BUDGET)
    assert [e.tokens for e in trace if e.kind == "started"][:6] == [4, 6, 6, 6, 6, 8]


def test_a_stage_has_its_part_of_the_goal():
    """Whoever decodes in three stages of such steps wants a token every 48 s."""
    limits = SchedulerConfig(token_budget=10)
    requests = [Request(str(i), 4, 5, slo=SLO(tbt=48.0)) for i in range(3)] + [Request("b", 200, 1)]
    _, trace = run(limits, requests, budget=BUDGET, pipeline=3)
    widths = [e.detail.num_tokens for e in trace if e.kind == "started" and e.detail.num_decodes]
    assert len(widths) > 5 and set(widths[:6]) == {6}


def test_the_budget_counts_what_the_cache_has_of_a_prompt_as_context():
    """A chunk takes 1 s for each 8 tokens before it: of 12 s for prompts, 4 are left where 32 tokens are cached."""
    limits = SchedulerConfig(token_budget=64, block_size=4, num_blocks=64)
    budget = GoalBudget(BUDGET.linear, (0.0, 0.0, 0.0, 0.0, 1 / 8, 0.0), tile=1, knee=64, maximum=64)
    prefix, goal = tuple(range(8)), SLO(tbt=23.0)
    requests = [Request("a", 33, 1, prefix=prefix), Request("d", 4, 9, arrival=100.0, slo=goal)]
    requests += [Request("b", 60, 1, arrival=115.0, prefix=prefix)]
    _, trace = run(limits, requests, budget=budget)
    assert [e.tokens for e in trace if e.kind == "started" and e.time > 116][:2] == [1 + 8, 1 + 7]


def test_drafts_stop_for_prompts_that_the_step_takes_and_for_no_others():
    """With one place, the second request waits for the first, not for the drafts to stop."""
    for places, drafted in ((1, {4}), (2, {0, 4})):
        limits = SchedulerConfig(token_budget=32, max_batch=places)
        flat = Costs([1.0] * 8 + [n / 8 for n in range(8, 100)])
        controller = Controller([GroupConfig(scheduler=limits, lookahead=partial(Lookahead, flat, None))])
        requests = [Request("a", 4, 64, max_draft_tokens=4), Request("b", 200, 1, arrival=1)]
        outputs = FixedOutputs({r.id: r.max_tokens for r in requests}, lambda request, drafted: drafted)
        trace = simulate(controller, requests, lambda batch: 1, outputs)
        batches = [e.detail for e in trace if e.kind == "started"]
        asked = [s.num_draft for batch in batches for s in batch.slices if s.sequence.id == "a" and s.decode]
        assert set(asked[2:8]) == drafted
        assert places == 2 or asked[:3] == [1, 4, 4], "the first draft is one token"


def test_steps_of_sequences_that_may_not_draft_count_as_a_draft_model_counts_them():
    """Which follows prompts for so many steps behind the last draft, whoever is in them."""
    lookahead = Lookahead(Costs([1.0] * 100), None)
    controller = Controller([GroupConfig(scheduler=SchedulerConfig(), lookahead=lambda: lookahead)])
    outputs = FixedOutputs({"a": 20}, lambda request, drafted: drafted)
    trace = simulate(controller, [Request("a", 4, 20)], lambda batch: 1, outputs)
    assert lookahead.idle[0] == sum(e.kind == "started" for e in trace) == 20


def test_drafts_leave_to_prompts_what_steps_are_wide_without_them():
    """Beside a whole prompt drafts would pay, as the token budget allows; but the knee is narrower, and there they take
    the place of certain progress."""
    limits, times = SchedulerConfig(token_budget=256), [1 + n / 100 for n in range(300)]
    costs, budget = Costs(times), GoalBudget(tuple(times), (0.0,) * 6, tile=1, knee=32, maximum=256)
    config = GroupConfig(scheduler=limits, lookahead=partial(Lookahead, costs, None), budget=budget)
    requests = [Request(str(i), 4, 64, max_draft_tokens=4) for i in range(8)] + [Request("b", 96, 1, arrival=6)]
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests}, lambda request, drafted: drafted)
    trace = simulate(Controller([config]), requests, lambda batch: 1, outputs)
    batches = [e.detail for e in trace if e.kind == "started"]
    chunks = [s.length for batch in batches for s in batch.slices if s.sequence.id == "b"]
    assert chunks == [24] * 4


def test_drafts_keep_steps_within_the_goals_of_those_that_decode():
    costs = Costs([0.1] * 100), Costs([0.0] + [0.02] * 100)  # seconds of a step, and of a drafted token

    def drafted(*goals: float | None) -> set[int]:
        lookahead = partial(Lookahead, *costs)
        controller = Controller([GroupConfig(scheduler=SchedulerConfig(token_budget=64), lookahead=lookahead)])
        requests = [Request(str(i), 4, 64, slo=SLO(tbt=goal), max_draft_tokens=4) for i, goal in enumerate(goals)]
        outputs = FixedOutputs({r.id: r.max_tokens for r in requests}, lambda request, drafted: drafted)
        trace = simulate(controller, requests, lambda batch: 0.1, outputs)
        batches = [e.detail for e in trace if e.kind == "started"]
        return {s.num_draft for batch in batches[3:9] for s in batch.slices if s.decode}

    assert drafted(None) == drafted(0.2) == drafted(0.09) == {4}, "the last goal is missed without drafts, too"
    assert drafted(0.15) == drafted(None, 0.15) == {2}
    assert drafted(0.11) == {0}


def test_a_chunk_beside_drafts_is_no_verification():
    """Steps with drafts have taken three times their profile where verifications are wide; here five tokens are."""
    lookahead = Lookahead(Costs([1.0] * 100), None)
    lookahead.times.mean[3 + SIZES + of_tokens(25)] = math.log(3)
    config = GroupConfig(scheduler=SchedulerConfig(), lookahead=lambda: lookahead, predict=lambda shape: 1.0)
    requests = [Request("a", 4, 40, max_draft_tokens=4), Request("b", 20, 4, arrival=5)]
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests}, lambda request, drafted: drafted)
    trace = simulate(Controller([config]), requests, lambda batch: 1, outputs)
    steps = [e.detail for e in trace if e.kind == "started" and e.detail.drafts]
    assert 25 in [batch.num_tokens for batch in steps], "a decode, four drafted tokens and the prompt"
    assert {batch.predicted for batch in steps} == {1.0}


def test_the_choice_learns_from_whole_steps_and_predicts_the_engines_part():
    """The engine takes 1 ms of 3."""
    lookahead = Lookahead(Costs([0.001] * 100), None)
    limits = SchedulerConfig(token_budget=64)
    config = GroupConfig(scheduler=limits, lookahead=lambda: lookahead, predict=lambda shape: 0.001)
    controller, now = Controller([config]), 0.0
    _, (batch,) = controller.turn([Submit(Request("a", 8, 400, max_draft_tokens=4))], now)
    for _ in range(200):
        now += 0.003
        drafted = bytes(batch.drafts or [0])
        result = StepResult(bytearray([1 + drafted[0]]), seconds=0.001, drafted=drafted)
        last, (_, (batch,)) = batch, controller.turn([Complete(0, batch.id, result)], now)
        if now > 0.2:
            break
    assert last.drafts and lookahead.times.pace * lookahead.times.verifying[0, 2] == pytest.approx(3, rel=0.05)
    assert last.predicted == pytest.approx(0.001, rel=0.1)


def test_drafts_are_as_believed_of_their_requests_kind():
    """Requests of kind 1 have shown that their drafts stay, those of kind 2 that they do not."""
    lookahead = Lookahead(Costs([0.1 + 0.01 * n for n in range(100)]), Costs([0.0] + [0.01] * 100))
    lookahead.group[1:3, 1, :-1], lookahead.group[1, 0, :-1] = 100.0, 90.0
    controller = Controller([GroupConfig(scheduler=SchedulerConfig(), lookahead=lambda: lookahead)])
    requests = [Request(str(kind), 4, 12, max_draft_tokens=4, kind=kind) for kind in (1, 2)]
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests}, lambda request, drafted: 0)
    trace = simulate(controller, requests, lambda batch: 0.1, outputs)
    first = next(e.detail for e in trace if e.kind == "started" and e.detail.num_decodes == 2)
    drafted = {one.sequence.id: one.num_draft for one in first.slices}
    assert drafted["1"] > 0 == drafted["2"]


def test_memory_is_planned_for_what_a_policy_composes():
    limits = SchedulerConfig(token_budget=100, max_batch=300, max_num_batched_tokens=5000)
    widest = {name: POLICIES[name].widest(limits) for name in POLICIES}
    assert widest["paceline"] == widest["sarathi_serve"] == 300
    assert widest["sarathi_2023"] == 400 and widest["prefill_first"] == widest["orca"] == 5300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_budget", 0),
        ("max_batch", 0),
        ("block_size", 0),
        ("num_blocks", -1),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 0),
        ("watermark", 1.0),
        ("watermark", -0.1),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{name: value})


def test_an_unknown_policy_and_an_empty_pipeline_are_refused():
    with pytest.raises(ValueError, match="policy: 'fifo' is not one of .*orca.*sarathi_serve"):
        Controller([GroupConfig(policy="fifo")])
    with pytest.raises(ValueError, match="pipeline"):
        Controller([GroupConfig(pipeline=0)])


def test_the_table_grows():
    controller = Controller([GroupConfig(scheduler=SchedulerConfig(max_batch=2000, token_budget=4000))])
    requests = [Request(str(i), 2, 3) for i in range(1500)]
    trace = simulate(controller, requests, lambda batch: 1, FixedOutputs({r.id: 3 for r in requests}))
    assert [e.tokens for e in trace if e.kind == "started"] == [3000, 1500, 1500]
    assert sum(e.kind == "finished" for e in trace) == 1500


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 8))])
def test_failures_resets_and_cancellations_leak_nothing(policy, seed):
    """Whatever goes wrong with batches in flight, what is left goes on, and in the end all is free."""
    rng = random.Random(seed)
    limits = SchedulerConfig(token_budget=12, max_batch=6, block_size=4, num_blocks=24)
    controller = Controller([GroupConfig(scheduler=limits, policy=policy, pipeline=3)])
    scheduler = controller.groups[0].scheduler
    lengths = {str(i): rng.randint(1, 12) for i in range(30)}
    outputs = FixedOutputs(lengths)
    inputs = [Submit(Request(id, rng.randint(1, 30), length, rng.random())) for id, length in lengths.items()]
    flights: deque[Batch] = deque()
    ends: Counter[str] = Counter()
    now, calm = 0.0, False
    while inputs or flights:
        events, batches = controller.turn(inputs, now)
        ends.update(e.request for e in events if e.kind in ("finished", "cancelled", "failed"))
        flights.extend(batches)
        scheduler.check()
        now, inputs, calm = now + 1.0, [], now > 60
        if not calm and rng.random() < 0.05:
            inputs += [Lost(0), Back(0)]
            flights.clear()
        if not calm and rng.random() < 0.2:
            inputs.append(Cancel(str(rng.randrange(30))))
        if scheduler.entering is not None and rng.random() < 0.5:
            inputs.append(Advance(0, scheduler.entering))
        elif flights:
            batch = flights.popleft()
            result = outputs(batch)
            if not calm and rng.random() < 0.1:
                index = rng.randrange(len(batch.requests))
                result.failed.append(index)
                result.finished = [(i, reason) for i, reason in result.finished if i != index]
            inputs.append(Complete(0, batch.id, result))
    assert ends == Counter(lengths.keys())
    assert not controller.sequences and scheduler.num_free_blocks == limits.num_blocks
    scheduler.check()


def test_what_was_chosen_for_a_slot_is_not_drafted_by_who_has_it_next():
    """Drafts are chosen for `x` when a step of chunks is composed, in which it is cancelled; `y` goes on for a step.
    Then nobody may draft, and one of the next two has the slot of `x`."""
    limits = SchedulerConfig(token_budget=300)
    config = GroupConfig(
        scheduler=limits, policy="chunked_prefill_only", lookahead=partial(Lookahead, Costs([1.0] * 600), None)
    )
    requests = [Request("x", 4, 60, max_draft_tokens=4), Request("y", 200, 60, arrival=15, max_draft_tokens=4)]
    requests += [Request(name, 4, 20, arrival=90) for name in ("z", "w")]
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests}, lambda request, drafted: drafted)
    trace = simulate(Controller([config]), requests, lambda batch: 10, outputs, [(25, "x"), (35, "y")])
    batches = [e.detail for e in trace if e.kind == "started"]
    assert [batch.requests for batch in batches[:4]] == [["x"], ["x"], ["y"], ["y"]] and batches[1].drafts
    widths = {batch.num_tokens for batch in batches if set(batch.requests) == {"z", "w"} and batch.num_decodes}
    assert widths == {2}
