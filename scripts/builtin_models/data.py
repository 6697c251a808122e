"""Corpus, tokenizer and token streams for the built-in models.

The corpus is the Python standard library of the interpreter that runs the script: its own `Lib/**/*.py`. Files are
split by a hash of their relative path, whole files at a time; only files outside the test suites may be held out.
"""

import hashlib
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
VOCAB_SIZE = 2048
HELD_OUT_PERCENT = 4
CUT_EVERY = 1200  # bytes; see `encode_with_cuts`
# Generated tables teach nothing but themselves and would flatter every bits-per-byte figure.
SKIPPED = ("site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "config-")
TEST_DIRS = {"test", "tests", "idle_test"}
# An optional space and an identifier; one digit; an optional space and punctuation; line ends with the indentation.
WORD = r" ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|[\r\n]+[ \t]*|[ \t]+(?!\S)|\s"


@dataclass(frozen=True)
class SourceFile:
    path: str  # relative to the standard library
    text: str
    is_test: bool
    held_out: bool


def read_corpus(root: Path | None = None) -> list[SourceFile]:
    """Every readable UTF-8 source file, library before tests, each in the order of its path's hash."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part.startswith(SKIPPED) for part in relative.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the tests keep a few files in other encodings on purpose
        if text.strip() and _is_prose_or_code(text):
            is_test = bool(TEST_DIRS.intersection(relative.parts))
            held_out = not is_test and _hash(f"split/{relative.as_posix()}") % 100 < HELD_OUT_PERCENT
            files.append(SourceFile(relative.as_posix(), text, is_test, held_out))
    return sorted(files, key=lambda file: (file.is_test, _hash(file.path)))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _is_prose_or_code(text: str) -> bool:
    """False for tables of numbers."""
    return sum(map(str.isdigit, text)) < 0.12 * len(text)


def train_tokenizer(files: list[SourceFile]) -> Tokenizer:
    """A byte-level BPE over the training files that are not tests; lossless for any string."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (file.text for file in files if not file.held_out and not file.is_test)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_with_cuts(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Tokens of `text`, cut at random places (every CUT_EVERY characters or so) whose pieces are encoded apart.

    A prompt may end anywhere, also in a space or inside a word, where its last token is one that ordinary text never
    has there. The cuts show the model such endings, and what follows them, at a cost of about one token in 400.
    """
    cuts, at = [0], 0
    while (at := at + 1 + int(rng.expovariate(1 / CUT_EVERY))) < len(text):
        cuts.append(at)
    pieces = [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [token for piece in tokenizer.encode_batch_fast(pieces) for token in piece.ids]


def token_stream(tokenizer: Tokenizer, files: list[SourceFile], cut_seed: int | None) -> np.ndarray:
    """The files' tokens in order, each file led in by the end-of-text token. Returns uint16 [num_tokens]."""
    rng = random.Random(cut_seed)
    end = tokenizer.token_to_id(END)
    stream: list[int] = []
    for file in files:
        stream.append(end)
        if cut_seed is None:
            stream += tokenizer.encode(file.text).ids
        else:
            stream += encode_with_cuts(tokenizer, file.text, rng)
    stream.append(end)
    return np.asarray(stream, dtype=np.uint16)


@dataclass(frozen=True)
class Corpus:
    """Token streams, uint16 [n]; `held_out_bytes` counts the UTF-8 bytes behind `held_out`."""

    tokenizer: Tokenizer
    train: np.ndarray  # with cuts: what the models see; the library first, then the tests
    tests_from: int  # index in `train` of the first token of a test file
    plain: np.ndarray  # the same files without cuts: what the n-gram tables count
    held_out: np.ndarray
    held_out_bytes: int
    train_bytes: int
    num_files: int


def prepare(work: Path) -> Corpus:
    """Tokenizer and streams, made once and kept in `work`."""
    work.mkdir(parents=True, exist_ok=True)
    files = read_corpus()
    train = [file for file in files if not file.held_out]
    held_out = [file for file in files if file.held_out]
    tokenizer_path, streams_path = work / "tokenizer.json", work / "streams.npz"
    if not tokenizer_path.exists():
        write_atomically(tokenizer_path, train_tokenizer(files).to_str(pretty=False).encode())
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    if not streams_path.exists():
        library, tests = ([file for file in train if file.is_test == kind] for kind in (False, True))
        parts = [token_stream(tokenizer, part, cut_seed=1) for part in (library, tests)]
        temporary = work / "streams.tmp.npz"
        np.savez(
            temporary,
            train=np.concatenate(parts),
            tests_from=len(parts[0]),
            plain=token_stream(tokenizer, train, cut_seed=None),
            held_out=token_stream(tokenizer, held_out, cut_seed=None),
        )
        os.replace(temporary, streams_path)
    streams = np.load(streams_path)
    return Corpus(
        tokenizer, streams["train"], int(streams["tests_from"]), streams["plain"], streams["held_out"],
        _num_bytes(held_out), _num_bytes(train), len(files),
    )  # fmt: skip


def _num_bytes(files: list[SourceFile]) -> int:
    return sum(len(file.text.encode()) for file in files)


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
