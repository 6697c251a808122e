"""Layers of checkpoints: models of one process hold what they have in common once; progress."""

import gc
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.engine.config import ModelConfig
from paceline.engine.linear import Linear, best_kind
from paceline.engine.model import Decoder, load_decoder
from paceline.engine.weights import Checkpoint
from tests.engine import checkpoints
from tests.engine.test_linear import TILED
from tests.engine.test_model import Paged, prompt

tiled = pytest.mark.skipif(best_kind("cpu") != "tiled", reason="only panels of our own kernels are shared")
HEAD, UP, DOWN = "lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    checkpoints.save("llama-biases", path)
    return path


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    """A fine-tune: another head, and one number elsewhere."""
    path = tmp_path / "other"
    shutil.copytree(model, path)
    change(path, HEAD, 0, bit=23)
    change(path, UP, 17 * 48 + 5, bit=23)
    return path


def change(path: Path, name: str, number: int, bit: int = 0) -> None:
    """One bit of one of a tensor's numbers."""
    tensors = load_file(path / "model.safetensors")
    tensors[name].view(-1).view(torch.int32)[number] ^= 1 << bit
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def load(path: Path, kind: str = "tiled") -> Decoder:
    return load_decoder(Checkpoint(path), ModelConfig.load(path), kind=kind)


def linears(decoder: Decoder) -> dict[str, Linear]:
    parts = ("qkv", "out", "gate_up", "down")
    layers = {f"{i} {part}": getattr(layer, part) for i, layer in enumerate(decoder.layers) for part in parts}
    return {**layers, "head": decoder.head}


def places(decoder: Decoder) -> dict[str, int]:
    """Where the packed weights of its layers are."""
    return {name: layer.packed.data_ptr() for name, layer in linears(decoder).items()}


def logits(decoder: Decoder) -> torch.Tensor:
    return Paged(decoder).step([(0, 0, prompt(40))])[0]


@tiled
@pytest.mark.parametrize("kind", TILED)
def test_models_hold_once_what_they_have_in_common(kind: str, model: Path, other: Path) -> None:
    alone = [logits(load(path, kind)) for path in (model, other)]
    first, second = load(model, kind), load(other, kind)
    ours, theirs = places(first), places(second)
    assert {name for name in ours if ours[name] != theirs[name]} == {"1 gate_up", "head"}
    assert len({*ours.values(), *theirs.values()}) == len(ours) + 2
    assert torch.equal(logits(first), alone[0]) and torch.equal(logits(second), alone[1])
    assert not torch.equal(alone[0], alone[1])


@tiled
def test_memory_goes_with_the_last_model_that_uses_it(model: Path, other: Path) -> None:
    alone = logits(load(other))
    first, second = load(model), load(other)
    common, own = (weakref.ref(linears(first)[name].weights) for name in ("0 down", "head"))
    del first
    gc.collect()
    assert own() is None and common() is linears(second)["0 down"].weights
    assert torch.equal(logits(second), alone)
    assert places(load(model))["0 down"] == places(second)["0 down"], "the next one shares with who is left"
    del second
    gc.collect()
    assert common() is None


@tiled
def test_any_number_that_differs_is_seen(model: Path, tmp_path: Path) -> None:
    """The first, the last and one between, of a layer whose rows fill their panels and of one whose do not."""
    first = places(load(model))
    held = load(model)
    for name, layer, size in ((HEAD, "head", 199 * 48), (DOWN, "2 down", 48 * 80)):
        for number in (0, size // 2, size - 1):
            path = shutil.copytree(model, tmp_path / f"{layer} {number}")
            change(path, name, number)
            other = places(load(path))
            assert {name for name in first if first[name] != other[name]} == {layer}
    assert places(held) == first


@tiled
def test_a_file_that_changed_after_loading_is_not_believed(model: Path, other: Path, tmp_path: Path) -> None:
    alone = logits(load(other))
    path = shutil.copytree(model, tmp_path / "changing")
    first, before = load(path), logits(load(model))
    with (path / "model.safetensors").open("r+b") as file:
        file.write((other / "model.safetensors").read_bytes())
    second = load(other)
    assert places(first)["head"] != places(second)["head"]
    assert torch.equal(logits(second), alone) and torch.equal(logits(first), before)


@tiled
def test_what_is_shared_are_numbers_whatever_the_dtype_of_the_file(tmp_path: Path) -> None:
    checkpoints.save("llama-biases", tmp_path / "half", dtype=torch.bfloat16)
    whole = shutil.copytree(tmp_path / "half", tmp_path / "whole")
    tensors = {name: value.float() for name, value in load_file(whole / "model.safetensors").items()}
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    first, second = load(tmp_path / "half"), load(whole)
    assert places(first) == places(second)
    assert not set(places(load(whole, "tiled_int8")).values()) & set(places(first).values())


@pytest.mark.parametrize("family", ["llama-biases", "llama-tied", "mixtral"])
def test_progress_goes_up_to_the_bytes_of_the_files(family: str, tmp_path: Path) -> None:
    checkpoints.save(family, tmp_path)
    checkpoint, seen = Checkpoint(tmp_path), []
    load_decoder(checkpoint, ModelConfig.load(tmp_path), progress=lambda done, total: seen.append((done, total)))
    done = [one for one, _ in seen]
    assert done == sorted(done) and done[-1] == checkpoint.total_bytes
    assert {total for _, total in seen} == {checkpoint.total_bytes}
    assert len(set(done)) > 2 * ModelConfig.load(tmp_path).layers, "every tensor counts"
