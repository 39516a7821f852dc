"""Token embeddings, read from the same packed panels as the output head (fields: `kernels/catalog.py`). Threads split the tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from interlock.kernels.cpu.simd import load_f32, load_i32, load_i64, load_u8, load_u16, pointer, store_f32
from interlock.kernels.cpu.sync import report_error
from interlock.kernels.formats import ELEMENT_BYTES, GROUP, PANEL, QUANT_BYTES, SCALE_BYTES, group_nbytes
from interlock.kernels.slot import ERROR_TOKEN_ID, TOKEN_IDS

_f32, _i32 = ir.FloatType(), ir.IntType(32)


@intrinsic
def _load_f16(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.load(pointer(builder, args[0], ir.HalfType()), align=2), _f32)

    return types.float32(types.int64), generate


@intrinsic
def _bfloat16_value(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _i32), ir.Constant(_i32, 16)), _f32)

    return types.float32(types.uint16), generate


def embedding(fmt: Any) -> Callable[..., None]:
    """Factory of the lookup: value * scale + minimum, each operation rounded."""
    record_bytes = group_nbytes(fmt)
    write_group = _element_writer(fmt) if fmt in ELEMENT_BYTES else _quant_writer(fmt)

    def lookup(args, slot, thread_id, num_threads):
        weight, out = load_i64(args), load_i64(args + 8)
        rows, vocab_size, n = load_i64(slot + 8 * load_i64(args + 16)), load_i64(args + 24), load_i64(args + 32)
        token_ids = load_i64(slot + 8 * TOKEN_IDS)
        groups = (n + GROUP - 1) // GROUP
        for row in range(rows * thread_id // num_threads, rows * (thread_id + 1) // num_threads):
            token = np.int64(load_i32(token_ids + 4 * row))
            if token < 0 or token >= vocab_size:
                report_error(slot, ERROR_TOKEN_ID, row)
                continue
            record = weight + token // PANEL * groups * record_bytes
            for group in range(groups):
                target = out + 4 * (row * n + group * GROUP)
                write_group(record + group * record_bytes, token % PANEL, target, min(GROUP, n - group * GROUP))

    return lookup


def _element_writer(fmt: Any) -> Any:
    size = ELEMENT_BYTES[fmt]

    @njit(error_model="numpy")
    def write_group(record, output, target, count):
        for i in range(count):
            source = record + (i * PANEL + output) * size
            if fmt == "float32":
                store_f32(target + 4 * i, load_f32(source))
            elif fmt == "float16":
                store_f32(target + 4 * i, _load_f16(source))
            else:
                store_f32(target + 4 * i, _bfloat16_value(load_u16(source)))

    return write_group


def _quant_writer(fmt: Any) -> Any:
    quant_bytes = QUANT_BYTES[fmt]

    @njit(error_model="numpy")
    def write_group(record, output, target, count):
        scales = record + quant_bytes + 2 * output
        scale = _load_f16(scales)
        for i in range(count):
            if fmt == "q8_0":
                value = np.float32(np.int8(load_u8(record + i * PANEL + output)))
            else:
                word = load_i32(record + (i // 8 * PANEL + output) * 4)
                value = np.float32((word >> np.int32(4 * (i % 8))) & np.int32(15))
                if fmt == "q4_0":
                    value -= np.float32(8.0)
            value *= scale
            if fmt == "q4_1":
                value += _load_f16(scales + SCALE_BYTES)
            store_f32(target + 4 * i, value)

    return write_group
