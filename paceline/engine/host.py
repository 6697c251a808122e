"""How much memory and how many cores this process and this machine have. Without torch, which takes memory of both."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMORY = [  # a control group's limit, what of it is taken, and its files' part of that in memory.stat, by version
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]
MARGIN = 0.1  # of what is free is left to others when no memory is given


def resident_bytes() -> int:
    """What this process holds now."""
    return _proc("/proc/self/status", "VmRSS")


def free_bytes() -> int:
    """What could still be taken on this machine, under its control group's limit too."""
    free = _proc("/proc/meminfo", "MemAvailable")
    return min([free, *filter(None, map(_left, [*_groups(), *_groups("memory")]))])


def cores() -> int:
    """Those that this process may use at a time, under its control groups' quotas of their time too."""
    quotas = map(_quota, [*_groups(), *_groups("cpu")])
    return min([len(os.sched_getaffinity(0)), *filter(None, quotas)])


def _groups(controller: str = "") -> list[Path]:
    """The control group of this process, and those that it is in: of version 2, or of a controller of version 1."""
    file, root, own = Path("/proc/self/cgroup"), CGROUP / controller, ""
    if file.exists():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        known = (line.split(":", 2) for line in lines)
        own = next((path.removeprefix("/") for _, names, path in known if controller in names.split(",")), "")
    group = root / own
    return [group, *(one for one in group.parents if one.is_relative_to(root))]


def _quota(group: Path) -> int | None:
    """Cores that its quota is worth, rounded up. None without one."""
    files = (group / name for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    numbers = " ".join(file.read_text(encoding="ascii") for file in files if file.exists()).split()
    if len(numbers) < 2 or not numbers[0].isdigit():  # "max" or -1
        return None
    return max(1, -(-int(numbers[0]) // int(numbers[1])))


def _left(group: Path) -> int | None:
    """Bytes that its limit leaves; files that were read, and are not being used, give way. None without a limit."""
    for limit_name, used_name, files_name in MEMORY:
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None:
            stat = group / "memory.stat"
            lines = map(str.split, stat.read_text(encoding="ascii").splitlines() if stat.exists() else [])
            files = next((int(number) for name, number in lines if name == files_name), 0)
            return max(1, limit - max(0, used - files))
    return None


def device_bytes(devices: int) -> int:
    """What each of so many devices has, which share this machine."""
    return int(free_bytes() * (1 - MARGIN)) // devices


def _proc(path: str, key: str) -> int:
    """The value in bytes of a line `key: N kB`; 0 where the system has no such file."""
    file = Path(path)
    if not file.exists():
        return 0
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return next((int(words[1]) * 1024 for words in lines if words and words[0] == f"{key}:"), 0)


def _number(path: Path) -> int | None:
    text = path.read_text(encoding="ascii").strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
