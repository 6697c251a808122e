"""Requests that wait in the order of their deadlines, and may still go elsewhere: what first come, first served, loses.

A request that waits for its group's first stage has not begun. So one that is wanted sooner may pass it, and it may
still go to another group. A newcomer is accepted where it and all who wait there are in time, at the group that would
finish it first. Where it fits nowhere, one that waits changes its group, if both are in time then. So nobody who was
accepted is late for those who come after.

On one machine the order by deadlines keeps all goals if any order does (Jackson, 1955). For stages it is a heuristic,
and so is how most are refused who would pass others: by what their last stage adds to the end of all. Time grows with
those who wait, so a group should not have goals of hours beside goals of seconds.
"""

# mypy: disable-error-code="call-overload,no-untyped-call,no-untyped-def"

import numpy as np
from numba import njit

import paceline.compiled  # noqa: F401  # says where compiled code is kept
from paceline.placement.dispatch import hosts_of

TRIED = 16  # of those who wait at a group, the last ones: who may make room for a newcomer
BEFORE, AFTER = range(2)
BEGUN, ALL, TRIAL = range(3)


def replay_by_deadline(
    times, models, active, slo, latency, stages, shape, member, margin, overhead, good, waited, asked, busy, finish,
    owner, ends,
) -> None:  # fmt: skip
    """Sends requests through a placement. Arguments are those of `dispatch.replay`, which adds up the same."""
    count, groups = len(times), len(shape)
    due, since, done, at = np.empty(count), np.empty(count), np.empty(count), np.empty(count, np.int64)
    # who waits at a group: a ring that the group itself, number requests + g, is part of
    links = np.empty((count + groups, 2), np.int64)
    links[count:] = np.arange(count, count + groups)[:, None]
    # when stages are free of those who have begun, and of all
    clocks = np.zeros((3, groups, latency.shape[2]))
    if whole := len(finish) > 0:
        done, at = finish, owner
    _replay(
        times, models, active, slo, latency, stages, shape, *hosts_of(member), margin, overhead, good, waited, asked,
        ends, due, since, done, at, links, clocks,
    )  # fmt: skip
    for g, p in enumerate(shape if whole else ()):
        busy[g, : stages[p]] += latency[models[owner == g], p, : stages[p]].sum(0)


@njit(cache=True, _nrt=False)  # nobody counts who holds the arrays, which took most of the time
def _replay(
    times, models, active, slo, latency, stages, shape, hosts, begins, margin, overhead, good, waited, asked, ends, due,
    since, done, at, links, clocks,
):  # fmt: skip
    """Each request in turn. What is done with a group's line stands first, in functions that are compiled into it."""
    count = times.shape[0]

    def enter(which, g, i, now):
        """When request i has passed all stages of group g; they are taken."""
        time, m, p = now, models[i], shape[g]
        for k in range(stages[p]):
            time = max(time, clocks[which, g, k]) + latency[m, p, k]
            clocks[which, g, k] = time
        return time

    def late(i, end):
        return end + margin - times[i] > slo[models[i]]

    def leave(i):
        links[links[i, BEFORE], AFTER] = links[i, AFTER]
        links[links[i, AFTER], BEFORE] = links[i, BEFORE]

    def begin(g, now):
        """Those of group g enter whose turn has come."""
        while links[count + g, AFTER] < count and clocks[BEGUN, g, 0] <= now:
            i = links[count + g, AFTER]
            leave(i)
            end, at[i] = enter(BEGUN, g, i, since[i]) + overhead, g
            done[i] = end
            if end - times[i] <= slo[models[i]]:
                good[models[i]] += 1
                waited[models[i]] += end - times[i]
            for k in range(stages[shape[g]] if ends.shape[0] > 0 else 0):
                ends[i, k] = clocks[BEGUN, g, k]

    def again(which, g, now):
        """Counts when group g is done with all."""
        for k in range(stages[shape[g]]):
            clocks[which, g, k] = clocks[BEGUN, g, k]
        one = links[count + g, AFTER]
        while one < count:
            enter(which, g, one, now)
            one = links[one, AFTER]

    def come(g, i, now):
        """Request i waits at group g."""
        behind, since[i] = links[count + g, BEFORE], now
        while behind < count and due[behind] > due[i]:
            behind = links[behind, BEFORE]
        links[i, BEFORE], links[i, AFTER] = behind, links[behind, AFTER]
        links[links[behind, AFTER], BEFORE] = i
        links[behind, AFTER] = i
        if links[i, AFTER] >= count:
            enter(ALL, g, i, now)
        else:
            again(ALL, g, now)

    def joined(g, i, gone, now):
        """When group g would finish request i if it came and `gone` (-1: nobody) went; infinity: somebody is late."""
        last, p = links[count + g, BEFORE], shape[g]
        found, tail = np.inf, gone < 0 and (last >= count or due[last] <= due[i])
        end = stages[p] - 1
        least = clocks[ALL, g, end] + latency[models[i], p, end]  # the last one of all is not done sooner, about
        if tail and not late(i, least):
            found = now
            for k in range(stages[p]):
                found = max(found, clocks[ALL, g, k]) + latency[models[i], p, k]
            if late(i, found):
                found = np.inf
        elif not tail and (gone >= 0 or not late(last, least)):
            found = 0.0
            for k in range(stages[p]):
                clocks[TRIAL, g, k] = clocks[BEGUN, g, k]
            after, here = links[count + g, AFTER], False
            while found < np.inf and (after < count or not here):
                if not here and (after >= count or due[after] > due[i]):
                    one, here = i, True
                else:
                    one, after = after, links[after, AFTER]
                if one != gone:
                    time = enter(TRIAL, g, one, now)
                    if one == i:
                        found = time
                    if late(one, time):
                        found = np.inf
        return found

    def soonest(i, but, now):
        """Of the groups but one the one that would finish request i first; -1: none can."""
        best, chosen = np.inf, -1
        for place in range(begins[models[i]], begins[models[i] + 1]):
            g = hosts[place]
            if g != but:
                begin(g, now)
                end = joined(g, i, -1, now)
                if end < best:
                    best, chosen = end, g
        return chosen

    for i in range(count):
        m, now = models[i], times[i]
        if not active[m]:
            continue
        due[i], done[i], at[i] = now + slo[m], now, -1
        chosen = soonest(i, -1, now)
        # where it fits nowhere somebody else may go
        place = begins[m]
        while chosen < 0 and place < begins[m + 1]:
            g = hosts[place]
            other, tries = links[count + g, BEFORE], 0
            while chosen < 0 and other < count and tries < TRIED:
                tries += 1
                before, to = links[other, BEFORE], soonest(other, g, now)
                if to >= 0 and joined(g, i, other, now) < np.inf:
                    leave(other)
                    again(ALL, g, now)
                    come(to, other, now)
                    asked[g] -= 1
                    asked[to] += 1
                    chosen = g
                other = before
            place += 1
        if chosen >= 0:
            come(chosen, i, now)
        elif begins[m] < begins[m + 1]:  # rejected by the least used
            for place in range(begins[m], begins[m + 1]):
                if chosen < 0 or clocks[ALL, hosts[place], 0] < clocks[ALL, chosen, 0]:
                    chosen = hosts[place]
            at[i] = -2 - chosen
        if chosen >= 0:
            asked[chosen] += 1
    for g in range(shape.shape[0]):
        begin(g, np.inf)
