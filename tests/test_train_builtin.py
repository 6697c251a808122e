"""The script behind `make models`: its n-gram opponent is a distribution, its runs survive a kill, its data is fair."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

SCRIPTS = Path(__file__).parents[1] / "scripts"
BUILTIN = Path(__file__).parents[1] / "paceline" / "builtin"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name.startswith(("builtin_models", "train_builtin"))]:
        del sys.modules[name]


def test_ngram_table_is_a_distribution_for_seen_and_unseen_contexts() -> None:
    from builtin_models import ngram

    vocab = 13
    tokens = np.random.default_rng(0).zipf(1.5, 3000) % vocab
    levels = ngram.build(tokens, 4, vocab)
    for context in ([12, 12, 11], tokens[100:103].tolist(), [1, 1, 1]):
        grams = [ngram.probabilities(levels, np.array([*context, last]), vocab)[0] for last in range(vocab)]
        assert min(grams) > 0
        assert sum(grams) == pytest.approx(1.0, abs=1e-12)


def test_cut_encoding_keeps_the_text() -> None:
    from builtin_models.data import encode_with_cuts

    tokenizer = Tokenizer.from_file(str(BUILTIN / "coder" / "tokenizer.json"))
    text = SCRIPTS.joinpath("train_builtin.py").read_text()
    tokens = encode_with_cuts(tokenizer, text, random.Random(3))
    assert tokenizer.decode(tokens) == text
    assert len(tokens) > len(tokenizer.encode(text).ids)


def test_held_out_files_are_whole_and_never_tests(tmp_path: Path) -> None:
    from builtin_models.data import read_corpus

    for number in range(200):
        folder = tmp_path / ("test" if number % 2 else "library")
        folder.mkdir(exist_ok=True)
        (folder / f"module_{number}.py").write_text(f"x = {number}  # a file of its own\n")
    files = read_corpus(tmp_path)
    held_out = [file for file in files if file.held_out]
    assert len(files) == 200
    assert held_out
    assert not any(file.is_test for file in held_out)
    assert files == read_corpus(tmp_path)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from builtin_models import training
    from builtin_models.data import Corpus
    from builtin_models.model import LlamaShape
    from builtin_models.training import Phase, RunSpec, Trainer, schedule, text_loss

    micro_tokens = 256
    monkeypatch.setattr(training, "MICRO_TOKENS", micro_tokens)
    stream = np.random.default_rng(1).integers(0, 2048, 4000).astype(np.uint16)
    corpus = Corpus(
        Tokenizer.from_file(str(BUILTIN / "coder" / "tokenizer.json")), stream, 2000, stream, stream, 1, 1, 1
    )
    shape = LlamaShape(hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8)
    phases = (Phase(0.0, 64, 1, 0.5), Phase(0.5, 128, 1, 0.5))
    spec = RunSpec("tiny", shape, tokens=4 * micro_tokens, phases=phases)
    steps = list(schedule(spec))
    assert [step.tokens_before for step in steps] == [number * micro_tokens for number in range(4)]

    straight = Trainer(spec, corpus, tmp_path / "a", text_loss, compiled=False)
    losses = [straight.step(step) for step in steps]
    killed = Trainer(spec, corpus, tmp_path, text_loss, compiled=False)
    for step in steps[:2]:
        killed.step(step)
    killed.save()
    killed.step(steps[2])  # lost
    resumed = Trainer(spec, corpus, tmp_path, text_loss, compiled=False)
    assert resumed.steps_done == 2
    assert [resumed.step(step) for step in steps[2:]] == losses[2:]
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_report_is_of_checkpoints_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_builtin

    monkeypatch.setattr(sys, "argv", ["train_builtin", "--report", "--work", str(tmp_path)])
    for name in ("coder", "coder-draft"):
        with pytest.raises(SystemExit):
            train_builtin.parse_options()
        (tmp_path / f"{name}.pt").touch()
    assert train_builtin.parse_options().report
