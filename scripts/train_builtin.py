"""Train, evaluate and export the built-in models: `make models`, or `python scripts/train_builtin.py --help`.

    python scripts/train_builtin.py                # whatever is still to do, from the last checkpoint on
    python scripts/train_builtin.py --export       # only export and evaluate the checkpoints that exist
"""

import argparse
import os
from pathlib import Path

import torch
from builtin_models.data import prepare
from builtin_models.model import LlamaShape
from builtin_models.training import Phase, RunSpec, Trainer, distillation_loss, load_model, text_loss, train

TARGET = RunSpec(
    name="coder",
    shape=LlamaShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=512),
    tokens=30_000_000,
    phases=(Phase(0.0, 256, 1, 1.0), Phase(0.65, 512, 2, 0.3), Phase(0.92, 1024, 2, 0.3)),
)
