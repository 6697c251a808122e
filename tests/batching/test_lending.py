"""Memory that groups on a device lend each other: never more than there is, and back when its owner needs it."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from paceline.batching.blocks import num_there
from paceline.batching.config import SchedulerConfig
from paceline.batching.state import IDLE, SPARE
from paceline.compiled import plain
from paceline.controller import Controller, GroupConfig
from paceline.core import record
from paceline.core.batch import Batch
from paceline.core.events import Advance, Back, Cancel, Complete, Event, Input, Lost, Submit
from paceline.core.request import Request
from paceline.simulator.driver import FixedOutputs, replay

LIMITS = SchedulerConfig(token_budget=64, max_batch=32, block_size=4, num_blocks=20, most_blocks=40)


def two(limits: SchedulerConfig = LIMITS, **options) -> Controller:
    return Controller(GroupConfig((name,), limits, device=0, block_bytes=(100,), **options) for name in "ab")


def burst(model: str, count: int, output: int = 30) -> list[Input]:
    return [Submit(Request(f"{model}{i}", 8, output, model=model)) for i in range(count)]


def there(group) -> int:
    """Blocks that take memory."""
    return int(plain(num_there)(group.scheduler.state))


def held(group) -> int:
    return there(group) - int(group.scheduler.state.now[SPARE] + group.scheduler.state.now[IDLE])


class Device:
    """Plays the workers: which blocks of which group have content, and how many bytes they take."""

    def __init__(self, controller: Controller) -> None:
        self.controller, self.there = controller, [set[int]() for _ in controller.groups]
        self.configs = [group.config for group in controller.groups]
        workers = range(len(self.configs[0].block_bytes))
        self.pool = [sum(c.scheduler.num_blocks * c.block_bytes[w] for c in self.configs) for w in workers]

    def run(self, batch: Batch) -> None:
        for group, gone in batch.given_back:
            self.there[group] -= set(gone)
        size = self.configs[batch.group].scheduler.block_size
        for item in batch.slices:
            table = item.sequence.blocks()
            assert self.there[batch.group] >= set(table[: -(-item.start // size)]), "what was computed was given back"
            self.there[batch.group] |= set(table[item.start // size : -(-item.end // size)])
        self.check()

    def check(self) -> None:
        for w, pool in enumerate(self.pool):
            counts = [there(g) for g in self.controller.groups]
            for used in (counts, map(len, self.there)):
                sizes = [config.block_bytes[w] for config in self.configs]
                assert sum(n * size for n, size in zip(used, sizes, strict=True)) <= pool
        for group in self.controller.groups:
            group.scheduler.check()
            assert group.scheduler.num_free_blocks >= 0


def finish(controller: Controller, batches: list[Batch], outputs: FixedOutputs, device: Device, now: float = 1.0):
    """Runs until nothing is left; returns the events and how many sequences of each group ran at a time."""
    events, most = list[Event](), Counter[int]()
    while batches:
        for batch in batches:
            device.run(batch)
            most[batch.group] = max(most[batch.group], controller.groups[batch.group].scheduler.num_running)
        done, batches = controller.turn([Complete(b.group, b.id, outputs(b)) for b in batches], now)
        events += done
        now += 1
    return events, most


def lengths(*inputs: Input) -> FixedOutputs:
    return FixedOutputs({item.request.id: item.request.max_tokens for item in inputs})


def test_a_burst_holds_what_an_idle_model_leaves() -> None:
    requests, most, preempted = burst("a", 14), list[int](), list[int]()
    for size in ((100,), ()):
        controller = Controller(GroupConfig((name,), LIMITS, device=0, block_bytes=size) for name in "ab")
        _, batches = controller.turn(requests, 0.0)
        events, running = finish(controller, batches, lengths(*requests), Device(controller))
        assert sum(event.kind == "finished" for event in events) == 14
        most.append(running[0])
        preempted.append(sum(event.kind == "preempted" for event in events))
    assert most[0] == 14 > most[1] and preempted[0] < preempted[1]


def test_the_owner_has_its_part_back_with_its_first_step() -> None:
    controller, first, second = two(), burst("a", 8), burst("b", 3, output=16)
    outputs, device = lengths(*first, *second), Device(controller)
    _, batches = controller.turn(first, 0.0)
    for step in range(1, 10):
        device.run(batches[0])
        _, batches = controller.turn([Complete(0, batches[0].id, outputs(batches[0]))], float(step))
    assert held(controller.groups[0]) > 20, "it borrows"
    device.run(batches[0])
    events, (step,) = controller.turn([*second, Complete(0, batches[0].id, outputs(batches[0]))], 10.0)
    assert step.requests == ["b0", "b1", "b2"] and step.starts == [0, 0, 0]
    events, _ = finish(controller, [step], outputs, device)
    assert sum(event.kind == "finished" for event in events) == 11
    assert not [event for event in events if event.kind == "preempted" and event.group == 1], "only a gives way"


def test_a_loan_ends_without_harm_where_there_is_memory_for_both() -> None:
    """The borrower keeps what the owner's sequences cannot come to need."""
    controller, first, second = two(), burst("a", 3, output=40), burst("b", 1, output=4)
    outputs, device = lengths(*first, *second), Device(controller)
    events, batches = controller.turn([*first, *second], 0.0)
    events, most = finish(controller, batches, outputs, device)
    assert most[0] == 3 and not [event for event in events if event.kind == "preempted"]


def test_own_cached_blocks_go_before_those_of_an_idle_model() -> None:
    controller = two(replace(LIMITS, token_budget=200))
    device = Device(controller)
    for name, keys in (("b", range(100, 110)), ("a", range(200, 210))):
        warm = [Submit(Request(f"warm {name}", 40, 1, model=name, prefix=tuple(keys)))]
        finish(controller, controller.turn(warm, 0.0)[1], lengths(*warm), device)
    for requests, cached in ((10, [10, 10]), (15, [0, 10]), (18, [0, 4])):  # of two blocks each; 20 are free
        more = burst("a", requests, output=1)
        finish(controller, controller.turn(more, 5.0)[1], lengths(*more), device)
        assert [int(group.scheduler.state.now[IDLE]) for group in controller.groups] == cached


def test_what_fits_is_what_a_group_can_have_at_any_time() -> None:
    controller = two()
    events, _ = controller.turn([Submit(Request("x", 70, 12, model="a"))], 0.0)
    assert [event.kind for event in events] == ["rejected"], "21 blocks: more than its part, though b is idle"


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 40))])
def test_never_more_than_there_is_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    workers, pipeline = rng.choice([(1, 1), (1, 1), (2, 2), (3, 1)])
    count = rng.randint(2, 3)
    configs = []
    for n in range(count):
        own = rng.randint(14, 30)
        limits = SchedulerConfig(
            token_budget=rng.randint(4, 40), max_batch=rng.randint(2, 12), block_size=4, num_blocks=own,
            most_blocks=own + rng.randint(0, 60), watermark=rng.choice([0.0, 0.1]),
        )  # fmt: skip
        policy = rng.choice(["paceline", "paceline", "orca", "prefill_first", "sarathi_serve"])
        sizes = tuple(rng.randint(50, 200) for _ in range(workers))
        configs.append(GroupConfig("abc"[n : n + 1], limits, policy, pipeline, device=0, block_bytes=sizes))
    controller, log = Controller(configs), list[str]()
    device = Device(controller)
    requests = []
    for i in range(60):
        prompt, family = rng.randint(1, 30), rng.randint(0, 3)
        prefix = tuple(1000 * family + k for k in range(prompt // 4)) if family else ()
        model = "abc"[min(rng.randrange(count), rng.randrange(count)) if i % 20 < 10 else count - 1]
        arrival = 40.0 * (i // 20) + rng.random() * 30
        requests.append(Request(str(i), prompt, rng.randint(1, 20), arrival, model, prefix=prefix))
    outputs = FixedOutputs({r.id: rng.randint(1, r.max_tokens) for r in requests})
    future = sorted([(r.arrival, Submit(r)) for r in requests], key=lambda item: item[0])
    cancels = sorted((rng.random() * 100, str(rng.randrange(60))) for _ in range(6))
    losses = sorted(rng.random() * 100 for _ in range(2))
    flights, trace, now, kinds = list[Batch](), list[Event](), 0.0, Counter[str]()
    down = False
    while future or flights or controller.sequences or down:
        now += 1.0
        inputs = list[Input]()
        if flights and rng.random() < 0.9:
            batch = flights.pop(0)
            inputs.append(Complete(batch.group, batch.id, outputs(batch)))
            if pipeline > 1 and flights:
                inputs.append(Advance(flights[0].group, flights[0].id))
        elif pipeline > 1 and flights:
            inputs.append(Advance(flights[-1].group, flights[-1].id))
        if down:
            inputs += [Back(g) for g in range(count)]
            down = False
        elif losses and losses[0] < now:
            losses.pop(0)
            flights.clear()
            inputs, down = [Lost(g) for g in range(count)], True
            device.there = [set() for _ in configs]
        while cancels and cancels[0][0] < now:
            inputs.append(Cancel(cancels.pop(0)[1]))
        while future and future[0][0] < now:
            inputs.append(future.pop(0)[1])
        log.append(record.dump(now, inputs))
        events, batches = controller.turn(inputs, now)
        trace += events
        kinds.update(event.kind for event in events)
        for batch in batches:
            device.run(batch)
        flights += batches
        device.check()
        assert now < 5000, "somebody starves"
    assert kinds["finished"] + kinds["cancelled"] + kinds["rejected"] == 60
    assert replay(Controller(configs), record.load(log)) == trace, "decisions are a function of the inputs"
