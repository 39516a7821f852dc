"""The inner loops of attention, as intrinsics: a tile of keys and values made float32, scores, and the weighted sum of values.

A tile is TILE keys. Its keys lie transposed in scratch, `[head_dim][TILE]`, so that lanes are keys; its values lie
`[TILE][padded_dim]`, so that lanes are dimensions. Blocking over rows and vectors only decides what stays in registers: each score
is one FMA chain over ascending dimensions from 0, each output one FMA chain over ascending keys.
"""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from interlock.core.buffer import ALIGNMENT, ITEM_SIZES, DType
from interlock.kernels.cpu.attention_layout import STATE_HEADER, TILE, padded, state_bytes
from interlock.kernels.cpu.emit import at, integer, loop, target_features
from interlock.kernels.cpu.rounding import stored_type, widen_value
from interlock.kernels.cpu.simd import LANES, declare, f32x16, pointer, splat_value

_VECTORS = TILE // LANES

_f32 = ir.FloatType()
_i16, _i32, _i64 = (ir.IntType(n) for n in (16, 32, 64))
_v_f32, _v_i32, _v_i16 = (ir.VectorType(t, LANES) for t in (_f32, _i32, _i16))
_HAS_WIDE_REGISTERS: Final = "avx512f" in target_features()
_ZERO = ir.Constant(_v_f32, [0.0] * LANES)


def make_key_tile(dtype: DType, head_dim: int) -> Any:
    """The intrinsic `key_tile(addresses, out, count)`: out[d][i] = element d of the key at addresses[i], as float32, for i < count.

    addresses: int64, of count entries rounded up to whole vectors; that many lanes are written.
    16-bit elements are transposed in pairs, as 32-bit lanes. The last chunk of dimensions may overlap the one before it.
    """
    words_per_lane = 4 // ITEM_SIZES[dtype]
    chunk = LANES * words_per_lane  # dimensions that one 16 x 16 transpose of 32-bit lanes brings
    if head_dim < chunk:
        return _make_small_key_tile(dtype, head_dim)
    chunks = -(-head_dim // chunk)
    last = head_dim - chunk

    @intrinsic
    def key_tile(typingctx: Any, addresses: Any, out: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def transpose_chunk(chunk_index: Any, group: Any) -> None:
                wanted = builder.mul(chunk_index, integer(chunk))
                first = builder.select(builder.icmp_signed("<", wanted, integer(last)), wanted, integer(last))
                rows = []
                for i in range(LANES):
                    key = builder.load(pointer(builder, at(builder, args[0], (group, 8 * LANES), (integer(i), 8)), _i64), align=8)
                    address = at(builder, key, (first, ITEM_SIZES[dtype]))
                    rows.append(builder.load(pointer(builder, address, _v_i32), align=ITEM_SIZES[dtype]))
                for i, column in enumerate(_transpose(builder, rows)):
                    for word, value in enumerate(_words(builder, column, dtype)):
                        dimension = builder.add(first, integer(i * words_per_lane + word))
                        address = at(builder, args[1], (dimension, 4 * TILE), (group, 4 * LANES))
                        builder.store(value, pointer(builder, address, _v_f32), align=64)

            def body(index: Any, carried: list[Any]) -> list[Any]:
                transpose_chunk(builder.urem(index, integer(chunks)), builder.udiv(index, integer(chunks)))
                return []

            groups = builder.lshr(builder.add(args[2], integer(LANES - 1)), integer(LANES.bit_length() - 1))
            loop(builder, builder.mul(groups, integer(chunks)), [], body)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return key_tile


def _make_small_key_tile(dtype: DType, head_dim: int) -> Any:
    """`key_tile` for head dimensions below one transpose: element by element."""

    @intrinsic
    def key_tile(typingctx: Any, addresses: Any, out: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def body(index: Any, carried: list[Any]) -> list[Any]:
                key = builder.load(pointer(builder, at(builder, args[0], (index, 8)), _i64), align=8)
                for d in range(head_dim):
                    address = at(builder, key, (integer(d), ITEM_SIZES[dtype]))
                    value = builder.load(pointer(builder, address, stored_type(dtype)), align=ITEM_SIZES[dtype])
                    target = at(builder, args[1], (integer(d), 4 * TILE), (index, 4))
                    builder.store(widen_value(builder, value, dtype), pointer(builder, target, _f32), align=4)
                return []

            loop(builder, args[2], [], body)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return key_tile


def make_value_tile(dtype: DType, head_dim: int) -> Any:
    """The intrinsic `value_tile(addresses, offset, out, count)`: out[i][d] = element d of the value at addresses[i] + offset, as float32,
    for i < count; dimensions from `head_dim` on are 0."""

    @intrinsic
    def value_tile(typingctx: Any, addresses: Any, offset: Any, out: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses, offset, out, count = args

            def body(index: Any, carried: list[Any]) -> list[Any]:
                value = builder.load(pointer(builder, at(builder, addresses, (index, 8)), _i64), align=8)
                source = builder.add(value, offset)
                target = at(builder, out, (index, 4 * padded(head_dim)))
                for d in range(0, head_dim, LANES):
                    vector = _load_stored(builder, source, d, head_dim, dtype)
                    builder.store(vector, pointer(builder, at(builder, target, (integer(d), 4)), _v_f32), align=64)
                return []

            loop(builder, count, [], body)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return value_tile


def make_scores(rows: int, head_dim: int) -> Any:
    """The intrinsic `scores(q, keys, out, scale)`: out[r][i] = scale * sum over d of q[r][d] * keys[d][i], for `rows` rows of q."""
    unroll = 8

    @intrinsic
    def scores(typingctx: Any, q: Any, keys: Any, out: Any, scale: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            q, keys, out, scale = args
            factor = splat_value(builder, scale)
            for group in _register_groups(rows, _VECTORS):

                def take(d: Any, sums: list[Any], group: range = group) -> None:
                    vectors = [_load(builder, at(builder, keys, (d, 4 * TILE), (integer(v), 4 * LANES))) for v in group]
                    for r in range(rows):
                        weight = _splat_load(builder, at(builder, q, (d, 4), (integer(r), 4 * head_dim)))
                        for j, vector in enumerate(vectors):
                            sums[r * len(group) + j] = _fma(builder, weight, vector, sums[r * len(group) + j])

                def body(index: Any, sums: list[Any]) -> list[Any]:
                    first = builder.mul(index, integer(unroll))
                    for step in range(unroll):
                        take(builder.add(first, integer(step)), sums)
                    return sums

                sums = loop(builder, integer(head_dim // unroll), [_ZERO] * (rows * len(group)), body)
                for d in range(head_dim // unroll * unroll, head_dim):
                    take(integer(d), sums)
                for r in range(rows):
                    for j, v in enumerate(group):
                        address = at(builder, out, (integer(r), 4 * TILE), (integer(v), 4 * LANES))
                        builder.store(builder.fmul(sums[r * len(group) + j], factor), pointer(builder, address, _v_f32), align=64)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.float32), generate

    return scores


def make_weighted_sum(rows: int, head_dim: int, dtype: DType | None) -> Any:
    """The intrinsic `weighted_sum(weights, factors, values, offset, ahead, states, count)`, for `rows` consecutive states:
    sums[r] = sums[r] * factors[r] + the sum over i < count of weights[r][i] * values[i].

    values: a value tile. With a dtype it is the addresses of keys instead, and each value is read in place, `offset` bytes behind its key,
    while the keys at the addresses `ahead`, and their values, are fetched into the cache.
    """
    vectors = padded(head_dim) // LANES

    @intrinsic
    def weighted_sum(typingctx: Any, weights: Any, factors: Any, values: Any, offset: Any, ahead: Any, states: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, factors, values, offset, ahead, states, count = args

            def sums_of(r: int, v: int) -> Any:
                return builder.add(states, integer(r * state_bytes(head_dim) + STATE_HEADER + 4 * LANES * v))

            def value_row(index: Any, group: range) -> list[Any]:
                if dtype is None:
                    row = at(builder, values, (index, 4 * padded(head_dim)))
                    return [_load(builder, at(builder, row, (integer(v), 4 * LANES))) for v in group]
                row = builder.add(builder.load(pointer(builder, at(builder, values, (index, 8)), _i64), align=8), offset)
                return [_load_stored(builder, row, LANES * v, head_dim, dtype) for v in group]

            for group in _register_groups(rows, vectors):
                start = []
                for r in range(rows):
                    factor = _splat_load(builder, at(builder, factors, (integer(r), 4)))
                    start += [builder.fmul(_load(builder, sums_of(r, v)), factor) for v in group]

                def body(index: Any, sums: list[Any], group: range = group) -> list[Any]:
                    row = value_row(index, group)
                    if dtype is not None and group.start == 0:
                        _prefetch_pair(builder, at(builder, ahead, (index, 8)), offset, head_dim * ITEM_SIZES[dtype])
                    for r in range(rows):
                        weight = _splat_load(builder, at(builder, weights, (integer(r), 4 * TILE), (index, 4)))
                        for j, value in enumerate(row):
                            sums[r * len(group) + j] = _fma(builder, weight, value, sums[r * len(group) + j])
                    return sums

                sums = loop(builder, count, start, body)
                for r in range(rows):
                    for j, v in enumerate(group):
                        builder.store(sums[r * len(group) + j], pointer(builder, sums_of(r, v), _v_f32), align=64)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return weighted_sum


@intrinsic
def keep_lanes(typingctx: Any, value: Any, count: Any) -> Any:
    """The first `count` lanes of a vector; -inf in the others."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(_v_i32, list(range(LANES)))
        kept = builder.icmp_signed("<", lanes, splat_value(builder, builder.trunc(args[1], _i32)))
        return builder.select(kept, args[0], ir.Constant(_v_f32, [float("-inf")] * LANES))

    return f32x16(f32x16, types.int64), generate


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of 16 rows of 32-bit lanes: interleave lanes, pairs of lanes, then 128-bit quarters."""

    def shuffle(a: Any, b: Any, order: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(_v_i32, order))

    quarters = range(0, LANES, 4)
    low = [q + lane for q in quarters for lane in (0, LANES, 1, LANES + 1)]
    low_pairs = [q + lane for q in quarters for lane in (0, 1, LANES, LANES + 1)]
    columns: list[Any] = [None] * LANES
    interleaved = []  # [g][c]: lanes 4 q + r hold row 4 g + r, column 4 q + c
    for g in range(4):
        a, b, c, d = rows[4 * g : 4 * g + 4]
        first = [shuffle(a, b, [i + half for i in low]) for half in (0, 2)]
        second = [shuffle(c, d, [i + half for i in low]) for half in (0, 2)]
        interleaved.append([shuffle(first[i // 2], second[i // 2], [j + 2 * (i % 2) for j in low_pairs]) for i in range(4)])
    for c in range(4):
        a, b, d, e = (interleaved[g][c] for g in range(4))
        for half in (0, 1):
            both = [*range(8 * half, 8 * half + 8), *range(LANES + 8 * half, LANES + 8 * half + 8)]
            upper, lower = shuffle(a, b, both), shuffle(d, e, both)
            for quarter in (0, 1):
                picked = [base + 4 * quarter + lane for base in (0, 8, LANES, LANES + 8) for lane in range(4)]
                columns[4 * (2 * half + quarter) + c] = shuffle(upper, lower, picked)
    return columns


def _words(builder: Any, column: Any, dtype: DType) -> list[Any]:
    """The float32 vectors in a vector of 32-bit lanes: one, or the lower and the upper halves."""
    if dtype == "float32":
        return [builder.bitcast(column, _v_f32)]
    if dtype == "bfloat16":
        upper = builder.and_(column, ir.Constant(_v_i32, [-65536] * LANES))
        return [builder.bitcast(bits, _v_f32) for bits in (builder.shl(column, ir.Constant(_v_i32, [16] * LANES)), upper)]
    halves = column, builder.lshr(column, ir.Constant(_v_i32, [16] * LANES))
    return [widen_value(builder, builder.trunc(half, _v_i16), dtype) for half in halves]


def _load(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, _v_f32), align=64)


def _load_stored(builder: Any, row: Any, first: int, head_dim: int, dtype: DType) -> Any:
    """Elements [first, first + 16) of a stored row, as float32; 0 from `head_dim` on."""
    lanes = min(LANES, head_dim - first)
    address = at(builder, row, (integer(first), ITEM_SIZES[dtype]))
    stored = builder.load(pointer(builder, address, ir.VectorType(stored_type(dtype), lanes)), align=ITEM_SIZES[dtype])
    wide = widen_value(builder, stored, dtype)
    if lanes == LANES:
        return wide
    order = ir.Constant(_v_i32, [min(i, lanes) for i in range(LANES)])
    return builder.shuffle_vector(wide, ir.Constant(wide.type, [0.0] * lanes), order)


def _register_groups(rows: int, vectors: int) -> list[range]:
    """How many of `vectors` columns of vectors `rows` rows accumulate at a time; only speed depends on it."""
    width = 4 if _HAS_WIDE_REGISTERS else 1 if rows > 2 else 2
    return [range(first, min(first + width, vectors)) for first in range(0, vectors, width)]


def _prefetch_pair(builder: Any, address: Any, offset: Any, nbytes: int) -> None:
    """Begin to fetch the key whose address lies at `address`, and its value."""
    key = builder.load(pointer(builder, address, _i64), align=8)
    prefetch = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [ir.IntType(8).as_pointer(), _i32, _i32, _i32])
    for row in (key, builder.add(key, offset)):
        for line in range(0, nbytes, ALIGNMENT):
            where = pointer(builder, builder.add(row, integer(line)), ir.IntType(8))
            builder.call(prefetch, [where, *(ir.Constant(_i32, value) for value in (0, 3, 1))])


def _splat_load(builder: Any, address: Any) -> Any:
    return splat_value(builder, builder.load(pointer(builder, address, _f32), align=4))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(declare(builder, "llvm.fma.v16f32", _v_f32, [_v_f32] * 3), [a, b, c])
