"""A controller's input log as JSON lines, one turn a line: enough to repeat every decision of a run."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from paceline.core.batch import StepResult
from paceline.core.events import Advance, Back, Cancel, Complete, Input, Lost, Retire, Submit
from paceline.core.request import SLO, Request

Turn = tuple[float, tuple[Input, ...]]


def dump(now: float, inputs: Iterable[Input]) -> str:
    """One line. Times keep all their bits."""
    rows = [[type(item).__name__, asdict(item)] for item in inputs]
    return json.dumps([now, rows], separators=(",", ":"), default=list)  # a bytearray is a list of numbers


def load(lines: Iterable[str]) -> Iterator[Turn]:
    """The turns of a log."""
    for line in lines:
        now, inputs = json.loads(line)
        yield now, tuple(_input(kind, fields) for kind, fields in inputs)


def _input(kind: str, fields: dict) -> Input:  # type: ignore[type-arg]
    match kind:
        case "Submit":
            request = fields["request"]
            request |= {"slo": SLO(**request["slo"]), "prefix": tuple(request["prefix"])}
            return Submit(Request(**request), fields["admitted"])
        case "Complete":
            result = fields["result"]
            finished = [(index, reason) for index, reason in result["finished"]]
            hashes = [(index, tuple(keys)) for index, keys in result["hashes"]]
            columns = {name: bytearray(result.get(name, ())) for name in ("tokens", "drafted")}
            step = StepResult(**result | columns | {"finished": finished, "hashes": hashes})
            return Complete(fields["group"], fields["batch"], step)
        case "Advance":
            return Advance(**fields)
        case "Cancel":
            return Cancel(fields["request"])
        case "Lost":
            return Lost(**fields)
        case "Retire":
            return Retire(fields["group"])
        case "Back":
            return Back(**fields)
    raise ValueError(f"log: unknown input {kind!r}; known are Submit, Complete, Advance, Cancel, Lost, Back, Retire")
