"""What this machine can do, measured in the same run as what is compared with it."""

import os
import platform
import subprocess
import time

import torch


def bandwidth(size: int = 2**28, repeats: int = 5) -> float:
    """Bytes a second of reading memory with all threads: the better of a sum and a matrix-vector product in fp32."""
    data = torch.ones(2048, size // 4 // 2048)
    vector = torch.ones(data.shape[1])
    best = min(_timed(call) for _ in range(repeats) for call in (data.sum, lambda: data @ vector))
    return size / best


def gemm_peak(n: int = 1536, repeats: int = 5) -> float:
    """FLOP/s of a square fp32 product."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    out = torch.empty(n, n)
    torch.mm(a, b, out=out)
    best = min(_timed(lambda: torch.mm(a, b, out=out)) for _ in range(repeats))
    return 2 * n**3 / best


def describe() -> dict:
    """Hardware in general words, versions and the commit, for a result file."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "read_bandwidth_gb_s": round(bandwidth() / 1e9, 1),
        "fp32_gemm_gflop_s": round(gemm_peak() / 1e9, 1),
    }


def _cpu() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")


def _timed(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
