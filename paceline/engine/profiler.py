"""Measures what steps of a loaded model take, as SARATHI profiles once to choose a chunk size (section 4.4).

Three sets of steps: prompt chunks of all widths, mixes of decodes and chunks at contexts, and more such mixes which
the fit does not see. Every step is run several times, and runs of different steps take turns in a random order over the
whole measurement, since the machine is shared and drifts. A short step's first run, which compiles kernels, does not
count.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter

import numpy as np
import torch

from paceline.core.batch import StepShape
from paceline.core.request import SamplingParams
from paceline.core.work import Engine, NewSequence, SliceWork
from paceline.engine import machine
from paceline.engine.config import ModelConfig
from paceline.engine.draft_models import chain_of
from paceline.engine.drafters import Link
from paceline.engine.runner import ModelRunner
from paceline.latency.profile import Measured, Profile, summarize
from paceline.latency.roofline import Roofline
from paceline.latency.tiles import sweep_widths
from paceline.processor import HAS_BF16

LONGEST = 4096  # tokens of context: attention is linear in it, so longer ones would only take longer to measure
LEAST_RUNS, MOST_RUNS = 2, 12  # of a step, after its first
MOST_CHUNKS = 4  # of a mix
SETTLED = 0.01  # seconds of the same step in a row, after which caches hold what it needs
CHAINED, CHAIN, CHAIN_START, CHAIN_S = (1, 2, 4, 8, 16, 32), 7, 64, 0.1  # sequences, further passes, context, seconds
SLOW = 0.25  # seconds: beside which compiling kernels is nothing
DENSITIES = (4, 2, 1)  # how closely widths and mixes are measured, as time allows
SEED = 1

Slices = list[tuple[int, int, bool]]  # start, length, whether it yields a token
Progress = Callable[[int, int], None]  # runs done, runs in all


@dataclass(slots=True)
class _Step:
    slices: Slices
    measured: Measured


def profile(
    runner: ModelRunner,
    *,
    max_tokens: int,
    max_batch: int,
    quantization: str = "none",
    seconds: float = 120.0,
    progress: Progress = lambda done, total: None,
) -> Profile:
    """Measures steps of up to `max_tokens` tokens and `max_batch` decodes for about `seconds`.

    More where every step's fewest runs need more (a model of 1 B parameters on two cores: minutes). Raises ValueError
    where the KV pool cannot hold such a step, RuntimeError where a step fails.
    """
    info = runner.info
    max_tokens = min(max_tokens, info.context - 1)
    if max_tokens < 2 or info.num_blocks * info.block_size < 2 * max_tokens:
        raise ValueError(
            f"num-blocks: {info.num_blocks} KV blocks of {info.block_size} tokens are too few to profile steps of "
            f"{max_tokens} tokens; lower token-budget or give more memory"
        )
    bench = Bench(runner)
    bench.run([(0, max_tokens, True)])
    widest = bench.run([(0, max_tokens, True)])
    density = next(d for d in DENSITIES if d == 1 or _round_seconds(d, max_tokens, widest) * 4 <= seconds)
    rng = Random(SEED)
    widths = sweep_widths(max_tokens, 4 * density)
    sweep = [_step([(0, width, True)]) for width in widths]
    mixes = [_step(_mix(rng, rng.choice(widths), max_batch, runner)) for _ in range(20 * density)]
    held_out = [_step(_mix(rng, rng.randint(1, max_tokens), max_batch, runner)) for _ in range(10 * density)]
    bench.measure([*sweep, *mixes, *held_out], seconds, rng, progress)
    whole = summarize(
        [step.measured for step in sweep],
        [step.measured for step in mixes],
        [step.measured for step in held_out],
        roofline(runner, quantization),
    )
    return replace(whole, chained=chained(runner, max_batch))


def chained(runner: ModelRunner, max_batch: int) -> dict[int, float]:
    """`Profile.chained`, where passes of this model can be one call."""
    chain = chain_of(runner.decoder, runner.cache, np.zeros(1, np.int64))
    if chain is None:
        return {}
    size, found = runner.info.block_size, dict[int, float]()
    for rows in CHAINED:
        links = {
            draws: [
                Link(CHAIN_START, [5], draws, range(blocks * row, blocks * (row + 1)), row, 0, (1.0, 1.0, 0.0, 0))
                for row in range(rows)
            ]
            for draws in (1, 1 + CHAIN)
            for blocks in [-(-(CHAIN_START + 1 + CHAIN) // size)]
        }
        if rows > max_batch or links[1][-1].blocks.stop > runner.info.num_blocks:
            break
        seconds = {draws: Measured(StepShape()) for draws in links}
        chain.draw(links[1], True)  # not counted
        begun = perf_counter()
        while len(seconds[1].seconds) < LEAST_RUNS or perf_counter() - begun < CHAIN_S:
            for draws, some in seconds.items():
                begin = perf_counter()
                chain.draw(links[draws], True)
                some.seconds.append(perf_counter() - begin)
        short, long = (some.low for some in seconds.values())
        found[rows] = max(0.0, long - short) / CHAIN
        if rows == 1:
            found[0] = max(0.0, short - found[1])
    return found


def roofline(runner: ModelRunner, quantization: str) -> Roofline:
    """The model's sizes over what the device gives now. A token computes in its own experts only."""
    decoder, config = runner.decoder, runner.decoder.config
    dtype = torch.bfloat16 if quantization == "bfloat16" and HAS_BF16 else decoder.dtype
    token_flop, emit_flop = operations(config)
    expert_bytes = sum(
        config.layer_bytes(layer, quantization) - config.layer_bytes(layer, quantization, experts=0)
        for layer in range(config.layers)
    )
    read = config.weight_bytes(quantization)
    return Roofline(
        weight_bytes=read,
        token_flop=token_flop,
        emit_flop=emit_flop,
        pair_flop=4 * (config.layers - 1) * config.heads * config.head_dim,
        kv_bytes=runner.cache.token_bytes,
        bandwidth=machine.bandwidth(decoder.device),
        peak=machine.int8_gemm_peak() if quantization == "int8" else machine.gemm_peak(decoder.device, dtype),
        expert_bytes=expert_bytes,
        expert_share=config.experts_per_token / config.experts if config.sparse else 1.0,
        working_bytes=runner.info.working_bytes,
        table_bytes=runner.info.weight_bytes - read,
    )


def operations(config: ModelConfig) -> tuple[int, int]:
    """Two a weight that a token meets: of the last layer queries, keys and values; and the rest and the head, where it
    is read."""
    weights = rest = 0
    for layer in range(config.layers):
        weights += rest
        heads, *others = (rows * columns for rows, columns in config.layer_matrices(layer, config.experts_per_token))
        weights, rest = weights + heads, sum(others) + config.hidden * config.experts * (layer in config.sparse)
    return 2 * weights, 2 * (rest + config.hidden * config.vocab_size)


def _round_seconds(density: int, max_tokens: int, widest: float) -> float:
    """About what one run of every step takes; narrow steps take a tenth of the widest at least."""
    widths = sweep_widths(max_tokens, 4 * density)
    return widest * (sum(max(0.1, width / max_tokens) for width in widths) + 0.6 * 30 * density)


def _step(slices: Slices) -> _Step:
    shape = StepShape()
    for item in slices:
        shape = shape.add(*item)
    return _Step(slices, Measured(shape))


def _mix(rng: Random, width: int, max_batch: int, runner: ModelRunner) -> Slices:
    """A step of this width as it comes up in serving: decodes at contexts, chunks of new and of long prompts."""
    info = runner.info
    spare = info.num_blocks - -(-width // info.block_size) - 2 * MOST_CHUNKS
    most = max(0, min(width, max_batch, spare // 2))
    decodes = rng.choice((0, most, int(most ** rng.random()), int(most ** rng.random())))
    chunks, rest = [], width - decodes
    while rest:
        chunks.append(rest if len(chunks) + 1 == MOST_CHUNKS or rng.random() < 0.5 else rng.randint(1, rest))
        rest -= chunks[-1]
    lengths = [1] * decodes + chunks
    room = info.num_blocks - sum(-(-length // info.block_size) + 1 for length in lengths)
    longest = max(1, min(room * info.block_size // len(lengths), info.context - max(lengths), LONGEST))
    slices = []
    for index, length in enumerate(lengths):
        start = int(longest ** rng.random()) if index < decodes or rng.random() < 0.6 else 0
        slices.append((start, length, index + 1 < len(lengths) or index < decodes or rng.random() < 0.5))
    return slices


class Bench:
    """Runs steps on an engine, a worker's part too. The keys and values that they read are whatever the pool holds."""

    def __init__(self, runner: Engine) -> None:
        self.runner = runner
        self.tokens = array("q", Random(SEED).choices(range(runner.info.vocab_size), k=runner.info.context + 1))
        self.params = SamplingParams(max_tokens=1 << 30, temperature=0.0, ignore_eos=True)

    def run(self, slices: Slices) -> float:
        """Seconds of a step among its like: short steps run several times in a row, and the last one counts.

        In serving a decode follows decodes. After a wide step it takes longer, since the caches hold other things: a
        small model's first six decodes took 1.6, 1.3, 1.1, 1.0, 0.9 and 0.8 ms.
        """
        begin = perf_counter()  # around a GPU's steps lies more than in them
        while True:
            seconds = self.once(slices)
            if perf_counter() - begin >= SETTLED:
                return seconds

    def once(self, slices: Slices) -> float:
        """Seconds of the forward pass and of sampling."""
        info, free = self.runner.info, 0
        new, work = [], []
        for index, (start, length, emits) in enumerate(slices):
            end = start + length
            blocks = list(range(free, free + -(-end // info.block_size)))
            free += len(blocks)
            known = end if emits else end + 1
            new.append(NewSequence(index, self.tokens[:known], known, self.params))
            work.append(SliceWork(index, start, length, emits, 0, blocks))
        outputs, forward_s, sample_s = self.runner.step(new, work, [])
        self.runner.step([], [], range(len(slices)))
        failed = next((output.error for output in outputs if output.error), None)
        if failed:
            raise RuntimeError(f"a step of {len(slices)} slices failed while profiling: {failed}")
        return forward_s + sample_s

    def measure(self, steps: list[_Step], seconds: float, rng: Random, progress: Progress) -> None:
        """Runs every step LEAST_RUNS to MOST_RUNS times, as often as its share of `seconds` allows, in turns."""
        share, runs, planned = seconds / len(steps), [], len(steps) * (1 + MOST_RUNS)
        for done, step in enumerate(steps):
            first = self.run(step.slices)
            if first > SLOW:
                step.measured.seconds.append(first)
            runs.append(min(MOST_RUNS, max(LEAST_RUNS, int(share / max(first, SETTLED)))))
            progress(done, planned)
        done, planned = len(steps), len(steps) + sum(runs)
        for turn in range(MOST_RUNS):
            now = [
                step for step, count in zip(steps, runs, strict=True)
                if (turn + 1) * count // MOST_RUNS > turn * count // MOST_RUNS
            ]  # fmt: skip
            rng.shuffle(now)
            for step in now:
                step.measured.seconds.append(self.run(step.slices))
                done += 1
                progress(done, planned)
