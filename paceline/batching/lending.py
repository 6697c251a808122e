"""What groups that share a device lend each other of their memory for KV: a decision for the controller.

    the memory = the sum of the groups' own parts >= the bytes of all blocks that take memory: held, idle and spare ones

A group has its own part at any time. Beyond it, it has what the others leave of theirs: what their sequences neither
hold nor could come to hold were all to become as long as they may. Before a step, memory that it may need and that is
not free is taken from others: spare blocks, then idle ones, of groups with more than their parts first, then of those
whose last step was longest ago. What a group lacks of its own part is taken from sequences, too: the newest ones of the
group that exceeds its part most are preempted. From a batch in flight nothing is taken.
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Sequence

import numpy as np

from paceline.batching.blocks import give_back, num_held, num_there
from paceline.batching.moves import kept_free, lacks, most_held, newest, num_waiting, preempt, takes_no_step
from paceline.batching.scheduler import Scheduler
from paceline.batching.state import (
    AWAY,
    BLOCK_SIZE,
    HEAD,
    IDLE,
    LANDED,
    LOST,
    MAX_BATCH,
    NUM_BLOCKS,
    OWN_BLOCKS,
    RUNNING,
    SPARE,
    STACK,
    TAIL,
    TAKEN_AWAY,
    TOKEN_BUDGET,
    Ints,
    State,
    state_at,
)
from paceline.compiled import I64, INTS, INTS_2D, entry, making, part
from paceline.core.request import ASKED, COMPUTED, HELD, IN_FLIGHT, KNOWN, LIMIT, PROMPT


def lend(groups: Sequence[Scheduler], sizes: Sequence[Sequence[int]], taker: int) -> list[list[int]]:
    """Before a step of one of the groups of a device: sets how many blocks each may have, and has others preempt and
    evict what it needs.

    sizes [groups, workers]: bytes of a block. Returns the blocks of each group whose memory is to be given back before
    the step.
    """
    if not _share_out(np.array([group.handle.address for group in groups]), np.array(sizes), taker):
        return [[] for _ in groups]
    for group in groups:
        group.note_preempted()
    return [_taken_away(group.state) for group in groups]


def _taken_away(s: State) -> list[int]:
    begin = s.blocks.shape[1] - s.now[AWAY]
    return s.blocks[STACK, begin : begin + s.now[TAKEN_AWAY]].tolist()  # those that were taken last come first


@part
def needed(s: State) -> int:
    """Blocks of its own part that its sequences may come to hold."""
    total, own, numbers = 0, s.limits[OWN_BLOCKS], s.numbers
    for i in range(s.now[RUNNING] + num_waiting(s)):
        slot = s.running[i] if i < s.now[RUNNING] else s.waiting[s.now[HEAD] + i - s.now[RUNNING]]
        total += most_held(s, numbers[slot, ASKED], numbers[slot, LIMIT] - numbers[slot, ASKED])
        if total >= own:
            return own
    return total


@part
def wanted(s: State) -> int:
    """Blocks held, and free for admission, if the next step is to take what its budget allows; without drafts."""
    total, size, numbers = num_held(s), s.limits[BLOCK_SIZE], s.numbers
    if takes_no_step(s):
        return total  # there is none now
    for i in range(s.now[RUNNING]):
        row = numbers[s.running[i]]
        decodes = row[COMPUTED] >= row[PROMPT] and row[IN_FLIGHT] == 0
        total += decodes and row[COMPUTED] == row[HELD] * size
    tokens, at = s.limits[TOKEN_BUDGET], s.now[HEAD]
    end = min(s.now[TAIL], at + s.limits[MAX_BATCH] - s.now[RUNNING])
    if at < end:
        total += kept_free(s)
    while tokens > 0 and at < end:
        slot = s.waiting[at]
        hits, idle, new = lacks(s, slot)
        total += idle + new
        tokens -= numbers[slot, KNOWN] - hits * size
        at += 1
    return total


@part
def _within(room: Ints, sizes: Ints) -> int:
    """Blocks of these sizes in as many bytes, at the worker with the fewest."""
    fewest = room[0] // sizes[0]
    for w in range(1, len(room)):
        fewest = min(fewest, room[w] // sizes[w])
    return fewest


@part
def _borrower(groups: Ints, taker: int) -> int:
    """Of the others the group that exceeds its part most, of those that can preempt; -1: there is none."""
    best, most = -1, 1.0
    for g in range(len(groups)):
        s = state_at(groups[g])
        share = num_held(s) / max(1, s.limits[OWN_BLOCKS])
        if g != taker and share > most and newest(s) >= 0:
            best, most = g, share
    return best


@part
def _giver(groups: Ints, taker: int, idle: bool) -> int:
    """Of the others the group whose spare (or idle) blocks go next; -1: there is none."""
    best, exceeds, landed = -1, False, 0.0
    for g in range(len(groups)):
        s = state_at(groups[g])
        if g == taker or s.now[SPARE] + (s.now[IDLE] if idle else 0) == 0:
            continue
        more, last = num_there(s) > s.limits[OWN_BLOCKS], s.factors[LANDED]
        if best < 0 or (more and not exceeds) or (more == exceeds and last < landed):
            best, exceeds, landed = g, more, last
    return best


@making
def share_out(groups: Ints, sizes: Ints, taker: int) -> int:
    """groups: addresses of their states. Returns how many blocks and sequences were taken from others."""
    count, workers = sizes.shape
    mine, taken = state_at(groups[taker]), 0
    free, left = np.zeros(workers, np.int64), np.zeros(workers, np.int64)  # bytes: not there, and needed by nobody
    kept = np.zeros(count, np.int64)
    for g in range(count):
        s = state_at(groups[g])
        s.now[LOST] = s.now[TAKEN_AWAY] = 0
        kept[g] = max(needed(s), num_held(s))
        for w in range(workers):
            free[w] += (s.limits[OWN_BLOCKS] - num_there(s)) * sizes[g, w]
            left[w] += (s.limits[OWN_BLOCKS] - kept[g]) * sizes[g, w]
    aim = wanted(mine)
    # of its own part, what others' sequences hold
    while kept[taker] + _within(left, sizes[taker]) < min(aim, mine.limits[OWN_BLOCKS]):
        g = _borrower(groups, taker)
        if g < 0:
            break
        s = state_at(groups[g])
        preempt(s, newest(s))
        fewer = kept[g] - max(needed(s), num_held(s))
        kept[g] -= fewer
        taken += 1
        for w in range(workers):
            left[w] += fewer * sizes[g, w]
    for g in range(count):
        s = state_at(groups[g])
        s.limits[NUM_BLOCKS] = min(s.hash_of.shape[0], kept[g] + _within(left, sizes[g]))
        if g != taker:
            s.limits[NUM_BLOCKS] = max(s.limits[NUM_BLOCKS], s.limits[OWN_BLOCKS], num_held(s))
    # memory for what it may hold
    more = min(aim, mine.limits[NUM_BLOCKS]) - num_there(mine)
    for idle in (False, True):
        while _within(free, sizes[taker]) < more:
            g = _giver(groups, taker, idle)
            if g < 0:
                break
            s, blocks = state_at(groups[g]), 0
            for w in range(workers):
                blocks = max(blocks, -((free[w] - more * sizes[taker, w]) // sizes[g, w]))
            blocks = min(blocks, s.now[SPARE] + (s.now[IDLE] if idle else 0))
            give_back(s, blocks)
            taken += blocks
            for w in range(workers):
                free[w] += blocks * sizes[g, w]
    there = num_there(mine) + _within(free, sizes[taker])
    mine.limits[NUM_BLOCKS] = max(num_held(mine), min(mine.limits[NUM_BLOCKS], there))
    return taken


_share_out = entry(I64, INTS, INTS_2D, I64)(share_out)
