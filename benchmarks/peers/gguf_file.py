"""A checkpoint of the benchmark shapes (Llama, Qwen2) as a GGUF file for llama.cpp."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
FIELDS = {
    "vocab_size": "vocab_size", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps", "rope_freq_base": "rope_theta",
}  # fmt: skip
KINDS = {"fp32": gguf.GGMLQuantizationType.F32, "int8": gguf.GGMLQuantizationType.Q8_0}


def convert(checkpoint: Path, precision: str, out: Path) -> None:
    """Writes one file, fp32 or q8_0 ("int8"), without a vocabulary: prompts are token ids."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(out, config["model_type"])
    writer.add_tokenizer_model("none")
    for name, key in FIELDS.items():
        getattr(writer, f"add_{name}")(config[key])
    if "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    names = gguf.get_tensor_name_map(ARCHITECTURES[writer.arch], config["num_hidden_layers"])
    for name, value in load_file(checkpoint / "model.safetensors").items():
        part = name.removesuffix("_proj.weight")[-1]
        if writer.arch == "llama" and part in heads:
            # Neighbours rotate in its Llama, halves of a head in the checkpoint.
            value = value.reshape(heads[part], 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        kind = KINDS[precision] if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_factors(config: dict) -> np.ndarray:
    """Llama 3's scaling as a divisor of each frequency."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    waves = 2 * math.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)
