"""The micro kernel of the products: a tile of a few rows by one panel of outputs, as LLVM IR.

Every output is one expression, whatever the tile: per group of 32 inputs, in ascending order, acc = fma(value, x, acc) from 0 with the
integer value of the quant; then total = fma(acc, scale, total) from 0 over the groups, for q4_1 followed by
total = fma(minimum, sum of x over the group, total). For float formats total = total + acc.

A 4-bit value is not shifted down before it is converted: bits 4j to 4j + 3 of a word give value * 16**j, and x comes scaled by
16**-j. Powers of two commute with rounding, and this saves an instruction per vector. See `INPUT_SCALES`.

Inputs arrive as group chunks: `[rows][32]` float32, then the rows' sums of the group in 64 bytes.
"""

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from interlock.core.buffer import ALIGNMENT
from interlock.core.errors import CompileError
from interlock.kernels.cpu.emit import target_features
from interlock.kernels.cpu.simd import LANES, declare, f32x16, pointer, splat_value
from interlock.kernels.formats import GROUP, PANEL, QUANT_BYTES, SCALE_BYTES, group_nbytes

PREFETCH_BYTES: Final = 12 * 1024  # a few rows leave the product bound by memory, and this much in flight hides its latency
STEP: Final = 8  # inputs per word of 4-bit quants, and per turn of the inner loop
SUMS_BYTES: Final = 64  # room for one float32 per row of a tile
FOUR_BITS: Final = ("q4_0", "q4_1")
INPUT_SCALES: Final = (*(0.0625**j for j in range(STEP - 1)), 1.0)  # the top nibble is shifted, which masks it as well

_f32, _f16 = ir.FloatType(), ir.HalfType()
_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_v_f32 = ir.VectorType(_f32, LANES)
_v_i32 = ir.VectorType(_i32, LANES)


def chunk_bytes(rows: int) -> int:
    """Size of the inputs of one group for a tile of `rows`."""
    return rows * GROUP * 4 + SUMS_BYTES


@dataclass(frozen=True, slots=True)
class TileShape:
    """rows by `halves` of a panel; `width` groups side by side, as independent chains of additions. totals_in_registers: where totals
    stay between groups; a tile whose accumulators fill the registers keeps them in memory. prefetch: bytes ahead in the weights, or 0."""

    rows: int
    halves: int
    width: int = 1
    totals_in_registers: bool = True
    prefetch: int = 0


def tile_shapes(fmt: Any) -> tuple[TileShape, ...]:
    """The tiles for the CPU that code is compiled for, fewest rows first.

    A tile of r rows and h halves keeps r * h * width accumulators of 16 lanes: one register each with AVX-512, two with AVX2, four
    with NEON. Raises CompileError for a CPU without fused multiply-add, which the law of the products needs.
    """
    features = target_features()
    ahead = PREFETCH_BYTES
    if "avx512f" in features:
        width = 2 if fmt in FOUR_BITS else 1  # 4-bit weights arrive fast enough for the latency of one chain of additions to show
        few: tuple[TileShape, ...] = (TileShape(1, 2, width, prefetch=ahead), TileShape(2, 2, width, prefetch=ahead), TileShape(4, 2, prefetch=ahead))
        return (*few, TileShape(6, 2), TileShape(8, 2, totals_in_registers=False), TileShape(12, 2, totals_in_registers=False))
    if "fma" not in features and "neon" not in features:
        raise CompileError("this CPU has no fused multiply-add, which Interlock's products need: expected AVX2 with FMA, AVX-512, or NEON")
    few = (TileShape(1, 2, prefetch=ahead), TileShape(2, 2, totals_in_registers=False, prefetch=ahead))
    return (*few, TileShape(4, 1, totals_in_registers=False), TileShape(6, 1, totals_in_registers=False))


def make_tile(fmt: Any, shape: TileShape) -> Any:
    """An intrinsic `tile(record, half, chunk, totals, groups)` that stores `totals[row][16 * halves]` (float32, row stride 128 bytes).

    record: address of the panel's first group record; half: the first half of 16 outputs to work on; chunk: address of the tile's
    first input chunk; groups: a positive multiple of the shape's width.
    """

    @intrinsic
    def tile(typingctx: Any, record: Any, half: Any, chunk: Any, totals: Any, groups: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Tile(builder, fmt, shape, *args).emit()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return tile


@intrinsic
def prefetch_first(typingctx: Any, address: Any) -> Any:
    """Prefetch what a tile's own prefetches, which run PREFETCH_BYTES ahead, leave out at the start of a run of panels."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for offset in range(0, PREFETCH_BYTES, ALIGNMENT):
            _prefetch(builder, builder.add(args[0], _word(offset)))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def input_scales(typingctx: Any) -> Any:
    """The factors of 16 successive inputs of a 4-bit product."""
    return f32x16(), lambda context, builder, signature, args: ir.Constant(_v_f32, list(INPUT_SCALES * 2))


class _Tile:
    def __init__(self, builder: Any, fmt: Any, shape: TileShape, record: Any, half: Any, chunk: Any, totals: Any, groups: Any) -> None:
        self.builder, self.fmt, self.shape = builder, fmt, shape
        self.record, self.half, self.chunk, self.totals, self.groups = record, half, chunk, totals, groups
        self.record_bytes, self.chunk_bytes = group_nbytes(fmt), chunk_bytes(shape.rows)
        self.cells = [(row, h) for row in range(shape.rows) for h in range(shape.halves)]

    def emit(self) -> None:
        """A loop over `width` groups at a time around a loop over steps of 8 inputs, which bounds what the scheduler may move ahead."""
        b, in_registers = self.builder, self.shape.totals_in_registers
        if not in_registers:
            for cell in self.cells:
                b.store(_constant(0.0), self._total_pointer(*cell), align=64)
        entry, outer, inner, finish, after = b.block, *(b.append_basic_block(name) for name in ("groups", "steps", "finish", "after"))
        b.branch(outer)
        b.position_at_end(outer)
        phis = [b.phi(_i64) for _ in range(3)]
        for phi, value in zip(phis, (_word(0), self.record, self.chunk), strict=True):
            phi.add_incoming(value, entry)
        group, record, chunk = phis
        before = {cell: b.phi(_v_f32) for cell in self.cells} if in_registers else {}
        for phi in before.values():
            phi.add_incoming(_constant(0.0), entry)
        records = [b.add(record, _word(i * self.record_bytes)) for i in range(self.shape.width)]
        chunks = [b.add(chunk, _word(i * self.chunk_bytes)) for i in range(self.shape.width)]
        if self.shape.prefetch:
            for offset in range(0, self.shape.width * self.record_bytes, ALIGNMENT):
                _prefetch(b, b.add(record, _word(self.shape.prefetch + offset)))
        b.branch(inner)
        b.position_at_end(inner)
        acc = self._accumulate(records, chunks, outer, inner, finish)
        b.position_at_end(finish)
        totals: dict[Any, Any] = dict(before) or {cell: b.load(self._total_pointer(*cell), align=64) for cell in self.cells}
        for i in range(self.shape.width):
            totals = self._add_group(totals, acc[i], records[i], chunks[i])
        if not in_registers:
            self._store(totals)
        following = b.add(group, _word(self.shape.width))
        next_record = b.add(record, _word(self.shape.width * self.record_bytes))
        next_chunk = b.add(chunk, _word(self.shape.width * self.chunk_bytes))
        for phi, value in zip(phis, (following, next_record, next_chunk), strict=True):
            phi.add_incoming(value, finish)
        for cell, phi in before.items():
            phi.add_incoming(totals[cell], finish)
        b.cbranch(b.icmp_signed("<", following, self.groups), outer, after)
        b.position_at_end(after)
        if in_registers:
            self._store(totals)

    def _accumulate(self, records: Any, chunks: Any, outer: Any, inner: Any, finish: Any) -> list[dict[Any, Any]]:
        """The loop over steps in block `inner`: per group, the sums of value * x from 0, by cell."""
        b = self.builder
        step = b.phi(_i64)
        step.add_incoming(_word(0), outer)
        phis = [{cell: b.phi(_v_f32) for cell in self.cells} for _ in records]
        acc: list[dict[Any, Any]] = [dict(of_group) for of_group in phis]
        weights = [self._step_weights(record, step) for record in records]
        inputs = [b.add(chunk, b.mul(step, _word(4 * STEP))) for chunk in chunks]
        for j in range(STEP):
            for i in range(len(records)):
                self._multiply(acc[i], weights[i], j, inputs[i])
        following = b.add(step, _word(1))
        step.add_incoming(following, inner)
        for i, of_group in enumerate(phis):
            for cell, phi in of_group.items():
                phi.add_incoming(_constant(0.0), outer)
                phi.add_incoming(acc[i][cell], inner)
        b.cbranch(b.icmp_signed("<", following, _word(GROUP // STEP)), inner, finish)
        return acc

    def _store(self, totals: dict[Any, Any]) -> None:
        for cell in self.cells:
            self.builder.store(totals[cell], self._total_pointer(*cell), align=64)

    def _multiply(self, acc: dict[Any, Any], weights: Any, j: int, inputs: Any) -> None:
        b = self.builder
        values = [self._value(weights, j, h) for h in range(self.shape.halves)]
        for row in range(self.shape.rows):
            x = splat_value(b, b.load(pointer(b, b.add(inputs, _word(row * GROUP * 4 + 4 * j)), _f32), align=4))
            for h in range(self.shape.halves):
                acc[row, h] = _fma(b, values[h], x, acc[row, h])

    def _add_group(self, totals: dict[Any, Any], acc: dict[Any, Any], record: Any, chunk: Any) -> dict[Any, Any]:
        b = self.builder
        if self.fmt not in QUANT_BYTES:
            return {cell: b.fadd(totals[cell], acc[cell]) for cell in self.cells}
        scales = [self._half_floats(record, QUANT_BYTES[self.fmt], h) for h in range(self.shape.halves)]
        totals = {(row, h): _fma(b, acc[row, h], scales[h], totals[row, h]) for row, h in self.cells}
        if self.fmt != "q4_1":
            return totals
        minima = [self._half_floats(record, QUANT_BYTES[self.fmt] + SCALE_BYTES, h) for h in range(self.shape.halves)]
        sums = [
            splat_value(b, b.load(pointer(b, b.add(chunk, _word(self.shape.rows * GROUP * 4 + 4 * row)), _f32), align=4))
            for row in range(self.shape.rows)
        ]
        return {(row, h): _fma(b, minima[h], sums[row], totals[row, h]) for row, h in self.cells}

    def _half_floats(self, record: Any, offset: int, h: int) -> Any:
        b = self.builder
        address = b.add(b.add(record, b.mul(self.half, _word(2 * LANES))), _word(offset + 2 * LANES * h))
        return b.fpext(b.load(pointer(b, address, ir.VectorType(_f16, LANES)), align=32), _v_f32)

    def _step_weights(self, record: Any, step: Any) -> Any:
        """The words of 8 inputs (4-bit formats), or the address of their elements."""
        b = self.builder
        if self.fmt not in FOUR_BITS:
            return b.add(record, b.mul(step, _word(STEP * PANEL * self._element_bytes)))
        address = b.add(b.add(record, b.mul(step, _word(4 * PANEL))), b.mul(self.half, _word(4 * LANES)))
        return [b.load(pointer(b, b.add(address, _word(4 * LANES * h)), _v_i32), align=64) for h in range(self.shape.halves)]

    def _value(self, weights: Any, j: int, h: int) -> Any:
        """16 weights of input j as float32; for 4-bit formats times 1 / INPUT_SCALES[j]."""
        b = self.builder
        if self.fmt in FOUR_BITS:
            word = weights[h]
            nibble = b.lshr(word, _integers(28)) if j == STEP - 1 else b.and_(word, _integers(15 << 4 * j))
            value = b.sitofp(nibble, _v_f32)
            return value if self.fmt == "q4_1" else b.fsub(value, _constant(8.0 / INPUT_SCALES[j]))
        size = self._element_bytes
        address = b.add(b.add(weights, b.mul(self.half, _word(LANES * size))), _word((PANEL * j + LANES * h) * size))
        if self.fmt == "float32":
            return b.load(pointer(b, address, _v_f32), align=64)
        if self.fmt == "float16":
            return b.fpext(b.load(pointer(b, address, ir.VectorType(_f16, LANES)), align=32), _v_f32)
        if self.fmt == "bfloat16":
            bits = b.load(pointer(b, address, ir.VectorType(_i16, LANES)), align=32)
            return b.bitcast(b.shl(b.zext(bits, _v_i32), _integers(16)), _v_f32)
        return b.sitofp(b.sext(b.load(pointer(b, address, ir.VectorType(_i8, LANES)), align=16), _v_i32), _v_f32)

    @property
    def _element_bytes(self) -> int:
        return self.record_bytes // (PANEL * GROUP)

    def _total_pointer(self, row: int, h: int) -> Any:
        return pointer(self.builder, self.builder.add(self.totals, _word(row * PANEL * 4 + h * LANES * 4)), _v_f32)


def _prefetch(builder: Any, address: Any) -> None:
    kind = _i8.as_pointer()
    function = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [kind, _i32, _i32, _i32])
    builder.call(function, [pointer(builder, address, _i8), *(ir.Constant(_i32, value) for value in (0, 3, 1))])


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(declare(builder, "llvm.fma.v16f32", _v_f32, [_v_f32] * 3), [a, b, c])


def _word(value: int) -> Any:
    return ir.Constant(_i64, value)


def _constant(value: float) -> Any:
    return ir.Constant(_v_f32, [value] * LANES)


def _integers(value: int) -> Any:
    return ir.Constant(_v_i32, [value - (1 << 32) if value >> 31 else value] * LANES)
