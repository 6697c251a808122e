"""What a group knows of its drafts, and when it is asked how many there are to be (`choice`).

Acceptance is learnt per sequence and place in the draft: decaying counts, over those of all sequences of its kind in
the group (about the same temperature), over what is believed of the place before. A sequence that has no drafts is
forgotten, too, its kind is not: what nobody tries would seem ever better. How often a drafter has anything to offer
(n-grams often do not) is learnt likewise. Times come from profiles of both models, and by how much real
steps differ from them is learnt as well (`times`): drafting and verifying take more than two models alone (each finds
the caches full of the other's weights, and there are verdicts to be made), and without that a draft that seems worth it
makes things slower. It is learnt from steps with drafts next to steps without any.

A draft model reads prompts while somebody drafts, and else seldom (`follows`). Drafts that are kept whole leave their
last token to be read in the next step.

Where nobody drafts, that holds for the next steps of the same sequences, too: the group rests, since asking takes its
time. It is not asked again before a try could be paid for, and what such steps were is taken in at once.
"""

import math
from dataclasses import replace

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from paceline.compiled import BOOL, CORE, F64, FLOATS, FLOATS_2D, I64, INTS, VOID, part, watched
from paceline.core.request import MAX_DRAFT_TOKENS, NUM_KINDS
from paceline.speculation.choice import COUNTS, THRESHOLDS, TRIES, choose_at_pace, follows
from paceline.speculation.costs import BYTES, Costs, expected
from paceline.speculation.times import Times, forget_a_step, observe_step, of_sequences, of_tokens

Ints = NDArray[np.int64]
ROW = types.Array(I64, 1, "A")
# what tries may cost to begin with, and at most, in steps: of drafts or none, and of other widths, of which the best is
# not seen while the second best is tried
FIRST, SAVES = np.array([5.0, 0.5]), np.array([10.0, 1.0])
KEEPS, IDLE_KEEPS = 0.97, 0.93  # of a sequence's counts: with every try, and with every step without one
GROUP_KEEPS = 0.99  # of the group's, with every draft of its kind, and every time that one is asked for


class Lookahead:
    """Chooses for a group; knows what became of drafts before. Slots are those of the group's table."""

    def __init__(self, target: Costs, draft: Costs | None, asking: float = 0.0) -> None:
        """`draft`: None where drafting costs nothing; `asking`: seconds that a step takes more for being asked for."""
        draft = draft or Costs([0.0, 0.0])
        self._target, self._draft = target.arrays, replace(draft, once=draft.once + asking).drafting.arrays
        self._asking = asking
        self.times = Times()
        self.spare = np.zeros(2)  # seconds that tries may cost: of drafts or none, and of other widths
        self._begun = False
        # accepted and tried, by place in the draft; in the last place drafts that there were, and that were asked for
        self.group = np.zeros((NUM_KINDS, 2, MAX_DRAFT_TOKENS + 1))
        self.counts = np.zeros((0, 2, MAX_DRAFT_TOKENS + 1))  # likewise, by slot
        self.kinds = np.zeros(0, np.int64)  # by slot
        self.unread = np.zeros(0, np.int64)  # by slot: known tokens that a draft model has not read
        self.idle = np.zeros(2, np.int64)  # steps in a row in which nobody drafted; tries
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


@part
def _fade(counts, begin, end, keeps):  # type: ignore[no-untyped-def]
    """Such a share stays of what was accepted and tried at these places. A loop: arrays take seconds to compile."""
    for j in range(begin, end):
        counts[0, j] *= keeps
        counts[1, j] *= keeps


@watched(BOOL(INTS, INTS, I64), *CORE)
@njit(cache=True)
def rests(rest, running, pending):  # type: ignore[no-untyped-def]
    """As `Lookahead.rests`."""
    i, count = 0, running.shape[0]
    while i < count == rest[1] and rest[2 + i] == running[i]:
        i += 1
    return rest[0] > 0 and pending == 0 and i == count


@watched(VOID(I64, F64, INTS, COUNTS, INTS, INTS, FLOATS, FLOATS, FLOATS_2D), *CORE)
@njit(cache=True)
def wake(steps, seconds, rest, counts, unread, idle, spare, mean, covariance):  # type: ignore[no-untyped-def]
    """Learns of so many steps at rest, which took so long: each yielded a token for each of the sequences."""
    idle[0] += steps
    keeps = IDLE_KEEPS**steps
    for i in range(rest[1]):
        _fade(counts[rest[2 + i]], 0, MAX_DRAFT_TOKENS + 1, keeps)
        unread[rest[2 + i]] += steps
    for i in range(2):
        spare[i] = max(spare[i], min(spare[i] + TRIES[i] * seconds, SAVES[i] * seconds / steps))
    for _ in range(steps):
        forget_a_step(mean, covariance)


@watched(
    VOID(
        ROW, BYTES, I64, F64, F64, INTS, FLOATS, F64, F64, FLOATS, F64, F64, FLOATS, FLOATS_2D, FLOATS, FLOATS, BOOL,
    ),
    *CORE,
)  # fmt: skip
@njit(cache=True)
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
        most = (SAVES[i] if begun else FIRST[i]) * seconds
        spare[i] = min(spare[i] + TRIES[i] * seconds, most) if begun else most


@watched(VOID(ROW, ROW, ROW, BYTES, BYTES, COUNTS, COUNTS, INTS, INTS, ROW), *CORE)
@njit(cache=True)
def observe(slots, known, asked, drafted, emitted, counts, group, kinds, unread, idle):  # type: ignore[no-untyped-def]
    idle[0] = 0 if drafted.any() else idle[0] + 1
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot < 0:
            continue
        own, kind = counts[slot], group[kinds[slot]]
        _fade(own, 0, MAX_DRAFT_TOKENS + 1, KEEPS if asked[i] > 0 else IDLE_KEEPS)
        if asked[i] > 0:
            _fade(kind, MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS + 1, GROUP_KEEPS)
            for some in (own, kind):
                some[0, MAX_DRAFT_TOKENS] += drafted[i] > 0
                some[1, MAX_DRAFT_TOKENS] += 1
        if drafted[i] > 0:
            _fade(kind, 0, MAX_DRAFT_TOKENS, GROUP_KEEPS)
            unread[slot] = 1 + (emitted[i] > drafted[i])  # where all stayed it has not seen the last of them either
        elif known[i] == 1:
            unread[slot] += emitted[i]
        else:
            unread[slot] = emitted[i] + (0 if follows(idle[0]) else unread[slot] + known[i])
        tried = min(drafted[i], emitted[i], MAX_DRAFT_TOKENS)  # the first that was refused is the last
        for j in range(tried):
            kept = j + 1 < emitted[i]
            for some in (own, kind):
                some[0, j] += kept
                some[1, j] += 1
