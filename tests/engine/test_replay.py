"""What drafting changes: nothing but the number of steps. Requests of every kind together, against a replay.

Tokens, why an answer ends, counts and logprobs of greedy and seeded requests are those of each alone, a token a step;
logprobs of the others are those of the target, shown the same tokens.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import BUILTIN
from paceline.controller import GroupConfig
from paceline.core.batch import Batch
from paceline.core.request import Request, SamplingParams
from paceline.core.work import NewSequence, SliceOutput, SliceWork, TokenLogprobs
from paceline.engine.grammar import grammar_of
from paceline.engine.job import Job
from paceline.engine.runner import ModelRunner
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime import offline
from paceline.runtime.offline import Offline, Output
from tests.engine import checkpoints
from tests.engine.schedules import Disturbed, forced

CODER, DRAFT = BUILTIN / "coder", BUILTIN / "coder-draft"
DRAFTERS = ["ngram", f"trigram:{BUILTIN.parent / 'controller.py'}", str(DRAFT), "early_exit", "another vocabulary"]
NUM_BLOCKS, EOS = 200, (0,)
TEXT = "import os\nimport sys\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n" * 4
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["list", "dict"]}}, "required": ["kind"]}
BASE = SamplingParams(max_tokens=30, temperature=0.8, logprobs=2, max_draft_tokens=5)
GREEDY = replace(BASE, temperature=0.0)
KINDS = [
    GREEDY,
    replace(GREEDY, max_tokens=9),
    replace(GREEDY, frequency_penalty=0.4, stop_token_ids=(306, 9)),
    BASE,
    replace(BASE, max_tokens=14, top_p=0.9),
    replace(BASE, max_tokens=15, top_k=40, repetition_penalty=1.2),
    replace(BASE, logit_bias=((0, 13.0),)),  # ends anywhere
    replace(BASE, logit_bias=((0, 13.0),), min_tokens=13),
    replace(BASE, stop_token_ids=(306, 9), min_p=0.05),
    replace(BASE, stop_token_ids=(306, 9), min_tokens=8, presence_penalty=0.3),
    replace(BASE, grammar=grammar_of("json", json.dumps(SCHEMA))),
    replace(BASE, max_tokens=1),
]
MIX = [replace(one, seed=60 + n) for n, one in enumerate(KINDS)]
CANCELLED = (0, 5, 9)  # of those, as soon as something is drafted for them


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of different lengths, all with the same beginning of two blocks or more."""
    tokens = Tokenizer.load(CODER).encode(TEXT, add_special_tokens=False)
    return [[*tokens[: 34 + 5 * n], 300 + n] for n in range(len(MIX))]


def load(drafter: str) -> ModelRunner:
    return ModelRunner.load(CODER, drafter=drafter, max_batch_tokens=512, max_batch=32, num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module", params=DRAFTERS, ids=["ngram", "trigram", "model", "early_exit", "vocabulary"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    if request.param != "another vocabulary":
        return load(request.param)
    runner = load(str(checkpoints.fewer_tokens(DRAFT, tmp_path_factory.mktemp("draft") / "fewer", 1700)))
    assert runner.drafter.model.vocabulary.num_shared == 1700
    return runner


class Group(Offline):
    """An engine in which things happen to sequences; what is counted is over all its steps."""

    def __init__(self, runner: ModelRunner, budget: int = 512, num_blocks: int = NUM_BLOCKS, every: int = 0) -> None:
        limits = SchedulerConfig(token_budget=budget, max_batch=32, num_blocks=num_blocks)
        super().__init__(runner, GroupConfig(scheduler=limits), EOS)
        self.scheduler, self.disturbed = self.controller.groups[0].scheduler, Disturbed()
        self.on_step, self.accepted, self.cancels = self.count, 0, ()
        self.finished: dict[str, tuple[int, str]] = {}  # as the controller counts
        self.turn, self.controller.turn = self.controller.turn, self.note
        if every:
            forced(every)(self.scheduler)

    def note(self, inputs, now):
        events, batches = self.turn(inputs, now)
        self.finished.update({e.request: (e.tokens, e.detail) for e in events if e.kind == "finished"})
        return events, batches

    def count(self, batch: Batch, outputs: list[SliceOutput], *_: float) -> None:
        self.disturbed(batch)
        self.accepted += sum(output.num_accepted for output in outputs)
        for id, output in zip(batch.requests, outputs, strict=True):
            if output.num_draft and int(id) in self.cancels and id in self._running:
                self.controller.cancel(id, 0.0)  # while its step is on its way
                self._running.pop(id).leave_worker()

    def wrong(self, prompts: list[list[int]], params: list[SamplingParams], right: Callable) -> list[int]:
        """Requests of which `right` says, asked for the number and the output, that something else should have come;
        or that are not counted as long as they are. Nothing must be left of any."""
        outputs = self.generate(prompts, params)
        self.scheduler.check()
        assert self.scheduler.num_free_blocks == self.scheduler.num_blocks
        assert not self.engine.sequences and not self.controller.sequences
        ended = [n in self.cancels or self.finished[str(n)] == (len(o.tokens), o.finish) for n, o in enumerate(outputs)]
        return [n for n, o in enumerate(outputs) if o.error or not ended[n] or not right(n, o)]


GROUPS: dict[str, Callable[[ModelRunner], Group]] = {
    "plain": Group,
    "narrow": lambda runner: Group(runner, budget=40),
    "preempted": lambda runner: Group(runner, every=3),
    "narrow and preempted": lambda runner: Group(runner, budget=60, every=4),
    "short of memory": lambda runner: Group(runner, num_blocks=14),
}


def within(name: str) -> float:
    """How far logprobs may be off. Chunks and recomputation add up in another order, with drafts and without."""
    return 1e-5 if name == "plain" else 5e-5


def alike(ours: list[TokenLogprobs], theirs: list[TokenLogprobs], within: float) -> bool:
    return [one.token for one in ours] == [one.token for one in theirs] and all(
        [a.logprob, *a.top_logprobs] == pytest.approx([b.logprob, *b.top_logprobs], abs=within)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture(scope="module")
def alone() -> ModelRunner:
    return load("ngram")


@pytest.fixture(scope="module")
def replayed(alone: ModelRunner, prompts: list[list[int]]) -> list[Output]:
    """Each request alone, a token a step."""
    params = [replace(one, max_draft_tokens=0) for one in MIX]
    found = [Group(alone).generate([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    assert {one.finish for one in found} == {"stop", "length"}
    return found


def as_replayed(replayed: list[Output], within: float, cancels: tuple[int, ...] = ()) -> Callable:
    def right(n: int, ours: Output) -> bool:
        theirs, length = replayed[n], len(ours.tokens) if n in cancels and ours.finish is None else None
        return (
            ours.tokens == theirs.tokens[:length]
            and alike(ours.logprobs, theirs.logprobs[:length], within)
            and (length is not None or ours.finish == theirs.finish)
        )

    return right


@pytest.mark.parametrize("name", GROUPS)
def test_answers_are_those_of_a_replay(runner, prompts, replayed, name):
    group = GROUPS[name](runner)
    assert group.wrong(prompts, MIX, as_replayed(replayed, within(name))) == []
    assert group.accepted > 0 and ("narrow" not in name or group.disturbed.cut > 5)
    assert (group.disturbed.preempted > 0) == (name not in ("plain", "narrow"))
    cached, group.cancels = group.scheduler.cached_tokens, CANCELLED
    assert group.wrong(prompts, MIX, as_replayed(replayed, within("cached"), CANCELLED)) == []
    assert group.scheduler.cached_tokens - cached > 200, "prompts come from the prefix cache"


UNSEEDED = [replace(one, seeded=False) for one in MIX]


def as_told(alone: ModelRunner, prompts: list[list[int]], within: float) -> Callable:
    """Whether logprobs are those of the target, shown the same tokens one by one; and the end is where it should be."""

    def right(n: int, ours: Output) -> bool:
        params, prompt = UNSEEDED[n], prompts[n]
        whole, blocks = [*prompt, *ours.tokens], list(range(-(-(len(prompt) + params.max_tokens) // 16)))
        new, theirs = [NewSequence(0, whole, len(whole), SamplingParams(prompt_logprobs=2))], []
        for begin, end in pairwise([0, *range(len(prompt), len(whole))]):
            (output,), *_ = alone.step(new, [SliceWork(0, begin, end - begin, False, 0, blocks)], [])
            new, theirs = [], [*theirs, *output.prompt_logprobs]
        alone.step([], [], [0])
        stops = [at for at, token in enumerate(ours.tokens, 1) if token in params.stops(EOS)]
        stops = [at for at in stops if at > params.min_tokens or params.grammar]
        end = min(stops[:1] + [params.max_tokens])
        finish = "stop" if end in stops else "length"
        return alike(ours.logprobs, theirs[len(prompt) - 1 :], within) and (len(ours.tokens), ours.finish) == (
            end, finish,
        )  # fmt: skip

    return right


@pytest.mark.parametrize("name", ["plain", "narrow and preempted"])
def test_logprobs_of_unseeded_answers_are_the_targets(runner, alone, prompts, name):
    group = GROUPS[name](runner)
    assert group.wrong(prompts, UNSEEDED, as_told(alone, prompts, within(name))) == []
    assert group.accepted > 0


# Mistakes: what the checks above say of each


TAKE, JUDGE, OUTPUT = Job.take, ModelRunner._judge, Job.output


def beyond_a_stop(job: Job, token: int, logprob: TokenLogprobs | None) -> bool:
    place = len(job.tokens)
    TAKE(job, token, logprob)
    return place < len(job.draft) and token == job.draft[place]


def logprobs_of_all_rows(job: Job) -> SliceOutput:
    output = OUTPUT(job)
    return output._replace(logprobs=[*output.logprobs, *output.logprobs[-1:] * (1 + len(job.draft) - len(job.tokens))])


def logprobs_of_the_last_alone(job: Job) -> SliceOutput:
    output = OUTPUT(job)
    return output._replace(logprobs=output.logprobs[-1:])


def more_than_may_come(id: str, tokens: int, most: int, *rest: object, **more: object) -> Request:
    return Request(id, tokens, most + 8, *rest, **more)


def logprobs_of_the_draft(runner: ModelRunner, jobs: list[Job], logits: object) -> None:
    """Of the token behind a refusal."""
    JUDGE(runner, jobs, logits)
    for job in jobs:
        n = len(job.tokens) - 1
        if n < len(job.draft) and job.logprobs:
            drawn = job.draft_rows[n].log_softmax(0)[job.tokens[n]].item()
            job.logprobs[n] = job.logprobs[n]._replace(logprob=drawn)


MISTAKES = {
    "an end inside a draft is passed": (Job, "take", beyond_a_stop),
    "drafts go on behind max_tokens": (offline, "Request", more_than_may_come),
    "logprobs of refused tokens": (Job, "output", logprobs_of_all_rows),
    "no logprobs of accepted tokens": (Job, "output", logprobs_of_the_last_alone),
    "logprobs of a draft for the token behind a refusal": (ModelRunner, "_judge", logprobs_of_the_draft),
}


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return load(str(DRAFT))


@pytest.mark.parametrize("mistake", list(MISTAKES)[:-1])
def test_a_replay_sees_mistakes(model, prompts, replayed, monkeypatch, mistake):
    monkeypatch.setattr(*MISTAKES[mistake])
    assert Group(model).wrong(prompts, MIX, as_replayed(replayed, within("plain")))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_targets_logprobs_and_ends_show_mistakes(model, alone, prompts, monkeypatch, mistake):
    monkeypatch.setattr(*MISTAKES[mistake])
    assert Group(model).wrong(prompts, UNSEEDED, as_told(alone, prompts, within("plain")))
