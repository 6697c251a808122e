"""What Linux is asked for."""

from types import SimpleNamespace

import pytest

from paceline import processor


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
