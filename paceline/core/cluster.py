"""Devices, how a model is split over them, and which models sit where (AlpaServe, section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

KV_SHARE = 0.25  # of a device's memory, at least, is for keys and values where models are loaded by need


@dataclass(frozen=True, slots=True, order=True)
class Parallel:
    """Shape of a group: `pipeline` stages of `tensor` devices each."""

    pipeline: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"({self.pipeline},{self.tensor})"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical devices with `memory` bytes each; those of a node are next to each other.

    `load_bandwidth`: bytes/s from host memory to a device, all devices at once; 0: what a device does not hold it
    cannot get. With it a group may have more models than fit: who was not asked for longest gives way.
    """

    devices: int = 1
    memory: int = 0
    devices_per_node: int = 8
    load_bandwidth: float = 0.0


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

    def __post_init__(self) -> None:
        """Raises ValueError for a device that is used twice, or a shape of another size than its group."""
        used: set[int] = set()
        for index, group in enumerate(self.groups):
            if len(group.devices) != group.parallel.devices:
                raise ValueError(
                    f"groups.{index}.parallel: {group.parallel} needs {group.parallel.devices} devices, "
                    f"the group has {len(group.devices)}"
                )
            if min(group.devices, default=0) < 0:
                raise ValueError(f"groups.{index}.devices: {min(group.devices)} is not at least 0")
            if len(set(group.models)) < len(group.models):
                raise ValueError(f"groups.{index}.models: a model is there twice: {', '.join(group.models)}")
            twice = used & set(group.devices) or {d for d in group.devices if group.devices.count(d) > 1}
            if twice:
                raise ValueError(f"groups.{index}.devices: device {min(twice)} is used twice")
            used |= set(group.devices)

    def hosts(self, model: str) -> tuple[int, ...]:
        """The groups that have the model."""
        return tuple(index for index, group in enumerate(self.groups) if model in group.models)


def slots_of(sizes: Sequence[float], memory: float) -> int | None:
    """How many models of so many bytes each a device holds at a time, whichever; None: all; 0: not even the largest."""
    usable = memory * (1 - KV_SHARE)
    if sum(sizes) <= usable:
        return None
    return sum(size <= usable for size in accumulate(sorted(sizes, reverse=True)))
