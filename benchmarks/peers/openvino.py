"""OpenVINO GenAI: the continuous batching pipeline, or the single-stream one (SDPA) with `{"pipeline": "llm"}`.

fp32 is computed in float32, and so is bf16, whose weights it takes as float16, unless `{"hint": "bf16"}` says as what
else. int8: 8-bit weights by `optimum-cli
export openvino --weight-format int8` (NNCF, asymmetric, by output channel); activations are quantized or rounded, and
the KV cache is kept, in the precision that the runtime takes by itself. Prefix caching is off.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.child import THREADS, Tokens, converted, serve


def export(checkpoint: Path, precision: str, out: Path) -> None:
    program = Path(sys.executable).with_name("optimum-cli")
    what = ["--task", "text-generation-with-past", "--disable-convert-tokenizer"]
    what += ["--weight-format", "fp16" if precision == "bf16" else precision]
    subprocess.run([program, "export", "openvino", "-m", checkpoint, *what, out], check=True)


def sampling(tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = tokens
    config.ignore_eos, config.do_sample = True, False
    return config


def properties(precision: str, hint: str = "f32") -> dict:
    computed = {"INFERENCE_PRECISION_HINT": hint} if precision != "int8" else {}
    return {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS} | computed


class Batching:
    """Steps of at most `budget` tokens, prompts in chunks."""

    def __init__(self, model: Path, precision: str, budget: int, hint: str) -> None:
        limits = genai.SchedulerConfig()
        limits.max_num_batched_tokens, limits.enable_prefix_caching = budget, False
        self.pipeline = genai.ContinuousBatchingPipeline(model, limits, "CPU", properties(precision, hint))
        how = f"{budget} tokens a step, LATENCY hint" + ("" if precision == "int8" else f", computed in {hint}")
        self.about = f"openvino-genai {genai.__version__}, continuous batching, {how}"

    def run(self, prompts: list[list[int]], outputs: list[int]) -> Tokens:
        result = Tokens(len(prompts))
        handles = [
            self.pipeline.add_request(i, openvino.Tensor(np.array([prompt], np.int64)), sampling(count))
            for i, (prompt, count) in enumerate(zip(prompts, outputs, strict=True))
        ]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for i, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        result.add(i, output.generated_ids)
        return result


class SingleStream:
    """One request at a time with the stateful model and its own attention."""

    def __init__(self, model: Path, precision: str) -> None:
        options = properties(precision) | {"ATTENTION_BACKEND": "SDPA"}
        self.pipeline = genai.LLMPipeline(model, "CPU", **options)
        self.about = f"openvino-genai {genai.__version__}, LLMPipeline with SDPA, LATENCY hint; requests one by one"

    def run(self, prompts: list[list[int]], outputs: list[int]) -> Tokens:
        result = Tokens(len(prompts))
        for i, (prompt, count) in enumerate(zip(prompts, outputs, strict=True)):
            arrived = Arrivals(lambda ids, i=i: result.add(i, ids))
            ids = openvino.Tensor(np.array([prompt], np.int64))
            self.pipeline.generate(ids, sampling(count), arrived)
        return result


class Arrivals(genai.StreamerBase):
    def __init__(self, take) -> None:
        super().__init__()
        self.take = take

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        self.take(token if isinstance(token, list) else [token])
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def load(checkpoint: Path, precision: str, options: dict, cache: Path) -> Batching | SingleStream:
    model = converted(cache, f"{checkpoint.name}-{precision}", lambda out: export(checkpoint, precision, out))
    if options.get("pipeline") == "llm":
        return SingleStream(model, precision)
    return Batching(model, precision, options["budget"], options.get("hint", "f32"))


if __name__ == "__main__":
    serve(load)
