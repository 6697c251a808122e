import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batching import blocks
from paceline.batching.config import SchedulerConfig
from paceline.batching.policies import policy
from paceline.batching.scheduler import make_state
from paceline.batching.state import STATE, grown
from paceline.compiled import BOOL, I64, VOID, Handle, entry, part
from paceline.core.request import HASHED, HELD

take = entry(VOID, STATE, I64, I64)(blocks.take)
release = entry(VOID, STATE, I64)(blocks.release)
register = entry(VOID, STATE, I64, I64)(blocks.register)
share = entry(VOID, STATE, I64, I64)(blocks.share)
forget_all = entry(VOID, STATE)(blocks.forget_all)
num_free = entry(I64, STATE)(blocks.num_free)


@part
def shared(s, slot: int, most: int) -> bool:
    found, _ = blocks.look_up(s, slot, most)
    blocks.share(s, slot, found)
    return found > 0


share_known = entry(BOOL, STATE, I64, I64)(shared)


class Blocks:
    """Slots of a group, each with a table of blocks."""

    def __init__(self, num_blocks: int) -> None:
        limits = SchedulerConfig(num_blocks=num_blocks)
        self.state = grown(make_state(limits, policy("paceline"), 1, None, False), 0, num_blocks, num_blocks)
        self.handle = Handle(STATE, self.state)

    def take(self, slot: int, count: int) -> list[int]:
        take(self.handle, slot, count)
        return self.held(slot)

    def held(self, slot: int) -> list[int]:
        return self.state.tables[slot, : self.state.numbers[slot, HELD]].tolist()

    def register(self, block: int, key: int) -> None:
        register(self.handle, block, key)

    def release(self, slot: int) -> None:
        release(self.handle, slot)

    def share(self, slot: int, hashes: list[int], most: int = 9) -> list[int]:
        self.state.numbers[slot, HASHED] = len(hashes)
        self.state.hashes[slot, : len(hashes)] = hashes
        share_known(self.handle, slot, most)
        return self.held(slot)

    @property
    def num_free(self) -> int:
        return num_free(self.handle)

    def check(self, slots=range(40)) -> None:
        blocks.check(self.state, [self.held(slot) for slot in slots])


def test_a_released_prefix_is_found_again():
    some = Blocks(4)
    held = some.take(0, 2)
    some.register(held[0], 11)
    some.register(held[1], 12)
    some.release(0)
    assert some.num_free == 4
    assert some.share(1, [11, 12, 13]) == held
    assert some.num_free == 2
    some.check()


def test_least_recently_used_goes_first_and_tails_before_heads():
    some = Blocks(3)
    held = some.take(0, 3)
    for block, key in zip(held, (1, 2, 3), strict=True):
        some.register(block, key)
    some.release(0)
    some.take(1, 1)
    assert some.share(2, [1, 2, 3]) == held[:2], "the last block of the chain was evicted"


def test_blocks_without_a_hash_are_taken_before_cached_ones():
    some = Blocks(2)
    (cached,), (plain_one,) = some.take(0, 1), some.take(1, 1)
    some.register(cached, 7)
    some.release(0)
    some.release(1)
    assert some.take(2, 1) == [plain_one]


def test_the_first_block_with_a_hash_stays():
    some = Blocks(2)
    (first,), (second,) = some.take(0, 1), some.take(1, 1)
    some.register(first, 5)
    some.register(second, 5)
    some.release(1)
    assert some.share(2, [5]) == [first]
    some.check()


def test_forget_keeps_what_is_held():
    some = Blocks(3)
    first, second = some.take(0, 1)[0], some.take(1, 1)[0]
    some.register(first, 1)
    some.register(second, 2)
    some.release(1)
    forget_all(some.handle)
    assert some.share(2, [2]) == [] and some.share(3, [1]) == []
    some.check()


def test_check_sees_a_leak_and_a_false_index():
    some = Blocks(3)
    some.take(0, 1)
    with pytest.raises(AssertionError, match="holders"):
        some.check([])
    some.register(some.held(0)[0], 5)
    some.state.buckets[:] = 0
    with pytest.raises(AssertionError, match="index"):
        some.check()


def test_hashes_that_collide_in_the_index_are_told_apart():
    """As many as there are blocks, evicted and registered again and again: each is found where it is, and no other."""
    random, some, where = np.random.default_rng(1), Blocks(16), {}
    for _ in range(400):
        block = some.take(0, 1)[0]
        where = {key: at for key, at in where.items() if at != block}  # what it held was evicted
        key = int(random.integers(-(2**62), 2**62)) if random.random() < 0.5 else int(random.integers(40))
        some.register(block, key)
        where.setdefault(key, block)
        some.release(0)
        for key, at in where.items():
            assert some.share(1, [key]) == [at]
            some.release(1)
        assert some.share(1, [99]) == []
        some.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_no_sequence_of_moves_loses_a_block(moves):
    some, free = Blocks(12), list(range(39, -1, -1))
    held: list[int] = []
    for kind, which, size in moves:
        if kind == 0 and some.num_free >= size:
            held.append(free.pop())
            some.take(held[-1], size)
        elif kind == 1 and held:
            free.append(held.pop(which % len(held)))
            some.release(free[-1])
        elif kind == 2 and held:
            for depth, block in enumerate(some.held(held[which % len(held)])):
                some.register(block, 100 * size + depth)
        elif kind == 3 and free:
            slot = free.pop()
            found = some.share(slot, [100 * size + depth for depth in range(4)], which)
            (held if found else free).append(slot)
        some.check()
