"""Coupled drafts by enumeration: whatever was drafted, the law of what the engine emits is the target's."""

from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.work import SliceWork
from paceline.engine import sampler
from paceline.engine.job import EngineSequence, Job
from paceline.engine.runner import ModelRunner
from tests.speculation import oracle

STATE = SimpleNamespace(greedy=False, observe=lambda token: None)


class Draws:
    """In the place of the sampler: goes through all outcomes, one after the other."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.drawn, self.likely = list[int](), 1.0

    def sample(self, logits, states, positions):
        assert len(logits) == len(positions) == 1
        place = len(self.drawn)
        self.drawn.append(self.script[place] if place < len(self.script) else 0)
        self.likely *= float(logits[0, self.drawn[-1]].exp())
        return self.drawn[-1:], [None]

    def next(self, vocabulary: int) -> bool:
        """Whether there is another outcome."""
        self.script, self.drawn, self.likely = self.drawn, [], 1.0
        while self.script and self.script[-1] == vocabulary - 1:
            self.script.pop()
        if self.script:
            self.script[-1] += 1
        return bool(self.script)


def emissions(
    runner: ModelRunner, target: oracle.Model, context: oracle.Context, draft: oracle.Context, monkeypatch
) -> Iterator[tuple[oracle.Context, float]]:
    """What a verification yields for every outcome of the draws, and how likely that is."""
    rows = torch.tensor([target(context + draft[:n]) for n in range(len(draft) + 1)], dtype=torch.float64).log()
    known, draws, more = (7, *context), Draws(), True
    runner._logits = lambda jobs, hidden: (rows, None)
    monkeypatch.setattr(sampler, "sample", draws.sample)
    while more:
        sequence = EngineSequence(array("q", known), 1, frozenset(), SamplingParams(seed=1, seeded=True), STATE)
        work = SliceWork(1, len(known) - 1, 1 + len(draft), True, 0, [], len(draft))
        job = Job(work, sequence, draft=list(draft))
        assert job.coupled
        runner._emit([job], torch.empty(0))
        assert not job.error and job.tokens == draws.drawn == sequence.tokens[len(known) :].tolist()
        yield tuple(job.tokens), draws.likely
        more = draws.next(rows.shape[1])


def law(target: oracle.Model, drafted: int, length: int, monkeypatch) -> Counter[oracle.Context]:
    """Every draft is as likely as every other: none may matter."""
    runner = object.__new__(ModelRunner)
    runner._tick = lambda *_: None
    open_, done = Counter({(): 1.0}), Counter()
    while open_:
        context, mass = open_.popitem()
        if len(context) >= length:
            done[context[:length]] += mass
            continue
        drafts = list(product(range(len(target(context))), repeat=drafted))
        for draft in drafts:
            for tokens, likely in emissions(runner, target, context, draft, monkeypatch):
                if likely:
                    (done if len(context + tokens) >= length else open_)[(context + tokens)[:length]] += (
                        mass * likely / len(drafts)
                    )
    return done


@pytest.mark.parametrize(("vocabulary", "drafted", "length"), [(3, 1, 4), (3, 2, 4), (4, 3, 3), (3, 4, 3)])
def test_the_law_of_coupled_drafts_is_the_targets(vocabulary: int, drafted: int, length: int, monkeypatch) -> None:
    target = oracle.toy("target", vocabulary)
    assert oracle.distance(law(target, drafted, length, monkeypatch), oracle.ordinary(target, length)) <= 1e-12


def test_a_row_behind_a_refused_token_shows(monkeypatch) -> None:
    """The mistake: what was computed behind the drafted token counts though another one was drawn."""
    take = Job.take

    def careless(job: Job, token: int, logprob) -> bool:
        take(job, token, logprob)
        return len(job.tokens) <= len(job.draft)

    monkeypatch.setattr(Job, "take", careless)
    target = oracle.toy("target", 3)
    assert oracle.distance(law(target, 2, 3, monkeypatch), oracle.ordinary(target, 3)) > 1e-3
