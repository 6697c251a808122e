"""The law of a tiny model's next tokens, by enumeration, and how far samples of the engine are from it.

The parameters are applied here once more, token by token in plain Python, to logits of `transformers`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline
from tests.engine.checkpoints import reference_logits
from tests.engine.schedules import Disturbed, forced

Context = tuple[int, ...]
BATCH, NUM_BLOCKS = 200, 1000
WIDE = 3000  # a budget of which decodes have room for five drafted tokens each while prompts wait
NARROW = dict(budget=100, every=1)  # cuts prompts, and preempts those that decode
DISTURBED = 0.1  # at least this share of the samples of narrow steps, each way
PROMPT = [1, 5, 2, 4, 3, 0, 5, 5, 2, 1, 4, 3]
REPETITIVE = [1, 5, 2, 4, 1, 5, 2, 4, 1, 5, 2, 4]  # something to look up
DRAFTED = slice(1, 4)  # of the answer: the first token comes with the prompt's last chunk


def tiny(path: Path, vocabulary: int, seed: int, layers: int = 2) -> LlamaForCausalLM:
    """A random checkpoint with logits that are far from flat; others of the same seed have the same first layers."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            generator = torch.Generator().manual_seed(seed + sum(name.encode()))
            if "norm" not in name:
                value.normal_(0.0, 1.4 / value.shape[-1] ** 0.5, generator=generator)
    model.save_pretrained(path)
    return model


def words(path: Path, tokens: str) -> Path:
    """Gives a checkpoint a tokenizer of one-letter words."""
    backend = Backend(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(path / "tokenizer.json"))
    return path


class Samples:
    """What a tiny model generates through the whole engine, and how often its sequences were disturbed meanwhile."""

    def __init__(
        self, folder: Path, draft: int, drafter: str = "", letters: str = "", by_block: bool = True,
        seeded: bool = False, prompt: Sequence[int] = PROMPT, seed: int = 1, budget: int = WIDE, every: int = 11,
        **changes: object,
    ) -> None:  # fmt: skip
        """A target of six tokens, and what drafts for it: its first layer as a model, of which tokens have these
        `letters` (the target's are abcdef), or a drafter. Before every so many steps a sequence is preempted."""
        target, model, text = folder / "target", folder / "draft", folder / "text"
        self.model = tiny(target, 6, seed)
        words(target, "abcdef")
        tiny(model, 6, seed, layers=1)
        words(model, letters or "abcdef")
        text.write_text(" ".join("abcdef"[token] for token in [*REPETITIVE, *PROMPT]))
        self.runner = ModelRunner.load(
            target, drafter={"": str(model), "trigram": f"trigram:{text}"}.get(drafter, drafter), threads=1,
            max_batch_tokens=WIDE, max_batch=BATCH, num_blocks=NUM_BLOCKS,
        )  # fmt: skip
        self.runner.by_block = by_block
        if self.runner.fused is not None:
            self.runner.fused.most = BATCH * (1 + draft)  # all steps are one call, as a server's are
        most = max(DRAFTED.stop, draft + 2)  # as few as let the first round after the prompt's draft them all
        self.params = SamplingParams(max_tokens=most, seeded=seeded, max_draft_tokens=draft, **changes)
        self.prompt, self.budget, self.every = prompt, budget, every
        self.tokens: list[Context] = []  # those that can be drafted
        self.laws: dict[int, Counter[Context]] = {}  # of so many of them
        self.accepted = self.cut = self.preempted = 0

    def draw(self, seeds: Iterable[int]) -> "Samples":
        limits = SchedulerConfig(token_budget=self.budget, max_batch=BATCH, num_blocks=NUM_BLOCKS)
        params = [replace(self.params, seed=seed) for seed in seeds]
        offline, disturbed = Offline(self.runner, GroupConfig(scheduler=limits)), Disturbed()
        forced(self.every)(offline.controller.groups[0].scheduler)

        def count(batch, outputs, *_):
            disturbed(batch)
            self.accepted += sum(output.num_accepted for output in outputs)

        offline.on_step = count
        self.tokens += [tuple(one.tokens[DRAFTED]) for one in offline.generate([self.prompt] * len(params), params)]
        self.cut += disturbed.cut
        self.preempted += disturbed.preempted
        return self

    def off(self, length: int = 3) -> float:
        """Standard deviations by which the joint law of so many drafted tokens is off."""
        if length not in self.laws:
            expected = self.laws[length] = Counter[Context]()
            for context, share in law(self.model, self.prompt, self.params, DRAFTED.start + length).items():
                expected[context[DRAFTED]] += share
        return surprise([tokens[:length] for tokens in self.tokens], self.laws[length])


def law(model: LlamaForCausalLM, prompt: Sequence[int], params: SamplingParams, length: int) -> dict[Context, float]:
    """The probabilities of the first `length` tokens behind the prompt, those that can happen."""
    found: dict[Context, float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for context, mass in found.items():
            logits = reference_logits(model, [*prompt, *context])[-1].double()
            for token, share in enumerate(probabilities(logits, prompt, context, params)):
                if share > 0:
                    longer[(*context, token)] = mass * share
        found = longer
    return found


def probabilities(
    logits: torch.Tensor, prompt: Sequence[int], generated: Context, params: SamplingParams
) -> list[float]:
    """What the next token is drawn from (order of vLLM: bias, penalties, temperature, min_p, top_k, top_p)."""
    scores = logits.tolist()
    for token, bias in params.logit_bias:
        scores[token] += bias
    if len(generated) < params.min_tokens:
        for token in params.stop_token_ids:
            scores[token] = -math.inf
    for token in {*prompt, *generated}:
        repeated = params.repetition_penalty
        scores[token] = scores[token] / repeated if scores[token] > 0 else scores[token] * repeated
    for token, times in Counter(generated).items():
        scores[token] -= params.presence_penalty + times * params.frequency_penalty
    peak = max(scores)
    weights = {token: math.exp((score - peak) / params.temperature) for token, score in enumerate(scores)}
    kept = sorted((t for t in weights if weights[t] >= params.min_p), key=lambda t: -weights[t])
    kept = kept[: params.top_k or None]
    whole, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass >= params.top_p * whole:
            break
        mass += weights[token]
        nucleus.append(token)
    return [weights[token] / mass if token in nucleus else 0.0 for token in range(len(scores))]


def surprise(samples: Sequence[Context], expected: dict[Context, float]) -> float:
    """How unlikely these samples are, in standard deviations: a chi-square test over cells of at least 10 samples.

    3.7 is exceeded once in 10,000 times (Wilson and Hilferty's approximation). Infinite for what cannot happen.
    """
    seen, count = Counter(samples), len(samples)
    if seen.keys() - expected.keys():
        return math.inf
    cells = {context: count * share for context, share in expected.items()}
    rare = [context for context, mean in cells.items() if mean < 10]
    pairs = [(seen[context], mean) for context, mean in cells.items() if mean >= 10]
    if sum(cells[context] for context in rare) >= 1:
        pairs.append((sum(seen[context] for context in rare), sum(cells[context] for context in rare)))
    degrees = len(pairs) - 1
    chi_square = sum((got - mean) ** 2 / mean for got, mean in pairs)
    spread = 2 / (9 * degrees)
    return ((chi_square / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
