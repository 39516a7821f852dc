"""Paged attention: keys and values come only from the block pool, in absolute tiles and splits of positions.

Every query row does the same arithmetic whatever it is batched with: tiles of TILE keys ascend within a split of SPLIT keys (online
softmax: M. Milakov, N. Gimelshein, 2018), a split starts from a fresh state, and splits are merged in ascending order. The rows of
longer queries merge in place; each (request, kv head, split) of a decode row is a task of its own, whose state `attention_merge`
picks up, so that several threads share one request. Masked keys are skipped: they may hold anything.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from interlock.core.buffer import ITEM_SIZES, DType
from interlock.kernels.cpu.attention_layout import QUERY_ROWS, ROW_BLOCK, SPLIT, TILE, padded, state_bytes
from interlock.kernels.cpu.attention_state import make_finish, make_merge, make_reset, make_update, make_update_few
from interlock.kernels.cpu.attention_tiles import make_key_tile, make_value_tile
from interlock.kernels.cpu.simd import load_f32, load_f64, load_i32, load_i64, store_f32, store_i64, vload, vstore
from interlock.kernels.cpu.sync import report_error
from interlock.kernels.slot import BLOCK_TABLE, BLOCK_TABLE_STRIDE, ERROR_BLOCK_TABLE, NUM_REQS, QUERY_START_LOC, SEQ_LENS

_AHEAD = 1
_TILE_COST = 4  # making a tile costs about as much as this many query rows of it


def attention(kv_dtype: DType, head_dim: int) -> Callable[..., None]:
    """Factory of `catalog.attention`."""
    run_decode = _make_run_decode(kv_dtype, head_dim)
    run_queries = _make_run_queries(kv_dtype, head_dim)

    def kernel(args, slot, thread_id, num_threads):
        scratch = load_i64(args + 88) + thread_id * load_i64(args + 96)
        num_kv_heads = load_i64(args + 32)
        group = load_i64(args + 24) // num_kv_heads
        tokens = max(1, QUERY_ROWS // group)
        total = _total_cost(slot, num_kv_heads, group, tokens)
        done = 0
        for request in range(load_i64(slot + 8 * NUM_REQS)):
            _, queries, length = _request(slot, request)
            for task in range(_num_tasks(queries, length, tokens) * num_kv_heads):
                kv_head = task % num_kv_heads
                part = task // num_kv_heads
                cost = _task_cost(queries, length, group, tokens, part)
                if (2 * done + cost) * num_threads // (2 * total) == thread_id:
                    if queries == 1:
                        complete = run_decode(args, slot, scratch, request, kv_head, part)
                    else:
                        complete = run_queries(args, slot, scratch, request, kv_head, part * tokens, min(tokens, queries - part * tokens))
                    if not complete:
                        report_error(slot, ERROR_BLOCK_TABLE, request)
                        return
                done += cost

    return kernel


@njit(error_model="numpy")
def _num_tasks(queries, length, tokens):
    """Tasks of one kv head: the splits of a decode row, or tiles of `tokens` query tokens."""
    return (length + SPLIT - 1) // SPLIT if queries == 1 else (queries + tokens - 1) // tokens


@njit(error_model="numpy")
def _task_cost(queries, length, group, tokens, part):
    """About how long a task takes: key tiles times the query rows that share them, and what it takes to make the tile."""
    if queries == 1:
        return min(SPLIT, length - part * SPLIT) * (group + _TILE_COST)
    stop = min((part + 1) * tokens, queries)
    return (length - queries + stop) * ((stop - part * tokens) * group + _TILE_COST)


@njit(error_model="numpy")
def _total_cost(slot, num_kv_heads, group, tokens):
    total = 0
    for request in range(load_i64(slot + 8 * NUM_REQS)):
        _, queries, length = _request(slot, request)
        for part in range(_num_tasks(queries, length, tokens)):
            total += num_kv_heads * _task_cost(queries, length, group, tokens, part)
    return total


def attention_merge(head_dim: int) -> Callable[..., None]:
    """Factory of `catalog.attention_merge`."""
    finish = make_finish(head_dim)
    merge = make_merge(head_dim)
    STATE = state_bytes(head_dim)

    def kernel(args, slot, thread_id, num_threads):
        num_heads = load_i64(args + 8)
        max_splits = load_i64(args + 32)
        units = load_i64(slot + 8 * NUM_REQS) * num_heads
        for unit in range(units * thread_id // num_threads, units * (thread_id + 1) // num_threads):
            row, queries, length = _request(slot, unit // num_heads)
            if queries == 1 and length > SPLIT:
                states = load_i64(args + 24) + unit * max_splits * STATE
                for split in range(1, (length + SPLIT - 1) // SPLIT):
                    merge(states, states + split * STATE)
                finish(states, load_i64(args) + (row * num_heads + unit % num_heads) * 4 * head_dim)

    return kernel


def _make_run_decode(kv_dtype: DType, head_dim: int) -> Any:
    """`run_decode(args, slot, scratch, request, kv_head, split)`: one split of the only query row of a request, for the heads of one kv
    head; False if a block is outside of the pool."""
    key_tile = make_key_tile(kv_dtype, head_dim)
    locate = _make_locate(kv_dtype, head_dim)
    locate_ahead = _make_locate_ahead(kv_dtype, head_dim)
    take_tile = _make_take_tile(kv_dtype, head_dim)
    finish = make_finish(head_dim)
    reset = make_reset(head_dim)
    KEY = head_dim * ITEM_SIZES[kv_dtype]
    ROW = 4 * head_dim
    STATE = state_bytes(head_dim)

    @njit(error_model="numpy")
    def run_decode(args, slot, scratch, request, kv_head, split):
        num_heads = load_i64(args + 24)
        num_kv_heads = load_i64(args + 32)
        group = num_heads // num_kv_heads
        row, _, length = _request(slot, request)
        q = load_i64(args) + row * (num_heads + 2 * num_kv_heads) * ROW + kv_head * group * ROW
        offset = num_kv_heads * load_i64(args + 48) * KEY
        states = scratch
        limits = states + group * STATE
        addresses = _aligned(limits + 8 * group)
        ahead = addresses + 8 * TILE
        keys = ahead + 8 * TILE
        for i in range(group):
            store_i64(limits + 8 * i, length)
        reset(states, group)
        stop = min((split + 1) * SPLIT, length)
        for tile in range(split * SPLIT, stop, TILE):
            if not locate(args, slot, request, kv_head, tile, min(TILE, stop - tile), addresses):
                return False
            locate_ahead(args, slot, request, kv_head, split, tile, length, ahead)
            key_tile(addresses, keys, min(TILE, stop - tile))
            take_tile(args, q, keys, addresses, offset, ahead, limits, tile, states, group)
        for i in range(group):
            if length <= SPLIT:
                finish(states + i * STATE, load_i64(args + 16) + (row * num_heads + kv_head * group + i) * ROW)
            else:
                partial = (request * num_heads + kv_head * group + i) * load_i64(args + 80) + split
                _copy(states + i * STATE, load_i64(args + 72) + partial * STATE, STATE)
        return True

    return run_decode


def _make_locate_ahead(kv_dtype: DType, head_dim: int) -> Any:
    """`locate_ahead(args, slot, request, kv_head, split, tile, length, addresses)`: addresses of the keys to fetch while a tile is worked on:
    of the tile _AHEAD tiles further on, in the order of the tasks of one request. They are not read, so any will do where there is none."""
    locate = _make_locate(kv_dtype, head_dim)

    @njit(error_model="numpy")
    def locate_ahead(args, slot, request, kv_head, split, tile, length, addresses):
        index = (tile - split * SPLIT) // TILE + _AHEAD
        tiles = (min(SPLIT, length - split * SPLIT) + TILE - 1) // TILE
        while index >= tiles and split * SPLIT < length:
            index -= tiles
            kv_head += 1
            if kv_head == load_i64(args + 32):
                kv_head = 0
                split += 1
                tiles = (min(SPLIT, length - split * SPLIT) + TILE - 1) // TILE
        position = split * SPLIT + index * TILE
        if position < length:
            locate(args, slot, request, kv_head, position, min(TILE, length - position), addresses)

    return locate_ahead


def _make_take_tile(kv_dtype: DType, head_dim: int) -> Any:
    """`take_tile(args, q, keys, addresses, offset, ahead, limits, tile, states, rows)`: take one tile into the states of decode rows, a row
    block at a time."""
    update_1, update_2, update_3, update_4 = (make_update_few(rows, head_dim, kv_dtype) for rows in (1, 2, 3, 4))
    STATE = state_bytes(head_dim)
    WEIGHTS = 4 * TILE * head_dim

    @njit(error_model="numpy")
    def take_tile(args, q, keys, addresses, offset, ahead, limits, tile, states, rows):
        scale = np.float32(load_f64(args + 64))
        weights = keys + WEIGHTS
        for row in range(0, rows, 4):
            left = rows - row
            if left == 1:
                update_1(q, keys, addresses, offset, ahead, weights, limits, tile, states, scale)
            elif left == 2:
                update_2(q, keys, addresses, offset, ahead, weights, limits, tile, states, scale)
            elif left == 3:
                update_3(q, keys, addresses, offset, ahead, weights, limits, tile, states, scale)
            else:
                update_4(q, keys, addresses, offset, ahead, weights, limits, tile, states, scale)
            q += 4 * 4 * head_dim
            states += 4 * STATE

    return take_tile


def _make_run_queries(kv_dtype: DType, head_dim: int) -> Any:
    """`run_queries(args, slot, scratch, request, kv_head, first, count)`: all splits of `count` query tokens from the request's
    query token `first`, for the heads of one kv head; False if a block is outside of the pool."""
    attend = _make_attend(kv_dtype, head_dim)
    finish = make_finish(head_dim)
    merge = make_merge(head_dim)
    reset = make_reset(head_dim)
    STATE = state_bytes(head_dim)
    ROW = 4 * head_dim

    @njit(error_model="numpy")
    def run_queries(args, slot, scratch, request, kv_head, first, count):
        num_heads = load_i64(args + 24)
        num_kv_heads = load_i64(args + 32)
        group = num_heads // num_kv_heads
        row, queries, length = _request(slot, request)
        rows = (count * group + ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK  # those beyond the last hold anything, and are dropped
        totals = scratch
        states = totals + rows * STATE
        limits = states + rows * STATE
        q = _aligned(limits + 8 * rows)
        tiles = _aligned(q + rows * ROW)
        token_bytes = (num_heads + 2 * num_kv_heads) * ROW
        source = load_i64(args) + (row + first) * token_bytes + kv_head * group * ROW
        for token in range(count):
            _copy(source + token * token_bytes, q + token * group * ROW, group * ROW)
        for i in range(rows):
            store_i64(limits + 8 * i, length - queries + first + min(i // group, count - 1) + 1)
        stop = length - queries + first + count
        for start in range(0, stop, SPLIT):
            target = totals if start == 0 else states
            reset(target, rows)
            if not attend(args, slot, tiles, request, kv_head, q, limits, target, rows, start, min(start + SPLIT, stop)):
                return False
            if start > 0:
                for i in range(count * group):
                    if load_i64(limits + 8 * i) > start:
                        merge(totals + i * STATE, states + i * STATE)
        out = load_i64(args + 16) + ((row + first) * num_heads + kv_head * group) * ROW
        for token in range(count):
            for i in range(group):
                finish(totals + (token * group + i) * STATE, out + (token * num_heads + i) * ROW)
        return True

    return run_queries


def _make_attend(kv_dtype: DType, head_dim: int) -> Any:
    """`attend(...)`: take the keys [start, stop) of one kv head into the states of `rows` query rows, whole row blocks; False if a
    block is outside of the pool.

    q: float32 [rows, head_dim]; limits: int64 [rows], ascending: row i attends to positions below limits[i].
    """
    key_tile = make_key_tile(kv_dtype, head_dim)
    value_tile = make_value_tile(kv_dtype, head_dim)
    locate = _make_locate(kv_dtype, head_dim)
    update = make_update(head_dim)
    KEY = head_dim * ITEM_SIZES[kv_dtype]
    STATE = state_bytes(head_dim)
    KEYS = 8 * TILE
    VALUES = KEYS + 4 * TILE * head_dim
    WEIGHTS = VALUES + 4 * TILE * padded(head_dim)

    @njit(error_model="numpy")
    def attend(args, slot, tiles, request, kv_head, q, limits, states, rows, start, stop):
        scale = np.float32(load_f64(args + 64))
        offset = load_i64(args + 32) * load_i64(args + 48) * KEY
        for tile in range(start, stop, TILE):
            count = min(TILE, stop - tile)
            if not locate(args, slot, request, kv_head, tile, count, tiles):
                return False
            key_tile(tiles, tiles + KEYS, count)
            value_tile(tiles, offset, tiles + VALUES, count)
            for row in range(0, rows, ROW_BLOCK):
                row_q = q + row * 4 * head_dim
                update(row_q, tiles + KEYS, tiles + VALUES, tiles + WEIGHTS, limits + 8 * row, tile, states + row * STATE, scale)
        return True

    return attend


def _make_locate(kv_dtype: DType, head_dim: int) -> Any:
    """`locate(args, slot, request, kv_head, start, count, addresses)`: the addresses of `count` keys from position `start`, and up to a
    whole vector the last one again, so that nothing outside of the sequence is read; False if a block is outside of the pool."""
    KEY = head_dim * ITEM_SIZES[kv_dtype]

    @njit(error_model="numpy")
    def locate(args, slot, request, kv_head, start, count, addresses):
        block_size = load_i64(args + 48)
        num_blocks = load_i64(args + 56)
        head_bytes = block_size * KEY
        block_bytes = 2 * load_i64(args + 32) * head_bytes
        base = load_i64(args + 8) + kv_head * head_bytes
        table = load_i64(slot + 8 * BLOCK_TABLE) + 4 * request * load_i64(slot + 8 * BLOCK_TABLE_STRIDE)
        done = 0
        while done < count:
            index = (start + done) // block_size
            offset = start + done - index * block_size
            block = np.int64(load_i32(table + 4 * index))
            if block < 0 or block >= num_blocks:
                return False
            address = base + block * block_bytes + offset * KEY
            run = min(block_size - offset, count - done)
            for i in range(run):
                store_i64(addresses + 8 * (done + i), address + i * KEY)
            done += run
        last = load_i64(addresses + 8 * (count - 1))
        for i in range(count, (count + 15) // 16 * 16):
            store_i64(addresses + 8 * i, last)
        return True

    return locate


@njit(error_model="numpy")
def _request(slot, request):
    """(first query row, query rows, positions valid) of a request."""
    starts = load_i64(slot + 8 * QUERY_START_LOC) + 4 * request
    row = np.int64(load_i32(starts))
    return row, np.int64(load_i32(starts + 4)) - row, np.int64(load_i32(load_i64(slot + 8 * SEQ_LENS) + 4 * request))


@njit(error_model="numpy")
def _aligned(address):
    return (address + 63) // 64 * 64


@njit(error_model="numpy")
def _copy(source, target, nbytes):
    """Copy float32 words."""
    for offset in range(0, nbytes // 64 * 64, 64):
        vstore(target + offset, vload(source + offset))
    for offset in range(nbytes // 64 * 64, nbytes, 4):
        store_f32(target + offset, load_f32(source + offset))
