"""Train, export and evaluate the built-in models `coder` and `coder-draft`: `make models`.

    python scripts/train_builtin.py                # whatever is still to do, from the last checkpoint on
    python scripts/train_builtin.py --report       # only export and measure the checkpoints that exist

The defaults take about an hour and a quarter on two CPU cores with AVX-512 bfloat16. Stop it whenever you like: it goes
on from its last checkpoint. Every three minutes the export in `--out` is replaced by the newest state.
"""

import argparse
import dataclasses
from pathlib import Path

import torch
from builtin_models.data import Corpus, prepare
from builtin_models.export import export
from builtin_models.model import LlamaShape
from builtin_models.report import Run, measure, write
from builtin_models.training import Loss, Phase, RunSpec, Trainer, checkpoint, distillation_loss, text_loss, train

TARGET = RunSpec(
    name="coder",
    shape=LlamaShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=512),
    tokens=22_000_000,
    phases=(
        Phase(0.0, length=256, micro_batches=1, keep_tests=1.0),
        Phase(0.35, length=256, micro_batches=1, keep_tests=0.4),
        Phase(0.60, length=512, micro_batches=2, keep_tests=0.3),
        Phase(0.80, length=1024, micro_batches=2, keep_tests=0.3),
        Phase(0.94, length=2048, micro_batches=2, keep_tests=0.3),
    ),
)
DRAFT = RunSpec(
    name="coder-draft",
    shape=LlamaShape(hidden=128, layers=1, heads=4, kv_heads=2, intermediate=384, tied=True),
    tokens=3_500_000,
    phases=(Phase(0.0, 256, 1, 0.5), Phase(0.80, 512, 1, 0.3), Phase(0.94, 2048, 1, 0.3)),
    embedding_rate=0.03,
)


def main() -> None:
    options = parse_options()
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    corpus = prepare(options.work)
    target_spec = dataclasses.replace(TARGET, tokens=options.tokens)
    draft_spec = dataclasses.replace(DRAFT, tokens=options.draft_tokens)
    target = advance(target_spec, corpus, text_loss, options)
    teacher = target.model.requires_grad_(False)
    draft = advance(draft_spec, corpus, distillation_loss(teacher), options)
    runs = {trainer.spec.name: Run(trainer.spec, trainer.tokens_done(), trainer.seconds) for trainer in (target, draft)}
    results = measure(corpus, options.out, runs)
    write(results, options.out, options.results)
    print(f"held-out bits per byte: coder {results['coder']['held_out']['bits_per_byte']:.3f}, ", end="")
    print(f"4-gram table {results['ngram']['4']['bits_per_byte']:.3f}; acceptance {results['acceptance']}")


def advance(spec: RunSpec, corpus: Corpus, loss: Loss, options: argparse.Namespace) -> Trainer:
    """Train what is still to do of `spec`, exporting at every checkpoint."""
    trainer = Trainer(spec, corpus, options.work, loss, compiled=not options.eager)

    def on_checkpoint(line: str) -> None:
        export(trainer.model, corpus.tokenizer, options.out / spec.name)
        with open(options.work / "progress.log", "a", encoding="utf-8") as log:
            log.write(line + "\n")

    if options.report:
        on_checkpoint(f"{spec.name}: exported as it is")
    else:
        train(trainer, on_checkpoint)
    return trainer


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(".models-work"), help="checkpoints and token streams")
    parser.add_argument("--out", type=Path, default=Path("paceline/builtin"), help="where the model directories go")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/builtin_models.json"))
    parser.add_argument("--tokens", type=int, default=TARGET.tokens, help="training tokens of the target")
    parser.add_argument("--draft-tokens", type=int, default=DRAFT.tokens, help="training tokens of the draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="no torch.compile: half the speed, needs no C++ compiler")
    parser.add_argument("--report", action="store_true", help="no training: export and measure what there is")
    options = parser.parse_args()
    for spec in (TARGET, DRAFT):
        if options.report and not checkpoint(options.work, spec).exists():
            parser.error(f"--report: there is no checkpoint {checkpoint(options.work, spec)}")
    return options


if __name__ == "__main__":
    main()
