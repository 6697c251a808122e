"""Fleets in virtual time: both kinds of models, groups that share a device, the same result every time."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import StepShape
from paceline.core.cluster import Cluster, Group, Parallel, Placement
from paceline.core.events import Submit
from paceline.core.request import SLO, Request
from paceline.latency.step_time import StepTime
from paceline.placement.problem import Problem
from paceline.placement.tables import ModelTable, ShapeTable
from paceline.simulator.fleet import SimulatedModel, run, timeline
from paceline.workload.arrivals import gamma
from paceline.workload.trace import Trace

STEP = StepTime(tuple(0.01 + 1e-5 * n for n in range(513)), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
TEXTS = StepTime(tuple(0.02 + 4e-4 * n for n in range(513)), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
GB = 10**9


def encoder(name: str, seconds: float = 0.1) -> SimulatedModel:
    shapes = {
        Parallel(): ShapeTable((GB,), {1: (seconds,)}),
        Parallel(2): ShapeTable((GB // 2,) * 2, {1: (seconds / 2,) * 2}),
    }
    return SimulatedModel(ModelTable(name, shapes), SLO(deadline=5 * seconds))


def decoder(name: str, **goals: float) -> SimulatedModel:
    shapes = {
        p: ShapeTable((GB // p.pipeline,) * p.pipeline, {1: (0.1,) * p.pipeline}) for p in (Parallel(), Parallel(2))
    }
    return SimulatedModel(ModelTable(name, shapes), SLO(**goals), STEP, kv_bytes=1000)


def fleet(
    models: list[SimulatedModel], groups: list[tuple[Parallel, list[str]]], rate: float = 4.0, seconds=20.0,
    memory: int = 8 * GB, bandwidth: float = 0.0,
):  # fmt: skip
    streams = {model.name: gamma(rate, 2.0, seconds, i) for i, model in enumerate(models)}
    known = {model.name: ([100], [20 if model.step_time else 0]) for model in models}
    trace = Trace.of(streams, lambda name, count: (known[name][0] * count, known[name][1] * count))
    begin, made = 0, []
    for parallel, names in groups:
        made.append(Group(tuple(range(begin, begin + parallel.devices)), parallel, tuple(names)))
        begin += parallel.devices
    placement = Placement(tuple(made))
    slo = [model.slo.deadline or np.inf for model in models]
    cluster = Cluster(begin, memory, load_bandwidth=bandwidth)
    problem = Problem(cluster, [m.table for m in models], slo, trace.arrivals, trace.models)
    return run(models, placement, trace, problem, memory=memory), placement, trace


def test_both_kinds_side_by_side():
    models = [encoder("e"), decoder("d", ttft=1.0, tbt=0.1)]
    result, placement, trace = fleet(models, [(Parallel(2), ["e"]), (Parallel(), ["d"])])
    outcomes = result.outcomes
    mine = trace.models == 1
    assert (outcomes.groups[mine] == 1).all() and (outcomes.outputs[mine] == 20).all()
    assert (outcomes.statuses[mine] == 0).all() and outcomes.met([m.slo for m in models])[mine].mean() > 0.9
    assert (outcomes.first_tokens[mine] > trace.arrivals[mine]).all()
    assert (outcomes.finishes[mine] > outcomes.first_tokens[mine]).all() and len(outcomes.gaps[1]) == 19 * mine.sum()
    served = ~mine & (outcomes.statuses == 0)
    assert served.sum() > 20 and (outcomes.finishes - trace.arrivals)[served].min() >= 0.1 - 1e-9
    rows = result.devices(placement)
    assert [row["device"] for row in rows] == [0, 1, 2] and all(0 < row["utilization"] <= 1 for row in rows)
    assert {name for name, _ in timeline(result)} == {"group 0, stage 0", "group 0, stage 1", "group 1, stage 0"}


def test_texts_share_a_group_with_a_model_that_generates():
    texts = replace(encoder("e"), text_time=TEXTS, budget=GoalBudget(TEXTS.linear, TEXTS.terms, 1, 512, 512))
    models, groups = [texts, decoder("d", ttft=1.0, tbt=0.1)], [(Parallel(), ["e", "d"])]
    result, placement, trace = fleet(models, groups, rate=3.0)
    outcomes, mine = result.outcomes, trace.models == 0
    served = mine & (outcomes.statuses == 0)
    assert served.sum() > 0.8 * mine.sum() and not outcomes.outputs[mine].any(), "an encoder gives no tokens"
    assert np.array_equal(outcomes.first_tokens[served], outcomes.finishes[served])
    waits = (outcomes.finishes - trace.arrivals)[served]
    assert TEXTS.linear[100] - 1e-9 <= waits.min() and waits.max() <= 0.5 + 1e-9, "those that would be late are refused"
    ordered = sorted(result.spans[0, 0][0]), sorted(result.spans[0, 0][1])
    assert (np.array(ordered[0][1:]) >= np.array(ordered[1][:-1]) - 1e-9).all(), "one step at a time"
    alone = fleet(models, [(Parallel(), ["e"]), (Parallel(), ["d"])], rate=3.0)[0].outcomes
    assert outcomes.finishes[~mine].sum() > alone.finishes[~mine].sum(), "the other model's turns take time"


def test_texts_that_wait_go_together():
    seconds = np.concatenate([[0.0], 0.1 + 0.01 * np.arange(512) / 512])  # five cost what one does
    time = StepTime(tuple(seconds.tolist()), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    texts = replace(encoder("e"), slo=SLO(), text_time=time)
    result, _, trace = fleet([texts], [(Parallel(), ["e"])], rate=30.0)
    assert (result.outcomes.finishes - trace.arrivals).max() < 1.0
    one_by_one, _, _ = fleet([replace(texts, text_time=None)], [(Parallel(), ["e"])], rate=30.0)
    assert (one_by_one.outcomes.finishes - trace.arrivals).max() > 5.0


def test_models_that_generate_are_loaded_by_need():
    models, groups = [decoder(name) for name in "abc"], [(Parallel(), ["a", "b", "c"])]
    with pytest.raises(ValueError, match="memory: 'a' has no room for its KV cache"):
        fleet(models, groups, memory=5 * GB // 2)
    quick, slow = (
        fleet(models, groups, 1.0, memory=3 * GB, bandwidth=bandwidth)[0].outcomes for bandwidth in (50.0 * GB, GB / 2)
    )
    plenty = fleet(models, groups, 1.0)[0].outcomes
    assert all((one.statuses == 0).all() and (one.outputs == 20).all() for one in (quick, slow, plenty))
    waits = [float((one.first_tokens - one.arrivals).mean()) for one in (plenty, quick, slow)]
    assert waits[0] < waits[1] < waits[2] and waits[2] > 0.5, "loading takes two seconds"


def test_texts_that_no_device_holds_with_room_for_others_are_refused():
    texts = replace(encoder("e"), text_time=TEXTS)
    with pytest.raises(ValueError, match="groups.0.models: 1200000000 bytes a device are too few for 1000000000"):
        fleet([texts, decoder("d")], [(Parallel(), ["e"]), (Parallel(2), ["d"])], memory=6 * GB // 5, bandwidth=GB)


def test_a_run_is_repeated_to_the_bit():
    models, groups = [decoder("a"), encoder("b")], [(Parallel(), ["a"]), (Parallel(), ["b"])]
    first, second = (fleet(models, groups)[0].outcomes for _ in range(2))
    for column in ("groups", "first_tokens", "finishes", "outputs", "statuses"):
        assert np.array_equal(getattr(first, column), getattr(second, column), equal_nan=True)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(2)])
def test_models_that_share_a_group_take_turns(parallel):
    models = [decoder("a"), decoder("b")]
    result, _, trace = fleet(models, [(parallel, ["a", "b"])], rate=3.0, seconds=10.0)
    assert (result.outcomes.statuses == 0).all()
    for _, spans in timeline(result):
        ordered = sorted(spans.tolist())
        assert all(b >= end - 1e-9 for (_, end, _), (b, _, _) in zip(ordered, ordered[1:], strict=False))


def test_bubbles_are_what_a_stage_waits_while_its_group_works():
    models = [replace(encoder("e", 2.0), slo=SLO())]
    times = np.array([100.0, 110.0, 120.0])
    trace = Trace.of({"e": times}, lambda name, count: ([1] * count, [0] * count))
    placement = Placement((Group((0, 1), Parallel(2), ("e",)),))
    problem = Problem(Cluster(2, 8 * GB), [models[0].table], [np.inf], trace.arrivals, trace.models)
    rows = run(models, placement, trace, problem).devices(placement)
    assert [(row["busy_s"], row["bubble_s"]) for row in rows] == [(3.0, 3.0), (3.0, 3.0)]
    assert rows[0]["utilization"] == pytest.approx(3 / 22)


def test_bubbles_are_those_of_the_order_in_which_requests_ran():
    long, short = encoder("long", 1.0), encoder("short", 0.1)
    trace = Trace(np.array([0.0, 0.1, 0.2]), np.array([0, 0, 1]), np.full(3, 9), np.zeros(3, int), ("long", "short"))
    placement = Placement((Group((0, 1), Parallel(2), ("long", "short")),))
    problem = Problem(
        Cluster(2, 8 * GB), [long.table, short.table], [5.0, 1.0], trace.arrivals, trace.models, "deadline"
    )
    assert problem.models.dtype == np.int32, "one type, for which the replay is compiled"
    result = run([long, short], placement, trace, problem)
    assert result.outcomes.finishes.tolist() == pytest.approx([1.0, 1.55, 1.05])
    rows = result.devices(placement)
    assert [row["busy_s"] for row in rows] == pytest.approx([1.05, 1.05])
    assert [row["bubble_s"] for row in rows] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("hosting", [[], [("enc", Parallel())], [("enc", Parallel()), ("dec", Parallel(2))]])
def test_placements_without_a_model_with_steps_or_with_one_behind_others(hosting):
    result, placement, trace = fleet([encoder("enc"), decoder("dec")], [(p, [name]) for name, p in hosting])
    named = np.array(trace.names)[trace.models]
    for name in ("enc", "dec"):
        rejected = result.outcomes.statuses[named == name] == 1
        assert rejected.all() != (name in dict(hosting))
    assert [row["busy_s"] > 0 for row in result.devices(placement)] == [True] * sum(p.devices for _, p in hosting)


def test_a_request_goes_where_it_fits():
    small, large = (GroupConfig(("a",), SchedulerConfig(num_blocks=count)) for count in (4, 400))
    controller = Controller([small, large])
    events, _ = controller.turn([Submit(Request("0", 500, 10, model="a"))], 0.0)
    assert [(event.kind, event.group) for event in events[:1]] == [("accepted", 1)]
    full = Controller([replace(small, max_waiting=1), replace(large, max_waiting=1)])
    for i, group in enumerate((0, 1, 0)):
        event = full.submit(Request(str(i), 10, 10, model="a"), 0.0)[0]
        assert (event.kind, event.group) == (("accepted", group) if i < 2 else ("rejected", group))


def test_replicas_share_the_requests():
    result, _, trace = fleet([decoder("a")], [(Parallel(), ["a"]), (Parallel(), ["a"])], rate=20.0)
    counts = np.bincount(result.outcomes.groups)
    assert counts.min() > 0.4 * len(trace) / 2 and counts.sum() == len(trace)


def test_what_nobody_hosts_is_rejected():
    models = [decoder("a"), encoder("b"), decoder("c")]
    result, _, trace = fleet(models, [(Parallel(), ["a"])])
    others = trace.models > 0
    assert (result.outcomes.statuses[others] == 1).all() and (result.outcomes.groups[others] == -1).all()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="groups.0.models: a, b: one-shot models share groups with autoregressive"):
        fleet([decoder("a"), encoder("b")], [(Parallel(), ["a", "b"])])
    big = replace(decoder("a"), kv_bytes=10**9)
    with pytest.raises(ValueError, match="memory: 'a' has no room for its KV cache"):
        fleet([big], [(Parallel(), ["a"])])


def test_a_goal_between_tokens_is_held_by_the_budget_that_serves_it():
    """Long prompts beside decodes: with the fixed budget a step takes 15 ms, with the goal's 12."""
    plain = decoder("a", tbt=0.012)
    goal = GoalBudget(STEP.linear, STEP.terms, 16, 512, 512, tbt=0.012)
    streams = {"a": gamma(6.0, 1.0, 60.0, 1)}
    trace = Trace.of(streams, lambda name, count: ([2000] * count, [100] * count))
    placement = Placement((Group((0,), Parallel(), ("a",)),))
    problem = Problem(Cluster(1, 8 * GB), [plain.table], [np.inf], trace.arrivals, trace.models)
    late = {}
    for name, model in {"fixed": plain, "goal": replace(plain, budget=goal)}.items():
        gaps = run([model], placement, trace, problem, 8 * GB).outcomes.gaps[0]
        late[name] = float((gaps > 0.012 + 1e-6).mean())
    assert late["fixed"] > 0.2 and late["goal"] == 0.0
    half = goal.of_share(0.5)
    assert half(StepShape(8, 8, 8, 0), [(0, 5000)], None) > goal(StepShape(8, 8, 8, 0), [(0, 5000)], None)
