"""When a worker is taken to hang, in a time that the test makes pass."""

import pytest

from paceline.runtime import pulse
from paceline.runtime.fleet import WATCH_S
from paceline.runtime.messages import Heartbeat, Loading
from paceline.runtime.pulse import SILENT_S, Pulse
from paceline.runtime.worker import BEAT_S
from paceline.runtime.workers import HANG_S


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pulse, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("message", "moves"),
    [
        (lambda beat: Heartbeat(beat, True), True),  # in a step, layer after layer
        (lambda beat: Heartbeat(7, False), True),  # idle, or waits for another worker
        (lambda beat: Loading(0, beat, 99), True),
        (lambda beat: Heartbeat(7, True), False),  # alive, and gets nowhere
    ],
)
def test_who_beats_is_well_if_it_moves(clock, message, moves):
    heart = Pulse()
    for beat in range(20):
        heart.heard(message(beat))
        clock.now += BEAT_S
    assert heart.responsive is moves
    assert heart.silent_s == pytest.approx(BEAT_S if moves else 20 * BEAT_S)


def test_idle_is_who_computes_nothing(clock):
    heart = Pulse()
    for beat in range(10):
        heart.heard(Heartbeat(beat, True))
        clock.now += BEAT_S
    assert heart.idle_s == pytest.approx(BEAT_S)
    for _ in range(10):
        heart.heard(Heartbeat(9, False))
        clock.now += BEAT_S
    assert heart.idle_s == pytest.approx(11 * BEAT_S) and heart.responsive


def test_silence_tells_and_time_in_which_nobody_could_hear_does_not_count(clock):
    heart = Pulse()
    clock.now += SILENT_S - 0.01
    assert heart.responsive
    clock.now += 0.02
    assert not heart.responsive
    heart.forgive(0.1)
    assert heart.responsive and heart.silent_s == pytest.approx(SILENT_S - 0.09)


def test_a_stopped_worker_is_seen_within_two_seconds_with_room_to_end_it():
    assert 2 * BEAT_S < SILENT_S < HANG_S and HANG_S + WATCH_S < 1.9
