"""The token budget that follows from a model's profile and a goal."""

from paceline.batching.budget import GoalBudget
from paceline.latency.profile import Profile


def goal_budget(name: str, result: Profile, maximum: int, tbt: float | None, share: float = 1.0) -> GoalBudget:
    """The budget by this profile, never wider than was measured. `share`: of a step's time that all stages together
    take in the quickest shape that the model may have. Raises ValueError for a goal that no step can hold."""
    floor = share * result.floor
    if tbt is not None and not tbt >= floor:
        raise ValueError(
            f"tbt: {name!r} cannot hold {1e3 * tbt:.1f} ms between tokens: its floor on this machine, one decode "
            f"alone, is {1e3 * floor:.1f} ms"
        )
    widest = min(maximum, result.max_tokens)
    model = result.step_time
    return GoalBudget(model.linear, model.terms, result.tile, result.knee, widest, tbt, margin=result.error.p95)
