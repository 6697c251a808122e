"""The fleet with real processes and sockets around a toy model: nothing lost, nothing leaked, faults contained."""

import asyncio
import json
import os
import random
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.batching.budget import GoalBudget
from paceline.controller import Controller
from paceline.core import record
from paceline.core.request import SLO, SamplingParams
from paceline.latency.step_time import StepTime
from paceline.runtime import workers
from paceline.runtime.api import GoalUnreachable, Overloaded, TooLong, Unavailable
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.fork_server import fork_server
from paceline.runtime.group import ServedModel
from paceline.runtime.messages import Step
from paceline.runtime.process import Local
from paceline.runtime.workers import Seat
from paceline.simulator.driver import replay
from tests.runtime.toy_worker import CRASH, CRASH_ONCE, HANG, LOSE_ONCE, POISON, RAISE, next_token


class Collector:
    """A sink that remembers."""

    def __init__(self, stop_token: int | None = None) -> None:
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.error = ""
        self.done = asyncio.Event()
        self.checks_stop = stop_token is not None
        self.stop_token = stop_token

    def push(self, output, finish) -> bool:
        assert not self.done.is_set(), "pushed after the end"
        self.tokens += output.tokens
        stopped = self.checks_stop and self.stop_token in output.tokens
        if finish or stopped:
            self.finish = "stop" if stopped else finish
            self.done.set()
        return stopped

    def fail(self, reason: str) -> None:
        self.error = reason
        self.done.set()


def worker(*names, slots=None, **options) -> WorkerGroup:
    """A worker with toy models, of which it holds so many at a time."""
    names = names or ("toy",)
    served = (ServedModel(name, slots=slots, resident=i < (slots or len(names))) for i, name in enumerate(names))
    command = ["-m", "tests.runtime.toy_worker", json.dumps({"models": len(names), "slots": slots, **options})]
    return WorkerGroup(tuple(served), lambda seat: [*command, json.dumps(asdict(seat))])


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])


@asynccontextmanager
async def fleet(config: FleetConfig | None = None, ahead: bool = False, **options):
    running = LocalFleet([worker(**options)], replace(config or FleetConfig(token_budget=16), async_scheduling=ahead))
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


def children() -> list[str]:
    """Process ids of workers of this process."""
    me = os.getpid()
    pids = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"tests.runtime.toy_worker")]


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def check_empty(running: LocalFleet) -> None:
    scheduler = running.driver.controller.groups[0].scheduler
    scheduler.check()
    assert not scheduler.running and not scheduler.waiting and not running.driver.controller.sequences
    assert scheduler.num_free_blocks == scheduler.config.num_blocks
    assert not running.sequences


async def until(condition, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def lose(group: workers.Workers, number: int = 0, fault: int = signal.SIGKILL, within_s: float = 20.0) -> None:
    """What happens to one of them is seen within that time; they may be back by then."""
    pids = group.pids
    os.kill(pids[number], fault)
    await until(lambda: group.pids != pids, within_s)


@AHEAD
async def test_many_sequences_under_memory_pressure_get_the_right_tokens(ahead: bool):
    rng = random.Random(1)
    shared = [rng.randrange(900) for _ in range(12)]
    async with fleet(ahead=ahead, num_blocks=24, block_size=4) as running:
        cases = []
        for i in range(40):
            prompt = (shared if i % 2 else []) + [rng.randrange(900) for _ in range(rng.randint(1, 20))]
            sink, count = Collector(), rng.randint(1, 30)
            running.submit("toy", prompt, SamplingParams(max_tokens=count), sink)
            cases.append((prompt, sink, count))
        await asyncio.gather(*(sink.done.wait() for _, sink, _ in cases))
        for prompt, sink, count in cases:
            assert sink.tokens == expected(prompt, count) and sink.finish == "length"
        scheduler = running.driver.controller.groups[0].scheduler
        assert scheduler.cached_tokens > 0
        await until(lambda: not running.driver.controller.sequences)
        check_empty(running)


async def test_the_controller_knows_of_what_kind_a_request_is():
    async with fleet() as running:
        for temperature in (0.0, 1.0):
            params, sink = SamplingParams(max_tokens=4, temperature=temperature), Collector()
            id = running.submit("toy", [1, 2], params, sink)
            assert running.driver.controller.sequences[id][1].request.kind == params.kind
            await sink.done.wait()


async def test_one_shot_models_get_whole_prompts_and_keep_no_prefixes():
    steps = []
    one_shot = replace(worker(num_blocks=64), models=(ServedModel("toy", one_shot=True),))
    running = LocalFleet([one_shot], FleetConfig(token_budget=16, policy="orca"))
    running.observers.append(SimpleNamespace(on_events=lambda events: None, on_step=steps.append))
    await running.start()
    try:
        context = running.groups[0].info.context
        with pytest.raises(TooLong):
            running.submit("toy", [1] * (context + 1), SamplingParams(max_tokens=1), Collector())
        for prompts in ([context], [7, 7, 7, 7], [7, 7]):  # an answer takes no place
            sinks = [Collector() for _ in prompts]
            for sink, length in zip(sinks, prompts, strict=True):
                running.submit("toy", [5] * length, SamplingParams(max_tokens=1), sink)
            await asyncio.gather(*(sink.done.wait() for sink in sinks))
            for sink, length in zip(sinks, prompts, strict=True):
                assert sink.tokens == expected([5] * length, 1)
        # a long prompt goes alone; the first of several is sent at once; then as many as the budget has tokens for
        assert [step.tokens for step in steps] == [context, 7, 14, 7, 7, 7]
        assert not sum(step.cached_tokens for step in steps)
        check_empty(running)
    finally:
        await running.stop()


async def test_steps_say_what_else_there_is():
    steps = []
    running = LocalFleet([worker("a", "b", delay=0.002), worker("c", delay=0.002)], FleetConfig(token_budget=16))
    running.observers.append(SimpleNamespace(on_events=lambda events: None, on_step=steps.append))

    async def others(*models: str) -> dict[str, float]:
        """Of each model's steps, while these are at work, the share that other devices were at work beside."""
        steps.clear()
        sinks = [Collector() for _ in models]
        for model, sink in zip(models, sinks, strict=True):
            running.submit(model, [5, 6, 7], SamplingParams(max_tokens=40), sink)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        of = {model: [step.others for step in steps if running.groups[step.group].config.name == model]
              for model in models}  # fmt: skip
        return {model: sum(known) / len(known) for model, known in of.items()}

    def turns() -> list[tuple[bool, bool]]:
        """Of each step whether it says that another model's was before, and whether one was."""
        models = [step.group for step in steps]
        return [(step.before, model != last) for step, model, last in zip(steps[1:], models[1:], models, strict=False)]

    await running.start()
    try:
        assert await others("a", "b") == {"a": 0, "b": 0}, "they share a device"
        assert all(said == was for said, was in turns()) and sum(was for _, was in turns()) > 10, "they take turns"
        assert await others("c") == {"c": 0} and not any(said for said, _ in turns())
        both = await others("a", "c")
        assert min(both.values()) > 0.5, "all but the last steps of the one that is slower"
    finally:
        await running.stop()


@AHEAD
async def test_stop_tokens_and_stop_strings_end_a_sequence_where_they_should(ahead: bool):
    async with fleet(ahead=ahead) as running:
        whole = expected([5, 6, 7], 12)
        plain, stopped, sunk = Collector(), Collector(), Collector(stop_token=whole[4])
        running.submit("toy", [5, 6, 7], SamplingParams(max_tokens=12), plain)
        running.submit("toy", [5, 6, 7], SamplingParams(max_tokens=12, stop_token_ids=(whole[3],)), stopped)
        running.submit("toy", [5, 6, 7], SamplingParams(max_tokens=12), sunk)
        await asyncio.gather(plain.done.wait(), stopped.done.wait(), sunk.done.wait())
        assert plain.tokens == whole and plain.finish == "length"
        assert stopped.tokens == whole[:4] and stopped.finish == "stop"
        assert sunk.tokens == whole[:5]
        await until(lambda: not running.driver.controller.sequences)
        check_empty(running)


@AHEAD
async def test_a_recorded_run_replayed_in_the_simulator_gives_the_same_decisions(ahead: bool, tmp_path):
    log = tmp_path / "inputs.jsonl"
    config = FleetConfig(token_budget=16, max_waiting=20, record=log)
    seen = []

    class Watcher:
        on_events = staticmethod(seen.extend)

        def on_step(self, step) -> None:
            assert step.tokens >= step.sequences > 0

    async with fleet(config, ahead, num_blocks=24, block_size=4) as running:
        running.observers.append(Watcher())
        groups = [running._group_config(group) for group in running.groups]
        sinks = []
        rng = random.Random(3)
        for i in range(30):
            sinks.append(Collector())
            prompt = [rng.randrange(900) for _ in range(rng.randint(1, 24))]
            id = running.submit("toy", prompt, SamplingParams(max_tokens=rng.randint(1, 24)), sinks[-1])
            if i % 5 == 4:
                running.cancel(id)
                sinks.pop()
            await asyncio.sleep(rng.random() * 0.01)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        await asyncio.sleep(0.05)
    assert {e.kind for e in seen} >= {"accepted", "started", "tokens", "finished", "cancelled"}
    assert replay(Controller(groups), record.load(log.read_text().splitlines())) == seen


@AHEAD
async def test_a_thousand_disconnects_at_random_moments_leak_nothing(ahead: bool):
    rng = random.Random(7)
    async with fleet(ahead=ahead, num_blocks=48, block_size=4, delay=0.0005) as running:
        for _wave in range(20):
            ids = []
            for _ in range(50):
                prompt = [rng.randrange(900) for _ in range(rng.randint(1, 40))]
                ids.append(running.submit("toy", prompt, SamplingParams(max_tokens=40), Collector()))
            rng.shuffle(ids)
            for id in ids:
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.004)
                running.cancel(id)
        survivor = Collector()
        running.submit("toy", [1, 2, 3], SamplingParams(max_tokens=5), survivor)
        await survivor.done.wait()
        assert survivor.tokens == expected([1, 2, 3], 5)
        await until(lambda: not running.driver.controller.sequences)
        check_empty(running)


@AHEAD
async def test_a_killed_worker_is_replaced_and_streams_go_on(ahead: bool):
    async with fleet(ahead=ahead, delay=0.005) as running:
        sinks = [Collector() for _ in range(8)]
        for i, sink in enumerate(sinks):
            running.submit("toy", [i, i + 1, i + 2], SamplingParams(max_tokens=25), sink)
        for _ in range(2):
            progress = len(sinks[0].tokens)
            await until(lambda progress=progress: len(sinks[0].tokens) > progress + 2)
            await lose(running.workers[0])
            await until(lambda: running.groups[0].state == "ready")
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        for i, sink in enumerate(sinks):
            assert sink.tokens == expected([i, i + 1, i + 2], 25)
        await until(lambda: not running.driver.controller.sequences)
        check_empty(running)


class TwoInFlight(LocalFleet):
    """Each group has two batches at its worker, which runs them one after the other."""

    def _group_config(self, group):
        return replace(super()._group_config(group), pipeline=2)


async def test_a_crash_keeps_what_all_batches_in_flight_had_yielded():
    """After the first crash sequences run one by one; the second comes when one of two batches is half done."""
    running = TwoInFlight([worker(delay=0.03)], FleetConfig(max_batch=8, policy="prefill_first_padded"))
    await running.start()
    group = running.groups[0]

    def half_done() -> bool:
        flights = group._flying()
        return len(flights) == 2 and bool(flights[0].parts) and any(output.tokens for *_, output in flights[0].outputs)

    try:
        sinks = [Collector() for _ in range(8)]
        for i, sink in enumerate(sinks):
            running.submit("toy", [i, i + 1, i + 2], SamplingParams(max_tokens=6), sink)
        await until(lambda: len(sinks[-1].tokens) > 1)
        os.kill(group.workers.pids[0], signal.SIGKILL)
        await until(half_done)
        os.kill(group.workers.pids[0], signal.SIGKILL)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        for i, sink in enumerate(sinks):
            assert sink.tokens == expected([i, i + 1, i + 2], 6)
        check_empty(running)
    finally:
        await running.stop()


async def test_a_worker_that_dies_by_itself_is_replaced(tmp_path):
    async with fleet(marker=str(tmp_path / "crashed")) as running:
        sink = Collector()
        running.submit("toy", [CRASH_ONCE, 2], SamplingParams(max_tokens=20), sink)
        await sink.done.wait()
        assert sink.tokens == expected([CRASH_ONCE, 2], 20) and not sink.error


async def test_workers_that_owe_a_step_and_compute_nothing_are_replaced(tmp_path, monkeypatch):
    """They are alive and idle: no heartbeat says that anything is wrong."""
    monkeypatch.setattr(workers, "LOST_S", 1.0)
    async with fleet(marker=str(tmp_path / "lost")) as running:
        sink, before = Collector(), Collector()
        running.submit("toy", [1, 2], SamplingParams(max_tokens=3), before)
        await before.done.wait()
        (pid,) = running.workers[0].pids
        await asyncio.sleep(1.5)  # idle, and owes nothing
        assert running.workers[0].pids == [pid]
        running.submit("toy", [LOSE_ONCE, 2], SamplingParams(max_tokens=20), sink)
        await sink.done.wait()
        assert sink.tokens == expected([LOSE_ONCE, 2], 20) and not sink.error
        assert running.workers[0].pids != [pid]


async def test_workers_that_load_and_never_say_how_far_they_are_are_ended(monkeypatch):
    """Their heartbeats say that they wait for something."""
    monkeypatch.setattr(workers, "LOAD_STUCK_S", 1.0)
    async with asyncio.timeout(20), fleet(load_s=60.0) as running:
        assert [one.state for one in running.status()] == ["failed"]


@AHEAD
@pytest.mark.parametrize("fault", [CRASH, RAISE])
async def test_only_the_request_that_kills_workers_fails(fault, ahead):
    async with fleet(ahead=ahead) as running:
        good, bad = Collector(), Collector()
        running.submit("toy", [1, 2], SamplingParams(max_tokens=200), good)
        await until(lambda: len(good.tokens) > 3)
        running.submit("toy", [fault], SamplingParams(max_tokens=5), bad)
        await bad.done.wait()
        assert "more than once" in bad.error
        await good.done.wait()
        assert good.tokens == expected([1, 2], 200)
        check_empty(running)


@pytest.mark.parametrize("fault", [CRASH, RAISE])
async def test_a_request_that_kills_workers_late_in_its_prompt_fails(fault):
    """What is computed again before that is no sign that it got on."""
    async with asyncio.timeout(30), fleet() as running:
        good, bad = Collector(), Collector()
        running.submit("toy", [1, 2], SamplingParams(max_tokens=200), good)
        running.submit("toy", [*range(40), fault, *range(40)], SamplingParams(max_tokens=5), bad)
        await asyncio.gather(bad.done.wait(), good.done.wait())
        assert "more than once" in bad.error and good.tokens == expected([1, 2], 200)
        check_empty(running)


async def test_a_log_that_cannot_be_written_any_more_is_no_fault_of_requests(capfd):
    config = FleetConfig(token_budget=16, record=Path("/dev/full"))
    async with asyncio.timeout(30), fleet(config) as running:
        sinks = [Collector() for _ in range(8)]
        for i, sink in enumerate(sinks):
            running.submit("toy", [i, 2], SamplingParams(max_tokens=150), sink)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        assert [sink.tokens for sink in sinks] == [expected([i, 2], 150) for i in range(8)]
        check_empty(running)
    assert capfd.readouterr().err.count("nothing more is recorded") == 1


async def test_workers_that_are_told_to_end_go_on_until_the_front_end_has_drained():
    """systemd tells all processes of a service at once."""
    async with asyncio.timeout(30), fleet() as running:
        sink, pids = Collector(), running.workers[0].pids
        running.submit("toy", [1, 2], SamplingParams(max_tokens=200), sink)
        await until(lambda: len(sink.tokens) > 3)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        await sink.done.wait()
        assert sink.tokens == expected([1, 2], 200) and running.workers[0].pids == pids


@pytest.mark.parametrize("culprit", ["a", "b"])
async def test_the_other_models_of_workers_that_are_killed_are_not_to_blame(culprit):
    """Nor do any of their steps go to workers that are gone."""
    other = "ab".replace(culprit, "")
    async with asyncio.timeout(30), LocalFleet([worker("a", "b")], FleetConfig(token_budget=16)) as running:
        good, bad = Collector(), Collector()
        sequence = running.sequences[running.submit(other, [1, 2], SamplingParams(max_tokens=200), good)]
        await until(lambda: len(good.tokens) > 3)
        crashes = set()
        running.submit(culprit, [CRASH, 2], SamplingParams(max_tokens=5), bad)
        while not bad.done.is_set():
            crashes.add(sequence.crashes)
            await asyncio.sleep(0.002)
        await good.done.wait()
        assert "more than once" in bad.error and good.tokens == expected([1, 2], 200) and crashes == {0}
        check_empty(running)


@pytest.mark.parametrize("culprit", ["a", "b"])
async def test_a_suspect_of_one_model_is_not_computed_beside_another_model_s_steps(culprit):
    """In a pipeline they are there at the same time; a culprit would take the innocent with it, up to the last time."""
    running = TwoInFlight([worker("a", "b", delay=0.01)], FleetConfig(policy="prefill_first_padded"))
    async with asyncio.timeout(30), running:
        good, bad, mine, beside = Collector(), Collector(), running.workers[0], []
        send, flying = mine.send, mine.flying

        def watched(message) -> None:
            if isinstance(message, Step):
                sent = [flight for flight in flying.values() if flight.sent]
                beside.append((len(sent), any(flight.suspected for flight in sent)))
            send(message)

        mine.send = watched
        sequence = running.sequences[running.submit("ab".replace(culprit, ""), [1, 2], SamplingParams(200), good)]
        await until(lambda: len(good.tokens) > 3)
        running.submit(culprit, [CRASH, 2], SamplingParams(5), bad)
        crashes = set()
        while not bad.done.is_set():
            crashes.add(sequence.crashes)
            await asyncio.sleep(0.002)
        await good.done.wait()
        assert "more than once" in bad.error and good.tokens == expected([1, 2], 200) and max(crashes) < 2
        assert {(2, False), (1, True)} <= set(beside) and all(count == 1 for count, suspected in beside if suspected)
        check_empty(running)
    assert not flying


async def test_what_waits_for_a_suspect_goes_when_its_model_is_unloaded():
    running = TwoInFlight([worker("a", "b", delay=0.05)], FleetConfig(policy="prefill_first_padded"))
    async with asyncio.timeout(30), running:
        sinks, mine = [Collector(), Collector()], running.workers[0]
        for model, sink in zip("ab", sinks, strict=True):
            running.submit(model, [1, 2], SamplingParams(8), sink)
        await until(lambda: all(sink.tokens for sink in sinks))
        os.kill(mine.pids[0], signal.SIGKILL)
        await until(lambda: [flight.sent > 0 for flight in mine.flying.values()] == [True, False])
        group = next(iter(mine.flying.values())).group
        state = running.driver.controller.groups[group.index]
        state.resident = False  # as its device is another model's turn, and then its own again
        running.driver.controller.lose(group.index, time.monotonic())
        group.unload()
        assert [flight.sent > 0 for flight in mine.flying.values()] == [True]
        state.resident = True
        group.load()
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        assert [sink.tokens for sink in sinks] == [expected([1, 2], 8)] * 2
        check_empty(running)


async def test_nobody_is_blamed_for_the_culprit_in_the_step_before():
    async with fleet(FleetConfig(token_budget=16), ahead=True, delay=0.01) as running:
        bad, good = Collector(), Collector()
        prompt = list(range(16))  # as much as a step takes
        running.submit("toy", [CRASH, *prompt[1:]], SamplingParams(max_tokens=1), bad)
        running.submit("toy", prompt, SamplingParams(max_tokens=30), good)
        await asyncio.gather(bad.done.wait(), good.done.wait())
        assert "more than once" in bad.error
        assert not good.error and good.tokens == expected(prompt, 30)
        check_empty(running)


async def test_a_group_that_has_nothing_else_to_do_outlives_requests_that_kill_its_workers():
    async with fleet() as running:
        for _ in range(2):
            bad = Collector()
            running.submit("toy", [CRASH], SamplingParams(max_tokens=5), bad)
            await bad.done.wait()
            assert "more than once" in bad.error
        good = Collector()
        running.submit("toy", [1, 2], SamplingParams(max_tokens=5), good)
        await good.done.wait()
        assert good.tokens == expected([1, 2], 5)
        check_empty(running)


async def test_a_group_whose_workers_die_of_every_request_is_given_up(monkeypatch):
    monkeypatch.setattr(workers, "MOST_RESTARTS", 4)
    async with fleet() as running:
        for reason in ("more than once", "5 times in a row"):
            bad = Collector()
            running.submit("toy", [CRASH], SamplingParams(max_tokens=5), bad)
            await bad.done.wait()
            assert reason in bad.error
        assert running.status()[0].state == "failed"


@AHEAD
async def test_a_poisoned_sequence_fails_alone_and_shares_nothing(ahead: bool):
    prefix = list(range(12))
    async with fleet(ahead=ahead) as running:
        good, bad = Collector(), Collector()
        running.submit("toy", [1, 2], SamplingParams(max_tokens=30), good)
        running.submit("toy", [*prefix, POISON], SamplingParams(max_tokens=5), bad)
        await asyncio.gather(good.done.wait(), bad.done.wait())
        assert bad.error == "poisoned" and good.tokens == expected([1, 2], 30)
        await until(lambda: not running.driver.controller.sequences)
        check_empty(running)
        after = Collector()
        running.submit("toy", [*prefix, 7], SamplingParams(max_tokens=5), after)
        await after.done.wait()
        assert after.tokens == expected([*prefix, 7], 5)


@pytest.mark.parametrize("tokens", [1, 20])
async def test_a_worker_that_dies_with_its_last_answer_unread_loses_nothing(tokens):
    """The front end is busy while the worker answers and dies: the answer counts, the next step comes again."""
    async with fleet(delay=0.02) as running:
        sink = Collector()
        running.submit("toy", [3, 4], SamplingParams(max_tokens=tokens), sink)
        await asyncio.sleep(0)
        time.sleep(0.1)  # the loop stands still
        os.kill(running.workers[0].pids[0], signal.SIGKILL)
        time.sleep(0.1)
        late = Collector()
        running.submit("toy", [5], SamplingParams(max_tokens=3), late)
        await asyncio.gather(sink.done.wait(), late.done.wait())
        assert sink.tokens == expected([3, 4], tokens) and late.tokens == expected([5], 3)
        check_empty(running)


async def test_a_sequence_that_nobody_wants_ends():
    """A sink without stop strings may end its sequence too."""

    class Full(Collector):
        def push(self, output, finish) -> bool:
            self.tokens += output.tokens
            return len(self.tokens) >= 3

    async with fleet() as running:
        sink = Full()
        running.submit("toy", [1, 2], SamplingParams(max_tokens=200), sink)
        await until(lambda: len(sink.tokens) >= 3)
        await until(lambda: not running.driver.controller.sequences)
        assert len(sink.tokens) == 3
        check_empty(running)


async def test_a_model_that_failed_does_not_take_the_others_down():
    running = LocalFleet([worker("bad", refuse="no"), worker()], FleetConfig())
    await running.start()
    try:
        assert [status.state for status in running.status()] == ["failed", "ready"]
        assert running.ready and running.healthy
        sink = Collector()
        running.submit("toy", [1], SamplingParams(max_tokens=3), sink)
        await sink.done.wait()
        assert sink.tokens == expected([1], 3)
        assert running.load()[0].blocks_total == 0
    finally:
        await running.stop()


async def test_stopping_in_the_middle_of_a_restart_leaves_no_process():
    running = LocalFleet([worker(load_s=0.5)], FleetConfig())
    await running.start()
    await lose(running.workers[0])
    assert running.groups[0].state == "restarting"
    await running.stop()
    assert not children()


async def test_a_worker_that_is_stopped_before_it_was_forked_ends():
    ended, server = [], fork_server("tests.runtime.toy_worker")
    async with fleet():  # so the server is there
        command = worker().command(Seat(0, "", (None,), (True,), True))
        process = Local().process(0, command, lambda *_: None, lambda *_: ended.append(True))
        server._process.send_signal(signal.SIGSTOP)
        starting = asyncio.create_task(process.start())
        await asyncio.sleep(0.1)
        await process.stop()
        server._process.send_signal(signal.SIGCONT)
        await starting
        await asyncio.wait_for(process._waiter, 5)
        assert process.process.returncode == -signal.SIGKILL and not ended


async def test_a_full_queue_and_a_drain_take_what_belongs_to_an_accepted_request():
    config = FleetConfig(token_budget=4, max_batch=1, max_waiting=1)
    async with fleet(config, delay=0.02) as running:
        sinks = [Collector() for _ in range(4)]
        for sink in sinks[:2]:
            running.submit("toy", [1], SamplingParams(max_tokens=3), sink)
        running.submit("toy", [1], SamplingParams(max_tokens=3), sinks[2], admitted=True)
        draining = asyncio.create_task(running.drain())
        await asyncio.sleep(0)
        running.submit("toy", [1], SamplingParams(max_tokens=3), sinks[3], admitted=True)
        await draining
        assert all(sink.tokens == expected([1], 3) for sink in sinks)


@pytest.mark.parametrize("how", ["stopped", "stuck"])
async def test_a_hung_worker_is_not_ready_within_two_seconds(how):
    async with fleet() as running:
        await until(lambda: running.ready)
        if how == "stuck":
            running.submit("toy", [HANG], SamplingParams(), Collector())
        else:
            os.kill(running.workers[0].pids[0], signal.SIGSTOP)
        await until(lambda: not running.ready, seconds=2.4)
        assert not running.healthy
        if how == "stopped":
            os.kill(running.workers[0].pids[0], signal.SIGCONT)
            await until(lambda: running.ready)


async def test_over_the_bound_of_the_queue_a_request_is_refused_with_a_time():
    config = FleetConfig(token_budget=4, max_batch=1, max_waiting=2)
    async with fleet(config, delay=0.02) as running:
        sinks = [Collector() for _ in range(3)]
        for sink in sinks:
            running.submit("toy", [1], SamplingParams(max_tokens=3), sink)
        with pytest.raises(Overloaded) as refused:
            running.submit("toy", [1], SamplingParams(max_tokens=3), Collector())
        assert 1 <= refused.value.retry_after <= 120
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        check_empty(running)


async def test_a_goal_that_cannot_be_met_is_refused_with_the_expected_time():
    """Steps are known to take 50 ms of 8 tokens: the second of two prompts of 64 tokens is 16 steps away."""
    step = StepTime(tuple(0.05 for _ in range(65)), *[0.0] * 6)
    budget = GoalBudget(step.linear, step.terms, 8, 8, 8)
    served = ServedModel("toy", budget=budget, predict=step.seconds)
    running = LocalFleet([replace(worker(delay=0.05), models=(served,))], FleetConfig(token_budget=8))
    await running.start()
    try:
        first = Collector()
        running.submit("toy", [1] * 64, SamplingParams(max_tokens=1), first, slo=SLO(ttft=2.0))
        with pytest.raises(GoalUnreachable) as refused:
            running.submit("toy", [1] * 64, SamplingParams(max_tokens=1), Collector(), slo=SLO(ttft=0.3))
        assert 0.4 <= refused.value.expected <= 1.0 and refused.value.goal == 0.3
        later = Collector()
        running.submit("toy", [1] * 64, SamplingParams(max_tokens=1), later, slo=SLO(ttft=3.0))
        await asyncio.gather(first.done.wait(), later.done.wait())
        check_empty(running)
    finally:
        await running.stop()


async def test_what_can_never_fit_is_refused():
    async with fleet(num_blocks=8, block_size=4) as running:
        with pytest.raises(TooLong):
            running.submit("toy", [1] * 30, SamplingParams(max_tokens=10), Collector())
        with pytest.raises(KeyError):
            running.submit("other", [1], SamplingParams(), Collector())
        check_empty(running)


async def test_a_sequence_may_fill_the_whole_context():
    config = FleetConfig(token_budget=64, watermark=0.3)
    async with fleet(config, num_blocks=8, block_size=4) as running:
        context = running.status()[0].info.context
        assert context == 24, "6 of 8 blocks: two are kept free at admission"
        sink = Collector()
        running.submit("toy", [1] * 4, SamplingParams(max_tokens=context - 4), sink)
        await sink.done.wait()
        assert len(sink.tokens) == context - 4


async def test_drain_refuses_new_work_and_finishes_the_old():
    async with fleet(delay=0.005) as running:
        sink = Collector()
        running.submit("toy", [1, 2], SamplingParams(max_tokens=20), sink)
        draining = asyncio.create_task(running.drain())
        await asyncio.sleep(0)
        assert not running.ready
        with pytest.raises(Unavailable):
            running.submit("toy", [1], SamplingParams(), Collector())
        await draining
        assert sink.tokens == expected([1, 2], 20)


async def test_a_model_that_does_not_load_says_why():
    running = LocalFleet([worker(refuse="config.json: no such architecture")], FleetConfig())
    await running.start()
    try:
        status = running.status()[0]
        assert status.state == "failed" and status.reason == "config.json: no such architecture"
        assert running.groups[0].bad_input and not running.ready
        with pytest.raises(Unavailable):
            running.submit("toy", [1], SamplingParams(), Collector())
    finally:
        await running.stop()


async def test_a_worker_ends_with_its_front_end():
    async with fleet(delay=0.05) as running:
        process = running.workers[0]._processes[0]
        process.on_exit = lambda process, code: None  # not to be started again
        process._channel.close()
        await asyncio.wait_for(process._waiter, 5)
        assert process.process.returncode in (0, 3)
