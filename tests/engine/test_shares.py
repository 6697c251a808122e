"""Threads that share a work: each takes of its own share, and then of what others have left."""

import numpy as np
import pytest
from numba import njit, prange

from paceline.engine.linear import kernels

pytestmark = pytest.mark.skipif(kernels is None, reason="there are none")
if kernels is not None:
    from paceline.engine.kernels.threads import TURNS_AHEAD, begin_shares, next_of, open_gate, wait


def taken(gate: int, turn: int, t: int, threads: int, count: int, each: int) -> list[tuple[int, int]]:
    parts, (begin, end, empty) = [], next_of(gate, turn, t, threads, count, each, 0)
    while begin < end:
        parts.append((begin, end))
        begin, end, empty = next_of(gate, turn, t, threads, count, each, empty)
    return parts


@pytest.fixture
def gate():
    memory = np.full(64, 7, np.int64)
    open_gate(memory.ctypes.data, 3)
    assert not memory[: 8 * 4].any() and (memory[8 * 4 :] == 7).all()
    yield memory.ctypes.data


def test_a_thread_takes_its_own_share_first(gate):
    assert next_of(gate, 0, 2, 3, 10, 2, 0) == (6, 8, 0)
    assert taken(gate, 0, 1, 3, 10, 2) == [(3, 5), (5, 6), (8, 10), (0, 2), (2, 3)]
    assert taken(gate, 0, 0, 3, 10, 2) == taken(gate, 0, 2, 3, 10, 2) == []
    assert taken(gate, 1, 0, 3, 2, 5) == [(0, 1), (1, 2)], "of fewer than threads"


@pytest.mark.parametrize("apart", range(1, 8))
def test_counters_are_new_for_works_that_are_not_too_many_turns_apart(gate, apart):
    assert apart < TURNS_AHEAD
    for turn in range(0, 200, apart):
        for t in range(3):
            begin_shares(gate, turn, t, 3)
        assert taken(gate, turn, 0, 3, 6, 1) == [(i, i + 1) for i in range(6)]


def test_who_works_alone_needs_no_turns(gate):
    for count in (5, 3):
        begin_shares(gate, 0, 0, 1)
        assert taken(gate, 0, 0, 1, count, 4) == ([(0, 4), (4, 5)] if count == 5 else [(0, 3)])
        assert taken(gate, 0, 0, 1, count, 4) == []


def test_nothing_is_left_and_nothing_done_twice():
    threads, count, turns = kernels.num_threads(), 50, 3000
    done, memory = np.zeros((turns, count), np.int64), np.zeros(8 * (1 + threads), np.int64)
    _all_of(done, memory.ctypes.data, threads)
    assert (done == 1).all()


@njit(parallel=True)
def _all_of(done, gate, threads):
    open_gate(gate, threads)
    for t in prange(threads):
        turn = 0
        for i in range(done.shape[0]):
            begin_shares(gate, turn, t, threads)
            begin, end, empty = next_of(gate, turn, t, threads, done.shape[1], 3, 0)
            while begin < end:
                done[i, begin:end] += 1
                begin, end, empty = next_of(gate, turn, t, threads, done.shape[1], 3, empty)
            turn = wait(gate, turn, threads)
