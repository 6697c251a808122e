"""The queues of one group, and the moves that every batching policy is made of.

Memory rules M1-M5 (where the published schedulers err under memory pressure, see `docs/batching.md`):

* M1 admission reserves the blocks of the whole prompt and leaves the watermark free;
* M2 a decode needs a new block only if its KV does not fit in the blocks held;
* M3 if that block is not free, the latest arrival behind it in the queue is preempted, else the sequence itself;
* M4 a preempted sequence goes back to its place in the waiting queue and later recomputes prompt and output;
* M5 nothing is admitted in a step that preempted.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from paceline.batching.blocks import Blocks
from paceline.core.batch import Slice
from paceline.core.request import Sequence

BY_ARRIVAL = attrgetter("order")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a group. Tokens, sequences and blocks."""

    token_budget: int = 512  # new tokens of a step (Sarathi-Serve's tau)
    max_batch: int = 256  # sequences that are running
    block_size: int = 16
    num_blocks: int = 4096
    watermark: float = 0.0  # share of the blocks that admission leaves free

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)


Policy = Callable[["Scheduler"], list[Slice]]  # composes one step's slices with the scheduler's moves


class Scheduler:
    """Waiting and running sequences, both in arrival order, and the blocks that the running ones hold."""

    def __init__(self, config: SchedulerConfig, policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self.blocks = Blocks(config.num_blocks, config.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []  # in the step being composed
        self.cached_tokens = 0  # prompt tokens that the prefix cache saved, ever

    def blocks_needed(self, tokens: int, max_tokens: int) -> int:
        """The most blocks that a request may come to hold; its last token's KV is never stored."""
        return self.blocks.blocks_for(tokens + max_tokens - 1)

    def fits(self, tokens: int, max_tokens: int) -> bool:
        """Whether the request can run when it is alone."""
        return self.blocks_needed(tokens, max_tokens) <= self.config.num_blocks - self.config.watermark_blocks

    def compose(self) -> tuple[Slice, ...]:
        """One step's slices by the group's policy; `preempted` says who lost its blocks for it."""
        self.preempted = []
        return tuple(self.policy(self))

    # The moves

    def decode(self, sequence: Sequence) -> bool:
        """Makes room for one more token (M2, M3). False: the sequence was preempted itself."""
        while sequence.computed == len(sequence.blocks) * self.config.block_size:
            if self.blocks.num_free:
                sequence.blocks.extend(self.blocks.allocate(1))
                break
            victim = next(s for s in reversed(self.running) if s is sequence or not s.in_flight)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def admit(self) -> Sequence | None:
        """Moves the first waiting sequence to the running ones, if it may (M1, M5)."""
        if not self.waiting or self.preempted or len(self.running) >= self.config.max_batch:
            return None
        sequence = self.waiting[0]
        # the last token is always computed, so that there are logits to sample from
        hits = self.blocks.lookup(sequence.hashes, (sequence.known - 1) // self.config.block_size)
        new = self.blocks.blocks_for(sequence.known) - len(hits)
        if self.blocks.num_free - new - self.blocks.num_idle(hits) < self.config.watermark_blocks:
            return None
        self.waiting.popleft()
        self.blocks.share(hits)
        sequence.blocks = hits + self.blocks.allocate(new)
        sequence.computed = len(hits) * self.config.block_size
        sequence.prompt = sequence.known
        self.cached_tokens += sequence.computed
        insort(self.running, sequence, key=BY_ARRIVAL)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Takes all blocks from a running sequence and queues it again (M4)."""
        self.running.remove(sequence)
        self._give_up(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=BY_ARRIVAL)
        self.preempted.append(sequence)

    # The life of a sequence

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=BY_ARRIVAL)

    def advance(self, sequence: Sequence, end: int, tokens: int, hashes: tuple[int, ...]) -> None:
        """The KV up to `end` is computed and `tokens` were emitted; full blocks can now be shared."""
        size = self.config.block_size
        before, sequence.computed = sequence.computed // size, end
        for index in range(before, min(end // size, len(sequence.hashes))):
            self.blocks.register(sequence.blocks[index], sequence.hashes[index])
        sequence.known += tokens
        sequence.hashes.extend(hashes)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is done or not wanted any more."""
        if sequence.blocks:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._give_up(sequence)

    def reset(self) -> None:
        """The KV cache is lost: everything starts over, and no cached prefix is left."""
        self.preempted = []
        for sequence in list(self.running):
            sequence.in_flight = False
            self.preempt(sequence)
        self.blocks.forget()

    def check(self) -> None:
        """Asserts the invariants: no block leaked, queues in arrival order, nobody in both."""
        self.blocks.check([s.blocks for s in self.running])
        assert all(not s.blocks for s in self.waiting)
        for queue in (list(self.waiting), self.running):
            assert queue == sorted(queue, key=BY_ARRIVAL)

    def _give_up(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

