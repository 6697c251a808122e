"""What a policy may know of a model."""

from dataclasses import dataclass

from paceline.core.request import NO_SLO, SLO


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes in bytes and tokens; the weights themselves are the engine's."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    context: int  # the most tokens a sequence may have
    slo: SLO = NO_SLO

    def max_sequences(self, memory: int, length: int) -> int:
        """Sequences of `length` tokens whose KV fits in `memory` bytes beside the weights (SARATHI, section 4.3.1)."""
        return max(0, (memory - self.weight_bytes) // (length * self.kv_bytes_per_token))
