"""A target and a draft model whose agreement is a knob, of any shape and without training.

A random model of the shape, its head untied and scaled so that logits have a standard deviation of 2.5; the draft model
is its first layers with the same embedding, norm and head. What the other layers add is multiplied by eps when the pair
is loaded: at 0 both agree always, and costs, keys and values and verification are real at any value.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints import ROOT
from paceline.engine.runner import ModelRunner

LOGIT_STD = 2.5
VOCABULARY = 16384


def pair(shape: str, draft_layers: int) -> tuple[Path, Path]:
    """Directories of target and draft (bf16), made when they are not there."""
    target, draft = (ROOT / ".bench" / f"{shape}-dialled{suffix}" for suffix in ("", f"-{draft_layers}"))
    if not (draft / "config.json").exists():
        script = [sys.executable, str(ROOT / "scripts" / "make_model.py"), shape]
        for path in (target, draft):
            subprocess.run([*script, str(path), "--dtype", "bf16", "--vocab", str(VOCABULARY)], check=True)
        config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": False}
        tensors = load_file(target / "model.safetensors")
        head = torch.randn(VOCABULARY, config["hidden_size"], generator=torch.Generator().manual_seed(1))
        tensors["lm_head.weight"] = (head * (LOGIT_STD / config["hidden_size"] ** 0.5)).bfloat16()
        first = {n: t for n, t in tensors.items() if ".layers." not in n or int(n.split(".")[2]) < draft_layers}
        for path, some, layers in ((target, tensors, config["num_hidden_layers"]), (draft, first, draft_layers)):
            save_file(some, path / "model.safetensors", metadata={"format": "pt"})
            (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}, indent=1))
    return target, draft


class Dial:
    """Multiplies what the layers behind the draft model's add to the stream, in runners of one model."""

    def __init__(self, runners: Sequence[ModelRunner], draft_layers: int) -> None:
        layers = [layer for runner in runners for layer in runner.decoder.layers[draft_layers:]]
        linears = [linear for layer in layers for linear in (layer.out, layer.down)]
        parts = {part.data_ptr(): part for linear in linears for part in (linear.packed, linear.bias)}
        self._parts = [(part, part.clone()) for part in parts.values()]  # what runners hold in common once
        self.eps = 1.0

    def turn(self, eps: float) -> None:
        for part, whole in self._parts:
            torch.mul(whole, eps, out=part)
        self.eps = eps
