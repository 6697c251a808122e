"""A worker process: one loop over the engines of a device. It gets steps, runs them and answers; it decides nothing."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence

from paceline.core.work import Engine
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
Load = Callable[[Callable[[int, int], None]], Engine]  # gets a progress callback (bytes done, bytes in all)


def serve(descriptor: int, loads: Sequence[Load], resident: Sequence[bool] = (), check: bool = True) -> int:
    """Loads the engines and runs steps for the front end, whose socket is `descriptor`, until told to stop.

    `resident`: which of them stay loaded, all by default; with `check` the others are loaded once, to see whether they
    can be. Returns the process's exit code: 1 where no engine can be loaded. A front end that is gone ends the worker.
    """
    os.nice(YIELDS)
    channel = WorkerEnd(descriptor)
    loop = Loop(channel, loads)
    threading.Thread(target=beat, args=(channel, loop), daemon=True).start()
    for model, stays in enumerate(resident or [True] * len(loads)):
        if stays or check:
            loop.load(model)
        if not stays:
            loop.unload(model)
    if not loop.loaded:
        return 1
    gc.collect()
    gc.freeze()  # what is loaded stays: collections in the middle of a step need not look at it
    loop.run()
    return 0


class Loop:
    """Receives, steps, answers."""

    def __init__(self, channel: WorkerEnd, loads: Sequence[Load]) -> None:
        self.channel, self.loads = channel, loads
        self.engines: dict[int, Engine] = {}  # those that are loaded
        self.loaded = 0  # ever
        self.stepping: Engine | None = None

    def load(self, model: int) -> None:
        """Any thread may."""

        def progress(done: int, total: int) -> None:
            self.channel.send(messages.encode(Loading(model, done, total)))

        begin = time.perf_counter()
        try:
            engine = self.loads[model](progress)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            bad_input = isinstance(error, ValueError | FileNotFoundError)
            self.channel.send(messages.encode(Failed(model, str(error) or type(error).__name__, bad_input)))
        else:
            self.engines[model] = engine
            self.loaded += 1
            self.channel.send(messages.encode(Ready(model, engine.info, time.perf_counter() - begin)))

    def unload(self, model: int) -> None:
        engine = self.engines.pop(model, None)
        if engine:
            engine.release()

    def run(self) -> None:
        while (frame := self.channel.receive()) is not None:
            match messages.decode_to_worker(frame):
                case Step() as step:
                    self.step(step)
                case GiveBack(model, blocks):
                    self.engines[model].give_back(blocks)
                case messages.Load(model):
                    threading.Thread(target=self.load, args=(model,), daemon=True).start()
                case Unload(model):
                    self.unload(model)
                case Shutdown():
                    return

    def step(self, message: Step) -> None:
        model, batch = message.model, message.batch
        engine = self.stepping = self.engines[model]
        outputs, forward_s, sample_s = engine.step(message.new, message.slices, message.dropped)
        self.stepping = None
        if engine.answers:
            self.channel.send(messages.encode(StepDone(model, batch, outputs, forward_s, sample_s, engine.draft_s)))
        elif engine.first:
            self.channel.send(messages.encode(Advanced(model, batch)))


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
