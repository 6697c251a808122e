"""A mixture of experts in place of a layer's MLP (Shazeer et al., 2017; Mixtral: Jiang et al., 2024, section 2.1).

A router gives every token probabilities of the experts; the likeliest few compute, and their outputs are summed with
those probabilities as weights. Only what is chosen is read and computed. Under expert parallelism (GShard: Lepikhin et
al., 2021) every rank routes all rows, holds some of the experts, and the ranks' contributions are summed; tokens are
not sent to experts' ranks, since under tensor parallelism every rank has them all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.config import ModelConfig
from paceline.engine.linear import Linear, Norm


class Experts:
    """The router and the experts of one layer that are held here."""

    def __init__(
        self, router: Linear, held: Sequence[tuple[Linear, Linear]], local: range, per_token: int, norm_topk: bool
    ):
        """router: hidden -> experts, float32; held: gate_up and down of each expert in `local`, by their ids."""
        if len(held) != len(local):
            raise ValueError(f"local: {len(local)} experts, and weights of {len(held)}")
        self.router, self.held, self.local = router, held, local
        self.per_token, self.norm_topk = per_token, norm_topk

    def route(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """x [rows, hidden] to the weights and ids of each row's experts, both [rows, per_token]."""
        weights, chosen = self.router(x, norm).softmax(dim=1).topk(self.per_token, dim=1)
        if self.norm_topk:
            weights /= weights.sum(dim=1, keepdim=True)
        return weights, chosen

    def __call__(self, x: Tensor, norm: Norm, add_to: Tensor) -> Tensor:
        """x [rows, hidden] before the norm; adds what the experts held here contribute to `add_to`, which may be x.

        A row's sum is over its experts by id, whatever else is in the batch.
        """
        weights, chosen = self.route(x, norm)
        ids, order = chosen.flatten().sort(stable=True)
        rows, weights = order // self.per_token, weights.flatten()[order, None]
        ends = torch.searchsorted(ids, torch.arange(self.local.start, self.local.stop + 1, device=ids.device)).tolist()
        total = torch.zeros_like(x)
        for (gate_up, down), begin, end in zip(self.held, ends, ends[1:], strict=False):
            if begin < end:
                some = rows[begin:end]
                y = down(gate_up(x.index_select(0, some), norm)).mul_(weights[begin:end])
                total.index_add_(0, some, y)  # no row is there twice
        return add_to.add_(total)


def row_floats(config: ModelConfig) -> int:
    """The most that a layer holds for one row, in float32 numbers, beside the weights and all that attention needs.

    The state, the sum, and where one expert is chosen by all rows its input, normed too, and output, with three times
    what is between; the router's probabilities; ids in eight bytes.
    """
    routing = 3 * config.experts + 10 * config.experts_per_token
    return max(5 * config.hidden + 3 * config.expert_intermediate + routing, 3 * config.hidden + config.intermediate)
