"""Groups of one model: who takes a request, and what becomes of it when its group is lost."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.batching.pace import LONGER
from paceline.batching.state import WAITS
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch
from paceline.core.events import Advance, Back, Cancel, Complete, Lost, Retire, Submit
from paceline.core.request import SLO, Request
from paceline.simulator.driver import FixedOutputs

LIMITS = SchedulerConfig(token_budget=12, max_batch=6, block_size=4, num_blocks=24)


def two() -> Controller:
    return Controller([GroupConfig(("a",), LIMITS), GroupConfig(("a",), LIMITS)])


def test_requests_go_to_groups_that_are_up_and_wait_only_where_none_is():
    controller = two()
    controller.turn([Lost(0)], 0.0)
    events, batches = controller.turn([Submit(Request(str(i), 3, 2, model="a")) for i in range(4)], 1.0)
    assert [e.group for e in events if e.kind == "accepted"] == [1] * 4 and [b.group for b in batches] == [1]
    events, batches = controller.turn([Lost(1), Submit(Request("late", 3, 2, model="a"))], 2.0)
    assert [e.kind for e in events] == ["preempted"] * 4 + ["accepted"] and not batches
    _, batches = controller.turn([Back(1)], 3.0)
    assert [b.group for b in batches] == [1] and len(batches[0].requests) == 4


def test_who_may_find_a_place_later_is_told_that_the_queue_is_full():
    """Not that the request is too long, as it is for the other group."""
    few = SchedulerConfig(token_budget=12, max_batch=6, block_size=4, num_blocks=4)
    small = GroupConfig(("a",), few, max_waiting=0)
    controller = Controller([small, GroupConfig(("a",), LIMITS, max_waiting=0)])
    (event,), _ = controller.turn([Submit(Request("x", 30, 9, model="a"))], 0.0)
    assert (event.kind, event.detail) == ("rejected", "queue: full")


def test_a_model_is_full_where_all_its_groups_are():
    controller = Controller([GroupConfig(("a",), LIMITS, max_waiting=most) for most in (1, 2)])
    for n in range(4):
        assert controller.full("a") == (n == 3)
        (event,) = controller.submit(Request(f"{n}", 30, 9, model="a"), 0.0)
        assert event.kind == ("rejected" if n == 3 else "accepted")


def test_a_prompt_has_a_token():
    with pytest.raises(ValueError, match="at least one token, not 0"):
        Request("a", 0, 5)


@pytest.mark.parametrize("came", [True, False])
def test_a_group_that_came_and_was_lost_in_one_turn_is_what_happened_last(came):
    controller = Controller([GroupConfig(("a",), LIMITS)])
    controller.turn([Lost(0)], 0.0)
    inputs = [Lost(0), Back(0)] if came else [Back(0), Lost(0)]
    _, batches = controller.turn([*inputs, Submit(Request("x", 3, 2, model="a"))], 1.0)
    assert len(batches) == came


def test_a_lost_group_s_sequences_go_on_elsewhere_from_what_is_known():
    controller = two()
    outputs = FixedOutputs({"x": 9})
    events, batches = controller.turn([Submit(Request("x", 6, 9, model="a", prefix=(77,)))], 0.0)
    result = outputs(batches[0])
    result.hashes.append((0, (78,)))
    _, (second,) = controller.turn([Complete(0, batches[0].id, result)], 1.0)
    events, (third,) = controller.turn([Lost(0)], 2.0)
    assert [(e.kind, e.group) for e in events] == [("preempted", 0), ("moved", 1), ("started", 1)]
    assert third.starts == [0] and third.lengths == [7] and third.emits == b"\1"
    sequence = third.sequences[0]
    assert controller.groups[1].scheduler.state.hashes[sequence.slot, :2].tolist() == [77, 78]
    assert controller.turn([Complete(0, second.id, outputs(second))], 3.0) == ([], []), "overtaken"
    assert controller.groups[0].scheduler.num_sequences == 0


def test_what_a_moved_sequence_finds_elsewhere_is_no_hit():
    controller, outputs = two(), FixedOutputs({"x": 9, "y": 9})
    requests = [Submit(Request(name, 6, 9, model="a", prefix=(77,))) for name in "xy"]
    _, first = controller.turn(requests, 0.0)
    _, (_, second) = controller.turn([Complete(b.group, b.id, outputs(b)) for b in first], 1.0)
    _, (third,) = controller.turn([Lost(0), Complete(1, second.id, outputs(second))], 2.0)
    assert (third.group, third.requests, third.starts) == (1, ["y", "x"], [7, 4])
    assert not any(group.scheduler.cached_tokens for group in controller.groups)


def test_a_group_that_is_lost_for_good_gives_its_place_to_others_on_the_device():
    """What it had goes to any group of its model, though that is lost, too."""
    device = {"device": 0, "slots": 1}
    groups = [GroupConfig((name,), LIMITS, resident=name == "a", **device) for name in "ab"]
    controller = Controller([*groups, GroupConfig(("a",), LIMITS)])
    controller.turn([Lost(2), *(Submit(Request(name, 3, 2, model=name)) for name in "ab")], 0.0)
    events, batches = controller.turn([Lost(0, for_good=True)], 0.5)
    assert [(e.kind, e.group) for e in events] == [("preempted", 0), ("moved", 2), ("retired", 0), ("load", 1)]
    assert not batches and controller.sequences["a"][0] == 2
    events, _ = controller.turn([Lost(2, for_good=True), Submit(Request("late", 3, 2, model="a"))], 1.0)
    assert [e.kind for e in events] == ["retired", "rejected"], "nobody has the model any more"
    assert [e.kind for e in controller.turn([Cancel("a")], 1.0)[0]] == ["cancelled"]
    assert set(controller.sequences) == {"b"}


def sharing(slots: int | None, *devices: int) -> tuple[Controller, FixedOutputs, Callable[[int], float]]:
    """Groups of a, and one of b on the first one's device; and what a group expects to wait for others' turns."""
    budget = GoalBudget((0.1,) * 13, (0.0,) * 6, 1, 12, 12)
    groups = [GroupConfig(("a",), LIMITS, budget=budget, device=device, slots=slots) for device in devices]
    b = replace(groups[0], models=("b",), resident=slots is None)
    controller = Controller([*groups, b])
    waits = [group.scheduler.state.factors for group in controller.groups]
    return controller, FixedOutputs({"x": 9, "y": 1}), lambda group: float(waits[group][WAITS])


def test_a_goal_for_the_first_token_counts_from_the_arrival():
    """Not from when the controller hears of the request, whose prompt has been encoded meanwhile."""
    budget = GoalBudget((0.1,) * 13, (0.0,) * 6, 1, 12, 12)
    for heard, kind in ((0.0, "accepted"), (0.3, "accepted"), (0.5, "rejected")):
        controller = Controller([GroupConfig(("a",), LIMITS, budget=budget, admission=True)])
        request = Request("x", 3, 2, 0.0, "a", SLO(ttft=0.5))
        event = controller.turn([Submit(request)], heard)[0][0]
        assert event.kind == kind, heard
    assert (event.detail.what, event.detail.goal) == ("ttft", 0.5) and event.detail.expected >= 0.6
    controller = Controller([GroupConfig(("a",), LIMITS, admission=True)])
    assert controller.turn([Submit(request)], 9.0)[0][0].kind == "accepted", "nobody knows how long it takes"


def of_model(model: str, id: str, now: float) -> Submit:
    return Submit(Request(id, 3, 9, now, model))


def test_others_turns_are_learnt_and_not_how_long_workers_were_away():
    controller, outputs, waits = sharing(None, 0)
    _, (batch,) = controller.turn([of_model("a", "x", 0.0)], 0.0)
    _, (other,) = controller.turn([of_model("b", "y", 1.0), Complete(0, batch.id, outputs(batch))], 1.0)
    _, (batch,) = controller.turn([Complete(1, other.id, outputs(other))], 1.5)
    assert (other.group, batch.group, waits(0)) == (1, 0, pytest.approx(0.5 * LONGER))
    learnt = waits(0)
    controller.turn([Lost(0), Lost(1)], 1.625)
    _, (batch,) = controller.turn([Back(0), Back(1)], 1.875)
    assert (batch.group, waits(0)) == (0, learnt)
    _, (batch,) = controller.turn([Complete(0, batch.id, outputs(batch))], 3.0)
    assert waits(0) < learnt, "the next step began at once"


def test_how_long_a_model_was_away_for_another_is_no_wait_for_turns():
    controller, outputs, waits = sharing(1, 0)
    _, (batch,) = controller.turn([of_model("a", "x", 0.0)], 0.0)
    controller.turn([of_model("b", "y", 1.0)], 1.0)
    events, _ = controller.turn([Complete(0, batch.id, outputs(batch))], 3.0)
    assert [e.kind for e in events if e.kind in ("load", "unload")] == ["unload", "load"]
    _, (other,) = controller.turn([Back(1)], 3.25)
    controller.turn([Complete(1, other.id, outputs(other))], 3.5)
    _, (batch,) = controller.turn([Back(0)], 3.75)
    assert (batch.group, batch.requests, waits(0)) == (0, ["x"], 0.0)


def test_who_comes_from_a_lost_group_has_not_waited_for_turns_here():
    controller, outputs, waits = sharing(None, 0, 1)
    (_, (a,)), (_, (b,)) = (controller.turn([of_model("a", id, now)], now) for id, now in (("x", 0.0), ("y", 0.5)))
    assert (a.group, b.group) == (0, 1)
    controller.turn([Complete(1, b.id, outputs(b))], 1.0)
    _, (batch,) = controller.turn([Lost(0)], 1.5)
    assert (batch.group, batch.requests, waits(1)) == (1, ["x"], 0.0)


@pytest.mark.parametrize("slots", [None, 1], ids=["all", "by need"])
def test_what_comes_for_a_group_that_has_left_disturbs_nobody(slots):
    """Its workers may be lost while they are being ended; its device has no group any more."""
    controller = Controller([GroupConfig(("a",), LIMITS, device=n, slots=slots) for n in (0, 1)])
    assert [e.kind for e in controller.turn([Retire(0)], 0.0)[0]] == ["retired"]
    assert controller.turn([Lost(0), Back(0)], 1.0) == ([], [])
    assert [e.kind for e in controller.turn([Lost(0, for_good=True)], 1.0)[0]] == ["retired"]
    events, (batch,) = controller.turn([Submit(Request("x", 3, 2, model="a"))], 2.0)
    assert [(e.kind, e.group) for e in events] == [("accepted", 1), ("started", 1)] and batch.group == 1


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 12))])
def test_no_loss_of_groups_loses_a_request(seed):
    rng, controller = random.Random(seed), two()
    lengths = {str(i): rng.randint(1, 12) for i in range(40)}
    outputs, inputs = FixedOutputs(lengths), []
    future = [(rng.random() * 30, Submit(Request(id, rng.randint(1, 30), n, model="a"))) for id, n in lengths.items()]
    flights: deque[Batch] = deque()
    ends: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    up, now = [True, True], 0.0
    while inputs or flights or future or not all(up):
        events, batches = controller.turn(inputs, now)
        kinds.update(e.kind for e in events)
        ends.update(e.request for e in events if e.kind in ("finished", "cancelled"))
        assert all(up[batch.group] for batch in batches)
        flights.extend(batches)
        for group in controller.groups:
            group.scheduler.check()
        now, inputs = now + 1.0, []
        inputs += [item for at, item in future if at <= now]
        future = [(at, item) for at, item in future if at > now]
        for group in range(2):
            if up[group] and now < 60 and rng.random() < 0.15:
                up[group] = False
                inputs.append(Lost(group))
                flights = deque(batch for batch in flights if batch.group != group)
            elif not up[group] and (now > 60 or rng.random() < 0.3):
                up[group] = True
                inputs.append(Back(group))
        if rng.random() < 0.1:
            inputs.append(Cancel(str(rng.randrange(40))))
        if flights:
            batch = flights.popleft()
            inputs.append(Complete(batch.group, batch.id, outputs(batch)))
    assert ends == Counter(lengths.keys()) and kinds["moved"] > 0
    assert not controller.sequences
    assert all(group.scheduler.num_free_blocks == LIMITS.num_blocks for group in controller.groups)


def test_who_has_just_made_room_does_not_come_back_in_the_same_turn():
    """Its requests are the oldest that wait then; but a step of the model that it would push out has just begun."""
    groups = [GroupConfig((name,), LIMITS, device=0, slots=2, resident=name != "c") for name in "abc"]
    controller, outputs = Controller(groups), FixedOutputs(dict.fromkeys("vwxyz", 9))
    _, (batch,) = controller.turn([Submit(Request(one, 3, 9, model=m)) for one, m in ("va", "wb", "xb")], 0.0)
    for now in (1.0, 2.0):
        _, (batch,) = controller.turn([Complete(batch.group, batch.id, outputs(batch))], now)
    controller.turn([Submit(Request("y", 3, 9, arrival=2.0, model="c"))], 2.0)
    events, (step,) = controller.turn([Complete(batch.group, batch.id, outputs(batch))], 4.0)
    assert [(e.kind, e.group) for e in events if e.kind in ("unload", "load")] == [("unload", 0), ("load", 2)]
    assert step.group == 1 and step.id in controller.groups[1].scheduler.flying


def test_a_first_stage_that_nobody_waits_for_is_no_occasion_for_another_model():
    """Only policies that are late wait for it; the simulation of steps knows of no others."""
    options = {"policy": "orca", "pipeline": 2, "device": 0, "slots": 1}
    controller = Controller([GroupConfig((name,), LIMITS, resident=name == "a", **options) for name in "ab"])
    _, (batch,) = controller.turn([Submit(Request("x", 3, 9, model="a")), Submit(Request("y", 3, 9, model="b"))], 0.0)
    assert controller.turn([Advance(0, batch.id)], 3.0) == ([], [])
    events, _ = controller.turn([Complete(0, batch.id, FixedOutputs({"x": 9})(batch))], 4.0)
    assert [e.kind for e in events if e.kind in ("unload", "load")] == ["unload", "load"]
