"""What the operating system has to be asked for before compiled code may use it."""

import ctypes
import sys

from numba import config
from numba.core.codegen import get_host_cpu_features

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


def ask_for_matrix_registers() -> None:
    """Intel's AMX: Linux gives its registers (from 5.16 on) to a process that asks, and to its threads.

    Where it refuses, as some sandboxes do, their first use would end the process, so Numba is told that there are none;
    so it is on other systems, where nobody has tried. To be called before anything is compiled.
    """
    features = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
    if "+amx-tile" in features and not (sys.platform == "linux" and _granted()):
        config.CPU_FEATURES = ",".join(feature for feature in features if not feature.startswith("+amx"))


def _granted() -> bool:
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILE_DATA) == 0)
