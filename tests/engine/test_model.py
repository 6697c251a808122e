"""The decoder against transformers, family by family, through the paged cache."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.engine.attention import SliceSpan, kernels, plan_step
from paceline.engine.config import ModelConfig
from paceline.engine.gpu import PagedCache
from paceline.engine.kv_cache import KVCache
from paceline.engine.model import Decoder, load_decoder
from paceline.engine.weights import Checkpoint
from tests.engine import checkpoints
from tests.engine.test_linear import FLOAT as FLOAT_KINDS
from tests.engine.test_linear import INT8 as INT8_KINDS

BLOCK = 4


def load(path: Path, **options: str) -> Decoder:
    return load_decoder(Checkpoint(path), ModelConfig.load(path), **options)


class Paged:
    """Sequences of one decoder over a pool whose blocks are handed out in random order."""

    def __init__(self, decoder: Decoder, num_blocks: int = 200, size: int = BLOCK):
        self.decoder, self.size = decoder, size
        self.cache = (
            KVCache(decoder.config, num_blocks, size) if decoder.device == "cpu"
            else PagedCache(decoder.config, num_blocks, size, decoder.device, decoder.dtype)
        )  # fmt: skip
        self.free = list(range(num_blocks))
        random.Random(7).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}

    @torch.inference_mode()
    def step(self, work: list[tuple[int, int, list[int]]], read: list[int] | None = None) -> list[torch.Tensor]:
        """Runs (sequence, start, tokens) slices in one forward; the logits of those that are read, None: of all."""
        spans, read = [], read or [len(tokens) for _, _, tokens in work]
        for (sequence, start, tokens), last in zip(work, read, strict=True):
            table = self.tables.setdefault(sequence, [])
            while len(table) * self.size < start + len(tokens):
                table.append(self.free.pop())
            spans.append(SliceSpan(start, len(tokens), table, read=last))
        plan = self.decoder.plan(spans, self.size)
        flat = torch.tensor([token for _, _, tokens in work for token in tokens], device=self.decoder.device)
        hidden = self.decoder.forward(flat, plan, self.cache, np.zeros(1, np.int64))
        logits = self.decoder.logits(hidden) if len(hidden) else hidden
        assert logits.dtype == torch.float32
        return list(logits.cpu().split(read))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within 1e-4 relative to the size of the logits."""
    scale = theirs.abs().max()
    assert float(theirs.std()) > 0.3, "flat logits would prove nothing"
    assert float((ours - theirs).abs().max() / scale) < 1e-4


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 199), k=length)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_logits_match_transformers_in_chunks_beside_other_sequences(family: str, tmp_path: Path) -> None:
    model = checkpoints.save(family, tmp_path)
    paged = Paged(load(tmp_path))
    first, second = prompt(90, seed=1), prompt(70, seed=2)
    expected = [checkpoints.reference_logits(model, tokens) for tokens in (first, second)]
    # Chunks of odd lengths: whole rows, SDPA chunks at a context, single tokens, several short slices at once.
    got: list[list[torch.Tensor]] = [[], []]
    at = [0, 0]
    for lengths in [(17, 0), (1, 31), (13, 1), (3, 1), (1, 5), (29, 1), (1, 1), (9, 20), (16, 10)]:
        work = [(i, at[i], (first, second)[i][at[i] : at[i] + n]) for i, n in enumerate(lengths) if n]
        for (i, _, tokens), logits in zip(work, paged.step(work), strict=True):
            got[i].append(logits)
            at[i] += len(tokens)
    assert at == [90, 70]
    for ours, theirs in zip(got, expected, strict=True):
        close(torch.cat(ours), theirs)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_greedy_tokens_equal_transformers_over_128(family: str, tmp_path: Path) -> None:
    model = checkpoints.save(family, tmp_path)
    paged, tokens = Paged(load(tmp_path)), prompt(40)
    expected = checkpoints.reference_greedy(model, tokens, 128)
    got, work = [], tokens
    start = 0
    for _ in range(128):
        token = int(paged.step([(0, start, work)])[0][-1].argmax())
        start += len(work)
        got.append(token)
        work = [token]
    assert got == expected
    assert len(set(got)) > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("family", ["llama2", "qwen2", "mixtral"])
def test_half_precision_and_sharded_files(family: str, dtype: torch.dtype, shard: str, tmp_path: Path) -> None:
    model = checkpoints.save(family, tmp_path, dtype, shard)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard == "20KB"
    tokens = prompt(30)
    close(Paged(load(tmp_path)).step([(0, 0, tokens)])[0], checkpoints.reference_logits(model, tokens))


@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("family", ["qwen3-bias", "qwen3-moe"])
def test_a_model_of_every_kind_of_linear_layer(family: str, kind: str, tmp_path: Path) -> None:
    model = checkpoints.save(family, tmp_path)
    tokens = prompt(33)
    close(Paged(load(tmp_path, kind=kind)).step([(0, 0, tokens)])[0], checkpoints.reference_logits(model, tokens))


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    checkpoints.save("llama-tied", tmp_path)
    seen: list[tuple[int, int]] = []
    load_decoder(Checkpoint(tmp_path), ModelConfig.load(tmp_path), progress=lambda *at: seen.append(at))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == Checkpoint(tmp_path).total_bytes


def test_forward_counts_layers(tmp_path: Path) -> None:
    checkpoints.save("llama-tied", tmp_path)
    decoder, progress = load(tmp_path), np.zeros(1, np.int64)
    plan = plan_step([SliceSpan(0, 3, [5])], decoder.config, BLOCK)
    decoder.forward(torch.tensor([1, 2, 3]), plan, KVCache(decoder.config, 8, BLOCK), progress)
    assert progress[0] == decoder.config.layers


STEPS = [[(0, 0, 30), (1, 0, 200)], [(0, 30, 1), (1, 200, 1), (2, 0, 3)], [(0, 31, 1), (1, 201, 150), (2, 3, 9)]]


def run_steps(decoder: Decoder) -> list[torch.Tensor]:
    paged, tokens = Paged(decoder), prompt(400)
    steps = ([(s, start, tokens[start : start + length]) for s, start, length in step] for step in STEPS)
    return [logits for step in steps for logits in paged.step(step)]


def share_out(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads have of the products of STEPS: "rows" of their own, or "columns" of all."""
    if kernels:
        monkeypatch.setattr("paceline.engine.kernels.threads.APART", 2 if shared == "rows" else 1000)


@pytest.mark.parametrize("shared", ["rows", "columns"])
@pytest.mark.parametrize("kind", [kind for kind in (*FLOAT_KINDS, *INT8_KINDS) if "tiled" in kind])
@pytest.mark.parametrize("family", ["llama3-rope", "qwen3-window", "mistral"])
def test_all_layers_in_one_call_are_the_layers_one_by_one(
    family: str, kind: str, shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_out(shared, monkeypatch)
    checkpoints.save(family, tmp_path)
    decoder = load(tmp_path, kind=kind)
    assert decoder.addresses is not None
    fused = run_steps(decoder)
    decoder.addresses = None
    assert all(map(torch.equal, fused, run_steps(decoder)))


READ = [[0, 7], [1, 1, 0], [1, 0, 1]]  # tokens of STEPS that are read; and at last
NOBODY = [(0, 32, 1), (1, 351, 40)], [0, 0]


def reads_some(decoder: Decoder) -> None:
    """Hidden states of tokens that are read are those among all, and so are keys and values."""
    some, every = Paged(decoder), Paged(decoder)
    tokens, rows = prompt(400), 0
    for step, read in [*zip(STEPS, READ, strict=True), NOBODY]:
        work = [(s, start, tokens[start : start + length]) for s, start, length in step]
        for ours, theirs, count in zip(some.step(work, read), every.step(work), read, strict=True):
            assert len(ours) == count
            if count:
                close(ours, theirs[-count:])
                rows += count
    assert rows == 11
    for ours, theirs in zip(some.cache.pool, every.cache.pool, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_what_nobody_reads_does_not_come_from_a_stage_without_layers(device: str, tmp_path: Path) -> None:
    checkpoints.save("qwen2", tmp_path)
    decoder = load(tmp_path, device=device)
    decoder.layers, decoder.addresses = [], None
    reads_some(decoder)


@pytest.mark.parametrize("shared", ["rows", "columns", "layer by layer"])
@pytest.mark.parametrize("kind", [*FLOAT_KINDS, *INT8_KINDS])
@pytest.mark.parametrize("family", ["llama3-rope", "qwen3-window", "qwen3-moe"])
def test_what_nobody_reads_is_not_computed(
    family: str, kind: str, shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_out(shared, monkeypatch)
    checkpoints.save(family, tmp_path)
    decoder, rows = load(tmp_path, kind=kind), list[int]()
    if shared == "layer by layer":
        last, decoder.addresses = decoder.layers[-1], None

        def out(mixed: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
            rows.append(len(mixed))
            return last.out(mixed, **more)

        decoder.layers[-1] = replace(last, out=out)
    reads_some(decoder)
    if shared == "layer by layer":
        assert rows == [7, 230, 2, 5, 2, 160, 41], "of some, of every one, step by step; at last of nobody"


@pytest.mark.parametrize("kind", INT8_KINDS)
def test_int8_is_near_float(kind: str, tmp_path: Path) -> None:
    checkpoints.save("qwen2", tmp_path)
    for ours, exact in zip(run_steps(load(tmp_path, kind=kind)), run_steps(load(tmp_path)), strict=True):
        assert 0 < (ours - exact).norm() < 0.05 * exact.norm()
