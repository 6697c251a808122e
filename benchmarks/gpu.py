"""SARATHI's tables on a GPU: the floor, decodes on chunks, every policy, and transformers on the same machine.

LLaMA's 13B and 33B shapes in bfloat16, with random weights made on the device. The points are the paper's (Tables 2 and
4). A test runs it on the host with a tiny shape.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import sarathi_tables
from paceline.engine import load_plan, machine
from paceline.engine.config import ModelError
from paceline.engine.kv_cache import available_bytes
from paceline.engine.profiler import Bench, operations
from paceline.engine.runner import ModelRunner
from paceline.engine.weights import Checkpoint


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    points: tuple[tuple[int, int, float, int], ...]  # L, B, P:D, tokens of a step: whole tiles (SARATHI, section 4.4)
    vocabulary: int = 32000
    context: int = 1024  # of decodes
    batches: tuple[int, ...] = (1, 8, 32)
    ratios: tuple[float, ...] = ()  # P:D, at the first point's L and B
    widths: tuple[int, ...] = ()  # tokens of a step


SHAPES = {
    "llama-13b": Shape(
        5120, 13824, 40, 40,
        ((1024, 6, 50, 256), (2048, 6, 50, 256), (3072, 6, 50, 256), (1024, 11, 50, 512), (2048, 11, 50, 512)),
        ratios=(10, 50, 200), widths=(128, 256, 512, 1024),
    ),
    "llama-33b": Shape(
        6656, 17920, 60, 52, ((1024, 10, 28, 256), (2048, 5, 63, 256), (3072, 3, 127, 256), (1024, 11, 50, 512)),
    ),
}  # fmt: skip
CASES = list(SHAPES)
STEPS, ROUNDS = 20, 1


class RandomWeights(Checkpoint):
    """Has every tensor that it is asked for, on the device: files of 26 and 65 GB would be read for nothing."""

    device = "cuda"

    def __init__(self, folder: Path) -> None:
        self.folder, self.generator = folder, torch.Generator(self.device).manual_seed(0)

    @property
    def total_bytes(self) -> int:
        return 1

    def view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return values.fill_(1.0) if "norm" in name else values.normal_(0.0, 0.02, generator=self.generator)

    def nbytes(self, name: str) -> int:
        return 0

    def release(self, name: str) -> None:
        pass

    def refuse_unused(self, *_: object) -> None:
        pass


def run(model: str) -> dict:
    if not torch.cuda.is_available():
        raise SystemExit("gpu: needs a CUDA device")
    about = torch.cuda.get_device_properties(0)
    return {"gpu": about.name, "gpu_memory_gib": round(about.total_memory / 2**30, 1)} | measure(SHAPES[model], "cuda")


def measure(shape: Shape, device: str) -> dict:
    """Ours, then transformers', on a device of this name."""
    rates = {"bandwidth": machine.bandwidth(device), "peak": machine.gemm_peak(device, torch.bfloat16)}
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    result = {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    result["ours"] = ours(config, shape, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    result[f"transformers {transformers.__version__}"] = theirs(config, shape, device)
    weights = result["ours"]["weight_bytes"]
    for batch in result["ours"]["decode_ms"]:
        least = weights + batch * shape.context * result["ours"]["token_bytes"]
        seconds = 1e-3 * result["ours"]["decode_ms"][batch]
        result["ours"].setdefault("decode_share_of_floor", {})[batch] = round(least / rates["bandwidth"] / seconds, 3)
    flop = result["ours"]["token_flop"] * shape.context
    result["ours"]["prompt_share_of_peak"] = round(flop / rates["peak"] / (1e-3 * result["ours"]["prompt_ms"]), 3)
    return result


def ours(config: LlamaConfig, shape: Shape, device: str) -> dict:
    longest, widest = (max(sizes) for sizes in list(zip(*shape.points, strict=True))[:2])
    prompts = max(length * batch for length, batch, *_ in shape.points)  # request-level takes all in one step
    checkpoint, load_plan.Checkpoint = load_plan.Checkpoint, RandomWeights
    RandomWeights.device = device
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config.to_dict()))
            runner = ModelRunner.load(
                folder, device=device, dtype="bfloat16", max_batch_tokens=prompts,
                max_batch=max(*shape.batches, 2 * widest), context=longest + 1,
            )  # fmt: skip
    except ModelError as error:
        raise SystemExit(f"gpu: {error}") from error
    finally:
        load_plan.Checkpoint = checkpoint
    info = runner.info
    result: dict = {
        "weight_bytes": runner.decoder.config.weight_bytes("bfloat16"),  # without the embedding, of which it reads rows
        "token_bytes": runner.cache.token_bytes, "block_size": info.block_size,
        "token_flop": operations(runner.decoder.config)[0],
        "graphs": runner.decoder.graphs is not None, "num_blocks": info.num_blocks,
    }  # fmt: skip
    result |= timed(shape, lambda batch: Ours(runner, batch, shape.context))
    if shape.context >= 1024:
        result["decode_cost"] = sarathi_tables.decode_cost(runner, 6)
    print(f"  {result}", flush=True)
    fit = [one for one in shape.points if 2 * one[1] * (one[0] // info.block_size + 1) <= info.num_blocks]

    def compare(length: int, batch: int, ratio: float, width: int, policies: tuple[str, ...]) -> dict:
        """`width` tokens are a full batch's decodes and a chunk."""
        chunk = width - (batch - 1)
        return sarathi_tables.compare(runner, length, batch, ratio, chunk, policies, ROUNDS)

    result["policies"] = [compare(*point, sarathi_tables.POLICIES) for point in fit]
    length, batch, ratio, width = shape.points[0]
    some = (sarathi_tables.BASELINE, "sarathi_2023", "paceline")
    result["ratio_sweep"] = [compare(length, batch, one, width, some) for one in shape.ratios]
    result["chunk_sweep"] = [
        compare(length, batch, ratio, one, some) | sarathi_tables.prompt_alone(runner, one, length, ROUNDS)
        for one in shape.widths
    ]
    result["points_without_room"] = [list(point) for point in shape.points if point not in fit]
    runner.release()
    return result


def theirs(config: LlamaConfig, shape: Shape, device: str) -> dict:
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    return timed(shape, lambda batch: Theirs(model, batch, shape.context, device))


def timed(shape: Shape, make: Callable[[int], "Ours | Theirs"]) -> dict:
    """Milliseconds of a prompt of `context` tokens, and of decodes behind such prompts."""
    out: dict = {"prompt_ms": round(1e3 * min(make(1).prompt() for _ in range(3)), 3), "decode_ms": {}}
    for batch in shape.batches:
        try:
            runs = make(batch)
        except MemoryError:
            continue
        steps = [runs.step() for _ in range(STEPS)]
        out["decode_ms"][batch] = round(1e3 * median(steps[2:]), 3)
    return out


class Ours:
    """Steps whose keys and values are whatever the pool holds."""

    def __init__(self, runner: ModelRunner, batch: int, context: int) -> None:
        self.bench, self.batch, self.context = Bench(runner), batch, context
        if batch * -(-(context + 1) // runner.info.block_size) > runner.info.num_blocks:
            raise MemoryError

    def prompt(self) -> float:
        return self.bench.once([(0, self.context, True)])

    def step(self) -> float:
        return self.bench.once([(self.context, 1, True)] * self.batch)


class Theirs:
    """A forward pass, the likeliest token of each sequence, and so on: what `generate` does, without its checks."""

    def __init__(self, model: transformers.PreTrainedModel, batch: int, context: int, device: str) -> None:
        self.model, self.batch, self.context, self.device = model, batch, context, device
        self.cache, self.tokens = None, torch.empty(0)
        config = model.config
        heads = config.num_key_value_heads / config.num_attention_heads
        token = 2 * 2 * config.num_hidden_layers * heads * config.hidden_size
        if 2 * batch * context * token > available_bytes(device):  # the cache grows by copying
            raise MemoryError

    def prompt(self) -> float:
        ids = torch.tensor([[300 + i % 7000 for i in range(self.context)]] * self.batch, device=self.device)
        return self._forward(ids, None)

    def step(self) -> float:
        """The first one needs the prompts of all."""
        if self.cache is None:
            self.prompt()
        return self._forward(self.tokens, self.cache)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, cache: object) -> float:
        machine.finish(self.device)
        begin = time.perf_counter()
        result = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.cache, self.tokens = result.past_key_values, result.logits[:, -1].argmax(-1, keepdim=True)
        machine.finish(self.device)
        return time.perf_counter() - begin
