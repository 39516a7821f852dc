"""RMSNorm, rotary embedding with the KV write, and the SiLU gate. Each element's arithmetic is the same in vectors and in their tails."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from interlock.core.buffer import ITEM_SIZES, DType
from interlock.kernels.cpu.norm import rms_scale
from interlock.kernels.cpu.rounding import make_store
from interlock.kernels.cpu.simd import (
    first_lane,
    fma,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    splat,
    store_f32,
    vfma,
    vload,
    vmul,
    vneg,
    vstore,
)
from interlock.kernels.cpu.sync import report_error
from interlock.kernels.cpu.vector_math import vsilu
from interlock.kernels.slot import ERROR_SLOT_MAPPING, LOGITS_INDICES, NUM_TOKENS, POSITIONS, SLOT_MAPPING

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


def rms_norm() -> Callable[..., None]:
    """Factory of `catalog.rms_norm`: every element times the row's scale, then times its weight."""

    def kernel(args, slot, thread_id, num_threads):
        x = load_i64(args)
        weight = load_i64(args + 8)
        out = load_i64(args + 16)
        n = load_i64(args + 24)
        eps = np.float32(load_f64(args + 32))
        rows = load_i64(slot + 8 * load_i64(args + 40))
        gather = load_i64(args + 48)
        for row in range(rows * thread_id // num_threads, rows * (thread_id + 1) // num_threads):
            source = x + 4 * n * (np.int64(load_i32(load_i64(slot + 8 * LOGITS_INDICES) + 4 * row)) if gather else row)
            target = out + 4 * n * row
            scale = rms_scale(source, n, eps)
            for i in range(0, n // 16 * 16, 16):
                vstore(target + 4 * i, vmul(vmul(vload(source + 4 * i), splat(scale)), vload(weight + 4 * i)))
            for i in range(n // 16 * 16, n):
                store_f32(target + 4 * i, load_f32(source + 4 * i) * scale * load_f32(weight + 4 * i))

    return kernel


def rope_kv_write(kv_dtype: DType) -> Callable[..., None]:
    """Factory of `catalog.rope_kv_write`. Work is divided over (token, head); a token whose slot is -1 is padding and not written."""
    rotate_in_place = _make_rotate("float32")
    rotate_into_pool = _make_rotate(kv_dtype)
    copy_into_pool = _make_copy(kv_dtype)
    ITEM = ITEM_SIZES[kv_dtype]

    def kernel(args, slot, thread_id, num_threads):
        num_heads = load_i64(args + 24)
        num_kv_heads = load_i64(args + 32)
        head_dim = load_i64(args + 40)
        rotary_dim = load_i64(args + 48)
        block_size = load_i64(args + 56)
        num_slots = block_size * load_i64(args + 64)
        heads = num_heads + 2 * num_kv_heads
        units = load_i64(slot + 8 * NUM_TOKENS) * heads
        for unit in range(units * thread_id // num_threads, units * (thread_id + 1) // num_threads):
            token = unit // heads
            head = unit - token * heads
            source = load_i64(args) + 4 * unit * head_dim
            factors = load_i64(args + 8) + 4 * rotary_dim * np.int64(load_i32(load_i64(slot + 8 * POSITIONS) + 4 * token))
            if head < num_heads:
                rotate_in_place(source, factors, source, head_dim, rotary_dim)
                continue
            kv_slot = load_i64(load_i64(slot + 8 * SLOT_MAPPING) + 8 * token)
            if kv_slot == -1:
                continue
            if kv_slot < 0 or kv_slot >= num_slots:
                report_error(slot, ERROR_SLOT_MAPPING, token)
                continue
            block = kv_slot // block_size
            plane = block * 2 * num_kv_heads + head - num_heads  # keys of all kv heads, then values of all kv heads
            target = load_i64(args + 16) + ((plane * block_size) + kv_slot - block * block_size) * head_dim * ITEM
            if head < num_heads + num_kv_heads:
                rotate_into_pool(source, factors, target, head_dim, rotary_dim)
            else:
                copy_into_pool(source, target, 0, head_dim)

    return kernel


def silu_mul() -> Callable[..., None]:
    """Factory of `catalog.silu_mul`. Work is divided over whole vectors of each row."""

    def kernel(args, slot, thread_id, num_threads):
        gate_up = load_i64(args)
        out = load_i64(args + 8)
        n = load_i64(args + 16)
        rows = load_i64(slot + 8 * load_i64(args + 24))
        vectors = (n + 15) // 16
        first = rows * vectors * thread_id // num_threads
        stop = rows * vectors * (thread_id + 1) // num_threads
        while first < stop:
            row = first // vectors
            start = first - row * vectors
            end = min(vectors, start + stop - first)
            gate = gate_up + 8 * n * row
            target = out + 4 * n * row
            for i in range(16 * start, min(16 * end, n // 16 * 16), 16):
                vstore(target + 4 * i, vmul(vsilu(vload(gate + 4 * i)), vload(gate + 4 * (n + i))))
            if end == vectors:
                for i in range(max(16 * start, n // 16 * 16), n):
                    value = vmul(vsilu(splat(load_f32(gate + 4 * i))), splat(load_f32(gate + 4 * (n + i))))
                    store_f32(target + 4 * i, first_lane(value))
            first += end - start

    return kernel


def _make_rotate(dtype: DType) -> Any:
    """`rotate(source, factors, target, head_dim, rotary_dim)`: rotate the pairs (i, i + rotary_dim / 2) of a head, keep what lies beyond
    rotary_dim, round to `dtype`. factors: cosines, then sines."""
    store = make_store(dtype)
    store_1 = make_store(dtype, 1)
    copy = _make_copy(dtype)
    ITEM = ITEM_SIZES[dtype]

    @njit(error_model="numpy")
    def rotate(source, factors, target, head_dim, rotary_dim):
        half = rotary_dim // 2
        i = 0
        while i + 16 <= half:
            cosine, sine = vload(factors + 4 * i), vload(factors + 4 * (half + i))
            low, high = vload(source + 4 * i), vload(source + 4 * (half + i))
            store(target + ITEM * i, vfma(low, cosine, vneg(vmul(high, sine))))
            store(target + ITEM * (half + i), vfma(high, cosine, vmul(low, sine)))
            i += 16
        while i < half:
            cosine_1, sine_1 = load_f32(factors + 4 * i), load_f32(factors + 4 * (half + i))
            low_1, high_1 = load_f32(source + 4 * i), load_f32(source + 4 * (half + i))
            store_1(target + ITEM * i, fma(low_1, cosine_1, -(high_1 * sine_1)))
            store_1(target + ITEM * (half + i), fma(high_1, cosine_1, low_1 * sine_1))
            i += 1
        if rotary_dim < head_dim:
            copy(source, target, rotary_dim, head_dim)

    return rotate


def _make_copy(dtype: DType) -> Any:
    """`copy(source, target, first, stop)`: round the elements [first, stop) of a head to `dtype`."""
    store = make_store(dtype)
    store_1 = make_store(dtype, 1)
    ITEM = ITEM_SIZES[dtype]

    @njit(error_model="numpy")
    def copy(source, target, first, stop):
        while first + 16 <= stop:
            store(target + ITEM * first, vload(source + 4 * first))
            first += 16
        while first < stop:
            store_1(target + ITEM * first, load_f32(source + 4 * first))
            first += 1

    return copy
