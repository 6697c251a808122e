"""Small random checkpoints of every family, written by `transformers`: what the engine is held against."""

import functools
import json
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZE = dict(
    vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

# name -> config class and what it changes in SIZE
FAMILIES = {
    "llama2": (LlamaConfig, dict(num_key_value_heads=6)),
    "llama-mqa": (LlamaConfig, dict(num_key_value_heads=1)),
    "llama-tied": (LlamaConfig, dict(tie_word_embeddings=True)),
    "llama-biases": (LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama3-rope": (LlamaConfig, dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-linear": (LlamaConfig, dict(rope_parameters=LINEAR)),
    "llama-yarn": (LlamaConfig, dict(rope_parameters=YARN)),
    "mistral": (MistralConfig, dict(sliding_window=None, head_dim=16)),
    "mistral-window": (MistralConfig, dict(sliding_window=21)),
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen2-window": (Qwen2Config, dict(use_sliding_window=True, sliding_window=19, max_window_layers=1)),
    "qwen2-yarn": (Qwen2Config, dict(rope_parameters={**YARN, "attention_factor": 1.3, "truncate": False})),
    "qwen3": (Qwen3Config, dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-bias": (Qwen3Config, dict(head_dim=16, attention_bias=True)),
    "qwen3-window": (
        Qwen3Config,
        dict(head_dim=16, use_sliding_window=True, sliding_window=17,
             layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "mixtral": (MixtralConfig, dict(num_local_experts=5, num_experts_per_tok=2)),
    "mixtral-window": (
        MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=1, sliding_window=21, head_dim=16)
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        dict(head_dim=16, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True,
             mlp_only_layers=[1], tie_word_embeddings=True),
    ),
    "qwen3-moe-window": (
        Qwen3MoeConfig,
        dict(head_dim=16, num_experts=40, num_experts_per_tok=20, moe_intermediate_size=16, attention_bias=True,
             use_sliding_window=True, sliding_window=17),
    ),
    "qwen3-moe-every-other": (
        Qwen3MoeConfig,
        dict(num_experts=6, num_experts_per_tok=4, moe_intermediate_size=24, decoder_sparse_step=2),
    ),
}  # fmt: skip


@functools.cache
def reference(family: str) -> PreTrainedModel:
    """The family's model in float32, with weights large enough that logits are far from flat."""
    config_class, changes = FAMILIES[family]
    config = config_class(**{**SIZE, **changes})
    torch.manual_seed(sum(family.encode()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            else:
                value.normal_(0.0, 0.5 if name.endswith("bias") else 1.3 / value.shape[-1] ** 0.5)
    return model


def save(family: str, path: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> PreTrainedModel:
    """Writes the family's checkpoint; the model returned holds the values as they were written."""
    model = reference(family)
    if dtype != torch.float32:
        model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32, attn_implementation="eager").eval()
        rounded = {name: value.to(dtype).float() for name, value in reference(family).state_dict().items()}
        model.load_state_dict(rounded)
        for value in model.parameters():
            value.data = value.data.to(dtype)
    model.save_pretrained(path, max_shard_size=shard)
    return model.float()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, [tokens, vocab]."""
    return model(torch.tensor([tokens])).logits[0]


@torch.inference_mode()
def reference_greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The next `count` likeliest tokens, end of sequence or not."""
    tokens, cache, out = torch.tensor([prompt]), None, []
    for _ in range(count):
        result = model(tokens, past_key_values=cache, use_cache=True)
        cache, tokens = result.past_key_values, result.logits[:, -1].argmax(-1, keepdim=True)
        out.append(int(tokens))
    return out


def fewer_tokens(path: Path, copy: Path, count: int) -> Path:
    """A copy of a checkpoint whose tokenizer knows the first so many tokens alone."""
    shutil.copytree(path, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < count}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy
