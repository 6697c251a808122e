"""Limits of a group's steps."""

from dataclasses import dataclass, replace

WHOLE_PROMPTS = "whole_prompts"  # the policy of encoders: who looks at the whole text takes no chunks


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a group. Tokens, sequences and blocks. Raises ValueError for values that make no sense."""

    token_budget: int = 512  # new tokens of a step (Sarathi-Serve's tau); of a chunk (SARATHI's C)
    max_batch: int = 256  # sequences that are running
    block_size: int = 16
    num_blocks: int = 4096
    most_blocks: int | None = None  # with those that others on the device lend it; None: no more than its own
    watermark: float = 0.0  # share of the blocks that admission leaves free
    max_model_len: int | None = None  # tokens that `orca` and `request_level` reserve; None: what a request may need
    max_num_batched_tokens: int = 8192  # prompt tokens of a step of `prefill_first`

    def __post_init__(self) -> None:
        least = {"token_budget": 1, "max_batch": 1, "block_size": 1, "num_blocks": 0, "max_num_batched_tokens": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least {bound}")
        if self.most_blocks is not None and self.most_blocks < self.num_blocks:
            raise ValueError(f"most_blocks: {self.most_blocks} is not at least num_blocks, {self.num_blocks}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len: {self.max_model_len} is not at least 1")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: {self.watermark} is not a share in [0, 1)")

    def of_texts(self) -> "SchedulerConfig":
        """For WHOLE_PROMPTS: as many texts in a step as the budget has tokens."""
        return replace(self, max_num_batched_tokens=self.token_budget)

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)
