"""Kernels of the CPU path: linear layers with what comes before and after, rotations, attention over the paged cache.

All products are made of one tile, up to 12 rows of activations times 32 columns of packed weights, whose 24 vector
accumulators stay in registers while the weights stream by once: what 12 rows cost is what one costs. While more rows
pass the same weights again, from the cache, the next ones are fetched from memory, in equal parts a pass. Sums run over
the inner dimension in one order whatever the number of rows, so a sequence's bits do not depend on its batch. With AVX2
in place of AVX-512 half as many registers of half the size hold up to 6 rows, of which more than 2 pass 16 columns and
then the other 16. With AMX they are made of another one of up to 32 rows, whose sums, activations and weights are in
matrix registers: of int8, of pairs of bfloat16, and of float32 as sums of three bfloat16 each.

Tiles are written in assembly, since no loop that a compiler sees keeps its sums in registers this way with so few other
instructions; Numba compiles them once per machine (13 s, cached). Addresses are passed instead of arrays: taking
an array apart costs a microsecond a call. One file on purpose: Numba's cache notices changes only in a kernel's own
file.
"""

import functools
import inspect
import itertools
import threading
from collections.abc import Sequence

import numba
import numpy as np
import torch  # before Numba's threads start, so that both use torch's OpenMP library
from llvmlite import binding, ir
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.compiled import linked
from paceline.engine import pages
from paceline.engine.addresses import floats as _floats
from paceline.engine.addresses import ints as _ints
from paceline.engine.addresses import longs as _longs
from paceline.processor import HAS_AMX, HAS_AVX512, HAS_BF16, HAS_TILES, HAS_VNNI, PROCESSOR, X86_64

if not X86_64:
    raise ImportError("these kernels are written for x86-64")  # torch's operators take their place
binding.initialize_native_asmparser()
numba.config.THREADING_LAYER = "omp"
STARTED = numba.get_num_threads()  # starts them: a ValueError here and now where that layer cannot be had

VECTOR_BYTES, REGISTER, NUM_REGISTERS = (64, "zmm", 32) if HAS_AVX512 else (32, "ymm", 16)
ROWS, COLUMNS = 12 if HAS_AVX512 else 6, 32  # of a tile, at most
ALL_COLUMNS = 12 if HAS_AVX512 else 2  # rows up to which a tile has 32 columns; else it is one of 16 and one more
BYTE = 1 if HAS_VNNI else 2  # bytes of an activation in products of int8: VNNI takes bytes, else they have 16 bits
TOGETHER = 4 // BYTE  # int8 weights of a column that lie side by side
# of one of several: Zen 5 makes 223 GFLOP/s of tiles of 8 to 11 rows and 207 of 12; on Intel's front ends 12 are best
TALL = 11 if HAS_AVX512 and PROCESSOR.startswith("znver") else ROWS
MATRIX_ROWS, MATRIX_STEPS = 32, 16  # of a tile in matrix registers: at most, and at a time
MATRIX_DEPTH = 512  # weights of a panel that stay in the first cache, with a tile's activations, while all rows pass
# Of float32 in matrix registers, see `_split_assembly`: numbers of a row in a step, bytes of a tile of bfloat16, the
# parts of a number; bytes of a step of 16 rows of activations and of a panel's weights
DEEP, TILE, PARTS = 32, 1024, 3
GROUP_STEP, PANEL_STEP = PARTS * TILE, 2 * PARTS * TILE
SPLIT_STREAMS = 3  # passes of rows up to which each makes the parts of weights itself: from the first cache it takes
# 240 ns a step of 32 rows with them; where one leaves them to others it takes 340, and these 210
SPLIT_DEPTH, SPLIT_PANELS = 1024, 16  # weights of a panel whose parts are left, at most, and panels with sums meanwhile
SPLIT_AHEAD, SPLIT_FETCHES = 12288, 16  # bytes from weights in use to those fetched; lines a step if others made parts
REGISTERS = "%rdi", "%rsi", "%rdx", "%rcx", "%r8", "%r9", "%r10", "%r11", "%rax"  # a tile's arguments
SCRATCH = "%r12", "%r13", "%r14", "%r15"
# What is fetched ahead of its use goes to the second cache. The first waits for few lines and then stops the core: on a
# Zen 4 blocks of 4 KiB in any order came with 22 GB/s through the first, with 31 to 39 through the second; on an Intel
# with AMX 8 rows took 1.4 times as long as one (float32, [16384, 2048]) through the first, 1.2 through the second
FETCH = "prefetcht1"
AHEAD = 4096  # bytes from weights in use to those that are fetched meanwhile, where one pass takes all rows; for more
# than two of them twice as many: a core that computes more looks less far ahead by itself
LINE = 64  # bytes of the caches; rows of buffers lie one line more apart, since the first cache keeps few of rows that
# lie powers of 2 apart
DEPTH = 1024  # weights of a panel that stay in the second cache while all rows pass: DEPTH x COLUMNS floats
ALONE = 16  # rows from which norms, rotations and the like are shared out to threads
APART = 128  # rows of a thread from which it passes these alone through a layer, see `some_layers`
QUERIES, BLOCK_ROWS, KEYS = 32, 256, 128  # chunk attention: least tokens and rows of a block of queries, and of keys
# rows that pass a panel of weights together: with two panels they fit into the second cache; and at most, since matrix
# registers are done with weights before the next ones have come from memory
BLOCK = 192 // TALL * TALL
LARGEST_BLOCK = BLOCK * 3 // 2 if HAS_AMX else BLOCK
# bytes of a thread's own: sums of panels, and parts of weights
SUMS_SPACE = LARGEST_BLOCK * COLUMNS * 4 * (SPLIT_PANELS if HAS_AMX else 1)
TILES_SPACE = SUMS_SPACE + ((SPLIT_DEPTH // DEEP + 1) * PANEL_STEP if HAS_AMX else 0)
# Bytes of a token's heads that are read together, of scores meanwhile, and from what is in use to what is fetched: a
# core of a Zen 3 in a virtual machine reads 2 KiB here and there with 6 GB/s, 4 with 7, 8 with 9, 32 with 11, which is
# what it reads everything in order with
NEIGHBOURS, MOST_SCORES, NEAR = 32768, 1 << 17, 4096 if HAS_AVX512 else 2048
SPINS = 1024  # looks at a gate before a core is offered to others; a power of 2
STORE, ADD, GATE = 0, 1, 2  # what becomes of a product: see `_finish`
KEPT_BF16 = 1  # in place of the address of scales: weights are bfloat16

FAST = {"reassoc", "contract", "nsz", "arcp"}  # everything but ignoring infinities and NaNs, which must come through
I64, F32, LONG = types.int64, types.float32, ir.IntType(64)
EXACT = {"nogil": True, "cache": True}
OPTIONS = {**EXACT, "fastmath": FAST}
# of e^r, |r| <= ln 2 / 2, from the highest power on: the best of degree 5 that are 1 in 0, to 9.2e-8
EXP = 8.290229365e-3, 4.189839214e-2, 1.666764021e-1, 4.999914467e-1, 9.999997020e-1, 1.0
LOG2E = np.float32(1.4426950408889634)


def _by_hand(*kinds):
    """An intrinsic of Numba with such arguments from a function that builds it: build(builder, *arguments)."""

    def make(build):
        def generate(context, builder, signature, arguments):
            build(builder, *arguments)
            return context.get_dummy_value()

        def define(context, *arguments):
            return types.void(*kinds), generate

        define.__name__, define.__doc__, define.__signature__ = build.__name__, build.__doc__, inspect.signature(build)
        return intrinsic(define)

    return make


# The tile


def _assembly(rows: int, columns: int, of: str) -> str:
    """A tile: the sums of a row are in registers side by side, a step's weights behind all sums, then activations."""
    integer, mixed = of == "bytes", of == "mixed"
    a, stride, w, w_stride, steps, c, c_stride, ahead, gap = REGISTERS
    four, eight, three, place = SCRATCH  # a four and eight rows on, three strides, where a row of sums is in memory
    bases = (a, four, eight)[: (rows + 3) // 4]
    parts = range(columns * 4 // VECTOR_BYTES)  # vectors of a row
    weights = len(parts) * (ALL_COLUMNS if columns == COLUMNS else ROWS)
    spread, pairs = weights + len(parts), integer and BYTE == 2
    halves = range(2 if pairs or mixed else 1)  # of a line: what of it is multiplied together
    upper = NUM_REGISTERS - 1 if mixed else NUM_REGISTERS  # keeps the half of a number that is a bfloat16

    def register(number: int) -> str:
        return f"%{REGISTER}{number}"

    def sums(line: str) -> list[str]:
        """`line` for every part of a row of sums, with its address and its register."""
        lines = [f"movq {c}, {place}"]
        for row in range(rows):
            lines += [
                line.format(f"{VECTOR_BYTES * part}({place})", register(len(parts) * row + part)) for part in parts
            ]
            lines.append(f"addq {c_stride}, {place}")
        return lines

    def products(row: int, one: str) -> list[str]:
        """Of what is spread in `one` and all weights, added to the row's sums."""
        lines = []
        for part in parts:
            weight, total = register(weights + part), register(len(parts) * row + part)
            if pairs:
                product = one if part == parts[-1] else register(spread + 1)
                lines += [f"vpmaddwd {weight}, {one}, {product}", f"vpaddd {product}, {total}, {total}"]
            else:
                multiply = "vpdpbusd" if integer else "vdpbf16ps" if of == "pairs" else "vfmadd231ps"
                first, second = (weight, one) if integer else (one, weight)
                lines.append(f"{multiply} {first}, {second}, {total}")
        return lines

    def load(half: int, part: int, here: str) -> list[str]:
        """Weights of a half of the line `here`."""
        register_, offset = register(weights + part), VECTOR_BYTES * part
        if pairs:
            return [f"vpmovsxbw {COLUMNS * 2 * half + offset // 2}{here}, {register_}"]
        if half:
            return [f"{'vpandd' if HAS_AVX512 else 'vpand'} {offset}{here}, {register(upper)}, {register_}"]
        return [f"vmovups {offset}{here}, {register_}"] + [f"vpslld $$16, {register_}, {register_}"] * mixed

    lines = [f"movl $$0xFFFF0000, {three}d", f"vmovd {three}d, %xmm{upper}"] if mixed else []
    lines += [f"vpbroadcastd %xmm{upper}, {register(upper)}"] if mixed else []
    lines += [f"leaq ({stride},{stride},2), {three}", f"leaq ({a},{stride},4), {four}"]
    lines += [f"leaq ({four},{stride},4), {eight}", *sums("vmovups {}, {}"), "1:"]
    for step, here in enumerate((f"({w})", f"({w},{w_stride})")):
        for half in halves:
            for part in parts:
                lines += load(half, part, here)
            if half == 0:
                lines += [f"{FETCH} {offset}({ahead})" for offset in (0, LINE)] + [f"addq {gap}, {ahead}"]
            for row in range(rows):
                index = ("", f",{stride}", f",{stride},2", f",{three}")[row % 4]
                number = len(halves) * step + half
                value = f"{4 * number}({bases[row // 4]}{index})"
                one = register(spread if pairs else spread + row % (upper - spread))
                if index or integer or row % 4 or not HAS_AVX512:
                    lines.append(f"{'vpbroadcastd' if integer else 'vbroadcastss'} {value}, {one}")
                else:
                    one = value + "{{1to16}}"  # fewer instructions, more loads: for some rows
                lines += products(row, one)
    on = [f"addq $${8 * len(halves)}, {base}" for base in bases]
    lines += [f"leaq ({w},{w_stride},2), {w}", *on, f"subq $$2, {steps}", "jg 1b"]
    return "\n".join([*lines, *sums("vmovups {1}, {0}")]).replace("{{1to16}}", "{1to16}")


def _assembled(text: str, registers: Sequence[str], lost: Sequence[str]) -> ir.InlineAsm:
    """A function of numbers in `registers` that returns what they hold in the end."""
    changed = [f"={{{register[1:]}}}" for register in registers]
    kept = [str(index) for index in range(len(registers))]
    constraint = ",".join([*changed, *kept, *(f"~{{{register[1:]}}}" for register in lost), "~{memory}", "~{flags}"])
    longs = [LONG] * len(registers)
    return ir.InlineAsm(ir.FunctionType(ir.LiteralStructType(longs), longs), text, constraint, True)


def _tile_of(of: str):
    """tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap): c[rows, 32] += a[rows, steps] w[steps, 32].

    Addresses and strides in bytes; 1 to ROWS rows, `steps` is even. Of "floats", or of "bytes": 4 numbers of `a` from 1
    to 255, of BYTE bytes each, and 4 signed bytes of every column of `w` a step, summed in int32: with VNNI a column's
    four together, else two of every column and then the next two. Of "pairs": two bfloat16 of each a step, summed in
    float32; of "mixed": two floats of `a` and two bfloat16 of every column of `w`, with the bits of two steps of
    floats. Every step fetches two lines at `ahead`, which then moves on by `gap`.
    """
    lost = [*SCRATCH, *(f"%{REGISTER}{i}" for i in range(NUM_REGISTERS))]

    @intrinsic
    def tile(context, rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
        def generate(context, builder, signature, arguments):
            done = builder.append_basic_block("done")
            choice = builder.switch(arguments[0], done)
            # without such registers nobody calls it, and the assembler refuses it
            for count in range(1, ROWS + 1) if (HAS_BF16 if of == "pairs" else HAS_TILES) else ():
                block = builder.append_basic_block(f"rows{count}")
                choice.add_case(LONG(count), block)
                builder.position_at_end(block)
                columns = COLUMNS if count <= ALL_COLUMNS else COLUMNS // 2
                form = _assembled(_assembly(count, columns, of), REGISTERS, lost)
                after = builder.call(form, arguments[1:])
                if columns < COLUMNS:  # then the other half, which goes on with what is fetched
                    others = list(arguments[1:])
                    others[2] = builder.add(others[2], LONG(columns * (2 if of == "bytes" else 4)))
                    others[5] = builder.add(others[5], LONG(columns * 4))
                    others[7] = builder.extract_value(after, 7)
                    builder.call(form, others)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return tile


_float_tile, _byte_tile, _bf16_tile, _mixed_tile = (_tile_of(of) for of in ("floats", "bytes", "pairs", "mixed"))


def _matrix_assembly(high: bool, integer: bool) -> str:
    """A tile in matrix registers, of 17 to MATRIX_ROWS rows if `high`, else of up to 16.

    The first four hold sums, two columns of two rows, the next two activations, the last two weights.
    """
    a, stride, w, w_stride, steps, c, c_stride, ahead, gap = REGISTERS
    fresh, lower_a, lower_c, on = SCRATCH
    rows = [(a, c), (lower_a, lower_c)] if high else [(a, c)]
    places = [(i, half, place) for i, (_, place) in enumerate(rows) for half in (0, 1)]
    sums = [(f"{64 * half}({place},{c_stride})", f"%tmm{2 * i + half}") for i, half, place in places]
    lines = []
    for first, by, lower in ((a, stride, lower_a), (c, c_stride, lower_c)):
        lines += [f"movq {by}, {lower}", f"shlq $$4, {lower}", f"addq {first}, {lower}"]
    lines += [f"movq {w_stride}, {on}", f"shlq $$4, {on}"]
    lines += [f"testq {fresh}, {fresh}", "jnz 2f", *(f"tileloadd {place}, {register}" for place, register in sums)]
    lines += ["jmp 1f", "2:", *(f"tilezero {register}" for _, register in sums), "1:"]
    for i, (some, _) in enumerate(rows):
        lines.append(f"tileloadd ({some},{stride}), %tmm{4 + i}")
        for half in (0, 1):
            if i == 0:
                lines.append(f"tileloadd {64 * half}({w},{w_stride}), %tmm{6 + half}")
            multiply = "tdpbusd" if integer else "tdpbf16ps"
            lines.append(f"{multiply} %tmm{6 + half}, %tmm{4 + i}, %tmm{2 * i + half}")
    if integer:
        lines += [f"{FETCH} ({ahead})", f"leaq ({ahead},{gap},2), {ahead}"] * (MATRIX_STEPS // 2)
    lines += [*(f"addq $${4 * MATRIX_STEPS}, {some}" for some, _ in rows), f"addq {on}, {w}"]
    lines += [f"subq $${MATRIX_STEPS}, {steps}", "jg 1b"]
    return "\n".join([*lines, *(f"tilestored {register}, {place}" for place, register in sums)])


def _by_height(builder, arguments, assembly, registers: Sequence[str], lost: Sequence[str]) -> None:
    """Runs the form of a tile in matrix registers, assembly(high), for so many rows, the first of `arguments`."""
    if HAS_AMX:
        with builder.if_else(builder.icmp_signed(">", arguments[0], LONG(16))) as forms:
            for form, high in zip(forms, (True, False), strict=True):
                with form:
                    builder.call(_assembled(assembly(high), registers, lost), arguments[1:])


def _matrix_tile_of(integer: bool):
    """As a tile of bytes or of pairs of bfloat16, of up to MATRIX_ROWS rows that `_shape` was told; `steps` is a
    multiple of MATRIX_STEPS. If `fresh` c is written and not added to. Of bytes every second step fetches a line, since
    two neighbours come together; of pairs none does."""

    @intrinsic
    def tile(context, rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap, fresh):
        def generate(context, builder, signature, arguments):
            assembly = functools.partial(_matrix_assembly, integer=integer)
            _by_height(builder, arguments, assembly, (*REGISTERS, SCRATCH[0]), SCRATCH[1:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return tile


_byte_matrix_tile, _bf16_matrix_tile = _matrix_tile_of(True), _matrix_tile_of(False)

# Parts of activations and of weights whose products are added up, in an order that loads few of them twice. The other
# three are at most 2^-21 of a product, of either sign: less than what sums of float32 lose.
PRODUCTS = (2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2)
KEEP_UPPER = "movl $$0xFFFF0000, %r14d", "vpbroadcastd %r14d, %zmm31"  # of 16 numbers the half that is a bfloat16


def _split_weights(w: str, b: str, ahead: int | None) -> list[str]:
    """The parts of DEEP weights of 32 columns at `w` to `b`; the same lines `ahead` of them are fetched."""
    whole, lines = "%zmm31", []
    for first in range(0, DEEP // 2, 2):  # two pairs of each half together; lines are read and fetched in their order
        units = []
        for i in range(4):
            pair, half = first + i // 2, i % 2
            low, high, low_part, high_part = (f"%zmm{4 * i + j}" for j in range(4))
            here, target, unit = 256 * pair + 64 * half, TILE * half + 64 * pair, []
            for part in range(PARTS):
                last = part == PARTS - 1
                lower, upper = (low, high) if last else (low_part, high_part)
                if not last:
                    unit += [f"vpandd {whole}, {low}, {lower}", f"vpandd {whole}, {high}, {upper}"]
                    unit += [f"vsubps {lower}, {low}, {low}", f"vsubps {upper}, {high}, {high}"]
                unit += [f"vpsrld $$16, {lower}, {lower}", f"vpord {lower}, {upper}, {upper}"]
                unit.append(f"vmovups {upper}, {2 * TILE * part + target}({b})")
            units.append(unit)
        for i in range(8):
            here = 256 * first + 64 * i
            lines.append(f"vmovups {here}({w}), %zmm{8 * (i // 4) + 4 * (i % 2) + i // 2 % 2}")
        rest = [line for together in zip(*units, strict=True) for line in together]
        fetches = [] if ahead is None else [f"{FETCH} {256 * first + 64 * i + ahead}({w})" for i in range(8)]
        lines += _woven(rest, fetches) if fetches else rest
    return lines


def _split_products(groups: Sequence[str], b: str, line: str) -> list[str]:
    """Loads and products of a step of one or two groups of 16 rows; their sums are in the first registers."""
    held: dict[str, str] = {}
    lines = []

    def load(place: str, register: str) -> None:
        if held.get(register) != place:
            held[register] = place
            lines.append(f"tileloadd {place}, {register}")

    for part, other in PRODUCTS:
        if len(groups) > 1:
            activations, weights = ("%tmm4", "%tmm5"), ("%tmm6", "%tmm7")
        else:  # there is room for parts that are needed again
            activations, weights = (f"%tmm{4 + part % 2}",), ("%tmm2", "%tmm3") if other else ("%tmm6", "%tmm7")
        for group, register in zip(groups, activations, strict=True):
            load(f"{TILE * part}({group},{line})", register)
        for half, register in enumerate(weights):
            load(f"{TILE * (2 * other + half)}({b},{line})", register)
        for i, one in enumerate(activations):
            lines += [f"tdpbf16ps {weight}, {one}, %tmm{2 * i + half}" for half, weight in enumerate(weights)]
    return lines


def _woven(lines: list[str], others: list[str]) -> list[str]:
    """`others` in equal distances among lines."""
    bounds = [len(lines) * i // len(others) for i in range(len(others) + 1)]
    parts = (lines[begin:end] for begin, end in itertools.pairwise(bounds))
    return [line for other, part in zip(others, parts, strict=True) for line in (other, *part)]


def _split_assembly(high: bool, streams: bool) -> str:
    """A tile of float32 in matrix registers, of 17 to MATRIX_ROWS rows if `high`, else of up to 16.

    A float32 is the sum of three bfloat16 of 8 bits each. Of activations they are made before, rounded; of weights,
    cut, here, if this tile `streams` them: while a step's products are made, the parts of the next one.
    """
    a, group, w, steps, c, b, slot, ring, fresh = REGISTERS
    lower_a, lower_c, here, after, line = *SCRATCH, "%rbx"
    groups = [a, lower_a] if high else [a]
    rows = [(0, c), (2, lower_c)] if high else [(0, c)]
    sums = [(f"{64 * half}({place},{line},2)", f"%tmm{first + half}") for first, place in rows for half in (0, 1)]
    lines = [f"leaq ({a},{group}), {lower_a}", f"leaq {16 * 4 * COLUMNS}({c}), {lower_c}", f"movq $${LINE}, {line}"]
    lines += [f"testq {fresh}, {fresh}", "jnz 2f", *(f"tileloadd {place}, {register}" for place, register in sums)]
    lines += ["jmp 1f", "2:", *(f"tilezero {register}" for _, register in sums), "1:"]
    on = [f"addq $${GROUP_STEP}, {some}" for some in groups]
    if streams:  # to the other one of two slots (ring: -1), or to the next one (1)
        lines += [*KEEP_UPPER, "3:", f"leaq ({b},{slot}), {here}"]
        lines += [f"imulq {ring}, {slot}", f"addq $${PANEL_STEP}, {slot}", f"leaq ({b},{slot}), {after}"]
        lines.append(f"addq $${DEEP * 4 * COLUMNS}, {w}")
        lines += _woven(_split_weights(w, after, SPLIT_AHEAD), _split_products(groups, here, line))
    else:  # w: what is fetched, every `slot` bytes
        fetches = [f"{FETCH} ({w})", f"addq {slot}, {w}"] * SPLIT_FETCHES
        lines += ["3:", *_woven(fetches, _split_products(groups, b, line)), f"addq $${PANEL_STEP}, {b}"]
    lines += [*on, f"subq $${DEEP}, {steps}", "jg 3b"]
    return "\n".join([*lines, *(f"tilestored {register}, {place}" for place, register in sums)])


def _split_tile_of(streams: bool):
    """tile(rows, a, group, w, steps, c, b, slot, ring, fresh): c[rows, 32] += a[rows, steps] w[steps, 32] of float32.

    a: the parts of each 16 rows, `group` bytes from one to the next: [steps / DEEP, PARTS, 16, DEEP] bfloat16; b: those
    of weights, [steps / DEEP, PARTS, 2, 16, 32], or two steps of them in turn. If `fresh` c is written and not added
    to. A tile that `streams` finds those of its first step at `slot` of b and leaves those of the step behind its last.
    """
    lost = [*SCRATCH, "%rbx", *(f"%zmm{i}" for i in range(32))]

    @intrinsic
    def tile(context, rows, a, group, w, steps, c, b, slot, ring, fresh):
        def generate(context, builder, signature, arguments):
            _by_height(builder, arguments, functools.partial(_split_assembly, streams=streams), REGISTERS, lost)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return tile


_split_stream_tile, _split_tile = _split_tile_of(True), _split_tile_of(False)


def _one_row_assembly() -> str:
    """The same products of one row in vectors, since matrix registers slow a core down, and rounded as there.

    Those sum the products of even numbers of a step and those of odd ones, add both and then that to what was there.
    """
    a, w, steps, c = REGISTERS[:4]
    whole, (upper, middle, rest), totals = "%zmm31", (parts := ("%zmm28", "%zmm29", "%zmm30")), ("%zmm26", "%zmm27")
    sums = [[f"%zmm{12 * half + i}" for i in range(2 * len(PRODUCTS))] for half in (0, 1)]  # each product's two
    lines = [*KEEP_UPPER, *(f"vpxord {total}, {total}, {total}" for total in totals), "1:"]
    lines += [f"vpxord {one}, {one}, {one}" for some in sums for one in some]
    for number, half in itertools.product(range(DEEP), (0, 1)):
        here = COLUMNS * 4 * number + LINE * half
        lines += [f"vmovups {here}({w}), {rest}", f"{FETCH} {here + SPLIT_AHEAD}({w})"]
        lines += [f"vpandd {whole}, {rest}, {upper}", f"vsubps {upper}, {rest}, {rest}"]
        lines += [f"vpandd {whole}, {rest}, {middle}", f"vsubps {middle}, {rest}, {rest}"]
        for (part, other), one in zip(PRODUCTS, sums[half][number % 2 :: 2], strict=True):
            lines.append(f"vfmadd231ps {4 * (DEEP * part + number)}({a}){{1to16}}, {parts[other]}, {one}")
    for total, some in zip(totals, sums, strict=True):
        for even, odd in zip(some[::2], some[1::2], strict=True):
            lines += [f"vaddps {odd}, {even}, {even}", f"vaddps {even}, {total}, {total}"]
    lines += [f"addq $${4 * PARTS * DEEP}, {a}", f"addq $${DEEP * COLUMNS * 4}, {w}"]
    lines += [f"subq $${DEEP}, {steps}", "jg 1b"]
    return "\n".join([*lines, *(f"vmovups {total}, {LINE * half}({c})" for half, total in enumerate(totals))])


@_by_hand(*[I64] * 4)
def _one_row(builder, a, w, steps, c):
    """As a tile that streams, of one row a [steps / DEEP, PARTS, DEEP] float32, to c, which is written."""
    if HAS_AMX:
        lost = ["%r14", *(f"%zmm{i}" for i in range(32))]
        builder.call(_assembled(_one_row_assembly(), REGISTERS[:4], lost), [a, w, steps, c])


@_by_hand(I64, I64)
def _split_first(builder, w, b):
    """The parts of a panel's first DEEP weights at `w` to `b`, for a tile that streams."""
    if not HAS_AMX:
        return
    lost = ["%r14", *(f"%zmm{i}" for i in range(32))]
    form = _assembled("\n".join([*KEEP_UPPER, *_split_weights("%rdi", "%rsi", None)]), ("%rdi", "%rsi"), lost)
    builder.call(form, [w, b])


def _matrix_shape(rows: int) -> bytes:
    """What matrix registers hold in a tile of so many rows: palette 1, bytes a row, rows."""
    upper, lower = min(rows, 16), max(rows - 16, 1)
    # up to 16 rows leave four to more weights and activations
    others = (lower, lower, upper, lower) if rows > 16 else (MATRIX_STEPS, MATRIX_STEPS, upper, upper)
    registers = upper, upper, *others, MATRIX_STEPS, MATRIX_STEPS
    return bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *registers, *[0] * 8])


@_by_hand(I64)
def _shape(builder, rows):
    """Makes matrix registers ready for tiles of so many rows, which takes as long as one; 0: gives them back."""
    if not HAS_AMX:
        return
    data = bytearray().join(map(_matrix_shape, range(MATRIX_ROWS + 1)))
    kind, nothing = ir.ArrayType(ir.IntType(8), len(data)), ir.VoidType()
    shapes = builder.ptrtoint(cgutils.global_constant(builder, "shapes", ir.Constant(kind, data)), LONG)
    with builder.if_else(builder.icmp_signed("==", rows, LONG(0))) as (none, some):
        with none:
            builder.call(ir.InlineAsm(ir.FunctionType(nothing, []), "tilerelease", "", True), [])
        with some:
            load = ir.InlineAsm(ir.FunctionType(nothing, [LONG]), "ldtilecfg ($0)", "r,~{memory}", True)
            builder.call(load, [builder.add(shapes, builder.shl(rows, LONG(6)))])


# Each compiled once: what they are used in would hold a copy.


@njit(types.void(*[I64] * 10), **OPTIONS)
def _float_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    _float_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@njit(types.void(*[I64] * 10), **OPTIONS)
def _byte_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    _byte_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@njit(types.void(*[I64] * 10), **OPTIONS)
def _bf16_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    _bf16_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@njit(types.void(*[I64] * 10), **OPTIONS)
def _mixed_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap):
    _mixed_tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap)


@njit(types.UniTuple(I64, 2)(types.boolean), inline="always", **OPTIONS)
def _tall(matrices):
    """Rows of a tile, in matrix registers or in vectors: of the only one at most, and of one of several."""
    return (MATRIX_ROWS, MATRIX_ROWS) if matrices else (ROWS, TALL)


@njit(I64(I64, types.boolean), inline="always", **OPTIONS)
def _height(left, matrices):
    """Of the next tile, with so many rows left: all are about equal, since a low one takes as long as one of 6, and
    matrix registers keep their shape."""
    most, tall = _tall(matrices)
    return left if left <= most else (left - 1) // ((left + tall - 1) // tall) + 1


@njit(I64(I64, I64), inline="always", **OPTIONS)
def _shaped(rows, shape):
    """What matrix registers are ready for from now on, if `shape` is what they were."""
    if rows != shape:
        _shape(rows)
    return rows


@njit(types.void(*[I64] * 10, types.boolean), **OPTIONS)
def _byte_matrix_rows(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap, fresh):
    """A tile of bytes in matrix registers; what is left of `steps` is not, and fetches nothing."""
    whole = steps // MATRIX_STEPS * MATRIX_STEPS
    if whole:
        _byte_matrix_tile(rows, a, a_stride, w, w_stride, whole, c, c_stride, ahead, gap, fresh)
    elif fresh:
        carray(_floats(c), (rows * COLUMNS,))[:] = np.float32(0.0)
    for row in range(0, rows if whole < steps else 0, ROWS):
        _byte_rows(
            min(rows - row, ROWS), a + row * a_stride + whole * 4, a_stride, w + whole * w_stride, w_stride,
            steps - whole, c + row * c_stride, c_stride, w, 0,
        )  # fmt: skip


@njit(I64(I64), inline="always", **OPTIONS)
def _block(rows):
    """Of rows that go through linear layers together: equal parts, since few rows cost what many do."""
    tall = MATRIX_ROWS if HAS_AMX else TALL
    parts = max((rows + (BLOCK // 2 if HAS_AMX else BLOCK - 1)) // BLOCK, 1)
    return ((rows + parts - 1) // parts + tall - 1) // tall * tall


@njit(I64(types.boolean, types.boolean, *[I64] * 7, types.boolean), **OPTIONS)
def _product(matrices, bf16, shape, rows, a, a_stride, w, steps, c, fresh):
    """c[rows, 32] += a[rows, steps] w[steps, 32] of floats, or of `bf16` two a step, that are in a cache: nothing has
    to be fetched ahead. If `fresh` c is written and not added to.

    Takes and returns what `_shape` was told last; what is left of `steps` is not for matrix registers.
    """
    line, whole, row = COLUMNS * 4, steps // MATRIX_STEPS * MATRIX_STEPS if matrices else 0, 0
    if fresh and not matrices:
        carray(_floats(c), (rows * COLUMNS,))[:] = np.float32(0.0)
    while row < rows:
        height = _height(rows - row, matrices)
        here, sums = a + row * a_stride, c + row * line
        if matrices:
            shape = _shaped(height, shape)
            _bf16_matrix_tile(height, here, a_stride, w, line, whole, sums, line, w, 0, fresh)
        for low in range(0, height if whole < steps else 0, ROWS):
            some, left, weights = min(height - low, ROWS), here + low * a_stride + whole * 4, w + whole * line
            if bf16:
                _bf16_rows(some, left, a_stride, weights, line, steps - whole, sums + low * line, line, w, 0)
            else:
                _float_rows(some, left, a_stride, weights, line, steps - whole, sums + low * line, line, w, 0)
        row += height
    return shape


@njit(types.UniTuple(I64, 3)(types.boolean, *[I64] * 4), **OPTIONS)
def _fetching(matrices, rows, w, nbytes, following):
    """`ahead` and `gap` of the first tile of rows that pass weights w, and how far the next one's `ahead` is.

    Those at `following` are needed next: every pass fetches its share. A single pass fetches what it needs itself soon.
    """
    halves = 1 if HAS_AVX512 or rows <= ALL_COLUMNS else 2
    most, tall = _tall(matrices)
    passes = ((rows + tall - 1) // tall if rows > most else 1) * halves
    if passes == 1:
        return w + (AHEAD if rows <= 2 else 2 * AHEAD), 2 * LINE, 0
    part = nbytes // passes // LINE * LINE
    return following, part // (nbytes // (2 * LINE)) + 1, part * halves


# Vector instructions by hand: loops over memory that may overlap stay scalar, ten times slower.

FLOAT, VECTOR, WHOLE = ir.FloatType(), ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.IntType(32), 16)
LANES = ir.Constant(WHOLE, list(range(16)))
HALVES, SHORTS = ir.VectorType(ir.HalfType(), 16), ir.VectorType(ir.IntType(16), 16)
SUMS = VECTOR_BYTES // 4  # that a register holds
SIDES = 0, 64  # where 16 of 32 floats begin
ROUNDS = 12582912.0  # 1.5 * 2^23: what is added to it is rounded, and a whole number in its last bits


def _at(builder, address, offset=0, kind=VECTOR):
    """A pointer to what lies `offset` bytes behind an address."""
    return builder.inttoptr(builder.add(address, LONG(offset)) if offset else address, kind.as_pointer())


def _load(builder, address, offset=0, kind=VECTOR):
    return builder.load(_at(builder, address, offset, kind), align=4)


def _store(builder, value, address, offset=0):
    builder.store(value, _at(builder, address, offset, value.type), align=4)


def _call(builder, name, result, *operands):
    """Of a function of LLVM."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), operands)


def _fma(builder, *operands):
    kind = operands[0].type
    return _call(builder, f"llvm.fma.v{kind.count}f32", kind, *operands)


def _all16(value, kind=VECTOR):
    return ir.Constant(kind, [value] * 16)


def _spread(builder, number):
    """16 times a number."""
    lanes = ir.Constant(ir.VectorType(number.type, 16), ir.Undefined)
    one = builder.insert_element(lanes, number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, _all16(0, WHOLE))


def _pick(builder, first, second, lanes):
    """Numbers of two vectors; those of the second one are numbered on."""
    kind = ir.VectorType(ir.IntType(32), len(lanes))
    return builder.shuffle_vector(first, second, ir.Constant(kind, [int(lane) for lane in lanes]))


def _mask(builder, left):
    """A mask of the first `left` lanes, all where it is above 16; None of None."""
    return left and builder.icmp_signed("<", LANES, _spread(builder, builder.trunc(left, ir.IntType(32))))


def _load_some(builder, address, mask):
    """16 numbers, 0 where `mask` is not set (None: it is, everywhere); those are not read."""
    if mask is None:
        return _load(builder, address)
    zeros = ir.Constant(VECTOR, None)
    name = "llvm.masked.load.v16f32.p0"
    return _call(builder, name, VECTOR, _at(builder, address), ir.IntType(32)(4), mask, zeros)


def _store_some(builder, value, address, mask):
    if mask is None:
        _store(builder, value, address)
        return
    none, name = ir.VoidType(), "llvm.masked.store.v16f32.p0"
    _call(builder, name, none, value, _at(builder, address), ir.IntType(32)(4), mask)


def _load_shorts(builder, address, mask):
    """As `_load_some`, of numbers of 16 bits."""
    place, whole, zeros = _at(builder, address, 0, SHORTS), ir.IntType(16), ir.Constant(SHORTS, None)
    if mask is None:
        return builder.load(place, align=2)

    def load(builder, place, mask):
        return _call(builder, "llvm.masked.load.v16i16.p0", SHORTS, place, ir.IntType(32)(2), mask, zeros)

    if HAS_AVX512:
        return load(builder, place, mask)
    name = "paceline.load_shorts"  # a function, since without masks for such numbers there is a branch for each
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(SHORTS, [place.type, mask.type]), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block())
        with inside.if_then(inside.icmp_unsigned("==", inside.bitcast(function.args[1], whole), whole(0xFFFF))):
            inside.ret(inside.load(function.args[0], align=2))
        inside.ret(load(inside, *function.args))
    return builder.call(function, [place, mask])


def _load_halves(builder, address, mask):
    """As `_load_some`, of half-precision numbers."""
    return builder.fpext(builder.bitcast(_load_shorts(builder, address, mask), HALVES), VECTOR)


def _store_halves(builder, value, address, mask):
    """As `_store_some`, rounded to half precision."""
    _store_shorts(builder, builder.bitcast(builder.fptrunc(value, HALVES), SHORTS), address, mask)


def _store_bf16(builder, value, address, mask):
    """As `_store_some`, rounded to bfloat16."""
    _store_shorts(builder, _bf16(builder, value), address, mask)


def _store_shorts(builder, bits, address, mask):
    place, name = _at(builder, address, 0, SHORTS), "llvm.masked.store.v16i16.p0"
    if mask is None:
        builder.store(bits, place, align=2)
    else:
        _call(builder, name, ir.VoidType(), bits, place, ir.IntType(32)(2), mask)


def _bf16(builder, value):
    """The bits of 16 floats, rounded to bfloat16. Without such instructions nobody uses it."""
    if not HAS_BF16:
        return ir.Constant(SHORTS, None)
    kind = ir.FunctionType(SHORTS, [VECTOR])
    return builder.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v", False), [value])


def _pair(builder, low, high):
    """16 times two floats, rounded to bfloat16, in 32 bits. As `_bf16`."""
    if not HAS_BF16:
        return ir.Constant(VECTOR, None)
    shorts = ir.VectorType(ir.IntType(16), 32)
    kind = ir.FunctionType(shorts, [VECTOR, VECTOR])
    both = builder.call(ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", False), [low, high])
    return builder.bitcast(_pick(builder, both, both, np.arange(32) // 2 + np.arange(32) % 2 * 16), VECTOR)


def _loop(builder, count, firsts, turn):
    """values = turn(i, values) for i in range(count), count > 0, beginning with `firsts`; returns the last ones."""
    entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    i, values = builder.phi(LONG), [builder.phi(first.type) for first in firsts]
    afters, last = turn(i, values), builder.block
    more = builder.add(i, LONG(1))
    for phi, before, after in zip([i, *values], [LONG(0), *firsts], [more, *afters], strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(after, last)
    builder.cbranch(builder.icmp_signed("<", more, count), loop, end)
    builder.position_at_end(end)
    return afters


def _over(builder, count, each, firsts, turn, masks=HAS_AVX512):
    """values = turn(i, left, values) for every `each`, a power of 2, of `count` numbers; returns the last ones.

    `left` is how many there are from these on, or None where all are there; with `masks`, which cost little with
    AVX-512 alone, never None.
    """
    bits = LONG(each.bit_length() - 1)
    if masks:
        parts = builder.lshr(builder.add(count, LONG(each - 1)), bits)
        return _loop(builder, parts, firsts, lambda i, now: turn(i, builder.sub(count, builder.shl(i, bits)), now))

    def where(condition, values, build):
        before = builder.block
        with builder.if_then(condition):
            afters, after = build(values), builder.block
        joined = [builder.phi(value.type) for value in values]
        for phi, old, new in zip(joined, values, afters, strict=True):
            phi.add_incoming(old, before)
            phi.add_incoming(new, after)
        return joined

    whole = builder.lshr(count, bits)
    left = builder.sub(count, builder.shl(whole, bits))
    some, more = (builder.icmp_signed(">", number, LONG(0)) for number in (whole, left))
    values = where(some, firsts, lambda values: _loop(builder, whole, values, lambda i, now: turn(i, None, now)))
    return where(more, values, lambda values: turn(whole, left, values))


def _each_of(builder, choice, cases):
    """Runs cases[choice](), which build nothing that is used later."""
    done = builder.append_basic_block("done")
    which = builder.switch(choice, done)
    for number, case in enumerate(cases):
        block = builder.append_basic_block(f"case{number}")
        which.add_case(LONG(number), block)
        builder.position_at_end(block)
        case()
        builder.branch(done)
    builder.position_at_end(done)


@_by_hand(I64, I64, I64)
def _copy(builder, target, source, nbytes):
    """As C's memcpy: assigning one slice to another loops over single numbers, in case they overlap."""
    cgutils.raw_memcpy(builder, *(_at(builder, place, 0, ir.IntType(8)) for place in (target, source)), nbytes, 1)


def _converts(load, store, source_bytes, target_bytes):
    """convert(target, source, count): so many numbers, in whichever precision `load` and `store` have."""

    @_by_hand(I64, I64, I64)
    def convert(builder, target, source, count):
        def some(i, left, nothing):
            first, mask = builder.shl(i, LONG(4)), _mask(builder, left)
            value = load(builder, builder.add(source, builder.mul(first, LONG(source_bytes))), mask)
            store(builder, value, builder.add(target, builder.mul(first, LONG(target_bytes))), mask)
            return []

        _over(builder, count, 16, [], some, False)

    return convert


_narrow = _converts(_load_some, _store_halves, 4, 2)
_widen = _converts(_load_halves, _store_some, 2, 4)
_halves_to_bf16 = _converts(_load_halves, _store_bf16, 2, 2)


@njit(types.void(I64, I64, I64, I64), inline="always", **OPTIONS)
def _keep(target, source, count, element):
    """Writes floats as keys or values, of `element` bytes."""
    if element == 2:
        _narrow(target, source, count)
    else:
        _copy(target, source, count * 4)


@njit(types.void(I64, I64, I64, I64), inline="always", **OPTIONS)
def _recall(target, source, count, element):
    """Reads keys or values as floats."""
    if element == 2:
        _widen(target, source, count)
    else:
        _copy(target, source, count * 4)


def _exp16(builder, x):
    """e^x of 16 numbers up to 88, relative error below 2e-7; 0 below -87.7, where it is denormal.

    x = n ln 2 + r, |r| <= ln 2 / 2: a polynomial in r, then n into the exponent's bits. n, rounded, is in the last bits
    of x / ln 2 + ROUNDS.
    """
    x = _larger(builder, _all16(-88.0), x)  # n = -127: the power is 0
    shifted = _fma(builder, x, _all16(float(LOG2E)), _all16(ROUNDS))
    n, r = builder.fsub(shifted, _all16(ROUNDS)), x
    for part in -0.693359375, 2.12194440e-4:
        r = _fma(builder, n, _all16(float(np.float32(part))), r)
    first, *others = EXP
    p = _all16(float(np.float32(first)))
    for coefficient in others:
        p = _fma(builder, p, r, _all16(float(np.float32(coefficient))))
    power = builder.shl(builder.add(builder.bitcast(shifted, WHOLE), _all16(127, WHOLE)), _all16(23, WHOLE))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def _last_of_rows(kind: int, integer: bool):
    """finish(sums, rows, bias, excess, scales, row_scales, target, stride): sums [rows, 32] become outputs at `target`,
    rows of which are `stride` bytes apart, by `kind` as in `_finish`.

    Sums of `integer` are int32 and stand for (sums - excess) * scales * row_scales, the last a number a row, the others
    one a column.
    """

    @_by_hand(*[I64] * 8)
    def finish(builder, sums, rows, bias, excess, scales, row_scales, target, stride):
        added = [_load(builder, bias, side) for side in SIDES]
        if integer:
            more = [_load(builder, excess, side, WHOLE) for side in SIDES]
            factors = [_load(builder, scales, side) for side in SIDES]

        def row(i, nothing):
            here = builder.add(sums, builder.mul(i, LONG(COLUMNS * 4)))
            there = builder.add(target, builder.mul(i, stride))
            if integer:
                every = _spread(builder, _load(builder, builder.add(row_scales, builder.shl(i, LONG(2))), 0, FLOAT))
                counts = [_load(builder, here, side, WHOLE) for side in SIDES]
                counts = [builder.sitofp(builder.sub(*both), VECTOR) for both in zip(counts, more, strict=True)]
                by = [builder.fmul(factor, every) for factor in factors]
                outputs = [_fma(builder, *three) for three in zip(counts, by, added, strict=True)]
            else:
                sums_of = [_load(builder, here, side) for side in SIDES]
                outputs = [builder.fadd(*both) for both in zip(sums_of, added, strict=True)]
            if kind == GATE:
                gate = outputs[0]
                negative = builder.fneg(_larger(builder, gate, _all16(-88.0)))
                over = builder.fadd(_exp16(builder, negative), _all16(1.0))
                outputs = [builder.fdiv(builder.fmul(gate, outputs[1]), over)]
            for side, output in zip(SIDES, outputs, strict=False):
                if kind == ADD:
                    output = builder.fadd(output, _load(builder, there, side))
                _store(builder, output, there, side)
            return []

        _loop(builder, rows, [], row)

    return finish


_store_floats, _add_floats, _gate_floats = (_last_of_rows(kind, False) for kind in (STORE, ADD, GATE))
_store_bytes, _add_bytes, _gate_bytes = (_last_of_rows(kind, True) for kind in (STORE, ADD, GATE))


def _fetch_line(builder, address, write: int = 0, cache: int = 2):
    """Has a line of a cache, 1 or 2, ready that will be read or written soon."""
    byte, whole = ir.IntType(8), ir.IntType(32)
    place = _at(builder, address, 0, byte)
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), place, whole(write), whole(4 - cache), whole(1))


@_by_hand(I64)
def _fetch_to_write(builder, address):
    _fetch_line(builder, address, 1, 1)


@_by_hand(*[I64] * 6)
def _soften(builder, scores, count, peaks, totals, outputs, dims):
    """Online softmax of 32 queries over scores [count, 32], which become weights; `count` is even.

    peaks[0:32] and totals[0:32] are of what came before, then with these; what came before in outputs [dims, 32]
    shrinks.
    """

    def weigh(row, sums):
        line, after = builder.add(scores, builder.mul(row, LONG(COLUMNS * 4))), []
        for side, level, total in zip(SIDES, levels, sums, strict=True):
            weights = _exp16(builder, builder.fsub(_load(builder, line, side), level))  # 0 of -inf
            _store(builder, weights, line, side)
            after.append(builder.fadd(weights, total))
        return after

    before, levels = _raise_peaks(builder, scores, count, peaks)
    factors = [_exp16(builder, builder.fsub(old, level)) for old, level in zip(before, levels, strict=True)]
    _shrink(builder, totals, LONG(1), factors)
    sums = _loop(builder, count, [_load(builder, totals, side) for side in SIDES], weigh)
    _store_sides(builder, sums, totals)
    _shrink(builder, outputs, dims, factors)


@_by_hand(*[I64] * 6)
def _soften_pairs(builder, scores, count, peaks, totals, outputs, dims):
    """As `_soften`, of scores times log2 e; weights are pairs of bfloat16, a line of them for two of scores.

    A weight is 2^t, t = score - peak rounded to a 128th: the whole part of t, and 127, is its exponent, and the seven
    bits of its fraction are looked up. Peaks are rounded up to whole numbers, so factors are powers of 2, mostly 1.
    What is not a number weighs nothing; where nothing else is, totals are 0.
    """
    if not HAS_BF16:  # then nobody uses it
        return
    table = [round((2 ** (i / 128) - 1) * 128) for i in range(128)]
    kind = ir.VectorType(ir.IntType(8), 64)
    low, high = (ir.Constant(kind, table[i : i + 64]) for i in (0, 64))
    ones = builder.bitcast(_all16(0x3F803F80, WHOLE), VECTOR)

    def weigh(row, sums):
        line, after = builder.add(scores, builder.mul(row, LONG(2 * COLUMNS * 4))), []
        target = builder.add(scores, builder.mul(row, LONG(COLUMNS * 4)))
        for side, shift, total in zip(SIDES, shifts, sums, strict=True):
            scored = [_load(builder, line, COLUMNS * 4 * i + side) for i in range(2)]
            placed = [_fma(builder, score, _all16(128.0), shift) for score in scored]
            first, second = (builder.bitcast(_larger(builder, place, _all16(ROUNDS)), WHOLE) for place in placed)
            first = builder.and_(first, _all16(0xFFFF, WHOLE))
            pairs = builder.or_(first, builder.shl(second, _all16(16, WHOLE)))
            name, index = "llvm.x86.avx512.vpermi2var.qi.512", builder.bitcast(pairs, kind)
            fractions = builder.bitcast(_call(builder, name, kind, low, index, high), WHOLE)
            exponents = builder.and_(pairs, _all16(0xFF80FF80, WHOLE))
            weights = builder.or_(exponents, builder.and_(fractions, _all16(0x007F007F, WHOLE)))
            weights = builder.bitcast(weights, VECTOR)
            _store(builder, weights, target, side)
            add = ir.InlineAsm(ir.FunctionType(VECTOR, [VECTOR] * 3), "vdpbf16ps $2, $1, $0", "=v,v,v,0", False)
            after.append(builder.call(add, [weights, ones, total]))
        return after

    before, levels = _raise_peaks(builder, scores, count, peaks, whole=True)
    shifts = [_fma(builder, level, _all16(-128.0), _all16(ROUNDS + 127 * 128)) for level in levels]
    factors = []
    for old, level in zip(before, levels, strict=True):
        fall = builder.fptosi(_larger(builder, builder.fsub(old, level), _all16(-127.0)), WHOLE)
        exponent = builder.shl(builder.add(fall, _all16(127, WHOLE)), _all16(23, WHOLE))
        factors.append(builder.bitcast(exponent, VECTOR))
    changed = builder.or_(*(builder.fcmp_ordered("!=", factor, _all16(1.0)) for factor in factors))
    some = ir.IntType(16)
    with builder.if_then(builder.icmp_unsigned("!=", builder.bitcast(changed, some), some(0)), likely=False):
        _shrink(builder, totals, LONG(1), factors)
        _shrink(builder, outputs, dims, factors)
    sums = _loop(builder, builder.lshr(count, LONG(1)), [_load(builder, totals, side) for side in SIDES], weigh)
    _store_sides(builder, sums, totals)


def _raise_peaks(builder, scores, count, peaks, whole=False):
    """peaks[0:32] of 32 queries become the largest of them and of scores [count, 32], rounded up if `whole`; what they
    were, and what they are, or 0 for those that are endless."""

    def larger(row, values):
        line = builder.add(scores, builder.mul(row, LONG(2 * COLUMNS * 4)))
        new = [_load(builder, line, place) for place in (*SIDES, 128, 192)]
        return [_larger(builder, score, value) for score, value in zip(new, values, strict=True)]

    before = [_load(builder, peaks, side) for side in SIDES]
    found = _loop(builder, builder.lshr(count, LONG(1)), [*before, *before], larger)
    tops = [_larger(builder, *both) for both in zip(found[:2], found[2:], strict=True)]
    if whole:
        tops = [_call(builder, "llvm.ceil.v16f32", VECTOR, top) for top in tops]
    _store_sides(builder, tops, peaks)
    endless = [builder.fcmp_ordered("==", top, _all16(float("-inf"))) for top in tops]
    return before, [builder.select(none, _all16(0.0), top) for none, top in zip(endless, tops, strict=True)]


def _store_sides(builder, values, place):
    for side, value in zip(SIDES, values, strict=True):
        _store(builder, value, place, side)


def _shrink(builder, lines, count, factors):
    """Lines [count, 32] times a factor a column."""

    def shrink(row, nothing):
        line = builder.add(lines, builder.mul(row, LONG(COLUMNS * 4)))
        for side, factor in zip(SIDES, factors, strict=True):
            _store(builder, builder.fmul(_load(builder, line, side), factor), line, side)
        return []

    _loop(builder, count, [], shrink)


def _larger(builder, new, old):
    return builder.select(builder.fcmp_ordered(">", new, old), new, old)


def _across(builder, value, join):
    """What `join` makes of all 16 numbers of a vector, in each of them."""
    for bit in (8, 4, 2, 1):
        value = join(value, _pick(builder, value, value, np.arange(16) ^ bit))
    return value


# Keys and values are float32 or half precision: how 16 of them are read, and the power of 2 of an element's bytes.
ELEMENTS_KEPT = (_load_some, 2), (_load_halves, 1)


HEADS = (4, 2, 1) if HAS_AVX512 else (2, 1)  # query heads that share keys and values and are computed together
# heads, and keys, that are scored together: so many sums are in registers
SCORED = *((heads, SUMS // heads) for heads in HEADS), *((heads, 1) for heads in HEADS), (1, 4)


def _forms(make, shapes):
    """make(load, shift, *shape)() for each precision and shape."""
    return [functools.partial(make, *kept, *shape) for kept in ELEMENTS_KEPT for shape in shapes]


@_by_hand(*[I64] * 7)
def _score_some(builder, form, query, keys, dims, ahead, scores, width):
    """Products of query [heads, dims] and keys [rows, dims] to scores[h * width : h * width + rows] of each head; what
    lies `ahead` bytes from the keys is fetched meanwhile. Heads and rows by `form`.

    Sums run in the same order whatever it is: SUMS lanes over dims, then over the lanes.
    """

    def build(load, shift, heads, rows):
        def add(i, left, sums):
            mask = _mask(builder, left)
            place, parts = builder.add(query, builder.shl(i, LONG(6))), []
            for _ in range(heads):
                parts.append(_load_some(builder, place, mask))
                place = builder.add(place, builder.shl(dims, LONG(2)))
            place, after = builder.add(keys, builder.shl(i, LONG(4 + shift))), list(sums)
            for row in range(rows):
                _fetch_line(builder, builder.add(place, ahead))
                key = load(builder, place, mask)
                for head, part in enumerate(parts):
                    which = head * rows + row
                    for first in range(0, 16, SUMS):
                        lanes = range(first, first + SUMS)
                        pair = (_pick(builder, one, one, lanes) for one in (part, key))
                        after[which] = _fma(builder, *pair, after[which])
                place = builder.add(place, builder.shl(dims, LONG(shift)))
            return after

        zeros, lanes = ir.Constant(ir.VectorType(ir.FloatType(), SUMS), None), np.arange(SUMS)
        sums, bit = _over(builder, dims, 16, [zeros] * (heads * rows), add), SUMS // 2
        while bit:  # this bit of a lane says from which vector its sum is, while there are two
            two = len(sums) > bit
            pairs = zip(sums[:bit], sums[bit:], strict=True) if two else [(total, total) for total in sums]
            other = (lanes & bit > 0) * SUMS if two else 0
            sums = [
                builder.fadd(_pick(builder, *pair, lanes | other), _pick(builder, *pair, lanes ^ bit | other))
                for pair in pairs
            ]
            bit //= 2
        for head in range(heads):
            own = _pick(builder, sums[0], sums[0], range(head * rows, (head + 1) * rows))
            _store(builder, own, builder.add(scores, builder.mul(width, LONG(4 * head))))

    _each_of(builder, form, _forms(build, SCORED))


@_by_hand(I64, I64)
def _weigh(builder, scores, count):
    """Softmax of scores[0:count] in place; 16 numbers behind them are lost."""
    parts, nothing = builder.lshr(builder.add(count, LONG(15)), LONG(4)), _all16(float("-inf"))
    _store(builder, nothing, builder.add(scores, builder.shl(count, LONG(2))))

    def place(i):
        return builder.add(scores, builder.shl(i, LONG(6)))

    def weigh(i, sums):
        weight = _exp16(builder, builder.fsub(_load(builder, place(i)), peak))
        _store(builder, weight, place(i))
        return [builder.fadd(sums[0], weight)]

    def share(i, values):
        _store(builder, builder.fmul(_load(builder, place(i)), inverse), place(i))
        return []

    (peak,) = _loop(builder, parts, [nothing], lambda i, values: [_larger(builder, _load(builder, place(i)), *values)])
    peak = _across(builder, peak, functools.partial(_larger, builder))
    (total,) = _loop(builder, parts, [_all16(0.0)], weigh)
    inverse = builder.fdiv(_all16(1.0), _across(builder, total, builder.fadd))
    _loop(builder, parts, [], share)


@_by_hand(*[I64] * 8)
def _mix_some(builder, form, weights, width, values, count, dims, ahead, out):
    """out[h, dims] += weights[h * width :][:count] values[count, dims] of each head, 64 or fewer dims at a time; what
    lies `ahead` bytes from the values is fetched meanwhile. Heads by `form`."""

    def build(load, shift, heads):
        together = 4 if HAS_AVX512 else 4 // heads  # vectors of a row: so many sums are in registers

        def part(i, left, nothing):
            firsts = [builder.add(builder.mul(i, LONG(16 * together)), LONG(16 * j)) for j in range(together)]
            masks = [_mask(builder, left and builder.sub(dims, first)) for first in firsts]

            def add(t, sums):
                row = builder.add(values, builder.shl(builder.mul(t, dims), LONG(shift)))
                place, every = builder.add(weights, builder.shl(t, LONG(2))), []
                for _ in range(heads):
                    every.append(_spread(builder, _load(builder, place, 0, ir.FloatType())))
                    place = builder.add(place, builder.shl(width, LONG(2)))
                after = list(sums)
                for j, (first, mask) in enumerate(zip(firsts, masks, strict=True)):
                    place = builder.add(row, builder.shl(first, LONG(shift)))
                    _fetch_line(builder, builder.add(place, ahead))
                    value = load(builder, place, mask)
                    for head, weight in enumerate(every):
                        which = head * together + j
                        after[which] = _fma(builder, weight, value, after[which])
                return after

            lines = [builder.add(out, builder.shl(builder.mul(dims, LONG(head)), LONG(2))) for head in range(heads)]
            places = [builder.add(line, builder.shl(first, LONG(2))) for line in lines for first in firsts]
            masks_of = masks * heads
            before = [_load_some(builder, place, mask) for place, mask in zip(places, masks_of, strict=True)]
            for value, place, mask in zip(_loop(builder, count, before, add), places, masks_of, strict=True):
                _store_some(builder, value, place, mask)
            return []

        _over(builder, dims, 16 * together, [], part)

    _each_of(builder, form, _forms(build, [(heads,) for heads in HEADS]))


# Threads that wait for each other: one parallel region holds many steps, since to start one costs 10 to 50 us.


@intrinsic
def wait(context, gate, turn, threads):
    """Returns turn + 1 when all threads have come here; `gate` counts arrivals and starts at 0, as `turn` does.

    A waiting thread keeps its core for some microseconds and then offers it to others: on a busy machine the thread it
    waits for may need that core.
    """

    def generate(context, builder, signature, arguments):
        gate, turn, threads = arguments
        module = builder.module

        def function(name, kind):
            return module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, []), name)

        counter = builder.inttoptr(gate, LONG.as_pointer())
        builder.atomic_rmw("add", counter, LONG(1), "seq_cst")
        after = builder.add(turn, LONG(1))
        target = builder.mul(after, threads)
        entry = builder.block
        look, spin, offer, end = (builder.append_basic_block(name) for name in ("look", "spin", "offer", "end"))
        builder.branch(look)
        builder.position_at_end(look)
        spins = builder.phi(LONG)
        here = builder.load_atomic(counter, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", here, target), end, spin)
        builder.position_at_end(spin)
        builder.call(function("llvm.x86.sse2.pause", ir.VoidType()), [])
        more = builder.add(spins, LONG(1))
        full = builder.icmp_signed("==", builder.and_(more, LONG(SPINS - 1)), LONG(0))
        builder.cbranch(full, offer, look)
        builder.position_at_end(offer)
        builder.call(function("sched_yield", ir.IntType(32)), [])
        builder.branch(look)
        spins.add_incoming(LONG(0), entry)
        spins.add_incoming(more, spin)
        spins.add_incoming(more, offer)
        builder.position_at_end(end)
        return after

    return types.int64(types.int64, types.int64, types.int64), generate


# Linear layers


@_by_hand(I64, I64, I64, F32, I64)
def _norm_row(builder, x, width, norm, eps, out):
    """x [width], normed by its root mean square and `norm` [width], to out."""
    parts = range(4)  # vectors at a time, whose sums are added in the end

    def places(i, left):
        first = builder.shl(i, LONG(8))
        masks = [_mask(builder, left and builder.sub(left, LONG(16 * part))) for part in parts]
        return [builder.add(first, LONG(64 * part)) for part in parts], masks

    def square(i, left, sums):
        values = [_load_some(builder, builder.add(x, at), mask) for at, mask in zip(*places(i, left), strict=True)]
        return [_fma(builder, value, value, total) for value, total in zip(values, sums, strict=True)]

    def scaled(i, left, nothing):
        for at, mask in zip(*places(i, left), strict=True):
            value, weight = (_load_some(builder, builder.add(base, at), mask) for base in (x, norm))
            value = builder.fmul(builder.fmul(value, every), weight)
            _store_some(builder, value, builder.add(out, at), mask)
        return []

    sums = _over(builder, width, 64, [_all16(0.0)] * 4, square, False)
    total = _across(builder, functools.reduce(builder.fadd, sums), builder.fadd)
    mean = builder.fdiv(builder.extract_element(total, ir.IntType(32)(0)), builder.sitofp(width, FLOAT))
    root = _call(builder, "llvm.sqrt.f32", FLOAT, builder.fadd(mean, eps))
    every = _spread(builder, builder.fdiv(FLOAT(1.0), root))
    _over(builder, width, 64, [], scaled, False)


@_by_hand(I64, I64, I64, I64)
def _quantize_row(builder, x, width, out, scale):
    """x [width] to out, in BYTE bytes: 128 + x / scale, with the scale that is written: its largest over 127. Behind
    them up to 15 more are written."""
    bits, shift = ir.VectorType(ir.IntType(8 * BYTE), 16), LONG((16 * BYTE).bit_length() - 1)

    def place(i):
        return builder.add(x, builder.shl(i, LONG(6)))

    def larger(one, other):  # as integers: the order is that of absolute values, and a NaN is above them all
        return builder.select(builder.icmp_signed(">", one, other), one, other)

    def look(i, left, values):
        value = builder.bitcast(_load_some(builder, place(i), _mask(builder, left)), WHOLE)
        return [larger(builder.and_(value, _all16(0x7FFFFFFF, WHOLE)), values[0])]

    (found,) = _over(builder, width, 16, [_all16(0, WHOLE)], look, False)
    found = builder.bitcast(_across(builder, found, larger), VECTOR)
    peak = builder.extract_element(found, ir.IntType(32)(0))
    builder.store(builder.fdiv(peak, FLOAT(127.0)), _at(builder, scale, 0, FLOAT), align=4)
    inverse = builder.fdiv(FLOAT(127.0), peak)
    inverse = builder.select(builder.fcmp_unordered("!=", peak, FLOAT(0.0)), inverse, FLOAT(0.0))
    every = _spread(builder, inverse)

    def whole(i, left, nothing):
        value = builder.fmul(_load_some(builder, place(i), _mask(builder, left)), every)
        value = builder.add(_call(builder, "llvm.lrint.v16i32.v16f32", WHOLE, value), _all16(128, WHOLE))
        target = _at(builder, builder.add(out, builder.shl(i, shift)), 0, bits)
        builder.store(builder.trunc(value, bits), target, align=BYTE)
        return []

    _over(builder, width, 16, [], whole, False)


def _split_row_of(wide: bool):
    """split(x, width, out): the parts of x [width], filled up with zeros, to out: to one of 16 rows of
    [width / DEEP, PARTS, 16, DEEP] bfloat16, or if `wide` to [width / DEEP, PARTS, DEEP] as float32."""

    @_by_hand(I64, I64, I64)
    def split(builder, x, width, out):
        each = 4 * DEEP if wide else TILE

        def some(i, left, nothing):
            source = builder.add(x, builder.shl(i, LONG(7)))
            target = builder.add(out, builder.mul(i, LONG(PARTS * each)))
            for half in (0, 1):
                mask = _mask(builder, left and builder.sub(left, LONG(16 * half)))
                rest = _load_some(builder, builder.add(source, LONG(64 * half)), mask)
                for part in range(PARTS):
                    bits = _bf16(builder, rest)
                    number = builder.bitcast(builder.shl(builder.zext(bits, WHOLE), _all16(16, WHOLE)), VECTOR)
                    if wide:
                        _store(builder, number, target, each * part + 64 * half)
                    else:
                        builder.store(bits, _at(builder, target, each * part + 32 * half, SHORTS), align=32)
                    rest = builder.fsub(rest, number)
            return []

        _over(builder, width, DEEP, [], some)

    return split


_split_row, _widen_row = _split_row_of(False), _split_row_of(True)


@njit(types.void(*[I64] * 11), **OPTIONS)
def _finish(sums, rows, width, kind, target, stride, bias, integer, excess, scales, row_scales):
    """Products sums [rows, 32] of a panel to target [rows, width], with bias and scales.

    STORE: as they are; ADD: added to it; GATE: the panel holds 16 gates and their 16 values, to silu(gate) * value.
    """
    whole = width == (16 if kind == GATE else COLUMNS)
    there, apart = (target, stride) if whole else (sums, COLUMNS * 4)
    if kind == GATE:
        if integer:
            _gate_bytes(sums, rows, bias, excess, scales, row_scales, there, apart)
        else:
            _gate_floats(sums, rows, bias, excess, scales, row_scales, there, apart)
    elif kind == ADD and whole:
        if integer:
            _add_bytes(sums, rows, bias, excess, scales, row_scales, there, apart)
        else:
            _add_floats(sums, rows, bias, excess, scales, row_scales, there, apart)
    elif integer:
        _store_bytes(sums, rows, bias, excess, scales, row_scales, there, apart)
    else:
        _store_floats(sums, rows, bias, excess, scales, row_scales, there, apart)
    for row in range(0 if whole else rows):
        value = carray(_floats(sums + row * apart), (width,))
        output = carray(_floats(target + row * stride), (width,))
        for i in range(width):
            output[i] = value[i] + (output[i] if kind == ADD else np.float32(0.0))


@linked
@njit(types.void(*[I64] * 15), **OPTIONS)
def _panels(
    t, threads, a, a_stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, sums
):
    """A thread's share of the panels of a product: a [rows, inner], prepared, times w to c [rows, outer]."""
    columns = 16 if kind == GATE else COLUMNS
    panels = (outer + columns - 1) // columns
    integer, mixed = w_scale > KEPT_BF16, w_scale == KEPT_BF16
    a_size, size, each = (BYTE, 1, 4) if integer else (4, 2, 2) if mixed else (4, 4, 1)  # each: numbers of a step
    matrices = integer and HAS_AMX
    most, whole = (MATRIX_DEPTH, 64) if matrices and rows > MATRIX_ROWS else (DEPTH * 4 // size, 8)
    parts = (inner + most - 1) // most
    depth = ((inner + parts - 1) // parts + whole - 1) // whole * whole
    shape = 0
    for p in range(panels * t // threads, panels * (t + 1) // threads):
        width = min(columns, outer - p * columns)
        scale, excess = w_scale + p * COLUMNS * 4, w_scale + (panels + p) * COLUMNS * 4
        for first in range(0, inner, depth):
            deep = min(depth, inner - first)
            steps = deep // each
            at, nbytes = w + (p * inner + first) * COLUMNS * size, deep * COLUMNS * size
            ahead, gap, part = _fetching(matrices, rows, at, nbytes, at + nbytes)
            row = 0
            while row < rows:
                height = _height(rows - row, matrices)
                here, place = a + row * a_stride + first * a_size, sums + row * COLUMNS * 4
                target = c + row * c_stride + p * columns * 4
                if first == 0 and not matrices:
                    carray(_floats(place), (height * COLUMNS,))[:] = np.float32(0.0)
                if first + deep == inner and not matrices:  # whose tiles' loads wait for the same few places
                    for i in range(height):
                        _fetch_to_write(target + i * c_stride)
                        if width > 16:
                            _fetch_to_write(target + i * c_stride + (width - 1) * 4)
                if matrices:
                    shape = _shaped(height, shape)
                    _byte_matrix_rows(
                        height, here, a_stride, at, COLUMNS * 4, steps, place, COLUMNS * 4, ahead, gap, first == 0
                    )
                elif integer:
                    _byte_rows(height, here, a_stride, at, COLUMNS * 4, steps, place, COLUMNS * 4, ahead, gap)
                elif mixed:
                    _mixed_rows(height, here, a_stride, at, COLUMNS * 4, steps, place, COLUMNS * 4, ahead, gap)
                else:
                    _float_rows(height, here, a_stride, at, COLUMNS * 4, steps, place, COLUMNS * 4, ahead, gap)
                if first + deep == inner:
                    _finish(
                        place, height, width, kind, target, c_stride, bias + p * COLUMNS * 4, integer, excess, scale,
                        scales + row * 4,
                    )  # fmt: skip
                row += height
                ahead += part
    if matrices:
        _shape(0)


@njit(I64(I64), inline="always", **OPTIONS)
def padded(inner):
    """Numbers of a column of a panel of float32: behind the last one zeros fill up a step of matrix registers."""
    return (inner + DEEP - 1) // DEEP * DEEP if HAS_AMX else inner


@linked
@njit(types.void(*[I64] * 13), **OPTIONS)
def _split_panels(t, threads, a, group, rows, inner, w, bias, outer, kind, c, c_stride, own):
    """As `_panels`, of float32 in matrix registers; a: the parts of each 16 rows, as `_split_row` leaves them.

    Up to MATRIX_ROWS rows pass a thread's panels in one stream, so that parts of weights are made while others are
    used; so do some more, each MATRIX_ROWS for themselves. One row, of which a has the parts as `_widen_row` leaves
    them, is for vectors. Of many rows the first ones leave the parts of SPLIT_DEPTH of a panel's weights to the others.
    Where a panel has more of them, sums of some panels are kept meanwhile, since all parts of long rows would not stay
    in the second cache.
    """
    columns, size = 16 if kind == GATE else COLUMNS, COLUMNS * 4
    panels, passes = (outer + columns - 1) // columns, (rows + MATRIX_ROWS - 1) // MATRIX_ROWS
    begin, end = panels * t // threads, panels * (t + 1) // threads
    deep, parts, stream = padded(inner), own + SUMS_SPACE, passes <= SPLIT_STREAMS
    pieces = 1 if passes == 1 else (deep + SPLIT_DEPTH - 1) // SPLIT_DEPTH
    depth = ((deep + pieces - 1) // pieces + DEEP - 1) // DEEP * DEEP
    together, gap = SPLIT_PANELS if pieces > 1 else 1, max(DEEP * size // SPLIT_FETCHES // max(passes - 1, 1), 1)
    shape, slot = 0, 0
    for low in range(begin, end, together):
        for first in range(0, deep, depth):
            steps, fresh, last = min(depth, deep - first), first == 0, first + depth >= deep
            for p in range(low, min(low + together, end)):
                at, width = w + (p * deep + first) * size, min(columns, outer - p * columns)
                fetched = at + deep * size
                for row in range(0, rows, MATRIX_ROWS):
                    height, here = min(rows - row, MATRIX_ROWS), a + row // 16 * group + first // DEEP * GROUP_STEP
                    place = own + ((p - low) * LARGEST_BLOCK + row) * size
                    if rows > 1:
                        shape = _shaped(height, shape)
                    if rows == 1:
                        _one_row(a, at, steps, place)
                    elif stream or row == 0:
                        if passes > 1 or p == begin:
                            _split_first(at, parts)
                        ring = -1 if stream else 1
                        _split_stream_tile(height, here, group, at, steps, place, parts, slot, ring, fresh)
                    else:
                        _split_tile(height, here, group, fetched, steps, place, parts, gap, 0, fresh)
                        fetched += gap * SPLIT_FETCHES * (steps // DEEP)
                    if last:
                        _finish(
                            place, height, width, kind, c + row * c_stride + p * columns * 4, c_stride, bias + p * size,
                            0, 0, 0, 0,
                        )  # fmt: skip
                if passes == 1 and steps // DEEP % 2:  # the next panel's first step is in the other slot
                    slot = PANEL_STEP - slot
    if shape:
        _shape(0)


@linked
@njit(I64(*[I64] * 7, F32, *[I64] * 11), **OPTIONS)
def some_linear(
    t, threads, gate, turn, x, x_stride, norm, eps, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, shared,
    own,
):  # fmt: skip
    """A thread's share of a block of rows of `linear`; returns the turn. Few rows every thread prepares for itself. One
    that has them to itself (0 of 1) waits for nobody."""
    a, stride, scales, integer, split = x, x_stride, x, w_scale > KEPT_BF16, HAS_AMX and w_scale == 0
    if norm != 0 or integer or split:
        few, plain, one = rows <= MATRIX_ROWS if split else rows < ALONE, not (integer or split), inner * 4 + LINE
        begin, end = (0, rows) if few else (rows * t // threads, rows * (t + 1) // threads)
        normed = own + TILES_SPACE if few else shared + t * one  # a row, but where rows need nothing else
        a = own + TILES_SPACE + one if few else shared + threads * one
        a += -a % LINE
        stride = one if plain else inner * BYTE + LINE
        if split:
            stride = padded(inner) // DEEP * GROUP_STEP
        scales = a + rows * stride
        for row in range(begin, end):
            here = x + row * x_stride
            if norm != 0:
                place = a + row * stride if plain else normed
                _norm_row(here, inner, norm, eps, place)
                here = place
            if split and rows == 1:
                _widen_row(here, inner, a)
            elif split:
                _split_row(here, inner, a + row // 16 * stride + row % 16 * LINE)
            elif not plain:
                _quantize_row(here, inner, a + row * stride, scales + row * 4)
        if not few and threads > 1:
            turn = wait(gate, turn, threads)
    if split:
        _split_panels(t, threads, a, stride, rows, inner, w, bias, outer, kind, c, c_stride, own)
    else:
        _panels(t, threads, a, stride, scales, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, own)
    return wait(gate, turn, threads) if threads > 1 else turn


@njit(types.void(*[I64] * 3, F32, *[I64] * 12), parallel=True, **OPTIONS)
def linear(
    x, x_stride, norm, eps, rows, inner, w, w_scale, bias, outer, kind, c, c_stride, space, own_space, threads,
):  # fmt: skip
    """x [rows, inner], normed first unless `norm` is 0, times packed w, to c [rows, outer]. For GATE a panel gives 16.

    w: [panels, inner, 32] float32, bias [panels, 32]. If `w_scale` is KEPT_BF16, w is [panels, inner / 2, 32, 2]
    bfloat16. Unless it is that or 0, w is [panels, inner / 4, 32, 4] int8, or [panels, inner / 2, 32, 2] without VNNI,
    and w_scale [panels, 32] multiplies its columns; rows of x become whole numbers, each with its own scale. Behind
    w_scale lies 128 times the sum of every column, int32 [panels, 32], since those numbers are 128 above the values
    they stand for.
    """
    carray(_longs(space), (1,))[0] = 0
    for t in prange(threads):
        own = space + 64 + t * own_space
        shared = space + 64 + threads * own_space
        turn, block = 0, _block(rows)
        for first in range(0, rows, block):
            turn = some_linear(
                t, threads, space, turn, x + first * x_stride, x_stride, norm, eps, min(block, rows - first), inner, w,
                w_scale, bias, outer, kind, c + first * c_stride, c_stride, shared, own,
            )  # fmt: skip


# Attention. Keys and values of a layer: [num_blocks, kv_heads, size, dims], the rows of a head in a block together.


@_by_hand(I64, I64)
def _turn16(builder, pairs, turn):
    """pairs[0:16] times turn[0:16], both 8 complex numbers, in place."""
    pair, turned, lanes = _load(builder, pairs), _load(builder, turn), np.arange(16)
    real, imaginary = (_pick(builder, turned, turned, lanes // 2 * 2 + part) for part in (0, 1))
    along = builder.fmul(pair, real)
    cross = builder.fmul(_pick(builder, pair, pair, lanes ^ 1), imaginary)
    both = builder.fsub(along, cross), builder.fadd(along, cross)
    _store(builder, _pick(builder, *both, lanes + lanes % 2 * 16), pairs)


@linked
@njit(types.void(*[I64] * 6, F32, *[I64] * 7), **OPTIONS)
def _rotate_rows(
    heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, element, begin, end
):
    width = (q_heads + 2 * kv_heads) * dims * 4
    for row in range(begin, end):
        at_turn = turns + row * dims * 4
        turn = carray(_floats(at_turn), (dims,))
        place = carray(_longs(where + row * kv_heads * 8), (kv_heads,))
        for head in range(q_heads + kv_heads):
            address = heads + row * width + head * dims * 4
            pairs = carray(_floats(address), (dims,))
            norm = q_norm if head < q_heads else k_norm
            if norm != 0:
                _norm_row(address, dims, norm, eps, address)
            for i in range(0, dims - 15, 16):
                _turn16(address + i * 4, at_turn + i * 4)
            for i in range(dims // 16 * 16, dims, 2):
                real, imaginary = pairs[i], pairs[i + 1]
                pairs[i] = real * turn[i] - imaginary * turn[i + 1]
                pairs[i + 1] = real * turn[i + 1] + imaginary * turn[i]
            if head >= q_heads:
                _keep(keys + place[head - q_heads] * dims * element, address, dims, element)
        for head in range(kv_heads):
            address = heads + row * width + (q_heads + kv_heads + head) * dims * 4
            _keep(values + place[head] * dims * element, address, dims, element)


@njit(parallel=True, **OPTIONS)  # compiled when first called: `decoder_layers` does without
def rotate_and_store(
    heads, rows, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, element, threads
):
    """heads [rows, q_heads + 2 kv_heads, dims]: queries and keys normed (unless 0) and rotated, keys and values stored.

    turns [rows, dims / 2] complex; where [rows, kv_heads]: rows of dims in the layer's keys and values, whose numbers
    have `element` bytes.
    """
    if rows < ALONE:
        _rotate_rows(
            heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, element, 0, rows
        )
    else:
        for t in prange(threads):
            begin, end = rows * t // threads, rows * (t + 1) // threads
            _rotate_rows(
                heads, q_heads, kv_heads, dims, q_norm, k_norm, eps, turns, where, keys, values, element, begin, end
            )


@njit(I64(I64), inline="always", **OPTIONS)
def scores_of(count):
    """Floats that the scores of so many tokens take, whole vectors and one more."""
    return (count + 15) // 16 * 16 + 16


@njit(types.void(*[I64] * 9), **OPTIONS)
def _score(form, query, keys, count, dims, element, ahead, scores, width):
    """Products of query [HEADS[form], dims] with keys [count, dims] to scores[h * width : h * width + count]."""
    row, kept = 0, len(SCORED) * (element == 2)
    while row < count:
        shape, left = form, count - row
        if left < SCORED[form][1]:
            shape = len(SCORED) - 1 if HEADS[form] == 1 and left >= SCORED[-1][1] else len(HEADS) + form
        _score_some(kept + shape, query, keys + row * dims * element, dims, ahead, scores + row * 4, width)
        row += SCORED[shape][1]


@njit(I64(*[I64] * 6), **OPTIONS)
def _heads_together(rows, kv_heads, group, longest, block, threads):
    """Key-value heads of a token that a thread attends to together, since what a block has of them is in a row: as many
    as fill NEIGHBOURS, where their scores stay in the second cache and all threads have at least two such items."""
    heads, scores = 1, 4 * group * scores_of(longest)
    while (
        heads * block < NEIGHBOURS and kv_heads % (2 * heads) == 0 and 2 * heads * scores <= MOST_SCORES
        and rows * kv_heads >= 4 * heads * threads
    ):  # fmt: skip
        heads *= 2
    return heads


@njit(types.void(*[I64] * 16), **OPTIONS)
def _some_heads(
    query, keys, values, table, head, heads, kv_heads, low, high, size, scores, out, group, dims, element, following
):  # fmt: skip
    """One token's query heads of key-value heads [head, head + heads) over tokens [low, high); adds to out
    [heads * group, dims].

    The processor's own fetching ends where what is read does not go on. So line by line, as a head's part of a block is
    read, what comes a little later is fetched, and with the last head's what the first one has in the next block, at
    last in that at `following` (0: none): many at once would be more than a core can wait for.
    """
    first, last, width = low // size, (high - 1) // size, scores_of(high - low)
    places, block = carray(_longs(table), (last + 1,)), size * dims * element
    for part in (keys, values):
        for b in range(first, last + 1):
            begin, end = max(b * size, low), min((b + 1) * size, high)
            for h in range(heads):
                here = part + (places[b] * kv_heads + head + h) * block
                after = following
                if h + 1 < heads:
                    after = here + min(block, NEAR)
                elif b < last:
                    after = part + (places[b + 1] * kv_heads + head) * block
                elif part == keys:
                    after = values + (places[first] * kv_heads + head) * block
                ahead = after - here if after != 0 else 0
                here += (begin - b * size) * dims * element
                g, of_head, score = 0, h * group, scores + (begin - low) * 4
                while g < group:
                    form = 0
                    while HEADS[form] > group - g:
                        form += 1
                    mine, to = score + (of_head + g) * width * 4, (of_head + g) * dims * 4
                    if part == keys:
                        _score(form, query + to, here, end - begin, dims, element, ahead, mine, width)
                    else:
                        kept = len(HEADS) * (element == 2)
                        _mix_some(kept + form, mine, width, here, end - begin, dims, ahead, out + to)
                    ahead, g = 0, g + HEADS[form]
        for g in range(heads * group if part == keys else 0):
            _weigh(scores + g * width * 4, high - low)


@linked
@njit(types.void(*[I64] * 13, F32, *[I64] * 8), **OPTIONS)
def _some_rows(
    t, threads, heads, queries, stride, keys, values, index, table, width, low, high, rows, scale, group, kv_heads,
    size, dims, element, out, out_stride, own,
):  # fmt: skip
    """A thread's share of `attend_rows`, so many key-value heads at a time; `own` is for `_row_floats`."""
    row_of = carray(_longs(index), (rows,))
    begin, end = carray(_longs(low), (rows,)), carray(_longs(high), (rows,))
    numbers = heads * group * dims
    query, parts = carray(_floats(own), (numbers,)), kv_heads // heads
    for item in range(t, rows * parts, threads):
        part = item // rows  # by heads: what rows of a verification read is then still in the caches
        row = (item + part) % rows  # not the same ones for a thread every time: some read much more than others
        source = carray(_floats(queries + row_of[row] * stride + part * numbers * 4), (numbers,))
        target = out + row_of[row] * out_stride + part * numbers * 4
        for i in range(numbers):
            query[i] = source[i] * scale
        carray(_floats(target), (numbers,))[:] = np.float32(0.0)
        later = item + threads
        then, following = (later % rows + later // rows) % rows, 0
        if later < rows * parts:
            place = carray(_longs(table + then * width * 8), (width,))[begin[then] // size]
            following = keys + (place * kv_heads + later // rows * heads) * size * dims * element
        _some_heads(
            own, keys, values, table + row * width * 8, part * heads, heads, kv_heads, begin[row], end[row], size,
            own + numbers * 4, target, group, dims, element, following,
        )  # fmt: skip


@njit(I64(*[I64] * 4), inline="always", **OPTIONS)
def _row_floats(heads, group, dims, longest):
    """Of a thread that attends to tokens one by one: queries, and scores of the longest."""
    return heads * group * (dims + scores_of(longest))


@njit(parallel=True, **OPTIONS)  # compiled when first called: `decoder_layers` does without
def attend_rows(
    queries, stride, keys, values, index, table, width, low, high, rows, scale, group, kv_heads, size, dims, element,
    threads, out,
):  # fmt: skip
    """Single tokens: queries[index[i]] over tokens [low[i], high[i]) of table[i] [width], to out[index[i]].

    Keys are read in place, each once for the `group` of query heads that share it: torch has no paged attention on CPU,
    and gathering would write and read every key once more. Threads take items in turn: rows should come longest first.
    """
    longest = (carray(_longs(high), (rows,)) - carray(_longs(low), (rows,))).max()
    heads = _heads_together(rows, kv_heads, group, longest, size * dims * element, threads)
    for t in prange(threads):
        own = np.empty(_row_floats(heads, group, dims, longest), np.float32)
        _some_rows(
            t, threads, heads, queries, stride, keys, values, index, table, width, low, high, rows, scale, group,
            kv_heads, size, dims, element, out, kv_heads * group * dims * 4, own.ctypes.data,
        )  # fmt: skip


@njit(types.void(*[I64] * 7), **OPTIONS)
def _hide(scores, count, lowest, first, group, row, window):
    """Scores [count, 32] of keys from position `first` on that are not for a query: -inf. Column i is that of query
    row `row` + i, at position lowest + (row + i) // group."""
    score = carray(_floats(scores), (count * COLUMNS,))
    for i in range(COLUMNS):
        position = lowest + (row + i) // group
        for j in range(max(0, position + 1 - first), count):
            score[j * COLUMNS + i] = np.float32(-np.inf)
        if window != 0:
            for j in range(0, min(count, position - window + 1 - first)):
                score[j * COLUMNS + i] = np.float32(-np.inf)


def _exchange(builder, rows):
    """Transposes 16 vectors of 16 in place."""
    lanes = np.arange(16)
    for bit in (1, 2, 4, 8):  # exchanges this bit of a number's row and column
        for i in (i for i in range(16) if not i & bit):
            pair, other = (rows[i], rows[i | bit]), (lanes & bit > 0) * 16
            rows[i], rows[i | bit] = (_pick(builder, *pair, (lanes & ~bit | own) + other) for own in (0, bit))


def _transposes(load=_load_some, before=False, after=False):
    """transpose(sources, offset, left, scale, target, stride): 16 numbers, or `left`, at each of 16 addresses `sources`
    + offset, times scale, become columns of target, whose 16 lines are `stride` bytes apart.

    Or pairs of bfloat16: numbers at two of 32 addresses, if put together `before`, or two of 8 lines, if `after`.
    """

    def paired(builder, rows):
        return [_pair(builder, *both) for both in zip(rows[::2], rows[1::2], strict=True)]

    @_by_hand(I64, I64, I64, F32, I64, I64)
    def transpose(builder, sources, offset, left, scale, target, stride):
        every, mask, rows = _spread(builder, scale), _mask(builder, left), []
        for i in range(32 if before else 16):
            source = builder.add(_load(builder, sources, 8 * i, LONG), offset)
            rows.append(builder.fmul(load(builder, source, mask), every))
        rows = paired(builder, rows) if before else rows
        _exchange(builder, rows)
        for i, row in enumerate(paired(builder, rows) if after else rows):
            _store(builder, row, builder.add(target, builder.mul(stride, LONG(i))))

    return transpose


_transpose_floats, _transpose_halves = _transposes(), _transposes(_load_halves)
_transpose_pairs, _transpose_to_pairs = _transposes(_load_halves, before=True), _transposes(after=True)


@njit(types.void(types.boolean, *[I64] * 5, F32, *[I64] * 3), **OPTIONS)
def _queries_to_columns(bf16, queries, stride, rows, group, dims, scale, sources, target, panel):
    """Rows of queries, times scale, to panels [dims, 32], `panel` bytes apart; `sources` is for 16 addresses."""
    source, together = carray(_longs(sources), (16,)), 2 if bf16 else 1
    for column in range(0, (rows + COLUMNS - 1) // COLUMNS * COLUMNS, 16):
        for i in range(16):  # in the columns that are left over something is computed, for nobody
            row = min(column + i, rows - 1)
            source[i] = queries + row // group * stride + row % group * dims * 4
        for d in range(0, dims, 16):
            to = target + column // COLUMNS * panel + (d // together * COLUMNS + column % COLUMNS) * 4
            if bf16:
                _transpose_to_pairs(sources, d * 4, dims - d, scale, to, COLUMNS * 4)
            else:
                _transpose_floats(sources, d * 4, dims - d, scale, to, COLUMNS * 4)


@njit(types.void(types.boolean, *[I64] * 15), **OPTIONS)
def _read_block(
    bf16, first, width, table, keys, values, block_stride, size, dims, element, sources, nothing, key, key_stride,
    value, value_stride,
):  # fmt: skip
    """Keys [first, first + width) to [width, dims] and their values to [dims, width]; `sources` is for 32 addresses, at
    `nothing` are zeros."""
    together, one = 2 if bf16 else 1, np.float32(1.0)
    places, source = carray(_longs(table), ((first + width + size - 1) // size,)), carray(_longs(sources), (32,))
    page, slot = first // size, first % size
    for low in range(0, width, 16 * together):
        for i in range(16 * together):
            source[i] = nothing  # the weights of these will be 0
            if low + i < width:
                at = places[page] * block_stride + slot * dims * element
                source[i] = values + at
                if bf16:
                    _halves_to_bf16(key + (low + i) * key_stride, keys + at, dims)
                else:
                    _recall(key + (low + i) * key_stride, keys + at, dims, element)
                slot += 1
                if slot == size:
                    page, slot = page + 1, 0
        for d in range(0, dims, 16):
            to = value + d * value_stride + low // together * 4
            if bf16:
                _transpose_pairs(sources, d * element, dims - d, one, to, value_stride)
            elif element == 2:
                _transpose_halves(sources, d * element, dims - d, one, to, value_stride)
            else:
                _transpose_floats(sources, d * element, dims - d, one, to, value_stride)


@njit(types.void(*[I64] * 9), **OPTIONS)
def _columns_to_outputs(mixed, totals, rows, group, dims, sources, lines, out, out_stride):
    """Panels [dims, 32] over totals to rows of outputs; `lines` is for 32 of them, `sources` for 16 addresses."""
    spare, one = (dims + 15) // 16 * 16, np.float32(1.0)
    source, total = carray(_longs(sources), (16,)), carray(_floats(totals), (rows,))
    for row in range(rows):
        if row % COLUMNS == 0:
            for d in range(0, dims, 16):
                for i in range(16):
                    source[i] = mixed + (row // COLUMNS * spare + d + i) * COLUMNS * 4
                for column in range(0, COLUMNS, 16):
                    _transpose_floats(sources, column * 4, 16, one, lines + (column * spare + d) * 4, spare * 4)
        mix = carray(_floats(lines + row % COLUMNS * spare * 4), (dims,))
        share = one / total[row] if total[row] != 0 else np.float32(np.nan)  # 0: not one score was a number
        target = carray(_floats(out + row // group * out_stride + row % group * dims * 4), (dims,))
        for d in range(dims):
            target[d] = mix[d] * share


@linked
@njit(types.void(*[I64] * 13, F32, *[I64] * 3), **OPTIONS)
def _attend_block(
    queries, stride, count, start, table, keys, values, block_stride, group, size, dims, element, window, scale, out,
    out_stride, work,
):  # fmt: skip
    """One block of queries of one key-value head. Scores are [keys, 32 queries], outputs [dims, 32 queries]: all is in
    32 columns, and values are turned as they are read, once for all queries.

    Keys and values that are kept in half precision are multiplied as bfloat16 where the processor can, in pairs: two
    dimensions of a key, one of two values.
    """
    bf16 = HAS_BF16 and element == 2 and dims % 16 == 0
    matrices, shape = bf16 and HAS_AMX and dims >= 2 * MATRIX_STEPS, 0
    together = 2 if bf16 else 1  # numbers of a step
    least = together * (MATRIX_STEPS if matrices else 2)  # keys that values are multiplied by together
    rows, last, spare = count * group, start + count, (dims + 15) // 16 * 16
    panels, depth = (rows + COLUMNS - 1) // COLUMNS, dims // together
    key_stride, value_stride = depth * 4 + LINE, KEYS // together * 4 + LINE
    query, query_panel = work, spare // together * COLUMNS * 4  # [panels, depth, 32]
    mixed = query + panels * query_panel  # [panels, spare, 32]
    scores = mixed + panels * spare * COLUMNS * 4  # [KEYS, 32]
    key = scores + KEYS * COLUMNS * 4
    value = key + KEYS * key_stride  # [spare, KEYS / together]
    lines = value + spare * value_stride  # [32, spare]: outputs of a panel; before, the first is of zeros
    peaks = lines + COLUMNS * spare * 4
    totals = peaks + panels * COLUMNS * 4
    carray(_floats(mixed), (panels * spare * COLUMNS,))[:] = np.float32(0.0)
    carray(_floats(peaks), (panels * COLUMNS,))[:] = np.float32(-np.inf)
    carray(_floats(totals), (panels * COLUMNS,))[:] = np.float32(0.0)
    carray(_floats(lines), (spare,))[:] = np.float32(0.0)
    sources = scores  # addresses, while there are no scores
    scale *= LOG2E if bf16 else np.float32(1.0)
    _queries_to_columns(bf16, queries, stride, rows, group, dims, scale, sources, query, query_panel)
    begin = max(0, start - window + 1) // KEYS * KEYS if window != 0 else 0
    for first in range(begin, last, KEYS):
        width = min(KEYS, last - first)
        _read_block(
            bf16, first, width, table, keys, values, block_stride, size, dims, element, sources, lines, key, key_stride,
            value, value_stride,
        )  # fmt: skip
        for panel in range(panels):
            row = panel * COLUMNS
            several = min(COLUMNS, rows - row)
            lowest, highest = start + row // group, start + (row + several - 1) // group
            if first > highest or (window != 0 and first + width <= lowest - window + 1):
                continue
            seen = min(width, highest + 1 - first)
            whole = (seen + least - 1) // least * least
            asked = query + panel * query_panel
            carray(_floats(scores + seen * COLUMNS * 4), ((whole - seen) * COLUMNS,))[:] = np.float32(-np.inf)
            shape = _product(matrices, bf16, shape, seen, key, key_stride, asked, depth, scores, True)
            if first + seen > lowest + 1 or (window != 0 and first <= highest - window):
                _hide(scores, seen, start, first, group, row, window)
            mix = mixed + panel * spare * COLUMNS * 4
            if bf16:
                _soften_pairs(scores, whole, peaks + row * 4, totals + row * 4, mix, dims)
            else:
                _soften(scores, whole, peaks + row * 4, totals + row * 4, mix, dims)
            shape = _product(matrices, bf16, shape, dims, value, value_stride, scores, whole // together, mix, False)
    if matrices:
        _shape(0)
    _columns_to_outputs(mixed, totals, rows, group, dims, sources, lines, out, out_stride)


@njit(I64(I64, I64), **OPTIONS)
def _block_tokens(group, dims):
    """Of a block of queries. With AMX reading keys and values takes as long as what a hundred rows do with them."""
    return max(QUERIES, (2 * BLOCK_ROWS if HAS_AMX and dims <= 64 else BLOCK_ROWS) // group)


@njit(I64(I64, I64), **OPTIONS)
def block_floats(group, dims):
    """What a block of queries works with, in floats: queries, outputs, maxima and sums, scores, keys, values, lines
    of these, and up to the next line of the caches."""
    spare = (dims + 15) // 16 * 16
    rows = (_block_tokens(group, dims) * group + COLUMNS - 1) // COLUMNS * COLUMNS
    kept = KEYS * (COLUMNS + dims + LINE // 4) + spare * (KEYS + LINE // 4)
    return rows * (2 * spare + 2) + kept + COLUMNS * spare + LINE // 4


@linked
@njit(types.void(*[I64] * 15, F32, *[I64] * 3), **OPTIONS)
def _some_blocks(
    t, threads, queries, stride, count, start, table, keys, values, group, kv_heads, size, dims, element, window, scale,
    out, out_stride, work,
):  # fmt: skip
    """A thread's share of `attend_chunk`; `work` is its own, `block_floats` of zeros or finite numbers."""
    work += -work % LINE
    per = _block_tokens(group, dims)  # tokens of a block
    blocks, lines = (count + per - 1) // per, size * dims * element  # bytes of a head in a block of the cache
    for turn in range((blocks * kv_heads + threads - 1) // threads):
        item = turn * threads + (t if turn % 2 == 0 else threads - 1 - t)
        if item >= blocks * kv_heads:
            continue
        head, block = item // blocks, blocks - 1 - item % blocks  # longest first, while keys are in a cache
        first = block * per
        _attend_block(
            queries + first * stride + head * group * dims * 4, stride, min(per, count - first), start + first, table,
            keys + head * lines, values + head * lines, kv_heads * lines, group, size, dims, element, window, scale,
            out + first * out_stride + head * group * dims * 4, out_stride, work,
        )  # fmt: skip


@njit(parallel=True, **OPTIONS)  # compiled when first called: `decoder_layers` does without
def attend_chunk(
    queries, stride, count, start, table, keys, values, group, kv_heads, size, dims, element, window, scale, out,
    out_stride, threads,
):  # fmt: skip
    """A chunk: queries [count, ...] at positions from `start` on, causal, the last `window` tokens unless that is 0.

    As FlashAttention (Dao et al., 2022): blocks of queries pass over blocks of keys with a running maximum and sum. The
    rows of a block are those of all query heads that share the keys. Blocks of keys begin at multiples of KEYS, so a
    token's sums do not depend on how its prompt was cut.
    """
    for t in prange(threads):
        work = np.zeros(block_floats(group, dims), np.float32)
        _some_blocks(
            t, threads, queries, stride, count, start, table, keys, values, group, kv_heads, size, dims, element,
            window, scale, out, out_stride, work.ctypes.data,
        )  # fmt: skip


# All layers in one parallel region

# Columns of a layer's line in the table of addresses, and of a window's and a chunk's line in a step's plan.
QKV, OUT, GATE_UP, DOWN = 0, 3, 6, 9  # weights, their scales (or 0), bias
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, LAYER_KEYS, LAYER_VALUES, LAYER_WINDOW, LAYER_FIELDS = range(12, 20)
HIDDEN, INNER, Q_HEADS, KV_HEADS, DIMS, SIZE_, ELEMENT, SHAPE_FIELDS = range(8)  # the last: bytes of a kept number
WINDOW, ROW_INDEX, ROW_TABLE, ROW_WIDTH, ROW_LOW, ROW_HIGH, ROW_COUNT, ROW_LONGEST, PLAN_FIELDS = range(9)
CHUNK_BEGIN, CHUNK_COUNT, CHUNK_START, CHUNK_TABLE, CHUNK_FIELDS = range(5)
X, TURNS, WHERE, HEADS, MIXED, INSIDE, SPACE, PROGRESS, BUFFER_FIELDS = range(9)
LONGS_1D, LONGS_2D = types.int64[::1], types.int64[:, ::1]


@linked
@njit(I64(*[I64] * 4, F32, LONGS_2D, LONGS_1D, *[LONGS_2D] * 4, LONGS_1D, LONGS_1D, I64, types.boolean), **OPTIONS)
def some_layers(
    t, threads, turn, rows, eps, layers, shape, plans, chunks, last_plans, last_chunks, kept, buffers, own_space, apart
):  # fmt: skip
    """A thread's share of `decoder_layers`, in the order of the model; returns the turn.

    Of products a thread has a part of the columns, so that few rows read the weights once. If `apart` it has a part of
    the rows: what it reads is then what it wrote, in its own caches, and it only waits before and after attention.
    """
    hidden, inner, q_heads, kv_heads, dims = shape[HIDDEN], shape[INNER], shape[Q_HEADS], shape[KV_HEADS], shape[DIMS]
    width, group, scale = (q_heads + 2 * kv_heads) * dims, q_heads // kv_heads, np.float32(1.0 / np.sqrt(dims))
    size, element = shape[SIZE_], shape[ELEMENT]
    mixed_stride, inside_stride = q_heads * dims * 4 + LINE, inner * 4 + LINE
    x, heads, mixed, inside = buffers[X], buffers[HEADS], buffers[MIXED], buffers[INSIDE]
    gate, own, shared = buffers[SPACE], buffers[SPACE] + 64 + t * own_space, buffers[SPACE] + 64 + threads * own_space
    longest = max(plans[:, ROW_LONGEST].max(), last_plans[:, ROW_LONGEST].max())
    count = max(plans[:, ROW_COUNT].max(), last_plans[:, ROW_COUNT].max())
    together = _heads_together(count, kv_heads, group, longest, size * dims * element, threads)
    mine = np.empty(_row_floats(together, group, dims, longest), np.float32)
    work = np.zeros(block_floats(group, dims) if chunks.shape[0] else 1, np.float32)
    begin, end = rows * t // threads, rows * (t + 1) // threads
    part, parts, low, high, prepared, between = t, threads, 0, rows, shared, inside
    if apart:
        part, parts, low, high, prepared = 0, 1, begin, end, own + TILES_SPACE
        between += t * LARGEST_BLOCK * inside_stride
    block = _block(high - low)
    for index in range(layers.shape[0]):
        layer, narrows = layers[index], index + 1 == layers.shape[0] and kept.shape[0] < rows
        plan = last_plans[layer[LAYER_WINDOW]] if narrows else plans[layer[LAYER_WINDOW]]
        some_chunks = last_chunks if narrows else chunks
        keys, values = layer[LAYER_KEYS], layer[LAYER_VALUES]
        for first in range(low, high, block):
            turn = some_linear(
                part, parts, gate, turn, x + first * hidden * 4, hidden * 4, layer[INPUT_NORM], eps,
                min(block, high - first), hidden, layer[QKV], layer[QKV + 1], layer[QKV + 2], width, STORE,
                heads + first * width * 4, width * 4, prepared, own,
            )  # fmt: skip
        _rotate_rows(
            heads, q_heads, kv_heads, dims, layer[Q_NORM], layer[K_NORM], eps, buffers[TURNS], buffers[WHERE], keys,
            values, element, begin, end,
        )  # fmt: skip
        turn = wait(gate, turn, threads)
        if plan[ROW_COUNT]:
            _some_rows(
                t, threads, together, heads, width * 4, keys, values, plan[ROW_INDEX], plan[ROW_TABLE],
                plan[ROW_WIDTH], plan[ROW_LOW], plan[ROW_HIGH], plan[ROW_COUNT], scale, group, kv_heads, size, dims,
                element, mixed, mixed_stride, mine.ctypes.data,
            )  # fmt: skip
        for number in range(some_chunks.shape[0]):
            chunk = some_chunks[number]
            first = chunk[CHUNK_BEGIN]
            _some_blocks(
                t, threads, heads + first * width * 4, width * 4, chunk[CHUNK_COUNT], chunk[CHUNK_START],
                chunk[CHUNK_TABLE], keys, values, group, kv_heads, size, dims, element, plan[WINDOW], scale,
                mixed + first * mixed_stride, mixed_stride, work.ctypes.data,
            )  # fmt: skip
        turn = wait(gate, turn, threads)
        if narrows:
            rows = kept.shape[0]
            part, parts, low, high, prepared, between = t, threads, 0, rows, shared, inside
            block = _block(max(rows, 1))
            if t == 0:
                for row in range(rows):
                    _copy(mixed + row * mixed_stride, mixed + kept[row] * mixed_stride, q_heads * dims * 4)
                    _copy(x + row * hidden * 4, x + kept[row] * hidden * 4, hidden * 4)
            turn = wait(gate, turn, threads)
        for first in range(low, high, block):
            count, some = min(block, high - first), x + first * hidden * 4
            turn = some_linear(
                part, parts, gate, turn, mixed + first * mixed_stride, mixed_stride, 0, eps, count, q_heads * dims,
                layer[OUT], layer[OUT + 1], layer[OUT + 2], hidden, ADD, some, hidden * 4, prepared, own,
            )  # fmt: skip
            turn = some_linear(
                part, parts, gate, turn, some, hidden * 4, layer[POST_NORM], eps, count, hidden, layer[GATE_UP],
                layer[GATE_UP + 1], layer[GATE_UP + 2], inner, GATE, between, inside_stride, prepared, own,
            )  # fmt: skip
            turn = some_linear(
                part, parts, gate, turn, between, inside_stride, 0, eps, count, inner, layer[DOWN], layer[DOWN + 1],
                layer[DOWN + 2], hidden, ADD, some, hidden * 4, prepared, own,
            )  # fmt: skip
        if t == 0:
            carray(_longs(buffers[PROGRESS]), (1,))[0] += 1
    return turn


@njit(
    types.void(I64, F32, LONGS_2D, LONGS_1D, *[LONGS_2D] * 4, LONGS_1D, LONGS_1D, I64, types.boolean, I64),
    parallel=True, **OPTIONS,
)  # fmt: skip
def decoder_layers(
    rows, eps, layers, shape, plans, chunks, last_plans, last_chunks, kept, buffers, own_space, apart, threads
):  # fmt: skip
    """All layers over the hidden states X [rows, hidden], in place: what `Decoder.run` does layer by layer.

    Where fewer rows are `kept` the last layer has a plan of its own, and they are the first rows of X in the end.
    """
    carray(_longs(buffers[SPACE]), (1,))[0] = 0
    for t in prange(threads):
        some_layers(
            t, threads, 0, rows, eps, layers, shape, plans, chunks, last_plans, last_chunks, kept, buffers, own_space,
            apart,
        )  # fmt: skip


# Packing: rows as they lie in a file become panels of `linear`

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # what rows may be of
SIZES = (4, 2, 2)  # bytes of one
LINES = 16  # of a panel that are made together
# What a thread works with, in bytes: lines, then of the rows of a panel sums, peaks, factors and scales.
TOTALS, PEAKS, FACTORS, SCALES, PACKING = (LINES * COLUMNS * 4 + 4 * COLUMNS * i for i in range(5))


def _numbers(builder, element, address, count):
    """16 numbers of a row as float32, exactly; those from `count` (None: 16) on are 0 and not read."""
    mask = _mask(builder, count)
    if element == 0:
        return _load_some(builder, address, mask)
    if element == 2:
        return _load_halves(builder, address, mask)
    bits = builder.zext(_load_shorts(builder, address, mask), WHOLE)
    return builder.bitcast(builder.shl(bits, _all16(16, WHOLE)), VECTOR)


def _rounded(builder, element, address, left, factor):
    """64 numbers of a row, of which so many are left, times a factor, rounded to int8: 16 lanes of four."""
    every, parts = _spread(builder, factor), []
    for first in range(0, 64, 16):
        place = builder.add(address, LONG(first * SIZES[element]))
        value = builder.fmul(_numbers(builder, element, place, builder.sub(left, LONG(first))), every)
        whole = builder.fptosi(_call(builder, "llvm.nearbyint.v16f32", VECTOR, value), WHOLE)
        parts.append(builder.trunc(whole, ir.VectorType(ir.IntType(8), 16)))
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(count)))
        parts = [builder.shuffle_vector(*pair, lanes) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return builder.bitcast(parts[0], WHOLE)


@_by_hand(*[I64] * 8)
def _lines(builder, element, integer, sources, offset, count, factors, sums, target):
    """16 lines of half a panel: what is `offset` numbers behind 16 addresses becomes columns of target [16, 32].

    Lines are of numbers as float32; for `integer` of four numbers each, times their row's factor and rounded to int8,
    which are added to the row's sum; without VNNI a line has two of each of the 32 rows and then the other two. Those
    from `count` on are 0.
    """

    def build(kind, quantized):
        rows, bytes_ = [], builder.mul(offset, LONG(SIZES[kind]))
        for i in range(16):
            source = builder.add(_load(builder, sources, 8 * i, LONG), bytes_)
            if quantized:
                rows.append(_rounded(builder, kind, source, count, _load(builder, factors, 4 * i, ir.FloatType())))
            else:
                rows.append(builder.bitcast(_numbers(builder, kind, source, count), WHOLE))
        _exchange(builder, rows)
        total = _load(builder, sums, 0, WHOLE)
        for i, row in enumerate(rows):
            if quantized and BYTE == 2:
                for pair, bits in enumerate((row, builder.lshr(row, _all16(16, WHOLE)))):
                    _store(builder, builder.trunc(bits, SHORTS), target, 4 * COLUMNS * i + 2 * COLUMNS * pair)
            else:
                _store(builder, row, target, 4 * COLUMNS * i)
            for left in (24, 16, 8, 0) if quantized else ():
                one = builder.ashr(builder.shl(row, _all16(left, WHOLE)), _all16(24, WHOLE))
                total = builder.add(total, one)
        if quantized:
            _store(builder, total, sums)

    forms = [functools.partial(build, kind, quantized) for quantized in (False, True) for kind in ELEMENTS.values()]
    _each_of(builder, builder.add(builder.mul(integer, LONG(len(ELEMENTS))), element), forms)


@_by_hand(*[I64] * 4)
def _peak(builder, element, source, count, target):
    """The largest magnitude of a row, NaN if there is one: in the order of their bits, which is the same."""

    def build(kind):
        def larger(i, left, values):
            place = builder.add(source, builder.mul(builder.shl(i, LONG(4)), LONG(SIZES[kind])))
            bits = builder.bitcast(_numbers(builder, kind, place, left), WHOLE)
            bits = builder.and_(bits, _all16(0x7FFFFFFF, WHOLE))
            return [builder.select(builder.icmp_signed(">", bits, values[0]), bits, values[0])]

        (top,) = _over(builder, count, 16, [_all16(0, WHOLE)], larger)
        _store(builder, _call(builder, "llvm.vector.reduce.umax.v16i32", ir.IntType(32), top), target)

    _each_of(builder, element, [functools.partial(build, kind) for kind in ELEMENTS.values()])


@_by_hand(I64, I64, I64)
def _scales(builder, peaks, factors, scales):
    """Of 32 rows, in the operations of `linear.quantize`: 127 times 1 / peak, 0 of 0 and of NaN, and peak / 127."""
    for half in (0, 64):
        peak = _load(builder, peaks, half)
        factor = builder.fmul(builder.fdiv(_all16(1.0), peak), _all16(127.0))
        factor = builder.select(builder.fcmp_ordered(">", peak, _all16(0.0)), factor, _all16(0.0))
        _store(builder, factor, factors, half)
        _store(builder, builder.fdiv(peak, _all16(127.0)), scales, half)


@njit(types.void(*[I64] * 4), **EXACT)
def _put(made, place, nbytes, differs):
    """Copies to `place`, or sets `differs` where something else is there."""
    if differs == 0:
        _copy(place, made, nbytes)
        return
    ours, theirs, different = carray(_ints(made), (nbytes // 4,)), carray(_ints(place), (nbytes // 4,)), 0
    for i in range(nbytes // 4):
        different |= ours[i] ^ theirs[i]
    if different != 0:
        carray(_longs(differs), (1,))[0] = 1


@linked
@njit(types.void(*[I64] * 11), **EXACT)
def _some_panels(begin, end, panels, rows, element, inner, integer, target, scales, differs, own):
    """A thread's share of `pack`; `own` is its work space."""
    each = 4 if integer else 1  # numbers of a row in a line
    lines, pitch = inner // each, inner // each if integer else padded(inner)
    for panel in range(begin, end):
        if differs != 0 and carray(_longs(differs), (1,))[0] != 0:
            return
        sources = rows + panel * COLUMNS * 8
        if integer:
            source = carray(_longs(sources), (COLUMNS,))
            for i in range(COLUMNS):
                _peak(element, source[i], inner, own + PEAKS + i * 4)
            _scales(own + PEAKS, own + FACTORS, own + SCALES)
            carray(_ints(own + TOTALS), (COLUMNS,))[:] = 0
        for line in range(0, lines, LINES):
            count = min(LINES, lines - line)
            place = target + (panel * pitch + line) * COLUMNS * 4
            made = place if count == LINES and differs == 0 else own
            for half in (0, 64):
                _lines(
                    element, integer, sources + 2 * half, line * each, (lines - line) * each, own + FACTORS + half,
                    own + TOTALS + half, made + (half // 2 if integer and BYTE == 2 else half),
                )  # fmt: skip
            if made != place:
                _put(made, place, count * COLUMNS * 4, differs)
        if integer:
            sums = carray(_ints(own + TOTALS), (COLUMNS,))
            for i in range(COLUMNS):
                sums[i] *= 128
            _put(own + SCALES, scales + panel * COLUMNS * 4, COLUMNS * 4, differs)
            _put(own + TOTALS, scales + (panels + panel) * COLUMNS * 4, COLUMNS * 4, differs)


@njit(types.void(*[I64] * 9), parallel=True, **EXACT)
def pack(panels, rows, element, inner, integer, target, scales, differs, threads):
    """Rows of `inner` numbers at the addresses `rows` [panels, 32] to [panels, inner, 32] at `target`.

    `element` is one of ELEMENTS. For `integer` to panels of int8 as `linear` takes them, each row by its own scale, and
    at `scales` [2, panels, 32] the scales and 128 times the sums of the rows. With `differs` nothing is written there:
    that is set to 1 where anything but this is there already.
    """
    for t in prange(threads):
        own = np.empty(PACKING, np.uint8)
        begin, end = panels * t // threads, panels * (t + 1) // threads  # neighbours: threads share few large pages
        _some_panels(begin, end, panels, rows, element, inner, integer, target, scales, differs, own.ctypes.data)


@njit(types.void(LONGS_1D), parallel=True, **OPTIONS)
def _who(names):
    for t in prange(names.shape[0]):
        names[t] = numba.get_thread_id()


_local = threading.local()


def workspace(nbytes: int) -> int:
    """Address of that many bytes, aligned, that belong to the calling thread until its next call."""
    size = getattr(_local, "size", 0)
    if size < nbytes:
        _local.memory, _local.size = pages.zeros((nbytes + LINE,), torch.uint8), nbytes
    address: int = _local.memory.data_ptr()
    return address + -address % LINE


def apart(rows: int, threads: int) -> bool:
    """Whether threads pass so many rows through the layers apart: see `some_layers`."""
    return threads > 1 and rows >= APART * threads


def rows_inside(rows: int, threads: int) -> int:
    """Of what is between the halves of an MLP: those of a block, or of each thread's block."""
    return threads * LARGEST_BLOCK if apart(rows, threads) else min(rows, LARGEST_BLOCK)


def spaces(rows: int, widest: int, threads: int, apart: bool = False) -> tuple[int, int]:
    """Bytes of work space that `linear` needs in all, and of it each thread's own; `apart`: see `some_layers`."""
    one = 4 * widest + LINE
    row = max(one, PARTS * 2 * (widest + DEEP) if HAS_AMX else 0) + 4
    alone = LARGEST_BLOCK if apart else MATRIX_ROWS if HAS_AMX else ALONE
    own = TILES_SPACE + -(-(one + LINE + alone * row) // LINE) * LINE
    return 2 * LINE + threads * (own + one) + -(-min(rows, LARGEST_BLOCK) // 16) * 16 * row, own


@functools.cache
def _together(threads: int) -> int:
    """`threads` if that many really run at the same time, as those that wait for each other must; else 1."""
    names = np.zeros(threads, np.int64)
    _who(names)
    return threads if len(set(names.tolist())) == threads else 1


def num_threads() -> int:
    """As many as torch uses."""
    return _together(min(torch.get_num_threads(), STARTED))
