"""Paged attention: keys and values come only from the block pool, in absolute tiles and splits of positions.

Every query row does the same arithmetic whatever it is batched with: tiles of TILE keys ascend within a split of SPLIT keys (online
softmax, M. Milakov and N. Gimelshein, 2018), a split starts from a fresh state, and splits are merged in ascending order. Rows of
longer queries merge in place; each (request, kv head, split) of a decode row is a task of its own, whose state `attention_merge`
picks up, so that several threads share one request. Masked keys are skipped: they may hold anything.

A row's state is `[maximum, denominator, factor, padding | padded head_dim sums]`, float32, header and sums each aligned to a vector.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit

from interlock.core.buffer import ITEM_SIZES, DType
from interlock.kernels.cpu.attention_tiles import (
    TILE,
    first_lane,
    keep_lanes,
    make_key_tile,
    make_scores,
    make_value_tile,
    make_weighted_sum,
    padded,
)
from interlock.kernels.cpu.simd import (
    fma,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
    store_i64,
    vadd,
    vfma,
    vload,
    vmax,
    vmul,
    vstore,
    vsub,
)
from interlock.kernels.cpu.sync import report_error
from interlock.kernels.cpu.vector_math import vexp
from interlock.kernels.slot import BLOCK_TABLE, BLOCK_TABLE_STRIDE, ERROR_BLOCK_TABLE, NUM_REQS, QUERY_START_LOC, SEQ_LENS

SPLIT: Final = 256  # keys
ROW_BLOCK: Final = 4  # query rows that the inner loops hold in registers
QUERY_ROWS: Final = 64  # query rows that share one pass over the keys
_TILE_COST: Final = 4  # making a tile costs about as much as this many rows of it
_FRESH: Final = np.float32(-np.inf)
_HEADER: Final = 64  # bytes


def state_bytes(head_dim: int) -> int:
    """Bytes of one row's state."""
    return _HEADER + 4 * padded(head_dim)


def scratch_layout(group_size: int, head_dim: int) -> tuple[int, int]:
    """(query rows of a task, bytes of scratch per thread) when `group_size` query heads share a kv head."""
    rows = max(QUERY_ROWS, group_size)
    tile = 8 * TILE + 4 * TILE * (head_dim + padded(head_dim) + ROW_BLOCK)
    return rows, tile + rows * (8 + 4 * head_dim + 2 * state_bytes(head_dim))


def attention(kv_dtype: DType, head_dim: int) -> Callable[..., None]:
    """Factory of `catalog.attention`."""
    attend = _make_attend(kv_dtype, head_dim)
    finish_row = _make_finish_row(head_dim)
    merge_row = _make_merge_row(head_dim)
    reset = _make_reset(head_dim)
    STATE = state_bytes(head_dim)
    ROW = 4 * head_dim

    @njit(error_model="numpy")
    def run_decode(args, slot, scratch, request, kv_head, split):
        """One split of the only query row of a request."""
        num_heads = load_i64(args + 24)
        num_kv_heads = load_i64(args + 32)
        group = num_heads // num_kv_heads
        row = np.int64(load_i32(load_i64(slot + 8 * QUERY_START_LOC) + 4 * request))
        length = np.int64(load_i32(load_i64(slot + 8 * SEQ_LENS) + 4 * request))
        max_splits = load_i64(args + 80)
        num_splits = (length + SPLIT - 1) // SPLIT
        q = load_i64(args) + row * (num_heads + 2 * num_kv_heads) * ROW + kv_head * group * ROW
        limits = scratch
        for i in range(group):
            store_i64(limits + 8 * i, length)
        if num_splits == 1:
            states = _aligned(limits + 8 * group)
            stride = STATE
        else:
            states = load_i64(args + 72) + ((request * num_heads + kv_head * group) * max_splits + split) * STATE
            stride = max_splits * STATE
        tiles = _aligned(limits + 8 * group) + group * STATE
        reset(states, stride, group)
        start = split * SPLIT
        if not attend(args, slot, tiles, request, kv_head, q, limits, states, stride, group, start, min(start + SPLIT, length)):
            return False
        if num_splits == 1:
            out = load_i64(args + 16) + (row * num_heads + kv_head * group) * ROW
            for i in range(group):
                finish_row(states + i * STATE, out + i * ROW)
        return True

    @njit(error_model="numpy")
    def run_queries(args, slot, scratch, request, kv_head, first, count):
        """All splits of `count` query tokens from the request's token `first`, for the heads of one kv head."""
        num_heads = load_i64(args + 24)
        num_kv_heads = load_i64(args + 32)
        group = num_heads // num_kv_heads
        starts = load_i64(slot + 8 * QUERY_START_LOC) + 4 * request
        row = np.int64(load_i32(starts))
        queries = np.int64(load_i32(starts + 4)) - row
        length = np.int64(load_i32(load_i64(slot + 8 * SEQ_LENS) + 4 * request))
        rows = count * group
        limits = scratch
        q = _aligned(limits + 8 * rows)
        totals = _aligned(q + rows * ROW)
        states = totals + rows * STATE
        tiles = states + rows * STATE
        token_stride = (num_heads + 2 * num_kv_heads) * ROW
        source = load_i64(args) + (row + first) * token_stride + kv_head * group * ROW
        for token in range(count):
            for i in range(group):
                store_i64(limits + 8 * (token * group + i), length - queries + first + token + 1)
            _copy(source + token * token_stride, q + token * group * ROW, group * ROW)
        stop = length - queries + first + count
        for start in range(0, stop, SPLIT):
            target = totals if start == 0 else states
            reset(target, STATE, rows)
            if not attend(args, slot, tiles, request, kv_head, q, limits, target, STATE, rows, start, min(start + SPLIT, stop)):
                return False
            if start > 0:
                for i in range(rows):
                    if load_i64(limits + 8 * i) > start:
                        merge_row(totals + i * STATE, states + i * STATE)
        out = load_i64(args + 16) + ((row + first) * num_heads + kv_head * group) * ROW
        for token in range(count):
            for i in range(group):
                finish_row(totals + (token * group + i) * STATE, out + (token * num_heads + i) * ROW)
        return True

    @njit(error_model="numpy")
    def run_share(args, slot, scratch, thread_id, num_threads, total):
        """Walk over all tasks in order; with `total` 0 only sum their costs, otherwise run those whose middle lies in this thread's share."""
        num_kv_heads = load_i64(args + 32)
        group = load_i64(args + 24) // num_kv_heads
        tile_tokens = max(1, QUERY_ROWS // group)
        done = 0
        for request in range(load_i64(slot + 8 * NUM_REQS)):
            starts = load_i64(slot + 8 * QUERY_START_LOC) + 4 * request
            queries = np.int64(load_i32(starts + 4)) - np.int64(load_i32(starts))
            length = np.int64(load_i32(load_i64(slot + 8 * SEQ_LENS) + 4 * request))
            decode = queries == 1
            tasks = (length + SPLIT - 1) // SPLIT if decode else (queries + tile_tokens - 1) // tile_tokens
            for kv_head in range(num_kv_heads):
                for task in range(tasks):
                    first = task * tile_tokens
                    count = min(tile_tokens, queries - first)
                    if decode:
                        cost = min(SPLIT, length - task * SPLIT) * (group + _TILE_COST)
                    else:
                        cost = (length - queries + first + count) * (count * group + _TILE_COST)
                    if total > 0 and (2 * done + cost) * num_threads // (2 * total) == thread_id:
                        if decode:
                            landed = run_decode(args, slot, scratch, request, kv_head, task)
                        else:
                            landed = run_queries(args, slot, scratch, request, kv_head, first, count)
                        if not landed:
                            report_error(slot, ERROR_BLOCK_TABLE, request)
                            return 0
                    done += cost
        return done

    def kernel(args, slot, thread_id, num_threads):
        scratch = load_i64(args + 88) + thread_id * load_i64(args + 96)
        total = run_share(args, slot, scratch, thread_id, num_threads, 0)
        run_share(args, slot, scratch, thread_id, num_threads, total)

    return kernel


def attention_merge(head_dim: int) -> Callable[..., None]:
    """Factory of `catalog.attention_merge`."""
    finish_row = _make_finish_row(head_dim)
    merge_row = _make_merge_row(head_dim)
    STATE = state_bytes(head_dim)
    ROW = 4 * head_dim

    def kernel(args, slot, thread_id, num_threads):
        num_heads = load_i64(args + 8)
        max_splits = load_i64(args + 32)
        units = load_i64(slot + 8 * NUM_REQS) * num_heads
        for unit in range(units * thread_id // num_threads, units * (thread_id + 1) // num_threads):
            request = unit // num_heads
            starts = load_i64(slot + 8 * QUERY_START_LOC) + 4 * request
            row = np.int64(load_i32(starts))
            length = np.int64(load_i32(load_i64(slot + 8 * SEQ_LENS) + 4 * request))
            if load_i32(starts + 4) - row == 1 and length > SPLIT:
                states = load_i64(args + 24) + unit * max_splits * STATE
                for split in range(1, (length + SPLIT - 1) // SPLIT):
                    merge_row(states, states + split * STATE)
                finish_row(states, load_i64(args) + (row * num_heads + unit % num_heads) * ROW)

    return kernel


def _make_attend(kv_dtype: DType, head_dim: int) -> Any:
    """`attend(...)`: take the keys [start, stop) of one kv head into the states of `rows` query rows; False if a block is outside the pool.

    q: float32 [rows, head_dim]; limits: int64 [rows], ascending: row i attends to positions below limits[i].
    """
    key_tile = make_key_tile(kv_dtype, head_dim)
    value_tile = make_value_tile(kv_dtype, head_dim)
    update_4, update_3, update_2, update_1 = (_make_update(rows, head_dim) for rows in (4, 3, 2, 1))
    STATE_ROW = 4 * head_dim
    KEY = head_dim * ITEM_SIZES[kv_dtype]
    KEYS = 8 * TILE
    VALUES = KEYS + 4 * TILE * head_dim
    WEIGHTS = VALUES + 4 * TILE * padded(head_dim)

    @njit(error_model="numpy")
    def locate(args, slot, request, kv_head, start, count, addresses):
        """Addresses of the keys of a tile; those beyond `count` repeat the last one, so that nothing outside the sequence is read."""
        block_size = load_i64(args + 48)
        num_blocks = load_i64(args + 56)
        head_bytes = block_size * KEY
        block_bytes = 2 * load_i64(args + 32) * head_bytes
        base = load_i64(args + 8) + kv_head * head_bytes
        table = load_i64(slot + 8 * BLOCK_TABLE) + 4 * request * load_i64(slot + 8 * BLOCK_TABLE_STRIDE)
        done = 0
        while done < count:
            position = start + done
            index = position // block_size
            offset = position - index * block_size
            block = np.int64(load_i32(table + 4 * index))
            if block < 0 or block >= num_blocks:
                return False
            address = base + block * block_bytes + offset * KEY
            run = min(block_size - offset, count - done)
            for i in range(run):
                store_i64(addresses + 8 * (done + i), address + i * KEY)
            done += run
        last = load_i64(addresses + 8 * (count - 1))
        for i in range(count, TILE):
            store_i64(addresses + 8 * i, last)
        return True

    @njit(error_model="numpy")
    def attend(args, slot, tiles, request, kv_head, q, limits, states, stride, rows, start, stop):
        scale = np.float32(load_f64(args + 64))
        value_offset = load_i64(args + 32) * load_i64(args + 48) * KEY
        for tile in range(start, stop, TILE):
            count = min(TILE, stop - tile)
            if not locate(args, slot, request, kv_head, tile, count, tiles):
                return False
            key_tile(tiles, tiles + KEYS)
            value_tile(tiles, value_offset, tiles + VALUES, count)
            row = 0
            while row < rows:
                left = rows - row
                row_q = q + row * STATE_ROW
                row_limits = limits + 8 * row
                row_states = states + row * stride
                if left >= 4:
                    update_4(row_q, tiles + KEYS, tiles + VALUES, tiles + WEIGHTS, row_limits, tile, row_states, stride, scale)
                elif left == 3:
                    update_3(row_q, tiles + KEYS, tiles + VALUES, tiles + WEIGHTS, row_limits, tile, row_states, stride, scale)
                elif left == 2:
                    update_2(row_q, tiles + KEYS, tiles + VALUES, tiles + WEIGHTS, row_limits, tile, row_states, stride, scale)
                else:
                    update_1(row_q, tiles + KEYS, tiles + VALUES, tiles + WEIGHTS, row_limits, tile, row_states, stride, scale)
                row += 4
        return True

    return attend


def _make_update(rows: int, head_dim: int) -> Any:
    """`update(...)`: take one tile into the states of `rows` rows (1 to ROW_BLOCK)."""
    scores = make_scores(rows, head_dim)
    weighted_sum = make_weighted_sum(rows, head_dim)
    weighted_sum_1 = make_weighted_sum(1, head_dim)
    VALUE = 4 * padded(head_dim)

    @njit(error_model="numpy")
    def update(q, keys, values, weights, limits, tile, states, stride, scale):
        common = min(TILE, load_i64(limits) - tile)  # keys that all rows see
        most = min(TILE, load_i64(limits + 8 * (rows - 1)) - tile)
        if most <= 0:
            return
        scores(q, keys, weights, scale)
        for i in range(rows):
            softmax_row(weights + 4 * TILE * i, load_i64(limits + 8 * i) - tile, states + i * stride)
        weighted_sum(weights, values, states + _HEADER, stride, states + 8, stride, common)
        if common < most:
            common = max(common, 0)
            for i in range(rows):
                own = min(TILE, load_i64(limits + 8 * i) - tile)
                if own > common:
                    state = states + i * stride
                    store_f32(state + 8, np.float32(1.0))
                    weighted_sum_1(
                        weights + 4 * (TILE * i + common), values + common * VALUE, state + _HEADER, stride, state + 8, stride, own - common
                    )

    return update


@njit(error_model="numpy")
def softmax_row(weights, count, state):
    """Turn a row's scores into weights, and bring its maximum and denominator up to date; the factor for its sums so far goes to the state."""
    if count <= 0:
        store_f32(state + 8, np.float32(1.0))
        return
    low = vload(weights)
    high = vload(weights + 64)
    if count < TILE:
        low = keep_lanes(low, count)
        high = keep_lanes(high, count - 16)
    before = load_f32(state)
    largest = reduce_max(vmax(low, high))
    maximum = largest if largest > before else before
    factor = first_lane(vexp(splat(before - maximum)))
    low = vexp(vsub(low, splat(maximum)))
    high = vexp(vsub(high, splat(maximum)))
    vstore(weights, low)
    vstore(weights + 64, high)
    store_f32(state, maximum)
    store_f32(state + 4, fma(load_f32(state + 4), factor, reduce_add(vadd(low, high))))
    store_f32(state + 8, factor)


def _make_reset(head_dim: int) -> Any:
    """`reset(states, stride, rows)`: fresh states."""
    SUMS = 4 * padded(head_dim)

    @njit(error_model="numpy")
    def reset(states, stride, rows):
        zero = splat(np.float32(0.0))
        for i in range(rows):
            state = states + i * stride
            store_f32(state, _FRESH)
            store_f32(state + 4, np.float32(0.0))
            for offset in range(_HEADER, _HEADER + SUMS, 64):
                vstore(state + offset, zero)

    return reset


def _make_merge_row(head_dim: int) -> Any:
    """`merge_row(total, state)`: take the state of the next split into the total."""
    SUMS = 4 * padded(head_dim)

    @njit(error_model="numpy")
    def merge_row(total, state):
        left = load_f32(total)
        right = load_f32(state)
        maximum = right if right > left else left
        left_factor = first_lane(vexp(splat(left - maximum)))
        right_factor = first_lane(vexp(splat(right - maximum)))
        store_f32(total, maximum)
        store_f32(total + 4, fma(load_f32(state + 4), right_factor, load_f32(total + 4) * left_factor))
        for offset in range(_HEADER, _HEADER + SUMS, 64):
            kept = vmul(vload(total + offset), splat(left_factor))
            vstore(total + offset, vfma(vload(state + offset), splat(right_factor), kept))

    return merge_row


def _make_finish_row(head_dim: int) -> Any:
    """`finish_row(state, out)`: out[:head_dim] = sums / denominator."""
    FULL = head_dim // 16 * 16

    @njit(error_model="numpy")
    def finish_row(state, out):
        inverse = np.float32(1.0) / load_f32(state + 4)
        for d in range(0, FULL, 16):
            vstore(out + 4 * d, vmul(vload(state + _HEADER + 4 * d), splat(inverse)))
        for d in range(FULL, head_dim):
            store_f32(out + 4 * d, load_f32(state + _HEADER + 4 * d) * inverse)

    return finish_row


@njit(error_model="numpy")
def _aligned(address):
    return (address + 63) // 64 * 64


@njit(error_model="numpy")
def _copy(source, target, nbytes):
    """Copy a multiple of 32 bytes of float32."""
    for offset in range(0, nbytes // 64 * 64, 64):
        vstore(target + offset, vload(source + offset))
    for offset in range(nbytes // 64 * 64, nbytes, 4):
        store_f32(target + offset, load_f32(source + offset))
