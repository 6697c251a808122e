"""What steps of a fleet take while it serves, over what its profile says: they find the caches full of other models'
weights, memory and cores in use, and somebody has to tell the workers what to run."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

BESIDE = ("schedule", "messages", "output")  # parts of a step in which its device waits
FEWEST = 50  # steps of a model, below which nothing is known


def measured(url: str) -> dict[str, dict[str, float]]:
    """By model, since the server was started: `pace`, what the engine takes for a step over what the profile says, and
    `overhead_s` beside the engine. Raises ValueError for a URL that is none of ours."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/metrics", timeout=10.0)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(f"live: {url}: {str(error) or type(error).__name__}") from error
    rows = [
        (one.name, one.labels, one.value)
        for family in text_string_to_metric_families(answer.text)
        for one in family.samples
    ]

    def of_group(name: str, **labels: str) -> dict[str, float]:
        return {
            had["group"]: value for known, had, value in rows
            if known == f"paceline_{name}_total" and labels.items() <= had.items()
        }  # fmt: skip

    models = {had["group"]: had["model"] for known, had, _ in rows if known == "paceline_steps_profiled_seconds_total"}
    if not models:
        raise ValueError(f"live: {url}: no step has been compared with a profile; it takes a profile, and traffic")
    steps, profiled, took = (of_group(name) for name in ("steps", "steps_profiled_seconds", "steps_measured_seconds"))
    beside = [of_group("step_seconds", part=part) for part in BESIDE]
    found = {}
    for model in sorted(set(models.values())):
        groups = [group for group, name in models.items() if name == model]
        count = sum(steps[group] for group in groups)
        if count >= FEWEST:
            found[model] = {
                "pace": sum(took[group] for group in groups) / sum(profiled[group] for group in groups),
                "overhead_s": sum(part[group] for part in beside for group in groups) / count,
            }
    if not found:
        raise ValueError(f"live: {url}: no model has run {FEWEST} steps yet")
    return found


def add(file: Path, found: dict[str, dict[str, float]]) -> None:
    """To a profile file, in place of what it has of these models. Raises ValueError."""
    from paceline.cli import profile_cache

    try:
        contents: dict[str, Any] = msgspec.json.decode(file.read_bytes())
        for name, live in found.items():
            contents["models"][name]["live"] = live
    except OSError as error:
        raise ValueError(f"out: {file}: {error.strerror}; profile the fleet first") from error
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"out: {file} is no profile of these models ({error})") from error
    profile_cache.write(file, contents)


def live_table(found: dict[str, dict[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("model", "a step over its profile", "beside the engine, ms"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, live in found.items():
        table.add_row(name, f"{live['pace']:.3f}", f"{1e3 * live['overhead_s']:.2f}")
    return table
