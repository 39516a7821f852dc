"""The state of a query row in attention, and the arithmetic on it: take a tile of keys, merge the next split, finish.

A state is laid out as `attention_layout.state_bytes` says. The attention output so far is sums / denominator; weights are relative
to exp(maximum).
"""

from typing import Any

import numpy as np
from numba import njit

from interlock.core.buffer import DType
from interlock.kernels.cpu.attention_layout import STATE_FACTOR, STATE_HEADER, TILE, padded, state_bytes
from interlock.kernels.cpu.attention_tiles import keep_lanes, make_scores, make_weighted_sum
from interlock.kernels.cpu.simd import (
    first_lane,
    fma,
    load_f32,
    load_i64,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
    vadd,
    vfma,
    vload,
    vmax,
    vmul,
    vstore,
    vsub,
)
from interlock.kernels.cpu.vector_math import vexp

_FRESH = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def make_reset(head_dim: int) -> Any:
    """`reset(states, stride, rows)`: fresh states, `stride` bytes apart."""
    END = state_bytes(head_dim)

    @njit(error_model="numpy")
    def reset(states, stride, rows):
        zero = splat(_ZERO)
        for i in range(rows):
            state = states + i * stride
            store_f32(state, _FRESH)
            store_f32(state + 4, _ZERO)
            for offset in range(STATE_HEADER, END, 64):
                vstore(state + offset, zero)

    return reset


def make_update(rows: int, head_dim: int, dtype: DType | None) -> Any:
    """`update(q, keys, values, offset, weights, limits, tile, states, stride, scale)`: take one tile into the states of `rows` rows.

    q: float32 [rows, head_dim]; keys, and values with offset, as `make_scores` and `make_weighted_sum` take them; weights: float32
    [rows, TILE] of scratch; limits: int64 [rows], ascending: row i sees the positions below limits[i]; tile: the tile's first position.
    """
    scores = make_scores(rows, head_dim)
    weighted_sum = make_weighted_sum(rows, head_dim, dtype)
    weighted_sum_1 = make_weighted_sum(1, head_dim, dtype)
    VALUE = 4 * padded(head_dim) if dtype is None else 8

    @njit(error_model="numpy")
    def update(q, keys, values, offset, weights, limits, tile, states, stride, scale):
        common = max(0, min(TILE, load_i64(limits) - tile))  # keys that all rows see
        most = min(TILE, load_i64(limits + 8 * (rows - 1)) - tile)
        if most <= 0:
            return
        scores(q, keys, weights, scale)
        for i in range(rows):
            _softmax(weights + 4 * TILE * i, load_i64(limits + 8 * i) - tile, states + i * stride)
        weighted_sum(weights, values, offset, states, stride, common)
        for i in range(rows):
            own = min(TILE, load_i64(limits + 8 * i) - tile)
            if own > common:
                store_f32(states + i * stride + STATE_FACTOR, _ONE)
                row = weights + 4 * (TILE * i + common)
                weighted_sum_1(row, values + common * VALUE, offset, states + i * stride, stride, own - common)

    return update


@njit(error_model="numpy")
def _softmax(weights, count, state):
    """Turn a row's scores into weights, and bring its maximum and denominator up to date; the factor for its sums so far goes to the state."""
    if count <= 0:
        store_f32(state + STATE_FACTOR, _ONE)
        return
    a = vload(weights)
    b = vload(weights + 64)
    c = vload(weights + 128)
    d = vload(weights + 192)
    if count < TILE:
        a = keep_lanes(a, count)
        b = keep_lanes(b, count - 16)
        c = keep_lanes(c, count - 32)
        d = keep_lanes(d, count - 48)
    before = load_f32(state)
    largest = reduce_max(vmax(vmax(a, b), vmax(c, d)))
    maximum = largest if largest > before else before
    factor = first_lane(vexp(splat(before - maximum)))
    a = vexp(vsub(a, splat(maximum)))
    b = vexp(vsub(b, splat(maximum)))
    c = vexp(vsub(c, splat(maximum)))
    d = vexp(vsub(d, splat(maximum)))
    vstore(weights, a)
    vstore(weights + 64, b)
    vstore(weights + 128, c)
    vstore(weights + 192, d)
    store_f32(state, maximum)
    store_f32(state + 4, fma(load_f32(state + 4), factor, reduce_add(vadd(vadd(a, b), vadd(c, d)))))
    store_f32(state + STATE_FACTOR, factor)


def make_merge(head_dim: int) -> Any:
    """`merge(total, state)`: take the state of the next split into the total."""
    END = state_bytes(head_dim)

    @njit(error_model="numpy")
    def merge(total, state):
        left = load_f32(total)
        right = load_f32(state)
        maximum = right if right > left else left
        left_factor = first_lane(vexp(splat(left - maximum)))
        right_factor = first_lane(vexp(splat(right - maximum)))
        store_f32(total, maximum)
        store_f32(total + 4, fma(load_f32(state + 4), right_factor, load_f32(total + 4) * left_factor))
        for offset in range(STATE_HEADER, END, 64):
            kept = vmul(vload(total + offset), splat(left_factor))
            vstore(total + offset, vfma(vload(state + offset), splat(right_factor), kept))

    return merge


def make_finish(head_dim: int) -> Any:
    """`finish(state, out)`: out[:head_dim] = sums / denominator."""
    FULL = head_dim // 16 * 16

    @njit(error_model="numpy")
    def finish(state, out):
        inverse = _ONE / load_f32(state + 4)
        for d in range(0, FULL, 16):
            vstore(out + 4 * d, vmul(vload(state + STATE_HEADER + 4 * d), splat(inverse)))
        for d in range(FULL, head_dim):
            store_f32(out + 4 * d, load_f32(state + STATE_HEADER + 4 * d) * inverse)

    return finish
