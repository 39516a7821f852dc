"""KV dtypes in memory and float32 in registers: exact widening, and rounding to nearest even.

A bfloat16 is the upper half of a float32, so both ways are integer arithmetic; float16 uses LLVM's conversions, which are one
instruction wherever 16-lane vectors are. A NaN stays a (quiet) NaN. The `*_value` functions emit IR for scalars and vectors alike.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from interlock.core.buffer import ITEM_SIZES, DType
from interlock.kernels.cpu.simd import LANES, f32x16, pointer

_f32, _half = ir.FloatType(), ir.HalfType()
_i16, _i32 = ir.IntType(16), ir.IntType(32)


def like(value_type: Any, element: Any) -> Any:
    """The type with `element` in place of the elements of `value_type`: a vector for a vector, a scalar for a scalar."""
    return ir.VectorType(element, value_type.count) if isinstance(value_type, ir.VectorType) else element


def constant_like(value_type: Any, value: Any) -> Any:
    """The constant `value`, in each lane if the type is a vector."""
    return ir.Constant(value_type, [value] * value_type.count if isinstance(value_type, ir.VectorType) else value)


def stored_type(dtype: DType) -> Any:
    """The LLVM type of one element in memory: an integer of its size for 16-bit dtypes."""
    return _f32 if dtype == "float32" else _i16


def widen_value(builder: Any, value: Any, dtype: DType) -> Any:
    """float32 from stored elements; exact."""
    if dtype == "float32":
        return value
    if dtype == "float16":
        return builder.fpext(builder.bitcast(value, like(value.type, _half)), like(value.type, _f32))
    wide = like(value.type, _i32)
    bits = builder.shl(builder.zext(value, wide), constant_like(wide, 16))
    return builder.bitcast(bits, like(value.type, _f32))


def round_value(builder: Any, value: Any, dtype: DType) -> Any:
    """Stored elements from float32; nearest, ties to even."""
    if dtype == "float32":
        return value
    if dtype == "float16":
        return builder.bitcast(builder.fptrunc(value, like(value.type, _half)), like(value.type, _i16))
    wide = like(value.type, _i32)

    def integer(number: int) -> Any:
        return constant_like(wide, number)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, integer(16)), integer(1))
    rounded = builder.add(bits, builder.add(odd, integer(0x7FFF)))
    quiet = builder.or_(bits, integer(0x400000))
    bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(bits, integer(16)), like(value.type, _i16))


def make_store(dtype: DType, lanes: int = LANES) -> Any:
    """The intrinsic `store(address, value)`: rounds 16 lanes (or, with lanes 1, a scalar float32) to `dtype` and stores them."""
    element = stored_type(dtype)
    memory = ir.VectorType(element, lanes) if lanes > 1 else element
    operand = f32x16 if lanes > 1 else types.float32

    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(round_value(builder, args[1], dtype), pointer(builder, args[0], memory), align=ITEM_SIZES[dtype])
            return context.get_dummy_value()

        return types.void(types.int64, operand), generate

    return store
