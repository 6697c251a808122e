"""Held-out bits per byte, against an n-gram table of the same tokenizer, and what the draft's proposals are worth."""

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import ngram
from .data import VOCAB_SIZE, Corpus
from .model import Llama

WINDOW = 1024  # tokens of context at most
STRIDE = 512  # so that all but a stream's first tokens have at least this much context


def bits_per_byte(nats: float, num_bytes: int) -> float:
    return nats / math.log(2) / num_bytes


def ngram_scores(corpus: Corpus, order: int) -> dict[str, float]:
    """The table counts the same files as the models saw, the held-out text is the same token for token."""
    levels = ngram.build(corpus.plain, order, VOCAB_SIZE)
    probabilities = ngram.probabilities(levels, _with_start(corpus.held_out, order), VOCAB_SIZE)
    nats = float(-np.log(probabilities).sum())
    return {"nats_per_token": nats / len(probabilities), "bits_per_byte": bits_per_byte(nats, corpus.held_out_bytes)}


def _with_start(tokens: np.ndarray, order: int) -> np.ndarray:
    """`tokens` with their first repeated, so that the table also scores the second token of the stream."""
    return np.concatenate([np.repeat(tokens[:1], order - 2), tokens]) if order > 2 else tokens


def model_scores(model: Llama, corpus: Corpus) -> dict[str, float]:
    """Scored once per token, in windows that overlap by half."""
    nats = float(_token_losses(model, corpus.held_out).sum())
    num_tokens = len(corpus.held_out) - 1
    return {"nats_per_token": nats / num_tokens, "bits_per_byte": bits_per_byte(nats, corpus.held_out_bytes)}


@torch.no_grad()
def _token_losses(model: Llama, stream: np.ndarray) -> Tensor:
    """Cross-entropy in nats of every token but the first, float32 [len(stream) - 1]."""
    tokens = torch.from_numpy(stream.astype(np.int64))
    losses = []
    for start in range(0, len(tokens) - 1, STRIDE):
        piece = tokens[max(0, start - STRIDE) : start + STRIDE + 1]
        new = min(STRIDE, len(tokens) - 1 - start)
        logits = model(piece[None, :-1])[0, -new:]
        losses.append(F.cross_entropy(logits, piece[-new:], reduction="none"))
    return torch.cat(losses)


@torch.no_grad()
def loss_by_position(model: Llama, stream: np.ndarray, length: int = 2048) -> dict[str, float]:
    """Nats per token in bands of context length, over windows longer than any seen in training."""
    total, count = torch.zeros(length), 0
    for tokens in _windows(stream, length + 1):
        total += F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")
        count += 1
    bands = [(0, 64), (64, 256), (256, 512), (512, 1024), (1024, 1536), (1536, 2048)]
    return {f"{first}-{last}": float(total[first:last].mean()) / count for first, last in bands}


def _windows(stream: np.ndarray, length: int) -> Iterator[Tensor]:
    tokens = torch.from_numpy(stream.astype(np.int64))
    for start in range(0, len(tokens) - length, length):
        yield tokens[start : start + length]


@torch.no_grad()
def acceptance(target: Llama, draft: Llama, stream: np.ndarray, length: int = 512) -> dict[str, float]:
    """On held-out text: E[sum min(target, draft)] at two temperatures, and how often the two argmaxes agree."""
    sums = {"temperature_0.8": 0.0, "temperature_1.0": 0.0, "greedy": 0.0}
    windows = list(_windows(stream, length))
    for tokens in windows:
        target_logits, draft_logits = target(tokens[None])[0], draft(tokens[None])[0]
        for temperature in (0.8, 1.0):
            pair = [F.softmax(logits / temperature, -1) for logits in (target_logits, draft_logits)]
            sums[f"temperature_{temperature}"] += float(torch.minimum(*pair).sum(-1).mean())
        sums["greedy"] += float((target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean())
    return {name: value / len(windows) for name, value in sums.items()}
