"""A real worker process around a toy model, whose KV cache holds token ids, so that every wrong block is seen.

The next token is a function of all tokens before it as read *from the cache*. Special prompt tokens cause faults:
CRASH ends the process, RAISE ends it by an exception, POISON fails the sequence, HANG stops all progress, LOSE_ONCE has
a step computed of which nobody hears.
"""

import builtins
import json
import os
import sys
import time
import zlib
from dataclasses import replace
from functools import partial

from paceline.core.work import EngineInfo, SliceOutput
from paceline.runtime import worker

CRASH, POISON, HANG, CRASH_ONCE, RAISE, LOSE_ONCE = range(901, 907)
VOCAB = 900


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(repr(tokens).encode()) % VOCAB


class ToyEngine:
    overlaps = False

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, delay: float = 0.0, marker: str = "", most_blocks: int = 0
    ) -> None:
        """`most_blocks`: with those that the worker's other engines lend it."""
        self.info = EngineInfo(num_blocks, block_size, 10, 20, 30, context=num_blocks * block_size, vocab_size=VOCAB)
        if most_blocks:
            self.info = replace(self.info, most_blocks=most_blocks, block_bytes=(100,))
        self.progress, self.draft_s = 0, 0.0
        self.waiting, self.first, self.answers = False, True, True
        self.delay, self.marker = delay, marker
        self.cache = [[-1] * block_size for _ in range(max(num_blocks, most_blocks))]
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}

    def step(self, new, slices, dropped):
        for handle in dropped:
            self.tokens.pop(handle, None), self.tables.pop(handle, None)
        for sequence in new:
            self.tokens[sequence.id], self.tables[sequence.id] = list(sequence.tokens), []
        time.sleep(self.delay)
        self.progress += 1
        return [self.slice(work) for work in slices], self.delay, 0.0

    def give_back(self, blocks) -> None:
        for block in blocks:
            self.cache[block] = [-1] * self.info.block_size

    def slice(self, work) -> SliceOutput:
        tokens, table = self.tokens[work.id], self.tables[work.id]
        table[work.first_block :] = work.blocks
        self.fault(tokens, tokens[: work.start + work.length])
        if POISON in tokens:
            return SliceOutput([], error="poisoned")
        size = self.info.block_size
        for position in range(work.start, work.start + work.length):
            self.cache[table[position // size]][position % size] = tokens[position]
        if not work.emits:
            return SliceOutput([])
        end = work.start + work.length
        seen = [self.cache[table[p // size]][p % size] for p in range(end)]
        assert seen == tokens[:end], f"the cache holds {seen}, the sequence is {tokens}"
        tokens.append(next_token(seen))
        return SliceOutput([tokens[-1]])

    def fault(self, tokens: list[int], read: list[int]) -> None:
        if CRASH in read:
            os._exit(9)
        if RAISE in read:
            raise RuntimeError("raised")
        if CRASH_ONCE in tokens and len(tokens) >= 10 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os._exit(9)
        if LOSE_ONCE in tokens and len(tokens) >= 10 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            self.answers = self.first = False
        if HANG in tokens:
            time.sleep(3600)


def loads(models: int = 1, load_s: float = 0.0, refuse: str = "", errors=(), slots=None, **options) -> list:
    """As many engines alike; loading one takes so many seconds, or fails for that reason.

    `errors`: by model, names of the exceptions that loading it for the first, second, ... and each further time
    raises, none where empty; `slots`: engines that there may be at a time.
    """
    there: set[ToyEngine] = set()

    def load(errors, progress):
        if refuse:
            raise ValueError(refuse)
        if name := errors.pop(0) if len(errors) > 1 else errors[0]:
            raise getattr(builtins, name)("toy")
        assert slots is None or len(there) < slots, "there is no place for it"
        progress(1, 1)
        time.sleep(load_s)
        engine = ToyEngine(**options)
        engine.release = lambda: there.remove(engine)
        there.add(engine)
        return engine

    return [partial(load, list(errors[model]) if errors else [""]) for model in range(models)]


def prepare() -> None:
    pass


def main(arguments: list[str]) -> None:
    options, seat = map(json.loads, arguments[:2])
    if code := options.pop("exit", 0):
        os._exit(code)
    worker.AGAIN_S = 0.01
    worker.serve(int(arguments[2]), loads(**options), seat["resident"], seat["check"])


if __name__ == "__main__":
    main(sys.argv[1:])
