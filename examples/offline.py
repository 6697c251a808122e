"""Several prompts in this process, each with its own sampling parameters; what is drafted changes no answer.

    python examples/offline.py
"""

from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import resolve
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.engine.runner import ModelRunner
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.offline import Offline

PROMPTS = {
    "import os\nimport ": {"temperature": 0.0},
    "def __init__(self, ": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "for key, value in ": {"temperature": 1.0, "min_p": 0.05, "stop_token_ids": (0,), "seed": 3},
}
path = resolve("builtin:coder")
tokenizer = Tokenizer.load(path)
engine = ModelRunner.load(path, max_batch_tokens=256, max_batch=8, num_blocks=128)


def generate(most: int) -> tuple[list[str], int]:
    """All answers, and how often a sequence was in a step, with at most so many tokens drafted by n-grams in each."""
    limits = SchedulerConfig(token_budget=256, max_batch=8, num_blocks=128, block_size=engine.info.block_size)
    job, turns = Offline(engine, GroupConfig(scheduler=limits), tokenizer.eos_ids), []
    job.on_step = lambda batch, *_: turns.extend(batch.requests)
    params = [SamplingParams(max_tokens=48, max_draft_tokens=most, **own) for own in PROMPTS.values()]
    outputs = job.generate([tokenizer.encode(text, True) for text in PROMPTS], params)
    return [tokenizer.decode(output.tokens, True) for output in outputs], len(turns)


(answers, turns), (drafted, fewer) = generate(0), generate(4)
for prompt, answer in zip(PROMPTS, answers, strict=True):
    print(f"--- {prompt}{answer}")
print(f"--- {turns} turns, {fewer} with drafts; the same answers: {answers == drafted}")
