"""KV cache blocks by id: who holds which, and which hold a prefix worth keeping. No tensors.

A block is in exactly one of four places:

    spare ----take----> held (holders > 0) ----release----> spare        no hash: the content is worthless
      ^                   |        ^
      |                register    | share
      |                   v        |
      +---evicted--- idle (no holders, hash known), least recently used goes first

    spare or idle ----give_back----> away ----take----> held             its memory is lent to another group (`lending`)

The hash of a block is chained: it stands for all tokens up to the block's end, so equal hashes mean equal KV.
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.batching.state import (
    AWAY,
    BLOCK_SIZE,
    EVER_HELD,
    FULL,
    HOLDERS,
    IDLE,
    NEWER,
    NEWEST,
    NUM_BLOCKS,
    OLDER,
    OLDEST,
    SPARE,
    STACK,
    TAKEN_AWAY,
    Ints,
    State,
)
from paceline.compiled import part
from paceline.core.request import HASHED, HELD


@part
def blocks_for(s: State, tokens: int) -> int:
    size = s.limits[BLOCK_SIZE]
    return (tokens + size - 1) // size


@part
def num_free(s: State) -> int:
    """Blocks that can be taken now; idle ones give way."""
    now = s.now
    return s.limits[NUM_BLOCKS] - now[EVER_HELD] + now[AWAY] + now[SPARE] + now[IDLE]


@part
def num_held(s: State) -> int:
    """Blocks that sequences hold."""
    return num_there(s) - s.now[SPARE] - s.now[IDLE]


@part
def num_there(s: State) -> int:
    """Blocks that take memory."""
    return s.now[EVER_HELD] - s.now[AWAY]


@part
def look_up(s: State, slot: int, most: int) -> tuple[int, int]:
    """Puts the cached blocks of a sequence's longest known prefix, at most so many, at the beginning of its table.

    Returns how many, and how many of them nobody holds: sharing them takes them out of the free ones.
    """
    found, idle, most = 0, 0, min(most, s.numbers[slot, HASHED])
    while found < most:
        block = _block_of(s, s.hashes[slot, found])
        if block < 0:
            break
        s.tables[slot, found] = block
        idle += s.blocks[HOLDERS, block] == 0
        found += 1
    return found, idle


@part
def num_cached(s: State, keys: Ints) -> int:
    """Blocks that are in the cache, of a prefix with these hashes."""
    found = 0
    while found < len(keys) and _block_of(s, keys[found]) >= 0:
        found += 1
    return found


@part
def share(s: State, slot: int, count: int) -> None:
    """The first so many blocks of the sequence's table, which were looked up, have it as another holder."""
    for at in range(count):
        block = s.tables[slot, at]
        if s.blocks[HOLDERS, block] == 0:
            _unlink(s, block)
        s.blocks[HOLDERS, block] += 1
    s.numbers[slot, HELD] = count


@part
def take(s: State, slot: int, count: int) -> None:
    """Gives the sequence blocks whose content is undefined. The caller has looked at `num_free`."""
    now, blocks, tables, held, most = s.now, s.blocks, s.tables, s.numbers[slot, HELD], s.limits[NUM_BLOCKS]
    for at in range(held, held + count):
        if now[SPARE] > 0:
            now[SPARE] -= 1
            block = blocks[STACK, now[SPARE]]
        elif num_there(s) >= most:
            block = _evict(s)
        elif now[AWAY] > 0:
            block = blocks[STACK, blocks.shape[1] - now[AWAY]]
            now[AWAY] -= 1
        else:
            block = now[EVER_HELD]
            now[EVER_HELD] += 1
        blocks[HOLDERS, block] = 1
        tables[slot, at] = block
    s.numbers[slot, HELD] = held + count


@part
def register(s: State, block: int, key: int) -> None:
    """The block is full now and its KV computed: it can be found by its hash. The first one with a hash stays."""
    if s.blocks[FULL, block] == 0 and _block_of(s, key) < 0:
        s.hash_of[block], s.blocks[FULL, block] = key, 1
        s.buckets[_place(s, key)] = 1 + block


@part
def release(s: State, slot: int) -> None:
    """The sequence lets go of all. Its later blocks are evicted before earlier ones."""
    now, blocks, tables = s.now, s.blocks, s.tables
    for at in range(s.numbers[slot, HELD] - 1, -1, -1):
        block = tables[slot, at]
        blocks[HOLDERS, block] -= 1
        if blocks[HOLDERS, block] > 0:
            continue
        if blocks[FULL, block] == 0:
            blocks[STACK, now[SPARE]] = block
            now[SPARE] += 1
            continue
        blocks[OLDER, block], blocks[NEWER, block] = now[NEWEST], 0
        if now[NEWEST] > 0:
            blocks[NEWER, now[NEWEST] - 1] = 1 + block
        else:
            now[OLDEST] = 1 + block
        now[NEWEST] = 1 + block
        now[IDLE] += 1
    s.numbers[slot, HELD] = 0


@part
def give_back(s: State, count: int) -> None:
    """The memory of so many blocks that nobody holds: of spare ones, then of idle ones, which are evicted."""
    now, blocks = s.now, s.blocks
    for _ in range(count):
        if now[SPARE] > 0:
            now[SPARE] -= 1
            block = blocks[STACK, now[SPARE]]
        else:
            block = _evict(s)
        now[AWAY] += 1
        now[TAKEN_AWAY] += 1
        blocks[STACK, blocks.shape[1] - now[AWAY]] = block


@part
def forget_all(s: State) -> None:
    """Drops all cached content (the device lost it). Held blocks stay held."""
    now = s.now
    while now[IDLE] > 0:
        block = now[OLDEST] - 1
        _unlink(s, block)
        s.blocks[STACK, now[SPARE]] = block
        now[SPARE] += 1
    for block in range(now[EVER_HELD]):
        s.blocks[FULL, block] = 0
    for at in range(s.buckets.shape[0]):
        s.buckets[at] = 0


@part
def _evict(s: State) -> int:
    """The least recently used of the idle blocks, without its content."""
    block = s.now[OLDEST] - 1
    _unlink(s, block)
    _forget(s, block)
    return block


@part
def _unlink(s: State, block: int) -> None:
    """Takes an idle block out of their line. Neighbours are 1 + block; 0 is none."""
    older, newer = s.blocks[OLDER, block], s.blocks[NEWER, block]
    if older > 0:
        s.blocks[NEWER, older - 1] = newer
    else:
        s.now[OLDEST] = newer
    if newer > 0:
        s.blocks[OLDER, newer - 1] = older
    else:
        s.now[NEWEST] = older
    s.now[IDLE] -= 1


@part
def _home(s: State, key: int) -> int:
    """Where the index looks for a hash first."""
    return ((key ^ (key >> 32)) * 0x9E3779B1 >> 15) & (s.buckets.shape[0] - 1)


@part
def _place(s: State, key: int) -> int:
    """Where in the index the hash is, or would be."""
    at = _home(s, key)
    while s.buckets[at] > 0 and s.hash_of[s.buckets[at] - 1] != key:
        at = (at + 1) & (s.buckets.shape[0] - 1)
    return at


@part
def _block_of(s: State, key: int) -> int:
    """The block with this content; -1: none."""
    return s.buckets[_place(s, key)] - 1


@part
def _forget(s: State, block: int) -> None:
    """Takes its hash out of the index. Those that stand behind move up to where they are looked for."""
    mask = s.buckets.shape[0] - 1
    hole = _place(s, s.hash_of[block])
    s.blocks[FULL, block] = 0
    at = (hole + 1) & mask
    while s.buckets[at] > 0:
        home = _home(s, s.hash_of[s.buckets[at] - 1])
        if ((at - home) & mask) >= ((at - hole) & mask):
            s.buckets[hole] = s.buckets[at]
            hole = at
        at = (at + 1) & mask
    s.buckets[hole] = 0


def check(s: State, held: Iterable[Sequence[int]]) -> None:
    """Asserts that exactly the given tables are held, and that no block is lost or in two places."""
    ever = int(s.now[EVER_HELD])
    holders = np.zeros(ever, np.int64)
    for table in held:
        np.add.at(holders, np.array(table, np.int64), 1)
    assert (holders == s.blocks[HOLDERS, :ever]).all(), "holders differ from the block tables"
    idle, at = list[int](), s.now[OLDEST]
    while at > 0 and len(idle) <= ever:
        idle.append(int(at) - 1)
        at = s.blocks[NEWER, at - 1]
    assert len(idle) == s.now[IDLE] and all(s.blocks[FULL, block] for block in idle)
    stack, away = s.blocks[STACK], int(s.now[AWAY])
    spare = [*stack[: s.now[SPARE]].tolist(), *stack[len(stack) - away :].tolist()]
    places = [*spare, *idle, *np.flatnonzero(holders).tolist()]
    assert sorted(places) == list(range(ever)), "a block is lost or in two places"
    full = np.flatnonzero(s.blocks[FULL, :ever]).tolist()
    assert sorted(s.buckets[s.buckets > 0].tolist()) == [1 + block for block in full], "the index has other blocks"
    assert len({int(s.hash_of[block]) for block in full}) == len(full), "two blocks have one hash"
