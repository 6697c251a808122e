"""What a worker loads, and the memory that is planned for it before the weights are read."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from paceline.core.drafter_name import DrafterName
from paceline.core.work import WATERMARK, EngineInfo
from paceline.engine import attention, experts, gpu
from paceline.engine.config import ModelConfig, ModelError, dtype_bytes
from paceline.engine.drafters import most_kept
from paceline.engine.kv_cache import MemoryPlan, can_lend, held_bytes, kv_dtype, pool_blocks
from paceline.engine.linear import best_kind, kernels
from paceline.engine.model import Decoder, Progress, load_decoder
from paceline.engine.parallel import Part, Peers, Place, part_of
from paceline.engine.precision import Precision, precision
from paceline.engine.tokenizer import Tokenizer
from paceline.engine.vocabulary import SharedVocabulary, shared_vocabulary
from paceline.engine.weights import Checkpoint
from paceline.speculation.trigram import Trigrams

# Bytes that steps leave behind: oneDNN's compiled kernels, one per layer shape and row count, and what the allocator
# keeps. Measured 58 and 66 MiB after steps of seven sizes with the shapes of Llama 3.2 1B and Qwen 2.5 0.5B.
KEPT = 64 << 20
LOGIT_ROWS = 64  # logits at a time, and as many in a copy: bounds their memory where all of a prompt's are asked for


@dataclass(frozen=True, slots=True)
class Models:
    """A worker's part of the target, and of what drafts for it: lists begin with the target's."""

    drafts: DrafterName
    precisions: list[Precision]
    configs: list[ModelConfig]
    folders: list[Path]
    checkpoint: Checkpoint  # the target's
    parts: list[Part]
    exit_layers: int  # early exit is behind so many; 0: there is none
    vocabulary: SharedVocabulary | None  # of target and draft model; None where it is the same
    table: Trigrams | None
    judges: bool  # whether drafts may come with a distribution, at any worker

    @property
    def tokenizer(self) -> Path | None:
        file = self.folders[0] / "tokenizer.json"
        return file if file.is_file() else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The front end's, so that drafts end where it ends; without a tokenizer the model's own."""
        config = self.configs[0]
        known = Tokenizer.load(self.folders[0]).eos_ids if self.tokenizer else config.eos_ids
        return tuple(token for token in known if token < config.vocab_size)

    @property
    def token_bytes(self) -> int:
        """Of keys and values of a token."""
        kinds = zip(self.parts, self.precisions, strict=True)
        return max(1, sum(part.config.kv_bytes_per_token(kind.kv) for part, kind in kinds))

    def can_lend(self, block_size: int, device: str) -> bool:
        kinds = zip(self.parts, self.precisions, strict=True)
        return all(can_lend(part.config, block_size, device, kv_dtype(kind)) for part, kind in kinds)

    def weight_bytes(self, device: str) -> int:
        kinds = list(zip(self.parts, self.precisions, strict=True))
        weights = sum(part.weight_bytes(kind.weights) for part, kind in kinds)
        if device == "cpu":
            weights += sum(part.config.table_bytes for part, _ in kinds if len(part.embedding))
        if device != "cpu":  # which holds the rows of the embedding, too, if not as the head's
            for part, kind in kinds:
                shared = part.config.tied and len(part.vocabulary)
                weights += 0 if shared else dtype_bytes(kind.kv) * part.config.hidden * len(part.embedding)
        return weights

    def load(self, device: str, peers: Peers | None, progress: Progress) -> tuple[list[Decoder], str]:
        """Reads the weights. A draft model's that cannot be read are left out; returns why, too. Raises ModelError."""
        checkpoints, fault, read, decoders = [self.checkpoint], "", 0, list[Decoder]()
        try:
            for folder in self.folders[1:]:
                checkpoints.append(self.checkpoint if folder == self.folders[0] else Checkpoint(folder))
        except ModelError as error:
            fault = str(error)
        total = sum(checkpoint.total_bytes for checkpoint in checkpoints)
        for checkpoint, one, part, held in zip(
            checkpoints, self.configs, self.parts, self.precisions, strict=not fault
        ):
            kind = best_kind(device, held.weights)
            some = lambda done, _, before=read: progress(before + done, total)  # noqa: E731
            with_peers = None if decoders else peers
            try:
                decoders.append(
                    load_decoder(checkpoint, one, device=device, kind=kind, progress=some, part=part, peers=with_peers)
                )
            except (ModelError, OSError) as error:
                if not decoders:
                    raise
                fault = str(error)
            read += checkpoint.total_bytes
        return decoders, fault


def models(
    path: Path, quantizations: tuple[str, str | None], device: tuple[str, str, str], context: int | None, drafter: str,
    early_exit_layers: int | None, place: Place,
) -> Models:  # fmt: skip
    """What the worker in this place loads, with the options of `ModelRunner.load`; `quantizations` of the target and of
    a draft model; `device` with its `dtype` and `kv_cache_dtype`. Raises ModelError."""
    name, dtype, kv_cache_dtype = device
    target = precision(name, dtype, quantizations[0], path, kv_cache_dtype)
    drafts = DrafterName.parse(drafter)
    if quantizations[1] and drafts.kind != "model":
        raise ModelError("draft_quantization: is only allowed with a draft model")
    judges = drafts.kind != "ngram"
    paths = [path, Path(drafts.path)] if drafts.kind == "model" else [path]
    configs = [ModelConfig.load(path) for path in paths]
    config = configs[0]
    most = max(config.max_context, config.stretched)
    if context is not None and not 1 <= context <= most:
        raise ModelError(f"{path}: context must be from 1 to {most} tokens, not {context}")
    checkpoint = Checkpoint(path)
    exit_layers = config.exit_layers(early_exit_layers) if drafts.kind == "early_exit" else 0
    if exit_layers and place.parallel.devices > 1:  # nobody has all of the first layers and the head: a draft model
        configs, paths = configs * 2, paths * 2
    vocabulary = shared_vocabulary(*paths, [one.vocab_size for one in configs]) if len(paths) > 1 else None
    table = _trigrams(Path(drafts.path), path, config.vocab_size) if drafts.kind == "trigram" else None
    of_drafts = quantizations[1] or quantizations[0]
    held = [precision(name, dtype, of_drafts, folder, kv_cache_dtype, "draft_quantization") for folder in paths[1:]]
    if place.number:  # worker 0 drafts; the others find the same mistakes as it, so that none waits for the rest
        drafts, configs, paths, table, held = DrafterName("ngram"), configs[:1], paths[:1], None, []
    drafters = [one.first(exit_layers or one.layers) for one in configs[1:]]
    parts, kinds = [part_of(config, place, target.weights), *map(part_of, drafters)], [target, *held]
    return Models(drafts, kinds, configs, paths, checkpoint, parts, exit_layers, vocabulary, table, judges)


def plan(
    models: Models,
    *,
    max_batch_tokens: int,
    max_batch: int,
    device: str,
    memory: int | None,
    num_blocks: int | None,
    most_blocks: int | None,
    block_size: int,
    context: int | None,
    share: float,
    reserve: int,
    lent: int | None,
    peers: Peers | None,
) -> EngineInfo:
    """How the process's memory will be used, with the options of `ModelRunner.load`. To be made when all is loaded but
    the weights, since what the process holds already counts. Raises ModelError where there is too little."""
    config = models.configs[0]
    limited, context = context is not None, context or config.max_context
    baseline = held_bytes(device)
    kinds = zip(models.parts, models.precisions, strict=True)
    activations = max(activation_bytes(one.config, max_batch_tokens, context, device, kind) for one, kind in kinds)
    if models.judges:
        # distributions kept, and what a verdict makes of those of target and draft
        kept = min(most_kept(config.vocab_size), 2 * max_batch_tokens)
        activations += 4 * (kept + 5 * LOGIT_ROWS) * config.vocab_size
    weights, token_bytes = models.weight_bytes(device), models.token_bytes
    if device != "cpu":
        activations += block_size * token_bytes  # the block that is nobody's
    lends = lent is not None and models.can_lend(block_size, device)
    if num_blocks is None:
        sizes = partial(
            _blocks, token_bytes, block_size, memory=memory, device=device, peers=peers,
            useful_tokens=(1 + int(max_batch * -(-context // block_size) / (1 - WATERMARK))) * block_size,
        )  # fmt: skip
        used = baseline + weights + activations + reserve
        num_blocks = sizes(used=used + (lent or 0), share=share)
        most_blocks = sizes(used=used) if lent is not None else None
    most_blocks = max(num_blocks, most_blocks or 0) if lends else None
    if limited and num_blocks * block_size < context:
        room = num_blocks * block_size
        raise ModelError(
            f"context: the KV cache holds {room} tokens, less than one sequence of {context}; give it more memory, or "
            f"a context of up to {room}"
        )
    block_bytes = block_size * token_bytes
    whole = MemoryPlan(baseline, weights, num_blocks * block_bytes, activations)
    return EngineInfo(
        num_blocks, block_size, weights, whole.kv, whole.total, min(context, num_blocks * block_size),
        config.vocab_size, most_blocks, (block_bytes,) if lends else (),
    )  # fmt: skip


def _blocks(
    token_bytes: int, block_size: int, *, used: int, share: float = 1.0, memory: int | None, useful_tokens: int,
    device: str, peers: Peers | None,
) -> int:  # fmt: skip
    """`pool_blocks`, of the worker of a group that has room for the fewest. Raises ModelError at all of them."""
    fault, blocks = None, 0
    try:
        blocks = pool_blocks(
            token_bytes, block_size, used=used, memory=memory, useful_tokens=useful_tokens, share=share, device=device,
        )  # fmt: skip
    except ModelError as error:
        fault = error
    if peers:
        blocks = peers.least(blocks)
    if blocks < 1:
        raise fault or ModelError("not enough memory at another worker of the group")
    return blocks


def _trigrams(text: Path, path: Path, vocabulary: int) -> Trigrams:
    """Of a text file, in the tokens of the model in `path`. Raises ModelError."""
    try:
        tokens = Tokenizer.load(path).encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
        return Trigrams(np.array([token for token in tokens if token < vocabulary], np.int64), vocabulary)
    except (OSError, ValueError) as error:
        raise ModelError(f"drafter: trigram:{text}: {error}") from error


def activation_bytes(
    config: ModelConfig, max_batch_tokens: int, context: int, device: str, held: Precision
) -> int:
    """The most that one step holds beside weights and KV.

    The widest layer's rows (of our own kernels, which run a whole layer, all its parts and their work space; of torch's
    operators states, norm, projections and heads or both halves of the MLP), logits of LOGIT_ROWS rows with a copy for
    the sampler (or as many more), and what attention needs. A GPU rotates heads in float32, and sorts for the sampler
    in float64.
    """
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if device != "cpu":
        element, rotated = dtype_bytes(held.kv), 2 * 4 * (queries + keys)  # a GPU computes in what it keeps
        row = element * 3 * config.hidden
        row += max(element * (3 * queries + 4 * keys) + rotated, element * 3 * config.intermediate)
        row = max(row, 4 * experts.row_floats(config) if config.sparse else 0)
        reads = gpu.reads(device, kv_dtype(held), config.head_dim)
        working = 0 if reads else gpu.working_bytes(config, max_batch_tokens, context)
        return row * max_batch_tokens + 14 * 4 * LOGIT_ROWS * config.vocab_size + working + KEPT
    if "tiled" in best_kind("cpu"):
        row = 2 * config.hidden + 2 * queries + 2 * keys + kernels.LINE // 4
        widest = max(config.hidden, config.intermediate, config.expert_intermediate, queries)
        threads = kernels.num_threads()
        space = kernels.rows_inside(max_batch_tokens, threads) * (4 * config.intermediate + kernels.LINE)
        space += kernels.spaces(max_batch_tokens, widest, threads, kernels.apart(max_batch_tokens, threads))[0]
    else:
        row, space = 3 * config.hidden + max(3 * queries + 2 * keys, 3 * config.intermediate), 0
    row = max(row, experts.row_floats(config) if config.sparse else 0)
    logits = 2 * LOGIT_ROWS * config.vocab_size
    working = attention.working_bytes(config, max_batch_tokens, context)
    return 4 * (row * max_batch_tokens + logits) + space + working + KEPT
