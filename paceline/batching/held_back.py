"""Why decodes that might draft do not, for whoever reads metrics."""

from paceline.batching.moves import num_waiting
from paceline.batching.state import ADAPTIVE, AT, DECODES, DRAFT, PROMPTS, RUNNING, SLICES, SLOT, TOKEN_BUDGET, State
from paceline.compiled import part
from paceline.core.request import AT_END, BY_BUDGET, HELD_BACK, KNOWN, LIMIT, MEMORY


@part
def say_why(s: State) -> None:
    """Enters it for those of the step that was just composed. What a lookahead did not choose it has said itself."""
    now, numbers, step = s.now, s.numbers, s.steps[s.now[AT]]
    waits = now[PROMPTS] + num_waiting(s) > 0 or now[SLICES] > now[DECODES]
    room = s.limits[TOKEN_BUDGET] // (2 if waits else 1) // max(1, now[RUNNING])  # of each, where all draft alike
    for i in range(now[DECODES]):
        slot = step[SLOT, i]
        if step[DRAFT, i] > 0 or s.drafts[slot] == 0:
            continue
        if numbers[slot, LIMIT] - numbers[slot, KNOWN] <= 1:
            numbers[slot, HELD_BACK] = AT_END
        elif s.limits[ADAPTIVE] == 0:
            numbers[slot, HELD_BACK] = BY_BUDGET if room < 2 else MEMORY
        elif s.chosen[slot] > 0:
            numbers[slot, HELD_BACK] = MEMORY
