"""Safetensors files: every dtype and layout that is read, and one clear error for each way to be broken."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from paceline.engine.config import ModelConfig, ModelError
from paceline.engine.model import Decoder, load_decoder
from paceline.engine.reader import Reader
from paceline.engine.weights import INDEX, Checkpoint
from tests.engine import checkpoints


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    checkpoints.save("llama-biases", path, shard="40KB")
    return path


@pytest.fixture
def broken(sharded: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def load(path: Path) -> Decoder:
    return load_decoder(Checkpoint(path), ModelConfig.load(path))


def shard_of(path: Path, tensor: str) -> Path:
    return path / json.loads((path / INDEX).read_text())["weight_map"][tensor]


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def test_values_come_back_in_float32(tmp_path: Path) -> None:
    values = {str(dtype): torch.randn(3, 5).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    save_file(values, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.total_bytes == 3 * 5 * 8
    reader = Reader(checkpoint, "cpu", "plain", lambda done, total: None)
    for name, value in values.items():
        got = reader.read(name, (3, 5))
        assert got.dtype == torch.float32 and torch.equal(got, value.float())
        assert torch.equal(checkpoint.view(name, (3, 5)), value)  # after its pages were given back, too


def test_the_sharded_checkpoint_loads(sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    load(sharded)


def test_pickled_weights_are_refused_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ModelError, match="only pytorch_model.bin and no .safetensors: pickled weights can run code"):
        Checkpoint(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        Checkpoint(tmp_path)
    with pytest.raises(ModelError, match="no such directory"):
        Checkpoint(tmp_path / "nothing")


def test_a_truncated_shard(broken: Path) -> None:
    file = shard_of(broken, Q_PROJ)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{file.name}: cut off: tensor .* ends at byte"):
        load(broken)


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 64, (20).to_bytes(8, "little") + b"{"])
def test_not_a_safetensors_file(data: bytes, broken: Path) -> None:
    file = shard_of(broken, Q_PROJ)
    file.write_bytes(data)
    with pytest.raises(ModelError, match=file.name):
        load(broken)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]     ", "not a JSON object"),
        (b"{nope} ", "the header is not JSON"),
        (b'{"a":1}', "tensor a has a malformed header entry"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "malformed"),
        (b'{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}', "tensor a has dtype I8; supported are F32, BF16"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', r"tensor a: 4 bytes for shape \[2\] of F32"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "cut off: tensor a ends at byte"),
    ],
)
def test_malformed_headers(header: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match=f"model.safetensors: .*{message}|model.safetensors: {message}"):
        Checkpoint(tmp_path)


def rewrite(file: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(file), **change}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


def test_a_missing_tensor(broken: Path) -> None:
    file = shard_of(broken, Q_PROJ)
    rewrite(file, {Q_PROJ: None})
    with pytest.raises(ModelError, match=f"{file.name}: tensor {Q_PROJ} is not there, though {INDEX} says so"):
        load(broken)


def test_a_tensor_that_the_index_lacks_too(broken: Path) -> None:
    file, index = shard_of(broken, Q_PROJ), json.loads((broken / INDEX).read_text())
    rewrite(file, {Q_PROJ: None})
    del index["weight_map"][Q_PROJ]
    (broken / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"tensor {Q_PROJ} is missing"):
        load(broken)


def test_a_tensor_of_another_shape(broken: Path) -> None:
    file = shard_of(broken, Q_PROJ)
    rewrite(file, {Q_PROJ: torch.zeros(48, 47)})
    message = rf"{file.name}: tensor {Q_PROJ} has shape \[48, 47\], expected \[48, 48\]"
    with pytest.raises(ModelError, match=message):
        load(broken)


def test_a_tensor_that_the_config_knows_nothing_of(broken: Path) -> None:
    file = shard_of(broken, Q_PROJ)
    rewrite(file, {"model.layers.0.self_attn.extra": torch.zeros(3)})
    with pytest.raises(ModelError, match=f"{file.name}: tensor model.layers.0.self_attn.extra is not part"):
        load(broken)


def test_another_head_where_it_is_said_to_be_the_embedding(tmp_path: Path) -> None:
    table = checkpoints.save("llama-tied", tmp_path).get_input_embeddings().weight.detach()
    rewrite(tmp_path / "model.safetensors", {"lm_head.weight": table.double().float()})
    load(tmp_path)
    rewrite(tmp_path / "model.safetensors", {"lm_head.weight": table.roll(1, 0)})
    with pytest.raises(ModelError, match=r"config.json: tie_word_embeddings: must be false, for lm_head.weight"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    load(tmp_path)


def test_a_tied_embedding_by_the_name_of_the_head(tmp_path: Path) -> None:
    model = checkpoints.save("llama-tied", tmp_path)
    table = model.get_input_embeddings().weight.detach()
    rows = torch.randn(3, table.shape[1])
    logits = load(tmp_path).logits(rows)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    decoder = load(tmp_path)
    assert torch.equal(decoder.embedding(torch.arange(len(table))), table) and torch.equal(decoder.logits(rows), logits)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {}}, "weight_map must map tensor names to files"),
        ({"weight_map": {"a": "../model.safetensors"}}, "is not the name of a .safetensors file"),
        ({"weight_map": {"a": "model.bin"}}, "is not the name of a .safetensors file"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors: no such file"),
    ],
)
def test_a_broken_index(index: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        Checkpoint(tmp_path)
