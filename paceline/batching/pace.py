"""What a group learns of its steps, live and simulated: how far the machine has been from predicted step times of late.

A shared machine is half as fast for seconds on end, and much the same for steps of all shapes, so one factor that
follows slowly repairs most of it: a running average of what steps took over what was predicted, in logarithms. A
single step counts little, however long it stalled. What other work on the machine does to steps that compute is not
what it does to those that read, but stays the same for long: a second factor of those, which follows slower.

The margin is what 99 of 100 steps are longer by than predicted so, at most, since most are as long as a goal allows: at
first the profile's error, of steps that nothing follows. It moves by little with every step, 99 times as far up as
down.

Where other models share the device a group waits for their turns. What it waited between two steps of its own, of late,
is part of the time between tokens, and of the time that several steps take. How much of the device's time it had itself
says how busy that is.
"""

# mypy: disable-error-code=no-any-return

import math

from paceline.batching.state import (
    AT,
    BEGIN,
    BESIDE,
    ERROR,
    FLYING,
    LANDED,
    MARGIN,
    PACE,
    RESTED,
    SEEN,
    SHARE,
    SHARED,
    SLICES,
    SLOT,
    STATE,
    WAITS,
    WIDE,
    State,
)
from paceline.compiled import F64, I64, VOID, entry, part
from paceline.core.request import SERIAL
from paceline.latency.step_time import WIDTHS

COMPUTES = WIDTHS[-1]  # tokens of a step that computes more than it reads
FOLLOWS, SLOWLY = 0.2, 0.05  # shares of the newest step
LONGER, SHORTER = 0.1, 0.05  # of the newest wait: a goal for every request is not held by what the average waits
MOST = 1.5  # that a step may be off by
LATELY_S = 3.0  # a share of the device's time counts for about so long
LONGEST_S = 0.02  # beside the engine; what is longer is a stall
IDLE_S = 1.0  # without a step: nobody's turn takes so long; from then on what was learnt is forgotten,
REST_S = 30.0  # after which a third of it is left
UP, DOWN = 0.0099, 0.0001


@part
def pace_of(s: State, tokens: int) -> float:
    """What a step of so many tokens takes over what is predicted for it."""
    return s.factors[PACE] * s.factors[WIDE] if tokens >= COMPUTES else s.factors[PACE]


@part
def learn(s: State, tokens: int, predicted: float, took: float) -> None:
    """A step of so many tokens took so many seconds in the engine. `predicted`: not at any pace."""
    factors, change = s.factors, took / (pace_of(s, tokens) * predicted)
    factors[MARGIN] = max(0.0, factors[MARGIN] + (UP if change > 1 + factors[MARGIN] else -DOWN))
    change = min(max(change, 1 / MOST), MOST)
    factors[PACE] *= change**FOLLOWS
    if tokens >= COMPUTES:
        factors[WIDE] *= change**SLOWLY


@part
def learn_beside(s: State, seconds: float) -> float:
    """So long it took beside the engine: messages, and who has the core. Returns what of that counts."""
    seconds = min(max(seconds, 0.0), LONGEST_S)
    s.factors[BESIDE] += FOLLOWS * (seconds - s.factors[BESIDE])
    return seconds


@part
def learn_waits(s: State) -> None:
    """A step begins. If any of its sequences were here when the last one ended, others had the device meanwhile; unless
    the model has been away."""
    step = s.steps[s.now[AT]]
    if s.now[FLYING] > 0 or len(s.linear) == 0:
        return
    for i in range(s.now[SLICES]):
        if s.numbers[step[SLOT, i], SERIAL] < s.now[SEEN]:
            learn_wait(s, s.factors[BEGIN] - s.factors[LANDED])
            return


@part
def learn_wait(s: State, seconds: float) -> None:
    """So long it was between two steps."""
    more = min(seconds, IDLE_S) - s.factors[WAITS]
    s.factors[WAITS] += (LONGER if more > 0 else SHORTER) * more


@part
def learn_share(s: State, now: float, seconds: float) -> None:
    """A step begins that each stage has for so long."""
    s.factors[SHARE], s.factors[SHARED] = share_of(s, now) + seconds / LATELY_S, now


@part
def share_of(s: State, now: float) -> float:
    """Of its device's time that the group had of late."""
    return s.factors[SHARE] * math.exp((s.factors[SHARED] - now) / LATELY_S)


@part
def forget(s: State, now: float) -> None:
    """There has been no step for a while. Who is refused for what was learnt once must not be refused for ever."""
    factors = s.factors
    idle = now - max(factors[RESTED], factors[LANDED])
    if s.now[FLYING] == 0 and idle > IDLE_S:
        left, factors[RESTED] = math.exp(-idle / REST_S), now
        factors[PACE], factors[WIDE] = factors[PACE] ** left, factors[WIDE] ** left
        factors[BESIDE] *= left
        factors[WAITS] *= left
        factors[MARGIN] = factors[ERROR] + (factors[MARGIN] - factors[ERROR]) * left


# for callers that are not compiled
learned, forgotten = entry(VOID, STATE, I64, F64, F64)(learn), entry(VOID, STATE, F64)(forget)
