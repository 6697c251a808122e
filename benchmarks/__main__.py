"""`python -m benchmarks [NAME ...]`: runs benchmarks and writes results/NAME.json with what they were run on."""

import argparse
import importlib
import json
import time
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.plots import draw

RESULTS = Path(__file__).parent / "results"
NAMES = [
    "offline_mixed", "http_streams", "memory", "floor", "quantization", "prediction", "scheduler", "sarathi_tables",
    "tails", "speculation", "smooth", "drafts", "placement", "alpaserve", "parallel", "dispatch", "loading",
    "simulation", "bubbles", "lookahead", "faults",
]  # fmt: skip
APART = ["exactness", "gpu", "async_steps"]  # only by name: hours, or a GPU
SHAPES = ["qwen2.5-0.5b", "llama-3.2-1b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = f"of {', '.join(NAMES)}, all by default; or {', '.join(APART)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--models", nargs="+", metavar="CASE", help="shapes or cases; default: all of a benchmark")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES + APART:
            parser.error(f"NAME: {name!r} is not one of {', '.join(NAMES + APART)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or NAMES:
        module, file = importlib.import_module(f"benchmarks.{name}"), options.out / f"{name}.json"
        result = json.loads(file.read_text()) if file.exists() else {}  # other cases stay
        result |= {"benchmark": name, "about": module.__doc__.strip().splitlines()[0]}
        cases = options.models or getattr(module, "CASES", SHAPES)
        if hasattr(module, "start"):
            module.start(cases)
        for model in cases:
            print(f"== {name}: {model}", flush=True)
            begin, ran = time.time(), {"machine": describe()}
            figures = module.run(model)
            result[model] = ran | {"seconds": round(time.time() - begin)} | figures
            file.write_text(json.dumps(result, indent=1) + "\n")
            draw(file)
            print(json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
