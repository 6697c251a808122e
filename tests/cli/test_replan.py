"""A fleet that plans again: what is remembered of traffic, and a move that the planner asks for."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.cli.deployment import Deployment, used
from paceline.cli.replan import Replanner
from paceline.core.cluster import Group, Parallel, Placement
from paceline.core.request import SLO, SamplingParams
from paceline.runtime.fleet import FleetConfig, LocalFleet
from paceline.runtime.recent import Recent
from paceline.workload.trace import Trace
from tests.cli.command import paceline
from tests.runtime.test_fleet import Collector, worker

MODELS = """
models:
  - {name: a, source: builtin:coder, slo: {ttft: 1.0}}
  - {name: b, source: builtin:coder-draft, slo: {ttft: 1.0}}
"""
FLEET = MODELS + "cluster: {devices: 2, memory: 1GiB}\n"
STEP = {
    "linear": [0.02 + n / 5000 for n in range(257)], "emit": 0.0, "decode": 1e-3, "decode_context": 0.0, "chunk": 0.0,
    "chunk_context": 0.0, "chunk_pair": 0.0,
}  # fmt: skip
ENTRY = {"parallel": [{"stage_weight_bytes": [1e8]}], "step_time": STEP, "roofline": {"kv_bytes": 1000}}
APART = Placement((Group((0,), Parallel(), ("a",)), Group((1,), Parallel(), ("b",))))


async def test_recent_traffic_is_a_trace_and_what_was_refused_is_in_it():
    clock = [0.0]
    config = FleetConfig(token_budget=16, max_waiting=1, max_batch=1)
    async with LocalFleet([worker("a"), worker("b")], config) as fleet:
        recent = Recent(fleet, 100.0, lambda: clock[0])
        sinks = [Collector() for _ in range(3)]
        fleet.submit("a", [1] * 7, SamplingParams(max_tokens=4), sinks[0])
        await sinks[0].done.wait()
        came = time.monotonic()
        fleet.submit("b", [1] * 5, SamplingParams(max_tokens=50), sinks[1])
        fleet.submit("a", [1] * 9, SamplingParams(max_tokens=6), sinks[2], arrival=came)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        trace = recent.trace()
        assert trace.arrivals[0] == 0 and (np.diff(trace.arrivals) > 0).all()
        rows = zip([trace.names[m] for m in trace.models], trace.prompts.tolist(), trace.outputs.tolist(), strict=True)
        assert list(rows) == [("a", 7, 4), ("a", 9, 6), ("b", 5, 50)], "by arrival, not by submission"
        busy, waits, refused = Collector(), Collector(), SamplingParams(max_tokens=3)
        fleet.submit("a", [1], SamplingParams(max_tokens=90), busy)
        fleet.submit("a", [1], SamplingParams(max_tokens=2), waits)
        try:
            fleet.submit("a", [1] * 11, refused, Collector(), slo=SLO())
        except Exception as error:
            assert type(error).__name__ == "Overloaded"
        await asyncio.gather(busy.done.wait(), waits.done.wait())
        outputs = {p: o for p, o in zip(recent.trace().prompts.tolist(), recent.trace().outputs.tolist(), strict=True)}
        assert outputs[11] == round((4 + 6 + 90 + 2) / 4), "it would have had the mean output"
        clock[0] = 1e12
        assert not len(recent.trace()), "nothing has come since"
        fleet.submit("b", [1], SamplingParams(max_tokens=1), last := Collector())
        await last.done.wait()
        await asyncio.sleep(0.01)
        assert not len(recent.trace()), "all of it is long ago"


async def test_a_plan_made_before_a_device_was_lost_is_not_moved_to():
    fleet = SimpleNamespace(workers=[])
    deployment = Deployment(fleet, Path(), [], APART, list, 2)
    shares = iter((b'{"attainment": 0.5}', b'{"attainment": 1.0}'))

    async def plan(devices, trace):
        assert devices == 2
        del deployment.groups[1]
        return APART

    async def simulate(placement, trace):
        return next(shares)

    deployment.plan, deployment.simulate = plan, simulate
    said = []
    assert not await Replanner(deployment, SimpleNamespace(trace=lambda: [None] * 50), said.append).once()
    assert not said and not next(shares, None)


@pytest.mark.parametrize("cluster", ["", "cluster: {devices: auto}\n"])
def test_the_devices_of_a_placement_are_planned_for_where_the_file_does_not_say_them(tmp_path, monkeypatch, cluster):
    """`serve --placement` takes such a fleet."""
    (tmp_path / "fleet.yaml").write_text(MODELS + cluster)
    (tmp_path / "profile.json").write_text(json.dumps({"models": {"a": ENTRY, "b": ENTRY}}))
    options = ["--profile", str(tmp_path / "profile.json"), "--memory", "2GiB"]
    monkeypatch.setattr("paceline.cli.deployment._paceline", in_this_process)
    async def left() -> None: ...

    nothing_loaded, moved, said = SimpleNamespace(groups=[], left=left), [], []
    deployment = Deployment(nothing_loaded, tmp_path / "fleet.yaml", options, APART, list, 2)

    async def move(placement):
        moved.append(placement)

    deployment.move = move
    assert asyncio.run(Replanner(deployment, SimpleNamespace(trace=lambda: for_one(400)), said.append).once())
    assert moved[0].hosts("a") == (0, 1) and "moving to another placement" in said[0]


def test_models_that_are_loaded_by_need_are_planned_for_as_fast_as_they_came(tmp_path, monkeypatch):
    """Though the fleet file does not say how fast that is. A plan may leave models out, which the server then loads."""
    (tmp_path / "fleet.yaml").write_text(MODELS)
    held = {"stage_weight_bytes": [1e8], "working_bytes": 640 << 20}
    (tmp_path / "profile.json").write_text(json.dumps({"models": dict.fromkeys("ab", ENTRY | {"parallel": [held]})}))
    options = ["--profile", str(tmp_path / "profile.json"), "--memory", "800MiB"]
    monkeypatch.setattr("paceline.cli.deployment._paceline", in_this_process)
    one = Placement((Group((0,), Parallel(), ("a", "b")),))
    trace = Trace(np.arange(60.0), np.arange(60, dtype=np.int32) % 2, np.full(60, 60), np.full(60, 9), ("a", "b"))

    def attained(load_s: float, slots: int | None) -> float:
        info, config = SimpleNamespace(weight_bytes=10**8), SimpleNamespace(slots=slots)
        alone = SimpleNamespace(parallel=Parallel())
        model = SimpleNamespace(info=info, load_s=load_s, config=config, workers=alone)
        fleet = SimpleNamespace(groups=[model] * 2)
        deployment = Deployment(fleet, tmp_path / "fleet.yaml", options, one, list, 1)
        assert not asyncio.run(Replanner(deployment, SimpleNamespace(trace=lambda: trace), [].append).once())
        return json.loads(asyncio.run(deployment.simulate(one, trace)))["attainment"]

    assert attained(0.05, 1) == attained(0.05, None) == 1.0 > 0.9 > attained(2.0, 1)


async def in_this_process(*arguments: str) -> None:
    done = paceline(*arguments)
    if done.returncode:
        raise RuntimeError(done.stderr)


def for_one(count: int) -> Trace:
    """Nearly all for `a`: more than one device can serve."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(0.03, count))
    models = (rng.random(count) < 0.05).astype(np.int32)
    return Trace(arrivals, models, np.full(count, 60), np.full(count, 30), ("a", "b"))


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_fleet_moves_where_the_planner_finds_a_better_placement(tmp_path):
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "profile.json").write_text(json.dumps({"models": {"a": ENTRY, "b": ENTRY}}))
    said = []

    def groups(placement: Placement):
        return [worker(*group.models) for group in used(placement)]

    async with LocalFleet(groups(APART), FleetConfig(token_budget=16)) as fleet:
        recent = Recent(fleet, 600.0, time.monotonic)
        options = ["--profile", str(tmp_path / "profile.json")]
        deployment = Deployment(fleet, tmp_path / "fleet.yaml", options, APART, groups, 2)
        replanner = Replanner(deployment, recent, said.append)
        assert not await replanner.once(), "nothing is known of the traffic"
        replanner.recent.trace = lambda: for_one(400)
        assert await replanner.once() and len(said) == 1 and "moving" in said[0]
        assert len(fleet.hosts("a")) == 2 and fleet.hosts("b")
        sink = Collector()
        fleet.submit("a", [1], SamplingParams(max_tokens=3), sink)
        await sink.done.wait()
        assert not await replanner.once(), "there is nothing better any more"
