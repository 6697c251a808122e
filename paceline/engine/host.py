"""How much memory this process and this machine have. Without torch, which takes memory of both."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MARGIN = 0.1  # of what is free is left to others when no memory is given


def resident_bytes() -> int:
    """What this process holds now."""
    return _proc("/proc/self/status", "VmRSS")


def free_bytes() -> int:
    """What could still be taken on this machine, under its control group's limit too."""
    free = _proc("/proc/meminfo", "MemAvailable")
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    return min(free, limit - used) if limit is not None and used is not None else free


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
