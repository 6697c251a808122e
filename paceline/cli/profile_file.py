"""The profile file (DESIGN, section 7): what is known of models, in shapes, by their steps or texts, and live."""

from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from paceline.latency.profile import Profile
from paceline.latency.texts import TextTimes


class ShapeEntry(msgspec.Struct):
    stage_weight_bytes: list[float]
    working_bytes: float = 0
    pipeline: int = 1
    tensor: int = 1
    stage_latency: dict[str, list[float]] | None = None
    step_share: float | None = None
    prompt_tokens: int | None = None
    by_length: dict[int, dict[int, tuple[float, ...]]] | None = None


Positive = Annotated[float, msgspec.Meta(gt=0)]
Paces = dict[Annotated[int, msgspec.Meta(gt=0)], Positive]


class LiveEntry(msgspec.Struct, forbid_unknown_fields=True):
    pace: Positive = 1.0  # seconds of a step in a server over what the profile says
    overhead_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # of a step, beside the engine
    widths: Paces = {}  # by tokens of a step, from so many on
    apart: dict[Literal["idle", "busy"], dict[Literal["own", "other"], Paces]] = {}  # by what else there is
    spread: tuple[Positive, ...] = ()  # of steps over those like them; equally likely

    @property
    def paces(self) -> dict[int, float]:
        return self.widths or {1: self.pace}


class ModelEntry(msgspec.Struct):
    parallel: list[ShapeEntry]
    live: LiveEntry | None = None
    step_time: dict[str, Any] | None = None
    roofline: dict[str, Any] | None = None
    tiles: Any = None
    cliffs: Any = None
    knee: Any = None
    error: Any = None
    noise: Any = None
    widths: Any = None
    chained: Any = {}

    def measured(self, name: str) -> Profile | None:
        """What `paceline profile` wrote of this model with steps; None where some is missing. Raises ValueError."""
        fields = {one.name: getattr(self, one.name) for one in dataclass_fields(Profile)}
        if any(value is None for value in fields.values()):
            return None
        try:
            return msgspec.convert(fields, Profile, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"profile: {name}: {error}") from error

    def texts(self) -> TextTimes | None:
        """Of an encoder on one device, by as many lengths as were measured; None where that is not there."""
        for one in self.parallel:
            if one.pipeline == one.tensor == 1 and one.by_length:
                return TextTimes(one.by_length)
            if one.pipeline == one.tensor == 1 and one.prompt_tokens and one.stage_latency:
                return TextTimes({one.prompt_tokens: {int(n): tuple(some) for n, some in one.stage_latency.items()}})
        return None


class PlanningProfile(msgspec.Struct):
    """A profile file as planning reads it (DESIGN, section 7)."""

    models: dict[str, ModelEntry]
    device: Any = None
    error: dict[str, float] | None = None  # the largest of the models'

    def margin(self, name: str) -> float:
        """P95 of what steps of this model, or of any where that is all there is, are off by."""
        return (self.models[name].error or self.error or {}).get("p95", 0.0)  # type: ignore[no-any-return]

    @staticmethod
    def load(path: Path) -> "PlanningProfile":
        """Raises ValueError for a file that is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=PlanningProfile)
        except OSError as error:
            raise ValueError(f"profile: {path}: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"profile: {path} is not a profile: {error}") from error
