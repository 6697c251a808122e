"""The running fleet: groups of workers with their models, one controller over all, one door for requests."""

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TextIO

from paceline.batching.config import WHOLE_PROMPTS, SchedulerConfig
from paceline.controller import FULL, Controller, GroupConfig
from paceline.core import record
from paceline.core.batch import Batch
from paceline.core.cluster import Parallel
from paceline.core.events import Cancel, Event, Input, Lost, Retire, Submit, Unreachable
from paceline.core.request import NO_SLO, SLO, Request, SamplingParams
from paceline.core.work import WATERMARK
from paceline.runtime.api import (
    GoalUnreachable,
    GroupLoad,
    ModelStatus,
    Observer,
    Overloaded,
    Sink,
    StepRecord,
    TooLong,
    Unavailable,
)
from paceline.runtime.driver import Driver
from paceline.runtime.group import ModelGroup, ServedModel
from paceline.runtime.launch import Launcher
from paceline.runtime.process import Local
from paceline.runtime.sequence import BlockHasher, RunningSequence
from paceline.runtime.workers import Command, Workers

WATCH_S = 0.1
PACE_S = 60.0  # completions older than this say nothing about now


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Limits that hold for every model."""

    token_budget: int = 512
    max_batch: int = 256
    max_waiting: int = 1024
    watermark: float = WATERMARK
    policy: str = "paceline"
    async_scheduling: bool = False  # where a worker has its device alone, steps are composed ahead of their last tokens
    record: Path | None = None  # log of the controller's inputs, for `replay`


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Devices of one shape, the models that they serve, and how to start the worker of each."""

    models: tuple[ServedModel, ...]
    command: Command
    parallel: Parallel = Parallel()
    launcher: Launcher = field(default_factory=Local)


class LocalFleet:
    """Models on workers of this front end (`runtime.api.Fleet`). Use as an async context manager."""

    def __init__(
        self,
        groups: Iterable[WorkerGroup],
        config: FleetConfig,
        on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> None:
        self.config = config
        self.observers: list[Observer] = []
        self.draining = False
        self.driver: Driver | None = None
        self.take_over: Callable[[int], Awaitable[None]] | None = None  # from workers that are gone for good
        self.workers: list[Workers] = []
        self.groups: list[ModelGroup] = []  # as the controller counts them
        self.sequences: dict[str, RunningSequence] = {}
        self._hosts: dict[str, list[ModelGroup]] = {}
        self._on_progress = on_progress
        for one in groups:
            for group in self._join(one):
                self._hosts.setdefault(group.config.name, []).append(group)
        self._ids = count(1)
        self._finished: deque[float] = deque(maxlen=64)
        self._idle = asyncio.Event()
        self._moving = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._takeovers: set[asyncio.Task[None]] = set()
        self._leaving: dict[Workers, asyncio.Task[None]] = {}  # finish what they run
        self._log = contextlib.ExitStack()

    # Life

    async def __aenter__(self) -> "LocalFleet":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts the workers and returns when each is ready or has failed. Raises OSError for `record`."""
        recorder = self._recorder()
        self._watcher = asyncio.create_task(self._watch())
        await asyncio.gather(*(workers.start() for workers in self.workers))
        await asyncio.gather(*(group.settled.wait() for group in self.groups))
        for group in self.groups:
            self._fit(group)
        controller = Controller(self._group_config(group) for group in self.groups)
        self.driver = Driver(controller, self._execute, self._notice, time.monotonic, recorder)
        for group in self.groups:
            self._attach(group)

    def _attach(self, group: ModelGroup) -> None:
        """The controller has it."""
        assert self.driver is not None
        group.driver = self.driver
        if group.state not in ("ready", "cold"):  # lost again already, or failed
            self.driver.post(Lost(group.index, group.state == "failed"))

    def _join(self, one: WorkerGroup) -> list[ModelGroup]:
        """Its models, on workers that are yet to be started."""
        workers, joined = Workers(one.parallel, one.command, one.launcher), list[ModelGroup]()
        workers.is_replaced = self._is_replaced
        self.workers.append(workers)
        for number, model in enumerate(one.models):
            at = len(self.groups), number
            group = ModelGroup(*at, model, workers, self.sequences, self._on_step, self._on_progress)
            self.groups.append(group)
            workers.guests.append(group)
            joined.append(group)
        return joined

    async def move(self, groups: Iterable[WorkerGroup], leaving: Iterable[int], room: bool = True) -> None:
        """Starts these groups, and when they are ready has others leave, by their numbers in `workers`.

        Those finish what they run, and what waits there moves: no request fails. Where there is no `room` for both,
        the others end before, and all that they have moves.

        Raises RuntimeError when one of the new groups cannot be loaded; then nothing changes. A model that has failed
        wherever it is may fail again.
        """
        assert self.driver is not None
        async with self._moving:
            broken = [name for name, hosts in self._hosts.items() if all(group.state == "failed" for group in hosts)]
            old = [self.workers[number] for number in leaving]
            gave = [one for one in old if one.state in ("ready", "restarting") and not one.gone and not room]
            await asyncio.gather(*(workers.make_way() for workers in gave))
            numbers = len(self.workers), len(self.groups)
            new = [group for one in groups for group in self._join(one)]
            started = self.workers[numbers[0] :]
            await asyncio.gather(*(workers.start() for workers in started))
            await asyncio.gather(*(group.settled.wait() for group in new))
            failed = [group for group in new if group.state == "failed" and group.config.name not in broken]
            if failed:
                del self.workers[numbers[0] :], self.groups[numbers[1] :]
                await asyncio.gather(*(workers.stop() for workers in started))
                for workers in gave:
                    workers.come_back()
                raise RuntimeError(f"{failed[0].config.name}: {failed[0].reason}")
            for group in new:
                self._fit(group)
                number = self.driver.controller.add(self._group_config(group))
                assert number == group.index
                self._attach(group)
                self._hosts.setdefault(group.config.name, []).append(group)
            self._retire(old)

    async def left(self) -> None:
        """Returns when all groups that a move had leave have ended."""
        while self._leaving:
            await asyncio.wait(self._leaving.values())

    def _retire(self, old: Seq[Workers]) -> None:
        """They leave. What waits at workers that are gone already fails where no other group has room for it."""
        assert self.driver is not None
        leaving = [group for group in self.groups if group.workers in old]
        for group in leaving:
            self._hosts[group.config.name].remove(group)
            self.driver.post(Retire(group.index))
        self.driver.flush()
        for group in leaving:
            for seq in group.own() if group.workers.gone else ():
                group.fail(seq, f"{group.workers.gone}; no other group has room for this request")
        for workers in old:
            self._leaving[workers] = asyncio.create_task(self._end(workers))

    async def _end(self, workers: Workers) -> None:
        await asyncio.gather(*(group.retired.wait() for group in self.groups if group.workers is workers))
        await workers.stop()
        del self._leaving[workers]

    def _is_replaced(self, workers: Workers) -> bool:
        """Whether somebody takes over from workers that are gone for good; their sequences wait for it."""
        if self.take_over is None or self.driver is None or workers in self._leaving:
            return False
        task = asyncio.create_task(self._replace(workers, self.take_over))
        self._takeovers.add(task)
        task.add_done_callback(self._takeovers.discard)
        return True

    async def _replace(self, workers: Workers, take_over: Callable[[int], Awaitable[None]]) -> None:
        try:
            await take_over(self.workers.index(workers))
        except (RuntimeError, ValueError, OSError) as error:
            workers.give_up(f"{workers.gone}, and nothing takes over: {error}")

    def _fit(self, group: ModelGroup) -> None:
        """What a sequence can have there when it is alone."""
        if group.info:
            config = self._group_config(group).scheduler
            usable = (config.num_blocks - config.watermark_blocks) * group.info.block_size
            group.info = replace(group.info, context=min(group.info.context, usable))

    async def drain(self) -> None:
        self.draining = True
        while self.sequences:
            self._idle.clear()
            await self._idle.wait()

    async def stop(self) -> None:
        """Ends the workers; sequences still running fail."""
        self.draining, self.take_over = True, None
        if self._watcher:
            self._watcher.cancel()
        tasks = [*self._takeovers, *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for group in self.groups:
            for seq in group.own():
                group.fail(seq, "the server is shutting down")
        await asyncio.gather(*(workers.stop() for workers in self.workers))
        self._log.close()

    def _group_config(self, group: ModelGroup) -> GroupConfig:
        limits = SchedulerConfig(
            token_budget=self.config.token_budget, max_batch=self.config.max_batch, watermark=self.config.watermark
        )
        if group.info:
            own, most = group.info.num_blocks, group.info.most_blocks
            limits = replace(limits, block_size=group.info.block_size, num_blocks=own, most_blocks=most)
        else:  # it failed: there is nothing to schedule
            limits = replace(limits, num_blocks=0)
        if group.config.one_shot:
            limits = limits.of_texts()
        return GroupConfig(
            (group.config.name,),
            limits,
            WHOLE_PROMPTS if group.config.one_shot else self.config.policy,
            max_waiting=self.config.max_waiting,
            budget=group.config.budget,
            predict=group.config.predict,
            lookahead=group.config.lookahead,
            pipeline=group.workers.parallel.pipeline,
            ahead=int(self._goes_ahead(group)),
            admission=True,
            slots=group.config.slots,
            resident=group.config.resident,
            load_s=group.load_s,
            device=self.workers.index(group.workers),
            block_bytes=group.info.block_bytes if group.info else (),
        )

    def _goes_ahead(self, group: ModelGroup) -> bool:
        """Not where others than the one that samples would have to be told of the tokens."""
        alone = group.workers.parallel.devices == 1 and not group.config.one_shot
        return self.config.async_scheduling and alone

    async def _watch(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(WATCH_S)
            late = max(0.0, time.monotonic() - begin - 2 * WATCH_S)  # this process stood still, or the whole machine
            for workers in self.workers:
                workers.watch(late)

    # Requests

    def submit(
        self,
        model: str,
        tokens: Seq[int],
        params: SamplingParams,
        sink: Sink,
        *,
        namespace: str = "",
        slo: SLO = NO_SLO,
        admitted: bool = False,
        arrival: float | None = None,
    ) -> str:
        hosts = self._hosts[model]
        if (self.draining and not admitted) or self.driver is None:
            raise Unavailable("the server is shutting down" if self.draining else "the server is starting")
        able = [group for group in hosts if group.state != "failed" and group.info]
        if not able:
            lost = all(group.state == "failed" for group in hosts)
            raise Unavailable(f"model {model!r} is not available: {hosts[0].reason}", None if lost else 30)
        group = max(able, key=lambda group: group.info.context)  # type: ignore[union-attr]
        assert group.info
        if len(tokens) + (0 if group.config.one_shot else params.max_tokens) > group.info.context:
            raise TooLong(
                f"{len(tokens)} prompt tokens and max_tokens={params.max_tokens} exceed the {group.info.context} "
                f"tokens that model {model!r} can hold here"
            )
        if slo.ttft is None:
            slo = replace(slo, ttft=group.config.slo.ttft)
        handle = next(self._ids)
        hasher = BlockHasher(f"{model}/{namespace}", group.info.block_size)
        arrival = time.monotonic() if arrival is None else arrival
        seq = RunningSequence(f"{handle}", handle, tokens, params, sink, group.config.eos_ids, hasher, arrival)
        draft = max(0 if one.undrafted else one.config.max_draft_tokens for one in able)
        if params.max_draft_tokens is not None:
            draft = min(draft, params.max_draft_tokens)
        prefix = () if group.config.one_shot else seq.prefix
        request = Request(seq.id, len(tokens), params.max_tokens, arrival, model, slo, prefix, draft, params.kind)
        self.sequences[seq.id] = seq
        self.driver.post(Submit(request, admitted))
        refusal = next((e for e in self.driver.flush() if e.kind == "rejected" and e.request == seq.id), None)
        if refusal:
            del self.sequences[seq.id]
            if refusal.detail == FULL:
                raise Overloaded(self._retry_after())
            if isinstance(refusal.detail, Unreachable):
                raise GoalUnreachable(*refusal.detail)
            raise TooLong(str(refusal.detail))
        return seq.id

    def full(self, model: str) -> bool:
        return self.driver is not None and self.driver.controller.full(model)

    def cancel(self, id: str) -> None:
        seq = self.sequences.pop(id, None)
        if seq and self.driver:
            seq.leave_worker()
            self.driver.post(Cancel(id))

    def _retry_after(self) -> float:
        """Seconds until the queue has a place, by the pace of the last minute's completions."""
        now = time.monotonic()
        recent = [then for then in self._finished if now - then < PACE_S]
        pace = (now - recent[0]) / len(recent) if recent else 5.0
        return max(1.0, pace)

    # State

    def status(self) -> list[ModelStatus]:
        """Of each model at the group that is best off."""
        order = ("ready", "cold", "restarting", "loading", "stopped", "failed")
        best = [min(hosts, key=lambda group: order.index(group.state)) for hosts in self._hosts.values()]
        return [ModelStatus(g.config.name, g.state, g.reason or g.workers.reason, g.info) for g in best]

    def hosts(self, model: str) -> list[tuple[int, Parallel]]:
        """The groups of workers that have it, and their shapes."""
        return [(self.workers.index(group.workers), group.workers.parallel) for group in self._hosts[model]]

    def load(self) -> list[GroupLoad]:
        groups = self.driver.controller.groups if self.driver else []
        return [
            GroupLoad(
                g.scheduler.num_waiting,
                g.scheduler.num_running,
                g.scheduler.num_blocks - g.scheduler.num_free_blocks,
                g.scheduler.num_blocks,
                g.config.models[0],
                own.loads,
                own.loads_s,
                own.info.weight_bytes if own.info else 0,
            )
            for g, own in zip(groups, self.groups, strict=False)
        ]

    @property
    def healthy(self) -> bool:
        return self._all_that_live(lambda group: group.responsive or group.state in ("loading", "restarting"))

    @property
    def ready(self) -> bool:
        return not self.draining and self.driver is not None and self._all_that_live(lambda g: g.responsive)

    def _all_that_live(self, is_well: Callable[[Workers], bool]) -> bool:
        """Every model has a group that is well. One that failed for good does not take the others down; `status` tells
        of it."""
        alive = [[g.workers for g in hosts if g.state != "failed"] for hosts in self._hosts.values()]
        return any(alive) and all(any(map(is_well, workers)) for workers in alive if workers)

    # From the driver and the groups

    def _execute(self, batch: Batch) -> None:
        for group, blocks in batch.given_back:
            self.groups[group].give_back(blocks)
        mine = self.groups[batch.group]
        mine.execute(batch, any(one.under_way for one in self.groups if one.workers is not mine.workers))

    def _notice(self, events: list[Event]) -> None:
        for event in events:
            if event.kind == "finished":
                self._finished.append(event.time)
            elif event.kind == "load":
                self.groups[event.group].load()
            elif event.kind == "unload":
                self.groups[event.group].unload()
            elif event.kind == "retired":
                self.groups[event.group].retired.set()
        for observer in self.observers:
            observer.on_events(events)
        if not self.sequences:
            self._idle.set()

    def _on_step(self, step: StepRecord) -> None:
        for observer in self.observers:
            observer.on_step(step)

    def _recorder(self) -> Callable[[float, list[Input]], None] | None:
        if self.config.record is None:
            return None
        path = self.config.record
        file: TextIO | None = path.open("w")

        def close() -> None:
            with contextlib.suppress(OSError):
                if file:
                    file.close()

        def write(now: float, inputs: list[Input]) -> None:
            nonlocal file
            if file is None:
                return
            try:
                print(record.dump(now, inputs), file=file)
            except OSError as error:  # the disk is full: requests are more than their log
                close()
                file = None
                print(f"paceline: record: {path}: {error.strerror}; nothing more is recorded", file=sys.stderr)

        self._log.callback(close)
        return write
