"""KV cache blocks by id: who holds which, and which hold a prefix worth keeping. No tensors.

A block is in exactly one of three places:

    free ----allocate----> held (references > 0) ----release----> free         no hash: the content is worthless
      ^                      |        ^
      |                   register    | share
      |                      v        |
      +------evicted------ cached (references == 0, hash known), least recently used goes first

The hash of a block is chained: it stands for all tokens up to the block's end, so equal hashes mean equal KV.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Blocks:
    """Accounts for `num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = []  # held before
        self._references: list[int] = []  # of the blocks ever held, which are the first ones
        self._hash_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now; cached ones give way."""
        return self.num_blocks - len(self._references) + len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Cached blocks of the longest known prefix, at most `limit`."""
        found = []
        for key in hashes[:limit]:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these nobody holds: sharing them takes them out of `num_free`."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, whose content is undefined."""
        assert count <= self.num_free, "the caller looks at num_free first"
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            elif len(self._references) < self.num_blocks:
                block = len(self._references)
                self._references.append(0)
            else:
                block, _ = self._idle.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
            self._references[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, key: int) -> None:
        """The block is now full and its KV computed: it can be found by its hash. The first one with a hash stays."""
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one holder off each. Later blocks of a sequence are evicted before earlier ones."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def forget(self) -> None:
        """Drops all cached content (the device lost it). Held blocks stay held."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._hash_of.clear()
        self._block_of.clear()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Asserts that exactly the given tables are held and that no block is lost or in two places."""
        references = [0] * len(self._references)
        for table in held:
            for block in table:
                references[block] += 1
        assert references == self._references, "references differ from the block tables"
        places = self._free + list(self._idle) + [b for b, count in enumerate(references) if count]
        assert sorted(places) == list(range(len(references))), "a block is lost or in two places"
        assert self._block_of == {key: block for block, key in self._hash_of.items()}
