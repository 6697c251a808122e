"""Batching policies by name: each composes one step's slices out of the scheduler's moves."""

from paceline.batching.scheduler import Policy, Scheduler
from paceline.core.batch import Slice
from paceline.core.request import Sequence


def sarathi_serve(scheduler: Scheduler) -> list[Slice]:
    """Stall-free batching (Sarathi-Serve, OSDI'24, Algorithm 3).

    Every decode rides in every batch and costs one token of the budget; then unfinished prompts, then new ones get
    chunks of what is left. The budget is the width of the batch, not of a chunk; more decodes than the budget all run.

    Differs from the published code under memory pressure (rules M1-M5) and in that a chunk is never negative.
    """
    # lines 6-8: pack all the decodes
    slices = []
    for sequence in tuple(scheduler.running):
        if sequence.decoding and sequence.blocks and not sequence.in_flight and scheduler.decode(sequence):
            slices.append(Slice(sequence, sequence.computed, 1, decode=True, emits=True))
    budget = scheduler.config.token_budget - len(slices)
    # lines 9-12: then the prompts that are under way
    for sequence in scheduler.running:
        if budget > 0 and not sequence.decoding and not sequence.in_flight:
            slices.append(chunk(sequence, budget))
            budget -= slices[-1].length
    # lines 13-20: then new requests, first come first served
    while budget > 0 and (admitted := scheduler.admit()):
        slices.append(chunk(admitted, budget))
        budget -= slices[-1].length
    return slices


def chunk(sequence: Sequence, budget: int) -> Slice:
    """The next part of a prompt, at most `budget` tokens; the last part yields a token."""
    length = min(sequence.prompt - sequence.computed, budget)
    end = sequence.computed + length
    return Slice(sequence, sequence.computed, length, decode=False, emits=end == sequence.prompt)


POLICIES: dict[str, Policy] = {"sarathi_serve": sarathi_serve}
