"""The profiler against an engine whose step times are known, and against a real one."""

from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from paceline.core.batch import StepShape
from paceline.core.work import EngineInfo, SliceOutput
from paceline.engine import profiler
from paceline.engine.config import ModelConfig
from paceline.engine.runner import ModelRunner
from paceline.latency.tiles import padded
from tests.engine import checkpoints

CODER = Path(__file__).parents[2] / "paceline" / "builtin" / "coder"
TILES = ((1, 4), (33, 8))


def truth(shape: StepShape) -> float:
    rows = padded(shape.tokens, TILES)
    return (
        0.004 + 0.0001 * rows + 0.003 * (rows > 64) + 2e-5 * shape.decodes + 1e-7 * shape.decode_context
        + 2e-4 * shape.chunks + 2e-7 * shape.chunk_context + 4e-9 * shape.chunk_pairs
    )  # fmt: skip


@pytest.fixture(autouse=True)
def clock(request, monkeypatch):
    """That of engines whose times are known."""
    if "real" not in request.node.name:
        monkeypatch.setattr(KnownEngine, "now", 0.0)
        monkeypatch.setattr(profiler, "perf_counter", lambda: KnownEngine.now)


class KnownEngine:
    """Takes as long as `truth` says, give or take a per cent, and checks what it is given."""

    now = 0.0

    def __init__(self, num_blocks: int = 400, block_size: int = 16, context: int = 1024) -> None:
        self.info = EngineInfo(num_blocks, block_size, 1000, 1000, 3000, context, vocab_size=100)
        config = ModelConfig.load(CODER)
        self.decoder = SimpleNamespace(config=config, device="cpu", dtype=torch.float32, embedding=None)
        self.cache = SimpleNamespace(token_bytes=100)
        self.rng = Random(1)
        self.known: dict[int, int] = {}
        self.shapes: list[StepShape] = []
        self.error = ""

    def step(self, new, slices, dropped):
        for name in dropped:
            del self.known[name]
        self.known |= {sequence.id: len(sequence.tokens) for sequence in new}
        shape, blocks = StepShape(), []
        for work in slices:
            end = work.start + work.length
            assert end <= self.info.context and end <= len(work.blocks) * self.info.block_size
            assert work.emits == (end == self.known[work.id])
            blocks += work.blocks
            shape = shape.add(work.start, work.length, work.emits)
        assert len(set(blocks)) == len(blocks) and max(blocks, default=0) < self.info.num_blocks
        if not slices:
            return [], 0.0, 0.0
        self.shapes.append(shape)
        outputs = [SliceOutput([], error=self.error) for _ in slices]
        forward, sampling = 0.9 * truth(shape) * self.rng.gauss(1, 0.01), 0.1 * truth(shape)
        KnownEngine.now += forward + sampling
        return outputs, forward, sampling


def test_what_it_measures_is_what_the_engine_takes():
    engine = KnownEngine()
    told = []
    profile = profiler.profile(
        engine, max_tokens=256, max_batch=64, seconds=40.0, progress=lambda done, total: told.append((done, total))
    )
    assert profile.tiles == TILES and profile.tile == 8 and profile.max_tokens == 256
    assert 64 in [cliff.tokens for cliff in profile.cliffs]
    assert profile.error.p50 < 0.02 and profile.error.p95 < 0.04 and profile.noise.p50 < 0.02
    for name, value in (("decode_context", 1e-7), ("chunk_context", 2e-7)):
        assert getattr(profile.step_time, name) == pytest.approx(value, rel=0.1)
    assert told[-1][0] == told[-1][1] == len(told)
    assert max(shape.tokens for shape in engine.shapes) == 256
    assert max(shape.decodes for shape in engine.shapes) <= 64
    assert not engine.known  # nothing is left behind


def test_a_small_pool_limits_contexts_and_not_widths():
    engine = KnownEngine(num_blocks=40)
    profiler.profile(engine, max_tokens=256, max_batch=64, seconds=1.0)
    assert max(shape.tokens for shape in engine.shapes) == 256


def test_a_pool_too_small_is_refused():
    with pytest.raises(ValueError, match="num-blocks: 9 KV blocks"):
        profiler.profile(KnownEngine(num_blocks=9), max_tokens=256, max_batch=64, seconds=1.0)


def test_a_step_that_fails_is_not_a_measurement():
    engine = KnownEngine()
    engine.error = "out of luck"
    with pytest.raises(RuntimeError, match="out of luck"):
        profiler.profile(engine, max_tokens=64, max_batch=8, seconds=1.0)


def test_what_lies_between_steps_is_time_too():
    """A run takes as long on a GPU, whose steps take less than it takes to ask for them."""
    engine = KnownEngine()
    step, short = engine.step, 1e-4

    def slow(*arguments):
        KnownEngine.now += profiler.SETTLED
        return step(*arguments)[0], short, 0.0

    engine.step = slow
    assert profiler.Bench(engine).run([(0, 8, True)]) == short and len(engine.shapes) == 1


def test_a_real_engine_is_profiled(tmp_path):
    checkpoints.save("qwen2", tmp_path)
    runner = ModelRunner.load(tmp_path, max_batch_tokens=48, max_batch=8, block_size=4, num_blocks=128)
    profile = profiler.profile(runner, max_tokens=48, max_batch=8, seconds=0.2)
    assert profile.max_tokens == 48 and 1 <= profile.knee <= 48
    assert 0 < profile.floor <= profile.step_time.seconds(StepShape().add(0, 48, True))
    assert list(profile.widths) == sorted(profile.widths) and min(profile.widths.values()) > 0
    assert not runner.sequences
    passes = [seconds for rows, seconds in profile.chained.items() if rows]
    assert not profile.chained or (sum(passes) > 0 and max(passes) < profile.step_time.linear[-1])
    assert list(profile.chained) in ([], [1, 0, 2, 4]), "as many sequences as there is room for"
    runner.decoder.embedding = None  # as where the table stays in its file
    assert profiler.chained(runner, 8) == {}
