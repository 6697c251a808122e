"""`python -m benchmarks [NAME ...]`: runs benchmarks and writes results/NAME.json with what they were run on."""

import argparse
import importlib
import json
import time
from pathlib import Path

from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
NAMES = [
    "offline_mixed", "http_streams", "memory", "floor", "quantization", "prediction", "scheduler", "sarathi_tables",
    "tails", "speculation", "drafts", "placement", "alpaserve", "parallel", "dispatch", "loading", "simulation",
]  # fmt: skip
HOURS = ["exactness"]  # only by name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = f"of {', '.join(NAMES)}, all by default; or {', '.join(HOURS)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--models", default="qwen2.5-0.5b,llama-3.2-1b", help="shapes, comma-separated")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES + HOURS:
            parser.error(f"NAME: {name!r} is not one of {', '.join(NAMES + HOURS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        result: dict = {"benchmark": name, "about": module.__doc__.strip().splitlines()[0], "machine": describe()}
        begin = time.time()
        for model in getattr(module, "CASES", options.models.split(",")):
            print(f"== {name}: {model}", flush=True)
            result[model] = module.run(model)
            result["seconds"] = round(time.time() - begin)
            (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result[model], indent=1), flush=True)


if __name__ == "__main__":
    main()
