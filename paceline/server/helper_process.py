"""What a helper process does (`helper`): answers messages within limits of memory and of processor time.

Messages come on standard input and answers go to standard output, each as four bytes of length (big-endian) and what
they hold. An empty one asks whether the process is there. The wall time is limited by whoever started the process.
"""

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

SIZES = Path("/proc/self/statm")  # in pages; the first is of the address space


def answer_messages(answer: Callable[[bytes], bytes], memory: int, seconds: int) -> None:
    """Until the other side is gone. `memory`: bytes of address space beyond what the process has after its imports,
    which depends on the machine; `seconds` of a processor for one message."""
    _limit(resource.RLIMIT_AS, memory + _address_space())
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    while (message := _read(sys.stdin.buffer)) is not None:
        _limit_cpu(seconds)
        said = answer(message) if message else b""
        sys.stdout.buffer.write(len(said).to_bytes(4, "big") + said)
        sys.stdout.buffer.flush()


def _address_space() -> int:
    return int(SIZES.read_text().split()[0]) * resource.getpagesize() if SIZES.exists() else 0


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


def _limit_cpu(seconds: int) -> None:
    """From now on: ends this process even when nobody is left to kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _read(stream: BinaryIO) -> bytes | None:
    """The next message; None when the other side is gone."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "big")) if len(head) == 4 else None
