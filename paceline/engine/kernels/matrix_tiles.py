"""Tiles in matrix registers (AMX): of int8, of pairs of bfloat16, and of float32 as sums of three bfloat16 each."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from paceline.engine.kernels.common import (
    COLUMNS,
    DEEP,
    FAR_AHEAD,
    FLOAT_STEP,
    I64,
    LINE,
    LONG,
    MATRIX_ROWS,
    MATRIX_STEPS,
    PANEL_STEP,
    PARTS,
    PARTS_STEP,
    SPLIT_FETCHES,
    TILE,
    WHOLE_FETCHES,
    by_hand,
)
from paceline.engine.kernels.tiles import FETCH, REGISTERS, SCRATCH, assembled
from paceline.processor import HAS_AMX


def _pairs_assembly(high: bool) -> str:
    """A tile of pairs of bfloat16 in matrix registers, of 17 to MATRIX_ROWS rows if `high`, else of up to 16.

    The first four hold sums, two columns of two rows, the next two activations, the last two weights.
    """
    a, stride, w, w_stride, steps, c, c_stride = REGISTERS[:7]
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
            lines.append(f"tdpbf16ps %tmm{6 + half}, %tmm{4 + i}, %tmm{2 * i + half}")
    lines += [*(f"addq $${4 * MATRIX_STEPS}, {some}" for some, _ in rows), f"addq {on}, {w}"]
    lines += [f"subq $${MATRIX_STEPS}, {steps}", "jg 1b"]
    return "\n".join([*lines, *(f"tilestored {register}, {place}" for place, register in sums)])


def _by_height(builder, arguments, assembly, registers: Sequence[str], lost: Sequence[str]) -> None:
    """Runs the form of a tile in matrix registers, assembly(high), for so many rows, the first of `arguments`."""
    if HAS_AMX:
        with builder.if_else(builder.icmp_signed(">", arguments[0], LONG(16))) as forms:
            for form, high in zip(forms, (True, False), strict=True):
                with form:
                    builder.call(assembled(assembly(high), registers, lost), arguments[1:])


@by_hand(*[I64] * 9)
def bf16_matrix_tile(builder, rows, a, a_stride, w, w_stride, steps, c, c_stride, fresh):
    """As `tiles.bf16_tile`, of up to MATRIX_ROWS rows that `set_shape` was told; `steps` is a multiple of MATRIX_STEPS.
    If `fresh` c is written and not added to. Nothing is fetched."""
    arguments = rows, a, a_stride, w, w_stride, steps, c, c_stride, fresh
    _by_height(builder, arguments, _pairs_assembly, (*REGISTERS[:7], SCRATCH[0]), SCRATCH[1:])


# Parts of activations and of weights whose products are added up, in an order that loads few of them twice. The other
# three are at most 2^-21 of a product, of either sign: less than what sums of float32 lose.
PRODUCTS = (2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2)


def _products(kept: bool, parts: int) -> list[tuple[int, int]]:
    """Of weights that are `kept` as bfloat16, whose other parts are 0, and of so many parts of activations."""
    return [(part, other) for part, other in PRODUCTS if part < parts and not (kept and other)]


# Where products of up to 16 rows are among what makes parts of weights: evenly everywhere, as those of more rows are,
# weights come from memory at 0.8 to 0.9 of the rate (docs/log.md; why is not known)
AMONG = 0.3, 0.8
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


def _panel_products(
    groups: Sequence[str], line: str, weights_at: Callable[[int, int], str], products: Sequence[tuple[int, int]],
    multiply: str,
) -> list[str]:  # fmt: skip
    """Loads and products of a step of one or two groups of 16 rows; their sums are in the first registers.

    weights_at(part, half): where a part of those of 16 columns is.
    """
    held: dict[str, str] = {}
    lines = []

    def load(place: str, register: str) -> None:
        if held.get(register) != place:
            held[register] = place
            lines.append(f"tileloadd {place}, {register}")

    for part, other in products:
        if len(groups) > 1:
            activations, weights = ("%tmm4", "%tmm5"), ("%tmm6", "%tmm7")
        else:  # there is room for parts that are needed again
            activations, weights = (f"%tmm{4 + part % 2}",), ("%tmm2", "%tmm3") if other else ("%tmm6", "%tmm7")
        for group, register in zip(groups, activations, strict=True):
            load(f"{TILE * part}({group},{line})", register)
        for half, register in enumerate(weights):
            load(weights_at(other, half), register)
        for i, one in enumerate(activations):
            lines += [f"{multiply} {weight}, {one}, %tmm{2 * i + half}" for half, weight in enumerate(weights)]
    return lines


def _woven(lines: list[str], others: list[str], begin: float = 0, end: float = 1) -> list[str]:
    """`others` in equal distances among lines, from one share of these to another."""
    low, high = int(len(lines) * begin), int(len(lines) * end)
    bounds = [low + (high - low) * i // len(others) for i in range(len(others) + 1)]
    parts = (lines[first:last] for first, last in itertools.pairwise(bounds))
    woven = (line for other, part in zip(others, parts, strict=True) for line in (other, *part))
    return [*lines[:low], *woven, *lines[high:]]


def _panel_assembly(
    high: bool, streams: bool = False, kept: bool = False, parts: int = PARTS, integer: bool = False
) -> str:
    """A tile of a panel in matrix registers, of 17 to MATRIX_ROWS rows if `high`, else of up to 16.

    A float32 is the sum of three bfloat16 of 8 bits each. Of activations they are made before, rounded, so many
    `parts`; of weights, cut, here, if this tile `streams` them: while a step's products are made, the parts of the next
    one. Those that are `kept` as bfloat16, or `integer`, are one part.
    """
    a, group, w, steps, c, b, slot, ring, fresh = REGISTERS
    lower_a, lower_c, here, after, line = *SCRATCH, "%rbx"
    groups = [a, lower_a] if high else [a]
    rows = [(0, c), (2, lower_c)] if high else [(0, c)]
    sums = [(f"{64 * half}({place},{line},2)", f"%tmm{first + half}") for first, place in rows for half in (0, 1)]
    lines = [f"leaq ({a},{group}), {lower_a}", f"leaq {16 * 4 * COLUMNS}({c}), {lower_c}", f"movq $${LINE}, {line}"]
    lines += [f"testq {fresh}, {fresh}", "jnz 2f", *(f"tileloadd {place}, {register}" for place, register in sums)]
    lines += ["jmp 1f", "2:", *(f"tilezero {register}" for _, register in sums), "1:"]
    on = [f"addq $${TILE * parts}, {some}" for some in groups]

    def weights_at(part: int, half: int) -> str:
        if kept:
            return f"{LINE * half}({b},{line},2)"
        return f"{TILE * (2 * part + half)}({here if streams else b},{line})"

    multiply = "tdpbusd" if integer else "tdpbf16ps"
    products = _panel_products(groups, line, weights_at, _products(kept, parts), multiply)
    if streams:  # to the other one of two slots (ring: -1), or to the next one (1)
        lines += [*KEEP_UPPER, "3:", f"leaq ({b},{slot}), {here}"]
        lines += [f"imulq {ring}, {slot}", f"addq $${PARTS_STEP}, {slot}", f"leaq ({b},{slot}), {after}"]
        lines += [f"addq $${FLOAT_STEP}, {w}", f"cmpq $$1, {steps}", f"cmoveq {-LINE}({b}), {w}"]
        lines += _woven(_split_weights(w, after, FAR_AHEAD), products, *(() if high else AMONG))
    else:  # w: what is fetched, every `slot` bytes
        fetches = [f"{FETCH} ({w})", f"addq {slot}, {w}"] * (WHOLE_FETCHES if kept else SPLIT_FETCHES)
        lines += ["3:", *_woven(fetches, products), f"addq $${PANEL_STEP if kept else PARTS_STEP}, {b}"]
    lines += [*on, f"decq {steps}", "jg 3b"]
    return "\n".join([*lines, *(f"tilestored {register}, {place}" for place, register in sums)])


def _panel_tile_of(**form: Any):
    """tile(rows, a, group, w, steps, c, b, slot, ring, fresh): c[rows, 32] += a w, of so many steps.

    a: the parts of each 16 rows, `group` bytes from one to the next: [steps, parts, 16, DEEP] bfloat16; b: those of
    weights, [steps, PARTS, 2, 16, 32], or two steps of them in turn, or weights that are `kept`, [16 steps, 32, 2]. Of
    bytes [steps, 16, DEEP_BYTES], the first ones unsigned, and [16 steps, 32, 4]. If `fresh` c is written and not added
    to. A tile that `streams` finds parts of its first step at `slot` of b and leaves those of the one that comes next,
    whose address lies a line before b, behind its last.
    """
    lost = [*SCRATCH, "%rbx", *(f"%zmm{i}" for i in range(32))]

    @by_hand(*[I64] * 10)
    def tile(builder, rows, a, group, w, steps, c, b, slot, ring, fresh):
        arguments = rows, a, group, w, steps, c, b, slot, ring, fresh
        _by_height(builder, arguments, functools.partial(_panel_assembly, **form), REGISTERS, lost)

    return tile


split_stream_tile, split_tile, kept_tile = _panel_tile_of(streams=True), _panel_tile_of(), _panel_tile_of(kept=True)
rounded_tile, byte_panel_tile = (_panel_tile_of(kept=True, parts=1, integer=integer) for integer in (False, True))


def _one_row_assembly(kept: bool) -> str:
    """The same products of one row in vectors, since matrix registers slow a core down, and rounded as there.

    Those sum the products of even numbers of a step and those of odd ones, add both and then that to what was there.
    """
    a, w, steps, c = REGISTERS[:4]
    whole, (upper, middle, rest), totals = "%zmm31", (weights := ("%zmm28", "%zmm29", "%zmm30")), ("%zmm26", "%zmm27")
    products = _products(kept, PARTS)
    sums = [[f"%zmm{12 * half + i}" for i in range(2 * len(products))] for half in (0, 1)]  # each product's two
    lines = [*KEEP_UPPER, *(f"vpxord {total}, {total}, {total}" for total in totals), "1:"]
    lines += [f"vpxord {one}, {one}, {one}" for some in sums for one in some]
    for number, half in itertools.product(range(DEEP), (0, 1)):
        if kept:  # neighbours share a line
            here = COLUMNS * 4 * (number // 2) + LINE * half
            if number % 2:
                lines.append(f"vpandd {here}({w}), {whole}, {upper}")
            else:
                lines += [f"{FETCH} {here + FAR_AHEAD}({w})", f"vpslld $$16, {here}({w}), {upper}"]
        else:
            here = COLUMNS * 4 * number + LINE * half
            lines += [f"vmovups {here}({w}), {rest}", f"{FETCH} {here + FAR_AHEAD}({w})"]
            lines += [f"vpandd {whole}, {rest}, {upper}", f"vsubps {upper}, {rest}, {rest}"]
            lines += [f"vpandd {whole}, {rest}, {middle}", f"vsubps {middle}, {rest}, {rest}"]
        for (part, other), one in zip(products, sums[half][number % 2 :: 2], strict=True):
            lines.append(f"vfmadd231ps {4 * (DEEP * part + number)}({a}){{1to16}}, {weights[other]}, {one}")
    for total, some in zip(totals, sums, strict=True):
        for even, odd in zip(some[::2], some[1::2], strict=True):
            lines += [f"vaddps {odd}, {even}, {even}", f"vaddps {even}, {total}, {total}"]
    lines += [f"addq $${4 * PARTS * DEEP}, {a}", f"addq $${PANEL_STEP if kept else FLOAT_STEP}, {w}"]
    lines += [f"decq {steps}", "jg 1b"]
    return "\n".join([*lines, *(f"vmovups {total}, {LINE * half}({c})" for half, total in enumerate(totals))])


def _one_row_of(kept: bool):
    """As a tile that streams, or of weights that are `kept`, of one row a [steps, PARTS, DEEP] float32, to c,
    which is written."""

    @by_hand(*[I64] * 4)
    def one_row(builder, a, w, steps, c):
        if HAS_AMX:
            lost = ["%r14", *(f"%zmm{i}" for i in range(32))]
            builder.call(assembled(_one_row_assembly(kept), REGISTERS[:4], lost), [a, w, steps, c])

    return one_row


one_row, one_kept_row = _one_row_of(False), _one_row_of(True)


@by_hand(I64, I64)
def split_first(builder, w, b):
    """The parts of a panel's first DEEP weights at `w` to `b`, for a tile that streams."""
    if not HAS_AMX:
        return
    lost = ["%r14", *(f"%zmm{i}" for i in range(32))]
    form = assembled("\n".join([*KEEP_UPPER, *_split_weights("%rdi", "%rsi", None)]), ("%rdi", "%rsi"), lost)
    builder.call(form, [w, b])


def _matrix_shape(rows: int) -> bytes:
    """What matrix registers hold in a tile of so many rows: palette 1, bytes a row, rows."""
    upper, lower = min(rows, 16), max(rows - 16, 1)
    # up to 16 rows leave four to more weights and activations
    others = (lower, lower, upper, lower) if rows > 16 else (MATRIX_STEPS, MATRIX_STEPS, upper, upper)
    registers = upper, upper, *others, MATRIX_STEPS, MATRIX_STEPS
    return bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *registers, *[0] * 8])


@by_hand(I64)
def set_shape(builder, rows):
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
