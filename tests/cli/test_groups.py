"""Which groups a fleet is started with: from a placement file, or planned."""

import json

import pytest

from paceline.cli import fleet_file
from paceline.cli.groups import (
    OVERHEAD,
    devices_of,
    held_of,
    kv_blocks,
    plan,
    read_placement,
    weight_bytes,
    worker_group,
    worker_groups,
)
from paceline.cli.models import Model, find_models
from paceline.cli.placement_file import load_placement
from paceline.cli.planning import Planned
from paceline.cli.sources import BUILTIN
from paceline.core.cluster import KV_SHARE, Cluster, Group, Parallel, Placement
from paceline.engine import load
from paceline.engine.config import ModelConfig
from paceline.engine.parallel import Place
from paceline.engine.precision import Precision
from paceline.runtime.workers import Seat
from tests.cli.test_fleet_file import GOOD, write

GROUPS = [
    {"devices": [0, 1], "parallel": {"pipeline": 2, "tensor": 1}, "models": ["a", "b"]},
    {"devices": [2], "parallel": {"pipeline": 1, "tensor": 1}, "models": ["b"]},
]
LIMITS = {"max_batch_tokens": 64, "max_batch": 8, "context": None, "memory": None, "num_blocks": None, "threads": 1}


def placement(tmp_path, groups):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"groups": groups}))
    return path


def test_a_placement_says_which_models_share_which_workers(tmp_path):
    fleet = write(tmp_path, GOOD)
    places = read_placement(placement(tmp_path, GROUPS), fleet_file.load(fleet))
    assert devices_of(None, places) == 3
    first, second = worker_groups(find_models([str(fleet)], []), places, LIMITS)
    assert (first.parallel, second.parallel) == (Parallel(2, 1), Parallel())
    assert [[model.name for model in group.models] for group in (first, second)] == [["a", "b"], ["b"]]
    options = json.loads(first.command(Seat(1, "file:///meet", (None, (77, 99)), (True, False), False))[-1])
    assert (options["number"], options["meeting"]) == (1, "file:///meet")
    assert (options["resident"], options["check"]) == ([True, False], False)
    assert [model["share"] for model in options["models"]] == [0.5, 1.0]
    assert [(model["num_blocks"], model["most_blocks"]) for model in options["models"]] == [(None, None), (77, 99)]
    assert all(model["lends"] for model in options["models"])
    fixed = worker_groups(find_models([str(fleet)], []), places, LIMITS | {"num_blocks": 50})
    options = json.loads(fixed[0].command(Seat(0, "", (None, None), (True, True), True))[-1])
    assert not any(model["lends"] for model in options["models"]), "the number of blocks is the user's"


def test_workers_keep_keys_and_values_as_asked(tmp_path):
    models = find_models(["builtin:coder"], [], kv_cache_dtype="float16")
    command = worker_group(models, LIMITS).command(Seat(0, "", (None,), (True,), True))
    assert json.loads(command[-1])["models"][0]["kv_cache_dtype"] == "float16"
    halves, floats = (kv_blocks(one, 1e9, Parallel()) for one in (models[0], find_models(["builtin:coder"], [])[0]))
    assert halves // 2 == floats


def test_without_a_cluster_every_model_has_a_worker_of_its_own(tmp_path):
    fleet = write(tmp_path, GOOD)
    assert devices_of(fleet_file.load(fleet), None) is None
    groups = worker_groups(find_models([str(fleet)], []), None, LIMITS)
    assert [len(group.models) for group in groups] == [1, 1]


@pytest.mark.parametrize("keys", ["{}", "{devices: auto, memory: auto}", "{memory: 2GiB}", "{devices: 1}"])
def test_the_devices_of_a_cluster_are_shared_and_a_cpu_is_one(tmp_path, keys):
    """One device has all models, whether or not the file says what traffic to expect."""
    file = fleet_file.load(write(tmp_path, GOOD + f"cluster: {keys}\n"))
    assert devices_of(file, None) == 1
    assert plan(file, Planned([], Cluster(1), None)) == Placement((Group((0,), Parallel(), ()),))


@pytest.mark.parametrize(
    ("groups", "cluster", "words"),
    [
        ([GROUPS[0] | {"models": ["a", "c"]}], "", "no model 'c' in the fleet file, which has a, b"),
        ([GROUPS[1]], "", "model 'a' is in no group"),
        (GROUPS, "cluster: {devices: 2}\n", "devices up to 2, the cluster from 0 to 1"),
    ],
)
def test_a_placement_of_another_fleet_is_refused(tmp_path, groups, cluster, words):
    path = placement(tmp_path, groups)
    load_placement(path)
    with pytest.raises(ValueError, match=words):
        read_placement(path, fleet_file.load(write(tmp_path, GOOD + cluster)))
    with pytest.raises(ValueError, match="fleet file"):
        read_placement(path, None)


def test_where_memory_is_short_models_are_loaded_by_need(tmp_path):
    assert held_of([30e6, 30e6, 30e6], OVERHEAD + (200 << 20)) is None
    assert held_of([30e6, 90e6, 50e6, 10e6], OVERHEAD + (200 << 20)) == 2, "the two largest fit, so any two do"
    with pytest.raises(ValueError, match="memory: 840 MiB .* too few for a model of 190 MiB"):
        held_of([200e6], OVERHEAD + (200 << 20))
    models = find_models([str(write(tmp_path, GOOD))], [])
    size = max(weight_bytes(model, Parallel()) for model in models)
    room = int(size / (1 - KV_SHARE)) + (1 << 20)
    group = worker_group(models, LIMITS | {"memory": OVERHEAD + room})
    assert [(model.slots, model.resident) for model in group.models] == [(1, True), (1, False)]
    options = json.loads(group.command(Seat(0, "", (None, None), (True, False), True))[-1])["models"]
    per_block = 16 * ModelConfig.load(models[0].path).kv_bytes_per_token(models[0].precision.kv)
    assert options[0]["num_blocks"] == (room - size) // per_block and not options[0]["lends"]
    assert worker_group(models, LIMITS, room=OVERHEAD + room).models == group.models
    options = json.loads(
        worker_group(models, LIMITS, room=1 << 40).command(Seat(0, "", (None,) * 2, (True,) * 2, True))[-1]
    )["models"]
    assert all(one["memory"] is one["num_blocks"] is None for one in options), "there is room for both: as always"


def test_the_first_worker_has_room_for_what_it_drafts_by(tmp_path):
    def model(drafter: str) -> Model:
        text = GOOD.replace("builtin:coder}", f"'builtin:coder', speculation: {{drafter: {drafter}}}}}", 1)
        return find_models([str(write(tmp_path, text))], [])[0]

    alone, room, two = model("ngram"), 1e9, Parallel(2)
    config, draft = ModelConfig.load(alone.path), ModelConfig.load(BUILTIN / "coder-draft")
    first = config.first(config.exit_layers(None))
    int8 = Precision("int8", "float16")
    for other, parallel, beside, held_in in (
        ("builtin:coder-draft", Parallel(), draft, int8), ("builtin:coder-draft", two, draft, int8),
        ("early_exit", two, first, alone.precision),
    ):  # fmt: skip
        weights = beside.weight_bytes(held_in.weights) + beside.table_bytes
        known, held = model(other), config.kv_bytes_per_token(alone.precision.kv) / parallel.devices
        held += beside.kv_bytes_per_token(held_in.kv)
        assert weight_bytes(known, parallel) == weight_bytes(alone, parallel) + weights
        assert kv_blocks(known, room, parallel) == int(room / (16 * held))
        places = [Place(parallel, number) for number in range(parallel.devices)]
        extra = [
            load.weight_bytes(
                alone.path, place, drafter=str(known.drafting.drafter), draft_quantization=known.drafting.quantization
            )
            - load.weight_bytes(alone.path, place)
            for place in places
        ]
        assert extra == [weights, *[0] * (parallel.devices - 1)]
    assert weight_bytes(model("early_exit"), Parallel()) == weight_bytes(alone, Parallel())
