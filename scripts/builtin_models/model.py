"""A Llama decoder to train on a CPU, and the Muon optimiser for its matrices.

Parameter names and arithmetic are those of Hugging Face's `LlamaForCausalLM` (rotate-half RoPE, RMSNorm before each
block, SwiGLU, grouped-query attention), so that `state_dict()` is the checkpoint. Weights are float32;
`forward` multiplies in bfloat16 and returns float32 logits or losses.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-5


@dataclass(frozen=True)
class LlamaShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 2048
    rope_theta: float = 10000.0
    max_positions: int = 2048
    tied: bool = False  # the head is the embedding

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, length, hidden] -> the same shape."""
        batch, length, hidden = x.shape
        shape, width = self.shape, self.shape.head_dim
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(x.dtype)
        heads = F.linear(x, weight).view(batch, length, shape.heads + 2 * shape.kv_heads, width).transpose(1, 2)
        rotated, value = heads.split([shape.heads + shape.kv_heads, shape.kv_heads], dim=1)
        query, key = rotate(rotated, cos, sin).split([shape.heads, shape.kv_heads], dim=1)
        repeat = shape.heads // shape.kv_heads
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return linear(mixed.transpose(1, 2).reshape(batch, length, hidden), self.o_proj)


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.gate_proj.weight, self.up_proj.weight]).to(x.dtype)
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down_proj)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (wide * self.weight).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)


class Llama(nn.Module):
    """`forward(tokens [batch, length])` gives float32 logits [batch, length, vocab]."""

    def __init__(self, shape: LlamaShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        if not shape.tied:
            self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Uniform of variance 1/fan_in; what writes into the residual stream starts at zero."""
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                nn.init.zeros_(weight)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(weight, std=0.02 if self.shape.tied else 0.5, generator=generator)
            elif weight.dim() == 2:
                bound = (3 / weight.shape[1]) ** 0.5
                nn.init.uniform_(weight, -bound, bound, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rope_table(tokens.shape[1], self.shape, torch.bfloat16)
        x = F.embedding(tokens, self.model.embed_tokens.weight).to(torch.bfloat16)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        head = self.model.embed_tokens if self.shape.tied else self.lm_head
        return linear(self.model.norm(x), head).float()


def linear(x: Tensor, layer: nn.Linear | nn.Embedding) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype))


def rope_table(length: int, shape: LlamaShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, head_dim], the second half of the columns repeating the first."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angle = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-exponent)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Muon:
    """Momentum whose matrix update is made orthogonal (Jordan et al. 2024), with decoupled weight decay.

    The update U V^T of each [rows, columns] matrix is scaled by sqrt(max(1, rows / columns)).
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        self.matrices, self.rate, self.momentum, self.decay = matrices, rate, momentum, decay
        self.velocity = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at learning rate `rate * scale`."""
        rate = self.rate * scale
        for matrix, velocity in zip(self.matrices, self.velocity, strict=True):
            velocity.lerp_(matrix.grad, 1 - self.momentum)
            direction = orthogonalise(matrix.grad.lerp(velocity, self.momentum))
            matrix.mul_(1 - rate * self.decay)
            matrix.add_(direction, alpha=-rate * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: five steps of a quintic Newton-Schulz iteration in bfloat16."""
    x = matrix.bfloat16()
    if wide := x.shape[0] <= x.shape[1]:
        pass
    else:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x if wide else x.T).to(matrix.dtype)
