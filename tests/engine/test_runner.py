"""The engine as a driver sees it: steps, preemption, faults of one sequence, memory."""

import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine import runner as runner_module
from paceline.engine.config import ModelError
from paceline.engine.linear import kernels
from paceline.engine.runner import ModelRunner
from tests.engine import checkpoints

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
BLOCK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    path = tmp_path_factory.mktemp("qwen2")
    return path, checkpoints.save("qwen2", path)


@pytest.fixture
def runner(model: tuple[Path, object]) -> ModelRunner:
    return ModelRunner.load(model[0], max_batch_tokens=64, max_batch=8, block_size=BLOCK, num_blocks=128)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 199), k=length)


def blocks(first: int, count: int) -> list[int]:
    return list(range(first, first + count))[::-1]


def test_outputs_say_who_drafted(model: tuple[Path, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """N-grams where there are any, else the first layers; a drafter that fails is no drafter that finds nothing."""
    limits = {"max_batch_tokens": 64, "max_batch": 8, "block_size": BLOCK, "num_blocks": 128}
    runner = ModelRunner.load(model[0], drafter="ngram+early_exit", early_exit_layers=1, **limits)
    prompts = [7, 8, 9, 10] * 3, list(range(20, 32))
    new = [NewSequence(i, tokens, 12, GREEDY) for i, tokens in enumerate(prompts)]
    runner.step(new, [SliceWork(i, 0, 11, False, 0, blocks(10 * i, 4)) for i in range(2)], [])
    works = [SliceWork(i, 11, 3, True, 4, [], 2) for i in range(2)]
    outputs = runner.step([], works, [])[0]
    assert [(output.drafter, output.num_draft) for output in outputs] == [("ngram", 2), ("early_exit", 2)]
    model = runner.drafter.drafters[1].model
    for part, name in ((model, "forward"), (model.chain, "draw")):
        monkeypatch.setattr(part, name, lambda *_: 1 / 0)
    known = [12 + len(output.tokens) for output in outputs]
    works = [SliceWork(i, known[i] - 1, 3, True, 4, blocks(50 + 10 * i, 4), 2) for i in range(2)]
    assert {(output.drafter, output.num_draft) for output in runner.step([], works, [])[0]} == {("error", 0)}


def test_chunks_decodes_and_preemption_give_the_greedy_tokens(model: tuple, runner: ModelRunner) -> None:
    one, two = prompt(30, 1), prompt(21, 2)
    expected = [checkpoints.reference_greedy(model[1], tokens, 12) for tokens in (one, two)]
    new = [NewSequence(1, one, 30, GREEDY), NewSequence(2, two, 21, GREEDY)]
    got: dict[int, list[int]] = {1: [], 2: []}

    def step(new: list[NewSequence], *slices: SliceWork) -> None:
        outputs, forward, sampling = runner.step(new, slices, [])
        assert forward > 0 and sampling >= 0
        for work, output in zip(slices, outputs, strict=True):
            assert not output.error and len(output.tokens) == work.emits
            got[work.id] += output.tokens

    step(new, SliceWork(1, 0, 13, False, 0, blocks(0, 4)), SliceWork(2, 0, 21, True, 0, blocks(50, 6)))
    step([], SliceWork(2, 21, 1, True, 6, []), SliceWork(1, 13, 17, True, 4, blocks(20, 4)))
    for at in range(3):
        step([], SliceWork(1, 30 + at, 1, True, 8, blocks(70, 1) if at == 2 else []),
             SliceWork(2, 22 + at, 1, True, 6, blocks(80, 1) if at == 2 else []))  # fmt: skip
    # Sequence 1 is preempted: it starts again from 0 with other blocks, over its prompt and what it generated.
    known = 30 + len(got[1])
    step([], SliceWork(1, 0, 20, False, 0, blocks(100, 5)), SliceWork(2, 25, 1, True, 7, []))
    step([], SliceWork(1, 20, known - 20, True, 5, blocks(110, 8)))
    grown = {1: (30, 13, []), 2: (21, 7, blocks(85, 3))}  # prompt length, blocks held, further ones
    while unfinished := [i for i in got if len(got[i]) < 12]:
        works = []
        for i in unfinished:
            length, held, more = grown[i]
            works.append(SliceWork(i, length + len(got[i]) - 1, 1, True, held, more))
        step([], *works)
    assert [got[1], got[2]] == expected


def test_progress_counts_layers_and_heads(runner: ModelRunner) -> None:
    runner.step([NewSequence(1, [5, 6, 7], 3, GREEDY)], [SliceWork(1, 0, 3, True, 0, [0])], [])
    assert runner._progress[0] == 3 + 1


@pytest.mark.skipif(kernels is None, reason="needs our own kernels")
def test_progress_is_seen_within_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a large model takes longer than a worker without progress may live."""
    changes = dict(num_hidden_layers=1, hidden_size=384, intermediate_size=16384, max_position_embeddings=2048)
    monkeypatch.setitem(checkpoints.FAMILIES, "wide", (LlamaConfig, changes))
    checkpoints.save("wide", tmp_path)
    runner = ModelRunner.load(tmp_path, max_batch_tokens=2048, max_batch=8, block_size=16, num_blocks=128)
    new, work = NewSequence(1, prompt(2000, 1), 2000, GREEDY), SliceWork(1, 0, 2000, True, 0, blocks(0, 125))
    thread, seen = threading.Thread(target=runner.step, args=([new], [work], [])), set()
    thread.start()
    while thread.is_alive():
        seen.add(runner.progress)
        time.sleep(0.0001)
    assert len(seen) > 6


def test_prompt_logprobs_in_chunks(model: tuple, runner: ModelRunner) -> None:
    tokens = prompt(23, 3)
    logprobs = torch.log_softmax(checkpoints.reference_logits(model[1], tokens), -1)
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    first = runner.step([NewSequence(1, tokens, 23, params)], [SliceWork(1, 0, 11, False, 0, blocks(0, 6))], [])[0][0]
    second = runner.step([], [SliceWork(1, 11, 12, True, 6, [])], [])[0][0]
    assert len(first.prompt_logprobs) == 11 and len(second.prompt_logprobs) == 11
    assert not first.tokens and len(second.tokens) == len(second.logprobs) == 1
    for at, entry in enumerate(first.prompt_logprobs + second.prompt_logprobs):
        assert entry.token == tokens[at + 1]
        assert entry.logprob == pytest.approx(float(logprobs[at, entry.token]), abs=1e-3)
        assert entry.top_ids == logprobs[at].topk(2).indices.tolist()


def test_a_sequence_lost_with_its_process_goes_on(model: tuple, runner: ModelRunner) -> None:
    tokens = prompt(15, 4)
    expected = checkpoints.reference_greedy(model[1], tokens, 4)
    again = NewSequence(9, tokens + expected[:3], 15, GREEDY)
    output = runner.step([again], [SliceWork(9, 0, 18, True, 0, blocks(0, 5))], [])[0][0]
    assert output.tokens == expected[3:]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (SliceWork(7, 0, 1, True, 0, [3]), "sequence 7 is not known"),
        (SliceWork(2, 0, 6, True, 0, [3, 4]), r"tokens \[0, 6\) of 5 known"),
        (SliceWork(2, 0, 4, True, 0, [3]), "emits after token 4 of 5 known"),
        (SliceWork(2, 0, 5, True, 0, [3]), "1 blocks are too few for 5 tokens"),
        (SliceWork(2, 0, 5, True, 0, [3, 128]), "block ids must be from 0 to 127"),
        (SliceWork(3, 0, 5, True, 0, [3, 4]), "token ids must be from 0 to 198"),
    ],
)
def test_a_faulty_slice_fails_alone(work: SliceWork, message: str, runner: ModelRunner) -> None:
    good = prompt(5, 5)
    new = [NewSequence(1, good, 5, GREEDY), NewSequence(2, good, 5, GREEDY)]
    new.append(NewSequence(3, [4, 5, 199, 6, 7], 5, GREEDY))
    outputs, _, _ = runner.step(new, [work, SliceWork(1, 0, 5, True, 0, [0, 1])], [])
    assert not outputs[0].tokens and re.search(message, outputs[0].error)
    assert not outputs[1].error and len(outputs[1].tokens) == 1


def three(runner: ModelRunner) -> list[str]:
    """Errors of a step over three fresh sequences."""
    new = [NewSequence(i, prompt(5 + i, i), 5 + i, GREEDY) for i in range(3)]
    slices = [SliceWork(i, 0, 5 + i, True, 0, blocks(10 * i, 2)) for i in range(3)]
    return [output.error for output in runner.step(new, slices, [])[0]]


def test_a_fault_in_the_forward_pass_fails_one_sequence(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = runner.decoder.forward

    def faulty(tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        if prompt(6, 1)[0] in tokens:
            raise RuntimeError("boom")
        return forward(tokens, *rest)

    assert prompt(6, 1)[0] not in prompt(5, 0) + prompt(7, 2)
    monkeypatch.setattr(runner.decoder, "forward", faulty)
    monkeypatch.setattr(runner, "fused", None)
    assert three(runner) == ["", "RuntimeError: boom", ""]


def test_a_fault_in_sampling_fails_one_sequence(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = runner_module.sampler.sample

    def faulty(logits: torch.Tensor, states: list, positions: list[int]) -> tuple:
        if 6 in positions:
            raise RuntimeError("boom")
        return sample(logits, states, positions)

    monkeypatch.setattr(runner_module.sampler, "sample", faulty)
    monkeypatch.setattr(runner, "fused", None)
    assert three(runner) == ["", "RuntimeError: boom", ""]


def test_a_row_without_a_distribution_fails_one_sequence(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = runner.decoder.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden)
        out[1] = float("nan")
        return out

    monkeypatch.setattr(runner.decoder, "logits", poisoned)
    monkeypatch.setattr(runner, "fused", None)
    assert three(runner) == ["", "the model gave no distribution (logits are NaN or infinite)", ""]


def test_parameters_that_the_sampler_cannot_take(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise ValueError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "SamplingState", refuse)
        runner.step([NewSequence(4, [5], 1, GREEDY)], [], [])
    good = NewSequence(5, [5], 1, GREEDY)
    outputs = runner.step([good], [SliceWork(4, 0, 1, True, 0, [0]), SliceWork(5, 0, 1, True, 0, [1])], [])[0]
    assert outputs[0].error == "ValueError: no such thing" and not outputs[1].error


def test_dropped_sequences_are_forgotten(runner: ModelRunner) -> None:
    runner.step([NewSequence(1, [5], 1, GREEDY)], [SliceWork(1, 0, 1, True, 0, [0])], [])
    assert runner.step([], [SliceWork(1, 1, 1, True, 1, [])], [1, 77])[0][0].error == "sequence 1 is not known"
    assert not runner.sequences


def test_info_and_limits(model: tuple, runner: ModelRunner) -> None:
    info = runner.info
    assert (info.num_blocks, info.block_size, info.context) == (128, BLOCK, 512)
    config = runner.decoder.config
    assert info.kv_bytes == 128 * BLOCK * config.kv_bytes_per_token()
    held = sum(value.numel() for name, value in model[1].state_dict().items() if name != "lm_head.weight")
    assert config.weight_bytes() == 4 * held and config.table_bytes == 4 * 199 * 48  # head and embedding
    assert info.weight_bytes == config.weight_bytes() + config.table_bytes
    assert info.planned_bytes > info.weight_bytes + info.kv_bytes
    small = ModelRunner.load(model[0], max_batch_tokens=64, max_batch=2, num_blocks=3, block_size=BLOCK)
    assert small.info.context == 12
    with pytest.raises(ModelError, match="context: the KV cache holds 12 tokens, less than one sequence of 100"):
        ModelRunner.load(model[0], max_batch_tokens=64, max_batch=2, num_blocks=3, block_size=BLOCK, context=100)
    useful = ModelRunner.load(model[0], max_batch_tokens=64, max_batch=2, block_size=BLOCK, context=100)
    assert useful.info.num_blocks == 51  # two sequences', and what admission leaves free


def test_int8_holds_a_quarter(model: tuple, runner: ModelRunner) -> None:
    options = dict(max_batch_tokens=64, max_batch=2, num_blocks=8, block_size=BLOCK)
    small = ModelRunner.load(model[0], quantization="int8", **options)
    assert small.info.weight_bytes < 0.4 * runner.info.weight_bytes
    held = sum(part.nbytes for layer in small.decoder.layers for part in (layer.qkv, layer.out, layer.down))
    assert held < small.info.weight_bytes
    with pytest.raises(ModelError, match="quantization: 'int3' is not one of none, int8"):
        ModelRunner.load(model[0], quantization="int3", **options)


def test_a_context_that_yarn_stretches_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what max_position_embeddings says: the logits of transformers, where it is asked for."""
    changes = dict(rope_parameters=checkpoints.YARN, max_position_embeddings=64)
    monkeypatch.setitem(checkpoints.FAMILIES, "stretched", (LlamaConfig, changes))
    reference, tokens = checkpoints.save("stretched", tmp_path), prompt(150, 5)
    limits = dict(max_batch_tokens=256, max_batch=2, block_size=BLOCK, num_blocks=64)
    with pytest.raises(ModelError, match="context must be from 1 to 256 tokens"):
        ModelRunner.load(tmp_path, context=257, **limits)
    assert ModelRunner.load(tmp_path, **limits).info.context == 64
    runner = ModelRunner.load(tmp_path, context=250, **limits)
    work = SliceWork(1, 0, 150, True, 0, blocks(0, 38))
    output = runner.step([NewSequence(1, tokens, 150, GREEDY)], [work], [])[0][0]
    assert output.tokens == [int(checkpoints.reference_logits(reference, tokens)[-1].argmax())]


@pytest.mark.parametrize("context", [0, 513])
def test_a_context_that_the_model_does_not_have(context: int, model: tuple) -> None:
    with pytest.raises(ModelError, match=f"context must be from 1 to 512 tokens, not {context}"):
        ModelRunner.load(model[0], max_batch_tokens=64, max_batch=2, context=context)


def test_memory_too_small_for_the_model(model: tuple) -> None:
    with pytest.raises(ModelError, match="not enough memory"):
        ModelRunner.load(model[0], max_batch_tokens=64, max_batch=2, memory=1 << 20)


MEASURE = """
import sys
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine.runner import ModelRunner
runner = ModelRunner.load(sys.argv[1], max_batch_tokens=256, max_batch=8, memory=800 << 20, threads=2)
params = SamplingParams(temperature=0.0, prompt_logprobs=1)
tokens = [(7 * i) % 8000 + 3 for i in range(700)]
for start in range(0, 700, 256):
    end = min(700, start + 256)
    new = [NewSequence(1, tokens, 700, params)] if not start else []
    work = SliceWork(1, start, end - start, end == 700, 0, list(range(-(-700 // 16))))
    assert not runner.step(new, [work], [])[0][0].error
for at in range(700, 703):
    runner.step([], [SliceWork(1, at, 1, True, 44, [])], [])
lines = open("/proc/self/status").read().splitlines()  # not ru_maxrss, which begins with the parent's
print(runner.info.planned_bytes, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""


def test_peak_memory_is_within_a_tenth_of_the_plan(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    make = [sys.executable, root / "scripts" / "make_model.py", "small", tmp_path, "--vocab", "8192"]
    subprocess.run(make, check=True, capture_output=True)
    measure = [sys.executable, "-c", MEASURE, tmp_path]
    done = subprocess.run(measure, check=True, capture_output=True, cwd=root, text=True)
    planned, peak = map(int, done.stdout.split())
    assert planned <= 800 << 20
    assert 0.9 < peak / planned < 1.1, f"planned {planned >> 20} MiB, peak {peak >> 20} MiB"
