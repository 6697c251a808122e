"""What the profile of a step's width shows: tiles, cliffs and the knee.

Hardware computes rows in tiles, so that a step of one token more than a tile costs as much as one of a whole tile more:
Llama-2-7B on an A100 takes 46 % more time for 136 tokens than for 128, on an H100 34 % (measured by others; SARATHI,
section 4.4, is where tiles come from). They are found by measuring, never assumed.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CHANGE_COST = 16.0  # a change of tile must make what was measured e^8 times likelier
NOISE = 0.005  # relative: the least that repeated medians differ by
PARAMETERS = 3  # of an octave's quadratic

Tiles = tuple[tuple[int, int], ...]  # (from so many tokens on, tile), ascending


class Cliff(NamedTuple):
    """The step of `tokens` + 1 tokens takes `rise` (a fraction) longer than that of `tokens`."""

    tokens: int
    rise: float


def padded(tokens: int, tiles: Tiles) -> int:
    """Rows that a step of so many tokens computes."""
    tile = next(tile for begin, tile in reversed(tiles) if tokens >= begin)
    return -(-tokens // tile) * tile


def sweep_widths(maximum: int, per_octave: int = 4) -> list[int]:
    """Widths from 1 to `maximum`: both sides of so many edges an octave, where tiles of powers of two would end."""
    widths = {maximum, *range(1, 10)}
    for exponent in range(3, maximum.bit_length()):
        part = max(1, (1 << exponent) // per_octave)
        for edge in range((1 << exponent) + part, (2 << exponent) + 1, part):
            widths |= {edge, edge + 1}
    return sorted(width for width in widths if width <= maximum)


def find_tiles(times: Mapping[int, float]) -> Tiles:
    """The tile of each octave of widths from seconds by tokens; a power of two that never shrinks as steps widen.

    Within an octave time is taken as quadratic in the padded width; the tile is that which leaves least unexplained.
    Several octaves are decided together (a shortest path): one where noise hides the tile keeps that of the one before.
    Needs widths as `sweep_widths` chooses them.
    """
    octaves = [octave for octave in _octaves(times) if len(octave) > PARAMETERS]
    if not octaves:
        return ((1, 1),)
    exponents = range(max(octaves[-1]).bit_length())
    surprise = np.array([[_surprise(octave, times, 1 << e) for e in exponents] for octave in octaves])
    moves = np.array([[0.0 if a == b else CHANGE_COST if a < b else np.inf for a in exponents] for b in exponents])
    costs = moves[:, 0] + surprise[0]
    came = []
    for row in surprise[1:]:
        came.append((moves + costs).argmin(axis=1))
        costs = (moves + costs).min(axis=1) + row
    path = [int(costs.argmin())]
    for back in reversed(came):
        path.append(int(back[path[-1]]))
    path.reverse()
    begins = [1] + [_below(octave[0]) + 1 for octave in octaves[1:]]
    changes = [0] + [i for i in range(1, len(path)) if path[i] != path[i - 1]]
    return tuple((begins[i], 1 << path[i]) for i in changes)


def find_cliffs(times: Mapping[int, float], least: float) -> list[Cliff]:
    """Neighbouring widths whose times differ by more than `least` (a fraction)."""
    rises = (Cliff(a, times[b] / times[a] - 1) for a, b in pairwise(sorted(times)) if b == a + 1)
    return [cliff for cliff in rises if cliff.rise > least]


def find_knee(seconds: Callable[[int], float], tile: int, maximum: int, share: float = 0.95) -> int:
    """The smallest multiple of the tile that computes at least `share` of the best tokens a second, up to `maximum`.

    Wider steps only delay the decodes that ride in them (SARATHI, section 3.1: prefill saturates).
    """
    widths = range(tile, maximum + 1, tile) or range(maximum, maximum + 1)
    rates = [width / seconds(width) for width in widths]
    enough = share * max(rates)
    return next(width for width, rate in zip(widths, rates, strict=True) if rate >= enough)


def _below(tokens: int) -> int:
    """The largest power of two below; octaves are (2^k, 2^(k+1)]."""
    return 1 << max(0, (tokens - 1).bit_length() - 1)


def _octaves(times: Mapping[int, float]) -> list[list[int]]:
    """Widths by octave, ascending; the first ends at 8, since narrower ones have too few widths."""
    return [list(group) for _, group in groupby(sorted(times), lambda tokens: max(4, _below(tokens)))]


def _surprise(octave: Sequence[int], times: Mapping[int, float], tile: int) -> float:
    """Twice the negative log-likelihood if rows are padded to `tile`; the octave's noise is what that leaves."""
    rows = np.array([-(-tokens // tile) * tile for tokens in octave], dtype=np.float64) / octave[-1]
    seconds = np.array([times[tokens] for tokens in octave])
    columns: NDArray[np.float64] = np.stack([np.ones_like(rows), rows, rows**2], axis=1) / seconds[:, None]
    found = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    return float(len(octave) * np.log(np.mean((columns @ found - 1) ** 2) + NOISE**2))
