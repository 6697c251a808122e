"""How many tokens to draft: as long as one more is worth its time.

A step that takes T seconds and yields E tokens is as good as E / T. A drafted token adds its survival, the probability
that it and all drafted before it stay, to E, and to T what the target takes for a token more and what the draft model
takes to draft it. Tokens are taken in decreasing survival, over all sequences of the step, as long as that makes the
step better. Tokens of prompts count as those of outputs do: where a prompt would fill the step anyway, a draft takes
the place of certain progress, so under load nobody drafts, and without load as many as pay. Chen et al. (2023) fix K;
SmartSpec (Liu et al., 2024) has one K for all requests.

Acceptance is learnt per sequence and place in the draft: decaying counts, over those of all sequences of its kind in
the group (about the same temperature), over what is believed of the place before. A sequence that has no drafts is
forgotten, too, its kind is not: what nobody tries would seem ever better. How often a drafter has anything to offer
(n-grams often do not) is learnt likewise. Times come from profiles of both models, and by how much real
steps differ from them is learnt as well (`times`): drafting and verifying take more than two models alone (each finds
the caches full of the other's weights, and there are verdicts to be made), and without that a draft that seems worth it
makes things slower. It is learnt from steps with drafts next to steps without any. So what seems slower of both is
tried, too, as often as a small share of the time pays for it: the closer they are the more often. So is the best step
of another width, whose times are not seen where one width always seems best. A draft model that has not drafted has to
catch up first. That is an investment: it counts by the share that this step's tokens have in those that are to come, in
full in what a try costs and in the seconds within a goal. Prompts it follows while somebody drafts, and else seldom
(`follows`). Drafts that are kept whole leave their last token to be read in the next step.

Where nobody drafts, that holds for the next steps of the same sequences, too: the group rests, since asking takes its
time. It is not asked again before a try could be paid for, and what such steps were is taken in at once.

A sequence's first draft is one token, those behind it may be longer by four for each token yielded: no long step
follows a first token, and drafts that are no good show while they are short.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from paceline.core.batch import AGAIN, follows
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
    NUM_KINDS,
    PROMPT,
    UNPAID,
)
from paceline.latency.step_time import StepTime
from paceline.speculation.times import (
    SIZES,
    Times,
    drafting_of,
    forget_a_step,
    observe_step,
    of_sequences,
    of_tokens,
    pace_of,
    verifying_of,
)

Ints, Floats = NDArray[np.int64], NDArray[np.float64]
_F64, _I64 = types.float64, types.int64
_ROW = types.Array(_I64, 1, "A")
_COUNTS = _F64[:, :, ::1]
_INTS, _BYTES, _FLOATS = _I64[::1], types.Array(types.uint8, 1, "C", readonly=True), _F64[::1]
_TABLE = _F64[:, ::1]
GUESS = 0.95  # acceptance of a drafter that nobody has tried: so high that it is tried wherever a good one would pay
WEIGHT, GROUP_WEIGHT = 32.0, 8.0  # of what is believed of a sequence beforehand, and of its kind, in tries
# share of the time for tries of drafts or none, and of other widths; to begin with, and at most, in steps
TRIES, FIRST, SAVES = np.array([0.002, 0.001]), 5.0, 10.0
ROW = 4  # tries of drafts in a row, where some are: the first finds the caches full of other things
ANSWER = 64  # tokens that a sequence is expected to yield in any case
KEEPS, IDLE_KEEPS = 0.97, 0.93  # of a sequence's counts: with every try, and with every step without one
GROUP_KEEPS = 0.99  # of the group's, with every draft of its kind, and every time that one is asked for
REST = 8  # steps of the same sequences that are not asked for, at most
# survivals from which on tokens are drafted, to choose from; the first is none at all
THRESHOLDS = np.array([2.0, *np.geomspace(0.97, 0.03, 24)])


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps of a model take that are mostly decodes (`latency.step_time`). Seconds."""

    linear: Sequence[float]  # by tokens, from 0 on
    token: float = 0.0  # more for each
    context: float = 0.0  # for each token that those read
    once: float = 0.0  # of drafting, beside its passes

    @staticmethod
    def of(time: StepTime) -> "Costs":
        return Costs(time.linear, time.emit + time.decode, time.decode_context)

    @staticmethod
    def of_drafts(time: StepTime, chained: Mapping[int, float]) -> "Costs":
        """Of a model that drafts, some of whose passes are one call (`Profile.chained`)."""
        if not chained:
            return Costs.of(time)
        rows = sorted(set(chained) - {0})
        passes = np.interp(range(rows[-1] + 1), rows, [chained[count] for count in rows]).tolist()
        wider = [passes[-1] + seconds - time.linear[rows[-1]] for seconds in time.linear[rows[-1] + 1 :]]
        return Costs(passes + wider, 0.0, time.decode_context, chained[0])

    def scaled(self, share: float) -> "Costs":
        """Those of a part of the model."""
        linear = [share * seconds for seconds in self.linear]
        return Costs(linear, share * self.token, share * self.context, share * self.once)

    @property
    def drafting(self) -> "Costs":
        """As `choose` takes those of drafting: in the place of no tokens stands what it takes beside its passes."""
        return replace(self, linear=[self.once, *self.linear[1:]])


class Lookahead:
    """Chooses for a group; knows what became of drafts before. Slots are those of the group's table."""

    def __init__(self, target: Costs, draft: Costs | None, asking: float = 0.0) -> None:
        """`draft`: None where drafting costs nothing; `asking`: seconds that a step takes more for being asked for."""
        draft = draft or Costs([0.0, 0.0])
        self._target, self._draft = _array(target), _array(replace(draft, once=draft.once + asking).drafting)
        self._asking = asking
        self.times = Times()
        self.spare = np.zeros(2)  # seconds that tries may cost: of drafts or none, and of other widths
        self._begun = False
        # accepted and tried, by place in the draft; in the last place drafts that there were, and that were asked for
        self.group = np.zeros((NUM_KINDS, 2, MAX_DRAFT_TOKENS + 1))
        self.counts = np.zeros((0, 2, MAX_DRAFT_TOKENS + 1))  # likewise, by slot
        self.kinds = np.zeros(0, np.int64)  # by slot
        self.unread = np.zeros(0, np.int64)  # by slot: known tokens that a draft model has not read
        self.idle = np.zeros(1, np.int64)  # steps in a row in which nobody drafted
        self.rest = np.zeros(2, np.int64)  # steps in which nobody is to draft, of how many sequences, and their slots
        self._left, self._at_rest = 0, b""  # the same, for which no compiled code has to be fetched
        self._resting = 0  # such steps that are not done
        self._rested, self._rested_s = 0, 0.0  # and those that are, of which nothing has been learnt yet; their seconds
        self._chosen = np.zeros(0, np.int64)

    def forget(self, slot: int, kind: int = 0) -> None:
        """Another sequence has the slot now, of this kind."""
        self._grow(slot + 1)
        self._wake()
        self._left = 0
        self.counts[slot], self.unread[slot], self.kinds[slot] = 0.0, 0, kind

    def rests(self, running: Ints, pending: int) -> bool:
        """Whether nobody is to draft in the next step either; else it is to be chosen for."""
        return self._left > 0 and pending == 0 and running.tobytes() == self._at_rest

    def composed(self, resting: bool) -> None:
        """A step is under way; `resting`: it was not chosen for."""
        self._left, self._resting = max(0, self._left - 1), self._resting + resting

    def rested(self, slots: Ints, steady: bool, seconds: float) -> bool:
        """A step without drafts is done; `steady`: it was decodes alone, and nobody left. Whether it was at rest, so
        that there is nothing more to observe."""
        if not self._resting:
            return False
        self._resting -= 1
        if not steady or slots.tobytes() != self._at_rest:
            return False
        self._rested, self._rested_s = self._rested + 1, self._rested_s + seconds
        return True

    def _wake(self) -> None:
        """Learns of the steps at rest."""
        if self._rested:
            times = self.times
            wake(
                self._rested, self._rested_s, self.rest, self.counts, self.unread, self.idle, self.spare,
                times.mean, times.covariance,
            )  # fmt: skip
            self._rested, self._rested_s = 0, 0.0

    def choose(
        self, numbers: Ints, drafts: Ints, running: Ints, pending: int, budget: int, goal: float = math.inf
    ) -> tuple[Ints, float]:
        """How many tokens to draft for each slot, at most `drafts`, and the seconds that drafting should take.

        `running`: slots whose decodes the step takes where they are ready; `pending`: prompt tokens that wait, of which
        the step takes what the `budget`, in tokens, leaves. `goal`: seconds that its decodes may take with their
        drafts, if they can be done in that time without any. For sequences without a draft `numbers` say why.
        """
        self._grow(len(numbers))
        self._wake()
        self._resting = 0  # such steps are done, or whoever decoded in them has left
        seconds = choose_at_pace(
            numbers, drafts, running, self.counts, self.group, self.kinds, self.unread, pending, budget, goal,
            self.spare, *self._target, *self._draft, self.times.mean, THRESHOLDS, self._chosen, self.rest,
            self.idle,
        )  # fmt: skip
        self._left, self._at_rest = int(self.rest[0]), running.tobytes()
        return self._chosen, seconds

    def observe(
        self, slots: Ints, known: Ints, drafted: NDArray[np.uint8], emitted: NDArray[np.uint8],
        asked: Ints | None = None,
    ) -> None:  # fmt: skip
        """A step is done: each slot (-1: none) had so many known tokens computed (1: a decode), drafted so many and
        yielded so many in all. `asked`: how many were to be drafted; None: as many as were."""
        self._grow(1 + int(slots.max(initial=-1)))
        self._wake()
        asked = drafted.astype(np.int64) if asked is None else asked
        observe(slots, known, asked, drafted, emitted, self.counts, self.group, self.kinds, self.unread, self.idle)

    def verification(self, seconds: float, sequences: int, tokens: int) -> float:
        """Of a step of so many sequences' tokens with drafts, without drafting: what it should take, in the engine and
        beside it, where the profile says so many seconds."""
        return seconds * self.times.pace * float(self.times.verifying[of_sequences(sequences), of_tokens(tokens)])

    def _grow(self, slots: int) -> None:
        if slots > (now := len(self.counts)):
            more = max(slots, 2 * now) - now
            self.counts = np.concatenate([self.counts, np.zeros((more, *self.counts.shape[1:]))])
            self._chosen = np.zeros(now + more, np.int64)
            self.rest = np.append(self.rest, np.zeros(more, np.int64))
            self.unread, self.kinds = (np.append(one, np.zeros(more, np.int64)) for one in (self.unread, self.kinds))

    def observe_times(
        self, slots: Ints, drafted: NDArray[np.uint8], read: int, seconds: float, draft_seconds: float
    ) -> None:
        """A step of decodes is done, that drafted so many tokens each behind `read` tokens in all.

        `seconds` of the whole step, in the engine and beside it, `draft_seconds` of drafting in it. What became of the
        drafts comes afterwards (`observe`).
        """
        self._grow(1 + int(slots.max(initial=-1)))
        self._wake()
        times = self.times
        if drafted.any():
            draft_seconds += self._asking
        else:
            seconds -= self._asking
        observe_seconds(
            slots, drafted, read, seconds, draft_seconds, self.unread, *self._target, *self._draft, times.mean,
            times.covariance, times.noise, self.spare, self._begun,
        )  # fmt: skip
        self._begun = True


def _array(costs: Costs) -> tuple[Floats, float, float]:
    return np.array(costs.linear), costs.token, costs.context


@njit(_F64(_FLOATS, _F64, _F64, _I64, _F64), cache=True)
def _seconds(linear, token, context, tokens, read):  # type: ignore[no-untyped-def]
    last = linear.shape[0] - 1
    table = linear[tokens] if tokens <= last else linear[last] * tokens / max(last, 1)
    return table + token * tokens + context * read


_follows = njit(types.boolean(_I64), cache=True)(follows)


@njit(_F64(_FLOATS, _I64, _I64), cache=True)
def _reading(linear, tokens, more):  # type: ignore[no-untyped-def]
    """What more tokens take that a pass of these only reads."""
    return max(0.0, _seconds(linear, 0.0, 0.0, tokens + more, 0) - _seconds(linear, 0.0, 0.0, tokens, 0))


@njit(types.Tuple((_F64[:, ::1], _FLOATS, _I64, _I64))(_I64[:, ::1], _INTS, _INTS, _COUNTS, _COUNTS, _INTS), cache=True)
def _survivals(numbers, drafts, running, counts, group, kinds):  # type: ignore[no-untyped-def]
    """[running, MAX_DRAFT_TOKENS]: what each place of each draft survives with, if there is a draft; [running]: how
    likely there is one; decodes that are ready, and what they read."""
    survival, there = np.zeros((running.shape[0], MAX_DRAFT_TOKENS)), np.zeros(running.shape[0])
    decodes, read = 0, 0
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
        most = min(drafts[slot], MAX_DRAFT_TOKENS, row[LIMIT] - row[KNOWN] - 1, 4 * (row[KNOWN] - row[ASKED]) - 3)
        for j in range(max(0, most)):
            believed = (kind[0, j] + GROUP_WEIGHT * believed) / (kind[1, j] + GROUP_WEIGHT)
            alive *= (counts[slot, 0, j] + WEIGHT * believed) / (counts[slot, 1, j] + WEIGHT)
            survival[i, j] = alive
    return survival, there, decodes, read


@njit(_F64(_ROW), cache=True)
def _to_come(row):  # type: ignore[no-untyped-def]
    """Tokens that a sequence is expected to yield: some, and as many as it has, within its limit."""
    return max(1.0, min(row[LIMIT] - row[KNOWN], ANSWER + row[KNOWN] - row[ASKED]))


@njit(_I64(_F64[:, ::1], _INTS, _INTS), cache=True)
def _least_unread(survival, running, unread):  # type: ignore[no-untyped-def]
    """Which sequence of those that may draft has the fewest tokens to catch up with."""
    only = 0
    for i in range(running.shape[0]):
        if survival[i, 0] > 0 and (survival[only, 0] == 0 or unread[running[i]] < unread[running[only]]):
            only = i
    return only


@njit(types.void(_INTS, _I64[:, ::1], _INTS, _F64), cache=True)
def _lie_down(rest, numbers, running, steps):  # type: ignore[no-untyped-def]
    """Nobody is asked for so many steps of these sequences behind this one, unless first drafts are still short."""
    for i in range(running.shape[0]):
        row = numbers[running[i]]
        if 4 * (row[KNOWN] - row[ASKED]) - 3 < MAX_DRAFT_TOKENS:
            return
        rest[2 + i] = running[i]
    rest[0], rest[1] = 1 + int(min(steps, REST)), running.shape[0]


@njit(types.boolean(_INTS, _INTS, _I64), cache=True)
def rests(rest, running, pending):  # type: ignore[no-untyped-def]
    """As `Lookahead.rests`."""
    i, count = 0, running.shape[0]
    while i < count == rest[1] and rest[2 + i] == running[i]:
        i += 1
    return rest[0] > 0 and pending == 0 and i == count


@njit(types.void(_I64, _F64, _INTS, _COUNTS, _INTS, _INTS, _FLOATS, _FLOATS, _TABLE), cache=True)
def wake(steps, seconds, rest, counts, unread, idle, spare, mean, covariance):  # type: ignore[no-untyped-def]
    """Learns of so many steps at rest, which took so long: each yielded a token for each of the sequences."""
    idle[0] += steps
    for i in range(rest[1]):
        counts[rest[2 + i]] *= IDLE_KEEPS**steps
        unread[rest[2 + i]] += steps
    for i in range(2):
        spare[i] = max(spare[i], min(spare[i] + TRIES[i] * seconds, SAVES * seconds / steps))
    for _ in range(steps):
        forget_a_step(mean, covariance)


# what is found of each width (`of_tokens`): tokens a second, seconds, how likely tokens must be to survive and how deep
# drafts may be (a pass more for all), seconds of drafting and of catching up
RATE, SECONDS, LEAST, DEPTH, DRAFTING, LATE, FOUND = range(7)


@njit(
    types.UniTuple(_F64, 2)(
        _F64[:, ::1], _FLOATS, _I64, _I64, _I64[:, ::1], _INTS, _INTS, _I64, _I64, _F64, _FLOATS, _F64, _F64, _FLOATS,
        _F64, _F64, _TABLE, _FLOATS, _FLOATS, _TABLE,
    ),
    cache=True,
)  # fmt: skip
def _best(  # type: ignore[no-untyped-def]
    survival, there, decodes, read, numbers, running, unread, pending, budget, goal, linear, token, context,
    draft_linear, draft_token, draft_context, verifying, slower, thresholds, found,
):  # fmt: skip
    """The step without drafts, its tokens a second and its seconds; the best ones with some are `found`."""
    best, threshold, depth = 0.0, 2.0, MAX_DRAFT_TOKENS
    plain = 0.0  # tokens a second without any
    found[:] = 0.0
    passes = np.zeros(MAX_DRAFT_TOKENS, np.int64)
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
                    seconds += slower[min(j, 1)] * _seconds(draft_linear, draft_token, 0.0, passes[j], 0)
            once = slower[0] * _reading(draft_linear, passes[0], late)
            share = slower[0] * _reading(draft_linear, passes[0], passes[0] + late) * owed / max(passes[0] + late, 1)
            whole = _seconds(linear, token, context, width, read + draft_read * AGAIN / 100)
            slowed = verifying[of_sequences(decodes), of_tokens(width)] if width > decodes else 1.0
            took = seconds + once + whole * slowed
            if width == decodes:
                goal = goal if took <= goal else np.inf  # where it is missed without drafts, they do no harm
            elif width > budget or took > goal:
                if turn == 1 or deepest == 1:
                    break
                deepest, below = deepest - 1, 2.0  # survivals may all be much alike: no threshold takes only some then
                continue
            chunk = min(pending, max(0, budget - width))
            if offered < width - decodes:  # not all will have a draft
                again = draft_read * AGAIN / 100 / (width - decodes)
                width = decodes + max(1, int(offered / (1 - none) + 0.5))
                slowed = verifying[of_sequences(decodes), of_tokens(width)]
                whole = slowed * _seconds(linear, token, context, width, read + again * (width - decodes))
                whole = (1 - none) * whole + none * _seconds(linear, token, context, decodes, read)
                slowed = 1.0
            if chunk > 0:
                whole += _seconds(linear, 0.0, 0.0, width + chunk, 0) - _seconds(linear, 0.0, 0.0, width, 0)
            whole = seconds + share + whole * slowed
            rate = (decodes + gained + chunk) / whole if whole > 0 else 0.0
            one = found[of_tokens(width)]
            if width == decodes:
                plain, plain_s = rate, whole
            elif rate > one[RATE]:
                one[RATE], one[SECONDS], one[LEAST], one[DEPTH] = rate, whole, least, deepest
                one[DRAFTING], one[LATE] = seconds + once, once
            if width > decodes and rate > best:
                best, threshold, depth = rate, least, deepest
            trial += 1
            deepest += turn == 1
        if turn == 1 and best <= plain:
            break  # nobody drafts, but to try
    return plain, plain_s


@njit(_F64(_FLOATS, _F64), cache=True)
def _lost(one, rate):  # type: ignore[no-untyped-def]
    """Seconds that what was found costs beside so many tokens a second."""
    return one[SECONDS] * (1 - one[RATE] / rate) + one[LATE]


@njit(types.void(_FLOATS, _F64[:, ::1], _INTS, _INTS), cache=True)
def _take(one, survival, running, chosen):  # type: ignore[no-untyped-def]
    for i in range(running.shape[0]):
        for j in range(int(one[DEPTH])):
            if survival[i, j] < one[LEAST]:
                break
            chosen[running[i]] = j + 1


@njit(
    types.UniTuple(_F64, 3)(
        _I64[:, ::1], _INTS, _INTS, _COUNTS, _COUNTS, _INTS, _INTS, _I64, _I64, _F64, _F64, _F64, _FLOATS, _F64, _F64,
        _FLOATS, _F64, _F64, _TABLE, _FLOATS, _FLOATS, _INTS, _INTS,
    ),
    cache=True,
)  # fmt: skip
def choose(  # type: ignore[no-untyped-def]
    numbers, drafts, running, counts, group, kinds, unread, pending, budget, goal, spare, for_widths, linear, token,
    context, draft_linear, draft_token, draft_context, verifying, slower, thresholds, chosen, rest,
):  # fmt: skip
    """Seconds of drafting, and what it costs if this is a try: of drafts or none, and of another width."""
    rest[0] = 0
    survival, there, decodes, read = _survivals(numbers, drafts, running, counts, group, kinds)
    # within a goal nobody drafts whose draft model cannot catch up in time
    plain_s, caught_up = _seconds(linear, token, context, decodes, read), 0
    for i in range(running.shape[0]):
        slot = running[i]
        chosen[slot] = 0
        if survival[i, 0] > 0:
            numbers[slot, HELD_BACK] = UNPAID
        if survival[i, 0] > 0 and unread[slot] > 1 and plain_s <= goal < np.inf:
            some = caught_up + unread[slot] - 1
            once = draft_linear[0] + _seconds(draft_linear, draft_token, 0.0, decodes, 0)
            once += _reading(draft_linear, decodes, some)
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
        return 0.0, 0.0, 0.0
    # what seems worse is tried where that costs no more than may be spent on it
    if best[RATE] > plain:
        cost = plain_s * (1 - plain / best[RATE])
        if cost <= spare:
            if pending == 0 and decodes == running.shape[0]:
                _lie_down(rest, numbers, running, spare / max(cost, 1e-9 * plain_s) - 2)
            return 0.0, cost * max(1, rest[0]), 0.0  # else who is asked for nothing would be asked in every step
        cost, rate = 0.0, best[RATE]
        second = found[np.where(found[:, RATE] < rate, found[:, RATE], 0.0).argmax()]
        if second[RATE] > 0 and _lost(second, rate) <= for_widths:
            best, cost = second, _lost(second, rate)
        _take(best, survival, running, chosen)
        return best[DRAFTING], 0.0, cost
    cost = _lost(best, plain)
    if cost > spare > 0:  # perhaps with one sequence, which has little to catch up with
        only = _least_unread(survival, running, unread)
        if slower[0] * _seconds(draft_linear, draft_token, 0.0, unread[running[only]], 0) < spare:
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
        return 0.0, 0.0, 0.0
    _take(best, survival, running, chosen)
    return best[DRAFTING], cost, 0.0


@njit(
    _F64(
        _I64[:, ::1], _INTS, _INTS, _COUNTS, _COUNTS, _INTS, _INTS, _I64, _I64, _F64, _FLOATS, _FLOATS, _F64, _F64,
        _FLOATS, _F64, _F64, _FLOATS, _FLOATS, _INTS, _INTS, _INTS,
    ),
    cache=True,
)  # fmt: skip
def choose_at_pace(  # type: ignore[no-untyped-def]
    numbers, drafts, running, counts, group, kinds, unread, pending, budget, goal, spare, linear, token, context,
    draft_linear, draft_token, draft_context, mean, thresholds, chosen, rest, idle,
):  # fmt: skip
    """The same where steps take what is known of this machine: seconds of drafting; a try's are spent."""
    pace = pace_of(mean)
    tries = spare[0] / (ROW if idle[0] > 0 else 1)
    seconds, of_drafts, of_width = choose(
        numbers, drafts, running, counts, group, kinds, unread, pending, budget, goal / pace, tries / pace,
        spare[1] / pace, linear, token, context, draft_linear, draft_token, draft_context, verifying_of(mean),
        drafting_of(mean), thresholds, chosen, rest,
    )  # fmt: skip
    spare[0] -= of_drafts * pace
    spare[1] -= of_width * pace
    return seconds * pace


@njit(types.UniTuple(_F64, 3)(_BYTES, _I64, _I64, _FLOATS, _F64, _F64, _FLOATS, _F64, _F64), cache=True)
def expected(  # type: ignore[no-untyped-def]
    drafted, unread, read, linear, token, context, draft_linear, draft_token, draft_context
):
    """Seconds of drafting, in its first pass, which reads so many tokens, and in those after it, and of the target, by
    the profiles."""
    passes = np.zeros(MAX_DRAFT_TOKENS, np.int64)
    width = 0
    for length in drafted:
        width += 1 + length
        for j in range(min(length, MAX_DRAFT_TOKENS)):
            passes[j] += 1
    again = read * (width - drafted.shape[0]) / drafted.shape[0]
    first, further = 0.0, 0.0
    if passes[0] > 0:
        first = draft_linear[0] + _seconds(draft_linear, draft_token, 0.0, passes[0], 0)
        first += _reading(draft_linear, passes[0], max(0, unread - passes[0]))
    for some in passes[1:]:
        if some > 0:
            further += _seconds(draft_linear, draft_token, 0.0, some, 0)
    further += draft_context * again
    return first, further, _seconds(linear, token, context, width, read + again * AGAIN / 100)


@njit(
    types.void(
        _ROW, _BYTES, _I64, _F64, _F64, _INTS, _FLOATS, _F64, _F64, _FLOATS, _F64, _F64, _FLOATS, _TABLE, _FLOATS,
        _FLOATS, types.boolean,
    ),
    cache=True,
)  # fmt: skip
def observe_seconds(  # type: ignore[no-untyped-def]
    slots, drafted, read, seconds, draft_seconds, unread, linear, token, context, draft_linear, draft_token,
    draft_context, mean, covariance, noise, spare, begun,
):  # fmt: skip
    missed, tokens = 0, 0
    for i in range(drafted.shape[0]):
        if drafted[i] > 0:
            missed += unread[slots[i]]
            tokens += drafted[i]
    tokens += drafted.shape[0] if tokens > 0 else 0
    first, further, target = expected(
        drafted, missed, read, linear, token, context, draft_linear, draft_token, draft_context
    )  # fmt: skip
    observe_step(
        mean, covariance, noise, (seconds - draft_seconds) / target, drafted.shape[0], tokens, draft_seconds, first,
        further,
    )  # fmt: skip
    for i in range(2):
        most = (SAVES if begun else FIRST) * seconds
        spare[i] = min(spare[i] + TRIES[i] * seconds, most) if begun else most


@njit(types.void(_ROW, _ROW, _ROW, _BYTES, _BYTES, _COUNTS, _COUNTS, _INTS, _INTS, _ROW), cache=True)
def observe(slots, known, asked, drafted, emitted, counts, group, kinds, unread, idle):  # type: ignore[no-untyped-def]
    idle[0] = 0 if drafted.any() else idle[0] + 1
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot < 0:
            continue
        own, kind = counts[slot], group[kinds[slot]]
        own *= KEEPS if asked[i] > 0 else IDLE_KEEPS
        if asked[i] > 0:
            kind[:, MAX_DRAFT_TOKENS] *= GROUP_KEEPS
            for some in (own, kind):
                some[0, MAX_DRAFT_TOKENS] += drafted[i] > 0
                some[1, MAX_DRAFT_TOKENS] += 1
        if drafted[i] > 0:
            kind[:, :MAX_DRAFT_TOKENS] *= GROUP_KEEPS
            unread[slot] = 1 + (emitted[i] > drafted[i])  # where all stayed it has not seen the last of them either
        elif known[i] == 1:
            unread[slot] += emitted[i]
        else:
            unread[slot] = emitted[i] + (0 if _follows(idle[0]) else unread[slot] + known[i])
        tried = min(drafted[i], emitted[i], MAX_DRAFT_TOKENS)  # the first that was refused is the last
        for j in range(tried):
            kept = j + 1 < emitted[i]
            for some in (own, kind):
                some[0, j] += kept
                some[1, j] += 1
