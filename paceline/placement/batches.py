"""One-shot requests in batches (AlpaServe, section 5): a queue for each model, shared by the groups that have it.

A request goes to the group that AlpaServe's rule chooses if that group's first stage is idle, and waits otherwise. A
group whose first stage becomes idle takes the model whose first request has waited longest: as many of its requests as
make a batch size, as long as the first one still meets its goal. Requests that cannot meet theirs even alone are
dropped when their turn comes. What is added to the prediction (`Timing.overhead`) delays a batch, while the prediction
adds it behind the stages: so does the code that this is compared with.
"""

from collections import deque
from heapq import heappop, heappush

import numpy as np

from paceline.placement.dispatch import enter, passed
from paceline.placement.problem import Bools, Floats, Ints, Problem

SIZES = (1, 2, 4, 8, 16)


def replay_batches(problem: Problem, shape: Ints, member: Bools) -> tuple[Floats, Ints, Bools]:
    """Finish of each request (its arrival where it is rejected), the group that took or dropped it (-1: nobody has the
    model), and whether it met its goal."""
    groups = _Groups(problem, shape, member)
    for index, (now, m) in enumerate(zip(problem.times.tolist(), problem.models.tolist(), strict=True)):
        groups.until(now)
        hosts = np.flatnonzero(member[:, m])
        if len(hosts):
            groups.queues[m].append(index)
            g = int(min(hosts, key=lambda g: groups.clocks[g, problem.stages[shape[g]] - 1]))
            if now >= groups.clocks[g, 0]:
                groups.launch(g, m, now)
    groups.until(np.inf)
    return groups.finish, groups.owner, groups.good


class _Groups:
    def __init__(self, problem: Problem, shape: Ints, member: Bools) -> None:
        self.problem, self.shape, self.member = problem, shape, member
        self.queues: list[deque[int]] = [deque() for _ in problem.tables]
        self.clocks = np.zeros((len(shape), problem.latency.shape[2]))
        self.idle: list[tuple[float, int]] = []  # when a group's first stage becomes idle
        self.finish, self.good = problem.times.copy(), np.zeros(len(problem.times), np.bool_)
        self.owner = np.full(len(problem.times), -1)

    def until(self, end: float) -> None:
        """Groups whose first stage becomes idle before take what waits, if something does at that moment."""
        while self.idle and self.idle[0][0] <= end:
            now, g = heappop(self.idle)
            while waiting := [m for m in np.flatnonzero(self.member[g]).tolist() if self.queues[m]]:
                if self.launch(g, min(waiting, key=lambda m: self.queues[m][0]), now):
                    break

    def launch(self, g: int, m: int, now: float) -> bool:
        """A batch of the model; False where none of its requests can still meet its goal."""
        problem, queue, clocks = self.problem, self.queues[m], self.clocks[g]
        while queue and not self._in_time(g, m, 1, now, queue[0]):
            self.owner[queue.popleft()] = g
        if not queue:
            return False
        size = 1
        for more in SIZES[1:]:
            if len(queue) < more or more not in self._table(g, m) or not self._in_time(g, m, more, now, queue[0]):
                break
            size = more
        latency = self._latency(g, m, size)
        end = enter(clocks, latency, len(latency), now + problem.timing.overhead)
        for _ in range(size):
            index = queue.popleft()
            self.finish[index], self.owner[index] = end, g
            self.good[index] = end - problem.times[index] <= problem.goal[m]
        heappush(self.idle, (float(clocks[0]), g))
        return True

    def _in_time(self, g: int, m: int, size: int, now: float, first: int) -> bool:
        latency = self._latency(g, m, size)
        end = passed(self.clocks[g], latency, len(latency), now) + self.problem.timing.overhead
        return bool(end - self.problem.times[first] <= self.problem.goal[m])

    def _table(self, g: int, m: int) -> dict[int, tuple[float, ...]]:
        return self.problem.tables[m].shapes[self.problem.shapes[self.shape[g]]].stage_latency

    def _latency(self, g: int, m: int, size: int) -> Floats:
        timing, seconds = self.problem.timing, np.array(self._table(g, m)[size])
        seconds = seconds * (1 + timing.stage_penalty * len(seconds))
        return seconds.astype(np.float32).astype(np.float64) if timing.single else seconds
