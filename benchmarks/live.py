"""A fleet under test as its users have it: commands of `paceline`, a server in a process of its own."""

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MET = 0.99  # of the goals, at the capacity


def parser(doc: str, name: str) -> argparse.ArgumentParser:
    """With the options that all of these benchmarks have."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--quick", action="store_true", help="little and short: does it work?")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    made.add_argument("--work", type=Path, default=Path(".bench") / name, help="profile, placements, traces")
    return made


def keep(result: dict, folder: Path, draw: Callable[[dict, Path], None] | None = None) -> None:
    """Writes it, and a picture of it, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=1) + "\n")
    if draw:
        draw(result, folder / f"{result['benchmark']}.png")
    print(json.dumps(result["loads"], indent=1))


def paceline(folder: Path, *arguments: object) -> None:
    """Runs a command. Raises SystemExit with what it said when it fails."""
    command = [sys.executable, "-m", "paceline.cli.main", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"paceline {' '.join(map(str, arguments))}: {done.stderr.strip()}")


def profiled(folder: Path, quick: bool) -> None:
    """Measures fleet.yaml into profile.json; one of a run before that was as quick is taken as it is."""
    kept = folder / ("profile-quick.json" if quick else "profile-full.json")
    if not kept.exists():
        paceline(folder, "profile", "fleet.yaml", "--out", kept.name, *["--quick", "--seconds", 2] * quick)
    shutil.copy(kept, folder / "profile.json")


def simulated(folder: Path, trace: str, placement: str = "placement.json", profile: str = "profile.json") -> dict:
    """The report of fleet.yaml on this placement, as the profile says."""
    options = ["--profile", profile, "--placement", placement, "--trace", trace, "--out", "simulated"]
    paceline(folder, "simulate", "fleet.yaml", *options)
    return json.loads((folder / "simulated/report.json").read_text())


def measured(folder: Path, trace: str, url: str) -> dict:
    """The report of what the server gave."""
    paceline(folder, "bench", "--url", url, "--trace", trace, "--fleet", "fleet.yaml", "--out", "measured")
    return json.loads((folder / "measured/report.json").read_text())


def poisson(folder: Path, rate: float, duration: float, seed: int) -> str:
    """Of the models' shares of their rates, at so many requests/s in all."""
    name = f"trace-{rate:.3f}-{seed}.csv"
    options = ["--total-rate", rate, "--power", 0, "--cv", 1, "--duration", duration, "--seed", seed, "--out", name]
    paceline(folder, "trace", "make", "fleet.yaml", *options)
    return name


def capacity(folder: Path, duration: float, met: float = MET) -> float:
    """Requests/s in all up to which the simulation meets so many of the goals: by doubling, then by halves, to 3 %."""

    def good(rate: float) -> bool:
        return simulated(folder, poisson(folder, rate, duration, 0))["attainment"] >= met

    low, high = 0.0, 1.0
    while good(high) and high < 4096:
        low, high = high, 2 * high
    for _ in range(5):
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    if not low:
        raise SystemExit("the simulation meets the goals at no rate")
    return low


@contextmanager
def served(folder: Path, placement: str = "placement.json", *options: object) -> Iterator[str]:
    """fleet.yaml on this placement, with profile.json; its URL, when it is ready."""
    command = [sys.executable, "-m", "paceline.cli.main", "serve", "fleet.yaml", "--port", "0"]
    command += ["--placement", placement, "--profile", "profile.json", *map(str, options)]
    wide = os.environ | {"COLUMNS": "160"}
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=wide)
    urls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        said = []
        for line in process.stderr:  # to its end: a full pipe would stop the server
            said.append(line)
            if found := re.search(r"ready in .* at (http://\S+)/v1", line):
                urls.put(found.group(1))
        urls.put("".join(said))

    threading.Thread(target=read, daemon=True).start()
    try:
        url = urls.get()
        if not url.startswith("http"):
            raise SystemExit(f"the fleet does not start: {url}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
