"""A group's scheduler as the controller and the engine's driver see it: requests in, batches out.

What decides is compiled, `policies.compose` and its `moves`, over the arrays of a `state.State`. Here are the names of
requests, the handles of sequences, the batches in flight, and what is learnt from steps.
"""

from collections.abc import Callable, Iterable

import numpy as np

from paceline.batching import blocks, held_back, moves, policies
from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.batching.pace import forgotten, learn_beside, learned, pace_of
from paceline.batching.policies import Policy
from paceline.batching.prediction import (
    NOBODY,
    Way,
    expected_in_the_way,
    next_turn,
    seconds_between_tokens,
    seconds_to_first_token,
    with_another,
)
from paceline.batching.sharing import time_of_next_due
from paceline.batching.state import (
    ADAPTIVE,
    AHEAD,
    ARRIVAL,
    BEGIN,
    BESIDE,
    BLOCK_SIZE,
    BY_GOAL,
    CACHED_TOKENS,
    DECODES,
    DRAFT,
    DRAFTING,
    ENTERING,
    ERROR,
    FREE_SLOTS,
    GOAL,
    HEAD,
    KNEE,
    LANDED,
    LATE,
    LENGTH,
    LOST,
    MARGIN,
    MAX_BATCH,
    MAX_MODEL_LEN,
    MAX_PROMPT_TOKENS,
    MAXIMUM,
    NEXT_BATCH,
    NONE,
    NUM_BLOCKS,
    NUM_FACTORS,
    NUM_LIMITS,
    OWN_BLOCKS,
    PACE,
    PIPELINE,
    POLICY,
    PROMPTS,
    RESERVES,
    RESTING,
    RUNNING,
    SLOT,
    SPENT,
    START,
    STATE,
    TAIL,
    TILE,
    TOKEN_BUDGET,
    TOOK,
    WANTED,
    WATERMARK,
    WIDE,
    State,
    grown,
    make,
)
from paceline.compiled import BOOL, BYTES, F64, I64, INTS, VOID, Handle, entry, plain
from paceline.core.batch import Batch, StepResult, StepShape
from paceline.core.protocols import Lookahead
from paceline.core.request import ENDED, HASHED, IN_FLIGHT, KNOWN, PREEMPTIONS, PROMPT, SERIAL, Request, Sequence

Predict = Callable[[StepShape], float]


_compose = entry(I64, STATE)(policies.compose)
_land = entry(I64, STATE, I64, BYTES)(policies.land)
_say_why = entry(VOID, STATE)(held_back.say_why)
_fits = entry(BOOL, STATE, I64, I64)(moves.fits)
_add = entry(I64, STATE, I64, I64, F64, F64, F64, I64)(moves.add)
_take_no_more = entry(VOID, STATE, I64)(moves.take_no_more)
_end = entry(VOID, STATE, I64)(moves.end)
_num_cached = entry(I64, STATE, INTS)(blocks.num_cached)
_pending = entry(I64, STATE, I64, BOOL)(moves.pending)
_width_without_drafts = entry(I64, STATE, I64)(moves.width_without_drafts)
_goal_of_step = entry(F64, STATE)(moves.goal_of_step)
_reset = entry(VOID, STATE)(moves.reset)

# likewise, interpreted
_leave_first_stage, _wanted = plain(policies.leave_first_stage), plain(policies.wanted)
_num_free, _with_another = plain(blocks.num_free), plain(with_another)
_pace_of, _learn_beside = plain(pace_of), plain(learn_beside)


def make_state(
    config: SchedulerConfig, policy: Policy, pipeline: int, budget: GoalBudget | None, adaptive: bool, slots: int = 256,
    table: int = 1, ahead: int = 0,
) -> State:  # fmt: skip
    """An empty group's, with room for so many sequences, and blocks of one."""
    limits, factors = np.zeros(NUM_LIMITS, np.int64), np.zeros(NUM_FACTORS)
    limits[TOKEN_BUDGET], limits[MAX_BATCH] = config.token_budget, config.max_batch
    limits[BLOCK_SIZE], limits[WATERMARK] = config.block_size, config.watermark_blocks
    limits[NUM_BLOCKS] = limits[OWN_BLOCKS] = config.num_blocks
    limits[MAX_MODEL_LEN], limits[MAX_PROMPT_TOKENS] = config.max_model_len or 0, config.max_num_batched_tokens
    limits[POLICY], limits[RESERVES], limits[LATE] = policy.number, policy.reserves, policy.late
    limits[PIPELINE], limits[ADAPTIVE], limits[BY_GOAL], limits[AHEAD] = pipeline, adaptive, policy.by_goal, ahead
    factors[PACE], factors[WIDE], factors[GOAL] = 1.0, 1.0, NONE
    linear, terms = np.zeros(0), np.zeros(6)
    if budget is not None:
        limits[TILE], limits[KNEE], limits[MAXIMUM] = budget.tile, budget.knee, budget.maximum
        factors[GOAL], factors[MARGIN] = NONE if budget.tbt is None else budget.tbt, budget.margin
        factors[ERROR] = budget.margin
        linear, terms = budget.arrays()
    return make(limits, factors, linear, terms, config.most_blocks or config.num_blocks, slots, table)


class Scheduler:
    """Waiting and running sequences, and the blocks that the running ones hold."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        budget: GoalBudget | None = None,
        pipeline: int = 1,
        predict: Predict | None = None,
        lookahead: Lookahead | None = None,
        ahead: int = 0,
    ) -> None:
        self.config, self.policy, self.pipeline, self.ring = config, policy, pipeline, pipeline + ahead
        self.lookahead = lookahead
        self.predict = predict
        self.state = make_state(config, policy, pipeline, budget, lookahead is not None, ahead=ahead)
        self.handle = Handle(STATE, self.state)
        self.flying: dict[int, Batch] = {}  # by the batch's number
        self._begun: dict[int, float] = {}  # likewise: when it was composed
        self._sequences = np.empty(len(self.state.numbers), object)
        self._ids = np.empty(len(self.state.numbers), object)
        self.preempted: list[Sequence] = []  # until somebody takes note
        self._num_ended = 0  # sequences that ended and are part of a batch

    # What it has

    @property
    def waiting(self) -> list[Sequence]:
        """In the policy's order."""
        now = self.state.now
        return self._sequences[self.state.waiting[now[HEAD] : now[TAIL]]].tolist()  # type: ignore[no-any-return]

    @property
    def running(self) -> list[Sequence]:
        """In arrival order."""
        return self._sequences[self.state.running[: self.state.now[RUNNING]]].tolist()  # type: ignore[no-any-return]

    @property
    def prompts(self) -> list[Sequence]:
        """Running ones with prompt tokens which no batch has taken, in the policy's order."""
        return self._sequences[self.state.prompts[: self.state.now[PROMPTS]]].tolist()  # type: ignore[no-any-return]

    @property
    def num_waiting(self) -> int:
        return int(self.state.now[TAIL] - self.state.now[HEAD])

    @property
    def num_sequences(self) -> int:
        """Waiting and running."""
        return self.num_waiting + self.num_running

    @property
    def num_running(self) -> int:
        return int(self.state.now[RUNNING])

    @property
    def num_blocks(self) -> int:
        """Blocks that it may have now: its own, and what others lend it."""
        return int(self.state.limits[NUM_BLOCKS])

    @property
    def num_free_blocks(self) -> int:
        """Of those, blocks that nobody holds; some may hold a prefix worth keeping."""
        return int(_num_free(self.state))

    @property
    def landed(self) -> float:
        """When its last step was complete."""
        return float(self.state.factors[LANDED])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache saved, ever; not those of what is recomputed."""
        return int(self.state.now[CACHED_TOKENS])

    @property
    def entering(self) -> int | None:
        """The batch that is in the first of several stages, for policies that are late."""
        batch = int(self.state.now[ENTERING])
        return None if batch < 0 else batch

    def fits(self, tokens: int, max_tokens: int) -> bool:
        """Whether the request can run when it is alone."""
        return bool(_fits(self.handle, tokens, max_tokens))

    # What it expects

    def first_token(self, request: Request, now: float, ways: Iterable[Way] = ()) -> float:
        """Seconds until a request that comes now would have its first token (`prediction.first_token`), with others
        `in_the_way`."""
        forgotten(self.handle, now)
        place = _wanted(request.arrival, _or_none(request.slo.ttft), self.policy.by_goal)
        all_ways = NOBODY
        for way in ways:
            all_ways = _with_another(all_ways, way)
        size, tokens, cached = self.config.block_size, request.prompt_tokens, 0
        if request.prefix:
            cached = size * _num_cached(self.handle, np.array(request.prefix[: (tokens - 1) // size], np.int64))
        tbt = _or_none(request.slo.tbt)
        return float(seconds_to_first_token(self.handle, tokens, cached, place, tbt, now, *all_ways))

    def between_tokens(self, request: Request) -> float:
        """Seconds between tokens of a request that comes now (`prediction.between_tokens`)."""
        return float(seconds_between_tokens(self.handle, request.prompt_tokens))

    def in_the_way(self, now: float) -> Way:
        """What it is to another group on its device (`prediction.in_the_way`)."""
        return expected_in_the_way(self.handle, now)  # type: ignore[no-any-return]

    def turn(self, now: float) -> tuple[int, float]:
        """Prompt tokens and seconds of the next step; 0 seconds: there is nothing to do, or nobody knows."""
        tokens, seconds = next_turn(self.handle, now)
        return int(tokens), float(seconds)

    def next_due(self, chunk: int, each: float) -> float:
        """When its next step is to be done (`sharing.next_due`)."""
        return float(time_of_next_due(self.handle, chunk, each))

    # Steps

    def advance(self, id: int) -> bool:
        """The batch has left the first stage. Whether that was waited for, as policies do that are late."""
        waited = self.entering == id
        _leave_first_stage(self.state, id)
        return waited

    def compose(self, group: int, now: float) -> Batch | None:
        """The next step, in flight from `now` on. None: there is nothing to do, or it has to wait.

        `preempted` grows by those who lost their blocks for it.
        """
        s, spent, resting = self.state, 0.0, False
        if self.num_sequences:
            forgotten(self.handle, now)
        if self.lookahead and s.now[DRAFTING]:
            if len(self.flying) >= self.ring:
                return None
            budget, order = self.config.token_budget, s.running[: s.now[RUNNING]]
            waits = _pending(self.handle, budget, False)
            if not (resting := self.lookahead.rests(order, waits)):
                if len(self.flying) >= self.pipeline:
                    return None  # whoever may draft has to be known
                goal = _goal_of_step(self.handle) + s.factors[BESIDE]
                budget = _width_without_drafts(self.handle, waits)
                chosen, spent = self.lookahead.choose(s.numbers, s.drafts, order, waits, budget, goal)
                s.chosen[order] = chosen[order]  # of other slots it holds what was chosen for those before
        s.factors[SPENT], s.factors[BEGIN], s.now[RESTING] = spent, now, resting
        count = _compose(self.handle)
        self.note_preempted()
        if not count:
            return None
        if self.lookahead:
            self.lookahead.composed(resting)
        counts = s.now.tolist()
        number = counts[NEXT_BATCH] - 1
        step = s.steps[number % self.ring, :, :count]
        slots, drafts = step[SLOT], None
        if counts[DRAFTING]:
            _say_why(self.handle)
            drafts = step[DRAFT].tolist() if not resting and step[DRAFT].any() else None
        shape, decodes = StepShape(*s.shape.tolist()), counts[DECODES]
        batch = Batch(
            number,
            group,
            self._ids[slots].tolist(),
            self._sequences[slots].tolist(),
            step[START].tolist(),
            step[LENGTH].tolist(),
            s.emits[number % self.ring, :count].tobytes(),
            decodes,
            shape,
            self._predicted(shape, decodes, decodes + sum(drafts or ()), spent if drafts else None),
            float(_pace_of(s, shape.tokens)),
            tuple(self.preempted),
            drafts,
        )
        self.flying[number], self._begun[number] = batch, now
        return batch

    def _predicted(self, shape: StepShape, decodes: int, verified: int, spent: float | None) -> float | None:
        """Seconds of the step, if all is drafted that may be, which takes `spent` and makes the decodes so many tokens;
        None: nothing is drafted."""
        if self.predict is None or (spent is not None and self.lookahead is None):
            return None
        if spent is not None and self.lookahead:
            whole = self.lookahead.verification(self.predict(shape), decodes, verified) + spent
            return max(0.0, whole - float(self.state.factors[BESIDE]))
        return float(_pace_of(self.state, shape.tokens)) * self.predict(shape)

    def complete(
        self, id: int, result: StepResult, now: float = 0.0
    ) -> tuple[Batch, list[int], bytes, int] | None:
        """A batch is done: its KV is computed, tokens were emitted, full blocks can be shared.

        Returns the batch, the slices that do not count (their sequences failed or had ended), the tokens of each of the
        others, and their sum. None: a reset has overtaken the batch, and nothing changes.
        """
        if id not in self.flying:
            return None
        batch, begun = self.flying.pop(id), self._begun.pop(id)
        begun = max(begun, self.state.factors[LANDED])  # one composed ahead
        self.state.factors[LANDED] = now
        step = self.state.steps[id % self.ring, :, : len(batch.requests)]
        slots = step[SLOT]
        if self.predict and result.seconds and not batch.drafts:
            took, predicted = result.seconds - result.draft_seconds, self.predict(batch.shape)
            learned(self.handle, batch.shape.tokens, predicted, took)
        if not self.predict:
            self.state.factors[TOOK] = result.seconds
        beside = 0.0
        if self.predict and result.seconds and self.pipeline == 1:  # else it may have waited for a stage
            beside = _learn_beside(self.state, now - begun - result.seconds)
        tokens, gone = result.tokens, list[int]()
        if result.failed or self._num_ended:
            tokens = tokens.copy()
            ended = (index for index, sequence in enumerate(batch.sequences) if sequence.ended)
            gone = sorted({*result.failed, *ended})
            for index in gone:
                slots[index] = -1
                tokens[index] = 0
                batch.sequences[index].row[IN_FLIGHT] -= 1
        for index, hashes in result.hashes:
            self._know(batch.sequences[index], hashes)
        column = np.frombuffer(tokens, np.uint8)
        if self.lookahead:  # asked or not: a draft model counts these steps, too
            steady = batch.num_decodes == len(tokens) and not gone
            if batch.drafts or not self.lookahead.rested(slots, steady, result.seconds):
                drafted = np.frombuffer(result.drafted or bytes(len(tokens)), np.uint8)
                if result.seconds and steady:
                    read, seconds = sum(batch.starts), result.seconds + beside
                    self.lookahead.observe_times(slots, drafted, read, seconds, result.draft_seconds)
                self.lookahead.observe(slots, step[LENGTH] - step[DRAFT], drafted, column, step[DRAFT])
        return batch, gone, bytes(tokens), _land(self.handle, id, column)

    # The life of a sequence

    def add(self, request: Request) -> Sequence:
        """It waits from now on. It must be one that `fits`."""
        tokens, size = request.prompt_tokens + request.max_tokens, self.config.block_size
        most = max(-(-tokens // size), (self.config.max_model_len or 0) // size)
        slots = len(self.state.numbers) + (self.state.now[FREE_SLOTS] == 0)
        self._grow(slots, most, len(request.prefix))
        slo = request.slo
        wanted = _wanted(request.arrival, _or_none(slo.ttft), self.policy.by_goal)
        s, times = self.state, (request.arrival, wanted, _or_none(slo.tbt))
        slot = _add(self.handle, request.prompt_tokens, request.max_tokens, *times, request.max_draft_tokens)
        sequence = Sequence(request, slot, memoryview(s.numbers[slot]), memoryview(s.tables[slot]))
        self._sequences[slot], self._ids[slot] = sequence, request.id
        self._know(sequence, request.prefix)
        if self.lookahead:
            self.lookahead.forget(slot, request.kind)
        return sequence

    def take_over(self, other: Sequence, source: "Scheduler") -> Sequence:
        """A sequence that waits in another group, whose blocks are of the same size, waits here from now on."""
        assert self.config.block_size == source.config.block_size
        sequence, known = self.add(other.request), len(other.request.prefix)
        sequence.row[KNOWN] = sequence.row[PROMPT] = other.known
        sequence.row[PREEMPTIONS] = other.preemptions
        self._know(sequence, source.state.hashes[other.slot, known : other.row[HASHED]].tolist())
        source.end(other)
        return sequence

    def end(self, sequence: Sequence) -> bool:
        """The sequence is done, failed or not wanted: dropped now (True), or when the last batch with it completes."""
        flying = sequence.in_flight > 0
        self._num_ended += flying - sequence.ended
        sequence.ended = flying
        if flying:
            sequence.row[ENDED] = 1
            _take_no_more(self.handle, sequence.slot)
            return False
        _end(self.handle, sequence.slot)
        self._sequences[sequence.slot] = self._ids[sequence.slot] = None
        return True

    def note_preempted(self) -> None:
        """Those that compiled code preempted."""
        if count := self.state.now[LOST]:
            self.preempted += self._sequences[self.state.lost[:count]].tolist()

    def reset(self) -> list[Sequence]:
        """The KV cache is lost: everything starts over, and no cached prefix is left. Returns those that had ended."""
        self.flying.clear()
        self._begun.clear()
        ended = [sequence for sequence in self.running if sequence.ended]
        for sequence in ended:
            sequence.row[IN_FLIGHT] = 0
            self.end(sequence)
        _reset(self.handle)
        self.note_preempted()
        return ended

    def check(self) -> None:
        """Asserts the invariants: no block leaked, queues in order, nobody in both, the table as the handles say."""
        s = self.state
        blocks.check(s, [sequence.blocks() for sequence in self.running])
        assert all(not sequence.num_blocks for sequence in self.waiting)
        times = [(s.times[q.slot, ARRIVAL], q.row[SERIAL]) for q in self.running]
        assert times == sorted(times)
        for queue in (self.waiting, self.prompts):
            places = [(*s.times[q.slot, [WANTED, ARRIVAL]], q.row[SERIAL]) for q in queue]
            assert places == sorted(places)
        assert {q.slot for q in self.prompts} == {q.slot for q in self.running if q.scheduled < q.prompt}
        assert all(q.computed <= q.num_blocks * self.config.block_size for q in self.running)

    def _know(self, sequence: Sequence, hashes: Iterable[int]) -> None:
        """The hashes of blocks more of its tokens."""
        for key in hashes:
            known = sequence.row[HASHED]
            self._grow(0, 0, known + 1)
            self.state.hashes[sequence.slot, known] = key
            sequence.row[HASHED] = known + 1

    def _grow(self, slots: int, table: int, hashes: int) -> None:
        """Sees to it that there is room for so many sequences, and blocks and hashes of one."""
        old = self.state
        if slots <= len(old.numbers) and table <= old.tables.shape[1] and hashes <= old.hashes.shape[1]:
            return
        self.state = s = grown(old, slots, table, hashes)
        self.handle = Handle(STATE, s)
        more = np.empty(len(s.numbers) - len(old.numbers), object)
        self._sequences, self._ids = np.concatenate([self._sequences, more]), np.concatenate([self._ids, more])
        for sequence in self._sequences:
            if sequence is not None:
                sequence.row, sequence.table = memoryview(s.numbers[sequence.slot]), memoryview(s.tables[sequence.slot])


def _or_none(goal: float | None) -> float:
    return NONE if goal is None else goal
