"""A step in one call is the step that is asked for part by part."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from safetensors.torch import save_file

from paceline.cli.sources import BUILTIN
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine import config, sampler, verdict
from paceline.engine import fused as fused_module
from paceline.engine.begun import NO_DISTRIBUTION
from paceline.engine.linear import kernels
from paceline.engine.model import FileEmbedding
from paceline.engine.runner import ModelRunner
from paceline.engine.weights import Checkpoint
from paceline.runtime.offline import Output
from tests.engine import checkpoints
from tests.engine.test_drafters import CODER, SCHEDULES, group, load, prompts  # noqa: F401

if fused_module.fused_kernel is None or not kernels.HAS_TILES:
    pytest.skip("the kernels of this processor are not its", allow_module_level=True)
fused_kernel = fused_module.fused_kernel
FAMILIES = "llama-biases", "llama3-rope", "llama-yarn", "mistral-window", "qwen2-window", "qwen3-window"
KINDS: tuple[dict, ...] = (
    {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}, {"temperature": 0.8, "logprobs": 2},
)  # fmt: skip


def params(seeded: bool, count: int = 8, **changes: object) -> list[SamplingParams]:
    base = SamplingParams(max_tokens=30, ignore_eos=True, seeded=seeded, **changes)
    return [replace(base, seed=50 + i, max_draft_tokens=i % 6, **KINDS[i % 4]) for i in range(count)]


def both(
    runner: ModelRunner, texts: list[list[int]], some: list[SamplingParams], **options: object
) -> tuple[list[Output], list[Output], int, int]:
    """Part by part and in one call; and how many passes were asked for."""
    fused, forward, counts, answers = runner.fused, runner.decoder.forward, [], []
    assert fused is not None
    for runner.fused in (None, fused):
        counts.append(0)

        def counted(*arguments: object) -> object:
            counts[-1] += 1
            return forward(*arguments)

        runner.decoder.forward = counted
        answers.append([replace(one, times=[], clock=None) for one in group(runner, **options).generate(texts, some)])
    assert not runner._complaints
    return *answers, *counts


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str, kind: str, threads: Callable, monkeypatch) -> None:
    """Biases, norms of heads, windows, contexts longer than these; embeddings in memory or the file; threads as they
    are later."""
    monkeypatch.setattr(config, "SMALL_TABLE", 2**26 * (FAMILIES.index(family) % 3))
    checkpoints.save(family, tmp_path, torch.bfloat16 if kind == "bfloat16" else torch.float32)
    texts = [[3 + (7 * i + j) % 150 for j in range(5 + 9 * i)] for i in range(8)]
    runner = load("ngram", tmp_path, quantization="int8" if kind == "int8" else "none")
    threads(1 + FAMILIES.index(family) % 2)
    parts, call, before, after = both(runner, texts, params(True))
    assert call == parts and before > 20 and after == 0
    assert all(len(one.logprobs) == 30 * (i % 4 == 3) for i, one in enumerate(call))


@pytest.mark.skipif(kernels.num_threads() < 2, reason="a thread alone has all rows")
def test_wide_steps(prompts, monkeypatch):  # noqa: F811
    """Threads with rows of their own; behind them narrow ones."""
    monkeypatch.setattr(kernels.threads, "APART", 40)
    parts, call, before, after = both(load("ngram", CODER), prompts, params(True))
    assert call == parts and before > 5 and after == 0


@pytest.mark.parametrize("seeded", [True, False], ids=["coupled", "rejection"])
@pytest.mark.parametrize("drafter", ["ngram", str(BUILTIN / "coder-draft"), "early_exit"])
def test_verifications(prompts, drafter, seeded, monkeypatch):  # noqa: F811
    runner, judged, behind = load(drafter), verdict.judged, []
    monkeypatch.setattr(verdict, "judged", lambda *args: behind.append(runner.fused is None) or judged(*args))
    parts, call, before, after = both(runner, prompts, params(seeded))
    assert call == parts and before > 5 and after == 0
    assert all(behind) and bool(behind) == (not seeded and drafter != "ngram")


@pytest.mark.parametrize("seeded", [True, False], ids=["coupled", "rejection"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_whatever_happens(prompts, name, seeded, monkeypatch):  # noqa: F811
    """One with penalties, which is drawn or judged behind the call; the others in it."""
    some = [replace(one, max_tokens=30 - 2 * i) for i, one in enumerate(params(seeded))]
    some[2] = replace(some[2], frequency_penalty=0.3)
    runner, choose, behind = load(str(BUILTIN / "coder-draft")), ModelRunner._choose, []

    def noted(self, jobs, logits):
        behind.extend(job.sequence.params for job in jobs if self.fused is not None)
        choose(self, jobs, logits)

    monkeypatch.setattr(ModelRunner, "_choose", noted)
    parts, call, before, after = both(runner, prompts, some, **SCHEDULES[name]())
    assert behind and all(one.frequency_penalty for one in behind)
    assert call == parts and before > 5 and after == 0


def step(runner: ModelRunner, lengths: list[int]) -> list:
    """Decodes of sequences of such lengths, behind their prompts."""
    blocks = [list(range(20 * i, 20 * i + 20)) for i in range(len(lengths))]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    new = [NewSequence(i, [3 + j % 90 for j in range(some + 1)], some + 1, greedy) for i, some in enumerate(lengths)]
    runner.step(new, [SliceWork(i, 0, some, False, 0, blocks[i]) for i, some in enumerate(lengths)], [])
    works = [SliceWork(i, some, 1, True, 20, []) for i, some in enumerate(lengths)]
    outputs = runner.step([], works, [])[0]
    runner.step([], [], list(range(len(lengths))))
    return outputs


def test_a_call_that_fails_is_asked_for_part_by_part(monkeypatch, capfd):
    runner = load("ngram", CODER)
    right = step(runner, [5, 9])
    with monkeypatch.context() as patch:
        patch.setattr(runner.fused, "turns", None)
        for _ in range(2):
            assert step(runner, [5, 9]) == right
    assert capfd.readouterr().err.count("asked for") == 1
    assert step(runner, [5, 9]) == right


def test_a_sequence_without_a_distribution_is_alone_with_it(monkeypatch):
    runner = load("ngram", CODER)
    right = step(runner, [5, 9, 7])
    assert not any(output.error for output in right)
    table = runner.decoder.embedding.table.float()
    table[12] = float("nan")  # the decode's token behind nine tokens, and nobody else's
    monkeypatch.setattr(runner.fused, "source", np.array([-1, table.data_ptr(), len(table), fused_kernel.FLOAT32]))
    got = step(runner, [5, 9, 7])
    assert [got[0], got[2]] == [right[0], right[2]] and got[1].error == NO_DISTRIBUTION


def test_a_call_that_fails_for_one_sequence_fails_it_alone(monkeypatch, capfd):
    runner = load("ngram", CODER)
    right, embedding = step(runner, [5, 9, 7]), runner.decoder.embedding

    class Faulty:
        def __call__(self, tokens):
            if 12 in tokens:  # the decode behind nine tokens
                raise RuntimeError("boom")
            return embedding(tokens)

    monkeypatch.setattr(runner.decoder, "embedding", Faulty())
    monkeypatch.setattr(runner.fused, "source", np.array([*embedding.place, 12, fused_kernel.FLOAT32]))  # the others'
    got = step(runner, [5, 9, 7])
    assert [got[0], got[2]] == [right[0], right[2]] and got[1].error == "RuntimeError: boom"
    assert "an embedding cannot be read" in capfd.readouterr().err


@njit
def embedded(source, ids, hidden, into):
    return fused_kernel._embedded(source, ids, hidden, into)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_table_in_its_file(tmp_path, dtype):
    """Every number of 16 bits, zeros and infinities of both signs and NaNs too."""
    bits = torch.arange(2**16).to(torch.int16).view(256, 256)
    table = bits.view(dtype) if dtype.itemsize == 2 else bits.view(torch.bfloat16).float()
    save_file({"e": table}, tmp_path / "model.safetensors")
    embedding = FileEmbedding(Checkpoint(tmp_path), "e", (256, 256))
    ids, rows = torch.tensor([*range(255, -1, -1), 3, 3]), torch.empty(258, 256)
    source = np.array([*embedding.place, 256, fused_module.KINDS.index(dtype)])
    assert embedded(source, ids.numpy(), 256, rows.data_ptr()) == 258
    ours, theirs = (x.nan_to_num(7.0, torch.inf, -torch.inf).view(torch.int32) for x in (rows, embedding(ids)))
    assert torch.equal(ours, theirs)
    for wrong in (256, -1):
        assert embedded(source, np.array([0, wrong, 1]), 256, rows.data_ptr()) == 1
    os.truncate(tmp_path / "model.safetensors", os.path.getsize(tmp_path / "model.safetensors") - 1)
    assert embedded(source, np.array([254, 255]), 256, rows.data_ptr()) == 1


def test_a_fault_in_what_is_told_of_a_token_fails_one_sequence(monkeypatch):
    runner, told = load("ngram", CODER), sampler.logprobs

    def faulty(logits, states, tokens):
        if states[0].params.seed == 1:
            raise RuntimeError("boom")
        return told(logits, states, tokens)

    monkeypatch.setattr(sampler, "logprobs", faulty)
    new = [NewSequence(i, [5], 1, SamplingParams(logprobs=1, seed=i)) for i in range(3)]
    outputs = runner.step(new, [SliceWork(i, 0, 1, True, 0, [i]) for i in range(3)], [])[0]
    assert [output.error for output in outputs] == ["", "RuntimeError: boom", ""] and len(outputs[2].logprobs) == 1


def test_what_it_does_not_take(prompts, monkeypatch):  # noqa: F811
    """More rows than logits are made at a time, and positions beyond what is kept of rotations."""
    runner, some = load("ngram", CODER), [replace(one, max_tokens=30 - 3 * i) for i, one in enumerate(params(True))]
    for where, name, value in ((runner.fused, "most", 6), (fused_module.Rotations, "KEPT", 90)):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            parts, call, before, after = both(runner, prompts, some)
            assert call == parts and before > after > 5
