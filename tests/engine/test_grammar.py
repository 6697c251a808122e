"""Structured output: what comes out is JSON of the schema, drafts or not, and nobody else's request is touched."""

import json
import random
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import BUILTIN
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.engine import sampler
from paceline.engine.config import ModelConfig
from paceline.engine.grammar import MOST_BYTES, Grammar, Grammars, grammar_of
from paceline.engine.runner import ModelRunner
from paceline.engine.sampler import SamplingState, sample
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.offline import Offline
from paceline.server.protocol import StructuredOutputs
from tests.engine import checkpoints
from tests.engine.schedules import forced
from tests.engine.test_law import blind

CODER = BUILTIN / "coder"
EOS = ModelConfig.load(CODER).eos_ids
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["list", "dict", 7]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes", "open"],
    "additionalProperties": False,
}
HELD = grammar_of("json", json.dumps(SCHEMA))
PROMPT = "# The configuration as JSON:\nconfig = "


def follows(value: object) -> bool:
    """Whether a value is one of SCHEMA."""
    return (
        isinstance(value, dict)
        and list(value) == ["name", "kind", "sizes", "open"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["kind"] in ("list", "dict", 7)
        and len(value["sizes"]) <= 3
        and all(type(size) is int and 0 <= size <= 99 for size in value["sizes"])
        and isinstance(value["open"], bool)
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(CODER)


@pytest.fixture(scope="module", params=["ngram", "coder-draft", "early_exit", "trigram", "fewer tokens"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    drafter = {
        "coder-draft": lambda: str(BUILTIN / "coder-draft"),
        "trigram": lambda: f"trigram:{BUILTIN / 'coder' / 'config.json'}",
        "fewer tokens": lambda: str(
            checkpoints.fewer_tokens(BUILTIN / "coder-draft", tmp_path_factory.mktemp("draft") / "fewer", 1700)
        ),
    }.get(request.param, lambda: request.param)()
    return ModelRunner.load(CODER, max_batch_tokens=256, max_batch=16, num_blocks=200, drafter=drafter)


def generate(runner: ModelRunner, tokenizer: Tokenizer, params: list[SamplingParams], every: int = 0) -> list[object]:
    """Texts, or errors. Before every so many steps a sequence is preempted."""
    offline = Offline(runner, GroupConfig(scheduler=SchedulerConfig(max_batch=16, num_blocks=200)), EOS)
    if every:
        forced(every)(offline.controller.groups[0].scheduler)
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    outputs = offline.generate([prompt] * len(params), params)
    return [output.error or (tokenizer.decode(output.tokens, True), output.finish) for output in outputs]


def asked(count: int = 9, **changes: object) -> list[SamplingParams]:
    base = SamplingParams(max_tokens=200, grammar=HELD, **changes)
    return [replace(base, seed=i, temperature=(0.0, 0.7, 1.3)[i % 3]) for i in range(count)]


@pytest.mark.parametrize(
    ("draft", "changes"), [(5, {}), (1, dict(top_p=0.8, frequency_penalty=0.3)), (3, dict(logit_bias=((5, 4.0),)))]
)
def test_answers_are_json_of_the_schema(runner, tokenizer, draft, changes):
    for text, finish in generate(runner, tokenizer, asked(seeded=False, max_draft_tokens=draft, **changes)):
        assert finish == "stop" and follows(json.loads(text)), text


def test_drafts_change_no_answer(runner, tokenizer):
    alone = generate(runner, tokenizer, asked(max_draft_tokens=0))
    assert len(set(alone)) > 4 and all(follows(json.loads(text)) for text, _ in alone)
    for draft, every in ((1, 0), (5, 0), (5, 3)):
        assert generate(runner, tokenizer, asked(max_draft_tokens=draft), every) == alone


def test_preemption_leaves_no_answer_outside_the_schema(runner, tokenizer):
    for text, finish in generate(runner, tokenizer, asked(seeded=False, max_draft_tokens=5), every=3):
        assert finish == "stop" and follows(json.loads(text)), text


def test_a_grammar_that_does_not_see_the_draft_shows(tokenizer, monkeypatch):
    runner = ModelRunner.load(
        CODER, max_batch_tokens=256, max_batch=16, num_blocks=200, drafter=str(BUILTIN / "coder-draft")
    )
    monkeypatch.setattr(sampler, "penalised", blind)
    answers = generate(runner, tokenizer, asked(seeded=False, max_draft_tokens=5))
    assert any(isinstance(answer, str) for answer in answers), "errors: tokens that the grammar does not allow"


def test_a_complete_answer_ends_even_before_min_tokens(runner, tokenizer):
    seven = grammar_of("json", '{"enum": [7]}')
    short = SamplingParams(max_tokens=50, min_tokens=40, grammar=seven, max_draft_tokens=3)
    offline = Offline(runner, GroupConfig(scheduler=SchedulerConfig(max_batch=16, num_blocks=200)), EOS)
    (output,) = offline.generate([tokenizer.encode(PROMPT, add_special_tokens=False)], [short])
    assert (tokenizer.decode(output.tokens, False), len(output.tokens)) == (f"7{tokenizer.token_text(EOS[0])}", 2)


def test_a_schema_that_cannot_be_compiled_fails_alone(runner, tokenizer):
    """The server refuses it before; an engine must live with it."""
    bad = replace(asked(1)[0], grammar='start: "nothing')
    error, (text, _) = generate(runner, tokenizer, [bad, asked(1)[0]])
    assert "nothing" in error and follows(json.loads(text))


def test_a_schema_is_compiled_while_the_prompt_is_read(runner, tokenizer, monkeypatch):
    """Here for as long as it takes to compute the first of two chunks."""
    computed, compiled = threading.Event(), Grammars._compile
    step = ModelRunner.step

    def compile_late(grammars: Grammars, schema: str) -> object:
        assert computed.wait(20), "nothing was computed meanwhile"
        return compiled(grammars, schema)

    def watched(*args: object) -> object:
        outputs = step(*args)
        computed.set()
        return outputs

    monkeypatch.setattr(Grammars, "_compile", compile_late)
    monkeypatch.setattr(ModelRunner, "step", watched)
    late = replace(asked(1)[0], grammar=grammar_of("json", json.dumps(SCHEMA | {"title": "compiled here first"})))
    prompt = tokenizer.encode("#" + PROMPT * 40, add_special_tokens=False)
    assert len(prompt) > 256
    offline = Offline(runner, GroupConfig(scheduler=SchedulerConfig(max_batch=16, num_blocks=200)), EOS)
    (output,) = offline.generate([prompt], [late])
    assert not output.error and follows(json.loads(tokenizer.decode(output.tokens, True)))


def test_each_schema_that_is_compiled_is_progress(runner):
    """A step that waits for many is not taken for one that hangs."""
    before = runner.progress
    for n in range(3):
        assert not runner.grammars.of(grammar_of("regex", f"number {n} of {before}")).complete
    assert runner.progress >= before + 3


@pytest.mark.parametrize(("file", "ends"), [(None, EOS), (CODER / "tokenizer.json", ())])
def test_a_model_without_a_tokenizer_or_an_end_says_so(file, ends):
    with pytest.raises(ValueError, match=r"no tokenizer\.json, or no end of sequence"):
        Grammars(file, 2048, ends).of(grammar_of("json", "{}"))


@pytest.mark.parametrize("size", [1000, 2048, 4096])
def test_a_vocabulary_may_be_larger_or_smaller_than_the_tokenizers(size):
    assert max(allowed(Grammars(CODER / "tokenizer.json", size, EOS).of(grammar_of("json", "{}")), size)) < size


def test_a_tokenizer_of_words_serves_all_but_structured_output(tmp_path):
    backend = Backend(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", 3, [0])
    with pytest.raises(ValueError, match="structured output: the model's tokens do not stand for bytes"):
        grammars.of(HELD)


def test_a_grammar_that_fails_behind_a_draft_is_whole_again_without_it():
    one, other = grammar(), grammar()
    first = allowed(one)[0]
    for state in (one, other):
        state.observe(first)
    banned = next(token for token in range(2048) if token not in allowed(one) and token not in EOS)
    one.observe(banned)
    with pytest.raises(ValueError, match="structured output"):
        allowed(one)
    one.forget(banned)
    assert allowed(one) == allowed(other)


def test_a_grammar_that_fails_changes_nobody_elses_row():
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    good = SamplingState(params, 2048, EOS, list(range(1000)), [])
    broken = grammar()
    broken.observe(5)
    bad = SamplingState(SamplingParams(grammar=HELD), 2048, EOS, [], [], broken)
    logits = torch.randn(2, 2048)
    before = logits.clone()
    with pytest.raises(ValueError, match="structured output"):
        sample(logits, [good, bad], [0, 0])
    assert torch.equal(logits, before)


def test_a_schemas_own_options_change_nothing():
    lenient = {"type": "object", "unevaluatedProperties": False, "x-guidance": {"lenient": True}}
    with pytest.raises(ValueError, match="Unimplemented"):
        grammar_of("json", json.dumps(lenient))


def grammar() -> Grammar:
    return Grammars(CODER / "tokenizer.json", 2048, EOS).of(HELD)


def allowed(one: Grammar, size: int = 2048) -> list[int]:
    row = np.zeros(size, np.float32)
    one.apply(row)
    return np.flatnonzero(np.isfinite(row)).tolist()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 8))])
def test_what_is_forgotten_leaves_no_trace(seed):
    """Behind any draft, taken back, the same tokens may follow as before: ends of sequence too."""
    rng, one, known = random.Random(seed), grammar(), []
    for _ in range(60):
        before, draft = allowed(one), []
        for _ in range(rng.randrange(6)):
            draft.append(rng.choice(allowed(one)))
            one.observe(draft[-1])
        for token in reversed(draft):
            one.forget(token)
        assert allowed(one) == before
        known.append(rng.choice(before))
        one.observe(known[-1])
        if known[-1] in EOS:
            assert one.complete and allowed(one) == sorted(EOS)
            break
    again = grammar()
    for token in known:
        again.observe(token)
    assert allowed(again) == allowed(one)


MANY = [{"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(n)}} for n in range(40)]
NESTED = {"$defs": {"a": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}] * 30}}}, "$ref": "#/$defs/a"}
SCHEMAS = [
    {"type": "string", "pattern": "(a{1,1000}){1,1000}(b{1,1000}){1,1000}"},
    {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$" * 30},
    {"type": "string", "pattern": "(.*a){60}"},
    {"type": "array", "items": {}, "minItems": 10**6},
    {"type": "string", "minLength": 10**7},
    {"enum": ["x" * 50 + str(i) for i in range(400)]},
    {"anyOf": MANY},
    NESTED,
]
EVIL = [
    *(("json", json.dumps(schema)) for schema in SCHEMAS),
    *(("regex", schema["pattern"]) for schema in SCHEMAS if "pattern" in schema),
    ("regex", "((a*)*b?)*" * 500),
    ("regex", "|".join("x" * n for n in range(1, 200))),
    ("regex", "((a{0,100}){0,100}){0,100}"),
    ("regex", "x{1000000}"),
    ("regex", "(a|" * 3000 + "b" + ")" * 3000),
]


@pytest.mark.parametrize(("form", "text"), EVIL, ids=lambda part: part[:40])
@pytest.mark.timeout(30)
def test_evil_grammars_cost_little_or_are_refused(form, text):
    try:
        one = Grammars(CODER / "tokenizer.json", 2048, EOS).of(grammar_of(form, text))
        for _ in range(3):
            one.observe(allowed(one)[0])
    except ValueError:
        pass


@pytest.mark.parametrize("form", ["json", "regex"])
def test_long_ones_are_refused(form):
    with pytest.raises(ValueError, match=f"more than {MOST_BYTES} bytes"):
        grammar_of(form, json.dumps(["x" * MOST_BYTES]))


@pytest.mark.parametrize("pattern", ["[a-f]{2,5}(-[0-9]{1,3})?", "(yes|no)!"])
def test_answers_match_a_regular_expression(runner, tokenizer, pattern):
    held = [replace(one, grammar=grammar_of("regex", pattern)) for one in asked(6)]
    alone = generate(runner, tokenizer, [replace(one, max_draft_tokens=0) for one in held])
    assert all(finish == "stop" and re.fullmatch(pattern, answer) for answer, finish in alone), alone
    assert generate(runner, tokenizer, held, every=3) == alone


CHOICES = [" a list", 'a "dict"\n\t', "é 😀", "a listing", "x.*y|z", "\\d+", "[a]{2}", "#&~-/$^()", "\x00 \u2028\x85"]


@pytest.mark.parametrize("choices", [CHOICES, [chr(code) for code in range(1, 3000)]], ids=len)
def test_any_texts_can_be_choices(tokenizer, choices):
    held = grammar_of(*StructuredOutputs(choice=choices).held_to)
    grammars = Grammars(CODER / "tokenizer.json", 2048, EOS)
    for choice in choices[:130] + choices[-20:]:
        one = grammars.of(held)
        for token in (*tokenizer.encode(choice, add_special_tokens=False), EOS[0]):
            assert token in allowed(one), choice
            one.observe(token)
        assert one.complete
