"""What the front end keeps of a running sequence: its tokens, when it ends, and the hashes of its blocks."""

import secrets
from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Protocol

from paceline.core.batch import Batch, StepResult
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceOutput, SliceWork
from paceline.runtime.api import Sink

SECRET = secrets.token_bytes(32)  # nobody outside can make two prefixes collide


class BlockHasher:
    """Chained keyed hashes of full blocks of token ids (64 bits), separate for every namespace."""

    def __init__(self, namespace: str, block_size: int) -> None:
        self._block_size = block_size
        self._last = blake2b(namespace.encode(), key=SECRET, digest_size=8).digest()
        self._done = 0  # tokens hashed

    def extend(self, tokens: Seq[int]) -> tuple[int, ...]:
        """Hashes of the blocks that `tokens` (the whole sequence so far) has filled since the last call."""
        hashes = []
        while self._done + self._block_size <= len(tokens):
            block = array("q", tokens[self._done : self._done + self._block_size])
            self._last = blake2b(self._last + block.tobytes(), key=SECRET, digest_size=8).digest()
            self._done += self._block_size
            hashes.append(int.from_bytes(self._last, "little", signed=True))
        return tuple(hashes)


class Worker(Protocol):
    """Who computes a sequence."""

    def drop(self, handle: int) -> None:
        """Forgets a sequence with its next step."""
        ...


class RunningSequence:
    """Token ids and parameters of one sequence, and what its worker knows of it."""

    def __init__(
        self,
        id: str,
        handle: int,
        tokens: Seq[int],
        params: SamplingParams,
        sink: Sink,
        eos_ids: Seq[int],
        hasher: BlockHasher,
        arrival: float = 0.0,
    ) -> None:
        self.id = id
        self.handle = handle  # the worker's name for it
        self.tokens = list(tokens)
        self.num_prompt = len(tokens)
        self.params = params
        self.sink = sink
        self.arrival = arrival
        self.stops = params.stops(eos_ids)
        self.cacheable = params.prompt_logprobs is None  # every prompt position must be computed for its logits
        self.hasher = hasher
        self.prefix = hasher.extend(self.tokens) if self.cacheable else ()
        self.worker: Worker | None = None  # that knows it
        self.epoch = 0  # preemptions that the worker's block table has seen
        self.blocks_sent = self.tokens_sent = 0
        self._prompt_logprobs = 0  # positions delivered; a recomputation yields them again
        self.crashes, self.fatal = 0, 0  # workers that died while they ran it; tokens it has to get past after that

    def introduce(self, worker: Worker) -> NewSequence:
        self.worker, self.tokens_sent, self.blocks_sent = worker, len(self.tokens), 0
        return NewSequence(self.handle, list(self.tokens), self.num_prompt, self.params)

    def work(self, batch: Batch, index: int, tokens: bool = False) -> SliceWork:
        """A slice as its engine needs it: with the blocks that are new there, and with the `tokens` where it has
        workers that do not sample. To be sent, in order, once."""
        sequence = batch.sequences[index]
        if self.epoch != sequence.preemptions:  # it holds other blocks now
            self.epoch = sequence.preemptions
            self.blocks_sent = 0
        first, self.blocks_sent = self.blocks_sent, sequence.num_blocks
        emits, num_draft = batch.emits[index] == 1, batch.drafts[index] if batch.drafts else 0
        start, length = batch.starts[index], batch.lengths[index]
        fresh: list[int] = []
        if tokens:
            fresh, self.tokens_sent = self.tokens[self.tokens_sent :], len(self.tokens)
        return SliceWork(self.handle, start, length, emits, first, sequence.blocks(first), num_draft, fresh)

    def lose_worker(self) -> None:
        """Nobody knows it any more."""
        self.worker, self.blocks_sent = None, 0

    def leave_worker(self) -> None:
        """It is done."""
        if self.worker:
            self.worker.drop(self.handle)
            self.worker = None

    def take(self, output: SliceOutput) -> str | None:
        """Appends emitted tokens; answers why the sequence ends here, if it does: "stop" or "length"."""
        self.tokens += output.tokens
        generated = len(self.tokens) - self.num_prompt
        # an engine lets a complete answer of a grammar end before `min_tokens`
        may_end = generated > self.params.min_tokens or self.params.grammar
        if output.tokens and output.tokens[-1] in self.stops and may_end:
            return "stop"
        return "length" if generated >= self.params.max_tokens else None

    def fresh_prompt_logprobs(self, output: SliceOutput, start: int) -> SliceOutput:
        """The output without prompt log-probabilities that were delivered before; the slice began at `start`."""
        fresh = output.prompt_logprobs[max(0, self._prompt_logprobs - start) :]
        self._prompt_logprobs = max(self._prompt_logprobs, start + len(output.prompt_logprobs))
        return output._replace(prompt_logprobs=fresh)

    def report(self, result: StepResult, index: int, output: SliceOutput, finish: str | None) -> None:
        """Enters an output as the controller sees it."""
        if output.error:
            result.failed.append(index)
            return
        result.tokens[index] = len(output.tokens)
        if output.num_draft:
            result.drafted = result.drafted or bytearray(len(result.tokens))
            result.drafted[index] = output.num_draft
        if finish:
            result.finished.append((index, finish))
        elif self.cacheable and output.tokens and (hashes := self.hasher.extend(self.tokens)):
            result.hashes.append((index, hashes))
