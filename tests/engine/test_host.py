"""Memory that is left under control groups' limits."""

from pathlib import Path

import pytest

from paceline.engine import host


def limit(group: Path, most: str, used: int, files: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {files}\nactive_file 5\n")


def test_limits_of_all_groups_count_and_files_that_were_read_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "system.slice" / "paceline.service"
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(host, "_groups", lambda: [own, own.parent, tmp_path])
    free = host._proc("/proc/meminfo", "MemAvailable")
    for group in (own, own.parent, tmp_path):
        limit(group, "max", 10**6, 0)
    assert host.free_bytes() == pytest.approx(free, rel=0.1)
    limit(own, str(10**7), 9 * 10**6, 4 * 10**6)
    assert host.free_bytes() == 5 * 10**6
    limit(own.parent, str(3 * 10**6), 10**6, 0)
    assert host.free_bytes() == 2 * 10**6
    limit(own.parent, str(10**6), 2 * 10**6, 0)
    assert host.free_bytes() == 1, "a limit that is passed is no other than one that is near"


def test_the_groups_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    groups = host._groups()
    assert groups[-1] == tmp_path and [one.parent for one in groups[:-1]] == groups[1:]
