"""vLLM's CPU backend: steps of `budget` tokens, or of its own default where no budget is given; no prefix caching.

int8: weights by output channel, activations by token as they come (W8A8, compressed-tensors); the head stays in
float32, as it must in that format; all else is float32 too, or bfloat16 on processors with AMX, where its products in
int8 take nothing wider. bf16: all is. Its allocator of choice, tcmalloc, is not on PyPI: it is taken from the system or
from CACHE/lib.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from benchmarks.peers.child import THREADS, Tokens, converted, serve

KV_GIB, BATCH, LONGEST = 2, 32, 2304  # LONGEST: tokens of one request
SYSTEM = Path("/usr/lib/x86_64-linux-gnu")
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}


def quantize(checkpoint: Path, out: Path) -> None:
    """Writes the checkpoint with its linear layers' weights as int8 and a scale a row."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((checkpoint / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def prepare(cache: Path) -> None:
    """Starts this program anew with the libraries and the environment that vLLM wants before Python begins."""
    if "VLLM_CACHE_ROOT" in os.environ:
        return
    tcmalloc = [*cache.glob("lib/libtcmalloc_minimal.so*"), *SYSTEM.glob("libtcmalloc_minimal.so*")]
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    settings = {
        "LD_PRELOAD": ":".join(map(str, [*tcmalloc[:1], openmp])),
        "OMP_NUM_THREADS": str(THREADS),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache / "compiled"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm", *sys.argv[1:]], os.environ | settings)


class VLLM:
    """The engine in this process, stepped by hand."""

    def __init__(self, model: Path, precision: str, options: dict) -> None:
        import torch
        import vllm

        halves = precision == "bf16" or (precision == "int8" and torch.cpu._is_amx_tile_supported())
        dtype = "bfloat16" if halves else "float32"
        llm = vllm.LLM(
            str(model),
            dtype=dtype,
            enable_prefix_caching=False,
            max_model_len=LONGEST,
            max_num_seqs=BATCH,
            max_num_batched_tokens=options.get("budget"),
            skip_tokenizer_init=True,
        )
        self.engine = llm.llm_engine
        self.runs = 0
        budget = self.engine.vllm_config.scheduler_config.max_num_batched_tokens
        tcmalloc = "with" if "tcmalloc" in os.environ["LD_PRELOAD"] else "WITHOUT"
        self.about = f"vllm {vllm.__version__}, {dtype}, {budget} tokens a step, {tcmalloc} tcmalloc, libiomp5"

    def run(self, prompts: list[list[int]], outputs: list[int]) -> Tokens:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.runs += 1
        result = Tokens(len(prompts))
        for i, (prompt, count) in enumerate(zip(prompts, outputs, strict=True)):
            sampling = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
            )
            self.engine.add_request(f"{self.runs}-{i}", {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                result.add(int(output.request_id.split("-")[1]), list(output.outputs[0].token_ids))
        return result


def load(checkpoint: Path, precision: str, options: dict, cache: Path) -> VLLM:
    if precision == "int8":
        checkpoint = converted(cache, f"{checkpoint.name}-int8", lambda out: quantize(checkpoint, out))
    return VLLM(checkpoint, precision, options)


if __name__ == "__main__":
    prepare(Path(sys.argv[-1]))
    serve(load)
