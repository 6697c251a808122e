"""What steps of a fleet take while it serves, over what its profile says: they find the caches full of other models'
weights, memory and cores in use, and somebody has to tell the workers what to run."""

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from paceline.cli import profile_cache
from paceline.cli.fleet_file import Entry, FleetFile
from paceline.cli.planning import text_times
from paceline.cli.sources import resolve
from paceline.engine.encoder_config import is_encoder

FEWEST = 50  # steps of a model, or of a width, below which nothing is known of it
PARTS = 32  # of the spread
Live = dict[str, dict[str, Any]]  # by model, `planning.LiveEntry`


def measured(url: str, api_key: str | None = None) -> Live:
    """By model, since the server was started: what the engine takes for a step over what the profile says, on average
    (`pace`) and by tokens (`widths`), how that is spread over steps of a width, and `overhead_s` beside the engine.
    Raises ValueError for a URL that is none of ours."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/metrics", headers=headers, timeout=10.0)
        answer.raise_for_status()
        samples = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"live: {url}: {str(error) or type(error).__name__}") from error
    found: Live = {}
    for model in sorted({one.labels["model"] for one in samples if one.name == "paceline_step_pace_count"}):
        mine = [one for one in samples if one.labels.get("model") == model]
        seconds, counts, buckets = Counter[tuple[str, int]](), Counter[int](), dict[int, Counter[float]]()
        for one in mine:
            width = int(one.labels.get("width", 0))
            if one.name == "paceline_profiled_step_seconds_total":
                seconds[one.labels["part"], width] += one.value
            elif one.name == "paceline_step_pace_count":
                counts[width] += one.value
            elif one.name == "paceline_step_pace_bucket":
                buckets.setdefault(width, Counter())[float(one.labels["le"])] += one.value
        if (steps := counts.total()) < FEWEST:
            continue
        predicted, engine, overhead = (
            sum(value for (part, _), value in seconds.items() if part == name)
            for name in ("predicted", "engine", "overhead")
        )
        widths = {
            width: seconds["engine", width] / seconds["predicted", width]
            for width, count in sorted(counts.items()) if count >= FEWEST
        }  # fmt: skip
        found[model] = {
            "pace": engine / predicted, "overhead_s": overhead / steps, "widths": widths,
            "spread": _spread({width: buckets[width] for width in widths}),
        }  # fmt: skip
    if not found:
        raise ValueError(
            f"live: {url}: no model has run {FEWEST} steps that a profile predicts, in a group of one stage and "
            "without drafts; it takes a profile, and traffic"
        )
    return found


def _spread(buckets: dict[int, Counter[float]]) -> list[float]:
    """Of cumulative counts by width: what steps take over the mean of their width, means of equally likely parts."""
    values, weights = list[float](), list[float]()
    for cumulative in buckets.values():
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
                live["widths"] = {width: over * pace for width, pace in live.get("widths", {}).items()}
                model["live"] = live
    except OSError as error:
        raise ValueError(f"out: {path}: {error.strerror}; profile the fleet first") from error
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"out: {path} is no profile of these models ({error})") from error
    profile_cache.write(path, contents)


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
    for column in ("model", "a step over its profile", "by its tokens", "P95 over mean", "beside the engine, ms"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, live in found.items():
        widths = ", ".join(f"{width}+: {pace:.2f}" for width, pace in live["widths"].items())
        high = f"{np.quantile(live['spread'], 0.95):.2f}" if live["spread"] else ""
        table.add_row(name, f"{live['pace']:.3f}", widths, high, f"{1e3 * live['overhead_s']:.2f}")
    return table
