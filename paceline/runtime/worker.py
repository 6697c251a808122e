"""A worker process: one loop over the engines of a device. It gets steps, runs them and answers; it decides nothing."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence

from paceline.core.work import Engine
from paceline.runtime import messages
from paceline.runtime.channel import WorkerEnd
from paceline.runtime.messages import Advanced, Failed, Heartbeat, Loading, Ready, Shutdown, StepDone

BEAT_S = 0.2
Load = Callable[[Callable[[int, int], None]], Engine]  # gets a progress callback (bytes done, bytes in all)


def serve(descriptor: int, loads: Sequence[Load]) -> int:
    """Loads the engines and runs steps for the front end, whose socket is `descriptor`, until told to stop.

    Returns the process's exit code: 1 where no engine can be loaded. A front end that is gone ends the worker too.
    """
    channel = WorkerEnd(descriptor)
    loop = Loop(channel)
    threading.Thread(target=beat, args=(channel, loop), daemon=True).start()
    for model, load in enumerate(loads):

        def progress(done: int, total: int, model: int = model) -> None:
            channel.send(messages.encode(Loading(model, done, total)))

        try:
            engine = loop.engines[model] = load(progress)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            bad_input = isinstance(error, ValueError | FileNotFoundError)
            channel.send(messages.encode(Failed(model, str(error) or type(error).__name__, bad_input)))
        else:
            channel.send(messages.encode(Ready(model, engine.info)))
    if not loop.engines:
        return 1
    gc.collect()
    gc.freeze()  # what is loaded stays: collections in the middle of a step need not look at it
    loop.run()
    return 0


class Loop:
    """Receives, steps, answers."""

    def __init__(self, channel: WorkerEnd) -> None:
        self.channel = channel
        self.engines: dict[int, Engine] = {}  # those that are loaded
        self.stepping: Engine | None = None

    def run(self) -> None:
        while (frame := self.channel.receive()) is not None:
            message = messages.decode_to_worker(frame)
            if isinstance(message, Shutdown):
                return
            model, batch = message.model, message.batch
            engine = self.stepping = self.engines[model]
            outputs, forward_s, sample_s = engine.step(message.new, message.slices, message.dropped)
            self.stepping = None
            if engine.answers:
                done = StepDone(model, batch, outputs, forward_s, sample_s, engine.draft_s)
                self.channel.send(messages.encode(done))
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
