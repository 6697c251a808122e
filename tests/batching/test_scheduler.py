"""Invariants of every run, whatever arrives: budget, decodes, blocks, progress."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batching.scheduler import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch
from paceline.core.request import Request
from paceline.simulator.driver import FixedOutputs, simulate

REQUESTS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 40), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=14
)
LIMITS = st.builds(
    SchedulerConfig,
    token_budget=st.integers(1, 48),
    max_batch=st.integers(1, 8),
    block_size=st.sampled_from([1, 4, 16]),
    num_blocks=st.integers(4, 60),
    watermark=st.sampled_from([0.0, 0.05, 0.25]),
)


class Checked:
    """A latency model that looks at every batch, and at the scheduler behind it."""

    def __init__(self, controller: Controller) -> None:
        self.scheduler = controller.groups[0].scheduler

    def __call__(self, batch: Batch) -> int:
        scheduler = self.scheduler
        scheduler.check()
        decodes = [s for s in batch.slices if s.decode]
        assert batch.num_tokens <= max(scheduler.config.token_budget, len(decodes))
        ready = {s.id for s in scheduler.running if s.decoding}
        assert {s.sequence.id for s in decodes} == ready, "a decode was skipped"
        assert len(scheduler.running) <= scheduler.config.max_batch
        for item in batch.slices:
            assert item.length >= 1
            assert item.end <= len(item.sequence.blocks) * scheduler.config.block_size
        size = scheduler.config.block_size
        written = [block for s in batch.slices for block in s.sequence.blocks[s.start // size :]]
        assert len(written) == len(set(written)), "two sequences write the same block"
        return 10 + batch.num_tokens


def shared_prefixes(family: int, prompt: int, size: int) -> tuple[int, ...]:
    """Hashes of the full blocks; requests of a family share their beginning. Family 0 caches nothing."""
    return tuple(1000 * family + i for i in range(prompt // size)) if family else ()


@settings(max_examples=300, deadline=None)
@given(REQUESTS, LIMITS, st.sets(st.integers(0, 13)), st.integers(0, 400))
def test_every_run_keeps_the_invariants(rows, limits, cancelled, cancel_time):
    controller = Controller([GroupConfig(scheduler=limits)])
    requests = [
        Request(str(i), prompt, output, arrival=arrival, prefix=shared_prefixes(family, prompt, limits.block_size))
        for i, (arrival, prompt, output, family) in enumerate(rows)
    ]
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests})
    cancels = [(cancel_time, str(i)) for i in cancelled]
    trace = simulate(controller, requests, Checked(controller), outputs, cancels)
    scheduler = controller.groups[0].scheduler
    assert not scheduler.waiting and not scheduler.running and not controller.sequences
    scheduler.check()
    assert scheduler.blocks.num_free == limits.num_blocks
    ends = {e.request: e.kind for e in trace if e.kind in ("finished", "rejected", "cancelled")}
    for request in requests:
        fits = scheduler.fits(request.prompt_tokens, request.max_tokens)
        assert ends[request.id] in (("finished", "cancelled") if fits else ("rejected",))
        emitted = sum(e.tokens for e in trace if e.kind == "tokens" and e.request == request.id)
        assert ends[request.id] != "finished" or emitted == request.max_tokens


def run(limits: SchedulerConfig, requests: list[Request]):
    controller = Controller([GroupConfig(scheduler=limits)])
    outputs = FixedOutputs({r.id: r.max_tokens for r in requests})
    trace = simulate(controller, requests, lambda batch: 10 + batch.num_tokens, outputs)
    return controller, trace


def test_a_prefix_hit_costs_no_budget():
    limits = SchedulerConfig(token_budget=8, block_size=4, num_blocks=64)
    prefix = tuple(range(8))
    requests = [Request("a", 33, 2, prefix=prefix), Request("b", 33, 2, arrival=1000, prefix=prefix)]
    controller, trace = run(limits, requests)
    widths = [e.tokens for e in trace if e.kind == "started" and e.time >= 1000]
    assert widths == [1, 1], "32 of 33 prompt tokens came from the cache"
    assert controller.groups[0].scheduler.cached_tokens == 32


def test_the_last_token_is_computed_even_if_all_blocks_are_cached():
    limits = SchedulerConfig(token_budget=64, block_size=4, num_blocks=64)
    prefix = tuple(range(8))
    _, trace = run(limits, [Request("a", 32, 1, prefix=prefix), Request("b", 32, 1, arrival=1000, prefix=prefix)])
    assert [e.tokens for e in trace if e.kind == "started"] == [32, 4]
