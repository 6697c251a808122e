"""A worker process: one engine, one loop. It gets steps, runs them and answers; it decides nothing."""

import gc
import os
import threading
import time
from collections.abc import Callable

import zmq

from paceline.core.work import Engine
from paceline.runtime import messages
from paceline.runtime.messages import Failed, Heartbeat, Loading, Ready, Shutdown, StepDone

BEAT_S = 0.2
Load = Callable[[Callable[[int, int], None]], Engine]  # gets a progress callback (bytes done, bytes in all)


def serve(address: str, load: Load) -> int:
    """Connects to the front end at `address` (and `address`-beat), loads the engine, runs steps until told to stop.

    Returns the process's exit code. A front end that is gone ends the worker too.
    """
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    watch_parent()

    def progress(done: int, total: int) -> None:
        socket.send(messages.encode(Loading(done, total)))

    loop = Loop(socket)
    threading.Thread(target=beat, args=(context, address + "-beat", loop), daemon=True).start()
    try:
        loop.engine = load(progress)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        bad_input = isinstance(error, ValueError | FileNotFoundError)
        socket.send(messages.encode(Failed(str(error) or type(error).__name__, bad_input)))
        context.destroy(linger=1000)
        return 1
    gc.collect()
    gc.freeze()  # what is loaded stays: collections in the middle of a step need not look at it
    socket.send(messages.encode(Ready(loop.engine.info)))
    loop.run()
    context.destroy(linger=1000)
    return 0


class Loop:
    """Receives, steps, answers."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.engine: Engine | None = None  # while it loads
        self.busy = False

    def run(self) -> None:
        assert self.engine is not None
        while True:
            message = messages.decode_to_worker(self.socket.recv())
            if isinstance(message, Shutdown):
                return
            self.busy = True
            outputs, forward_s, sample_s = self.engine.step(message.new, message.slices, message.dropped)
            self.busy = False
            self.socket.send(messages.encode(StepDone(message.batch, outputs, forward_s, sample_s)))


def beat(context: zmq.Context[zmq.Socket[bytes]], address: str, loop: Loop) -> None:
    """Tells several times a second that the process lives and how far its steps are."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    while True:
        try:
            progress = loop.engine.progress if loop.engine else 0
            socket.send(messages.encode(Heartbeat(progress, loop.busy)), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the front end is slow; the next beat says the same
        except zmq.ZMQError:
            return  # the context is closed
        time.sleep(BEAT_S)


def watch_parent() -> None:
    """Ends this process when its parent dies: stdin is a pipe that the parent never writes to."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(3)

    threading.Thread(target=wait, daemon=True).start()
