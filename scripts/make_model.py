"""Makes a checkpoint directory with random weights and a byte-level BPE tokenizer, for tests and measurements.

    python scripts/make_model.py qwen2.5-0.5b|llama-3.2-1b|small OUT [--dtype bf16|fp16|fp32] [--vocab N] [--shards N]

Shapes are those of the named models, the vocabulary is 32768 unless given. The same arguments give the same files.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPES = {
    "qwen2.5-0.5b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=896, intermediate_size=4864,
        num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
        rope_theta=1000000.0, rms_norm_eps=1e-6, use_sliding_window=False,
    ),
    "llama-3.2-1b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, rms_norm_eps=1e-5,
        attention_bias=False, mlp_bias=False,
    ),
    "small": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=512, intermediate_size=1408,
        num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
        max_position_embeddings=4096, rope_theta=10000.0, rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False,
    ),
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint by name; the head is tied to the embedding."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    rows = {"q": config["num_attention_heads"] * dim}
    rows["k"] = rows["v"] = config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part in "qkv":
            yield f"{name}.self_attn.{part}_proj.weight", (rows[part], hidden)
            if config["model_type"] == "qwen2":
                yield f"{name}.self_attn.{part}_proj.bias", (rows[part],)
        yield f"{name}.self_attn.o_proj.weight", (hidden, rows["q"])
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def write_weights(config: dict, out: Path, dtype: torch.dtype, shards: int) -> None:
    """Shards of about equal tensor counts, one in memory at a time."""
    generator = torch.Generator().manual_seed(0)
    tensors = list(shapes(config))
    per_shard = -(-len(tensors) // shards)
    index = {}
    for shard in range(shards):
        some = tensors[shard * per_shard : (shard + 1) * per_shard]
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        values = {
            name: torch.ones(shape, dtype=dtype)
            if "norm" in name
            else torch.randn(shape, generator=generator).mul_(0.02).to(dtype)
            for name, shape in some
        }
        save_file(values, out / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(values, file))
    if shards > 1:
        total = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape in tensors)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (out / "model.safetensors.index.json").write_text(text)


def write_tokenizer(out: Path, vocab: int) -> None:
    """Byte-level BPE whose every id below `vocab` is a text: bytes, then each token joined with each byte in turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = SPECIAL + alphabet
    if vocab < len(tokens):
        sys.exit(f"--vocab must be at least {len(tokens)}, not {vocab}")
    merges, left = [], len(SPECIAL)
    while len(tokens) < vocab:
        for char in alphabet[: vocab - len(tokens)]:
            merges.append((tokens[left], char))
            tokens.append(tokens[left] + char)
        left += 1
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(out / "tokenizer.json"))
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT}
    roles |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(roles, indent=1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[options.dtype]
    config = SHAPES[options.shape] | dict(
        vocab_size=options.vocab, tie_word_embeddings=True, hidden_act="silu", torch_dtype=dtype,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    write_tokenizer(options.out, options.vocab)
    (options.out / "config.json").write_text(json.dumps(config, indent=1))
    (options.out / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    write_weights(config, options.out, DTYPES[options.dtype], options.shards)
    print(f"{options.out}: {options.shape}, {options.dtype}, vocabulary of {options.vocab}")


if __name__ == "__main__":
    main()
