"""The paged key-value pool and how much memory there is for it.

    layer i:  keys[i], values[i]  [num_blocks, kv_heads, block_size, head_dim] float32 or float16 (`precision`)
    a token at position p of a sequence with block table t lies in block t[p // block_size], row p % block_size

The rows of one head in one block lie together: attention reads them as one stream, head by head.

Which blocks a sequence holds is the driver's business (`batching/blocks`); here are only tensors.
"""

import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.engine import pages
from paceline.engine.config import ModelConfig, ModelError
from paceline.engine.host import MARGIN, free_bytes, resident_bytes
from paceline.engine.precision import Precision

DEFAULT_POOL = 4 << 30  # bytes, when neither memory nor a number of blocks is given


class KVCache:
    """All layers' keys and values. Filled with zeros at once, so that the memory is there from the start; a pool that
    `lends` takes memory when blocks are written, until `give_back`."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, lends: bool = False,
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        shape = (config.layers, 2, num_blocks, config.kv_heads, block_size, config.head_dim)
        self._memory: mmap.mmap | None = None
        if lends:
            self._memory, pool = pages.reserved(shape, dtype)
        else:
            pool = pages.zeros(shape, dtype).zero_()
        self._use(pool)

    def _use(self, pool: Tensor) -> None:
        """pool: [layers, 2, num_blocks, kv_heads, block_size, head_dim]."""
        self.pool, self.element = pool, pool.element_size()
        self.num_blocks, self.kv_heads, self.block_size, self.head_dim = pool.shape[2:]
        self.token_bytes = pool.nbytes // (self.num_blocks * self.block_size)
        # Each layer's keys and values, made once: by row, by the rows of a head in a block, and as addresses.
        self.rows = [tuple(part.view(-1, self.head_dim) for part in layer) for layer in self.pool]
        width = self.block_size * self.head_dim
        self.head_blocks = [tuple(part.view(-1, width) for part in layer) for layer in self.pool]
        self.addresses = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in self.pool]
        self.address_table = np.array(self.addresses, np.int64).reshape(-1, 2)

    def first(self, layers: int) -> "KVCache":
        """The same memory, seen by a model that ends after these layers."""
        some = object.__new__(KVCache)
        some._use(self.pool[:layers])
        return some

    def give_back(self, blocks: Seq[int]) -> None:
        """Returns the memory of blocks of a pool that lends to the system: they are zeros until they are written."""
        assert self._memory is not None
        ids = np.unique(np.array(blocks, np.int64))
        for some in np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1):  # neighbours go together
            for part in self.pool.flatten(0, 1)[:, some[0] : some[-1] + 1]:
                begin = part.data_ptr() - self.pool.data_ptr()
                self._memory.madvise(mmap.MADV_DONTNEED, begin, part.numel() * part.element_size())

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim] at `rows` [tokens * kv_heads] of `layout`."""
        for pool, new in zip(self.rows[layer], (keys, values), strict=True):
            pool.index_copy_(0, rows, new.reshape(-1, new.shape[-1]).to(pool.dtype))

    def gather(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks in `index` [kv_heads * n] from `block_rows`: [kv_heads, n * size, dim], as
        float32."""
        keys, values = (
            pool.index_select(0, index).float().view(self.kv_heads, -1, rows.shape[1])
            for pool, rows in zip(self.head_blocks[layer], self.rows[layer], strict=True)
        )
        return keys, values


def block_rows(blocks: Tensor, kv_heads: int) -> Tensor:
    """Rows of KVCache.head_blocks for these blocks [..., n], head by head: [..., kv_heads, n]."""
    return blocks[..., None, :] * kv_heads + torch.arange(kv_heads)[:, None]


def kv_dtype(held: Precision) -> torch.dtype:
    """Of keys and values."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[held.kv]


def can_lend(config: ModelConfig, block_size: int, device: str, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the memory of a block can be given back: keys, and values, of a layer have to be whole pages."""
    piece = dtype.itemsize * config.kv_heads * block_size * config.head_dim
    return device == "cpu" and pages.LINUX and config.layers > 0 and piece % mmap.PAGESIZE == 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the process will hold, in bytes: what is there before the weights, weights, KV, the largest step."""

    baseline: int
    weights: int
    kv: int
    activations: int

    @property
    def total(self) -> int:
        return self.baseline + self.weights + self.kv + self.activations


def held_bytes(device: str = "cpu") -> int:
    """What this process holds now, or its tensors on a GPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes() if device == "cpu" else 0


def available_bytes(device: str = "cpu") -> int:
    """What could still be taken on this machine or on the device."""
    if torch.device(device).type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return free_bytes()


def pool_blocks(
    token_bytes: int, block_size: int, *, used: int, memory: int | None, useful_tokens: int, share: float = 1.0,
    device: str = "cpu",
) -> int:  # fmt: skip
    """How many blocks fit: a token takes `token_bytes`; `used` bytes of the process's `memory` are taken by all else.

    Without `memory` it is what the machine has left less a margin, at most DEFAULT_POOL, or all that a device has. Of
    that they take a `share`, and never more than `useful_tokens` need. Raises ModelError when not even one block fits.
    """
    per_block = token_bytes * block_size
    if memory is None:
        room = int(available_bytes(device) * (1 - MARGIN)) - max(0, used - held_bytes(device))
        room = min(DEFAULT_POOL, room) if device == "cpu" else room
    else:
        room = memory - used
    room = int(share * room)
    blocks = min(room // per_block, -(-useful_tokens // block_size))
    if blocks < 1:
        raise ModelError(
            f"not enough memory: {used >> 20} MiB are needed beside the KV cache and {max(0, room) >> 20} MiB remain "
            f"for it, less than one block of {block_size} tokens ({per_block >> 10} KiB)"
        )
    return blocks
