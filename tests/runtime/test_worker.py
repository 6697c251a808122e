"""The loop of a worker whose device computes steps while it takes the next one."""

from collections import deque

import pytest

from paceline.runtime import messages
from paceline.runtime.messages import GiveBack, Step, StepDone
from paceline.runtime.worker import Loop


class Channel:
    """What comes, and when: None is a look at the channel for nothing."""

    def __init__(self, said: list[str], *frames: object) -> None:
        self.frames, self.said = deque(frames), said

    def waits(self, seconds: float) -> bool:
        if self.frames and self.frames[0] is None:
            self.frames.popleft()
            return False
        return bool(self.frames)

    def receive(self) -> bytes | None:
        while self.frames and self.frames[0] is None:  # it waits
            self.frames.popleft()
        return messages.encode(self.frames.popleft()) if self.frames else None

    def send(self, frame: bytes) -> None:
        done = messages.decode_from_worker(frame)
        assert isinstance(done, StepDone) and (done.forward_s, done.sample_s, done.draft_s) == (1.0, 2.0, 0.5)
        self.said.append(f"done {done.batch}")


class Device:
    """Begins steps, and is asked so many times whether one is done."""

    overlaps = answers = first = True
    progress, waiting = 0, False

    def __init__(self, said: list[str], follows: bool, looks: int) -> None:
        self.said, self._follows, self.looks, self.begun, self.draft_s = said, follows, looks, 0, 0.5

    def learn(self, new, dropped) -> None:
        self.learnt = len(new)

    def follows(self, slices) -> bool:
        return self._follows

    def begin(self, slices) -> "Device":
        self.begun += 1
        self.said.append(f"begin {self.begun}")
        return self

    @property
    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def finish(self):
        return [], 1.0, 2.0

    def give_back(self, blocks) -> None:
        self.said.append("give back")


def step(batch: int) -> Step:
    return Step(0, batch, [], [], [])


@pytest.mark.parametrize(
    ("follows", "looks", "frames", "said"),
    [
        (True, 5, [step(1), step(2), None, step(3)], ["begin 1", "begin 2", "done 1", "begin 3", "done 2", "done 3"]),
        (False, 5, [step(1), step(2)], ["begin 1", "done 1", "begin 2", "done 2"]),
        (True, 2, [step(1), None, None, None, step(2)], ["begin 1", "done 1", "begin 2", "done 2"]),
        (True, 5, [step(1), GiveBack(0, [1])], ["begin 1", "done 1", "give back"]),
        (True, 0, [step(1), step(2)], ["begin 1", "done 1", "begin 2", "done 2"]),
    ],
    ids=["ahead", "needs the tokens", "comes late", "another message", "is done"],
)
def test_a_step_begins_before_the_last_one_is_answered(follows: bool, looks: int, frames: list, said: list) -> None:
    heard: list[str] = []
    loop = Loop(Channel(heard, *frames, *[None] * 4), [])
    loop.engines[0] = Device(heard, follows, looks)
    loop.run()
    assert heard == said
    assert loop.stepping is None and loop.begun is None
