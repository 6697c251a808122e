"""The training loop: deterministic by step, checkpointed by the clock, resumable after a kill.

A run is a sequence of steps fixed by (RunSpec, corpus): which windows a step sees, at which length and learning rate,
follows from the step's number alone. Until the decay begins nothing depends on the token budget, so that a running
job may be stopped and resumed with another budget.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from .data import Corpus
from .model import Llama, LlamaShape, Muon

MICRO_TOKENS = 4096  # tokens of one forward and backward pass
CHECKPOINT_SECONDS = 180.0
WARMUP_STEPS = 60
LONGEST_STEP = 60.0  # seconds; whatever exceeds it was a suspended process


@dataclass(frozen=True)
class Phase:
    """From fraction `start` of the budget on: windows of `length` tokens, `micro_batches` passes per step."""

    start: float
    length: int
    micro_batches: int
    keep_tests: float  # share of the windows from test files that are kept


@dataclass(frozen=True)
class RunSpec:
    name: str
    shape: LlamaShape
    tokens: int
    phases: tuple[Phase, ...]
    decay_from: float = 0.45  # fraction of the budget after which the rate falls linearly to zero
    matrix_rate: float = 0.03
    embedding_rate: float = 0.1
    head_rate: float = 0.012
    norm_rate: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Step:
    number: int
    tokens_before: int
    phase: Phase
    index: int  # of this step within its phase
    scale: float  # of the learning rates

    @property
    def tokens(self) -> int:
        return self.phase.micro_batches * MICRO_TOKENS


def schedule(spec: RunSpec) -> Iterator[Step]:
    """The steps of a run, in order."""
    tokens, number, index, previous = 0, 0, 0, None
    while tokens < spec.tokens:
        done = tokens / spec.tokens
        phase = [phase for phase in spec.phases if phase.start <= done][-1]
        index = index + 1 if phase is previous else 0
        decay = min(1.0, (1 - done) / (1 - spec.decay_from))
        yield Step(number, tokens, phase, index, decay * min(1.0, (number + 1) / WARMUP_STEPS))
        tokens, number, previous = tokens + phase.micro_batches * MICRO_TOKENS, number + 1, phase


class Windows:
    """Shuffled windows of the training stream: each epoch a new permutation and a new offset of the cuts."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.stream, self.tests_from, self.seed = corpus.train, corpus.tests_from, seed
        self._cached: tuple[tuple[int, float, int], np.ndarray] | None = None

    def batch(self, step: Step, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [MICRO_TOKENS / length, length]."""
        length, rows = step.phase.length, MICRO_TOKENS // step.phase.length
        first = (step.index * step.phase.micro_batches + micro_batch) * rows
        starts = [self._start(first + row, step.phase) for row in range(rows)]
        tokens = np.stack([self.stream[start : start + length + 1] for start in starts]).astype(np.int64)
        block = torch.from_numpy(tokens)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def _start(self, index: int, phase: Phase) -> int:
        epoch = 0
        while index >= len(starts := self._epoch(epoch, phase)):
            index, epoch = index - len(starts), epoch + 1
        return int(starts[index])

    def _epoch(self, epoch: int, phase: Phase) -> np.ndarray:
        key = (phase.length, phase.keep_tests, epoch)
        if self._cached is None or self._cached[0] != key:
            rng = np.random.default_rng([self.seed, phase.length, epoch])
            starts = np.arange(rng.integers(phase.length), len(self.stream) - phase.length - 1, phase.length)
            keep = (starts < self.tests_from) | (rng.random(len(starts)) < phase.keep_tests)
            self._cached = (key, rng.permutation(starts[keep]))
        return self._cached[1]


def training_flop(spec: RunSpec) -> float:
    """Floating-point operations of a run: 6 per matrix element and token, and the causal half of attention."""
    shape, total = spec.shape, 0.0
    kv_width = shape.kv_heads * shape.head_dim
    layer = 2 * shape.hidden * (shape.hidden + kv_width) + 3 * shape.hidden * shape.intermediate
    elements = shape.layers * layer + shape.hidden * shape.vocab
    for step in schedule(spec):
        total += step.tokens * 6.0 * (elements + shape.layers * step.phase.length * shape.hidden)
    return total


Loss = Callable[[Llama, Tensor, Tensor], Tensor]


def text_loss(model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def distillation_loss(teacher: Llama, text_share: float = 0.1) -> Loss:
    """KL(target || draft) over the target's whole distribution, with a little of the text's own cross-entropy."""

    def loss(model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(teacher(inputs), dim=-1).flatten(0, 1)
        logits = F.log_softmax(model(inputs), dim=-1).flatten(0, 1)
        imitation = -(wanted * logits).sum(-1).mean()
        return (1 - text_share) * imitation + text_share * F.nll_loss(logits, targets.flatten())

    return loss


def checkpoint(work: Path, spec: RunSpec) -> Path:
    return work / f"{spec.name}.pt"


class Trainer:
    """Model, optimisers and counters: everything that a checkpoint holds."""

    def __init__(self, spec: RunSpec, corpus: Corpus, work: Path, loss: Loss, compiled: bool) -> None:
        self.spec, self.path = spec, checkpoint(work, spec)
        self.model = Llama(spec.shape, spec.seed)
        self.windows = Windows(corpus, spec.seed + 1)
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and ".layers." in n]
        norms = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [
            {"params": [self.model.model.embed_tokens.weight], "peak": spec.embedding_rate},
            {"params": norms, "peak": spec.norm_rate},
        ]
        if not spec.shape.tied:
            groups.insert(1, {"params": [self.model.lm_head.weight], "peak": spec.head_rate})
        self.muon = Muon(matrices, spec.matrix_rate)
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0, fused=True)
        self.steps_done, self.seconds = 0, 0.0
        self.loss = torch.compile(loss, dynamic=False) if compiled else loss
        if self.path.exists():
            self._load()

    def step(self, step: Step) -> float:
        """One update; returns the training loss in nats per token."""
        started, total = time.perf_counter(), 0.0
        for micro_batch in range(step.phase.micro_batches):
            inputs, targets = self.windows.batch(step, micro_batch)
            loss = self.loss(self.model, inputs, targets) / step.phase.micro_batches
            loss.backward()
            total += loss.item()
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * step.scale
        self.muon.step(step.scale)
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.steps_done = step.number + 1
        self.seconds += min(time.perf_counter() - started, LONGEST_STEP)
        return total

    def tokens_done(self) -> int:
        return sum(step.tokens for step in schedule(self.spec) if step.number < self.steps_done)

    def save(self) -> None:
        """Write the checkpoint; an interrupted write leaves the previous one in place."""
        state = {
            "model": self.model.state_dict(),
            "velocity": self.muon.velocity,
            "adam": self.adam.state_dict(),
            "steps_done": self.steps_done,
            "seconds": self.seconds,
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.path)

    def _load(self) -> None:
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        for velocity, saved in zip(self.muon.velocity, state["velocity"], strict=True):
            velocity.copy_(saved)
        self.steps_done, self.seconds = state["steps_done"], state["seconds"]


def train(trainer: Trainer, on_checkpoint: Callable[[str], None]) -> None:
    """Run the steps that are still to do, with a progress bar; `on_checkpoint` gets a line for the log."""
    spec, saved_at, smooth = trainer.spec, time.monotonic(), None
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(spec.name, total=spec.tokens, note="compiling")
        for step in schedule(spec):
            if step.number < trainer.steps_done:
                continue
            before = trainer.seconds
            loss = trainer.step(step)
            smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
            speed = step.tokens / (trainer.seconds - before)
            note = f"loss {smooth:.3f}  {speed:,.0f} tokens/s"
            done = step.tokens_before + step.tokens
            progress.update(task, completed=done, note=note)
            if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                trainer.save()
                on_checkpoint(f"{spec.name}: {done / 1e6:.2f} M tokens, {trainer.seconds:.0f} s, {note}")
                saved_at = time.monotonic()
    trainer.save()
    on_checkpoint(f"{spec.name}: finished, {spec.tokens / 1e6:.2f} M tokens, {trainer.seconds:.0f} s")
