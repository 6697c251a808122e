"""Models that draft: they follow the target through everything, and no answer changes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend

from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import BUILTIN
from paceline.controller import GroupConfig
from paceline.core.batch import FOLLOWED, FOLLOWED_OF, follows
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine import drafters
from paceline.engine.config import ModelError
from paceline.engine.draft_models import DraftModel
from paceline.engine.drafters import InTurn, Part, TokenByToken
from paceline.engine.job import Job
from paceline.engine.runner import ModelRunner
from paceline.engine.tokenizer import Tokenizer
from paceline.engine.vocabulary import SharedVocabulary
from paceline.runtime.offline import Offline
from paceline.speculation import ngram
from paceline.speculation.costs import Costs
from paceline.speculation.lookahead import Lookahead
from tests.engine import law
from tests.engine.schedules import Schedule, forced, off_and_on

COUNT, OUTPUT, NUM_BLOCKS = 8, 40, 200
CODER = BUILTIN / "coder"


def load(drafter: str, path: Path = CODER, **options: object) -> ModelRunner:
    options = {"max_batch_tokens": 512, "max_batch": 16, "num_blocks": NUM_BLOCKS} | options
    return ModelRunner.load(path, drafter=drafter, **options)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of very different lengths, all with the same beginning of two blocks or more."""
    text = "import os\nimport sys\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n" * 4
    tokens = Tokenizer.load(CODER).encode(text, add_special_tokens=False)
    return [[*tokens[: 34 + 9 * i], 300 + i] for i in range(COUNT)]


def params(seeded: bool = True, **changes: object) -> list[SamplingParams]:
    base = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, seeded=seeded, **changes)
    warm = replace(base, temperature=0.8, top_p=0.95, frequency_penalty=0.2, repetition_penalty=1.1)
    return [replace(base if i % 2 else warm, seed=50 + i) for i in range(COUNT)]


class Generated(list):
    """Tokens of each prompt; `drafted` and `accepted` in all."""

    drafted = accepted = 0

    def __init__(self) -> None:
        self.lengths: list[int] = []  # asked for, of every decode


def group(
    runner: ModelRunner, schedule: Schedule | None = None, budget: int = 512,
    lookahead: Callable[[], Lookahead] | None = None,
) -> Offline:  # fmt: skip
    limits = SchedulerConfig(token_budget=budget, max_batch=16, num_blocks=runner.info.num_blocks)
    offline = Offline(runner, GroupConfig(scheduler=limits, lookahead=lookahead))
    if schedule:
        schedule(offline.controller.groups[0].scheduler)
    return offline


def cached(offline: Offline) -> int:
    return offline.controller.groups[0].scheduler.cached_tokens


def generate(
    source: ModelRunner | Offline, prompts: list[list[int]], params: list[SamplingParams], **options: object
) -> Generated:
    offline = source if isinstance(source, Offline) else group(source, **options)
    result = Generated()

    def count(batch, outputs, *_):
        result.drafted += sum(output.num_draft for output in outputs)
        result.accepted += sum(output.num_accepted for output in outputs)
        result.lengths += (batch.drafts or [0] * batch.num_decodes)[: batch.num_decodes]

    offline.on_step = count
    result += [output.tokens for output in offline.generate(prompts, params)]
    return result


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> Generated:
    return generate(load("ngram"), prompts, params())


TEXT = str(BUILTIN.parent / "controller.py")
DRAFTERS = [str(BUILTIN / "coder-draft"), "early_exit", f"trigram:{TEXT}", f"ngram+{BUILTIN / 'coder-draft'}"]


@pytest.fixture(scope="module", params=DRAFTERS, ids=["model", "early_exit", "trigram", "ngram+model"])
def drafting(request: pytest.FixtureRequest) -> ModelRunner:
    return load(request.param)


@pytest.mark.parametrize("source", ["tokenizer_config.json", "config.json", "generation_config.json"])
def test_drafts_end_where_the_front_end_does(tmp_path, source):
    """Wherever a checkpoint says what ends a sequence."""
    for file in CODER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    text = "for one in range(10):\n    print(one)\n" * 6
    tokenizer = Tokenizer.load(CODER)
    prompt, backend = tokenizer.encode(text, add_special_tokens=False), Backend.from_file(str(CODER / "tokenizer.json"))
    (answer,) = generate(load("ngram"), [prompt], [SamplingParams(max_tokens=16, temperature=0.0, seeded=True)])
    end = answer[6]
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        raw = json.loads((CODER / name).read_text()) | {"eos_token_id": None, "eos_token": None}
        if name == source:
            raw |= {"eos_token": backend.id_to_token(end)} if name.startswith("tok") else {"eos_token_id": end}
        (tmp_path / name).unlink()
        (tmp_path / name).write_text(json.dumps(raw))
    ends = Tokenizer.load(tmp_path).eos_ids
    assert ends == (end,)
    offline = group(load("ngram", tmp_path))
    offline.eos_ids = ends
    for most in (0, 8):
        asked = SamplingParams(max_tokens=16, temperature=0.0, seeded=True, max_draft_tokens=most)
        assert generate(offline, [prompt], [asked]) == [answer[: answer.index(end) + 1]]


SCHEDULES: dict[str, Callable[[], dict]] = {
    "plain": lambda: {},
    "narrow": lambda: dict(budget=24),
    "preempted": lambda: dict(schedule=forced(5)),
    "narrow and preempted": lambda: dict(schedule=forced(7), budget=32),
    "off and on": lambda: dict(schedule=off_and_on(12)),
}


@pytest.mark.parametrize(("name", "draft"), list(zip(SCHEDULES, (8, 1, 4, 3, 5), strict=True)))
def test_greedy_and_seeded_answers_are_those_without_drafts(drafting, prompts, alone, name, draft):
    got = generate(drafting, prompts, params(max_draft_tokens=draft), **SCHEDULES[name]())
    assert got == alone and got.accepted > 0


@pytest.mark.parametrize("seeded", [True, False], ids=["coupled", "rejection"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_model_that_drafts_for_itself_is_always_right(prompts, name, seeded):
    """So its keys and values are complete and of the right tokens, wherever a round begins: behind refusals, whole
    acceptances, steps without drafts, preemption, prefixes from the cache."""
    offline, before = group(load(str(CODER)), **SCHEDULES[name]()), 0
    for _ in range(2):  # the second time all prompts are in the prefix cache
        before = cached(offline)
        got = generate(offline, prompts, params(seeded, max_draft_tokens=5))
        assert got.drafted > 100 and got.accepted >= 0.995 * got.drafted
    assert cached(offline) - before > 0.8 * sum(map(len, prompts))


SPOILT = 2  # of each draft the token at this place


def refused(runner: ModelRunner, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, **options: object) -> int:
    """Drafted tokens before the spoilt one that were refused all the same: drafts by the target, of 5 tokens or, where
    they are to be accepted whole, of 2."""
    take, kept, right = drafters._take, [], 0

    def spoil(part: Part, tokens: list[int], rows: torch.Tensor) -> bool:
        place = SPOILT - len(part.job.draft)
        return take(part, [1990 if n == place else token for n, token in enumerate(tokens)], rows)

    monkeypatch.setattr(drafters, "_take", spoil)
    offline = group(runner, **options)
    offline.on_step = lambda batch, outputs, *_: kept.extend((o.num_draft, o.num_accepted) for o in outputs)
    chosen = [replace(one, max_draft_tokens=SPOILT + 3 * (i // 2 % 2)) for i, one in enumerate(params())]
    offline.generate(prompts, chosen)
    right = sum(min(drafted, SPOILT) for drafted, _ in kept)
    assert right > 100 and sum(drafted > SPOILT for drafted, _ in kept) > 5
    return right - sum(min(accepted, SPOILT) for _, accepted in kept)


@pytest.mark.parametrize("name", SCHEDULES)
def test_refused_tokens_leave_nothing_behind(prompts, monkeypatch, name):
    assert refused(load(str(CODER)), prompts, monkeypatch, **SCHEDULES[name]()) <= 1


def last_tokens_alone(model: DraftModel, jobs: list[Job]) -> list[Part]:
    """As if the last token of a draft that was accepted whole were followed like the others."""
    return [
        part if part.start < part.job.sequence.num_prompt else Part(part.job, part.job.end - 1, 1)
        for part in FIRST(model, jobs)
    ]


def never_written_again(seen: dict[tuple[int, int], int], part: Part) -> list[int]:
    """What stays in the cache of a token that was refused."""
    return [seen.setdefault((part.job.work.id, part.start + n), token) for n, token in enumerate(TOKENS(part))]


FIRST, TOKENS = DraftModel._first, Part.tokens.fget


@pytest.mark.parametrize("mistake", ["the last token of a draft is missing", "refused tokens stay"])
def test_a_wrong_cache_of_the_draft_model_shows(prompts, monkeypatch, mistake):
    if mistake == "refused tokens stay":
        monkeypatch.setattr(Part, "tokens", property(partial(never_written_again, {})))
    else:
        monkeypatch.setattr(DraftModel, "_first", last_tokens_alone)
    assert refused(load(str(CODER)), prompts, monkeypatch) > 20


def test_drafts_that_are_chosen_by_their_worth_change_nothing(drafting, prompts, alone):
    lookahead = partial(Lookahead, Costs([1.0 + 0.01 * n for n in range(600)]), Costs([0.01] * 600))
    got = generate(drafting, prompts, params(max_draft_tokens=8), lookahead=lookahead)
    assert got == alone and got.accepted > 0 and len(set(got.lengths)) > 2


def test_blocks_that_the_draft_model_never_saw_are_caught_up_with(prompts, alone):
    """They come from the prefix cache, filled by requests that wanted no drafts."""
    runner = load(str(CODER))
    offline = group(runner)
    assert generate(offline, prompts, params(max_draft_tokens=0)) == alone
    assert not runner.drafter.filled.any()
    got = generate(offline, prompts, params(max_draft_tokens=3))
    assert got == alone and got.accepted == got.drafted > 100 and runner.drafter.filled.any()
    assert cached(offline) > 0.8 * sum(map(len, prompts))


class Later(Lookahead):
    """Has nobody draft in its first steps, then everybody as much as may be."""

    steps = 0

    def choose(self, numbers, drafts, running, pending, budget, goal=float("inf")):
        self.steps += 1
        return drafts * (self.steps > 10), 0.0


def test_who_hears_late_of_tokens_marks_no_block_that_was_lost_meanwhile(prompts):
    """In a pipeline the worker that drafts does not sample: it gets tokens with the next slice, here of a sequence that
    was preempted, and whose blocks another one has."""
    runner = load(DRAFTERS[0])
    runner.answers = False
    first, other = (NewSequence(i, prompts[i], len(prompts[i]), SamplingParams(max_tokens=OUTPUT)) for i in (1, 2))
    length = len(first.tokens)
    runner.step([first], [SliceWork(1, 0, length, False, 0, [0, 1, 2])], [])
    assert runner.sequences[1].num_followed == length > 2 * runner.info.block_size
    runner.step([other], [SliceWork(2, 0, 5, False, 0, [0, 1])], [])
    runner.step([], [SliceWork(1, 0, length, False, 0, [3, 4, 5], fresh=[7])], [])
    assert not runner.drafter.filled.any()


@pytest.mark.parametrize("idle", [0, FOLLOWED, FOLLOWED_OF])
def test_prompts_are_followed_unless_nobody_has_drafted_for_a_while(prompts, alone, idle):
    runner = load(str(CODER))
    runner.drafter.idle = idle
    forward, passes = runner.drafter.model.forward, []
    runner.drafter.model.forward = lambda parts: (passes.append(sum(p.length for p in parts)), forward(parts))[1]
    later = partial(Later, Costs([1.0] * 600), Costs([0.01] * 600))
    got = generate(runner, prompts, params(max_draft_tokens=3), lookahead=later)
    assert got == alone and got.accepted == got.drafted > 50
    begin = sum(passes[:2])  # of two steps with prompts, or of the first two that draft
    assert (begin == sum(map(len, prompts))) is follows(idle)


def test_sequences_far_behind_catch_up_in_several_steps(prompts, alone):
    runner = load(str(CODER))
    runner.drafter.max_tokens = 16
    got = generate(runner, prompts, params(max_draft_tokens=3), budget=64)
    assert got == alone and got.accepted == got.drafted > 50


def test_few_distributions_are_kept(prompts):
    runner = load(str(CODER))
    many = generate(runner, prompts, params(False, max_draft_tokens=8))
    runner.drafter.most_kept = 10
    few = generate(runner, prompts, params(False, max_draft_tokens=8))
    assert len(few.lengths) > len(many.lengths) and few.accepted >= 0.995 * few.drafted > 50


def test_a_drafter_that_fails_leaves_the_target_alone(drafting, prompts, alone, monkeypatch, capsys):
    last = getattr(drafting.drafter, "drafters", [drafting.drafter])[-1]
    monkeypatch.setattr(last.model, "forward", lambda *_: 1 / 0)
    if last.model.chain:
        monkeypatch.setattr(last.model.chain, "draw", last.model.forward)
    got = generate(drafting, prompts, params(max_draft_tokens=4))
    assert got == alone and "ZeroDivisionError" in capsys.readouterr().err
    assert got.drafted == 0 or isinstance(drafting.drafter, InTurn)  # n-grams drafted where there were some


GUESSES: dict[str, Callable[[object, int], list[int]]] = {
    "none": lambda tokens, most: [],
    "wrong": lambda tokens, most: [1990] * most,
    "wrong and right": lambda tokens, most: [*ngram.propose(tokens, most, shortest=1)[: most - 1], 7],
}


@pytest.mark.parametrize("seeded", [True, False], ids=["coupled", "rejection"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_guesses_save_passes_and_change_no_draft(prompts, name, seeded, monkeypatch):
    """Not even where drafts are drawn at random: their noise is fixed by their places."""
    runner = load(str(BUILTIN / "coder-draft"))
    found, passes = {}, {}
    for guess in ("none", "wrong", "wrong and right", "n-grams"):
        runner.drafter.guess, forward, count = GUESSES.get(guess, ngram.propose), runner.drafter.model.forward, []
        with monkeypatch.context() as patch:
            patch.setattr(runner.drafter.model, "forward", lambda parts: (count.append(1), forward(parts))[1])  # noqa: B023
            got = generate(runner, prompts, params(seeded, max_draft_tokens=6), **SCHEDULES[name]())
        found[guess], passes[guess] = (list(got), got.drafted, got.accepted), len(count)
    assert len({repr(one) for one in found.values()}) == 1 and found["none"][2] > 0
    assert passes["n-grams"] <= passes["none"] == passes["wrong"]


def test_only_what_greedy_requests_draft_is_guessed(prompts, monkeypatch):
    runner, asked = load(str(BUILTIN / "coder-draft")), []
    runner.drafter.guess = lambda tokens, most: asked.append(most) or []
    warm, greedy = params(max_draft_tokens=4)[:2]
    for one in (warm, greedy):
        assert not asked
        generate(runner, prompts[:1], [one])
    assert asked


def test_a_model_that_guesses_for_itself_drafts_in_one_pass(prompts):
    """The second level is always right, so all that it guessed is kept, and followed."""
    sure = [replace(one, temperature=0.0) for one in params(max_draft_tokens=5)]
    alone = generate(load("ngram"), prompts, [replace(one, max_draft_tokens=0) for one in sure])
    runner = load(str(CODER))
    greedy = {tuple(p + a)[: len(p) + n]: a[n:] for p, a in zip(prompts, alone, strict=True) for n in range(OUTPUT)}
    runner.drafter.guess = lambda tokens, most: greedy.get(tuple(tokens.tolist()), [])[:most]
    widths, forward = [], runner.drafter.model.forward
    runner.drafter.model.forward = lambda parts: (widths.append(sum(p.length for p in parts)), forward(parts))[1]
    got = generate(runner, prompts, sure)
    assert got == alone and got.accepted == got.drafted > 100
    steps = OUTPUT // 6 + 8  # and the prompts'
    assert len(widths) <= 2 * steps  # a pass guesses all but the last token, so none follows it


def test_a_draft_model_without_a_distribution_drafts_nothing(prompts, alone):
    runner = load(str(BUILTIN / "coder-draft"))
    runner.drafter.model.decoder.norm.weight.fill_(float("nan"))
    got = generate(runner, prompts, params(max_draft_tokens=4))
    assert got == alone and got.drafted == 0


def test_memory_is_planned_for_both():
    plain, both = load("ngram"), load(str(BUILTIN / "coder-draft"))
    draft = ModelRunner.load(BUILTIN / "coder-draft", max_batch_tokens=512, max_batch=16, num_blocks=NUM_BLOCKS)
    assert both.info.weight_bytes == plain.info.weight_bytes + draft.info.weight_bytes
    assert both.info.kv_bytes == plain.info.kv_bytes + draft.info.kv_bytes


def test_a_draft_model_may_be_quantized_alone(prompts, alone):
    draft = str(BUILTIN / "coder-draft")
    plain, runner = load(draft), load(draft, draft_quantization="int8")
    own, of_draft = (runner.caches[at].pool.dtype for at in (0, 1))
    assert (own, of_draft) == (torch.float32, torch.float16)
    assert runner.info.weight_bytes < plain.info.weight_bytes and runner.info.kv_bytes < plain.info.kv_bytes
    got = generate(runner, prompts, params(max_draft_tokens=4))
    assert got == alone and got.drafted > 0
    with pytest.raises(ModelError, match="draft_quantization: 'int4' is not one of none, int8"):
        load(draft, draft_quantization="int4")
    with pytest.raises(ModelError, match="draft_quantization: is only allowed with a draft model"):
        load("early_exit", draft_quantization="int8")


def test_early_exit_needs_layers_to_leave_out():
    with pytest.raises(ModelError, match="early_exit_layers: 4 is not from 1 to 3"):
        ModelRunner.load(CODER, max_batch_tokens=64, max_batch=4, drafter="early_exit", early_exit_layers=4)
    runner = ModelRunner.load(
        CODER, max_batch_tokens=64, max_batch=4, num_blocks=8, drafter="early_exit", early_exit_layers=3
    )
    assert isinstance(runner.drafter, TokenByToken) and not isinstance(runner.drafter, DraftModel)
    assert runner.drafter.model.decoder.config.layers == 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    law.tiny(folder / "target", 6, seed=1)
    law.tiny(folder / "draft", 6, seed=1, layers=1)
    return folder / "target", folder / "draft"


# Of trigrams


def test_a_text_that_is_no_table_is_refused(tiny, tmp_path):
    path, text = law.words(shutil.copytree(tiny[0], tmp_path / "target"), "abcdef"), tmp_path / "text"
    for content, words in ((b"a b", "3 tokens or more"), (b"\xff\xff", "utf-8")):
        text.write_bytes(content)
        with pytest.raises(ModelError, match=f"drafter: trigram:.*{words}"):
            load(f"trigram:{text}", path)


# Of vocabularies that differ


def test_the_same_vocabulary_is_shared_whole():
    coder = Tokenizer.load(CODER)
    shared = SharedVocabulary(coder, coder, (2048, 2048))
    assert shared.num_shared == 2048 and shared.to_draft.tolist() == list(range(2048))
    rows = torch.randn(2, 2048)
    assert torch.equal(shared.to_target(rows), rows)


def test_tokens_are_matched_by_their_text(tmp_path):
    target = Tokenizer.load(law.words(tmp_path, "abcdefgh"))
    draft = Tokenizer.load(law.words(tmp_path, "gxcay"))
    shared = SharedVocabulary(target, draft, (10, 6))
    assert shared.num_shared == 3 and shared.to_draft[[0, 2, 6]].tolist() == [3, 2, 0]
    logits = torch.tensor([[1.0, 2, 3, 4, 5, 6]])
    none = -torch.inf
    assert shared.to_target(logits).tolist() == [[4, none, 3, none, none, none, 1, none, none, none]]
    target.eos_ids, draft.eos_ids = (1,), (6,)  # of which the draft's logits have none
    assert SharedVocabulary(target, draft, (10, 6)).num_shared == 3


def test_ends_of_sequence_that_are_the_same_stay_the_same(tmp_path):
    """Llama 3 has three, of which a chat's is the last; one that the draft does not have is its first."""
    target = Tokenizer.load(law.words(tmp_path, "abcdefgh"))
    draft = Tokenizer.load(law.words(tmp_path, "gxcay"))
    target.eos_ids, draft.eos_ids = (0, 1, 2), (3, 2)  # a, b and c; a and c
    assert SharedVocabulary(target, draft, (10, 6)).to_draft[:3].tolist() == [3, 3, 2]


def test_a_pair_without_a_common_token_is_refused_with_the_reason(tiny, tmp_path):
    path = law.words(shutil.copytree(tiny[0], tmp_path / "target"), "abcdef")
    draft_path = law.words(shutil.copytree(tiny[1], tmp_path / "draft"), "uvwxyz")
    with pytest.raises(ModelError, match=r"drafter: .*draft cannot draft for .*target: .*no token in common"):
        load(str(draft_path), path)
