"""transformers: `generate`, requests of different lengths one by one; or, with `{"continuous": true}`, its continuous
batching over a paged cache, without prefix sharing.
"""

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.child import THREADS, Tokens, serve

PAGE, PAGES = 256, 72  # room for the mixed workload
BATCH = 32


def greedy(count: int) -> GenerationConfig:
    """Exactly so many tokens: no token ends the text."""
    return GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


class Static:
    """`generate`: a batch where all requests have the same lengths, one request after the other where not."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.about = f"transformers {transformers.__version__}, generate; different lengths one by one"

    def run(self, prompts: list[list[int]], outputs: list[int]) -> Tokens:
        result = Tokens(len(prompts))
        same = len({(len(prompt), count) for prompt, count in zip(prompts, outputs, strict=True)}) == 1
        together = list(range(len(prompts)))
        for part in [together] if same else [[i] for i in together]:
            ids = torch.tensor([prompts[i] for i in part])
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=greedy(outputs[part[0]]),
                streamer=Arrivals(result, part),
            )
        return result


class Arrivals(BaseStreamer):
    def __init__(self, result: Tokens, requests: list[int]) -> None:
        self.result, self.requests, self.prompt = result, requests, True

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt:  # `generate` begins with what it was given
            for request, token in zip(self.requests, value.tolist(), strict=True):
                self.result.add(request, [token])
        self.prompt = False

    def end(self) -> None:
        pass


class Continuous:
    def __init__(self, model: PreTrainedModel, budget: int) -> None:
        self.model = model
        self.config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=PAGES,
            max_batch_tokens=budget,
            max_requests_per_batch=BATCH,
            allow_block_sharing=False,
        )
        self.about = f"transformers {transformers.__version__}, continuous batching, {budget} tokens a step"

    def run(self, prompts: list[list[int]], outputs: list[int]) -> Tokens:
        with self.model.continuous_batching_context_manager(
            generation_config=greedy(max(outputs)), continuous_batching_config=self.config
        ) as manager:
            result = Tokens(len(prompts))
            for i, (prompt, count) in enumerate(zip(prompts, outputs, strict=True)):
                manager.add_request(prompt, str(i), count, record_timestamps=True)
            for _ in prompts:
                done = manager.get_result()
                assert not done.error, done.error
                for token, now in zip(done.generated_tokens, done.timestamps, strict=True):
                    result.add(int(done.request_id), [token], now)
        return result


def load(checkpoint: Path, precision: str, options: dict, cache: Path) -> Static | Continuous:
    if precision != "fp32":
        raise ValueError("transformers has no 8-bit weights on CPUs without another package")
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return Continuous(model, options["budget"]) if "budget" in options else Static(model)


if __name__ == "__main__":
    serve(load)
