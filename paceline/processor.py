"""What compiled code may use of the processor, some of which the operating system has to be asked for before."""

import ctypes
import platform
import sys

from numba import config
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target

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


ask_for_matrix_registers()
# what is compiled for: this processor, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say otherwise
_, PROCESSOR, _features = cpu_target.target_context.codegen().magic_tuple()
FEATURES = set(_features.split(","))
X86_64 = platform.machine() in ("x86_64", "AMD64")
HAS_AVX512 = {"+avx512f", "+avx512bw", "+avx512vl", "+avx512dq"} <= FEATURES
HAS_AVX2 = {"+avx2", "+fma", "+f16c"} <= FEATURES
HAS_VNNI = HAS_AVX512 and "+avx512vnni" in FEATURES
# products of pairs of bfloat16, in the steps of single floats, and bytes that are looked up in a table of 128
HAS_BF16 = HAS_AVX512 and {"+avx512bf16", "+avx512vbmi"} <= FEATURES
# products of 16 rows and 16 columns of either in one instruction
HAS_AMX = HAS_VNNI and HAS_BF16 and {"+amx-tile", "+amx-int8", "+amx-bf16"} <= FEATURES
HAS_TILES = X86_64 and (HAS_AVX512 or HAS_AVX2)
