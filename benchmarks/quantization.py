"""What int8 and bfloat16 weights, and half-precision keys and values, cost the built-in models in quality.

Held-out bits per byte, and agreement with float32 on the likeliest token.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from paceline.engine.attention import SliceSpan, plan_step
from paceline.engine.config import ModelConfig
from paceline.engine.kv_cache import KVCache, kv_dtype
from paceline.engine.linear import best_kind
from paceline.engine.model import Decoder, load_decoder
from paceline.engine.precision import Precision
from paceline.engine.weights import Checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from builtin_models.data import read_corpus, token_stream  # noqa: E402 - the scripts are not installed
from builtin_models.evaluation import STRIDE, bits_per_byte  # noqa: E402

MODELS = Path(__file__).parents[1] / "paceline" / "builtin"
CASES = ("coder", "coder-draft")
BLOCK = 16
WAYS = {  # the first in float32 throughout
    "none": Precision("none", "float32"),
    "float16 KV": Precision("none", "float16"),
    "int8": Precision("int8", "float16"),
    "bfloat16": Precision("bfloat16", "float16"),  # and activations, where a processor multiplies pairs of it
}


@torch.inference_mode()
def logits(decoder: Decoder, held: Precision, tokens: list[int], last: int) -> torch.Tensor:
    """Of the last `last` of these tokens, [last, vocab]."""
    blocks = -(-len(tokens) // BLOCK)
    plan = plan_step([SliceSpan(0, len(tokens), list(range(blocks)))], decoder.config, BLOCK)
    cache = KVCache(decoder.config, blocks, BLOCK, dtype=kv_dtype(held))
    return decoder.logits(decoder.forward(torch.tensor(tokens), plan, cache, np.zeros(1, np.int64))[-last:])


def run(name: str) -> dict:
    """One built-in model over the whole held-out text, as its own evaluation does it: windows that overlap by half."""
    path = MODELS / name
    files = [file for file in read_corpus() if file.held_out]
    stream = token_stream(Tokenizer.from_file(str(path / "tokenizer.json")), files, cut_seed=None).astype(int).tolist()
    config = ModelConfig.load(path)
    kinds = {held.weights for held in WAYS.values()}
    loaded = {kind: load_decoder(Checkpoint(path), config, kind=best_kind("cpu", kind)) for kind in kinds}
    nats, best, agree = dict.fromkeys(WAYS, 0.0), {}, dict.fromkeys(WAYS, 0)
    for start in range(0, len(stream) - 1, STRIDE):
        piece = stream[max(0, start - STRIDE) : start + STRIDE + 1]
        new = min(STRIDE, len(stream) - 1 - start)
        for way, held in WAYS.items():
            rows = logits(loaded[held.weights], held, piece[:-1], new)
            nats[way] += float(F.cross_entropy(rows, torch.tensor(piece[-new:]), reduction="sum"))
            best[way] = rows.argmax(dim=1)
            agree[way] += int((best["none"] == best[way]).sum())
    size = sum(len(file.text.encode()) for file in files)
    return {
        "held_out_bytes": size,
        "bits_per_byte": {q: round(bits_per_byte(value, size), 5) for q, value in nats.items()},
        "perplexity": {q: round(math.exp(value / (len(stream) - 1)), 4) for q, value in nats.items()},
        "top_1_agreement": {way: round(count / (len(stream) - 1), 5) for way, count in agree.items() if way != "none"},
    }

