"""Which GPUs there are, and which of them a worker gets. No GPU is needed: the driver's files are made up."""

import json
import os
from pathlib import Path

import pytest

from paceline.cli import accelerators, worker
from paceline.cli.accelerators import VISIBLE, check, gpu_name, gpus
from paceline.cli.groups import OVERHEAD, weight_bytes, worker_groups
from paceline.cli.models import find_models
from paceline.cli.placement_file import load_placement
from paceline.cli.profile_cache import Device
from paceline.core.cluster import KV_SHARE, Parallel
from paceline.runtime.workers import Seat
from tests.cli.command import paceline
from tests.cli.test_fleet_file import write
from tests.cli.test_groups import LIMITS

FLEET = """
models:
  - {name: a, source: builtin:coder, speculation: {drafter: builtin:coder-draft}}
  - {name: b, source: builtin:coder-draft}
"""


@pytest.fixture(autouse=True)
def four_gpus(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    information = tmp_path / "gpus" / "0000:01:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 17\n")
    monkeypatch.setattr(accelerators, "DEVICES", tmp_path)
    monkeypatch.setattr(accelerators, "DRIVER", tmp_path / "gpus")
    monkeypatch.delenv(VISIBLE, raising=False)


def test_gpus_are_those_that_may_be_used(monkeypatch, tmp_path):
    assert gpus() == ["0", "1", "2", "3"] and gpu_name() == "NVIDIA H100 80GB HBM3"
    check("cuda", 4)
    with pytest.raises(ValueError, match="device: 5 GPUs are needed, and 4 are visible here"):
        check("cuda", 5)
    monkeypatch.setenv(VISIBLE, "GPU-1f,3")
    assert gpus() == ["GPU-1f", "3"]
    monkeypatch.setenv(VISIBLE, "2,-1,3")
    assert gpus() == ["2"]
    monkeypatch.setenv(VISIBLE, "")
    with pytest.raises(ValueError, match="device: no NVIDIA GPU is visible here"):
        check("cuda", 1)
    check("cpu", 99)
    monkeypatch.setattr(accelerators, "DRIVER", tmp_path / "nothing")
    assert gpu_name() == "NVIDIA GPU"


def options(group, number: int = 0) -> dict:
    count = len(group.models)
    return json.loads(group.command(Seat(number, "", (None,) * count, (True,) * count, True))[-1])


def test_each_worker_sees_its_own_gpu(tmp_path, monkeypatch):
    models = find_models([str(write(tmp_path, FLEET))], [], device="cuda")
    first, second = worker_groups(models, None, LIMITS)
    assert [options(one)["devices"] for one in (first, second)] == [[0], [1]]
    (served,) = options(first)["models"]
    assert (served["device"], served["dtype"], served["quantization"]) == ("cuda", "auto", "none")
    assert served["draft_quantization"] is None, "on a GPU as its target"
    places = {"groups": [{"devices": [3, 1], "parallel": {"pipeline": 2, "tensor": 1}, "models": ["a", "b"]}]}
    (tmp_path / "placement.json").write_text(json.dumps(places))
    (group,) = worker_groups(models, load_placement(tmp_path / "placement.json"), LIMITS)
    assert group.parallel == Parallel(2, 1) and options(group)["devices"] == [3, 1]
    told = []
    monkeypatch.setattr(worker, "serve", lambda *arguments: told.append(os.environ[VISIBLE]) or 0)
    for number in range(2):
        monkeypatch.setenv(VISIBLE, "4,5,6,7")
        worker.main([json.dumps(options(group, number)), "3"])
    assert told == ["7", "5"]
    by_ray = worker_groups(models, None, LIMITS, elsewhere=True)
    assert [options(one)["devices"] for one in by_ray] == [[], []]
    on_cpu = worker_groups(find_models([str(write(tmp_path, FLEET))], []), None, LIMITS)
    assert options(on_cpu[0])["devices"] == [] and options(on_cpu[0])["models"][0]["draft_quantization"] == "int8"


def test_models_share_gpus_where_there_are_fewer(monkeypatch):
    told = []

    async def run(models, groups, *_):
        told.append(groups)
        return 0

    monkeypatch.setattr("paceline.cli.serve.run", run)
    for visible in ("0", "0,1", "0,1,2"):
        monkeypatch.setenv(VISIBLE, visible)
        models = "builtin:coder", "builtin:coder-draft"
        assert paceline("serve", *models, "--device", "cuda", "--port", "0").returncode == 0
    names = [[[Path(model["path"]).name for model in options(one)["models"]] for one in groups] for groups in told]
    assert names == [[["coder", "coder-draft"]], [["coder"], ["coder-draft"]], [["coder"], ["coder-draft"]]]
    assert [options(one)["devices"] for one in told[1]] == [[0], [1]]


def test_models_of_a_gpu_are_all_loaded(tmp_path):
    models = find_models([str(write(tmp_path, FLEET))], [], device="cuda", dtype="float16")
    assert {one for model in models for one in (model.precision, model.draft_precision)} == {("float16", "float16")}
    places = {"groups": [{"devices": [0], "parallel": {"pipeline": 1, "tensor": 1}, "models": ["a", "b"]}]}
    (tmp_path / "placement.json").write_text(json.dumps(places))
    placement = load_placement(tmp_path / "placement.json")
    room = int(max(weight_bytes(model, Parallel()) for model in models) / (1 - KV_SHARE)) + (1 << 18)
    with pytest.raises(ValueError, match="memory: does not hold all models of a group"):
        worker_groups(models, placement, LIMITS | {"memory": OVERHEAD + room})
    text = FLEET.replace("coder-draft}}", "coder-draft, quantization: int8}}")
    with pytest.raises(ValueError, match="speculation.quantization: int8 is for CPUs; on cuda only none is valid"):
        find_models([str(write(tmp_path, text))], [], device="cuda")


def test_profiles_of_a_gpu_are_its_own():
    cpu, gpu = Device.here(1), Device.here(1, "cuda", "bfloat16")
    assert not cpu.gpu and gpu.gpu == "NVIDIA H100 80GB HBM3, bfloat16" and gpu.cpu == cpu.cpu
