"""Numbers of several ranks in shared memory: real processes, pieces larger than the memory, nothing left behind."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.engine import exchange

RANK = """
import sys, torch
from paceline.engine import exchange
exchange.FLOATS = 1000
name, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if rank:
    sys.stdin.readline()
shared = exchange.Exchange(name, rank, ranks)
print("made", flush=True)
sys.stdin.readline()
for turn in range(60):
    x = torch.arange(2500.0) * (rank + 1) + turn
    shared.sum_(x)
    expected = torch.arange(2500.0) * sum(range(1, ranks + 1)) + turn * ranks
    assert torch.equal(x, expected), turn
    rows = torch.full((7, 300), float(rank)) + torch.arange(7.0)[:, None] + turn
    got = shared.gather(rows)
    assert (got is None) == (rank > 0)
    if got is not None:
        assert got.shape == (7, 300 * ranks)
        for other in range(ranks):
            part = got[:, 300 * other : 300 * (other + 1)]
            assert torch.equal(part, rows + other - rank), turn
print("done", flush=True)
"""


@pytest.mark.skipif(not exchange.possible(), reason="needs x86 and /dev/shm")
def test_its_memory_is_there_from_the_start(tmp_path: Path) -> None:
    """Else the first to write where a container has no more of it is killed."""
    made = exchange.Exchange(f"paceline-test-{os.getpid()}-{tmp_path.name}", 0, 2)
    try:
        assert made.path.stat().st_blocks * 512 >= 2 * 2 * 4 * exchange.FLOATS
    finally:
        made.path.unlink()


@pytest.mark.skipif(not exchange.possible(), reason="needs x86 and /dev/shm")
def test_no_room_for_it_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    name = f"paceline-test-{os.getpid()}-{tmp_path.name}"
    with pytest.raises(OSError, match="No space"):
        exchange.Exchange(name, 0, 2)
    assert not (exchange.FOLDER / name).exists()


@pytest.mark.skipif(not exchange.possible(), reason="needs x86 and /dev/shm")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_and_rows_of_all_ranks(ranks: int, tmp_path: Path) -> None:
    name = f"paceline-test-{tmp_path.name}-{ranks}"
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script), name]
    pipe = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([*command, str(rank), str(ranks)], **pipe) for rank in range(ranks)]
    try:
        assert processes[0].stdout.readline() == "made\n"
        for process in processes[1:]:
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "made\n"
        (exchange.FOLDER / name).unlink()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            assert process.communicate(timeout=100)[0] == "done\n"
    finally:
        for process in processes:
            process.kill()
            process.wait()
