"""The token budget that follows from a model's profile and a goal."""

from paceline.batching.budget import GoalBudget
from paceline.latency.profile import Profile


def goal_budget(name: str, result: Profile, maximum: int, tbt: float | None) -> GoalBudget:
    """The budget by this profile, never wider than was measured. Raises ValueError for a goal that no step can hold."""
    if tbt is not None and tbt < result.floor:
        raise ValueError(
            f"tbt: {name!r} cannot hold {1e3 * tbt:.1f} ms between tokens: its floor on this machine, one decode "
            f"alone, is {1e3 * result.floor:.1f} ms"
        )
    widest = min(maximum, result.max_tokens)
    model = result.step_time
    return GoalBudget(model.linear, model.terms, result.tile, result.knee, widest, tbt, margin=result.error.p95)
