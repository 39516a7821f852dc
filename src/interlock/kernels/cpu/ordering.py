"""The order of tokens: by logit, descending, then by id. The first of a row, ranks, and the sorted head of a row.

A candidate is an int64: the upper half ascends as the logit descends, the lower half is the token id. -0 counts as 0.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from interlock.kernels.cpu.emit import at, integer, loop
from interlock.kernels.cpu.simd import LANES, bits_of, float_of, load_f32, load_i64, pointer, splat, splat_value, store_i64, vload, vmax, vstore

HISTOGRAM_BYTES = 8 * 256

_i16, _i32, _i64 = (ir.IntType(n) for n in (16, 32, 64))
_v_f32 = ir.VectorType(ir.FloatType(), LANES)
_v_i32 = ir.VectorType(_i32, LANES)
_v_i1 = ir.VectorType(ir.IntType(1), LANES)
_STRIDE = 4 * LANES  # tokens that one iteration of argmax looks at

_ZERO = np.float32(0.0)
_LOWEST = np.float32(-np.inf)


@njit(error_model="numpy")
def argmax(logits, size):
    """The first token of a row: the lowest id with the largest logit; -1 if a logit is NaN."""
    whole = size // _STRIDE * _STRIDE
    best = _argmax_vectors(logits, whole // _STRIDE)
    for i in range(whole, size):
        value = load_f32(logits + 4 * i)
        if math.isnan(value):
            return np.int64(-1)
        if best >= 0 and value > load_f32(logits + 4 * best):
            best = np.int64(i)
    return best


@njit(error_model="numpy")
def rank(logits, size, token):
    """1 + how many tokens come before `token`."""
    value = load_f32(logits + 4 * token)
    group = token // 16 * 16
    whole = size // 16 * 16
    count = 1 + _count_at_least(logits, group // 16, value)
    rest = min(group + 16, size)
    for i in range(group, rest):
        other = load_f32(logits + 4 * i)
        if other > value or (other == value and i < token):
            count += 1
    if rest < whole:
        count += _count_above(logits + 4 * rest, (whole - rest) // 16, value)
    for i in range(max(rest, whole), size):
        if load_f32(logits + 4 * i) > value:
            count += 1
    return count


@njit(error_model="numpy")
def collect(values, logits, size, least, candidates):
    """Candidates for all tokens with values[token] >= least, ids ascending; returns their count."""
    count = 0
    whole = size // 16 * 16
    for start in range(0, size, 16):
        mask = np.int64(0xFFFF)
        if start < whole:
            mask = _lanes_at_least(values + 4 * start, least)
        if mask != 0:
            for i in range(start, min(start + 16, size)):
                if load_f32(values + 4 * i) >= least:
                    store_i64(candidates + 8 * count, _candidate(load_f32(logits + 4 * i), i))
                    count += 1
    return count


@njit(error_model="numpy")
def collect_highest(logits, size, wanted, candidates, other, histogram):
    """Candidates for at least the first `wanted` tokens of a row; returns their count. `other`: int64 [size] of workspace.

    The row is read as lines of `columns` logits; the `wanted`-th largest of the columns' maxima is a bound that `wanted` tokens reach.
    """
    columns = (2 * wanted + 15) // 16 * 16
    if columns > size // 4:
        return collect(logits, logits, size, _LOWEST, candidates)
    maxima = other
    for j in range(0, columns, 16):
        vstore(maxima + 4 * j, splat(_LOWEST))
    start = 0
    while start + columns <= size:
        for j in range(0, columns, 16):
            vstore(maxima + 4 * j, vmax(vload(logits + 4 * (start + j)), vload(maxima + 4 * j)))
        start += columns
    for j in range(columns):
        store_i64(candidates + 8 * j, _candidate(load_f32(maxima + 4 * j), j))
    bound = _logit_of(load_i64(sort(candidates, other, histogram, columns) + 8 * (wanted - 1)))
    return collect(logits, logits, size, bound, candidates)


@njit(error_model="numpy")
def sort(candidates, other, histogram, count):
    """Sort candidates (least significant digit first, so ids that ascend still do among equals); returns the address of the result, which
    is `candidates` or `other`, of the same size."""
    for shift in range(32, 64, 8):
        for digit in range(256):
            store_i64(histogram + 8 * digit, 0)
        for i in range(count):
            slot = histogram + 8 * ((load_i64(candidates + 8 * i) >> shift) & 255)
            store_i64(slot, load_i64(slot) + 1)
        position = 0
        for digit in range(256):
            size = load_i64(histogram + 8 * digit)
            store_i64(histogram + 8 * digit, position)
            position += size
        for i in range(count):
            candidate = load_i64(candidates + 8 * i)
            slot = histogram + 8 * ((candidate >> shift) & 255)
            position = load_i64(slot)
            store_i64(slot, position + 1)
            store_i64(other + 8 * position, candidate)
        candidates, other = other, candidates
    return candidates


@njit(error_model="numpy")
def token_of(candidates, index):
    """The token id of a candidate."""
    return load_i64(candidates + 8 * index) & 0xFFFFFFFF


@njit(error_model="numpy")
def _candidate(logit, token):
    bits = np.int64(bits_of(logit + _ZERO))  # -0 + 0 is 0
    descending = bits & 0xFFFFFFFF if bits < 0 else 0x7FFFFFFF - bits
    return (descending << 32) | token


@njit(error_model="numpy")
def _logit_of(candidate):
    descending = (candidate >> 32) & 0xFFFFFFFF
    return float_of(np.int32(descending if descending > 0x7FFFFFFF else 0x7FFFFFFF - descending))


def _load(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, _v_f32), align=4)


def _vector(value: int) -> Any:
    return ir.Constant(_v_i32, [value] * LANES)


def _first(builder: Any, a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Lane by lane, the (logit, id) that comes first."""
    above = builder.fcmp_ordered(">", b[0], a[0])
    ahead = builder.and_(builder.fcmp_ordered("==", b[0], a[0]), builder.icmp_signed("<", b[1], a[1]))
    take = builder.or_(above, ahead)
    return builder.select(take, b[0], a[0]), builder.select(take, b[1], a[1])


@intrinsic
def _argmax_vectors(typingctx: Any, logits: Any, count: Any) -> Any:
    """The first token of `count` groups of 64 logits; 0 of none; -1 if a logit is NaN. Four chains, so that none waits for itself."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def body(index: Any, carried: list[Any]) -> list[Any]:
            best, where, turn, unordered = carried[:4], carried[4:8], carried[8], carried[9]
            rows = [_load(builder, at(builder, args[0], (index, 4 * _STRIDE), (integer(j), 4 * LANES))) for j in range(4)]
            for j, row in enumerate(rows):
                above = builder.fcmp_ordered(">", row, best[j])
                best[j] = builder.select(above, row, best[j])
                where[j] = builder.select(above, turn, where[j])
            for a, b in (rows[:2], rows[2:]):
                unordered = builder.or_(unordered, builder.fcmp_unordered("uno", a, b))
            return [*best, *where, builder.add(turn, _vector(1)), unordered]

        lowest = ir.Constant(_v_f32, [float("-inf")] * LANES)
        start = [lowest] * 4 + [_vector(0)] * 5 + [ir.Constant(_v_i1, [0] * LANES)]
        carried = loop(builder, args[1], start, body)
        lanes = ir.Constant(_v_i32, list(range(LANES)))
        ids = [builder.add(builder.mul(carried[4 + j], _vector(_STRIDE)), builder.add(lanes, _vector(LANES * j))) for j in range(4)]
        found = (carried[0], ids[0])
        for j in range(1, 4):
            found = _first(builder, found, (carried[j], ids[j]))
        for half in (8, 4, 2, 1):
            order = ir.Constant(_v_i32, [(i + half) % LANES for i in range(LANES)])
            found = _first(builder, found, (builder.shuffle_vector(found[0], found[0], order), builder.shuffle_vector(found[1], found[1], order)))
        token = builder.sext(builder.extract_element(found[1], ir.Constant(_i32, 0)), _i64)
        is_nan = builder.icmp_unsigned("!=", builder.bitcast(carried[9], _i16), ir.Constant(_i16, 0))
        return builder.select(is_nan, integer(-1), token)

    return types.int64(types.int64, types.int64), generate


def _make_count(comparison: str) -> Any:
    """`count(logits, vectors, value)`: how many of `vectors` * 16 logits compare so with `value`."""

    @intrinsic
    def count(typingctx: Any, logits: Any, vectors: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = splat_value(builder, args[2])

            def body(index: Any, carried: list[Any]) -> list[Any]:
                holds = builder.fcmp_ordered(comparison, _load(builder, at(builder, args[0], (index, 4 * LANES))), value)
                return [builder.add(carried[0], builder.zext(holds, _v_i32))]

            (counts,) = loop(builder, args[1], [_vector(0)], body)
            total = builder.extract_element(counts, ir.Constant(_i32, 0))
            for i in range(1, LANES):
                total = builder.add(total, builder.extract_element(counts, ir.Constant(_i32, i)))
            return builder.sext(total, _i64)

        return types.int64(types.int64, types.int64, types.float32), generate

    return count


_count_above = _make_count(">")
_count_at_least = _make_count(">=")


@intrinsic
def _lanes_at_least(typingctx: Any, address: Any, least: Any) -> Any:
    """A bit for each of the 16 values at `address` that is at least `least`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        holds = builder.fcmp_ordered(">=", _load(builder, args[0]), splat_value(builder, args[1]))
        return builder.zext(builder.bitcast(holds, _i16), _i64)

    return types.int64(types.int64, types.float32), generate
