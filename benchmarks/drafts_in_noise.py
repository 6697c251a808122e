"""Is the choice of drafts still right where steps are noisy and differ from their profiles, and drafts catch up?

Steps of a few sequences that decode all the time, in virtual time. With drafts the target takes `verifying` times its
profile, drafting `drafting` times, its first pass `first` times that. What is observed is that times noise: a machine
whose pace drifts, steps that scatter, and now and then one that takes several times as long. What is counted is without
the noise.
"""

import math
from itertools import product

import numpy as np

from paceline.core.request import ASKED, COMPUTED, KNOWN, LIMIT, MAX_DRAFT_TOKENS, NUM_COLUMNS, PROMPT
from paceline.latency.step_time import StepTime
from paceline.speculation.costs import Costs, expected
from paceline.speculation.lookahead import Lookahead

PROMPT_TOKENS, OUTPUT, BUDGET, MOST = 64, 96, 512, 8
FIXED = (0, 1, 2, 3, 4, 6, 8)
COSTS, AT_A_TIME, ACCEPTANCES = (0.1, 0.33), (1, 4, 8, 16), (0.3, 0.6, 0.8, 0.95)
# verifying up to twice as many tokens as sequences, verifying more, drafting, its first pass
OFF = (
    (1.0, 1.0, 1.0, 1.0), (0.8, 0.8, 1.0, 1.0), (1.25, 1.25, 1.0, 1.0), (1.0, 1.0, 0.7, 1.0), (1.0, 1.0, 1.5, 1.0),
    (1.2, 1.2, 1.3, 1.0), (1.25, 1.0, 1.0, 1.0), (1.0, 1.25, 1.0, 1.0), (1.0, 1.0, 1.0, 1.6), (1.2, 1.2, 0.9, 2.0),
)  # fmt: skip
SCATTER, DRIFT, LASTS, LATE, UP_TO = 0.15, 0.2, 100, 0.02, 4.0  # logarithms; steps; share and factor of outliers
STEPS, WARM, FIXED_STEPS = 2500, 500, 600


def run(time: StepTime) -> dict:
    target, rows = Costs.of(time), []
    for cost, at_a_time, acceptance, off in product(COSTS, AT_A_TIME, ACCEPTANCES, OFF):
        world = target, target.scaled(cost), at_a_time, acceptance, off
        fixed = {k: tokens_per_s(*world, k, FIXED_STEPS) for k in FIXED}
        chosen, best = tokens_per_s(*world, None, STEPS), max(fixed, key=lambda k: fixed[k])
        rows.append({
            "draft_cost": cost, "at_a_time": at_a_time, "acceptance": acceptance,
            "verifying": off[:2], "drafting": off[2], "first": off[3],
            "best": best, "best_over_none": round(fixed[best] / fixed[0], 3),
            "chosen_over_none": round(chosen / fixed[0], 3), "chosen_over_best": round(chosen / fixed[best], 3),
        })  # fmt: skip
    over_none, over_best = ([row[key] for row in rows] for key in ("chosen_over_none", "chosen_over_best"))
    return {
        "least over none": min(over_none), "below 0.98 of none": sum(one < 0.98 for one in over_none),
        "least over the best": min(over_best), "mean over the best": round(float(np.mean(over_best)), 4),
        "below 0.97 of the best": sum(one < 0.97 for one in over_best), "rows": rows,
    }  # fmt: skip


def tokens_per_s(
    target: Costs, draft: Costs, at_a_time: int, acceptance: float, off: tuple[float, float, float, float],
    most: int | None, steps: int,
) -> float:  # fmt: skip
    """With so many drafted tokens a step, None: as many as are chosen."""
    rng, lookahead = np.random.default_rng(at_a_time), Lookahead(target, draft)
    costs = [(np.array(one.linear), one.token, one.context) for one in (target, draft)]
    slots, numbers = np.arange(at_a_time), np.zeros((at_a_time, NUM_COLUMNS), np.int64)
    numbers[:, PROMPT], numbers[:, ASKED], numbers[:, LIMIT] = PROMPT_TOKENS, PROMPT_TOKENS, PROMPT_TOKENS + OUTPUT
    numbers[:, COMPUTED] = PROMPT_TOKENS + rng.integers(0, OUTPUT, at_a_time)
    numbers[:, KNOWN] = numbers[:, COMPUTED] + 1
    pace, tokens, seconds = 0.0, 0, 0.0
    for step in range(steps):
        room = numbers[:, LIMIT] - numbers[:, KNOWN] - 1
        lengths = np.minimum(room, most or 0).astype(np.uint8)
        resting = most is None and lookahead.rests(slots, 0)
        if resting:
            lengths[:] = 0
        elif most is None:
            lengths = lookahead.choose(numbers, slots * 0 + MOST, slots, 0, BUDGET)[0][:at_a_time].astype(np.uint8)
        refused = rng.random((at_a_time, MAX_DRAFT_TOKENS)) >= acceptance
        stay = np.where(refused.any(1), refused.argmax(1), MAX_DRAFT_TOKENS)
        emitted = 1 + np.minimum(lengths, stay).astype(np.uint8)
        read, unread = int(numbers[:, COMPUTED].sum()), lookahead.unread
        unread = int(unread[slots[lengths > 0]].sum()) if len(unread) else 0
        first, further, whole = expected(lengths, unread, read, *costs[0], *costs[1])
        verifying = off[int(lengths.sum() > at_a_time)] if lengths.any() else 1.0
        drafting, whole = (first * off[3] + further) * off[2], whole * verifying
        if step >= (WARM if most is None else 0):
            tokens, seconds = tokens + int(emitted.sum()), seconds + drafting + whole
        pace += -pace / LASTS + DRIFT * math.sqrt(2 / LASTS) * rng.normal()
        late_by = np.where(rng.random(2) < LATE, rng.uniform(1, UP_TO, 2), 1)
        noise = late_by * np.exp(pace + SCATTER * rng.normal(size=2))
        lookahead.composed(resting)
        took = noise[0] * drafting + noise[1] * whole
        if lengths.any() or not lookahead.rested(slots, True, took):
            lookahead.observe_times(slots, lengths, read, took, noise[0] * drafting)
            lookahead.observe(slots, np.ones(at_a_time, np.int64), lengths, emitted)
        numbers[:, KNOWN] += emitted
        numbers[:, COMPUTED] += emitted
        for slot in np.flatnonzero(numbers[:, KNOWN] >= numbers[:, LIMIT]):
            numbers[slot, KNOWN], numbers[slot, COMPUTED] = PROMPT_TOKENS + 1, PROMPT_TOKENS
            lookahead.forget(slot)
            lookahead.unread[slot] = 1
    return tokens / seconds
