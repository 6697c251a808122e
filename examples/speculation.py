"""What drafts of the built-in pair are worth here, measured and by the formula of Leviathan et al. (2023),
(1 - a^(K+1)) / ((1 - a) (K c + T(K+1) / T(1))), with an acceptance of a: python examples/speculation.py"""

from collections import Counter

from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import resolve
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.engine.runner import ModelRunner
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.offline import Offline

K, path, options = 3, resolve("builtin:coder"), {"max_batch_tokens": 64, "max_batch": 1, "num_blocks": 64}
engine = ModelRunner.load(path, drafter=str(resolve("builtin:coder-draft")), draft_quantization="int8", **options)
prompt = Tokenizer.load(path).encode("import os\n\n\ndef read(path):\n    ", True)


def decode(most: int, seen: Counter) -> list[int]:
    def on_step(batch, outputs, forward_s, sample_s):
        for one in outputs[: batch.num_decodes]:  # not the prompt's
            seen.update(steps=1, tokens=len(one.tokens), seconds=forward_s + sample_s, drafting=engine.draft_s)
            seen.update(kept=one.num_accepted, tried=min(one.num_draft, one.num_accepted + 1))

    job = Offline(engine, GroupConfig(scheduler=SchedulerConfig(num_blocks=64, block_size=engine.info.block_size)))
    job.on_step = on_step
    params = SamplingParams(max_tokens=512, temperature=0.8, seed=1, ignore_eos=True, max_draft_tokens=most)
    return job.generate([prompt], [params])[0].tokens


decode(K, Counter())  # warms up
same = decode(0, plain := Counter()) == decode(K, seen := Counter())
one, a = plain["seconds"] / plain["steps"], seen["kept"] / seen["tried"]
drafting, verifying = seen["drafting"] / seen["steps"] / one, (seen["seconds"] - seen["drafting"]) / seen["steps"] / one
tokens = (1 - a ** (K + 1)) / (1 - a)
print(f"acceptance {a:.3f}; K c = {drafting:.2f}, T(K+1) / T(1) = {verifying:.2f}; the same answer: {same}")
print(f"tokens a step: {tokens:.3f} by the formula, {seen['tokens'] / seen['steps']:.3f} measured")
speedup = plain["seconds"] / plain["tokens"] / (seen["seconds"] / seen["tokens"])
print(f"speed-up: {tokens / (drafting + verifying):.2f} by the formula, {speedup:.2f} measured")
