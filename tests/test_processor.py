"""What Linux is asked for."""

import importlib
from types import SimpleNamespace

import pytest

from paceline import processor
from paceline.engine import draft_models, linear, sampler


@pytest.mark.parametrize(
    ("system", "features", "answer", "left"),
    [
        ("linux", "+avx2,+amx-tile,+amx-int8,-sse4a", 0, "+avx2,+amx-tile,+amx-int8,-sse4a"),
        ("linux", "+avx2,+amx-tile,+amx-int8,-sse4a", -1, "+avx2,-sse4a"),
        ("linux", "+avx2,-amx-tile", None, "+avx2,-amx-tile"),
        ("linux", "", None, ""),
        ("win32", "+avx2,+amx-tile,+amx-int8", None, "+avx2"),
    ],
    ids=["granted", "refused", "there are none", "none are wanted", "nobody to ask"],
)
def test_matrix_registers(
    monkeypatch: pytest.MonkeyPatch, system: str, features: str, answer: int | None, left: str
) -> None:
    asked = []

    def syscall(*arguments: int) -> int | None:
        asked.append(arguments)
        return answer

    monkeypatch.setattr(processor.sys, "platform", system)
    monkeypatch.setattr(processor.config, "CPU_FEATURES", features)
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: SimpleNamespace(syscall=syscall))
    processor.ask_for_matrix_registers()
    assert left == processor.config.CPU_FEATURES
    assert asked == ([] if answer is None else [(158, 0x1023, 18)])


@pytest.mark.skipif(not processor.HAS_TILES, reason="needs AVX2")
def test_no_kernel_is_missing_where_all_can_run() -> None:
    """Without one everything works, slower, and its own tests are skipped."""
    for name in ("kernels", "fused_kernel", "verdict_kernel", "chain_kernel", "sample_kernels"):
        importlib.import_module(f"paceline.engine.{name}")
    assert linear.kernels and draft_models.chains() and sampler.sample_kernels
