"""What the planner knows of models: stage latencies and weights by shape (AlpaServe, section 4.1).

Measured, from a profile file; or derived for shapes that were not measured, by cutting layers into stages.
"""

from dataclasses import dataclass

from paceline.core.cluster import Parallel
from paceline.placement.partition import cut


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """A model in one shape."""

    stage_weight_bytes: tuple[int, ...]  # of each device of each stage
    stage_latency: dict[int, tuple[float, ...]]  # seconds in each stage, by batch size
    working_bytes: int = 0  # of each device, beside weights and KV: the process, and its largest step

    @property
    def latency(self) -> float:
        """Seconds of one request alone."""
        return sum(self.stage_latency[1])


@dataclass(frozen=True, slots=True)
class ModelTable:
    """A model in all shapes that it has."""

    name: str
    shapes: dict[Parallel, ShapeTable]

    @property
    def alone(self) -> float:
        """Seconds of one request in the smallest shape, that of one device where it fits on one."""
        return self.shapes[min(self.shapes, key=lambda p: (p.devices, p.pipeline))].latency


def from_layers(
    name: str,
    seconds: list[float],
    weights: list[int],
    pipelines: tuple[int, ...],
    hop: float = 0.0,
    tensors: dict[int, float] | None = None,
    working: int = 0,
) -> ModelTable:
    """Shapes of a model whose layers' costs are known: embedding first, then blocks, then the head.

    Stages by `partition.cut`. `hop`: seconds from a stage to the next; `tensors`: by how many devices a layer can be
    split, and how much faster it is then; `working`: bytes of each device beside the weights.
    """
    shapes = {}
    for tensor, gain in (tensors or {1: 1.0}).items():
        for pipeline in pipelines:
            if pipeline <= len(seconds):
                ends = cut([one / gain for one in seconds], pipeline)
                begins = [0, *ends[:-1]]
                latency = tuple(sum(seconds[a:b]) / gain + hop * (a > 0) for a, b in zip(begins, ends, strict=True))
                bytes_ = tuple(-(-sum(weights[a:b]) // tensor) for a, b in zip(begins, ends, strict=True))
                shapes[Parallel(pipeline, tensor)] = ShapeTable(bytes_, {1: latency}, working)
    return ModelTable(name, shapes)
