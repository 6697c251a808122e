"""How many tokens to draft: as long as one more is worth its time.

A step that takes T seconds and yields E tokens is as good as E / T. A drafted token adds its survival, the probability
that it and all drafted before it stay, to E, and to T what the target takes for a token more and what the draft model
takes to draft it. Tokens are taken in decreasing survival, over all sequences of the step, as long as that makes the
step better. What prompts take beside decodes without drafts is theirs, and what of them drafts leave no room for counts
as tokens of outputs do: where prompts fill the step anyway a draft takes the place of certain progress, so under load
nobody drafts, and without load, or beside a prompt that fits, as many as pay. Chen et al. (2023) fix K; SmartSpec (Liu
et al., 2024) has one K for all requests.

What seems slower of both, to draft or not, is tried, too, as often as a small share of the time pays for it: the closer
they are the more often; drafts by turns in the best steps of all widths, since a narrow one says little of wide ones.
So is the best step of another width where drafts are better, whose times are not seen where one width always seems
best. A draft model that has not drafted has to catch up first. That is an investment: it counts by the share that this
step's tokens have in those that are to come, in full in what a try costs and in the seconds within a goal.

A sequence's first draft is one token, or as many as stay together more often than not of others of its kind; those
behind it may be longer by four for each token yielded: drafts that are no good show while they are short. Beside one
that is past that steps are long anyway.
"""

import numpy as np
from numba import njit

from paceline.compiled import BOOL, CORE, F64, FLOATS, I64, INTS, INTS_2D, array_of, making, part, watched
from paceline.core.batch import AGAIN
from paceline.core.batch import follows as _follows
from paceline.core.request import (
    ASKED,
    BY_BUDGET,
    BY_TIME,
    COMPUTED,
    HELD_BACK,
    IN_FLIGHT,
    KNOWN,
    LIMIT,
    MAX_DRAFT_TOKENS,
    PROMPT,
    UNPAID,
)
from paceline.speculation.costs import reading, seconds_of
from paceline.speculation.times import SIZES, drafting_of, of_sequences, of_tokens, pace_of, verifying_of

COUNTS = array_of(F64, 3)
follows = njit(BOOL(I64), cache=True)(_follows)
GUESS = 0.95  # acceptance of a drafter that nobody has tried: so high that it is tried wherever a good one would pay
WEIGHT, GROUP_WEIGHT = 32.0, 8.0  # of what is believed of a sequence beforehand, and of its kind, in tries
TRIES = np.array([0.002, 0.001])  # shares of the time, for tries of drafts or none, and of other widths
ROW = 4  # tries of drafts in a row, where some are: the first finds the caches full of other things
PROVEN = 8.0  # tries of a kind from which on a place in its drafts is known
ANSWER = 64  # tokens that a sequence is expected to yield in any case
REST = 8  # steps of the same sequences that are not asked for, at most
# survivals from which on tokens are drafted, to choose from; the first is none at all
THRESHOLDS = np.array([2.0, *np.geomspace(0.97, 0.03, 24)])


@part
def _longest(numbers, running):  # type: ignore[no-untyped-def]
    """What drafts may have in any case: four tokens more for each that the eldest sequence has yielded, its first ones
    one."""
    yielded = 0
    for i in range(running.shape[0]):
        yielded = max(yielded, numbers[running[i], KNOWN] - numbers[running[i], ASKED])
    return min(4 * yielded - 3, MAX_DRAFT_TOKENS)


@part
def _proven(kind):  # type: ignore[no-untyped-def]
    """Tokens of a draft that, by what became of others of its kind, all stay more often than not."""
    alive, j = 1.0, 0
    while j < MAX_DRAFT_TOKENS and kind[1, j] >= PROVEN:
        alive *= kind[0, j] / kind[1, j]
        if alive < 0.5:
            break
        j += 1
    return j


@making
def _survivals(numbers, drafts, running, counts, group, kinds):  # type: ignore[no-untyped-def]
    """[running, MAX_DRAFT_TOKENS]: what each place of each draft survives with, if there is a draft; [running]: how
    likely there is one; decodes that are ready, and what they read."""
    survival, there = np.zeros((running.shape[0], MAX_DRAFT_TOKENS)), np.zeros(running.shape[0])
    decodes, read, longest = 0, 0, _longest(numbers, running)
    for i in range(running.shape[0]):
        slot = running[i]
        row = numbers[slot]
        if row[COMPUTED] < row[PROMPT] or row[IN_FLIGHT] > 0:
            continue
        decodes += 1
        read += row[COMPUTED]
        alive, believed, kind, last = 1.0, GUESS, group[kinds[slot]], MAX_DRAFT_TOKENS
        odds = (kind[0, last] + GROUP_WEIGHT) / (kind[1, last] + GROUP_WEIGHT)
        there[i] = (counts[slot, 0, last] + WEIGHT * odds) / (counts[slot, 1, last] + WEIGHT)
        deep = longest if longest == MAX_DRAFT_TOKENS else max(longest, _proven(kind))
        most = min(drafts[slot], deep, row[LIMIT] - row[KNOWN] - 1)
        for j in range(max(0, most)):
            believed = (kind[0, j] + GROUP_WEIGHT * believed) / (kind[1, j] + GROUP_WEIGHT)
            alive *= (counts[slot, 0, j] + WEIGHT * believed) / (counts[slot, 1, j] + WEIGHT)
            survival[i, j] = alive
    return survival, there, decodes, read


@part
def _to_come(row):  # type: ignore[no-untyped-def]
    """Tokens that a sequence is expected to yield: some, and as many as it has, within its limit."""
    return max(1.0, min(row[LIMIT] - row[KNOWN], ANSWER + row[KNOWN] - row[ASKED]))


@part
def _least_unread(survival, running, unread):  # type: ignore[no-untyped-def]
    """Which sequence of those that may draft has the fewest tokens to catch up with."""
    only = 0
    for i in range(running.shape[0]):
        if survival[i, 0] > 0 and (survival[only, 0] == 0 or unread[running[i]] < unread[running[only]]):
            only = i
    return only


@part
def _lie_down(rest, numbers, running, steps):  # type: ignore[no-untyped-def]
    """Nobody is asked for so many steps of these sequences behind this one, unless first drafts are still short."""
    if _longest(numbers, running) < MAX_DRAFT_TOKENS:
        return
    for i in range(running.shape[0]):
        rest[2 + i] = running[i]
    rest[0], rest[1] = 1 + int(min(steps, REST)), running.shape[0]


# what is found of each width (`of_tokens`): tokens a second, seconds, how likely tokens must be to survive and how deep
# drafts may be (a pass more for all), seconds of drafting, with what it reads, and of catching up
RATE, SECONDS, LEAST, DEPTH, DRAFTING, LATE, FOUND = range(7)


@making
def _best(  # type: ignore[no-untyped-def]
    survival, there, decodes, read, numbers, running, unread, pending, budget, goal, linear, token, context,
    draft_linear, draft_token, draft_context, verifying, slower, thresholds, found,
):  # fmt: skip
    """The step without drafts, its tokens a second and its seconds, but for prompts; the best ones with some are
    `found`."""
    best, threshold, depth = 0.0, 2.0, MAX_DRAFT_TOKENS
    plain, with_prompts = 0.0, goal  # tokens a second without any; what all may take, prompts, too
    found[:] = 0.0
    passes = np.zeros(MAX_DRAFT_TOKENS, np.int64)
    prompts = min(pending, max(0, budget - decodes))  # tokens, without drafts, and what they take
    prompts_s = seconds_of(linear, 0.0, 0.0, decodes + prompts, 0) - seconds_of(linear, 0.0, 0.0, decodes, 0)
    for turn in range(3):
        trial, deepest, below = 0, 1 if turn == 1 else depth, 2.0
        while trial < (MAX_DRAFT_TOKENS if turn == 1 else thresholds.shape[0]):
            least = threshold if turn == 1 else thresholds[trial]
            if turn != 1 and below < least:
                trial += 1  # it takes no token more than the last one
                continue
            width, gained, draft_read, late, owed = decodes, 0.0, 0, 0, 0.0
            offered, none = 0.0, 1.0  # tokens that there should be drafts of; how likely there is no draft at all
            passes[:], below = 0, 0.0
            for i in range(running.shape[0]):
                slot, more, last, before = running[i], 0.0, 0.0, width
                for j in range(deepest):
                    if survival[i, j] < least:
                        below = max(below, survival[i, j])
                        break
                    last = survival[i, j]
                    more += last
                    passes[j] += 1
                    draft_read += numbers[slot, COMPUTED]
                    width += 1
                if more > 0:
                    gained += there[i] * more
                    offered += there[i] * (width - before)
                    none *= 1 - there[i]
                    missed = max(0, unread[slot] - 1)
                    late += missed
                    owed += last + missed * min(1.0, (1 + more) / _to_come(numbers[slot]))
            seconds = slower[1] * draft_context * draft_read
            if passes[0] > 0:
                seconds += slower[0] * draft_linear[0]
            for j in range(deepest):
                if passes[j] > 0:
                    seconds += slower[min(j, 1)] * seconds_of(draft_linear, draft_token, 0.0, passes[j], 0)
            once = slower[0] * reading(draft_linear, passes[0], late)
            share = slower[0] * reading(draft_linear, passes[0], passes[0] + late) * owed / max(passes[0] + late, 1)
            whole = seconds_of(linear, token, context, width, read + draft_read * AGAIN / 100)
            slowed = verifying[of_sequences(decodes), of_tokens(width)] if width > decodes else 1.0
            took = seconds + once + whole * slowed
            # prompt tokens that drafts leave no room for, what the others take, and what drafting takes to read them
            fewer, beside, followed = prompts - min(pending, max(0, budget - width)), 0.0, 0.0
            if prompts > 0:
                beside = seconds_of(linear, 0.0, 0.0, width + prompts - fewer, 0)
                beside -= seconds_of(linear, 0.0, 0.0, width, 0)
                if passes[0] > 0:
                    followed = slower[0] * reading(draft_linear, passes[0], prompts - fewer)
            if width == decodes:
                goal = goal if took <= goal else np.inf  # where it is missed without drafts, they do no harm
                with_prompts = goal if took + beside <= goal else np.inf
            elif width > budget or took > goal or took + beside + followed > with_prompts:
                if turn == 1 or deepest == 1:
                    break
                deepest, below = deepest - 1, 2.0  # survivals may all be much alike: no threshold takes only some then
                continue
            wanted = width - decodes
            if offered < wanted:  # not all will have a draft
                again = draft_read * AGAIN / 100 / wanted
                width = decodes + max(1, int(offered / (1 - none) + 0.5))
                slowed = verifying[of_sequences(decodes), of_tokens(width)]
                whole = seconds_of(linear, token, context, width, read + again * (width - decodes))
            whole = slowed * (whole + beside - prompts_s)
            if offered < wanted:
                whole = (1 - none) * whole + none * seconds_of(linear, token, context, decodes, read)
            whole += seconds + share + followed
            rate = (decodes + gained - fewer) / whole if whole > 0 else 0.0
            one = found[of_tokens(width)]
            if width == decodes:
                plain, plain_s = rate, whole
            elif rate > one[RATE]:
                one[RATE], one[SECONDS], one[LEAST], one[DEPTH] = rate, whole, least, deepest
                one[DRAFTING], one[LATE] = seconds + once + followed, once
            if width > decodes and rate > best:
                best, threshold, depth = rate, least, deepest
            trial += 1
            deepest += turn == 1
        if turn == 1 and best <= plain:
            break  # nobody drafts, but to try
    return plain, plain_s


@part
def _lost(one, rate):  # type: ignore[no-untyped-def]
    """Seconds that what was found costs beside so many tokens a second."""
    return one[SECONDS] * (1 - one[RATE] / rate) + one[LATE]


@part
def _whose_turn(found, plain, spare, turn):  # type: ignore[no-untyped-def]
    """Of the widths for whose try there is enough, one of which is the best."""
    enough = 0
    for i in range(SIZES):
        enough += found[i, RATE] > 0 and _lost(found[i], plain) <= spare
    at = turn % enough
    for i in range(SIZES):
        if found[i, RATE] > 0 and _lost(found[i], plain) <= spare:
            if at == 0:
                return i
            at -= 1
    return -1


@part
def _take(one, survival, running, chosen):  # type: ignore[no-untyped-def]
    for i in range(running.shape[0]):
        for j in range(int(one[DEPTH])):
            if survival[i, j] < one[LEAST]:
                break
            chosen[running[i]] = j + 1


@part
def following(idle, prompts, slower, draft_linear):  # type: ignore[no-untyped-def]
    """Seconds in which a draft model reads so many tokens of prompts in a step without drafts."""
    return slower[0] * seconds_of(draft_linear, 0.0, 0.0, prompts, 0) if prompts > 0 and follows(idle) else 0.0


@making
def choose(  # type: ignore[no-untyped-def]
    numbers, drafts, running, counts, group, kinds, unread, pending, budget, goal, spare, for_widths, idle, turn,
    linear, token, context, draft_linear, draft_token, draft_context, verifying, slower, thresholds, chosen, rest,
):  # fmt: skip
    """Seconds of drafting, or, where nobody drafts, of what a draft model reads of prompts; what it costs if this is a
    try: of drafts or none, and of another width."""
    rest[0], reads = 0, following(idle + 1, min(pending, budget), slower, draft_linear)
    survival, there, decodes, read = _survivals(numbers, drafts, running, counts, group, kinds)
    # within a goal nobody drafts whose draft model cannot catch up in time
    plain_s, caught_up = seconds_of(linear, token, context, decodes, read), 0
    for i in range(running.shape[0]):
        slot = running[i]
        chosen[slot] = 0
        if survival[i, 0] > 0:
            numbers[slot, HELD_BACK] = UNPAID
        if survival[i, 0] > 0 and unread[slot] > 1 and plain_s <= goal < np.inf:
            some = caught_up + unread[slot] - 1
            once = draft_linear[0] + seconds_of(draft_linear, draft_token, 0.0, decodes, 0)
            once += reading(draft_linear, decodes, some)
            if plain_s + slower[0] * once > goal:
                survival[i] = 0.0
                numbers[slot, HELD_BACK] = BY_TIME
            else:
                caught_up = some
    found = np.zeros((SIZES, FOUND))
    plain, plain_s = _best(
        survival, there, decodes, read, numbers, running, unread, pending, budget, goal, linear, token, context,
        draft_linear, draft_token, draft_context, verifying, slower, thresholds, found,
    )  # fmt: skip
    best = found[found[:, RATE].argmax()]
    if best[RATE] == 0:  # not even the first token of one draft is within all limits
        for i in range(running.shape[0]):
            if survival[i, 0] > 0:
                numbers[running[i], HELD_BACK] = BY_TIME if plain_s <= goal and decodes < budget else BY_BUDGET
        if pending == 0 and decodes == running.shape[0]:
            _lie_down(rest, numbers, running, REST)
        return reads, 0.0, 0.0
    # what seems worse is tried where that costs no more than may be spent on it
    if best[RATE] > plain:
        cost = plain_s * (1 - plain / best[RATE])
        if cost <= spare:
            if pending == 0 and decodes == running.shape[0]:
                _lie_down(rest, numbers, running, spare / max(cost, 1e-9 * plain_s) - 2)
            return reads, cost * max(1, rest[0]), 0.0  # else who is asked for nothing would be asked in every step
        cost, rate = 0.0, best[RATE]
        at = -1
        for i in range(SIZES):
            if 0 < found[i, RATE] < rate and (at < 0 or found[i, RATE] > found[at, RATE]):
                at = i
        second = found[at]
        if at >= 0 and _lost(second, rate) <= for_widths:
            best, cost = second, _lost(second, rate)
        _take(best, survival, running, chosen)
        return best[DRAFTING], 0.0, cost
    cost = _lost(best, plain)
    if cost > spare > 0:  # perhaps with one sequence, which has little to catch up with
        only = _least_unread(survival, running, unread)
        if slower[0] * seconds_of(draft_linear, draft_token, 0.0, unread[running[only]], 0) < spare:
            for i in range(running.shape[0]):
                if i != only:
                    survival[i] = 0.0
            _best(
                survival, there, decodes, read, numbers, running, unread, pending, budget, goal, linear, token,
                context, draft_linear, draft_token, draft_context, verifying, slower, thresholds, found,
            )  # fmt: skip
            best = found[found[:, RATE].argmax()]
            cost = _lost(best, plain)
    if best[RATE] == 0 or cost > spare:
        if pending == 0 and decodes == running.shape[0]:
            _lie_down(rest, numbers, running, (cost - spare) / (TRIES[0] * plain_s))
        return reads, 0.0, 0.0
    best = found[_whose_turn(found, plain, spare, turn)]
    _take(best, survival, running, chosen)
    return best[DRAFTING], _lost(best, plain), 0.0


@watched(
    F64(
        INTS_2D, INTS, INTS, COUNTS, COUNTS, INTS, INTS, I64, I64, F64, FLOATS, FLOATS, F64, F64, FLOATS, F64, F64,
        FLOATS, FLOATS, INTS, INTS, INTS,
    ),
    *CORE,
)  # fmt: skip
@njit(cache=True)
def choose_at_pace(  # type: ignore[no-untyped-def]
    numbers, drafts, running, counts, group, kinds, unread, pending, budget, goal, spare, linear, token, context,
    draft_linear, draft_token, draft_context, mean, thresholds, chosen, rest, idle,
):  # fmt: skip
    """The same where steps take what is known of this machine: seconds of drafting or reading; a try's are spent.

    `idle`: steps in a row in which nobody drafted, and tries so far.
    """
    pace = pace_of(mean)
    tries = spare[0] / (ROW if idle[0] > 0 else 1)
    seconds, of_drafts, of_width = choose(
        numbers, drafts, running, counts, group, kinds, unread, pending, budget, goal / pace, tries / pace,
        spare[1] / pace, idle[0], idle[1] // ROW, linear, token, context, draft_linear, draft_token, draft_context,
        verifying_of(mean), drafting_of(mean), thresholds, chosen, rest,
    )  # fmt: skip
    idle[1] += of_drafts > 0
    spare[0] -= of_drafts * pace
    spare[1] -= of_width * pace
    return seconds * pace
