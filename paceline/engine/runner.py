"""One model on one device: keeps sequences and the KV pool, runs steps. Satisfies `core.work.Engine`.

A step is: forget and learn sequences, one forward pass over all slices, logits of the rows that need them, sampling.
A fault that belongs to one sequence is that sequence's answer; the others of the step do not notice.
"""

import ctypes
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from paceline.core.work import EngineInfo, NewSequence, SliceOutput, SliceWork, TokenLogprobs
from paceline.engine import attention, sampler
from paceline.engine.attention import SliceSpan, plan_step
from paceline.engine.config import ModelConfig, ModelError
from paceline.engine.kv_cache import KVCache, MemoryPlan, pool_blocks, resident_bytes
from paceline.engine.linear import QUANTIZATIONS, best_kind, kernels
from paceline.engine.model import Decoder, Progress, load_decoder
from paceline.engine.sampler import SamplingState
from paceline.engine.weights import Checkpoint
from paceline.speculation import ngram

# Bytes that steps leave behind: oneDNN's compiled kernels, one per layer shape and row count, and what the allocator
# keeps. Measured 58 and 66 MiB after steps of seven sizes with the shapes of Llama 3.2 1B and Qwen 2.5 0.5B.
KEPT = 64 << 20
LOGIT_ROWS = 64  # logits at a time: bounds their memory where every prompt token's are asked for


@dataclass(slots=True)
class _Sequence:
    """What the engine remembers of a sequence."""

    tokens: array  # known: prompt and generated
    num_prompt: int
    stops: frozenset[int]  # ids that end it
    prompt_top: int | None  # prompt_logprobs of its parameters
    state: SamplingState
    blocks: array = field(default_factory=lambda: array("q"))  # ids, as NumPy reads them without a copy


@dataclass(slots=True)
class _Job:
    """One slice of a step on its way to an output."""

    work: SliceWork
    sequence: _Sequence | None = None
    span: SliceSpan | None = None
    draft: list[int] = field(default_factory=list)
    accepted: int = 0  # of it
    begin: int = 0  # where its rows are among the step's hidden states
    first_row: int = 0  # and its logits among those of its part
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str = ""

    def output(self) -> SliceOutput:
        if self.error:
            return SliceOutput([], error=self.error)
        return SliceOutput(self.tokens, self.logprobs, self.prompt_logprobs, "", len(self.draft), self.accepted)

    def take(self, token: int, logprob: TokenLogprobs | None) -> bool:
        """Emits a token; True where the next row counts too, since it was computed behind this very token."""
        sequence, place = self.sequence, len(self.tokens)
        sequence.state.observe(token)
        sequence.tokens.append(token)
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        same = place < len(self.draft) and token == self.draft[place]
        self.accepted += same
        return same and token not in sequence.stops


class ModelRunner:
    """A loaded model. `step` is to be called from one thread."""

    def __init__(self, decoder: Decoder, cache: KVCache, info: EngineInfo, device: str = "cpu"):
        self.decoder, self.cache, self.info, self.device = decoder, cache, info, device
        self.sequences: dict[int, _Sequence | str] = {}  # a text is why the sequence could not be learnt
        self._progress = np.zeros(1, np.int64)

    @property
    def progress(self) -> int:
        return int(self._progress[0])

    @staticmethod
    def load(
        path: Path | str,
        *,
        max_batch_tokens: int,
        max_batch: int,
        device: str = "cpu",
        memory: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        context: int | None = None,
        threads: int | None = None,
        quantization: str = "none",
        progress: Progress = lambda done, total: None,
    ) -> "ModelRunner":
        """Loads a checkpoint directory and plans its memory before the weights are read.

        `memory` is bytes for the whole process, None what the machine has left; `num_blocks` fixes the KV pool;
        `context` the most tokens of a sequence, None what the model and the pool can hold; `quantization` is one of
        `linear.QUANTIZATIONS`. Raises ModelError.
        """
        if quantization not in QUANTIZATIONS:
            raise ModelError(f"quantization: {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        config = ModelConfig.load(path)
        if context is not None and not 1 <= context <= config.max_context:
            raise ModelError(f"{path}: context must be from 1 to {config.max_context} tokens, not {context}")
        limited, context = context is not None, context or config.max_context
        checkpoint = Checkpoint(path)
        if threads is not None:
            torch.set_num_threads(threads)
        _warm_up(config, block_size, device)
        baseline = resident_bytes() if device == "cpu" else 0
        activations = activation_bytes(config, max_batch_tokens, context)
        weights = config.weight_bytes(quantization)
        if num_blocks is None:
            used = baseline + weights + activations
            useful = max_batch * context
            num_blocks = pool_blocks(
                config, block_size, used=used, memory=memory, useful_tokens=useful, device=device
            )
        if limited and num_blocks * block_size < context:
            room = num_blocks * block_size
            raise ModelError(f"context: the KV cache holds {room} tokens, less than one sequence of {context}")
        kind = best_kind(device, quantization)
        decoder = load_decoder(checkpoint, config, device=device, kind=kind, progress=progress)
        _trim_heap()
        cache = KVCache(config, num_blocks, block_size, device)
        plan = MemoryPlan(baseline, weights, cache.nbytes, activations)
        fits = min(context, num_blocks * block_size)
        info = EngineInfo(num_blocks, block_size, plan.weights, plan.kv, plan.total, fits, config.vocab_size)
        return ModelRunner(decoder, cache, info, device)

    @torch.inference_mode()
    def step(
        self, new: Seq[NewSequence], slices: Seq[SliceWork], dropped: Seq[int]
    ) -> tuple[list[SliceOutput], float, float]:
        """Forgets `dropped`, learns `new`, runs `slices`: outputs in order, seconds of forward pass and of sampling."""
        for name in dropped:
            self.sequences.pop(name, None)
        for sequence in new:
            self._learn(sequence)
        started = perf_counter()
        jobs = [_Job(work) for work in slices]
        for job in jobs:
            self._prepare(job)
        hidden = self._forward([job for job in jobs if not job.error])
        begin = 0
        for job in jobs:
            if not job.error:
                job.begin = begin
                begin += job.span.length
        sampling = -perf_counter()
        self._prompt_logprobs([job for job in jobs if not job.error], hidden)
        head_seconds = self._emit([job for job in jobs if job.work.emits and not job.error], hidden)
        sampling += perf_counter() - head_seconds
        forward = perf_counter() - started - sampling
        return [job.output() for job in jobs], forward, sampling

    def _learn(self, new: NewSequence) -> None:
        generated = new.tokens[new.num_prompt :]
        config = self.decoder.config
        try:
            state = SamplingState(
                new.params, config.vocab_size, config.eos_ids, new.tokens[: new.num_prompt], generated
            )
        except Exception as error:  # parameters that the sampler cannot take are this sequence's fault alone
            self.sequences[new.id] = f"{type(error).__name__}: {error}"
            return
        stops = new.params.stops(config.eos_ids)
        tokens = array("q", new.tokens)
        self.sequences[new.id] = _Sequence(tokens, new.num_prompt, stops, new.params.prompt_logprobs, state)

    def _prepare(self, job: _Job) -> None:
        """Updates the block table and checks the slice."""
        work, sequence = job.work, self.sequences.get(job.work.id)
        if not isinstance(sequence, _Sequence):
            job.error = sequence or f"sequence {work.id} is not known"
            return
        sequence.blocks[work.first_block :] = array("q", work.blocks)
        end = work.start + work.length - work.num_draft
        if work.num_draft:
            job.draft = ngram.propose(np.frombuffer(sequence.tokens, np.int64), work.num_draft)
        job.sequence = sequence
        job.span = SliceSpan(work.start, end + len(job.draft) - work.start, sequence.blocks, bool(job.draft))
        vocabulary, blocks = self.decoder.config.vocab_size, self.info.num_blocks
        if not 0 <= work.start < end <= len(sequence.tokens):
            job.error = f"tokens [{work.start}, {end}) of {len(sequence.tokens)} known"
        elif work.emits and end != len(sequence.tokens):
            job.error = f"emits after token {end} of {len(sequence.tokens)} known"
        elif len(sequence.blocks) * self.info.block_size < work.start + work.length:
            job.error = f"{len(sequence.blocks)} blocks are too few for {work.start + work.length} tokens"
        elif not all(0 <= block < blocks for block in work.blocks):
            job.error = f"block ids must be from 0 to {blocks - 1}"
        elif not all(0 <= token < vocabulary for token in sequence.tokens[work.start : end]):
            job.error = f"token ids must be from 0 to {vocabulary - 1}"

    def _forward(self, jobs: list[_Job]) -> Tensor:
        """Hidden states [tokens, hidden] of the jobs, one after the other, without those that get an error.

        Where several fail together, each is run alone: a pass writes only the keys and values of its own slices.
        """
        if not jobs:
            return torch.empty(0, self.decoder.config.hidden, device=self.device)
        try:
            plan = plan_step([job.span for job in jobs], self.decoder.config, self.info.block_size, self.device)
            tokens = [
                token
                for job in jobs
                for token in (*job.sequence.tokens[job.span.start :][: job.span.length], *job.draft)
            ]
            return self.decoder.forward(torch.tensor(tokens, device=self.device), plan, self.cache, self._progress)
        except Exception as error:
            if len(jobs) > 1:
                return torch.cat([self._forward([job]) for job in jobs])
            jobs[0].error = f"{type(error).__name__}: {error}"
            return self._forward([])

    def _tick(self) -> None:
        self._progress[0] += 1

    def _prompt_logprobs(self, jobs: list[_Job], hidden: Tensor) -> None:
        """Of prompt tokens [start + 1, end + 1), for sequences that asked."""
        for job in jobs:
            sequence, start = job.sequence, job.span.start
            targets = sequence.tokens[start + 1 : min(start + job.span.length + 1, sequence.num_prompt)].tolist()
            if sequence.prompt_top is None or not targets:
                continue
            try:
                for begin in range(0, len(targets), LOGIT_ROWS):
                    some = targets[begin : begin + LOGIT_ROWS]
                    logits = self.decoder.logits(hidden[job.begin + begin :][: len(some)])
                    job.prompt_logprobs += sampler.prompt_logprobs(logits, some, sequence.prompt_top)
                    self._tick()
            except Exception as error:
                job.error = f"{type(error).__name__}: {error}"

    def _emit(self, jobs: list[_Job], hidden: Tensor) -> float:
        """Samples a token for each job, and one more as long as those are what was drafted; seconds that logits took.

        Every row is sampled as without a draft, with the noise of its position and after the tokens before it: what is
        emitted is the same (coupled speculation, Daliri et al., 2024).
        """
        seconds = 0.0
        for some in _in_parts(jobs):
            started, rows = perf_counter(), []
            for job in some:
                job.first_row, end = len(rows), job.begin + job.span.length
                rows += range(end - 1 - len(job.draft), end)
            logits = self.decoder.logits(hidden.index_select(0, torch.tensor(rows, device=self.device)))
            seconds += perf_counter() - started
            while some:
                index = [job.first_row + len(job.tokens) for job in some]
                together = index[-1] - index[0] == len(index) - 1  # nothing has to be copied
                some = self._sample(some, logits[index[0] : index[-1] + 1] if together else logits[index])
            self._tick()
        return seconds

    def _sample(self, jobs: list[_Job], logits: Tensor) -> list[_Job]:
        """A token for each of the jobs, from its row of logits; those whose next row counts too."""
        states = [job.sequence.state for job in jobs]
        positions = [len(job.sequence.tokens) for job in jobs]
        try:
            tokens, logprobs = sampler.sample(logits, states, positions)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].error = f"{type(error).__name__}: {error}"
                return []
            return [one for row, job in enumerate(jobs) for one in self._sample([job], logits[row : row + 1])]
        going = []
        for job, token, logprob in zip(jobs, tokens, logprobs, strict=True):
            if token < 0:
                job.error = "the model gave no distribution (logits are NaN or infinite)"
            elif job.take(token, logprob):
                going.append(job)
        return going


def _in_parts(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Jobs with at most LOGIT_ROWS rows of logits, or one."""
    part: list[_Job] = []
    rows = 0
    for job in jobs:
        rows += 1 + len(job.draft)
        if part and rows > LOGIT_ROWS:
            yield part
            part, rows = [], 1 + len(job.draft)
        part.append(job)
    if part:
        yield part


def activation_bytes(config: ModelConfig, max_batch_tokens: int, context: int) -> int:
    """The most that one step holds beside weights and KV.

    The widest layer's rows (of our own kernels, which run a whole layer, all its parts and their work space; of torch's
    operators states, norm, projections and heads or both halves of the MLP), logits of LOGIT_ROWS rows with a copy for
    the sampler, and what attention needs.
    """
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if "tiled" in best_kind("cpu"):
        row = 2 * config.hidden + 2 * queries + 2 * keys + kernels.LINE // 4
        widest = max(config.hidden, config.intermediate, queries)
        inside = min(max_batch_tokens, kernels.BLOCK) * (4 * config.intermediate + kernels.LINE)
        space = inside + kernels.spaces(max_batch_tokens, widest, kernels.num_threads())[0]
    else:
        row, space = 3 * config.hidden + max(3 * queries + 2 * keys, 3 * config.intermediate), 0
    logits = 2 * LOGIT_ROWS * config.vocab_size
    working = attention.working_bytes(config, max_batch_tokens, context)
    return 4 * (row * max_batch_tokens + logits) + space + working + KEPT


def _trim_heap() -> None:
    """Returns what loading left in the C library's heap (110 to 190 MiB measured) where that library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _warm_up(config: ModelConfig, block_size: int, device: str) -> None:
    """Runs every kind of operation once on small tensors: libraries are loaded and kernels compiled before memory is
    measured and before the first request waits for it."""
    attention.warm_up(config, block_size, device)
    sampler.warm_up(config.vocab_size)
