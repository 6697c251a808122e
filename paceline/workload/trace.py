"""Traces: requests in order of arrival, as columns, and the file that holds them (DESIGN, section 7)."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.workload.arrivals import merged, rate_and_cv

COLUMNS = ("arrival", "model", "prompt_tokens", "output_tokens")
AZURE = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")  # as the Azure LLM inference traces are published


Tokens = Sequence[int] | NDArray[np.int64]
Lengths = Callable[[str, int], tuple[Tokens, Tokens]]  # of so many requests of a model: prompts and outputs


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival; `models` are indices into `names`."""

    arrivals: NDArray[np.float64]  # seconds
    models: NDArray[np.int32]
    prompts: NDArray[np.int64]  # tokens
    outputs: NDArray[np.int64]  # tokens; 0: a one-shot model
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def duration(self) -> float:
        """Seconds until the last arrival."""
        return float(self.arrivals[-1]) if len(self) else 0.0

    @staticmethod
    def of(streams: dict[str, NDArray[np.float64]], lengths: Lengths) -> "Trace":
        """From the arrivals of each model; `lengths(name, count)` are prompts and outputs of its requests, in order."""
        names = tuple(streams)
        arrivals, models = merged(list(streams.values()))
        prompts, outputs = np.zeros(len(arrivals), np.int64), np.zeros(len(arrivals), np.int64)
        for index, name in enumerate(names):
            mine = models == index
            prompts[mine], outputs[mine] = lengths(name, int(mine.sum()))
        return Trace(arrivals, models, prompts, outputs, names)

    def named(self, names: Sequence[str]) -> "Trace":
        """The same with indices into `names`. Raises ValueError for a model that is not among them."""
        places = {name: index for index, name in enumerate(names)}
        unknown = [name for name in self.names if name not in places]
        if unknown:
            raise ValueError(f"trace: model {unknown[0]!r} is not in the fleet; it has {', '.join(names)}")
        index = np.array([places[name] for name in self.names], np.int32)
        return Trace(self.arrivals, index[self.models], self.prompts, self.outputs, tuple(names))

    def of_model(self, name: str) -> "Trace":
        """Its requests. Raises ValueError where it has none."""
        if name not in self.names:
            raise ValueError(f"trace: no model {name!r}; there are {', '.join(self.names)}")
        mine = self.models == self.names.index(name)
        count = int(mine.sum())
        return Trace(
            self.arrivals[mine], np.zeros(count, np.int32), self.prompts[mine], self.outputs[mine], (name,)
        )

    def between(self, begin: float, end: float) -> "Trace":
        """Requests that arrive in [begin, end)."""
        first, last = np.searchsorted(self.arrivals, (begin, end))
        some = slice(first, last)
        return Trace(self.arrivals[some], self.models[some], self.prompts[some], self.outputs[some], self.names)

    def describe(self) -> list[tuple[str, int, float, float, float, float]]:
        """By model: name, requests, requests/s, CV of the gaps, mean tokens of prompts and of outputs."""
        rows = []
        for index, name in enumerate(self.names):
            mine = self.models == index
            count = int(mine.sum())
            prompt, output = (float(some[mine].mean()) if count else 0.0 for some in (self.prompts, self.outputs))
            rate, cv = rate_and_cv(self.arrivals[mine])
            rows.append((name, count, rate, cv, prompt, output))
        return rows

    def save(self, path: Path) -> None:
        """Writes a trace file. Raises OSError."""
        path.write_text(self.text(), encoding="utf-8", newline="")

    def text(self) -> str:
        """A trace file's."""
        file = io.StringIO(newline="")
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        rows = zip(self.arrivals, self.models, self.prompts, self.outputs, strict=True)
        writer.writerows((repr(float(t)), self.names[m], int(p), int(o)) for t, m, p, o in rows)
        return file.getvalue()


def load(path: Path, model: str | None = None) -> Trace:
    """Reads a trace file; more columns are allowed, and rows need not be in order of arrival.

    `model` names the model of a file without such a column, in the Azure traces' form or ours. Raises ValueError with
    one line that names the column and the row, which is its line in the file.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin theirs with a mark
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader if row]
        header = rows.pop(0)[1] if rows else []
        return _parsed(path, header, [row for _, row in rows], [line for line, _ in rows], model)
    except OSError as error:
        raise ValueError(f"trace: {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"trace: {path}: not CSV: {error}") from error


def _parsed(path: Path, header: list[str], rows: list[list[str]], lines: list[int], model: str | None) -> Trace:
    wanted = list(COLUMNS)
    if model is not None and "model" not in header:
        wanted.remove("model")
        if set(AZURE) <= set(header):
            wanted = list(AZURE)
    missing = [name for name in wanted if name not in header]
    if missing:
        there = ", ".join(map(repr, header[:8])) or "none"
        raise ValueError(f"trace: {path}: no column {missing[0]!r}; needed are {', '.join(wanted)}, there are {there}")
    columns = {}
    for name in wanted:
        index = header.index(name)
        short = next((n for n, row in enumerate(rows) if len(row) <= index), None)
        if short is not None:
            raise ValueError(f"trace: {path}: row {lines[short]} has no {name!r}")
        columns[name] = [row[index] for row in rows]
    arrivals = _numbers(path, wanted[0], columns[wanted[0]], lines, float)
    prompts, outputs = (_numbers(path, name, columns[name], lines, int) for name in wanted[-2:])
    owners = columns.get("model", [model or ""] * len(rows))
    names = tuple(dict.fromkeys(owners)) or ((model,) if model else ())
    places = {name: index for index, name in enumerate(names)}
    models = np.array([places[name] for name in owners], np.int32)
    order = np.argsort(arrivals, kind="stable")
    return Trace(arrivals[order], models[order], prompts[order], outputs[order], names)


def _numbers(path: Path, name: str, texts: list[str], lines: list[int], kind: type) -> NDArray:  # type: ignore[type-arg]
    found, valid = [], "a number" if kind is float else "a whole number"
    for row, text in zip(lines, texts, strict=True):
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"trace: {path}: row {row}: {name} {text!r} is not {valid}") from None
        if not 0 <= value < 2**53:
            raise ValueError(f"trace: {path}: row {row}: {name} {text!r} is not at least 0, and no more than 2**53")
        found.append(value)
    return np.array(found, np.float64 if kind is float else np.int64)


def joint_lengths(pairs: Sequence[tuple[int, int]] | NDArray[np.int64], seed: int) -> Lengths:
    """Prompt and output tokens of requests, drawn together from recorded pairs: long prompts keep their outputs."""
    known = np.asarray(pairs, np.int64).reshape(-1, 2)
    random = np.random.default_rng(seed)

    def draw(name: str, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        some = known[random.integers(len(known), size=count)] if len(known) else np.zeros((count, 2), np.int64)
        return some[:, 0], some[:, 1]

    return draw


def spread(recorded: Trace, names: Iterable[str], rates: Sequence[float], duration: float, seed: int) -> Trace:
    """A trace of several models made from the recorded one of a single service.

    Each model sees the recording from another moment on, as fast as its rate wants; arrivals keep their gaps (and so
    their bursts), and prompts their outputs. Raises ValueError for one without two requests at different times.
    """
    if len(recorded) < 2 or recorded.arrivals[0] == recorded.arrivals[-1]:
        raise ValueError("trace: a recording to spread over models needs two requests at different times")
    random, gaps = np.random.default_rng(seed), np.diff(recorded.arrivals, prepend=recorded.arrivals[0])
    gaps[0] = mean = gaps[1:].mean()
    streams, lengths = {}, {}
    for name, rate in zip(names, rates, strict=True):
        turn = int(duration * rate / len(recorded)) + 2  # times that the recording is gone through, at most
        index = (int(random.integers(len(recorded))) + np.arange(turn * len(recorded))) % len(recorded)
        times = np.cumsum(gaps[index] / (mean * rate)) if rate else np.empty(0)
        times = times[times < duration]
        streams[name] = times
        lengths[name] = recorded.prompts[index[: len(times)]], recorded.outputs[index[: len(times)]]
    return Trace.of(streams, lambda name, count: lengths[name])
