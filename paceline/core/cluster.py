"""Devices, how a model is split over them, and which models sit where (AlpaServe, section 3)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parallel:
    """Shape of a group: `pipeline` stages of `tensor` devices each."""

    pipeline: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.pipeline * self.tensor


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical devices with `memory` bytes each."""

    devices: int = 1
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that run the same models with one shape."""

    devices: tuple[int, ...]
    parallel: Parallel
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A canonical, comparable assignment of models to groups."""

    groups: tuple[Group, ...]
