"""What steps of a fleet take while it serves, over what its profile says: they find the caches full of other models'
weights, memory and cores in use, and somebody has to tell the workers what to run."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.table import Table

from paceline.cli import profile_cache
from paceline.cli.ask import ask, fault
from paceline.cli.fleet_file import Entry, FleetFile
from paceline.cli.planning import text_times
from paceline.cli.sources import resolve
from paceline.engine.encoder_config import is_encoder
from paceline.latency.step_time import BEFORE, OTHERS

FEWEST = 50  # steps of a model, or of a width, below which nothing is known of it
FEW = 20  # likewise, of a width by what else there is
PARTS = 32  # of the spread
Live = dict[str, dict[str, Any]]  # by model, `profile_file.LiveEntry`


def measured(url: str, api_key: str | None = None) -> Live:
    """By model, since the server was started: what the engine takes for a step over what the profile says, on average
    (`pace`), by tokens (`widths`), and by what else there is (`apart`: `step_time.OTHERS`, `BEFORE`), how steps that
    are alike differ, and `overhead_s` beside the engine. Raises ValueError for a URL that is none of ours,
    OSError where the server cannot answer."""
    try:
        text = ask(url, "metrics", api_key).decode()
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    except OSError as error:
        raise fault("live", url, error) from error
    except ValueError as error:
        raise ValueError(f"live: {url}: {error}") from error
    found: Live = {}
    for model in sorted({one.labels["model"] for one in samples if one.name == "paceline_step_pace_count"}):
        mine = [one for one in samples if one.labels.get("model") == model]
        alike = defaultdict[tuple[int, str, str], _Steps](_Steps)
        for one in mine:
            if "before" in one.labels:  # not in metrics of older servers
                like = int(one.labels["width"]), one.labels["others"], one.labels["before"]
                alike[like].add(one)
        together = sum(alike.values(), _Steps())
        if together.count < FEWEST:
            continue
        widths = sorted({width for width, *_ in alike})
        whole = [sum((steps for (n, *_), steps in alike.items() if n == width), _Steps()) for width in widths]
        found[model] = {
            "pace": together.pace, "overhead_s": together.seconds["overhead"] / together.count,
            "widths": _paces(zip(widths, whole, strict=True), FEWEST),
            "apart": {
                others: {
                    before: _paces(((n, alike[n, others, before]) for n in widths), FEW) for before in BEFORE
                } for others in OTHERS
            },
            "spread": _spread(_seen(alike.values(), FEW) or _seen(whole, FEWEST)),
        }  # fmt: skip
    if not found:
        raise ValueError(
            f"live: {url}: no model has run {FEWEST} steps that a profile predicts, in a group of one stage and "
            "without drafts; it takes a profile, and traffic"
        )
    return found


@dataclass(slots=True)
class _Steps:
    """Of some steps what `/metrics` says."""

    count: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    buckets: Counter[float] = field(default_factory=Counter)

    def add(self, sample: Sample) -> None:
        if sample.name == "paceline_profiled_step_seconds_total":
            self.seconds[sample.labels["part"]] += sample.value
        elif sample.name == "paceline_step_pace_count":
            self.count += int(sample.value)
        elif sample.name == "paceline_step_pace_bucket":
            self.buckets[float(sample.labels["le"])] += sample.value

    def __add__(self, other: "_Steps") -> "_Steps":
        return _Steps(self.count + other.count, self.seconds + other.seconds, self.buckets + other.buckets)

    @property
    def pace(self) -> float:
        return self.seconds["engine"] / self.seconds["predicted"]


def _paces(known: Iterable[tuple[int, _Steps]], fewest: int) -> dict[int, float]:
    """By tokens, of those that have been seen often."""
    return {width: steps.pace for width, steps in known if steps.count >= fewest}


def _seen(known: Iterable[_Steps], fewest: int) -> list[Counter[float]]:
    return [steps.buckets for steps in known if steps.count >= fewest]


def _spread(alike: Iterable[Counter[float]]) -> list[float]:
    """Of cumulative counts, of steps that are alike each: what a step takes over the mean of its like, means of
    equally likely parts."""
    values, weights = list[float](), list[float]()
    for cumulative in alike:
        bounds = sorted(cumulative)
        counts = np.diff([0.0, *(cumulative[bound] for bound in bounds)])
        half = (bounds[1] / bounds[0]) ** 0.5  # they are as far from each other everywhere, and the last is infinite
        middles = np.array([*(bound / half for bound in bounds[:-1]), bounds[-2] * half])
        values += (middles * counts.sum() / (middles @ counts)).tolist()
        weights += counts.tolist()
    if not values:
        return []
    order = np.argsort(values)
    shares = np.array(weights)[order] / sum(weights)
    steps, seconds = (np.cumsum([0.0, *some]) for some in (shares, shares * np.array(values)[order]))
    parts = np.diff(np.interp(np.linspace(0.0, 1.0, PARTS + 1), steps, seconds)) * PARTS
    return [float(one) for one in parts]


def add(path: Path, found: Live, fleet: FleetFile, threads: int | None) -> None:
    """To a profile file of the fleet, in place of what it has of these models. Raises ValueError.

    A server predicts an encoder's steps by the profile that is kept on this machine, by length; a fleet's profile file
    has one length, which was measured another time: its pace is of that.
    """
    try:
        contents: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        for entry in fleet.models:
            if entry.name in found:
                model, live = contents["models"][entry.name], dict(found[entry.name])
                over = _kept_over(model, entry, threads)
                live["pace"] *= over
                live["widths"] = _times(over, live.get("widths", {}))
                live["apart"] = {
                    others: {before: _times(over, paces) for before, paces in known.items()}
                    for others, known in live.get("apart", {}).items()
                }
                model["live"] = live
    except OSError as error:
        raise ValueError(f"out: {path}: {error.strerror}; profile the fleet first") from error
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"out: {path} is no profile of these models ({error})") from error
    profile_cache.write(path, contents)


def _times(factor: float, paces: dict[int, float]) -> dict[int, float]:
    return {width: factor * pace for width, pace in paces.items()}


def _kept_over(model: dict[str, Any], entry: Entry, threads: int | None) -> float:
    """Seconds of a text by the kept profile over those of the profile file; 1 of a model that generates."""
    if entry.source.startswith("profile:") or not is_encoder(source := resolve(entry.source)):
        return 1.0
    kept = profile_cache.cache_file(source, entry.quantization, profile_cache.Device.here(threads))
    if not kept.exists():  # then the server predicts by the profile file as well
        return 1.0
    times, _, _ = text_times(kept)
    alone = next(one for one in model["parallel"] if one["pipeline"] * one["tensor"] == 1)
    seconds: float = sum(times.at(alone["prompt_tokens"])[1]) / sum(alone["stage_latency"]["1"])
    return seconds


def live_table(found: Live) -> Table:
    table = Table(box=None, pad_edge=False)
    apart = [(others, before) for others in OTHERS for before in BEFORE]
    columns = "model", "a step over its profile", "by its tokens", *(f"others {a}, after {b}" for a, b in apart)
    for column in (*columns, "P95 over mean", "beside the engine, ms"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, live in found.items():
        paces = live["widths"], *(live["apart"][others][before] for others, before in apart)
        shown = (", ".join(f"{width}+: {pace:.2f}" for width, pace in some.items()) for some in paces)
        high = f"{np.quantile(live['spread'], 0.95):.2f}" if live["spread"] else ""
        table.add_row(name, f"{live['pace']:.3f}", *shown, high, f"{1e3 * live['overhead_s']:.2f}")
    return table
