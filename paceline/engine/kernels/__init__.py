"""Kernels of the CPU path: linear layers with what comes before and after, rotations, attention over the paged cache.

All products are made of one tile, up to 12 rows of activations times 32 columns of packed weights, whose 24 vector
accumulators stay in registers while the weights stream by once: what 12 rows cost is what one costs. While more rows
pass the same weights again, from the cache, the next ones are fetched from memory, in equal parts a pass. Sums run over
the inner dimension in one order whatever the number of rows, so a sequence's bits do not depend on its batch. With AVX2
in place of AVX-512 half as many registers of half the size hold up to 6 rows, of which more than 2 pass 16 columns and
then the other 16. With AMX they are made of another one of up to 32 rows, whose sums, activations and weights are in
matrix registers: of int8, of pairs of bfloat16, and of float32 as sums of three bfloat16 each.

Numba compiles them once per machine (13 to 40 s, cached):

    common, vectors              numbers, vector instructions
    tiles, matrix_tiles          products in registers, in assembly
    passes, inputs, products     rows past panels of weights: linear layers
    memory, rotations            what is kept of new tokens
    rows, chunks                 attention: of single tokens, of parts of prompts
    threads, layers              all layers in one parallel region
    packing                      weights as they lie in a file become panels

Addresses are passed instead of arrays: taking an array apart costs a microsecond a call.
"""

from paceline.engine.kernels.chunks import CHUNK_FIELDS, attend_chunk, block_floats
from paceline.engine.kernels.common import (
    ADD,
    BYTE,
    COLUMNS,
    DEEP,
    GATE,
    KEPT_BF16,
    LINE,
    ROUNDED_BF16,
    STORE,
    TOGETHER,
)
from paceline.engine.kernels.layers import (
    LAYER_KEYS,
    LAYER_VALUES,
    PLAN_FIELDS,
    ROW_HIGH,
    ROW_INDEX,
    ROW_LOW,
    ROW_TABLE,
    ROW_WIDTH,
    RUN_COUNT,
    RUN_FIRST,
    RUN_LONGEST,
    RUN_MOST,
    SPACE,
    WINDOW,
    decoder_layers,
)
from paceline.engine.kernels.packing import ELEMENTS, pack
from paceline.engine.kernels.products import linear, padded
from paceline.engine.kernels.rotations import rotate_and_store
from paceline.engine.kernels.rows import attend_rows, most_of_run
from paceline.engine.kernels.threads import apart, moved, num_threads, rows_inside, spaces, workspace
from paceline.processor import HAS_AMX, HAS_BF16, HAS_TILES, HAS_VNNI

__all__ = [
    "ADD", "BYTE", "CHUNK_FIELDS", "COLUMNS", "DEEP", "ELEMENTS", "GATE", "HAS_AMX", "HAS_BF16", "HAS_TILES",
    "HAS_VNNI", "KEPT_BF16", "LAYER_KEYS", "LAYER_VALUES", "LINE", "PLAN_FIELDS", "ROW_HIGH", "ROW_INDEX",
    "ROUNDED_BF16", "ROW_LOW", "ROW_TABLE", "ROW_WIDTH", "RUN_COUNT", "RUN_FIRST", "RUN_LONGEST", "RUN_MOST", "SPACE",
    "STORE", "TOGETHER", "WINDOW", "apart", "attend_chunk", "attend_rows", "block_floats", "decoder_layers", "linear",
    "most_of_run", "moved", "num_threads", "pack", "padded", "rotate_and_store", "rows_inside", "spaces", "workspace",
]  # fmt: skip
