import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batching.blocks import Blocks


def test_a_released_prefix_is_found_again():
    blocks = Blocks(4, 16)
    held = blocks.allocate(2)
    blocks.register(held[0], 11)
    blocks.register(held[1], 12)
    blocks.release(held)
    assert blocks.num_free == 4
    found = blocks.lookup([11, 12, 13], 9)
    assert found == held
    blocks.share(found)
    assert blocks.num_free == 2
    blocks.check([held])


def test_least_recently_used_goes_first_and_tails_before_heads():
    blocks = Blocks(3, 16)
    held = blocks.allocate(3)
    for block, key in zip(held, (1, 2, 3), strict=True):
        blocks.register(block, key)
    blocks.release(held)
    blocks.allocate(1)
    assert blocks.lookup([1, 2, 3], 9) == held[:2], "the last block of the chain was evicted"


def test_blocks_without_a_hash_are_taken_before_cached_ones():
    blocks = Blocks(2, 16)
    cached, plain = blocks.allocate(2)
    blocks.register(cached, 7)
    blocks.release([cached])
    blocks.release([plain])
    assert blocks.allocate(1) == [plain]


def test_the_first_block_with_a_hash_stays():
    blocks = Blocks(2, 16)
    first, second = blocks.allocate(2)
    blocks.register(first, 5)
    blocks.register(second, 5)
    assert blocks.lookup([5], 1) == [first]
    blocks.release([second])
    blocks.check([[first]])


def test_forget_keeps_what_is_held():
    blocks = Blocks(3, 16)
    held = blocks.allocate(2)
    blocks.register(held[0], 1)
    blocks.register(held[1], 2)
    blocks.release(held[1:])
    blocks.forget()
    assert blocks.lookup([1, 2], 2) == []
    blocks.check([held[:1]])


def test_check_sees_a_leak():
    blocks = Blocks(3, 16)
    blocks.allocate(1)
    with pytest.raises(AssertionError):
        blocks.check([])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_no_sequence_of_moves_loses_a_block(moves):
    blocks = Blocks(12, 4)
    held: list[list[int]] = []
    for kind, which, size in moves:
        if kind == 0 and blocks.num_free >= size:
            held.append(blocks.allocate(size))
        elif kind == 1 and held:
            blocks.release(held.pop(which % len(held)))
        elif kind == 2 and held:
            table = held[which % len(held)]
            for depth, block in enumerate(table):
                blocks.register(block, 100 * size + depth)
        elif kind == 3:
            found = blocks.lookup([100 * size + depth for depth in range(4)], which)
            if found:
                blocks.share(found)
                held.append(found)
        blocks.check(held)
