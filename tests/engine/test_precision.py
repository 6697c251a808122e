"""What weights are held in, by device, options and checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.cluster import Parallel
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine import load_plan
from paceline.engine.config import DTYPES, KV_DTYPES, ModelError
from paceline.engine.load import weight_bytes
from paceline.engine.parallel import Place
from paceline.engine.precision import precision
from paceline.engine.runner import ModelRunner
from paceline.processor import HAS_TILES
from tests.engine import checkpoints
from tests.engine.test_runner import blocks, prompt

ASKED = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=5)
KEPT = "kept_bfloat16" if HAS_TILES else "none"
COMPUTED = (("auto", "none"), ("float32", "none"), ("auto", "int8"))  # --dtype, --quantization on a CPU
ABLE = "auto, float32, bfloat16" if HAS_TILES else "auto, float32"


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("halved")
    checkpoints.save("qwen2", path, torch.bfloat16)
    return path


def changed(path: Path, to: Path, name: str, dtype: torch.dtype) -> Path:
    """A copy in which one tensor is of another type."""
    shutil.copytree(path, to)
    tensors = load_file(to / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(dtype)}, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("device", "dtype", "quantization", "message"),
    [
        ("cpu", "float16", "none", f"dtype: this processor does not compute in float16; valid are {ABLE}"),
        ("cpu", "half", "none", "dtype: 'half' is not one of auto, float32, bfloat16, float16"),
        ("cpu:0", "auto", "int8", "quantization: int8 is for CPUs; on cpu:0 only none is valid"),
        ("cuda", "auto", "int4", "quantization: 'int4' is not one of none, int8"),
    ],
)
def test_what_a_device_cannot_compute_in(device: str, dtype: str, quantization: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        precision(device, dtype, quantization, None)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("device", "kv_cache_dtype", "message"),
    [
        ("cpu", "bfloat16", "kv-cache-dtype: 'bfloat16' is not one of auto, float32, float16"),
        ("cuda", "fp8", "kv-cache-dtype: 'fp8' is not one of auto, float32, float16"),
        ("cuda", "float16", "kv-cache-dtype: float16 is for CPUs; on cuda only auto is valid"),
    ],
)
def test_what_keys_and_values_cannot_be(device: str, kv_cache_dtype: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        precision(device, "auto", "none", None, kv_cache_dtype)
    assert str(caught.value) == message


def test_keys_and_values_are_as_what_is_computed_in_unless_asked_for(halved: Path) -> None:
    held = [precision("cpu", dtype, quantization, halved).kv for dtype, quantization in COMPUTED]
    assert held == ["float32", "float32", "float16"]
    for asked in KV_DTYPES:
        assert {precision("cpu", *one, halved, asked).kv for one in COMPUTED} == {asked}
    assert [precision("cuda", dtype, "none", halved).kv for dtype in ("auto", *DTYPES)] == ["bfloat16", *DTYPES]
    if HAS_TILES:
        assert precision("cpu", "bfloat16", "none", halved).kv == "float16"


def test_weights_that_are_bfloat16_stay_it(halved: Path, tmp_path: Path) -> None:
    def of(path: Path, device: str = "cpu", dtype: str = "auto", quantization: str = "none") -> str:
        return precision(device, dtype, quantization, path).weights

    assert of(halved) == KEPT
    assert of(halved, dtype="float32") == "none" and of(halved, quantization="int8") == "int8"
    if HAS_TILES:
        assert of(halved, dtype="bfloat16") == of(tmp_path / "nowhere", dtype="bfloat16") == "bfloat16"
        assert of(halved, dtype="bfloat16", quantization="int8") == "int8"
    assert of(halved, "cuda") == "bfloat16"
    assert of(halved, "cuda", "float32") == "none"
    assert of(halved, "cuda:1", "float16") == "float16"
    name = "model.layers.1.mlp.down_proj.weight"
    assert of(changed(halved, tmp_path / "mixed", name, torch.float32)) == "none"
    norm = changed(halved, tmp_path / "norm", "model.norm.weight", torch.float32)
    assert of(norm) == KEPT, "of vectors nobody asks"
    assert of(tmp_path / "nowhere") == "none", "whoever loads it says what is wrong"


@pytest.mark.parametrize("number", [0, 1])
def test_every_worker_finds_the_mistake_that_the_first_one_finds(halved: Path, number: int) -> None:
    with pytest.raises(ModelError, match="draft_quantization: 'int3' is not one of none, int8"):
        load_plan.models(
            halved, ("none", "int3"), ("cpu", "auto", "auto"), None, str(halved), None, Place(Parallel(2), number)
        )  # fmt: skip


@pytest.mark.skipif(not HAS_TILES, reason="weights become float32")
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_they_give_the_same_logprobs_in_half_the_memory(halved: Path, kv: str) -> None:
    """Of prompts and of single tokens."""
    options = dict(max_batch_tokens=64, max_batch=4, block_size=4, num_blocks=64)
    kept = ModelRunner.load(halved, kv_cache_dtype=kv, **options)
    floats = ModelRunner.load(halved, dtype="float32", kv_cache_dtype=kv, **options)
    config = kept.decoder.config
    assert kept.info.weight_bytes == config.weight_bytes("kept_bfloat16") + config.table_bytes
    assert kept.info.weight_bytes == weight_bytes(halved, Place())
    assert floats.info.weight_bytes == config.weight_bytes() + config.table_bytes
    assert floats.info.weight_bytes == weight_bytes(halved, Place(), dtype="float32")
    assert kept.info.kv_bytes == floats.info.kv_bytes == 64 * 4 * config.kv_bytes_per_token(kv)
    assert kept.cache.pool.dtype == floats.cache.pool.dtype == getattr(torch, kv)
    parts = [part for layer in kept.decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert {part.kind for part in (*parts, kept.decoder.head)} == {"tiled_bf16"}
    found = []
    for runner in kept, floats:
        new = [NewSequence(i, prompt(20 + i, i), 20 + i, ASKED) for i in range(3)]
        works = [SliceWork(i, 0, 20 + i, True, 0, blocks(10 * i, 8)) for i in range(3)]
        found.append([runner.step(new, works, [])[0]])
        for step in range(3):
            works = [SliceWork(i, 20 + i + step, 1, True, 8, []) for i in range(3)]
            found[-1].append(runner.step([], works, [])[0])
    assert all(output.logprobs for step in found[0] for output in step)
    assert found[0] == found[1]


@pytest.mark.skipif(not HAS_TILES, reason="refused")
@pytest.mark.parametrize("drafts", [False, True], ids=["", "draft"])
def test_weights_become_bfloat16_when_that_is_asked_for(tmp_path: Path, drafts: bool) -> None:
    """So does what they are multiplied by, where pairs of it are: near what floats give, a row's bits its own."""
    checkpoints.save("qwen2", tmp_path)
    drafter = str(tmp_path) if drafts else "ngram"
    options = dict(max_batch_tokens=64, max_batch=4, block_size=4, num_blocks=64, drafter=drafter)
    rounded = ModelRunner.load(tmp_path, dtype="bfloat16", kv_cache_dtype="float32", **options)
    floats = ModelRunner.load(tmp_path, **options)
    decoders = [rounded.decoder, *([rounded.drafter.model.decoder] if drafts else [])]
    assert {decoder.head.kind for decoder in decoders} == {"tiled_rounded"}
    weights = decoders[0].config.weight_bytes("bfloat16") + decoders[0].config.table_bytes
    assert rounded.info.weight_bytes == len(decoders) * weights < floats.info.weight_bytes
    assert rounded.info.weight_bytes == weight_bytes(tmp_path, Place(), dtype="bfloat16", drafter=drafter)
    new = [NewSequence(i, prompt(20 + i, i), 20 + i, ASKED) for i in range(3)]
    works = [SliceWork(i, 0, 20 + i, True, 0, blocks(10 * i, 8)) for i in range(3)]
    together, exact = (runner.step(new, works, [])[0] for runner in (rounded, floats))
    for i in range(3):
        assert together[i].logprobs[0].top_logprobs == pytest.approx(exact[i].logprobs[0].top_logprobs, abs=0.05)
        alone = NewSequence(9, prompt(20 + i, i), 20 + i, ASKED)
        output = rounded.step([alone], [SliceWork(9, 0, 20 + i, True, 0, blocks(40, 8))], [])[0][0]
        rounded.step([], [], [9])
        assert output.tokens == together[i].tokens and output.logprobs == together[i].logprobs


@pytest.mark.skipif(not HAS_TILES, reason="weights become float32")
def test_a_draft_model_is_held_as_its_own_checkpoint_is(halved: Path, tmp_path: Path) -> None:
    options = dict(max_batch_tokens=64, max_batch=4, block_size=4, num_blocks=64)
    whole = tmp_path / "whole"
    checkpoints.save("qwen2", whole)
    for target, draft in ((halved, whole), (whole, halved)):
        runner = ModelRunner.load(target, drafter=str(draft), kv_cache_dtype="float16", **options)
        assert {cache.pool.dtype for cache in runner.caches} == {torch.float16}
        kinds = [decoder.head.kind for decoder in (runner.decoder, runner.drafter.model.decoder)]
        assert kinds == ["tiled_bf16" if path == halved else "tiled" for path in (target, draft)]
        assert runner.info.weight_bytes == weight_bytes(target, Place(), drafter=str(draft))
