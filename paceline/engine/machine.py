"""What this machine can do, measured in the same run as what is compared with it."""

from collections.abc import Callable
from time import perf_counter

import torch


def bandwidth(size: int = 2**28, repeats: int = 5) -> float:
    """Bytes a second of reading memory with all threads: the better of a sum and a matrix-vector product in fp32."""
    data = torch.ones(2048, size // 4 // 2048)
    vector = torch.ones(data.shape[1])
    best = min(_timed(call) for _ in range(repeats) for call in (data.sum, lambda: data @ vector))
    return size / best


def gemm_peak(n: int = 1536, repeats: int = 5) -> float:
    """FLOP/s of a square fp32 product, the better of MKL's and oneDNN's: on AMD's processors MKL uses half of the width
    of their vectors."""
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    products: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(b, n)
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""))
    for product in products:
        product()
    best = min(_timed(product) for _ in range(repeats) for product in products)
    return 2 * n**3 / best


def int8_gemm_peak(n: int = 1536, repeats: int = 5) -> float:
    """Operations a second of a square product of int8 into int32."""
    a, b = (torch.randint(-127, 128, (n, n), dtype=torch.int8) for _ in range(2))
    torch._int_mm(a, b)
    best = min(_timed(lambda: torch._int_mm(a, b)) for _ in range(repeats))
    return 2 * n**3 / best


def _timed(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin
