"""Counter-based randomness: one Gumbel vector per (seed, choice, position), each element computed on its own.

The noise of token `id` at a position is a pure function of (seed, choice, position, id), so it does not depend on the
batch, on the order of evaluation or on which tokens survived a filter. Sampling is argmax(logits / T + G) over the
survivors, which draws from their renormalised softmax exactly. The speculation package proposes with the same vector
("coupled" mode, shared noise), which makes its output the same function as without speculation.

    stream   = hash64(seed, choice)                 once per sequence   `stream_key`
    position = hash64(stream, position)             once per row        `position_key`
    h        = hash32(position, id)                 per token           `token_hash`
    G        = -log(-log(u)),  u = (h + 1/2) / 2^32                     `gumbel`

Rejection sampling needs noise of its own, for each purpose and every time that it is tried: `lane_key` gives a stream
for a lane of a round, with the number of tokens known at its beginning for a name. Rounds always get on, so no name
comes twice.

G lies in [-3.13, 22.9]; what the 32 bits cut off the tail is a total-variation error below 1e-9. For one position
`token_hash` is a bijection of ids, so no two tokens share a value. The same arithmetic is written for Python integers
and torch here and for Numba in `sample_kernels` and `verdict_kernel`; tests hold them together.
"""

import torch

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
DRAFT, ACCEPT, LAST = 1, 2, 3  # lanes: what is drafted, what of it stays, the token behind
MUL_A, MUL_B, MUL_C = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB  # "triple32" by C. Wellons: bias below 0.02


def mix64(x: int) -> int:
    """The splitmix64 finaliser: a bijection of 64-bit integers in which every input bit moves every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def stream_key(seed: int, choice: int) -> int:
    """The 64-bit key of one choice of one request. Negative and longer seeds are taken modulo 2^64."""
    return mix64(mix64((seed + GOLDEN) & MASK64) ^ mix64((choice * GOLDEN + 1) & MASK64))


def position_key(stream: int, position: int) -> int:
    """The 64-bit key of the token at absolute index `position` of its sequence."""
    return mix64((stream + (position + 1) * GOLDEN) & MASK64)


def lane_key(stream: int, lane: int, known: int) -> int:
    """The stream of a lane in the round of speculation that begins with so many tokens known."""
    return position_key(mix64(stream ^ mix64(lane * GOLDEN & MASK64)), known)


def uniform(stream: int, index: int) -> float:
    """The stream's number at `index`, in [0, 1) with 53 bits."""
    return (position_key(stream, index) >> 11) * 2.0**-53


def token_hash(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Uniform 32-bit integers (as int64 in [0, 2^32)) of keys[rows, 1] int64 (bit pattern) and ids[n] int64."""
    mask = 0xFFFFFFFF
    low, high = keys & mask, (keys >> 32) & mask
    x = (ids & mask) ^ low
    x = ((x ^ (x >> 17)) * MUL_A) & mask
    x = ((x ^ (x >> 11)) + high) & mask
    x = (x * MUL_B) & mask
    x = ((x ^ (x >> 15)) * MUL_C) & mask
    return x ^ (x >> 14)


def gumbel(keys: list[int], ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise float64 [len(keys), len(ids)] for position keys and token ids, on the device of `ids`."""
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    hashes = token_hash(torch.tensor(signed, dtype=torch.int64).to(ids.device, non_blocking=True)[:, None], ids)
    complement = (0xFFFFFFFF - hashes).double() + 0.5  # 1 - u is exact where it matters: near u = 1
    return -torch.log(-torch.log1p(-complement * 2.0**-32))
