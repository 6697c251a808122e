"""config.json in both of its styles, the families' defaults, and what is refused."""

import json
from pathlib import Path

import pytest

from paceline.engine.config import ModelConfig, ModelError

LLAMA = dict(
    architectures=["LlamaForCausalLM"], vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=256, rms_norm_eps=1e-5, eos_token_id=2,
)  # fmt: skip


def load(path: Path, generation: dict | None = None, **changes: object) -> ModelConfig:
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.load(path)


def test_defaults_of_llama(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.kv_heads, config.head_dim, config.tied, config.qkv_bias) == (4, 8, False, False)
    assert config.windows == (None, None) and config.eos_ids == (2,) and config.rope.theta == 10000.0


def test_old_and_new_rope_keys_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = load(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    older = load(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = load(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == older == new
    assert new.rope.theta == 5e5 and new.rope.factor == 8.0 and new.rope.original_context == 64


def test_yarn_without_factor_takes_the_ratio_of_contexts(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64, "rope_theta": 1e4}
    assert load(tmp_path, rope_parameters=rope).rope.factor == 4.0


def test_yarn_with_factor_and_trained_length_says_what_context_may_be_asked_for(tmp_path: Path) -> None:
    """As Qwen's users add it: max_position_embeddings stays the trained length."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = load(tmp_path, rope_scaling=rope, max_position_embeddings=320)
    assert (config.max_context, config.stretched) == (320, 1024)
    del rope["original_max_position_embeddings"]
    assert load(tmp_path, rope_scaling=rope, max_position_embeddings=320).stretched == 0


def test_generation_config_names_the_end_of_sequence(tmp_path: Path) -> None:
    assert load(tmp_path, {"eos_token_id": [7, 9]}).eos_ids == (7, 9)
    assert load(tmp_path, {}).eos_ids == (2,)
    assert load(tmp_path, {}, eos_token_id=None).eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (dict(architectures=["MistralForCausalLM"], num_key_value_heads=2), (4096, 4096)),  # the class's default
        (dict(architectures=["MistralForCausalLM"], num_key_value_heads=2, sliding_window=None), (None, None)),
        (dict(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, sliding_window=8), (None, None)),
        (
            dict(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, sliding_window=8, use_sliding_window=True,
                 max_window_layers=1),
            (None, 8),
        ),
        (
            dict(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2, sliding_window=8, use_sliding_window=True,
                 layer_types=["sliding_attention", "full_attention"]),
            (8, None),
        ),
    ],
)  # fmt: skip
def test_windows(changes: dict, windows: tuple, tmp_path: Path) -> None:
    assert load(tmp_path, **changes).windows == windows


def test_qwen3_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert config.qk_norm and config.head_dim == 128


MIXTRAL = dict(architectures=["MixtralForCausalLM"], num_key_value_heads=2, rms_norm_eps=1e-5)
QWEN3_MOE = dict(architectures=["Qwen3MoeForCausalLM"], num_key_value_heads=2, num_experts=6, num_experts_per_tok=2)


def test_defaults_of_mixtral(tmp_path: Path) -> None:
    config = load(tmp_path, **MIXTRAL)
    assert (config.experts, config.experts_per_token, config.expert_intermediate) == (8, 2, 64)
    assert config.norm_topk and config.sparse == {0, 1} and config.windows == (None, None)
    assert config.rope.theta == 1e6


def test_keys_of_qwen3_moe(tmp_path: Path) -> None:
    config = load(tmp_path, **QWEN3_MOE)
    assert (config.experts, config.experts_per_token, config.expert_intermediate) == (6, 2, 768)
    assert not config.norm_topk and config.sparse == {0, 1} and config.qk_norm and config.head_dim == 8
    assert config.windows == (None, None) and config.rope.theta == 10000.0
    assert load(tmp_path, **QWEN3_MOE, use_sliding_window=True, sliding_window=5).windows == (5, 5)
    new = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert load(tmp_path, **new, num_local_experts=6) == config
    assert load(tmp_path, **QWEN3_MOE, mlp_only_layers=[0], norm_topk_prob=True).sparse == {1}
    assert load(tmp_path, **QWEN3_MOE, mlp_only_layers=[1], decoder_sparse_step=2).sparse == set()


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    config = load(tmp_path, num_experts=8, num_experts_per_tok=2)
    assert not config.sparse and config.experts == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architectures=["GPT2LMHeadModel"]),
         "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, MistralForCausalLM, MixtralForC"),
        (dict(architectures=None, model_type="bert"), r"none \(model_type bert\) is not supported"),
        (dict(hidden_act="gelu"), "hidden_act must be silu"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2}), "rope_type 'dynamic' is not supported; supported are"),
        (dict(rope_scaling={"type": "linear"}), "rope_type linear needs factor"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(num_hidden_layers="two"), "num_hidden_layers must be a whole number"),
        (dict(hidden_size=None), "hidden_size is missing"),
        (dict(num_key_value_heads=3), "not a multiple of num_key_value_heads 3"),
        (dict(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false"),
        (dict(eos_token_id="</s>"), "eos_token_id must be a token id"),
        (dict(rms_norm_eps=0), "rms_norm_eps must be a positive number"),
        (QWEN3_MOE | dict(num_experts_per_tok=7), "num_experts_per_tok must be from 1 to num_experts 6, not 7"),
        (MIXTRAL | dict(num_experts_per_tok=9), "num_experts_per_tok must be from 1 to num_local_experts 8, not 9"),
        (QWEN3_MOE | dict(num_experts_per_tok=0), "num_experts_per_tok must be a whole number of at least 1, not 0"),
        (QWEN3_MOE | dict(num_experts="six"), "num_experts must be a whole number of at least 1, not 'six'"),
        (QWEN3_MOE | dict(moe_intermediate_size=0), "moe_intermediate_size must be a whole number of at least 1"),
        (QWEN3_MOE | dict(mlp_only_layers=[2]), r"mlp_only_layers must list layers from 0 to 1, not \[2\]"),
        (QWEN3_MOE | dict(mlp_only_layers=1), "mlp_only_layers must list layers from 0 to 1, not 1"),
        (QWEN3_MOE | dict(decoder_sparse_step=0), "decoder_sparse_step must be a whole number of at least 1, not 0"),
        (QWEN3_MOE | dict(norm_topk_prob=1), "norm_topk_prob must be true or false, not 1"),
    ],
)  # fmt: skip
def test_refusals_name_the_file_and_the_key(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as error:
        load(tmp_path, **changes)
    assert "config.json" in str(error.value)


def test_no_config_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable as JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        ModelConfig.load(tmp_path)
