"""The step-time model recovers a known truth, and never predicts less for a step that computes more."""

from dataclasses import asdict
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.core.batch import StepShape
from paceline.latency.step_time import StepTime, fit, nnls, relative_errors
from paceline.latency.tiles import padded

TILES = ((1, 4), (33, 8))
COEFFICIENTS = dict(emit=2e-5, decode=5e-5, decode_context=2e-8, chunk=3e-4, chunk_context=1e-7, chunk_pair=5e-9)


def truth(shape: StepShape) -> float:
    rows = padded(shape.tokens, TILES)
    cliff = 0.004 * (rows > 64) + 0.01 * (rows > 256)
    return (
        max(0.01, 0.0003 * rows) + cliff + 2e-5 * shape.emits + 5e-5 * shape.decodes + 2e-8 * shape.decode_context
        + 3e-4 * shape.chunks + 1e-7 * shape.chunk_context + 5e-9 * shape.chunk_pairs
    )  # fmt: skip


def shapes(count: int, seed: int, widest: int = 512) -> list[StepShape]:
    rng, made = Random(seed), []
    for width in [*range(1, widest + 1, 7), *(rng.randint(1, widest) for _ in range(count)), widest]:
        shape = StepShape()
        for _ in range(rng.randint(0, min(64, width))):
            shape = shape.add(rng.randint(0, 2000), 1, True)
        for _ in range(rng.randint(0, 3)):
            if width - shape.tokens > 1:
                shape = shape.add(rng.choice((0, 500, 1500)), rng.randint(2, width - shape.tokens), rng.random() < 0.5)
        if shape.tokens:
            made.append(shape)
    return made


def test_a_noiseless_truth_is_recovered():
    known = shapes(400, 1)
    known += [StepShape().add(0, n, True) for n in range(2, 513, 2)]
    model = fit(known, [truth(s) for s in known], TILES)
    for name, value in COEFFICIENTS.items():
        assert getattr(model, name) == pytest.approx(value, rel=1e-3), name
    assert max(relative_errors(model, shapes(200, 2), [truth(s) for s in shapes(200, 2)])) < 1e-3
    assert model.linear[65] - model.linear[64] == pytest.approx(0.004 + 8 * 0.0003, rel=1e-3)  # the cliff
    assert model.linear[40] == model.linear[33] > model.linear[32]


def test_noise_is_averaged_out():
    rng = np.random.default_rng(3)
    known = shapes(300, 3)
    model = fit(known, [truth(s) * (1 + 0.03 * rng.standard_normal()) for s in known], TILES)
    held_out = shapes(200, 4)
    errors = relative_errors(model, held_out, [truth(s) for s in held_out])
    assert np.quantile(errors, 0.5) < 0.02 and np.quantile(errors, 0.95) < 0.06


def test_more_never_takes_less():
    rng = np.random.default_rng(5)
    known = shapes(60, 5)
    model = fit(known, [truth(s) * float(rng.uniform(0.5, 2)) for s in known], TILES)
    assert all(a <= b for a, b in zip(model.linear, model.linear[1:], strict=False))
    assert min(asdict(model)[name] for name in COEFFICIENTS) >= 0
    shape = StepShape().add(700, 1, True).add(700, 1, True)
    times = [model.seconds(shape.add(300, length, False)) for length in range(2, 900)]
    assert times == sorted(times)


def test_beyond_the_table_time_goes_on_at_its_average_slope():
    model = StepTime((1.0, 1.0, 2.0, 4.0), 0, 0, 0, 0, 0, 0)
    assert [model.seconds(StepShape(tokens=n)) for n in (1, 3, 6)] == [1.0, 4.0, 8.0]


def test_a_batch_takes_what_its_shape_takes():
    shape = StepShape().add(7, 1, True).add(4, 30, False)
    model = StepTime(tuple(range(64)), 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    assert model(SimpleNamespace(shape=shape)) == model.seconds(shape)
    assert model.seconds(shape) == pytest.approx(31 + 0.1 + 0.01 + 0.007 + 0.0001 + 0.00004 + 585e-6)


def test_nnls_meets_the_conditions_of_optimality():
    rng = np.random.default_rng(7)
    for _ in range(50):
        a, b = rng.standard_normal((30, 12)), rng.standard_normal(30)
        x = nnls(a, b)
        slope = a.T @ (b - a @ x)
        assert (x >= 0).all() and (slope < 1e-8).all()
        assert abs(slope[x > 0]).max(initial=0) < 1e-8
