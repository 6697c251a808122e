"""The queues of one group, and the moves that every batching policy is made of.

Memory rules M1-M5 (where the published schedulers err under memory pressure, see `docs/batching.md`):

* M1 admission reserves the blocks of the whole prompt and leaves the watermark free;
* M2 a decode needs a new block only if its KV does not fit in the blocks held;
* M3 if that block is not free, the latest arrival behind it in the queue is preempted, else the sequence itself;
* M4 a preempted sequence goes back to its place in the waiting queue and later recomputes prompt and output;
* M5 nothing is admitted in a step that preempted.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter

import numpy as np

from paceline.batching import table as compiled
from paceline.batching.blocks import Blocks
from paceline.batching.budget import Pace
from paceline.batching.table import DRAFT, LENGTH, SLOT, START, Ints, Table
from paceline.core.batch import Batch, StepResult, StepShape
from paceline.core.protocols import Budget, Lookahead
from paceline.core.request import (
    COMPUTED,
    HASHED,
    IN_FLIGHT,
    KNOWN,
    MAX_DRAFT_TOKENS,
    PROMPT,
    ROOM,
    SCHEDULED,
    Request,
    Sequence,
)

BY_ARRIVAL = attrgetter("order")
BY_PLACE = attrgetter("place")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a group. Tokens, sequences and blocks. Raises ValueError for values that make no sense."""

    token_budget: int = 512  # new tokens of a step (Sarathi-Serve's tau); of a chunk (SARATHI's C)
    max_batch: int = 256  # sequences that are running
    block_size: int = 16
    num_blocks: int = 4096
    watermark: float = 0.0  # share of the blocks that admission leaves free
    max_model_len: int | None = None  # tokens that `orca` and `request_level` reserve; None: what a request may need
    max_num_batched_tokens: int = 8192  # prompt tokens of a step of `prefill_first`

    def __post_init__(self) -> None:
        least = {"token_budget": 1, "max_batch": 1, "block_size": 1, "num_blocks": 0, "max_num_batched_tokens": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least {bound}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len: {self.max_model_len} is not at least 1")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: {self.watermark} is not a share in [0, 1)")

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)


@dataclass(frozen=True, slots=True)
class Policy:
    """How the steps of a group are composed."""

    compose: Callable[["Scheduler"], None]  # one step, by the scheduler's moves
    reserves: bool = False  # admission takes the blocks of the longest sequence, and knows no watermark
    late: bool = False  # composes a step when the first stage of the pipeline is free for it, not before
    place: Callable[[Request], tuple[float, ...]] = lambda request: (request.arrival,)  # order among prompts
    # Tokens of a step to plan memory for; Orca and request-level batches know no bound but the cache.
    widest: Callable[[SchedulerConfig], int] = lambda config: max(config.token_budget, config.max_batch)


class Scheduler:
    """Waiting and running sequences, and the blocks that the running ones hold.

    Running ones are in arrival order; waiting ones, and `prompts` (the running ones that have prompt tokens which no
    batch has taken), in the policy's order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        budget: Budget | None = None,
        pipeline: int = 1,
        predict: Callable[[StepShape], float] | None = None,
        lookahead: Lookahead | None = None,
    ) -> None:
        self.config, self.policy, self.budget, self.pipeline = config, policy, budget, pipeline
        self.lookahead = lookahead
        self.pace = Pace(predict) if predict else None
        self.blocks = Blocks(config.num_blocks, config.block_size)
        self.table = Table()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prompts: list[Sequence] = []
        self.flying: dict[int, tuple[Batch, Ints]] = {}  # by the batch's number
        self.entering: int | None = None  # the batch that is in the first of several stages, for policies that are late
        self.preempted: list[Sequence] = []  # in the step being composed
        self.cached_tokens = 0  # prompt tokens that the prefix cache saved, ever
        self.width = self._num_slices = self._num_decodes = 0  # of the step being composed
        self._draft_seconds = 0.0  # that drafting should take in it
        self._num_ended = 0  # sequences that ended and are part of a batch
        self._serial = 0

    def blocks_needed(self, tokens: int, max_tokens: int) -> int:
        """The most blocks that a request may come to hold; its last token's KV is never stored."""
        return self.blocks.blocks_for(tokens + max_tokens - 1)

    def fits(self, tokens: int, max_tokens: int) -> bool:
        """Whether the request can run when it is alone."""
        if self.policy.reserves:
            return self._reserved(tokens, max_tokens) <= self.config.num_blocks
        return self.blocks_needed(tokens, max_tokens) <= self.config.num_blocks - self.config.watermark_blocks

    @property
    def full(self) -> bool:
        """Whether the pipeline takes no batch now."""
        return len(self.flying) >= self.pipeline or self.entering is not None

    def advance(self, id: int) -> None:
        """The batch has left the first stage."""
        if self.entering == id:
            self.entering = None

    def compose(self, id: int, group: int) -> Batch | None:
        """The next step, which is in flight from now on; None: there is nothing to do, or it has to wait.

        `preempted` says who lost its blocks for it.
        """
        preempted: list[Sequence] = []
        while True:
            self.preempted = []
            self.width = self._num_slices = self._num_decodes = 0
            self._draft_seconds = 0.0
            self.policy.compose(self)
            preempted += self.preempted
            if self._num_slices or not self.preempted:
                break  # else what was preempted may come in again, in a step of its own (M5)
        self.preempted = preempted
        count, table = self._num_slices, self.table
        if not count:
            return None
        shape = StepShape(*compiled.depart(table.numbers, table.step, count, table.emits))
        step = table.step[:, :count].copy()
        slots, drafts = step[SLOT], step[DRAFT].tolist() if step[DRAFT].any() else None
        batch = Batch(
            id,
            group,
            table.ids[slots].tolist(),
            table.sequences[slots].tolist(),
            step[START].tolist(),
            step[LENGTH].tolist(),
            table.emits[:count].tobytes(),
            self._num_decodes,
            shape,
            self._predicted(shape, drafts is not None),
            tuple(preempted),
            drafts,
        )
        self.flying[id] = batch, step
        if self.policy.late:
            self.entering = id
        return batch

    def _predicted(self, shape: StepShape, drafts: bool) -> float | None:
        """Seconds of the step, if all is drafted that may be."""
        if self.pace is None or (drafts and self.lookahead is None):
            return None
        if drafts and self.lookahead:
            return self.lookahead.verification(self.pace.predict(shape)) + self._draft_seconds
        return self.pace.seconds(shape)

    # The moves

    def decode(self, most: int | None = None, longest: bool = False) -> None:
        """Takes every decode that is ready (M2, M3), or `most`: the first to arrive, or those with most to come.

        With each go tokens to be drafted, as many as its request, the free blocks and `lookahead` allow.
        """
        assert not self._num_slices, "decodes come first"
        table, budget = self.table, self.config.token_budget
        order = table.longest_first() if longest else table.running[: table.count]
        limit = table.count if most is None else most
        drafts, deep = table.drafts, MAX_DRAFT_TOKENS
        if self.lookahead is None:  # drafts leave prompts their half of the budget
            spare = budget // (2 if self.prompts or self.waiting else 1)
            deep = spare // max(1, min(limit, table.count)) - 1
        elif table.drafts.any():
            pending = self._pending(budget)
            drafts, self._draft_seconds = self.lookahead.choose(table.numbers, drafts, order, pending, budget)

        for grown in (self.config.block_size, 0):  # where blocks are short, drafts give way first
            taken, short, needed, width = compiled.ready_decodes(
                table.numbers, drafts, order, table.count, limit, deep, grown, table.step, table.listed
            )
            if needed <= self.blocks.num_free:
                break
        else:
            chosen = table.sequences[table.step[SLOT, :taken]].tolist()
            self.decode_each(sorted(chosen, key=BY_ARRIVAL))
            return
        for index in table.listed[:short].tolist():
            sequence = table.sequences[table.step[SLOT, index]]
            end = sequence.computed + int(table.step[LENGTH, index])
            self._hold(sequence, self.blocks.blocks_for(end) - len(sequence.blocks))
        self.width, self._num_slices, self._num_decodes = width, taken, taken

    def decode_each(self, sequences: Iterable[Sequence]) -> None:
        """Takes these decodes, in arrival order, one by one: some may be preempted for others before them (M2, M3)."""
        for sequence in sequences:
            if sequence.blocks and self._make_room(sequence):
                self._add(sequence, 1)
                self._num_decodes += 1

    def room(self) -> int:
        """Tokens that the step may still take: the fixed budget, or what `budget` makes of the decodes taken."""
        width = self.config.token_budget
        if self.budget is not None and (self.prompts or self.waiting):
            table = self.table
            _, starts, lengths, _ = table.step[:, : self._num_slices]
            shape = StepShape(self.width, self.width, self.width, int(starts @ lengths))
            tbt = compiled.tightest_tbt(table.numbers, table.tbt, table.running, table.count)
            prompts = list(self._candidates(width - self.width))
            goal, pace = None if tbt == compiled.NONE else tbt, self.pace.factor if self.pace else 1.0
            width = min(self.budget(shape, prompts, goal, pace, self._draft_seconds), width)
        return width - self.width

    def chunk(self, sequence: Sequence, most: int | None = None) -> int:
        """Takes the next part of a running prompt, at most `most` tokens (None: all); returns how many."""
        left = sequence.prompt - sequence.scheduled
        length = left if most is None else min(left, most)
        self._add(sequence, length)
        if length == left:
            self.prompts.remove(sequence)
        return length

    @property
    def num_drafted(self) -> int:
        """Tokens of the step's decodes that are to be drafted."""
        return int(self.table.step[DRAFT, : self._num_decodes].sum())

    @property
    def num_decoding(self) -> int:
        """Running sequences whose prompt is computed, in flight or not."""
        return int(compiled.num_decoding(self.table.numbers, self.table.running, self.table.count))

    def idle_prompts(self) -> list[Sequence]:
        """Running prompts with tokens left, in order, without those that are part of a batch."""
        return [sequence for sequence in self.prompts if not sequence.in_flight]

    def next_prompt(self) -> Sequence | None:
        """The first of all prompts, running (part of a batch or not) or waiting, if it may come in."""
        running = self.prompts[0] if self.prompts else None
        if self.waiting and (running is None or self.waiting[0].place < running.place):
            return self.admit() or running
        return running

    def admit(self) -> Sequence | None:
        """Moves the first waiting sequence to the running ones, if it may (M1, M5)."""
        if not self.waiting or self.preempted or len(self.running) >= self.config.max_batch:
            return None
        sequence = self.waiting[0]
        # the last token is always computed, so that there are logits to sample from
        hits = self.blocks.lookup(sequence.hashes, (sequence.known - 1) // self.config.block_size)
        if self.policy.reserves:
            request, kept_free = sequence.request, 0
            new = self._reserved(request.prompt_tokens, request.max_tokens) - len(hits)
        else:
            kept_free = self.config.watermark_blocks
            new = self.blocks.blocks_for(sequence.known) - len(hits)
        if self.blocks.num_free - new - self.blocks.num_idle(hits) < kept_free:
            return None
        self.waiting.popleft()
        self.blocks.share(hits)
        sequence.blocks = hits + self.blocks.allocate(new)
        row, cached = sequence.row, len(hits) * self.config.block_size
        row[COMPUTED] = row[SCHEDULED] = cached
        row[ROOM] = len(sequence.blocks) * self.config.block_size
        self.cached_tokens += cached
        index = bisect_left(self.running, sequence.order, key=BY_ARRIVAL)
        self.running.insert(index, sequence)
        self.table.insert_running(index, sequence)
        insort(self.prompts, sequence, key=BY_PLACE)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Takes all blocks from a running sequence and queues it again (M4)."""
        self._stop_running(sequence)
        sequence.row[PROMPT] = sequence.row[KNOWN]
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=BY_PLACE)
        self.preempted.append(sequence)

    # The life of a sequence

    def add(self, request: Request) -> Sequence:
        sequence = self.table.add(request, self._serial)
        if self.lookahead:
            self.lookahead.forget(sequence.slot)
        sequence.place = (*self.policy.place(request), self._serial)
        self._serial += 1
        insort(self.waiting, sequence, key=BY_PLACE)
        return sequence

    def complete(self, id: int, result: StepResult) -> tuple[Batch, list[int], bytes, int] | None:
        """A batch is done: its KV is computed, tokens were emitted, full blocks can be shared.

        Returns the batch, the slices that do not count (their sequences failed or had ended), the tokens of each of the
        others, and their sum. None: a reset has overtaken the batch, and nothing changes.
        """
        if id not in self.flying:
            return None
        batch, step = self.flying.pop(id)
        self.advance(id)
        if self.pace and result.seconds and not batch.drafts:
            self.pace.observe(batch.shape, result.seconds - result.draft_seconds)
        tokens, gone = result.tokens, list[int]()
        if result.failed or self._num_ended:
            tokens = tokens.copy()
            ended = (index for index, sequence in enumerate(batch.sequences) if sequence.ended)
            gone = sorted({*result.failed, *ended})
            for index in gone:
                step[SLOT, index] = -1
                tokens[index] = 0
                batch.sequences[index].row[IN_FLIGHT] -= 1
        for index, hashes in result.hashes:
            sequence = batch.sequences[index]
            sequence.hashes.extend(hashes)
            sequence.row[HASHED] = len(sequence.hashes)
        table, size = self.table, self.config.block_size
        column = np.frombuffer(tokens, np.uint8)
        if self.lookahead and table.drafts.any():
            drafted = np.frombuffer(result.drafted or bytes(len(tokens)), np.uint8)
            self.lookahead.observe(step[SLOT], drafted, column)
            if result.seconds and batch.num_decodes == len(tokens) and not gone:
                read = batch.shape.decode_context  # as if all that was asked for had been drafted
                self.lookahead.observe_times(drafted, read, result.seconds, result.draft_seconds)
        total, filled = compiled.arrive(table.numbers, step, column, size, table.listed)
        for index in table.listed[:filled].tolist():
            sequence, start = batch.sequences[index], batch.starts[index]
            full = min(sequence.computed // size, len(sequence.hashes))
            for block in range(start // size, full):
                self.blocks.register(sequence.blocks[block], sequence.hashes[block])
        return batch, gone, bytes(tokens), total

    def end(self, sequence: Sequence) -> bool:
        """The sequence is done, failed or not wanted: dropped now (True), or when the last batch with it completes."""
        flying = sequence.in_flight > 0
        self._num_ended += flying - sequence.ended
        sequence.ended = flying
        if flying:
            self._take_no_more(sequence)
            return False
        if sequence.blocks:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)
        self.table.drop(sequence)
        return True

    def reset(self) -> list[Sequence]:
        """The KV cache is lost: everything starts over, and no cached prefix is left. Returns those that had ended."""
        self.flying.clear()
        self.entering = None
        self.preempted = []
        ended = [sequence for sequence in self.running if sequence.ended]
        for sequence in self.running:
            sequence.row[IN_FLIGHT] = 0
        for sequence in ended:
            self.end(sequence)
        for sequence in list(self.running):
            self.preempt(sequence)
        self.blocks.forget()
        return ended

    def check(self) -> None:
        """Asserts the invariants: no block leaked, queues in order, nobody in both, the table as the handles say."""
        self.blocks.check([s.blocks for s in self.running])
        assert all(not s.blocks for s in self.waiting)
        assert self.running == sorted(self.running, key=BY_ARRIVAL)
        for queue in (list(self.waiting), self.prompts):
            assert queue == sorted(queue, key=BY_PLACE)
        assert self.prompts == sorted((s for s in self.running if s.scheduled < s.prompt), key=BY_PLACE)
        assert [s.slot for s in self.running] == self.table.running[: self.table.count].tolist()
        assert all(s.row[ROOM] == len(s.blocks) * self.config.block_size for s in self.running)

    def _add(self, sequence: Sequence, length: int) -> None:
        index, step = self._num_slices, self.table.step
        step[:, index] = sequence.slot, sequence.scheduled, length, 0
        self._num_slices += 1
        self.width += length

    def _make_room(self, sequence: Sequence) -> bool:
        """For one more token (M2, M3). False: the sequence was preempted itself."""
        while sequence.computed == sequence.row[ROOM]:
            if self.blocks.num_free:
                self._hold(sequence, 1)
                break
            victim = next(s for s in reversed(self.running) if s is sequence or not s.in_flight)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _hold(self, sequence: Sequence, more: int) -> None:
        """Gives a running sequence blocks."""
        sequence.blocks.extend(self.blocks.allocate(more))
        sequence.row[ROOM] += more * self.config.block_size

    def _reserved(self, tokens: int, max_tokens: int) -> int:
        """Blocks of the longest sequence that the group serves, or that the request may become."""
        return max((self.config.max_model_len or 0) // self.config.block_size, self.blocks_needed(tokens, max_tokens))

    def _candidates(self, most: int) -> Iterator[tuple[int, int]]:
        """(context, remaining) of the prompts that could be chunked next, as many as could take `most` tokens."""
        for sequence in merge(self.prompts, self.waiting, key=BY_PLACE):
            if most <= 0:
                break
            left = sequence.prompt - sequence.scheduled
            most -= left
            yield sequence.scheduled, left

    def _pending(self, most: int) -> int:
        """Prompt tokens that the step could take, up to `most`: of waiting prompts only if the first may come in."""
        comes = self.waiting and len(self.running) < self.config.max_batch
        if comes and self.blocks.blocks_for(self.waiting[0].known) <= self.blocks.num_free:
            return min(most, sum(left for _, left in self._candidates(most)))
        return min(most, sum(sequence.prompt - sequence.scheduled for sequence in self.prompts))

    def _stop_running(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, sequence.order, key=BY_ARRIVAL)
        del self.running[index]
        self.table.remove_running(index)
        self._take_no_more(sequence)
        row = sequence.row
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        row[COMPUTED] = row[SCHEDULED] = row[ROOM] = 0

    def _take_no_more(self, sequence: Sequence) -> None:
        """Of its prompt."""
        if sequence.scheduled < sequence.prompt:
            self.prompts.remove(sequence)
            sequence.row[PROMPT] = sequence.row[SCHEDULED]
