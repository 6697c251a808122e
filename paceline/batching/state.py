"""The decision state of a group as arrays.

A sequence is a row; queues are arrays of row numbers (slots). No token ids, no tensors, no Python objects: so the whole
scheduler, policies included, is compiled code, the same for a live group and for a simulation of a million requests.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.extending import intrinsic
from numpy.typing import NDArray

from paceline.compiled import FLOATS, FLOATS_2D, I32, I64, INTS_2D, U8, Pointer, array_of, part
from paceline.core.request import NUM_COLUMNS

Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]

NONE = np.inf  # no goal
# rows of a step's columns; DRAFT: how many of LENGTH are to be drafted
SLOT, START, LENGTH, DRAFT = range(4)
# columns of `times`: seconds. Prompts are in the order of WANTED, then of arrival; LAST: token, in a simulation
ARRIVAL, WANTED, TBT, LAST = range(4)
# `limits` of the group. NUM_BLOCKS: what it may have now; OWN_BLOCKS: what it can have at any time (`lending`); AHEAD:
# steps that may be composed before those in flight have left a stage free, since the engine keeps them until then
(
    TOKEN_BUDGET, MAX_BATCH, BLOCK_SIZE, NUM_BLOCKS, WATERMARK, MAX_MODEL_LEN, MAX_PROMPT_TOKENS, POLICY, RESERVES,
    LATE, PIPELINE, ADAPTIVE, TILE, KNEE, MAXIMUM, BY_GOAL, OWN_BLOCKS, AHEAD, NUM_LIMITS,
) = range(19)  # fmt: skip
# `now`: what is counted. Of the queues (waiting: from HEAD to TAIL), of the step that is being composed (AT: its place
# in the ring of steps; RESTING: nobody drafts in it, whoever might; SEEN: NEXT_SERIAL when the last one was complete, 0
# if what was there has been lost since), of blocks
(
    RUNNING, HEAD, TAIL, PROMPTS, FREE_SLOTS, NEXT_SERIAL, DRAFTING, FLYING, ENTERING, COHORTS, NEXT_COHORT,
    CHUNKS_LAST, SLICES, DECODES, WIDTH, PREEMPTED, LOST, EVER_HELD, SPARE, IDLE, OLDEST, NEWEST, AWAY, TAKEN_AWAY,
    CACHED_TOKENS, NEXT_BATCH, AT, RESTING, SEEN, NUM_COUNTS,
) = range(30)  # fmt: skip
# `factors`: what steps take over what is predicted, what those that compute take over that, seconds of drafting in this
# step, goal between tokens, its margin, when the last step was complete, when this one is composed, what steps take
# beside the engine, the margin that the profile says, up to when what was learnt has been forgotten (`batching.pace`),
# for how long others on the device have it between two steps, its own share of the device's time, and as of when,
# what the last step took where none is predicted
(
    PACE, WIDE, SPENT, GOAL, MARGIN, LANDED, BEGIN, BESIDE, ERROR, RESTED, WAITS, SHARE, SHARED, TOOK, NUM_FACTORS,
) = range(15)  # fmt: skip
# rows of `blocks`: holders; a stack of spare ones and, from its end, one of those away; neighbours among the idle ones;
# whether a hash is known
HOLDERS, STACK, OLDER, NEWER, FULL = range(5)


class State(NamedTuple):
    """Of one group. Slots beyond those in use are zero. Compiled code sees it as a `Handle`."""

    limits: Ints  # [NUM_LIMITS]
    now: Ints  # [NUM_COUNTS]
    factors: Floats  # [NUM_FACTORS]
    numbers: Ints  # [slots, NUM_COLUMNS] a row for each sequence, see `core.request`
    times: Floats  # [slots, 4]
    drafts: Ints  # [slots] the most to draft in a step
    chosen: Ints  # [slots] as many of them as are worth it in this one
    free: Ints  # [slots] a stack of unused slots
    waiting: Ints  # [2 slots] in the policy's order
    running: Ints  # [slots] in arrival order
    prompts: Ints  # [slots] running, with prompt tokens which no batch has taken, in the policy's order
    cohorts: Ints  # [pipeline] batches of requests, the first to come back first
    steps: Ints  # [ring, 4, slots] the step that is being composed, and those in flight: by number, pipeline + ahead
    emits: Bytes  # [ring, slots] whether their slices will yield a token
    sizes: Ints  # [ring] slices
    ends: Floats  # [ring] when they are expected to be done
    clocks: Floats  # [pipeline] when each stage is expected to be free of them
    shape: Ints  # [7] what the newest one's time depends on, as `core.batch.StepShape`
    lost: Ints  # [2 slots] who lost its blocks for it
    listed: Ints  # [slots] scratch
    tables: Small  # [slots, blocks of the longest sequence] block ids
    hashes: Ints  # [slots, blocks] of the full ones
    blocks: Small  # [5, the most blocks of the group]
    hash_of: Ints  # [the most blocks of the group]
    buckets: Small  # [power of two] hash table: 1 + block of a hash
    linear: Floats  # seconds of a step by its tokens, empty if unknown (`latency.step_time`)
    terms: Floats  # [6] and the other terms


STATE = Pointer(
    State, factors=FLOATS, numbers=INTS_2D, times=FLOATS_2D, steps=array_of(I64, 3), emits=array_of(U8, 2), ends=FLOATS,
    clocks=FLOATS, tables=array_of(I32, 2), hashes=INTS_2D, blocks=array_of(I32, 2), buckets=array_of(I32, 1),
    linear=FLOATS, terms=FLOATS,
)  # fmt: skip


@intrinsic
def _state_at(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(STATE))

    return STATE(address), generate


@part
def state_at(address: int) -> State:
    """That of a `Handle`, by its address."""
    return _state_at(address)  # type: ignore[call-arg]


def make(
    limits: Ints, factors: Floats, linear: Floats, terms: Floats, most_blocks: int, slots: int, table: int
) -> State:  # fmt: skip
    """An empty group that never has more than `most_blocks`, with room for so many sequences, and blocks of one."""
    count, pipeline, ring = max(1, most_blocks), int(limits[PIPELINE]), int(limits[PIPELINE] + limits[AHEAD])
    now = np.zeros(NUM_COUNTS, np.int64)
    now[FREE_SLOTS], now[ENTERING] = slots, -1
    row = np.zeros
    return State(
        limits, now, factors, row((slots, NUM_COLUMNS), np.int64), row((slots, 4)), row(slots, np.int64),
        row(slots, np.int64), np.arange(slots - 1, -1, -1), row(2 * slots, np.int64), row(slots, np.int64),
        row(slots, np.int64), row(pipeline + 1, np.int64), row((ring, 4, slots), np.int64),
        row((ring, slots), np.uint8), row(ring, np.int64), row(ring), row(pipeline), row(7, np.int64),
        row(2 * slots, np.int64), row(slots, np.int64), row((slots, table), np.int32), row((slots, 1), np.int64),
        row((5, count), np.int32), row(count, np.int64), row(1 << (2 * count - 1).bit_length(), np.int32), linear,
        terms,
    )  # fmt: skip


def grown(state: State, slots: int = 0, table: int = 0, hashes: int = 0) -> State:
    """With room for as many sequences, and for as many blocks and hashes of one: at least doubled where it is short."""
    old, changes = len(state.numbers), dict[str, Any]()
    if slots > old:
        slots = max(slots, 2 * old)
        rows = ("numbers", "times", "drafts", "chosen", "running", "prompts", "listed", "tables", "hashes")
        for name in rows:
            column = getattr(state, name)
            changes[name] = np.zeros((slots, *column.shape[1:]), column.dtype)
            changes[name][:old] = column
        for name in ("waiting", "lost"):
            changes[name] = np.zeros(2 * slots, np.int64)
            changes[name][: 2 * old] = getattr(state, name)
        for name in ("steps", "emits"):
            column = getattr(state, name)
            changes[name] = np.zeros((*column.shape[:-1], slots), column.dtype)
            changes[name][..., :old] = column
        free = state.free[: state.now[FREE_SLOTS]]
        changes["free"] = np.zeros(slots, np.int64)
        changes["free"][: slots - old + len(free)] = [*range(slots - 1, old - 1, -1), *free]
        state.now[FREE_SLOTS] += slots - old
    for name, least in (("tables", table), ("hashes", hashes)):
        column = changes.get(name, getattr(state, name))
        if least > column.shape[1]:
            changes[name] = np.zeros((len(column), max(least, 2 * column.shape[1])), column.dtype)
            changes[name][:, : column.shape[1]] = column
    return state._replace(**changes)
