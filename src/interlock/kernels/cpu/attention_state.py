"""The state of a query row in attention, and the arithmetic on it: take a tile of keys, merge the next split, finish.

A state is laid out as `attention_layout.state_bytes` says. The attention output so far is sums / denominator; weights are relative
to exp(maximum).
"""

from typing import Any

import numpy as np
from numba import njit

from interlock.core.buffer import DType
from interlock.kernels.cpu.attention_layout import FACTORS, ROW_BLOCK, STATE_HEADER, TILE, padded, state_bytes
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
from interlock.kernels.cpu.vector_math import vexp_nonpositive

_FRESH = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def make_reset(head_dim: int) -> Any:
    """`reset(states, rows)`: fresh states."""
    END = state_bytes(head_dim)

    @njit(error_model="numpy")
    def reset(states, rows):
        zero = splat(_ZERO)
        for i in range(rows):
            state = states + i * END
            store_f32(state, _FRESH)
            store_f32(state + 4, _ZERO)
            for offset in range(STATE_HEADER, END, 64):
                vstore(state + offset, zero)

    return reset


def make_update_few(rows: int, head_dim: int, dtype: DType) -> Any:
    """`update(q, keys, addresses, offset, ahead, weights, limits, tile, states, scale)`: take one tile into the states of `rows` rows that
    all see the same keys; values are read in place, since each is used only here.

    q: float32 [rows, head_dim]; weights: scratch of `weights_bytes`; limits: int64 [rows]: the row sees positions below; tile: first
    position of the tile; addresses, offset, ahead: as `make_weighted_sum` takes them.
    """
    scores = make_scores(rows, head_dim)
    softmax = _make_softmax(rows, head_dim)
    weighted_sum = make_weighted_sum(rows, head_dim, dtype)

    @njit(error_model="numpy")
    def update(q, keys, addresses, offset, ahead, weights, limits, tile, states, scale):
        scores(q, keys, weights, scale)
        softmax(weights, limits, tile, states)
        weighted_sum(weights, weights + FACTORS, addresses, offset, ahead, states, min(TILE, load_i64(limits) - tile))

    return update


def make_update(head_dim: int) -> Any:
    """`update(q, keys, values, weights, limits, tile, states, scale)`: take one tile, its values a value tile, into ROW_BLOCK states whose
    limits ascend."""
    scores = make_scores(ROW_BLOCK, head_dim)
    softmax = _make_softmax(ROW_BLOCK, head_dim)
    weighted_sum = make_weighted_sum(ROW_BLOCK, head_dim, None)
    weighted_sum_1 = make_weighted_sum(1, head_dim, None)
    STATE = state_bytes(head_dim)
    VALUE = 4 * padded(head_dim)

    @njit(error_model="numpy")
    def update(q, keys, values, weights, limits, tile, states, scale):
        common = max(0, min(TILE, load_i64(limits) - tile))  # keys that all rows see
        most = min(TILE, load_i64(limits + 8 * (ROW_BLOCK - 1)) - tile)
        if most <= 0:
            return
        scores(q, keys, weights, scale)
        softmax(weights, limits, tile, states)
        weighted_sum(weights, weights + FACTORS, values, 0, 0, states, common)
        if common < most:
            store_f32(weights + FACTORS, _ONE)
            for i in range(ROW_BLOCK):
                own = min(TILE, load_i64(limits + 8 * i) - tile)
                if own > common:
                    row = weights + 4 * (TILE * i + common)
                    weighted_sum_1(row, weights + FACTORS, values + common * VALUE, 0, 0, states + i * STATE, own - common)

    return update


def _make_softmax(rows: int, head_dim: int) -> Any:
    """`softmax(weights, limits, tile, states)`: turn scores into weights, bring maxima and denominators up to date, and leave the factors
    for the sums so far behind the weights. A row that sees nothing of the tile keeps its state; its weights are not to be used."""
    STATE = state_bytes(head_dim)

    @njit(error_model="numpy")
    def softmax(weights, limits, tile, states):
        for i in range(rows):
            rise = _ZERO
            if load_i64(limits + 8 * i) > tile:
                before = load_f32(states + i * STATE)
                largest = _largest_score(weights + 4 * TILE * i, load_i64(limits + 8 * i) - tile)
                maximum = largest if largest > before else before
                store_f32(states + i * STATE, maximum)
                rise = before - maximum
            store_f32(weights + FACTORS + 4 * i, rise)
        vstore(weights + FACTORS, vexp_nonpositive(vload(weights + FACTORS)))
        for i in range(rows):
            if load_i64(limits + 8 * i) > tile:
                state = states + i * STATE
                total = _weigh(weights + 4 * TILE * i, load_f32(state))
                store_f32(state + 4, fma(load_f32(state + 4), load_f32(weights + FACTORS + 4 * i), total))

    return softmax


@njit(error_model="numpy")
def _largest_score(scores, count):
    """The largest of the first `count` scores of a tile; those that follow become -inf."""
    a, b, c, d = vload(scores), vload(scores + 64), vload(scores + 128), vload(scores + 192)
    if count < TILE:
        a, b, c, d = keep_lanes(a, count), keep_lanes(b, count - 16), keep_lanes(c, count - 32), keep_lanes(d, count - 48)
        vstore(scores, a)
        vstore(scores + 64, b)
        vstore(scores + 128, c)
        vstore(scores + 192, d)
    return reduce_max(vmax(vmax(a, b), vmax(c, d)))


@njit(error_model="numpy")
def _weigh(scores, maximum):
    """Turn the scores of a tile into weights; returns their sum."""
    top = splat(maximum)
    a = vexp_nonpositive(vsub(vload(scores), top))
    b = vexp_nonpositive(vsub(vload(scores + 64), top))
    c = vexp_nonpositive(vsub(vload(scores + 128), top))
    d = vexp_nonpositive(vsub(vload(scores + 192), top))
    vstore(scores, a)
    vstore(scores + 64, b)
    vstore(scores + 128, c)
    vstore(scores + 192, d)
    return reduce_add(vadd(vadd(a, b), vadd(c, d)))


def make_merge(head_dim: int) -> Any:
    """`merge(total, state)`: take the state of the next split into the total."""
    END = state_bytes(head_dim)

    @njit(error_model="numpy")
    def merge(total, state):
        left = load_f32(total)
        right = load_f32(state)
        maximum = right if right > left else left
        left_factor = first_lane(vexp_nonpositive(splat(left - maximum)))
        right_factor = first_lane(vexp_nonpositive(splat(right - maximum)))
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
