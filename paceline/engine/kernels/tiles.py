"""Tiles of vectors: some rows of activations times COLUMNS columns of packed weights.

In assembly, since no loop that a compiler sees keeps its sums in registers this way with so few other instructions.
"""

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paceline.engine.kernels.common import ALL_COLUMNS, BYTE, COLUMNS, LINE, LONG, ROWS, VECTOR_BYTES
from paceline.processor import HAS_AVX512, HAS_BF16, HAS_TILES

REGISTER, NUM_REGISTERS = ("zmm", 32) if HAS_AVX512 else ("ymm", 16)
REGISTERS = "%rdi", "%rsi", "%rdx", "%rcx", "%r8", "%r9", "%r10", "%r11", "%rax"  # a tile's arguments
SCRATCH = "%r12", "%r13", "%r14", "%r15"
# What is fetched ahead of its use goes to the second cache. The first waits for few lines and then stops the core: on a
# Zen 4 blocks of 4 KiB in any order came with 22 GB/s through the first, with 31 to 39 through the second; on an Intel
# with AMX 8 rows took 1.4 times as long as one (float32, [16384, 2048]) through the first, 1.2 through the second
FETCH = "prefetcht1"


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


def assembled(text: str, registers: Sequence[str], lost: Sequence[str]) -> ir.InlineAsm:
    """A function of numbers in `registers` that returns what they hold in the end."""
    changed = [f"={{{register[1:]}}}" for register in registers]
    kept = [str(index) for index in range(len(registers))]
    constraint = ",".join([*changed, *kept, *(f"~{{{register[1:]}}}" for register in lost), "~{memory}", "~{flags}"])
    longs = [LONG] * len(registers)
    return ir.InlineAsm(ir.FunctionType(ir.LiteralStructType(longs), longs), text, constraint, True)


def _tile_of(of: str, width: int = COLUMNS):
    """tile(rows, a, a_stride, w, w_stride, steps, c, c_stride, ahead, gap): c[rows, 32] += a[rows, steps] w[steps, 32],
    or of the first `width` columns, with the same bits.

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
                columns = width if count <= ALL_COLUMNS else COLUMNS // 2
                form = assembled(_assembly(count, columns, of), REGISTERS, lost)
                after = builder.call(form, arguments[1:])
                if columns < width:  # then the other half, which goes on with what is fetched
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


float_tile, byte_tile, bf16_tile, mixed_tile = (_tile_of(of) for of in ("floats", "bytes", "pairs", "mixed"))
narrow_tile = _tile_of("floats", COLUMNS // 2)
