"""Workers are killed, stopped and made to raise at random moments under load: no request is lost, no token changed.

`make chaos` makes it long.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from paceline.cli.sources import BUILTIN
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.core.cluster import Parallel
from paceline.core.request import SamplingParams
from paceline.engine.encoder import EncoderRunner
from paceline.engine.runner import ModelRunner
from paceline.runtime.api import Overloaded
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel
from paceline.runtime.messages import GiveBack
from tests.engine.test_parallel import MINILM, ONE, Embedded, alone, embeddings, same_embedding
from tests.runtime.test_fleet import lose, until

FAULTS = int(os.environ.get("PACELINE_CHAOS", "1"))
LIMITS = dict(max_batch_tokens=64, max_batch=8, num_blocks=60)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
POISON = [1 << 20]  # no token of any model
RAISE = 0  # beside the signals: a message that no worker can make sense of
PATHS = {"coder": BUILTIN / "coder", "coder-draft": BUILTIN / "coder-draft", "minilm": MINILM}

Asked = list[tuple[list[int], SamplingParams]]
Answers = list[list[int] | bytes]


@dataclass(frozen=True)
class Scene:
    """Groups: shape, models, drafter, and how many of the models they hold at a time; the first fault; clients of each
    model."""

    groups: tuple[tuple[Parallel, tuple[str, ...], str, int | None], ...]
    first: int
    streams: int
    max_waiting: int = 1024

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, names, *_ in self.groups for name in names))


BOTH, KINDS, DRAFT = ("coder", "coder-draft"), ("coder", "minilm"), str(BUILTIN / "coder-draft")
SCENES = {
    "stages": Scene(
        ((Parallel(2), BOTH, "ngram", None), *((Parallel(), (name,), "ngram", None) for name in BOTH)),
        signal.SIGKILL, 6,
    ),  # fmt: skip
    # three times as many clients as places, of a model with a draft model and of an encoder; one group swaps them
    "ranks": Scene(((Parallel(1, 2), KINDS, DRAFT, None), (Parallel(), KINDS, DRAFT, 1)), RAISE, 30, 2),
}


def kinds(vocabulary: int) -> Asked:
    """Short and long prompts, greedy and seeded, with and without drafts."""
    seeded = replace(GREEDY, temperature=0.9, top_p=0.9, frequency_penalty=0.2)
    return [
        ([3 + (11 * i + 7 * j) % (vocabulary - 3) for j in range(n)], replace(params, seed=i, max_draft_tokens=draft))
        for i, n in enumerate((5, 40, 120))
        for params in (GREEDY, seeded)
        for draft in (0, 3)
    ]


def group(parallel: Parallel, names: tuple[str, ...], drafter: str, slots: int | None) -> WorkerGroup:
    one_shot = [PATHS[name] == MINILM for name in names]
    options = tuple(
        WorkerOptions(str(PATHS[name]), threads=1, drafter="ngram" if embeds else drafter, **LIMITS)
        for name, embeds in zip(names, one_shot, strict=True)
    )
    served = tuple(
        ServedModel(name, max_draft_tokens=3, one_shot=embeds, slots=slots, resident=n < (slots or len(names)))
        for n, (name, embeds) in enumerate(zip(names, one_shot, strict=True))
    )
    return WorkerGroup(served, GroupOptions(options, parallel).command, parallel)


def answers(name: str) -> tuple[Asked, Answers]:
    """What the model is asked for, and what it answers when it is alone and on one device."""
    if PATHS[name] == MINILM:
        texts = [[101, *(1000 + 37 * i * j % 9000 for j in range(5 + 20 * i)), 102] for i in range(3)]
        runner = EncoderRunner.load(MINILM, max_batch_tokens=64, max_batch=8)
        return [(text, ONE) for text in texts], [*embeddings(runner, texts)]
    runner = ModelRunner.load(PATHS[name], **LIMITS | {"num_blocks": 400})
    asked = kinds(runner.info.vocab_size)
    return asked, [*alone(runner, asked)]


async def client(
    fleet: LocalFleet, name: str, asked: Asked, expected: Answers, rng: random.Random, ends: Counter
) -> None:
    """One request after the other, until nobody wants more; some hang up, some are poisoned and fail alone."""
    while not ends["enough"]:
        index, poisoned = rng.randrange(len(asked)), rng.random() < 0.05
        prompt, params = asked[index]
        sink = Embedded()
        try:
            id = fleet.submit(name, prompt + POISON if poisoned else prompt, params, sink)
        except Overloaded:
            ends["refused"] += 1
            await asyncio.sleep(0.05)
            continue
        if rng.random() < 0.15:
            await asyncio.sleep(rng.random() * 0.2)
            if not sink.done.is_set():
                fleet.cancel(id)
                ends["left"] += 1
                continue
        await sink.done.wait()
        if poisoned:
            assert "token ids must be" in sink.error
            ends["poisoned"] += 1
            continue
        answer = expected[index]
        right = same_embedding(sink.embedding, answer) if isinstance(answer, bytes) else sink.tokens == answer
        assert not sink.error and right, f"{name} {index}: {sink.error or 'another answer'}"
        ends[name] += 1


async def hurt(fleet: LocalFleet, rng: random.Random, first: int | None) -> None:
    """Kills, stops or breaks one worker, perhaps another one of another group; waits until all are well."""
    victims = rng.sample(fleet.workers, min(len(fleet.workers) - 1, rng.choice([1, 1, 2])))
    for workers in victims:
        fault = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, RAISE]) if first is None else first
        number = rng.randrange(len(workers.pids))
        if fault == RAISE:
            workers.send(GiveBack(len(PATHS), []))
            fault = 0
        await lose(workers, number, fault, 0.25 if fault == signal.SIGKILL else 4)
        await asyncio.sleep(rng.random() * 0.3)
    await until(lambda: all(workers.state == "ready" for workers in fleet.workers), 60)


@pytest.mark.timeout(60 + 30 * FAULTS)
@pytest.mark.parametrize(
    "scene", [SCENES["stages"], pytest.param(SCENES["ranks"], marks=pytest.mark.slow)], ids=["stages", "ranks"]
)
async def test_faults_at_random_moments_lose_nothing_and_change_nothing(scene):
    rng, ends, names = random.Random(4), Counter(), scene.names
    known = {name: answers(name) for name in names}
    config = FleetConfig(token_budget=64, max_batch=8, max_waiting=scene.max_waiting)

    def many() -> bool:
        return all(ends[name] > 10 * FAULTS for name in names) and min(ends["left"], ends["poisoned"]) > FAULTS

    async with LocalFleet([group(*one) for one in scene.groups], config) as fleet:
        clients = [
            asyncio.create_task(client(fleet, name, *known[name], random.Random(i), ends))
            for i, name in enumerate(names * scene.streams)
        ]
        for fault in range(FAULTS):
            await asyncio.sleep(0.3 + rng.random())
            before = ends.total() - ends["refused"]
            await hurt(fleet, rng, None if fault else scene.first)
            assert ends.total() - ends["refused"] > before, f"fault {fault}: everything waits, though one group is up"
            assert not [one.get_stack() for one in clients if one.done()], "a client's answer was wrong"
        await until(lambda: many() or any(one.done() for one in clients), 30)
        ends["enough"] = 1
        await asyncio.gather(*clients)
        await until(lambda: not fleet.driver.controller.sequences)
        for state in fleet.driver.controller.groups:
            state.scheduler.check()
            assert state.scheduler.num_free_blocks == state.scheduler.config.num_blocks
    assert many(), ends
    assert (ends["refused"] > 0) == (scene.max_waiting < 1024), ends
