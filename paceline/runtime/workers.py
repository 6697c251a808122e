"""The worker processes of one group of devices: started together, watched, and started again when one is lost."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline.core.cluster import Parallel
from paceline.core.work import EngineInfo
from paceline.runtime import messages
from paceline.runtime.launch import Launcher, Process
from paceline.runtime.messages import Advanced, Failed, FromWorker, Loading, Ready, Step, StepDone, ToWorker, Unload

HANG_S = 1.7  # workers of which one has not moved for so long are killed and started again: seen within 2 s
LOST_S = 10.0  # and such that owe a step of which none has computed anything for so long
LOAD_HANG_S = 60.0  # one that loads has given no sign of life for so long
LOAD_STUCK_S = 600.0  # or none of them has said how far it is; the first of all compiles kernels meanwhile
AGAIN_S = 1.0  # after which it is tried again where the system has no process, file or memory for them
MAX_RESTARTS = 5  # in a row, without a step in between, and since a request was to blame
MOST_RESTARTS = 20  # in a row, whoever is to blame
NO_ROOM_S = 30.0  # without room for so long: a cluster's other nodes have some in seconds, a new one comes in minutes


@dataclass(frozen=True, slots=True)
class Seat:
    """What a worker is told when it is started."""

    number: int  # in its group
    meeting: str  # a URL at which the group's workers find each other; empty: it is alone
    blocks: tuple[tuple[int, int | None] | None, ...]  # KV blocks by model, own and most, as workers before had them
    resident: tuple[bool, ...]  # which models it is to keep
    check: bool  # the others are to be loaded once, to see whether they can be


Command = Callable[[Seat], list[str]]  # arguments to the Python interpreter


class Guest(Protocol):
    """A model on these workers, as they see it: told of what concerns it (`runtime.group.ModelGroup`)."""

    info: EngineInfo | None  # of what answers for the group; sizes in bytes are sums over its workers
    resident: bool  # it is to be loaded
    load_s: float  # seconds that it took last

    def loading(self, done: int, total: int) -> None: ...
    def ready(self) -> None: ...
    def leave(self, for_good: bool = False) -> None: ...  # all guests, before either of the next two
    def failed(self, reason: str, bad_input: bool) -> None: ...
    def lost(self, killed: bool) -> bool: ...  # whether a request is to blame
    def stepped(self, message: StepDone) -> None: ...
    def advanced(self, batch: int) -> None: ...


class Workers:
    """All of a group, or none: what one has lost the others cannot go on without."""

    def __init__(self, parallel: Parallel, command: Command, launcher: Launcher) -> None:
        self.parallel, self.command, self.launcher = parallel, command, launcher
        self.guests: list[Guest] = []
        self.latest: int | None = None  # model of the step sent last
        self.flying: dict[tuple[int, int], Any] = {}  # by model and batch, as composed (`runtime.group.Flight`)
        self.state = "loading"  # ready, restarting, failed, stopped
        self.gone = ""  # why they do not come back
        self.is_replaced: Callable[[Workers], bool] = lambda workers: False  # asked when they are gone for good
        self._processes: list[Process] = []
        self._infos: list[dict[int, EngineInfo]] = []  # by model, of each process
        self._failed: set[int] = set()  # models
        self._awaited: set[int] = set()  # models that have to be loaded before any step
        self._present: set[int] = set()  # models that were, since the start
        self._restarts, self._allowed = 0, MAX_RESTARTS
        self._owed, self._asked = 0, 0.0  # steps without an answer; when the last was sent
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        started: list[Process] = []
        self._processes = started  # others, as soon as one is lost and all are started again
        try:
            if (meeting := await self._meeting()) is None:
                return
            infos = [guest.info for guest in self.guests]
            blocks = tuple((info.num_blocks, info.most_blocks) if info else None for info in infos)
            resident = tuple(guest.resident for guest in self.guests)
            unseen = any(info is None for model, info in enumerate(infos) if model not in self._failed)
            check = unseen or not any(resident)  # of workers that load nothing nobody hears when they are there
            self._present.clear()
            self._owed = 0
            self._awaited = {m for m, stays in enumerate(resident) if (stays or check) and m not in self._failed}
            for number in range(self.parallel.devices):
                command = self.command(Seat(number, meeting, blocks, resident, check))
                started.append(self.launcher.process(number, command, self._receive, self._exited))
            self._infos = [{} for _ in self.guests]
            for process in started:
                if self._processes is started:
                    await process.start()
        except OSError as error:
            if self._processes is started:
                self._lost(f"the worker cannot be started ({error})", AGAIN_S)

    async def stop(self) -> None:
        self.state = "stopped"
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(process.stop() for process in self._processes))
        self.launcher.close()

    async def make_way(self) -> None:
        """Ends their processes, until they `come_back`; their models have lost them, and wait."""
        self.gone = "others need the devices"
        await asyncio.gather(*self._tasks)
        processes, self._processes = self._processes, []
        await _end(processes)
        self._lose(self.gone, killed=False)

    def come_back(self) -> None:
        self.gone = ""
        self._task(self.start())

    def send(self, message: ToWorker) -> None:
        if isinstance(message, Step):
            self._owed, self._asked, self.latest = self._owed + 1, time.monotonic(), message.model
        frame = messages.encode(message)
        for process in self._processes:
            process.send(frame)

    @property
    def responsive(self) -> bool:
        return self.state == "ready" and all(process.pulse.responsive for process in self._processes)

    @property
    def reason(self) -> str:
        """Why they are not there, as far as is known; of those that failed their guests know."""
        return self.gone or self.launcher.reason if self.state == "restarting" else ""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def watch(self, late: float) -> None:
        """Called several times a second, or so many seconds later: workers that hang are killed, and start again."""
        limit = HANG_S if self.state == "ready" else LOAD_HANG_S
        for process in self._processes:
            process.pulse.forgive(late)
        self._asked += late
        hangs = any(process.pid > 0 and process.pulse.silent_s > limit for process in self._processes)
        idle_s = min((process.pulse.idle_s if process.pid > 0 else 0.0 for process in self._processes), default=0.0)
        stuck = idle_s > LOAD_STUCK_S and self.state != "ready"
        if hangs or stuck or (self._owed and min(idle_s, time.monotonic() - self._asked) > LOST_S):
            self._kill()

    async def _meeting(self) -> str | None:
        """Where they find each other, as soon as there is room for all; None: stopped meanwhile."""
        begin = time.monotonic()
        while (meeting := await self.launcher.meeting(self.parallel.devices)) is None:
            if self.state == "stopped" or self.gone:
                return None
            if self.launcher.reason:  # to wait for room is no crash
                self._restarts = 0
            if not self.launcher.lost:
                begin = time.monotonic()
            if time.monotonic() - begin < NO_ROOM_S:
                continue
            reason = f"{self.launcher.reason}, for {NO_ROOM_S:g} s"
            if self.state == "loading":
                self.give_up(reason)
            elif not self._replaced(reason):  # a node may come back
                continue
            return None
        return meeting

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _exited(self, process: Process, code: int) -> None:
        if process in self._processes:
            self._lost(f"the worker ended with code {code}")

    def _lost(self, reason: str, after_s: float = 0.0) -> None:
        """One is gone, and with it all: they are started again, unless that was too often."""
        if self.state in ("failed", "stopped"):
            return
        gone, self._processes = self._processes, []
        self._restarts += 1
        loaded = any(guest.info for guest in self.guests)
        if not loaded or self._restarts > min(self._allowed, MOST_RESTARTS):
            self._task(_end(gone))
            reason = f"{reason} {self._restarts} times in a row"
            if not self._replaced(reason):
                self.give_up(reason)
            return
        self.state = "restarting"
        if self._tell_lost():
            self._allowed = self._restarts + MAX_RESTARTS
        self._task(self._start_again(gone, after_s))

    async def _start_again(self, gone: Sequence[Process], after_s: float) -> None:
        await _end(gone)
        await asyncio.sleep(after_s)
        if self.state == "restarting" and not self.gone:
            await self.start()

    def _replaced(self, reason: str) -> bool:
        """They are gone for good: whether others take over. Then their models have lost them, and wait."""
        if not any(guest.info for guest in self.guests) or not self.is_replaced(self):
            return False
        self._lose(reason)
        return True

    def _lose(self, reason: str, killed: bool = True) -> None:
        self.state, self.gone = "restarting", reason
        self._tell_lost(killed)
        self.launcher.close()

    def _tell_lost(self, killed: bool = True) -> bool:
        """Whether a request is to blame."""
        return any([guest.lost(killed) for guest in self._leave()])

    def _leave(self, for_good: bool = False) -> list[Guest]:
        """All models that were there."""
        there = [guest for model, guest in enumerate(self.guests) if model not in self._failed]
        for guest in there:
            guest.leave(for_good)
        return there

    def give_up(self, reason: str) -> None:
        """They are gone for good, and nobody takes over."""
        if self.state == "stopped":
            return
        self.state = "failed"
        for guest in self._leave(for_good=True):
            guest.failed(reason, False)

    def _task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):  # ours: better that nobody waits for them
            context = {"message": "workers could not be started or ended", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)
            self.give_up(f"{type(error).__name__}: {error}")

    def _receive(self, process: Process, message: FromWorker) -> None:
        if process not in self._processes:  # what those said that are being ended does not count
            return
        match message:
            case StepDone():
                self._restarts, self._allowed, self._owed = 0, MAX_RESTARTS, self._owed - 1
                self.guests[message.model].stepped(message)
            case Advanced(model, batch):
                self.guests[model].advanced(batch)
            case Loading(model, done, total):
                if process is self._processes[-1]:
                    self.guests[model].loading(done, total)
            case Ready(model, info, load_s):
                self._loaded(model, self._processes.index(process), info, load_s)
            case Failed(model, reason, bad_input):
                if model not in self._failed:
                    self._failed.add(model)
                    self.guests[model].leave(for_good=True)
                    self.guests[model].failed(reason, bad_input)
                self.send(Unload(model))  # others of the group may have it
                self._awaited.discard(model)
                self._see_whether_ready()

    def _loaded(self, model: int, number: int, info: EngineInfo, load_s: float) -> None:
        infos, guest = self._infos[model], self.guests[model]
        if model in self._failed:  # at another one
            self.send(Unload(model))
            return
        infos[number] = info
        if len(infos) < self.parallel.devices:
            return
        sizes = ("weight_bytes", "kv_bytes", "planned_bytes")
        all_of = [infos[number] for number in range(self.parallel.devices)]
        whole = {size: sum(getattr(one, size) for one in all_of) for size in sizes}
        known = guest.info or replace(info, **whole, **_lending(all_of))
        guest.info = replace(known, undrafted=all_of[0].undrafted)
        infos.clear()
        guest.load_s = load_s
        self._awaited.discard(model)
        self._present.add(model)
        if self.state == "ready":
            guest.ready()
        else:
            self._see_whether_ready()

    def _see_whether_ready(self) -> None:
        """They are when every model that is to be there is loaded by all or has failed."""
        if self.state in ("failed", "stopped"):
            return
        if len(self._failed) == len(self.guests):
            self.state, gone, self._processes = "failed", self._processes, []
            self._task(_end(gone))
            return
        if self._awaited or self.state == "ready":
            return
        self.state = "ready"
        for model in self._present:
            self.guests[model].ready()


def _lending(infos: Sequence[EngineInfo]) -> dict[str, Any]:
    """Of a group: all of its workers lend, or it does not."""
    if not all(info.block_bytes for info in infos):
        return {"most_blocks": None, "block_bytes": ()}
    most = min(info.most_blocks or info.num_blocks for info in infos)
    return {"most_blocks": most, "block_bytes": tuple(size for info in infos for size in info.block_bytes)}


async def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    await asyncio.gather(*(process.stop() for process in processes))
