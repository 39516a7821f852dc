"""Native packing of checkpoint rows into panels (layout: `kernels/formats.py`)."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from interlock.kernels.cpu.simd import load_i64, load_u8, load_u16, pointer, store_i32, store_u8, store_u16
from interlock.kernels.formats import BLOCK_BYTES, ELEMENT_BYTES, GROUP, PANEL, QUANT_BYTES, SCALE_BYTES, group_nbytes

_i32, _i64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def _load_u64_unaligned(typingctx: Any, address: Any) -> Any:
    return types.uint64(types.int64), lambda context, builder, signature, args: builder.load(pointer(builder, args[0], _i64), align=1)


@intrinsic
def _load_i32_unaligned(typingctx: Any, address: Any) -> Any:
    return types.int32(types.int64), lambda context, builder, signature, args: builder.load(pointer(builder, args[0], _i32), align=1)


def pack(fmt: Any) -> Callable[..., Any]:
    """Factory of `pack(rows, target, panels, k)`: rows int64 [panels * 32] are source addresses, 0 for a row of zeros."""
    record_bytes = group_nbytes(fmt)
    pack_group = _pack_elements(ELEMENT_BYTES[fmt]) if fmt in ELEMENT_BYTES else _pack_bytes() if fmt == "q8_0" else _pack_nibbles(fmt == "q4_1")

    def pack_panels(rows, target, panels, k):
        groups = (k + GROUP - 1) // GROUP
        for output in range(panels * PANEL):
            source = load_i64(rows + 8 * output)
            record = target + output // PANEL * groups * record_bytes
            for group in range(groups):
                pack_group(source, group, min(GROUP, k - group * GROUP), record + group * record_bytes, output % PANEL)

    return pack_panels


def _pack_elements(size: int) -> Callable[..., Any]:
    @njit(error_model="numpy")
    def pack_group(source, group, count, record, output):
        for i in range(GROUP):
            to = record + (i * PANEL + output) * size
            if size == 4:
                value = np.int32(0)
                if source != 0 and i < count:
                    value = _load_i32_unaligned(source + (group * GROUP + i) * 4)
                store_i32(to, value)
            else:
                half = np.uint16(0)
                if source != 0 and i < count:
                    half = load_u16(source + (group * GROUP + i) * 2)
                store_u16(to, half)

    return pack_group


def _pack_bytes() -> Callable[..., Any]:
    block_bytes, quant_bytes = BLOCK_BYTES["q8_0"], QUANT_BYTES["q8_0"]

    @njit(error_model="numpy")
    def pack_group(source, group, count, record, output):
        if source == 0:
            for i in range(GROUP):
                store_u8(record + i * PANEL + output, np.uint8(0))
            store_u16(record + quant_bytes + 2 * output, np.uint16(0))
            return
        block = source + group * block_bytes
        for i in range(GROUP):
            store_u8(record + i * PANEL + output, load_u8(block + 2 + i))
        store_u16(record + quant_bytes + 2 * output, load_u16(block))

    return pack_group


def _pack_nibbles(has_minimum: bool) -> Callable[..., Any]:
    block_bytes, quant_bytes = (BLOCK_BYTES["q4_1"], QUANT_BYTES["q4_1"]) if has_minimum else (BLOCK_BYTES["q4_0"], QUANT_BYTES["q4_0"])
    header = 4 if has_minimum else 2

    @njit(error_model="numpy")
    def pack_group(source, group, count, record, output):
        to = record + output * 4
        scales = record + quant_bytes + 2 * output
        if source == 0:
            for word in range(4):
                store_i32(to + word * 4 * PANEL, np.int32(0))
            store_u16(scales, np.uint16(0))
            if has_minimum:
                store_u16(scales + SCALE_BYTES, np.uint16(0))
            return
        block = source + group * block_bytes
        for half in range(2):  # low nibbles of the 16 bytes are inputs 0 to 15, high nibbles 16 to 31
            for part in range(2):
                eight = (_load_u64_unaligned(block + header + 8 * part) >> np.uint64(4 * half)) & np.uint64(0x0F0F0F0F0F0F0F0F)
                eight = (eight | (eight >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
                eight = (eight | (eight >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
                eight = eight | (eight >> np.uint64(16))
                store_i32(to + (2 * half + part) * 4 * PANEL, np.int32(eight & np.uint64(0xFFFFFFFF)))
        store_u16(scales, load_u16(block))
        if has_minimum:
            store_u16(scales + SCALE_BYTES, load_u16(block + 2))

    return pack_group
