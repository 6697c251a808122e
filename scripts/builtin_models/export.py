"""A checkpoint as a model directory in the Hugging Face layout: bfloat16 safetensors, config, tokenizer."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from .data import END, write_atomically
from .model import NORM_EPS, Llama, LlamaShape

# Messages become plain text, one after the other: these models complete code, they have never seen a dialogue.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the directory, each file atomically, the weights last."""
    folder.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END)
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.shape))
    _write_json(folder / "config.json", _config(model.shape, end))
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    _write_json(folder / "generation_config.json", generation)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))


def _write_json(path: Path, content: dict[str, object]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def _config(shape: LlamaShape, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "initializer_range": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _tokenizer_config(shape: LlamaShape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_positions,
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def read_export(folder: Path) -> Llama:
    """The model as shipped: its bfloat16 weights, widened."""
    config = json.loads((folder / "config.json").read_text())
    shape = LlamaShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        rope_theta=config["rope_theta"],
        max_positions=config["max_position_embeddings"],
        tied=config["tie_word_embeddings"],
    )
    model = Llama(shape, seed=0)
    model.load_state_dict({name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()})
    return model.requires_grad_(False)


def shape_facts(model: Llama, folder: Path) -> dict[str, object]:
    """What the card says about size; `bytes` counts every file but the card."""
    files = [path for path in folder.iterdir() if path.name != "README.md"]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(path.stat().st_size for path in files),
        "shape": asdict(model.shape),
    }


@torch.no_grad()
def complete(model: Llama, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float, seed: int = 0) -> str:
    """A continuation of up to `tokens` tokens, ended early by the end-of-text token; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    known, end = tokenizer.encode(prompt).ids, tokenizer.token_to_id(END)
    start = len(known)
    for _ in range(tokens):
        logits = model(torch.tensor([known]))[0, -1]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        if token == end:
            break
        known.append(token)
    return tokenizer.decode(known[start:])
