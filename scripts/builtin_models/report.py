"""The figures of both models, as one JSON file and as the two model cards."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path

from . import evaluation
from .data import Corpus, write_atomically
from .export import complete, read_export, shape_facts
from .training import RunSpec, training_flop

PROMPTS = ("def __init__(self, ", "import os\nimport ", "    def __repr__(self):\n        return ", "for i in range(")
NGRAM_ORDERS = (2, 3, 4, 5)


@dataclass(frozen=True)
class Run:
    """What training one model took; `seconds` of wall clock spent in steps on a shared machine."""

    spec: RunSpec
    tokens: int
    seconds: float

    def facts(self) -> dict[str, float]:
        flop = training_flop(self.spec) * self.tokens / self.spec.tokens
        return {"tokens": self.tokens, "seconds": round(self.seconds), "flop": flop}


def measure(corpus: Corpus, out: Path, runs: dict[str, Run]) -> dict[str, object]:
    """Every figure, measured on the exported files."""
    models = {name: read_export(out / name) for name in runs}
    results: dict[str, object] = {
        "python": platform.python_version(),
        "corpus": {
            "files": corpus.num_files,
            "train_bytes": corpus.train_bytes,
            "train_tokens": len(corpus.train),
            "held_out_bytes": corpus.held_out_bytes,
            "held_out_tokens": len(corpus.held_out),
        },
        "ngram": {str(order): evaluation.ngram_scores(corpus, order) for order in NGRAM_ORDERS},
    }
    for name, model in models.items():
        results[name] = {
            **shape_facts(model, out / name),
            "held_out": evaluation.model_scores(model, corpus),
            "nats_by_position": evaluation.loss_by_position(model, corpus.held_out),
            "training": runs[name].facts(),
            "samples": {prompt: complete(model, corpus.tokenizer, prompt, 48, 0.0) for prompt in PROMPTS},
        }
    results["acceptance"] = evaluation.acceptance(models["coder"], models["coder-draft"], corpus.held_out)
    return results


def write(results: dict[str, object], out: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(results, indent=2) + "\n").encode())
    for name in ("coder", "coder-draft"):
        write_atomically(out / name / "README.md", card(name, results).encode())


ROLE = {
    "coder": """\
A small completer of Python code, trained from scratch on the Python standard library. It exists so that the server
can be tried, tested and measured without a download; it is no assistant.""",
    "coder-draft": """\
The draft model for `builtin:coder`: it shares the tokenizer byte for byte and was trained to imitate the target's
distribution. On its own it is a poor completer.""",
}
LIMITS = """\
- It completes text that looks like the Python standard library. It knows no other language, follows no instructions,
  answers no questions and reasons about nothing; what it writes is often wrong and must not be run unread.
- The chat template only joins the messages' contents with line breaks, as text to be continued. There are no roles.
- Trained on windows of 256 tokens, lengthened to 2,048 towards the end; see the table for what context is worth.
- Its training text is public source code, names and addresses of authors included; it may repeat passages verbatim.
"""


def card(name: str, results: dict[str, object]) -> str:
    """The model card. Every number comes from `results`."""
    sections = [
        "---\nlicense: apache-2.0\nlanguage: [code]\npipeline_tag: text-generation\n---",
        f"# {name}\n\n{ROLE[name]}",
        f"## Facts\n\n{_facts(results[name], results)}",
        f"## Held-out text\n\n{_loss_table(name, results)}",
        f"## Samples\n\nGreedy, unedited, 48 tokens at most.\n\n{_samples(results[name]['samples'])}",
        f"## Limits\n\n{LIMITS}",
    ]
    if name == "coder-draft":
        sections.insert(4, f"## As a draft\n\n{_acceptance(results['acceptance'])}")
    return "\n\n".join(sections)


def _facts(facts: dict[str, object], results: dict[str, object]) -> str:
    shape, training, corpus = facts["shape"], facts["training"], results["corpus"]
    layers = "1 layer" if shape["layers"] == 1 else f"{shape['layers']} layers"
    return f"""\
- Architecture: `LlamaForCausalLM`, {layers}, hidden size {shape["hidden"]}, {shape["heads"]} heads
  ({shape["kv_heads"]} key-value heads), intermediate size {shape["intermediate"]}, vocabulary {shape["vocab"]:,},
  head {"tied to the embedding" if shape["tied"] else "untied"}.
- Size: {facts["parameters"]:,} parameters in bfloat16; {facts["bytes"]:,} bytes with the tokenizer.
- Data: the standard library of Python {results["python"]} without its generated tables (`encodings`, `pydoc_data`),
  its tests included: {corpus["train_bytes"] / 1e6:.1f} MB, {corpus["train_tokens"] / 1e6:.2f} M tokens.
- Held out: {corpus["held_out_bytes"] / 1e3:.0f} kB in whole files, picked by hash, none of them tests.
- Training: {training["tokens"] / 1e6:.1f} M tokens seen, {training["flop"]:.1e} FLOP, {training["seconds"] / 60:.0f} \
minutes on 2 CPU cores shared
  with other work. `make models` repeats it.
- Licence: the weights are under Apache-2.0; the training text is under the PSF licence."""


def _loss_table(name: str, results: dict[str, object]) -> str:
    rows = [(f"{order}-gram table", results["ngram"][order]) for order in ("2", "3", "4", "5")]
    rows.append((f"**{name}**", results[name]["held_out"]))
    lines = ["| | bits per byte | nats per token |", "|---|---|---|"]
    lines += [f"| {label} | {row['bits_per_byte']:.3f} | {row['nats_per_token']:.3f} |" for label, row in rows]
    bands = results[name]["nats_by_position"]
    lines += ["", "The tables are interpolated modified Kneser-Ney over the same tokenizer and training files.", ""]
    lines += ["| tokens of context | " + " | ".join(bands) + " |", "|---" * (len(bands) + 1) + "|"]
    lines.append("| nats per token | " + " | ".join(f"{value:.3f}" for value in bands.values()) + " |")
    return "\n".join(lines)


def _acceptance(rates: dict[str, float]) -> str:
    return (
        "Share of proposed tokens that the target accepts, on held-out code: "
        f"{rates['temperature_1.0']:.3f} at temperature 1,\n{rates['temperature_0.8']:.3f} at 0.8 "
        f"(both E[sum min]), {rates['greedy']:.3f} greedy (same argmax)."
    )


def _samples(samples: dict[str, str]) -> str:
    return "\n\n".join(f"Prompt `{prompt!r}`\n\n```python\n{prompt}{text}\n```" for prompt, text in samples.items())
