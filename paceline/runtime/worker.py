"""A worker process: one loop over the engines of a device. It gets steps, runs them and answers; it decides nothing."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

from paceline.core.work import BegunStep, Engine, Outcome, Overlapping
from paceline.runtime import messages
from paceline.runtime.channel import WorkerEnd
from paceline.runtime.messages import (
    Advanced,
    Failed,
    GiveBack,
    Heartbeat,
    Loading,
    Ready,
    Shutdown,
    Step,
    StepDone,
    Unload,
)

BEAT_S = 0.2
# By how much the system is to prefer others, in its own unit. Where all cores step, the front end, which needs little,
# else waits for tens of milliseconds until it may answer.
YIELDS = 10
TRIES = 4  # to load a model by need, where memory is lacking
AGAIN_S = 1.0  # after such a failure
POLL_S = 50e-6  # between looks at a device, while nothing comes
Load = Callable[[Callable[[int, int], None]], Engine]  # gets a progress callback (bytes done, bytes in all)


def serve(descriptor: int, loads: Sequence[Load], resident: Sequence[bool] = (), check: bool = True) -> None:
    """Loads the engines and runs steps for the front end, whose socket is `descriptor`, until told to stop.

    `resident`: which of them stay loaded, all by default; with `check` the others are loaded once before, to see
    whether they can be, one at a time. A front end that is gone ends the worker.
    """
    os.nice(YIELDS)
    channel = WorkerEnd(descriptor)
    loop = Loop(channel, loads)
    threading.Thread(target=beat, args=(channel, loop), daemon=True).start()
    stays = resident or [True] * len(loads)
    for model in sorted(range(len(loads)), key=stays.__getitem__):
        if stays[model] or check:
            loop.load(model)
        if not stays[model]:
            loop.unload(model)
    gc.collect()
    gc.freeze()  # what is loaded stays: collections in the middle of a step need not look at it
    loop.run()


class Loop:
    """Receives, steps, answers."""

    def __init__(self, channel: WorkerEnd, loads: Sequence[Load]) -> None:
        self.channel, self.loads = channel, loads
        self.engines: dict[int, Engine] = {}  # those that are loaded
        self.stepping: Engine | None = None
        self.begun: tuple[Step, Overlapping, BegunStep] | None = None  # the step that is not finished

    def load(self, model: int, tries: int = 1) -> None:
        """Any thread may. More than one of `tries` is needed where memory is lacking: others may give some back."""

        def progress(done: int, total: int) -> None:
            self.channel.send(messages.encode(Loading(model, done, total)))

        begin = time.perf_counter()
        try:
            engine = self.loads[model](progress)
        except Exception as error:
            if tries == 1 or not _lacks_memory(error):
                bad_input = isinstance(error, ValueError | FileNotFoundError)
                self.channel.send(messages.encode(Failed(model, _told(error), bad_input)))
                return
        else:
            self.engines[model] = engine
            self.channel.send(messages.encode(Ready(model, engine.info, time.perf_counter() - begin)))
            return
        time.sleep(AGAIN_S)  # what was loaded of it has gone with the error
        self.load(model, tries - 1)

    def unload(self, model: int) -> None:
        engine = self.engines.pop(model, None)
        if engine:
            engine.release()

    def run(self) -> None:
        while (frame := self._receive()) is not None:
            message = messages.decode_to_worker(frame)
            if not isinstance(message, Step):
                self._finish()
            match message:
                case Step() as step:
                    self.step(step)
                case GiveBack(model, blocks):
                    self.engines[model].give_back(blocks)
                case messages.Load(model):
                    threading.Thread(target=self.load, args=(model, TRIES), daemon=True).start()
                case Unload(model):
                    self.unload(model)
                case Shutdown():
                    return

    def _receive(self) -> bytes | None:
        """The next message; of a step that ends before it comes the outputs are sent meanwhile."""
        while self.begun and not self.channel.waits(POLL_S):
            if self.begun[2].done:
                self._finish()
        return self.channel.receive()

    def step(self, message: Step) -> None:
        engine = self.engines[message.model]
        if engine.overlaps:
            self._begin(message, cast(Overlapping, engine))
            return
        self._finish()
        self.stepping = engine
        outcome = engine.step(message.new, message.slices, message.dropped)
        self.stepping = None
        if engine.answers:
            self._answer(message, outcome, engine.draft_s)
        elif engine.first:
            self.channel.send(messages.encode(Advanced(message.model, message.batch)))

    def _begin(self, message: Step, engine: Overlapping) -> None:
        """Asks for a step, and then sends the outputs of the one before, which a device computes meanwhile."""
        if self.begun and (self.begun[2].done or self.begun[1] is not engine):
            self._finish()
        self.stepping = engine
        engine.learn(message.new, message.dropped)
        if not engine.follows(message.slices):
            self._finish()
            self.stepping = engine
        begun = engine.begin(message.slices)
        self._finish()
        self.stepping, self.begun = engine, (message, engine, begun)

    def _finish(self) -> None:
        """Sends the outputs of the step that was begun, if there is one."""
        if self.begun:
            message, _, begun = self.begun
            outcome = begun.finish()
            self.stepping = self.begun = None
            self._answer(message, outcome, begun.draft_s)

    def _answer(self, message: Step, outcome: Outcome, draft_s: float) -> None:
        self.channel.send(messages.encode(StepDone(message.model, message.batch, *outcome, draft_s)))


def _told(error: Exception) -> str:
    """What the user reads: of some errors the text alone says nothing."""
    if isinstance(error, OSError | ValueError | RuntimeError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _lacks_memory(error: Exception) -> bool:
    """Torch, and the system, say so in words only."""
    return isinstance(error, MemoryError) or "memory" in str(error)


def beat(channel: WorkerEnd, loop: Loop) -> None:
    """Tells several times a second that the process lives and how far its steps are; ends it without a front end."""
    while True:
        engine = loop.stepping
        busy = engine is not None and not engine.waiting  # who waits for another worker cannot be blamed
        progress = sum(engine.progress for engine in list(loop.engines.values()))
        try:
            channel.send(messages.encode(Heartbeat(progress, busy)))
        except OSError:
            os._exit(3)
        time.sleep(BEAT_S)
