"""The engine against transformers' `generate`, request by request: mixed workload and batch-1 decode, fp32.

Both run in one process and take turns, so that a machine that drifts slows both: transformers gets its requests in
parts, the whole batch runs on our engine between them. Floors are the bytes and operations that must be over what the
machine gave in this run.
"""

import os
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks import workload
from benchmarks.checkpoints import checkpoint
from benchmarks.machine import bandwidth, gemm_peak
from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.engine.config import ModelConfig
from paceline.engine.profiler import operations
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline

PARTS = 2
EVERY = {"llama-3.2-1b": 4}  # of the large model both get every 4th request: all take transformers nine minutes
DECODE_PROMPT, DECODE_TOKENS, DECODE_ROUNDS = 64, 24, 3


class Peer:
    """transformers' own generation, one request at a time."""

    def __init__(self, path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run(self, prompt: list[int], count: int) -> float:
        """Seconds for exactly `count` greedy tokens."""
        ids = torch.tensor([prompt])
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        assert out.shape[1] == len(prompt) + count
        return time.perf_counter() - begin


class Ours:
    """Our engine in this process, in hybrid batches."""

    def __init__(self, path, budget: int = 512) -> None:
        self.runner = ModelRunner.load(path, max_batch_tokens=budget, max_batch=64, num_blocks=1800)
        info = self.runner.info
        limits = SchedulerConfig(budget, 64, info.block_size, info.num_blocks)
        self.config = GroupConfig(scheduler=limits)

    def run(self, prompts: list[list[int]], counts: list[int]) -> float:
        """Seconds until all are done; a fresh scheduler each time, so that no prefix is cached."""
        offline = Offline(self.runner, self.config)
        begin = time.perf_counter()
        outputs = offline.generate(prompts, [workload.greedy(count) for count in counts])
        seconds = time.perf_counter() - begin
        assert [len(o.tokens) for o in outputs] == counts
        return seconds


def decode_rate(run, prompt: list[int]) -> float:
    """Tokens/s of decoding at batch 1: the time of many tokens less that of one."""
    return (DECODE_TOKENS - 1) / (run(prompt, DECODE_TOKENS) - run(prompt, 1))


def run(model: str) -> dict:
    path = checkpoint(model)
    peer, ours = Peer(path), Ours(path)
    every = EVERY.get(model, 1)
    prompts, counts = workload.prompts(peer.model.config.vocab_size)[::every], workload.outputs()[::every]
    peer.run(prompts[1], 4)
    ours.run(prompts[1:2], [4])

    rates = []
    for _ in range(DECODE_ROUNDS):
        prompt = prompts[0][:DECODE_PROMPT]
        rates.append((decode_rate(peer.run, prompt), decode_rate(lambda p, n: ours.run([p], [n]), prompt)))
    rates.sort(key=lambda pair: pair[1] / pair[0])
    peer_rate, our_rate = rates[DECODE_ROUNDS // 2]

    peer_seconds, our_seconds = 0.0, []
    for part in range(PARTS):
        for index in range(part, len(prompts), PARTS):
            peer_seconds += peer.run(prompts[index], counts[index])
            print(f"  transformers: request {index}, {peer_seconds:.0f} s so far", flush=True)
        our_seconds.append(ours.run(prompts, counts))
        print(f"  paceline: all {len(prompts)} in {our_seconds[-1]:.0f} s", flush=True)
    theirs, mine = sum(counts) / peer_seconds, sum(counts) / (sum(our_seconds) / len(our_seconds))
    return {
        "mixed_requests": len(prompts),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "mixed_output_tokens_s": {"transformers": round(theirs, 2), "paceline": round(mine, 2)},
        "mixed_ratio": round(mine / theirs, 2),
        "mixed_seconds_paceline": [round(s, 1) for s in our_seconds],
        "decode_batch_1_tokens_s": {"transformers": round(peer_rate, 2), "paceline": round(our_rate, 2)},
        "decode_batch_1_ratio": round(our_rate / peer_rate, 2),
        "floor": floor(ours.runner.decoder.config, peer.model, our_rate, sum(our_seconds) / len(our_seconds), every),
    }


def floor(config: ModelConfig, model, decode_rate: float, mixed_seconds: float, every: int) -> dict:
    """What must move and be computed: every weight once a decoded token; `operations` for each token of the mix, or of
    so many-th requests of it."""
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    head = model.get_output_embeddings().weight.numel()
    weights = body + head if model.config.tie_word_embeddings else body
    read, compute = bandwidth(), gemm_peak()
    lengths = workload.LENGTHS[::every]
    emitted = sum(output for _, output in lengths)
    tokens = sum(length for length, _ in lengths) + emitted - len(lengths)
    each, read_one = operations(config)
    mixed = (each * tokens + read_one * emitted) / compute
    return {
        "weight_bytes": 4 * weights,
        "read_gb_s": round(read / 1e9, 1),
        "gemm_gflop_s": round(compute / 1e9, 1),
        "decode_batch_1_tokens_s": round(read / (4 * weights), 2),
        "decode_batch_1_fraction": round(decode_rate * 4 * weights / read, 2),
        "mixed_seconds": round(mixed, 1),
        "mixed_fraction": round(mixed / mixed_seconds, 2),
    }
