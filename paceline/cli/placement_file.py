"""The placement file (DESIGN, section 7): groups of devices, their shapes, and their models."""

from pathlib import Path

import msgspec

from paceline.core.cluster import Group, Parallel, Placement


class PlacementFile(msgspec.Struct, forbid_unknown_fields=True):
    groups: list["GroupEntry"]


class GroupEntry(msgspec.Struct, forbid_unknown_fields=True):
    devices: list[int]
    parallel: "ParallelEntry"
    models: list[str]


class ParallelEntry(msgspec.Struct, forbid_unknown_fields=True):
    pipeline: int = 1
    tensor: int = 1


def load_placement(path: Path) -> Placement:
    """Raises ValueError with one line that names the key."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=PlacementFile)
    except OSError as error:
        raise ValueError(f"placement: {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"placement: {path}: {error}") from error
    try:
        return Placement(
            tuple(
                Group(tuple(one.devices), Parallel(one.parallel.pipeline, one.parallel.tensor), tuple(one.models))
                for one in file.groups
            )
        )
    except ValueError as error:
        raise ValueError(f"placement: {path}: {error}") from error


def placement_json(placement: Placement) -> bytes:
    """What a placement file holds."""
    groups = [
        GroupEntry(list(g.devices), ParallelEntry(g.parallel.pipeline, g.parallel.tensor), list(g.models))
        for g in placement.groups
    ]
    return msgspec.json.format(msgspec.json.encode(PlacementFile(groups)), indent=1)


def save_placement(path: Path, placement: Placement) -> None:
    path.write_bytes(placement_json(placement))
