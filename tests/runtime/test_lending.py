"""Models on a worker lend each other memory for KV: with toy models, whose caches show every wrong block, and with real
ones, whose memory comes back."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.controller import Controller
from paceline.core import record
from paceline.core.cluster import Parallel
from paceline.core.events import Event
from paceline.core.request import SamplingParams
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel
from paceline.simulator.driver import replay
from tests.engine.checkpoints import SIZE
from tests.runtime.test_fleet import Collector, expected, until, worker

MEMORY, BLOCK_BYTES = 768 << 20, 512 << 10


class Watcher:
    """All events, the most sequences that the first group ran at a time, and how many each preempted."""

    def __init__(self, fleet: LocalFleet) -> None:
        self.fleet, self.most, self.preempted = fleet, 0, [0, 0]
        self.events: list[Event] = []

    def on_events(self, events) -> None:
        self.events += events
        self.most = max(self.most, self.fleet.load()[0].running)
        for event in events:
            if event.kind == "preempted":
                self.preempted[event.group] += 1

    def on_step(self, step) -> None:
        pass


async def all_of(sinks: list[Collector], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        await asyncio.gather(*(sink.done.wait() for sink in sinks))


async def test_bursts_by_turns_get_the_right_tokens_from_each_other_s_memory(tmp_path: Path) -> None:
    rng, log = random.Random(3), tmp_path / "log"
    options = {"num_blocks": 24, "most_blocks": 48, "delay": 0.0005}
    config = FleetConfig(token_budget=32, record=log)
    async with LocalFleet([worker("a", "b", **options)], config) as fleet:
        watcher = Watcher(fleet)
        fleet.observers.append(watcher)
        configs = [group.config for group in fleet.driver.controller.groups]
        assert [one.block_bytes for one in configs] == [(100,), (100,)]
        cases = []
        for i in range(60):
            model = "ab"[i // 10 % 2] if rng.random() < 0.8 else "ab"[i % 2]
            prompt, count = [rng.randrange(900) for _ in range(rng.randint(1, 30))], rng.randint(1, 30)
            sink = Collector()
            fleet.submit(model, prompt, SamplingParams(max_tokens=count), sink)
            cases.append((prompt, count, sink))
            await asyncio.sleep(rng.random() * 0.01)
            if i == 30:
                os.kill(fleet.workers[0].pids[0], signal.SIGKILL)
        await all_of([sink for _, _, sink in cases])
        assert all(sink.tokens == expected(prompt, count) and not sink.error for prompt, count, sink in cases)
        assert any(event.kind == "started" and event.detail.given_back for event in watcher.events)
        for group in fleet.driver.controller.groups:
            group.scheduler.check()
        await until(lambda: fleet.load()[0].blocks_used == 0)
    with log.open() as lines:
        assert replay(Controller(configs), record.load(lines)) == watcher.events


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Little to compute, and 512 KiB in a block."""
    path = tmp_path_factory.mktemp("wide")
    changes = {"num_hidden_layers": 8, "num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 128}
    torch.manual_seed(1)
    config = LlamaConfig(**SIZE | changes | {"max_position_embeddings": 1024})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def wide(path: Path, parallel: Parallel = Parallel()) -> WorkerGroup:  # noqa: B008
    models = [WorkerOptions(str(path), 256, 64, memory=MEMORY, threads=1, share=s, lends=True) for s in (0.5, 1.0)]
    return WorkerGroup(
        (ServedModel("a"), ServedModel("b")), GroupOptions(tuple(models), parallel).command, parallel
    )  # fmt: skip


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def submit(fleet: LocalFleet, model: str, count: int, length: int, output: int) -> list[Collector]:
    sinks = [Collector() for _ in range(count)]
    for i, sink in enumerate(sinks):
        prompt = random.Random(i).choices(range(3, 199), k=length)
        fleet.submit(model, prompt, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True), sink)
    return sinks


@pytest.mark.parametrize("shape", [(1, 1), pytest.param((2, 1), marks=pytest.mark.slow)])
async def test_a_burst_uses_the_memory_of_an_idle_model_which_has_it_back(model: Path, shape: tuple[int, int]) -> None:
    async with LocalFleet([wide(model, Parallel(*shape))], FleetConfig(token_budget=256, max_batch=64)) as fleet:
        info = fleet.groups[0].info
        assert info.most_blocks > 1.5 * info.num_blocks
        assert info.block_bytes == (BLOCK_BYTES // shape[0],) * shape[0], "of half the layers each"
        length = info.num_blocks * info.block_size // 16  # of a prompt: 16 are a whole part
        watcher = Watcher(fleet)
        fleet.observers.append(watcher)
        burst = submit(fleet, "a", 26, length, 80)
        await until(lambda: watcher.most > 22, 60)
        asked = submit(fleet, "b", 12, length, 16)
        await all_of([*burst, *asked])
        assert watcher.preempted[0] > 0 and watcher.preempted[1] == 0
        peaks = [peak_bytes(pid) for pid in fleet.workers[0].pids]
        assert all(peak <= MEMORY for peak in peaks), peaks
        alone = [submit(fleet, "b", 8, length, 80), submit(fleet, "a", 8, length, 16)]
        await all_of([*alone[0], *alone[1]])  # what fits their parts, at the other model, which has the same weights
        for sinks, others in zip((burst, asked), alone, strict=True):
            assert [sink.tokens for sink in sinks[:8]] == [sink.tokens for sink in others]
            assert all(not sink.error for sink in sinks)
