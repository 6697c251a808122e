"""Virtual time: stages of a pipeline, first in first out."""

from paceline.batching.config import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.request import Request
from paceline.simulator.driver import FixedOutputs, advance, simulate


def test_a_batch_waits_for_the_stage_and_for_itself():
    clocks = [0.0, 0.0]
    assert advance(clocks, 1.0, 4.0) == [(1.0, 5.0), (5.0, 9.0)]
    assert advance(clocks, 2.0, 1.0) == [(5.0, 6.0), (9.0, 10.0)], "it stands behind the longer one in the second stage"
    assert advance(clocks, 20.0, 1.0) == [(20.0, 21.0), (21.0, 22.0)]
    assert clocks == [21.0, 22.0]


def test_a_pipeline_takes_as_many_batches_as_it_has_stages():
    flying, most = set(), 0
    limits = SchedulerConfig(token_budget=4)
    controller = Controller([GroupConfig(scheduler=limits, policy="sarathi_serve", pipeline=3)])
    scheduler = controller.groups[0].scheduler

    def watch(batch, stages):
        nonlocal most
        flying.add(batch.id)
        most = max(most, len(scheduler.flying))

    requests = [Request(str(i), 4, 5) for i in range(9)]
    simulate(controller, requests, lambda batch: 2, FixedOutputs({r.id: 5 for r in requests}), watch=watch)
    assert most == 3 and len(flying) > 9


def test_an_arrival_joins_the_next_step_of_the_first_stage():
    """Our policy composes a step when the first stage is free for it; published ones when the pipeline has a place."""
    joined = {}
    for policy in ("paceline", "sarathi_serve"):
        controller = Controller([GroupConfig(policy=policy, pipeline=2)])
        requests = [Request("a", 8, 2), Request("b", 8, 2, arrival=1), Request("c", 8, 2, arrival=2)]
        trace = simulate(controller, requests, lambda batch: 10, FixedOutputs({r.id: 2 for r in requests}))
        joined[policy] = [e.detail.requests for e in trace if e.kind == "started"][:2]
    assert joined == {"paceline": [["a"], ["b", "c"]], "sarathi_serve": [["a"], ["b"]]}
