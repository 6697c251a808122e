"""The batches and token times that the original schedulers gave (or give once rules M1-M5 mend them)."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from paceline.batching.scheduler import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch
from paceline.core.events import Event
from paceline.core.request import Request
from paceline.simulator.driver import FixedOutputs, simulate
from tests.reference import parameters

OWN = Path(__file__).parent / "cases"


class CostModel:
    """Integer microseconds of a batch, as the reference's README defines them."""

    def __init__(self, overhead_us=0, per_token_us=0, floor_us=0, tile=1, attn_pair_div=None, kv_read_div=None):
        self.overhead, self.per_token, self.floor, self.tile = overhead_us, per_token_us, floor_us, tile
        self.attn_pair_div, self.kv_read_div = attn_pair_div, kv_read_div

    def __call__(self, batch: Batch) -> int:
        width = -(-batch.num_tokens // self.tile) * self.tile
        time = self.overhead + max(self.floor, self.per_token * width)
        if self.attn_pair_div:
            pairs = sum(s.length * (2 * s.start + s.length + 1) // 2 for s in batch.slices)
            time += pairs // self.attn_pair_div
        if self.kv_read_div:
            time += sum(s.start for s in batch.slices) // self.kv_read_div
        return time


def run(case: dict, policy: str) -> tuple[list[Event], dict[str, str]]:
    config = case["config"]
    scheduler = SchedulerConfig(
        token_budget=config["token_budget"],
        max_batch=config["max_batch"],
        block_size=config["block_size"],
        num_blocks=config["num_blocks"],
        watermark=config["watermark_fraction"],
    )
    controller = Controller([GroupConfig(scheduler=scheduler, policy=policy)])
    requests = [Request(r["id"], r["prompt"], r["output"], arrival=r["arrival_us"]) for r in case["requests"]]
    outputs = FixedOutputs({r["id"]: r["output"] for r in case["requests"]})
    return simulate(controller, requests, CostModel(**case["cost_model"]), outputs)


def observed(case: dict, trace: list[Event]) -> tuple[list, dict, list]:
    """Batches as (start, width, items), token times and preemptions, in the case's own notation."""
    batches, times, preempted = [], defaultdict(list), []
    prompt = {r["id"]: r["prompt"] for r in case["requests"]}
    known = dict(prompt)
    for event in trace:
        if event.kind == "started":
            items = set()
            for request, start, length in event.detail:
                kind = "P" if start < prompt[request] else "D"
                items.add(f"{request}:{kind}:{length}@{start}")
            batches.append((event.time, event.tokens, items))
        elif event.kind == "tokens":
            times[event.request].append(event.time)
            known[event.request] += 1
        elif event.kind == "preempted":
            prompt[event.request] = known[event.request]
            preempted.append((event.time, event.request, known[event.request]))
    return batches, dict(times), preempted


def check(path: Path, policy: str) -> None:
    case = json.loads(path.read_text())
    expected = case["expected"].get(policy)
    if expected is None:
        pytest.skip(f"the case has no expectation for {policy}")
    if case["config"]["pipeline_stages"] > 1:
        pytest.skip("pipelines of several stages are not simulated yet")
    batches, times, preempted = observed(case, run(case, policy))
    assert batches == [(b["t"], b["n"], set(b["items"])) for b in expected["batches"]]
    assert times == expected["token_times_us"]
    assert preempted == [(p["t_us"], p["id"], p["new_prompt"]) for p in expected.get("preemptions", [])]


@pytest.mark.parametrize("path", parameters("sarathi/scheduling"))
def test_reference_batches_and_times(path):
    check(path, "sarathi_serve")


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in sorted(OWN.glob("*.json"))])
def test_own_batches_and_times(path):
    check(path, "sarathi_serve")
