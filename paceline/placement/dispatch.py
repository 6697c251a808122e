"""Which group takes a request, and whether it is taken at all: one-shot requests through pipelines of stages.

A group runs its requests first come, first served: stage k of the next one begins when the stage before is done with
it and stage k is free. So when a request would be finished is known the moment it arrives, and it is rejected at once
where that is beyond its goal (AlpaServe, section 4.3). These functions are the decisions of the live system and of its
simulation alike, and compiled: a planner asks them a million times a second.

A group may have more models than its devices hold, the others in host memory. Then a stage that is to run one of those
is first taken for as long as its weights need to come, and the models that were not used for longest give way.

Three rules choose among the groups that have the model, the lowest of equals: the one whose last stage frees first
(AlpaServe's code), the one that would finish the request first, the one with the fewest requests in flight. A fourth,
by deadlines, is in `reorder`.
"""

import numpy as np
from numba import njit

import paceline.compiled  # noqa: F401  # says where compiled code is kept

LAST_STAGE, FINISH, IN_FLIGHT, DEADLINE = range(4)  # the last one: `reorder`
RULES = {"last_stage": LAST_STAGE, "finish": FINISH, "in_flight": IN_FLIGHT, "deadline": DEADLINE}


@njit(cache=True, inline="always")
def passed(clocks, latency, stages, now):  # type: ignore[no-untyped-def]
    """When a request that enters now has passed all stages: clocks, latency [stages]."""
    time = now
    for k in range(stages):
        time = max(time, clocks[k]) + latency[k]
    return time


@njit(cache=True, inline="always")
def enter(clocks, latency, stages, now):  # type: ignore[no-untyped-def]
    """The same, and the stages are taken."""
    time = now
    for k in range(stages):
        time = max(time, clocks[k]) + latency[k]
        clocks[k] = time
    return time


@njit(cache=True, inline="always")
def loading(clocks, weight, bandwidth, stages, now, free):  # type: ignore[no-untyped-def]
    """When each stage will be free [stages] if weights [stages], bytes, have to come first."""
    for k in range(stages):
        free[k] = max(clocks[k], now) + weight[k] / bandwidth


@njit(cache=True)
def hosts_of(member):  # type: ignore[no-untyped-def]
    """Groups that have each model of member [groups, models], side by side, and where [models + 1] those of each
    begin."""
    groups, count = member.shape
    begins = np.zeros(count + 1, np.int64)
    for m in range(count):
        begins[m + 1] = begins[m]
        for g in range(groups):
            begins[m + 1] += member[g, m]
    hosts, place = np.empty(begins[-1], np.int64), begins[:-1].copy()
    for g in range(groups):
        for m in range(count):
            if member[g, m]:
                hosts[place[m]] = g
                place[m] += 1
    return hosts, begins


@njit(cache=True)
def make_room(here, touched, used, weight, memory, m):  # type: ignore[no-untyped-def]
    """Model m comes to a group: here [models] says who is, touched [models] when each was asked for last, used [stages]
    the bytes that they take of `memory`; weight [models, stages]. Who was not asked for longest leaves first."""
    while (used + weight[m] > memory).any():
        last, gone = np.inf, -1
        for other in range(here.shape[0]):
            if here[other] and touched[other] < last:
                last, gone = touched[other], other
        here[gone] = False
        used -= weight[gone]
    here[m] = True
    used += weight[m]


@njit(cache=True)
def replay(  # type: ignore[no-untyped-def]
    times, models, active, slo, latency, stages, shape, member, rule, delays, weight, memory, bandwidth,
    good, waited, asked, busy, finish, owner, ends,
):  # fmt: skip
    """Sends requests through a placement.

    times [n] not falling, models [n]; of inactive models none is sent. slo [models]; latency [models, shapes, stages];
    stages [shapes]; shape [groups]; member [groups, models]. delays: seconds from arrival to the group, from there to
    its first stage, what is added for the prediction, and to what it takes. weight [models, shapes, stages] and memory
    [groups]: bytes of a device; bandwidth: bytes/s at which weights come from host memory; 0: a group holds all of its
    models.

    Adds up: good [models], seconds of those (waited [models]), requests sent to each group (asked [groups]). Where
    finish [n] has room, fills in that, owner [n] (-1: none, -2 - group: rejected by it) and ends [n, stages], when it
    leaves each stage, and adds up what stages run (busy [groups, stages], seconds).
    """
    groups, widest = member.shape[0], latency.shape[2]
    hosts, begins = hosts_of(member)
    to_group, to_stage, margin, overhead = delays
    clocks = np.zeros((groups, widest))
    taken = clocks if to_stage == 0 else clocks.copy()  # what is predicted, and what happens
    keep = finish.shape[0] > 0
    # which models are on the devices; at first as many as fit, in their order
    here, used = np.ones(member.shape, np.bool_), np.zeros((groups, widest))
    touched, free = np.zeros(member.shape), np.empty(widest)
    if bandwidth > 0:
        here[:] = False
        for g in range(groups):
            for m in range(member.shape[1]):
                if member[g, m] and (used[g] + weight[m, shape[g]] <= memory[g]).all():
                    here[g, m] = True
                    used[g] += weight[m, shape[g]]
    # requests in flight, for the rule that counts them: a list for each group, and when each reply is there
    following = np.empty(times.shape[0] if rule == IN_FLIGHT else 0, np.int64)
    reply, first = np.empty(following.shape[0]), np.full(groups, -1)
    for i in range(times.shape[0]):
        m = models[i]
        if not active[m]:
            continue
        now = times[i]
        if keep:
            finish[i], owner[i] = now, -1
        best, chosen = np.inf, -1
        for at in range(begins[m], begins[m + 1]):
            g = hosts[at]
            p = shape[g]
            if rule == LAST_STAGE:
                value = clocks[g, stages[p] - 1]
            elif rule == FINISH:
                if bandwidth == 0 or here[g, m]:
                    value = passed(clocks[g], latency[m, p], stages[p], now + to_group)
                else:
                    loading(clocks[g], weight[m, p], bandwidth, stages[p], now + to_group, free)
                    value = passed(free, latency[m, p], stages[p], now + to_group)
            else:
                value, before, j = 0.0, -1, first[g]
                while j >= 0:
                    after = following[j]
                    if reply[j] > now + to_group / 2:
                        value += 1
                        before = j
                    elif before < 0:
                        first[g] = after
                    else:
                        following[before] = after
                    j = after
            if value < best:
                best, chosen = value, g
        if chosen < 0:
            continue
        asked[chosen] += 1
        p = shape[chosen]
        end = best
        if rule != FINISH:
            if bandwidth == 0 or here[chosen, m]:
                end = passed(clocks[chosen], latency[m, p], stages[p], now + to_group)
            else:
                loading(clocks[chosen], weight[m, p], bandwidth, stages[p], now + to_group, free)
                end = passed(free, latency[m, p], stages[p], now + to_group)
        accepted = end + margin - now <= slo[m]
        if accepted:
            if bandwidth > 0:
                touched[chosen, m] = now + 1.0 - times[0]  # later than those that nobody asked for
                if not here[chosen, m]:
                    make_room(here[chosen], touched[chosen], used[chosen], weight[:, p], memory[chosen], m)
                    loading(clocks[chosen], weight[m, p], bandwidth, stages[p], now + to_group, clocks[chosen])
                    if to_stage > 0:
                        loading(taken[chosen], weight[m, p], bandwidth, stages[p], now + to_group, taken[chosen])
            enter(clocks[chosen], latency[m, p], stages[p], now + to_group)
            if to_stage > 0:
                end = enter(taken[chosen], latency[m, p], stages[p], now + to_group + to_stage)
            end += overhead
            if end - now <= slo[m]:
                good[m] += 1
                waited[m] += end - now
        if keep:
            finish[i] = end if accepted else now + to_group
            owner[i] = chosen if accepted else -2 - chosen
            for k in range(stages[p] if accepted else 0):
                busy[chosen, k] += latency[m, p, k]
                ends[i, k] = taken[chosen, k]
        if rule == IN_FLIGHT:
            reply[i] = end if accepted else now + to_group
            following[i], first[chosen] = first[chosen], i
