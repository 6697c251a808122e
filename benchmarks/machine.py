"""What this machine can do, measured in the same run as what is compared with it."""

import os
import platform
import subprocess

import torch

from paceline.cli.profile_cache import cpu_name
from paceline.engine.machine import bandwidth, gemm_peak


def describe() -> dict:
    """Hardware in general words, versions and the commit, for a result file."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "read_bandwidth_gb_s": round(bandwidth() / 1e9, 1),
        "fp32_gemm_gflop_s": round(gemm_peak() / 1e9, 1),
    }

