"""Linear layers of every kind against the plain product, at any number of rows."""

import ctypes
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline import processor
from paceline.engine import linear
from paceline.engine.linear import KINDS, Norm, best_kind, kernels, make_linear, quantize

TILES = kernels is not None and kernels.HAS_TILES
OTHERS = "int8", "bf16", "rounded", "float"  # the last on GPUs: test_gpu.py
FLOAT = [kind for kind in KINDS if not any(part in kind for part in OTHERS) and (TILES or kind != "tiled")]
KEPT = ["tiled_bf16"] if TILES else []  # of weights that are bfloat16
HALVES = [*KEPT, "tiled_rounded"] if TILES else []  # and of inputs that may become it
INT8 = [kind for kind in KINDS if "int8" in kind and (TILES or kind == "int8")]
ROWS = (1, 2, 5, 7, 8, 9, 10, 11, 12, 13, 20, 23, 24, 25, 31, 32, 33, 100, 188, 287, 300, 520)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(kind: str, outer: int, inner: int) -> Tensor:
    """A random one, of numbers that a layer of this kind can hold as they are."""
    weight = random(outer, inner) / inner**0.5
    return weight.bfloat16() if kind in HALVES else weight


def reference(weight: Tensor, bias: Tensor | None, gated: bool, x: Tensor, norm: Norm | None) -> Tensor:
    """In float64."""
    x, weight = x.double(), weight.double()
    if norm is not None:
        x = F.rms_norm(x, x.shape[1:], norm.weight.double(), norm.eps)
    y = x @ weight.T + (0.0 if bias is None else bias.double())
    if gated:
        y = F.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]
    return y.float()


@pytest.mark.parametrize("kind", [*FLOAT, *KEPT])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("outer", "inner"), [(96, 64), (50, 24), (80, 2056), (1100, 1032), (30, 12)])
def test_it_is_the_product_at_any_number_of_rows(kind: str, gated: bool, outer: int, inner: int) -> None:
    weight, bias = matrix(kind, 2 * outer if gated else outer, inner), random(2 * outer if gated else outer)
    norm = Norm(random(inner, seed=2).abs() + 0.5, 1e-6)
    layer, bare = make_linear(kind, weight, bias, gated), make_linear(kind, weight, None, gated)
    every = random(max(ROWS), inner)
    plain, normed, both = (reference(weight, b, gated, every, n) for b, n in ((bias, None), (None, norm), (bias, norm)))
    for rows in ROWS:
        x = every[-rows:]  # other rows first each time
        torch.testing.assert_close(layer(x), plain[-rows:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(bare(x, norm), normed[-rows:], rtol=1e-4, atol=1e-4)
        if gated:
            continue
        y = random(rows, outer, seed=rows + 1)
        expected = y + both[-rows:]
        assert layer(x, norm, add_to=y) is y
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*FLOAT, *KEPT])
def test_it_loses_no_more_than_sums_of_float32_do(kind: str) -> None:
    """Of 2048 products 0.4e-6 in matrix registers and 0.8e-6 in vectors; without a product of parts 2.4e-6 or more."""
    weight, x = matrix(kind, 256, 2048), random(64, 2048, seed=1)
    exact = x.double() @ weight.double().T
    error = make_linear(kind, weight)(x) - exact
    assert error.square().mean().sqrt() < 1.5e-6 * exact.square().mean().sqrt()


@pytest.mark.skipif(not TILES, reason="weights become float32")
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("outer", "inner"), [(96, 64), (50, 24), (80, 2056), (1100, 1032)])
def test_rounded_inputs_are_multiplied_as_bfloat16_where_that_makes_fewer_products(
    gated: bool, outer: int, inner: int
) -> None:
    weight, bias = matrix("tiled_rounded", 2 * outer if gated else outer, inner), random(2 * outer if gated else outer)
    layer = make_linear("tiled_rounded", weight, bias, gated)
    for rows in ROWS:
        x = random(rows, inner, seed=rows)
        rounded = x.bfloat16().float() if kernels.HAS_BF16 else x
        torch.testing.assert_close(layer(x), reference(weight, bias, gated, rounded, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", INT8)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("outer", "inner"), [(96, 64), (50, 24), (16, 2056), (30, 12), (30, 1)])
def test_int8_is_the_product_of_the_rounded_numbers(kind: str, gated: bool, outer: int, inner: int) -> None:
    weight, bias = random(2 * outer if gated else outer, inner) / inner**0.5, random(2 * outer if gated else outer)
    layer = make_linear(kind, weight, bias, gated)
    rounded, scale = quantize(weight)
    for rows in ROWS:
        x = random(rows, inner, seed=rows)
        whole, step = quantize(x)
        expected = reference(rounded * scale[:, None], bias, gated, whole * step[:, None], None)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", INT8)
def test_int8_of_nothing_but_zeros(kind: str) -> None:
    assert make_linear(kind, random(32, 16))(torch.zeros(3, 16)).eq(0).all()
    assert make_linear(kind, torch.zeros(32, 16))(random(3, 16)).eq(0).all()


@pytest.mark.parametrize("kind", [kind for kind in (*FLOAT, *HALVES, *INT8) if "tiled" in kind])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(kind: str, gated: bool) -> None:
    layer, x = make_linear(kind, matrix(kind, 128, 4160), None, gated), random(530, 4160, seed=1)
    norm = Norm(random(4160, seed=2), 1e-6)
    whole = layer(x, norm)
    for begin, end in ((0, 1), (3, 5), (8, 16), (1, 18), (505, 530), (0, 512)):
        assert torch.equal(layer(x[begin:end], norm), whole[begin:end])


@pytest.mark.skipif(not KEPT, reason="weights become float32")
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("outer", "inner"), [(96, 64), (50, 24), (80, 2056), (1100, 1032), (128, 4160)])
def test_weights_that_stay_bfloat16_give_the_bits_of_those_that_become_float32(
    gated: bool, outer: int, inner: int
) -> None:
    weight = matrix("tiled_bf16", 2 * outer if gated else outer, inner)
    weight[0, :5] = torch.tensor([1e-39, -0.0, 3e38, float("inf"), float("nan")])
    kept, floats = (make_linear(kind, weight, random(len(weight)), gated) for kind in ("tiled_bf16", "tiled"))
    for rows in ROWS:
        x = random(rows, inner, seed=rows)
        assert torch.equal(bits(kept(x)), bits(floats(x)))


@pytest.mark.parametrize("kind", [kind for kind in (*FLOAT, *HALVES) if "tiled" in kind])
def test_a_row_that_is_not_a_number_stays_its_own_fault(kind: str) -> None:
    layer, x = make_linear(kind, matrix(kind, 64, 64)), random(20, 64, seed=1)
    clean = layer(x)
    x[3, 5], x[9, 1] = float("nan"), float("inf")
    dirty = layer(x, add_to=torch.zeros(20, 64))
    assert dirty[3].isnan().all() and not dirty[9].isfinite().any()
    others = [row for row in range(20) if row not in (3, 9)]
    assert torch.equal(dirty[others], clean[others])


def test_the_kind_follows_the_processor_and_the_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    assert best_kind("cuda") == "plain"
    assert (best_kind("cpu") == "tiled") == (best_kind("cpu", "int8") == "tiled_int8") == TILES
    monkeypatch.setattr(linear, "kernels", None)
    assert best_kind("cpu") in ("onednn", "mkl", "plain") and best_kind("cpu", "int8") == "int8"


@pytest.mark.parametrize("kind", [*FLOAT, *HALVES, *INT8])
def test_bytes_that_a_product_reads(kind: str) -> None:
    size = 1 if kind in INT8 else 2 if kind in HALVES else 4
    assert make_linear(kind, matrix(kind, 32, 16)).nbytes == 32 * 16 * size


def panels_of(weight: Tensor, gated: bool) -> Tensor:
    """Panels of 32 outputs, [panels, 32, in], filled up with zeros; gates and their values alternate by 16."""
    halves = weight.chunk(2) if gated else (weight,)
    width = 32 // len(halves)
    filled = [torch.cat([half, torch.zeros(-len(half) % width, weight.shape[1])]) for half in halves]
    return torch.cat([half.unflatten(0, (-1, width)) for half in filled], dim=1)


def packed_by_torch(kind: str, weight: Tensor, gated: bool) -> list[Tensor]:
    """What a tiled layer holds: weights, and for int8 scales and 128 times the sums of rows."""
    panels = panels_of(weight, gated)
    if kind == "tiled":
        return [panels.transpose(1, 2)]
    if kind in HALVES:  # pairs of neighbours of a row
        return [panels.bfloat16().unflatten(2, (-1, 2)).transpose(1, 2)]
    quantized, scale = quantize(panels.flatten(0, 1))
    excess = quantized.sum(dim=1, dtype=torch.int32) * 128
    together = quantized.view(len(panels), 32, -1, kernels.TOGETHER).transpose(1, 2)
    return [together, torch.stack([scale, excess.view(torch.float32)])]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


TILED = [kind for kind in (*FLOAT, *HALVES, *INT8) if "tiled" in kind]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("kind", "dtype"), [*itertools.product(TILED, DTYPES)])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("outer", "inner"), [(96, 64), (50, 24), (2, 8), (34, 2056), (700, 136)])
def test_packing_gives_the_bits_that_torch_does(
    kind: str, dtype: torch.dtype, gated: bool, outer: int, inner: int
) -> None:
    weight = (random(outer, inner) * random(outer, 1, seed=1).exp()).to(dtype)
    weight[1], weight[0, inner // 2] = 0.0, -0.0
    layer = make_linear(kind, weight, None, gated)
    held = [layer.packed] if layer.scale is None else [layer.packed, layer.scale]
    for ours, theirs in zip(held, packed_by_torch(kind, weight.float(), gated), strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("kind", TILED)
def test_rows_are_packed_from_where_they_lie(kind: str) -> None:
    """Parts of several tensors: some rows, some columns, rows in another order, any dtype."""
    whole = random(96, 200).bfloat16()
    parts = [whole[8:72].unflatten(0, (4, 2, 8)).transpose(1, 2)[..., 16:152], whole[3:20, 64:]]
    for some in (parts, [parts[0], parts[1].half()], [parts[1].t().contiguous().t()]):
        together = torch.cat([part.flatten(0, -2).float() for part in some])
        layer = make_linear(kind, some)
        for ours, theirs in zip((layer.packed, layer.scale), packed_by_torch(kind, together, False), strict=False):
            assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("kind", [kind for kind in TILED if "int8" in kind])
def test_scales_of_rows_that_are_not_numbers_or_hardly(kind: str) -> None:
    weight = random(32, 64)
    weight[1, 3], weight[2, 5], weight[3] = float("nan"), float("inf"), 1e-42
    packed, scales = packed_by_torch(kind, weight, False)
    layer = make_linear(kind, weight)
    assert torch.equal(layer.packed, packed)
    torch.testing.assert_close(layer.scale[0], scales[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [*FLOAT, *INT8])
def test_parts_make_the_same_layer_as_one_tensor(kind: str) -> None:
    weight, x = random(48, 24), random(5, 24, seed=1)
    assert torch.equal(make_linear(kind, [weight[:30], weight[30:]])(x), make_linear(kind, weight)(x))


def in_another_process(environment: dict[str, str], first: Callable[[], None] | None = None) -> None:
    """As the others are, without the plugins that nobody needs there: they take longer to import than the tests."""
    tests = [str(Path(__file__).with_name(f"{file}.py")) for file in ("test_linear", "test_kv_cache")]
    plugins = ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "-k", "not processors and not refused", *tests]
    environment = os.environ | environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, env=environment, preexec_fn=first, check=True)


AVX2 = "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3"


@pytest.mark.skipif(kernels is None or not kernels.HAS_VNNI, reason="what is left has been tested already")
@pytest.mark.parametrize(
    ("name", "features"),
    [
        # where there are matrix registers this and those without any, below, are for `make test-all`: a minute each
        pytest.param("haswell", AVX2, marks=[pytest.mark.slow] * bool(kernels and kernels.HAS_AMX)),
        # its vectors are those of this machine, its products of int8 those of a haswell, in wider vectors
        pytest.param(
            "skylake-avx512", f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl", marks=pytest.mark.slow
        ),
    ],
)
def test_kernels_for_other_processors(name: str, features: str) -> None:
    """They are compiled here for such a one, and tested as the others are."""
    in_another_process({"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features})


def refuse_matrix_registers() -> None:
    """This process may not ask Linux for them from now on (a filter of system calls, as sandboxes have)."""
    load, equal, give = 0x20, 0x15, 0x06  # of classic BPF: code, lines to jump if so, if not, a number
    lines = [
        (load, 0, 0, 0), (equal, 0, 3, processor.ARCH_PRCTL), (load, 0, 0, 16),  # which call, and its first argument
        (equal, 0, 1, processor.ARCH_REQ_XCOMP_PERM), (give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000),
    ]  # fmt: skip
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(program)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, described) == 0  # no new rights, then the filter


@pytest.mark.skipif(kernels is None or not kernels.HAS_AMX, reason="there are none")
def test_matrix_registers_that_are_refused_are_not_used() -> None:
    code = "from paceline import processor; assert processor.HAS_VNNI and not processor.HAS_AMX"
    subprocess.run([sys.executable, "-c", code], preexec_fn=refuse_matrix_registers, check=True)


@pytest.mark.slow
@pytest.mark.skipif(kernels is None or not kernels.HAS_AMX, reason="there are none")
def test_kernels_without_matrix_registers_that_are_refused() -> None:
    """Bytes and pairs are multiplied in vectors then, as where a processor has no others."""
    in_another_process({}, refuse_matrix_registers)
