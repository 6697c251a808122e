"""The fleet file: which models to serve (DESIGN, section 7). Unknown keys are errors with a suggestion."""

import difflib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.cli.accelerators import KVDType
from paceline.core.request import MAX_DRAFT_TOKENS

Quantization = Literal["none", "int8"]  # engine.config.QUANTIZATIONS


class Goals(BaseModel):
    """Latency goals in seconds: of requests that bring none of their own, and for the token budget."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ttft: float | None = Field(default=None, gt=0)
    tbt: float | None = Field(default=None, gt=0)
    deadline: float | None = Field(default=None, gt=0)  # from arrival to the end, of one-shot models


class Workload(BaseModel):
    """The traffic that a planner expects: a rate and its burstiness, or recorded. One-shot models have no output, and
    all texts are taken to be as long as `prompt_tokens`. Without `acceptance` nothing is drafted in a simulation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # requests/s
    cv: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # of the gaps between them
    prompt_tokens: int = Field(default=256, ge=1)
    output_tokens: int = Field(default=64, ge=1)
    acceptance: float | None = Field(default=None, ge=0, le=1)  # of drafted tokens, if those before them stay
    trace: str | None = None  # a file instead, beside the fleet file

    @model_validator(mode="after")
    def one_of(self) -> "Workload":
        if self.trace and self.rate is not None:
            raise ValueError("rate and trace: one of them, not both")
        return self


class ClusterKeys(BaseModel):
    """Devices to plan for. What is `auto` is what this machine has: a CPU is one device, or those of a placement."""

    model_config = ConfigDict(extra="forbid", strict=True)
    devices: int | Literal["auto"] = "auto"
    memory: str | int = "auto"  # of each, such as 16GiB; auto: an equal part of what is free
    devices_per_node: int = Field(default=8, ge=1)
    load_bandwidth: str | int = 0  # bytes/s from host memory to a device, such as 12GiB; 0: models stay where they are

    @property
    def count(self) -> int:
        """Of devices."""
        return 1 if self.devices == "auto" else self.devices

    @field_validator("devices")
    @classmethod
    def some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be 'auto' or at least 1")
        return value


class Speculation(BaseModel):
    """Who drafts tokens for the model, and how many a step at most."""

    model_config = ConfigDict(extra="forbid", strict=True)
    drafter: str = "none"  # none, or a `DrafterName`
    max_draft_tokens: int = Field(default=4, ge=1, le=MAX_DRAFT_TOKENS)
    adaptive: bool = True  # as many as pay, by profiles and by what was accepted; else always the most
    early_exit_layers: int | None = Field(default=None, ge=1)  # a quarter of the model's by default
    quantization: Quantization | None = None  # of a draft model; int8 by default on CPUs
    smooth: bool = True  # streams get what a step yields evenly


class Entry(BaseModel):
    """One model of the fleet."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1, max_length=128)
    source: str
    quantization: Quantization = "none"
    kv_cache_dtype: KVDType = "auto"  # of keys and values, of a draft model's too
    slo: Goals = Goals()
    speculation: Speculation = Speculation()
    workload: Workload = Workload()

    @model_validator(mode="after")
    def drafted(self) -> "Entry":
        if self.workload.acceptance is not None and self.speculation.drafter == "none":
            raise ValueError("workload.acceptance: is only allowed with a speculation.drafter other than none")
        return self


class FleetFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    models: list[Entry] = Field(min_length=1)
    cluster: ClusterKeys = ClusterKeys()

    @property
    def shares(self) -> bool:
        """Whether models share devices: the file has `cluster`, whatever it says there."""
        return "cluster" in self.model_fields_set


class _Loader(yaml.SafeLoader):
    """One that drops no key because another of its name follows."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):  # an anchor's are not in it yet
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load(path: Path) -> FleetFile:
    """Reads a fleet file. Raises ValueError with one line that names the key and the valid values."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    try:
        fleet = FleetFile.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{path}: {_first(error)}") from error
    for entry in fleet.models:
        if entry.workload.trace:
            entry.workload.trace = str(path.parent / entry.workload.trace)
    names = [entry.name for entry in fleet.models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: models.name: {twice[0]!r} is there twice; names must differ")
    return fleet


def schema() -> str:
    """JSON Schema of fleet files, for editors: docs/fleet.schema.json."""
    return json.dumps(FleetFile.model_json_schema(), indent=1) + "\n"


def check_cache(entry: Entry, one_shot: bool) -> None:
    """Raises ValueError for an encoder with a type of keys and values, which it does not keep."""
    if entry.kv_cache_dtype != "auto" and one_shot:
        raise ValueError(f"kv_cache_dtype, kv-cache-dtype: {entry.name!r} is an encoder, which has none: auto it is")


def _first(error: ValidationError) -> str:
    """The first mistake as KEY: what is wrong; for an unknown key the valid ones, nearest first."""
    mistake = error.errors()[0]
    where = ".".join(str(part) for part in mistake["loc"]) or "file"
    if mistake["type"] not in ("extra_forbidden", "model_type"):
        return f"{where}: {mistake['msg']}"
    parents = {  # by the last name before the key
        "models": Entry, "slo": Goals, "speculation": Speculation, "workload": Workload, "cluster": ClusterKeys
    }  # fmt: skip
    path = mistake["loc"] if mistake["type"] == "model_type" else mistake["loc"][:-1]
    names = [part for part in path if isinstance(part, str)]
    valid = list((parents[names[-1]] if names else FleetFile).model_fields)
    if mistake["type"] == "model_type":
        return f"{where}: must have keys; valid are {', '.join(valid)}"
    key = str(mistake["loc"][-1])
    near = difflib.get_close_matches(key, valid, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{where}: unknown key; {hint}valid are {', '.join(valid)}"
