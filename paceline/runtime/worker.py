"""A worker process: one engine, one loop. It gets steps, runs them and answers; it decides nothing."""

import gc
import os
import threading
import time
from collections.abc import Callable

from paceline.core.work import Engine
from paceline.runtime import messages
from paceline.runtime.channel import WorkerEnd
from paceline.runtime.messages import Failed, Heartbeat, Loading, Ready, Shutdown, StepDone

BEAT_S = 0.2
Load = Callable[[Callable[[int, int], None]], Engine]  # gets a progress callback (bytes done, bytes in all)


def serve(descriptor: int, load: Load) -> int:
    """Loads the engine and runs steps for the front end, whose socket is `descriptor`, until told to stop.

    Returns the process's exit code. A front end that is gone ends the worker too.
    """
    channel = WorkerEnd(descriptor)

    def progress(done: int, total: int) -> None:
        channel.send(messages.encode(Loading(done, total)))

    loop = Loop(channel)
    threading.Thread(target=beat, args=(channel, loop), daemon=True).start()
    try:
        loop.engine = load(progress)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        bad_input = isinstance(error, ValueError | FileNotFoundError)
        channel.send(messages.encode(Failed(str(error) or type(error).__name__, bad_input)))
        return 1
    gc.collect()
    gc.freeze()  # what is loaded stays: collections in the middle of a step need not look at it
    channel.send(messages.encode(Ready(loop.engine.info)))
    loop.run()
    return 0


class Loop:
    """Receives, steps, answers."""

    def __init__(self, channel: WorkerEnd) -> None:
        self.channel = channel
        self.engine: Engine | None = None  # while it loads
        self.busy = False

    def run(self) -> None:
        assert self.engine is not None
        while (frame := self.channel.receive()) is not None:
            message = messages.decode_to_worker(frame)
            if isinstance(message, Shutdown):
                return
            self.busy = True
            outputs, forward_s, sample_s = self.engine.step(message.new, message.slices, message.dropped)
            self.busy = False
            done = StepDone(message.batch, outputs, forward_s, sample_s, self.engine.draft_s)
            self.channel.send(messages.encode(done))


def beat(channel: WorkerEnd, loop: Loop) -> None:
    """Tells several times a second that the process lives and how far its steps are; ends it without a front end."""
    while True:
        progress = loop.engine.progress if loop.engine else 0
        try:
            channel.send(messages.encode(Heartbeat(progress, loop.busy)))
        except OSError:
            os._exit(3)
        time.sleep(BEAT_S)
