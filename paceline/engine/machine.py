"""What this machine can do, measured in the same run as what is compared with it."""

import sys
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter
from types import ModuleType

import torch

from paceline.engine.config import ModelError
from paceline.engine.host import cores

Call = Callable[[], object]


def bandwidth(device: str = "cpu", repeats: int = 5) -> float:
    """Bytes a second of reading memory with all threads, or that of a device: the better of a sum and a matrix-vector
    product in fp32."""
    size = 2**30 if device.startswith("cuda") else 2**28  # of what no cache holds
    data = torch.ones(2048, size // 4 // 2048, device=device)
    vector = torch.ones(data.shape[1], device=device)
    best = _best([data.sum, lambda: data @ vector], repeats, device)
    return size / best


def gemm_peak(device: str = "cpu", dtype: torch.dtype = torch.float32, repeats: int = 5) -> float:
    """FLOP/s of a square product. On a CPU the better of MKL's and oneDNN's: on AMD's processors MKL uses half of the
    width of their vectors."""
    n = 8192 if device.startswith("cuda") else 1536
    a, b, out = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(3))
    products: list[Call] = [lambda: torch.mm(a, b, out=out)]
    if device == "cpu" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(b, n)
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""))
    for product in products:
        product()
    return 2 * n**3 / _best(products, repeats, device)


def int8_gemm_peak(n: int = 1536, repeats: int = 5) -> float:
    """Operations a second of a square product of int8 into int32."""
    a, b = (torch.randint(-127, 128, (n, n), dtype=torch.int8) for _ in range(2))
    torch._int_mm(a, b)
    return 2 * n**3 / _best([partial(torch._int_mm, a, b)], repeats, "cpu")


def _best(calls: list[Call], repeats: int, device: str) -> float:
    return min(_timed(call, device) for _ in range(repeats) for call in calls)


def _timed(call: Call, device: str) -> float:
    finish(device)
    begin = perf_counter()
    call()
    finish(device)
    return perf_counter() - begin


def finish(device: str) -> None:
    """Waits for what a GPU has been asked to compute, not for what it sends to others meanwhile."""
    if device.startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()


class Moment:
    """When a device will have computed what it has been asked for by now; on a CPU now."""

    def __init__(self, device: str) -> None:
        self.at, self.event = perf_counter(), None
        if device.startswith("cuda"):
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    @property
    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def until(self, later: "Moment") -> float:
        """Seconds; waits for the later one."""
        if self.event is None or later.event is None:
            return later.at - self.at
        later.wait()
        return 1e-3 * self.event.elapsed_time(later.event)


def mark(device: str) -> Call:
    """What waits until a GPU has computed all that it has been asked for by now."""
    if not device.startswith("cuda"):
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


@cache
def triton_kernels(device: str) -> ModuleType | None:
    """Our own kernels for GPUs, where they run: not without Triton, nor without a C compiler, which it launches them
    by."""
    if not device.startswith("cuda"):
        return None
    try:
        from paceline.engine import triton_kernels as kernels

        kernels.gate(torch.zeros(1, 2, device=device))
    except Exception as error:
        print(f"{device}: torch's operations, for our own kernels do not run: {error}", file=sys.stderr)
        return None
    return kernels


def require(device: str) -> None:
    """Raises ModelError where torch sees no such device."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device: torch {torch.__version__} sees no CUDA device here; valid is cpu")


def use_threads(threads: int | None) -> None:
    """Has torch use so many; None: as many as it would, but no more than there are cores."""
    if threads is None and torch.get_num_threads() > cores():
        threads = cores()
    if threads is not None:
        torch.set_num_threads(threads)
