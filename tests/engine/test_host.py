"""Memory and cores that are left under control groups' limits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.cli.profile_cache import threads_of
from paceline.engine import host, machine
from paceline.processor import HAS_TILES


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_all_groups_count_and_files_that_were_read_give_way(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, which = tmp_path / "system.slice" / "paceline.service", "memory" if version == 1 else ""
    monkeypatch.setattr(host, "_groups", lambda controller="": [own, own.parent, tmp_path] * (controller == which))

    def limit(group: Path, most: str, used: int, files: int) -> None:
        group.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        unlimited = "max" if version == 2 else str(2**63 - 4096)
        (group / names[0]).write_text(f"{unlimited if most == 'max' else most}\n")
        (group / names[1]).write_text(f"{used}\n")
        of_all = f"inactive_file {files}\n" if version == 2 else f"inactive_file 1\ntotal_inactive_file {files}\n"
        (group / "memory.stat").write_text(f"anon 1\n{of_all}active_file 5\n")

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
    for controller in ("", "cpu"):
        groups = host._groups(controller)
        assert groups[-1] == tmp_path / controller and [one.parent for one in groups[:-1]] == groups[1:]


def test_groups_of_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "5:cpuset:/sets\n4:cpu,cpuacct:/docker/a:b\n1:name=systemd:/init\n0::/system.slice/paceline.service\n"
    (tmp_path / "known").write_text(lines)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / "known" if path == "/proc/self/cgroup" else Path(path))
    slices = tmp_path / "system.slice"
    assert host._groups() == [slices / "paceline.service", slices, tmp_path]
    assert host._groups("cpu") == [tmp_path / "cpu/docker/a:b", tmp_path / "cpu/docker", tmp_path / "cpu"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_of_time_is_as_many_cores(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of all groups, rounded up: of the process, of torch, and of devices that share them."""
    own = tmp_path / "pod" / "container"
    own.mkdir(parents=True)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    which = "cpu" if version == 1 else ""
    monkeypatch.setattr(host, "_groups", lambda controller="": [own, own.parent] * (controller == which))

    def give(group: Path, quota: int | None) -> None:
        if version == 2:
            (group / "cpu.max").write_text(f"{quota or 'max'} 100000\n")
        else:
            (group / "cpu.cfs_quota_us").write_text(f"{quota or -1}\n")
            (group / "cpu.cfs_period_us").write_text("100000\n")

    assert host.cores() == 8, "neither has such a file"
    for quotas, cores in (
        ((None, None), 8), ((250_000, None), 3), ((None, 150_000), 2), ((400_000, 150_000), 2), ((50_000, None), 1),
        ((1_600_000, None), 8),
    ):  # fmt: skip
        for group, quota in zip((own, own.parent), quotas, strict=True):
            give(group, quota)
        assert host.cores() == cores, quotas
    give(own, 350_000)
    assert [threads_of(devices) for devices in (1, 2, 8)] == [4, 2, 1]
    before = torch.get_num_threads()
    try:
        for asked, used in ((None, min(4, before)), (3, 3), (None, 3), (6, 6), (None, 4)):
            machine.use_threads(asked)
            assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not HAS_TILES, reason="there are no kernels")
def test_kernels_start_no_more_threads_than_there_are_cores() -> None:
    code = (
        "from paceline.engine import host; host._quota = lambda group: 1; "
        "from paceline.engine.kernels.common import STARTED; print(STARTED)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"
