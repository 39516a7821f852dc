"""The micro kernel of the products: a tile of a few rows by one panel of outputs, as LLVM IR.

Every output is one expression, whatever the tile: per group of 32 inputs, in ascending order, acc = fma(value, x, acc) from 0 with the
integer value of the quant; then total = fma(acc, scale, total) from 0 over the groups, for q4_1 followed by
total = fma(minimum, sum of x over the group, total). For float formats total = total + acc.

A 4-bit value is not shifted down before it is converted: bits 4j to 4j + 3 of a word give value * 16**j, and x comes scaled by
16**-j. Powers of two commute with rounding, and this saves an instruction per vector. See `INPUT_SCALES`.

Inputs arrive as group chunks: `[rows][32]` float32, then the rows' sums of the group in 64 bytes.
"""

from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

from interlock.core.errors import CompileError
from interlock.kernels.cpu.simd import LANES, declare, f32x16, pointer, splat_value
from interlock.kernels.formats import GROUP, PANEL, QUANT_BYTES, SCALE_BYTES, group_nbytes

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


def tile_shapes() -> tuple[tuple[int, int, bool], ...]:
    """The tiles for the CPU that code is compiled for, smallest first: (rows, halves of a panel, totals in registers).

    A tile of r rows and h halves keeps r * h accumulators of 16 lanes: one register each with AVX-512, two with AVX2, four with NEON.
    Raises CompileError for a CPU without fused multiply-add, which the law of the products needs.
    """
    features = _target_features()
    if "avx512f" in features:
        return (1, 2, True), (2, 2, True), (4, 2, True), (6, 2, True), (8, 2, False), (12, 2, False)
    if "fma" not in features and "neon" not in features:
        raise CompileError("this CPU has no fused multiply-add, which Interlock's products need: expected AVX2 with FMA, AVX-512, or NEON")
    return (1, 2, True), (2, 2, False), (4, 1, False), (6, 1, False)


def _target_features() -> set[str]:
    described = config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()
    return {feature[1:] for feature in described.split(",") if feature.startswith("+")}


def make_tile(fmt: Any, rows: int, halves: int, in_registers: bool, prefetch: int) -> Any:
    """An intrinsic `tile(record, half, chunk, totals, groups)` that stores `totals[row][16 * halves]` (float32, row stride 128 bytes).

    record: address of the panel's first group record; half: the first half of 16 outputs to work on; chunk: address of the tile's
    first input chunk; groups: at least 1. in_registers: where totals stay between groups; tiles whose accumulators fill the registers
    keep them in memory. prefetch: bytes ahead to prefetch weights, or 0.
    """

    @intrinsic
    def tile(typingctx: Any, record: Any, half: Any, chunk: Any, totals: Any, groups: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emitter = _Tile(builder, fmt, rows, halves, prefetch, *args)
            if in_registers:
                emitter.totals_in_registers()
            else:
                emitter.totals_in_memory()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return tile


@intrinsic
def input_scales(typingctx: Any) -> Any:
    """The factors of 16 successive inputs of a 4-bit product."""
    return f32x16(), lambda context, builder, signature, args: ir.Constant(_v_f32, list(INPUT_SCALES * 2))


class _Tile:
    def __init__(
        self, builder: Any, fmt: Any, rows: int, halves: int, prefetch: int, record: Any, half: Any, chunk: Any, totals: Any, groups: Any
    ) -> None:
        self.builder, self.fmt, self.rows, self.halves, self.prefetch = builder, fmt, rows, halves, prefetch
        self.record, self.half, self.chunk, self.totals, self.groups = record, half, chunk, totals, groups
        self.record_bytes, self.chunk_bytes = group_nbytes(fmt), chunk_bytes(rows)
        self.cells = [(row, h) for row in range(rows) for h in range(halves)]

    def totals_in_registers(self) -> None:
        """A loop over groups with everything else unrolled."""
        b = self.builder
        entry, body, after = b.block, b.append_basic_block("groups"), b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        group, record, chunk = self._group_phis(entry)
        before = {cell: b.phi(_v_f32) for cell in self.cells}
        for phi in before.values():
            phi.add_incoming(_constant(0.0), entry)
        self._prefetch(record)
        acc: dict[Any, Any] = {cell: _constant(0.0) for cell in self.cells}
        for step in range(GROUP // STEP):
            self._add_step(acc, record, chunk, _word(step))
        totals = self._add_group(before, acc, record, chunk)
        for cell, phi in before.items():
            phi.add_incoming(totals[cell], body)
        self._next_group(group, record, chunk, body, after)
        b.position_at_end(after)
        for cell in self.cells:
            b.store(totals[cell], self._total_pointer(*cell), align=64)

    def totals_in_memory(self) -> None:
        """A loop over groups around a loop over steps; totals are read and written once per group."""
        b = self.builder
        for cell in self.cells:
            b.store(_constant(0.0), self._total_pointer(*cell), align=64)
        entry, outer, inner = b.block, b.append_basic_block("groups"), b.append_basic_block("steps")
        finish, after = b.append_basic_block("finish"), b.append_basic_block("after")
        b.branch(outer)
        b.position_at_end(outer)
        group, record, chunk = self._group_phis(entry)
        self._prefetch(record)
        b.branch(inner)
        b.position_at_end(inner)
        step = b.phi(_i64)
        step.add_incoming(_word(0), outer)
        phis = {cell: b.phi(_v_f32) for cell in self.cells}
        acc: dict[Any, Any] = dict(phis)
        self._add_step(acc, record, chunk, step)
        following = b.add(step, _word(1))
        step.add_incoming(following, inner)
        for cell, phi in phis.items():
            phi.add_incoming(_constant(0.0), outer)
            phi.add_incoming(acc[cell], inner)
        b.cbranch(b.icmp_signed("<", following, _word(GROUP // STEP)), inner, finish)
        b.position_at_end(finish)
        before = {cell: b.load(self._total_pointer(*cell), align=64) for cell in self.cells}
        totals = self._add_group(before, acc, record, chunk)
        for cell in self.cells:
            b.store(totals[cell], self._total_pointer(*cell), align=64)
        self._next_group(group, record, chunk, outer, after)
        b.position_at_end(after)

    def _group_phis(self, entry: Any) -> tuple[Any, Any, Any]:
        phis = tuple(self.builder.phi(_i64) for _ in range(3))
        for phi, value in zip(phis, (_word(0), self.record, self.chunk), strict=True):
            phi.add_incoming(value, entry)
        group, record, chunk = phis
        return group, record, chunk

    def _next_group(self, group: Any, record: Any, chunk: Any, body: Any, after: Any) -> None:
        b = self.builder
        following = b.add(group, _word(1))
        for phi, value in (
            (group, following),
            (record, b.add(record, _word(self.record_bytes))),
            (chunk, b.add(chunk, _word(self.chunk_bytes))),
        ):
            phi.add_incoming(value, b.block)
        b.cbranch(b.icmp_signed("<", following, self.groups), body, after)

    def _add_step(self, acc: dict[Any, Any], record: Any, chunk: Any, step: Any) -> None:
        b = self.builder
        weights = self._step_weights(record, step)
        inputs = b.add(chunk, b.mul(step, _word(4 * STEP)))
        for j in range(STEP):
            self._multiply(acc, weights, j, inputs)

    def _multiply(self, acc: dict[Any, Any], weights: Any, j: int, inputs: Any) -> None:
        b = self.builder
        values = [self._value(weights, j, h) for h in range(self.halves)]
        for row in range(self.rows):
            x = splat_value(b, b.load(pointer(b, b.add(inputs, _word(row * GROUP * 4 + 4 * j)), _f32), align=4))
            for h in range(self.halves):
                acc[row, h] = _fma(b, values[h], x, acc[row, h])

    def _add_group(self, totals: dict[Any, Any], acc: dict[Any, Any], record: Any, chunk: Any) -> dict[Any, Any]:
        b = self.builder
        if self.fmt not in QUANT_BYTES:
            return {cell: b.fadd(totals[cell], acc[cell]) for cell in self.cells}
        scales = [self._half_floats(record, QUANT_BYTES[self.fmt], h) for h in range(self.halves)]
        totals = {(row, h): _fma(b, acc[row, h], scales[h], totals[row, h]) for row, h in self.cells}
        if self.fmt != "q4_1":
            return totals
        minima = [self._half_floats(record, QUANT_BYTES[self.fmt] + SCALE_BYTES, h) for h in range(self.halves)]
        sums = [splat_value(b, b.load(pointer(b, b.add(chunk, _word(self.rows * GROUP * 4 + 4 * row)), _f32), align=4)) for row in range(self.rows)]
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
        return [b.load(pointer(b, b.add(address, _word(4 * LANES * h)), _v_i32), align=64) for h in range(self.halves)]

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

    def _prefetch(self, record: Any) -> None:
        if not self.prefetch:
            return
        b = self.builder
        kind = _i8.as_pointer()
        function = declare(b, "llvm.prefetch.p0", ir.VoidType(), [kind, _i32, _i32, _i32])
        for offset in range(0, self.record_bytes, 64):
            address = pointer(b, b.add(record, _word(self.prefetch + offset)), _i8)
            b.call(function, [address, ir.Constant(_i32, 0), ir.Constant(_i32, 3), ir.Constant(_i32, 1)])


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(declare(builder, "llvm.fma.v16f32", _v_f32, [_v_f32] * 3), [a, b, c])


def _word(value: int) -> Any:
    return ir.Constant(_i64, value)


def _constant(value: float) -> Any:
    return ir.Constant(_v_f32, [value] * LANES)


def _integers(value: int) -> Any:
    return ir.Constant(_v_i32, [value - (1 << 32) if value >> 31 else value] * LANES)
