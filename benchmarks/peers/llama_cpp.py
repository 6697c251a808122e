"""llama.cpp through its C interface: steps of at most `budget` tokens, running decodes first, then prompts in chunks.

That is what its server does; the Python package has no such loop of its own. KV in float16, its default; one cache for
each sequence, or one for all with `{"unified": true}`. int8 is q8_0: blocks of 32 weights, activations quantized too.
"""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

from benchmarks.peers.child import THREADS, Tokens, converted, serve
from benchmarks.peers.gguf_file import convert

UBATCH = 512  # tokens that are computed at once; its default
PAD = 256  # what it rounds a cache up to


class LlamaCpp:
    def __init__(self, path: Path, budget: int, unified: bool) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        assert self.model, f"{path} was not loaded"
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(budget, 0, 1)
        self.budget, self.unified = budget, unified
        cache = "one KV cache" if unified else "a KV cache per sequence"
        self.about = f"llama-cpp-python {llama_cpp.__version__}, {budget} tokens a step, {cache}, flash attention"

    def context(self, lengths: list[int]) -> ctypes.c_void_p:
        """With room for sequences of these lengths."""
        options = llama_cpp.llama_context_default_params()
        room = [-(-length // PAD) * PAD for length in lengths]
        options.n_ctx = sum(room) if self.unified else max(room) * len(room)
        options.n_seq_max, options.kv_unified = len(room), self.unified
        options.n_batch, options.n_ubatch = self.budget, min(self.budget, UBATCH)
        options.n_threads = options.n_threads_batch = THREADS
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = llama_cpp.llama_init_from_model(self.model, options)
        assert context, "no memory for the KV cache"
        return context

    def run(self, prompts: list[list[int]], outputs: list[int]) -> Tokens:
        context = self.context([len(prompt) + count for prompt, count in zip(prompts, outputs, strict=True)])
        known, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
        result = Tokens(len(prompts))
        left = list(range(len(prompts)))
        while left:
            # Decodes first; prompts in the order of their arrival, which `sorted` keeps.
            order = sorted(left, key=lambda i: len(known[i]) - computed[i] > 1)
            last = self.fill(order, known, computed)
            assert llama_cpp.llama_decode(context, self.batch) == 0
            for i, row in last.items():
                logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), (self.vocabulary,))
                known[i].append(int(logits.argmax()))
                result.add(i, known[i][-1:])
                if len(result.tokens[i]) == outputs[i]:
                    left.remove(i)
                    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), i, -1, -1)
        llama_cpp.llama_free(context)
        return result

    def fill(self, order: list[int], known: list[list[int]], computed: list[int]) -> dict[int, int]:
        """Puts the next tokens of these sequences into the batch; the row of each one's last known token."""
        batch, last, row = self.batch, {}, 0
        for i in order:
            for position in range(computed[i], min(len(known[i]), computed[i] + self.budget - row)):
                batch.token[row], batch.pos[row] = known[i][position], position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, i
                batch.logits[row] = position + 1 == len(known[i])
                computed[i], row = position + 1, row + 1
            if computed[i] == len(known[i]):
                last[i] = row - 1
        batch.n_tokens = row
        return last


def load(checkpoint: Path, precision: str, options: dict, cache: Path) -> LlamaCpp:
    path = converted(cache, f"{checkpoint.name}-{precision}.gguf", lambda out: convert(checkpoint, precision, out))
    return LlamaCpp(path, options["budget"], options["unified"])


if __name__ == "__main__":
    serve(load)
