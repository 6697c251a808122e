"""Linear layers whose weights are packed once for products of few rows.

A plain product of 8 rows costs several times that of one, though both read the same weights (papers/sarathi.md).
torch's own oneDNN and MKL operators take weights in a blocked layout and repair most of that; the packed copy replaces
the plain one in memory. Which is better depends on the processor. Measured with torch 2.13 on two cores of an AMD
EPYC (Zen 4), weight [16384, 2048], ms: 8 rows plain 37.6, MKL 30.1, oneDNN 8.0; 512 rows 209, 203, 161. On an Intel
machine with half the weight: 8 rows 11.8, 4.9, 5.5; 512 rows 113, 101, 143. So MKL is taken on Intel, oneDNN elsewhere:
a rule and not a timing, so that the same machine always gives the same bits.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows the packing is told to expect; the result holds for any number. oneDNN: 32 and 256 measured alike, 1 was 1.5
# times slower at 8 rows.
PACK_ROWS = 32


class OneDNNLinear:
    """y = x W^T + b with W in oneDNN's layout for this processor."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] to [rows, out], float32."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class MKLLinear:
    """y = x W^T + b with W in MKL's packed layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        # The operator wants the plain weight too, but reads only its shape as long as the row count it is told
        # equals x's: a tensor of that shape without memory.
        self.shape_only = torch.empty(1).expand(weight.shape)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] to [rows, out], float32."""
        return torch.ops.mkl._mkl_linear(x, self.packed, self.shape_only, self.bias, x.shape[0])


class PlainLinear:
    """y = x W^T + b with W as it came: on a GPU, and where torch was built with neither library."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] to [rows, out]."""
        return F.linear(x, self.weight, self.bias)


Linear = OneDNNLinear | MKLLinear | PlainLinear
LINEARS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "onednn": OneDNNLinear,
    "mkl": MKLLinear,
    "plain": PlainLinear,
}


def best_kind(device: str) -> str:
    """The key of LINEARS for this machine."""
    if device != "cpu":
        return "plain"
    intel = "GenuineIntel" in _processor()
    order = ("mkl", "onednn") if intel else ("onednn", "mkl")
    available = {"mkl": torch.backends.mkl.is_available(), "onednn": torch.backends.mkldnn.is_available()}
    return next((kind for kind in order if available[kind]), "plain")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""


def padded_rows(rows: int, kind: str) -> int:
    """How many rows a step is padded to.

    oneDNN runs 4 rows faster than 1 or 2 (5.6, 8.1 and 9.5 ms for [16384, 2048]), and compiles a kernel for every
    new row count (about 1 ms for each layer shape, 1024 are kept), so counts are rounded up.
    """
    if kind != "onednn":
        return rows
    step = 4 if rows <= 32 else 8
    return -(-rows // step) * step
