"""Linear layers whose weights are packed once for products of few rows, with what comes before and after them.

A plain product of 8 rows costs several times that of one, though both read the same weights (papers/sarathi.md). The
packed copy replaces the plain one in memory. Kinds, best first: our own kernels where the processor has AVX-512 or AVX2
(`kernels`); torch's oneDNN and MKL operators, which take weights in a blocked layout; the plain product on a GPU.
Which of torch's two is better depends on the processor. Measured with torch 2.13 on two cores of an AMD EPYC (Zen 4),
weight [16384, 2048], ms: 8 rows plain 37.6, MKL 30.1, oneDNN 8.0; 512 rows 209, 203, 161. On an Intel machine with half
the weight: 8 rows 11.8, 4.9, 5.5; 512 rows 113, 101, 143. So MKL is taken on Intel, oneDNN elsewhere: a rule and not a
timing, so that the same machine always gives the same bits.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.engine import machine, pages
from paceline.engine.compiling import one_process_at_a_time
from paceline.engine.config import KEPT_BFLOAT16

try:
    with one_process_at_a_time():
        from paceline.engine import kernels
except (ImportError, ValueError):  # no Numba or no OpenMP layer for it
    kernels = None

# Rows the packing of torch's operators is told to expect; the result holds for any number. oneDNN: 32 and 256 measured
# alike, 1 was 1.5 times slower at 8 rows.
PACK_ROWS = 32


class Norm(NamedTuple):
    """Root mean square norm of a layer's input."""

    weight: Tensor  # [in]
    eps: float


class Linear(Protocol):
    """y = f(norm(x) W^T + b). With a gate, W is [2 out, in] and f(g, v) = silu(g) * v of its halves' products."""

    kind: str  # key of KINDS
    dtype: torch.dtype  # of what it yields
    nbytes: int  # of the weights as they are read

    def __call__(self, x: Tensor, norm: Norm | None = None, add_to: Tensor | None = None) -> Tensor:
        """x [rows, in] to [rows, out], float32 or the weights' type; added to `add_to` in place if that is given (never
        with a gate)."""
        ...


class StockLinear:
    """A product by torch's operators between torch's other operators."""

    kind, dtype = "plain", torch.float32

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None, gated: bool):
        weight = in_one(parts, self.dtype)
        self.bias, self.gated = bias, gated
        self.nbytes = weight.numel() * weight.element_size()
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        self.weight = weight

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.weight, self.bias)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """The product, added in place."""
        if self.bias is not None:
            to.add_(self.bias)
        return to.addmm_(x.to(self.dtype), self.weight.t())

    def __call__(self, x: Tensor, norm: Norm | None = None, add_to: Tensor | None = None) -> Tensor:
        if norm is not None:
            x = normed(x, norm)
        if add_to is not None:
            return self.add(x, add_to)
        y = self.product(x)
        return gate(y) if self.gated else y


class BFloat16Linear(StockLinear):
    """On GPUs, as checkpoints have them."""

    kind, dtype = "bfloat16", torch.bfloat16


class Float16Linear(StockLinear):
    """On GPUs without bfloat16."""

    kind, dtype = "float16", torch.float16


class PackedLinear(StockLinear):
    """Its product is another operator's."""

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        return to.add_(self.product(x))


class OneDNNLinear(PackedLinear):
    """W in oneDNN's layout for this processor."""

    kind = "onednn"

    def pack(self, weight: Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)

    def product(self, x: Tensor) -> Tensor:
        """oneDNN runs 4 rows faster than 1 or 2 (5.6, 8.1 and 9.5 ms for [16384, 2048]), and compiles a kernel for
        every new row count (about 1 ms a shape, 1024 are kept), so counts are rounded up."""
        rows = x.shape[0]
        step = 4 if rows <= 32 else 8
        pad = -rows % step
        x = F.pad(x, (0, 0, 0, pad)) if pad else x
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")[:rows]


class MKLLinear(PackedLinear):
    """W in MKL's packed layout."""

    kind = "mkl"

    def pack(self, weight: Tensor) -> None:
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        # The operator wants the plain weight too, but reads only its shape as long as the row count it is told
        # equals x's: a tensor of that shape without memory.
        self.shape_only = torch.empty(1).expand(weight.shape)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_linear(x, self.packed, self.shape_only, self.bias, x.shape[0])


class Int8Linear(PackedLinear):
    """W as int8 with a scale a row of W, x as int8 with a scale a row of x, rounded to nearest: exact in int32.

    Only by a row's own scale does its result not depend on what else is in the batch.
    """

    kind = "int8"

    def pack(self, weight: Tensor) -> None:
        quantized, self.scale = quantize(weight)
        # of one column the transpose has strides that torch takes for those of another matrix
        self.quantized = quantized.t() if weight.shape[1] > 1 else quantized.view(1, -1)
        self.nbytes = weight.numel()

    def product(self, x: Tensor) -> Tensor:
        quantized, scale = quantize(x)
        y = torch._int_mm(quantized, self.quantized).float() * (self.scale * scale[:, None])
        return y if self.bias is None else y + self.bias


def normed(x: Tensor, by: Norm) -> Tensor:
    """Rows [rows, n]."""
    if (own := machine.triton_kernels(str(x.device))) is not None:
        return own.norm(x, by)
    return F.rms_norm(x, x.shape[1:], by.weight, by.eps)


def gate(both: Tensor) -> Tensor:
    """[rows, 2 n], gates before their values, to silu(gate) value [rows, n]."""
    if (own := machine.triton_kernels(str(both.device))) is not None:
        return own.gate(both)
    gates, values = both.chunk(2, dim=1)
    return F.silu(gates).mul_(values)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, n] float32 to int8 of that shape and scales [rows]: row = int8 * scale, the largest of a row is 127."""
    peak = rows.abs().amax(dim=1)
    inverse = torch.where(peak > 0, 127.0 / peak, 0.0)
    return (rows * inverse[:, None]).round_().to(torch.int8), peak / 127.0


def in_one(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A copy of the rows of all, [rows, in]."""
    return torch.cat([part.flatten(0, -2) for part in parts]).to(dtype)


class Weights:
    """Panels of [in, 32] float32, of [in / 2, 32, 2] bfloat16 or of [in / n, 32, n] int8 with a scale [2, panels * 32]
    each, of rows in a file; n is `kernels.TOGETHER`. Columns are filled up to `kernels.padded` numbers.

    Layers that would hold the same hold one, whichever models they are of; it goes with the last of them.
    """

    def __init__(self, panels: int, inner: int, held: torch.dtype):
        self.inner, self.held, self.scale = inner, held, None
        together = {torch.float32: 1, torch.bfloat16: 2}.get(held, kernels.TOGETHER)
        lines = kernels.padded(inner, held == torch.int8) // together
        # a tile may read one step more, to be ready for the next panel
        memory = pages.zeros((panels * lines + kernels.DEEP, kernels.COLUMNS, together), held)
        finalize(self, pages.give_back, memory).atexit = False
        self.packed = memory[: panels * lines].unflatten(0, (panels, lines))[:, : inner // together]
        if held == torch.float32:
            self.packed = self.packed.squeeze(-1)
        if held == torch.int8:
            self.scale = torch.empty(2, panels * kernels.COLUMNS)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the panels and of their scales, or 0."""
        return self.packed.data_ptr(), 0 if self.scale is None else self.scale.data_ptr()

    def pack(self, rows: Tensor, dtype: torch.dtype) -> None:
        """From rows of `dtype` at the addresses [panels, 32]."""
        self._pass(rows, dtype, 0)

    def hold(self, rows: Tensor, dtype: torch.dtype) -> bool:
        """Whether they are what `pack` would write, bit for bit. The file they came from may have changed since."""
        differs = torch.zeros(1, dtype=torch.int64)
        self._pass(rows, dtype, differs.data_ptr())
        return not differs.item()

    def _pass(self, rows: Tensor, dtype: torch.dtype, differs: int) -> None:
        inner, pitch = self.inner, self.packed.stride(0) * self.packed.element_size()
        if self.held == torch.bfloat16:  # two neighbours of a row lie side by side, as if they were one float32
            dtype, inner = torch.float32, inner // 2
        kernels.pack(
            len(rows), pitch, rows.data_ptr(), kernels.ELEMENTS[dtype], inner, self.held == torch.int8,
            *self.addresses, differs, kernels.num_threads(),
        )  # fmt: skip


# By their shape and a sample of their rows: one of those that share it, if there are several.
_held: WeakValueDictionary[tuple[int, int, torch.dtype, int], Weights] = WeakValueDictionary()


def _packed(rows: Tensor, parts: Sequence[Tensor], hold: torch.dtype) -> Weights:
    """Those that a layer of this process has already, or new ones. `rows` are the addresses of those of `parts`."""
    panels, inner, dtype = len(rows), parts[0].shape[-1], parts[0].dtype
    ends = [part[(end,) * (part.ndim - 1)] for part in parts for end in (0, -1)]
    key = panels, inner, hold, hash(torch.cat(ends).float().numpy().tobytes())
    held = _held.get(key)
    if held is not None and held.hold(rows, dtype):
        return held
    weights = Weights(panels, inner, hold)
    weights.pack(rows, dtype)
    _held.setdefault(key, weights)
    return weights


class TiledLinear:
    """Our own kernel: W in panels of 32 outputs, [panels, in, 32]; gates and their values alternate by 16."""

    kind, held, dtype = "tiled", torch.float32, torch.float32

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None, gated: bool):
        self.gated, self.inner = gated, parts[0].shape[-1]
        if self.held == torch.bfloat16:  # as it is in most files
            parts = [part.to(self.held) for part in parts]
        if {(part.dtype, part.stride(-1)) for part in parts} not in [{(dtype, 1)} for dtype in kernels.ELEMENTS]:
            parts = [in_one(parts, self.held if self.held.is_floating_point else torch.float32)]
        rows = torch.cat([_row_addresses(part) for part in parts])
        self.outer = len(rows) // 2 if gated else len(rows)
        self.bias = self._panels(torch.zeros(len(rows)) if bias is None else bias)
        zeros = torch.zeros(self.inner)  # a row that fills up the last panel
        rows = self._panels(rows)
        rows[rows == 0] = zeros.data_ptr()
        self.weights = _packed(rows, parts, self.held)
        self.packed, self.scale = self.weights.packed, self.weights.scale
        self.nbytes = self.packed.numel() * self.packed.element_size()

    def _panels(self, rows: Tensor) -> Tensor:
        """[out] to [panels, 32], filled up with zeros."""
        halves = rows.chunk(2) if self.gated else (rows,)
        width = kernels.COLUMNS // len(halves)
        filled = [F.pad(half, (0, -self.outer % width)) for half in halves]
        return torch.cat([half.unflatten(0, (-1, width)) for half in filled], dim=1)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the weights, their scales (or what `kernels.linear` takes for them) and the bias."""
        panels, scales = self.weights.addresses
        rounded = kernels.ROUNDED_BF16 if kernels.HAS_BF16 else kernels.KEPT_BF16
        kinds = {"tiled_bf16": kernels.KEPT_BF16, "tiled_rounded": rounded}
        return panels, kinds.get(self.kind, scales), self.bias.data_ptr()

    def __call__(self, x: Tensor, norm: Norm | None = None, add_to: Tensor | None = None) -> Tensor:
        rows, threads = x.shape[0], kernels.num_threads()
        out = torch.empty(rows, self.outer) if add_to is None else add_to
        kind = kernels.GATE if self.gated else kernels.STORE if add_to is None else kernels.ADD
        weight, eps = (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        space, own_space = kernels.spaces(rows, self.inner, threads)
        kernels.linear(
            x.data_ptr(), x.stride(0) * 4, weight, eps, rows, self.inner, *self.addresses, self.outer, kind,
            out.data_ptr(), out.stride(0) * 4, kernels.workspace(space), own_space, threads,
        )  # fmt: skip
        return out


class TiledBF16Linear(TiledLinear):
    """With weights that are bfloat16, or become it: of those that are, the products of floats in half the memory."""

    kind, held = "tiled_bf16", torch.bfloat16


class TiledRoundedLinear(TiledBF16Linear):
    """And of inputs that are rounded to bfloat16 where the processor multiplies pairs of it: half of the products, with
    AMX a third."""

    kind = "tiled_rounded"


class TiledInt8Linear(TiledLinear):
    """`Int8Linear` by our own kernel. The same integers, so the same sums."""

    kind, held = "tiled_int8", torch.int8


def _row_addresses(rows: Tensor) -> Tensor:
    """Of each row of [..., in], in order."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(rows.shape[:-1], rows.stride()[:-1], strict=True):
        offsets = offsets[..., None] + stride * torch.arange(size)
    return rows.data_ptr() + rows.element_size() * offsets.flatten()


KINDS: dict[str, type[StockLinear] | type[TiledLinear]] = {
    cls.kind: cls
    for cls in (
        TiledLinear, TiledBF16Linear, TiledRoundedLinear, TiledInt8Linear, OneDNNLinear, MKLLinear, StockLinear,
        Int8Linear, BFloat16Linear, Float16Linear,
    )
}  # fmt: skip


def best_kind(device: str, quantization: str = "none") -> str:
    """The key of KINDS for this machine and one of `config.PRECISIONS`."""
    if device != "cpu":
        return "plain" if quantization == "none" else quantization
    if quantization == "int8":
        return "tiled_int8" if kernels is not None and kernels.HAS_TILES else "int8"
    if kernels is not None and kernels.HAS_TILES:
        return {KEPT_BFLOAT16: "tiled_bf16", "bfloat16": "tiled_rounded"}.get(quantization, "tiled")
    order = ("mkl", "onednn") if "GenuineIntel" in _processor() else ("onednn", "mkl")
    available = {"mkl": torch.backends.mkl.is_available(), "onednn": torch.backends.mkldnn.is_available()}
    return next((kind for kind in order if available[kind]), "plain")


def make_linear(
    kind: str, weight: Tensor | Sequence[Tensor], bias: Tensor | None = None, gated: bool = False
) -> Linear:
    """Packs weight [out, in] (with a gate [2 out, in]), or the parts [..., in] where its rows lie, which may be a file.

    Numbers are of any floating type, those of a bias [out] float32. An inner dimension that tiles cannot take goes to
    torch.
    """
    parts = [weight] if isinstance(weight, Tensor) else weight
    if kind.startswith("tiled") and parts[0].shape[-1] % 8:
        kind = "int8" if kind == "tiled_int8" else "plain"
    return KINDS[kind](parts, bias, gated)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
