"""Vectors for kernels: 16 float32 lanes on every instruction set, with explicit FMA and fixed reduction trees.

LLVM lowers a 16-lane vector to one AVX-512 register, two AVX2 ones, or four NEON ones; the lanes and the order of operations are
the same in all of them, which is half of the numerical law. Addresses are int64. Functions here are Numba intrinsics.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16

_f32 = ir.FloatType()
_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_v_f32 = ir.VectorType(_f32, LANES)
_v_i32 = ir.VectorType(_i32, LANES)


class _VectorType(types.Type):
    """A Numba type that is held as one LLVM vector."""

    def __init__(self, name: str, llvm_type: Any) -> None:
        self.llvm_type = llvm_type
        super().__init__(name)


class F32x16Type(_VectorType):
    """16 float32 lanes."""


class I32x16Type(_VectorType):
    """16 int32 lanes."""


f32x16 = F32x16Type("f32x16", _v_f32)
i32x16 = I32x16Type("i32x16", _v_i32)


@register_model(F32x16Type)
@register_model(I32x16Type)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm_type)


def pointer(builder: Any, address: Any, llvm_type: Any) -> Any:
    """An LLVM pointer from an int64 address."""
    return builder.inttoptr(address, llvm_type.as_pointer())


def declare(builder: Any, name: str, result: Any, parameters: list[Any]) -> Any:
    """An external or LLVM-intrinsic function, declared in the builder's module."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, parameters), name)


def splat_value(builder: Any, value: Any) -> Any:
    """A vector with `value` in each lane."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_i32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_v_i32, [0] * LANES))


def _load(result: Any, llvm_type: Any, align: int) -> Any:
    def typed(typingctx: Any, address: Any) -> Any:
        return result(types.int64), lambda context, builder, signature, args: builder.load(pointer(builder, args[0], llvm_type), align=align)

    return typed


def _store(value_type: Any, llvm_type: Any, align: int) -> Any:
    def typed(typingctx: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], pointer(builder, args[0], llvm_type), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return typed


load_i64 = intrinsic(_load(types.int64, _i64, 8))
load_i32 = intrinsic(_load(types.int32, _i32, 4))
load_u16 = intrinsic(_load(types.uint16, _i16, 2))
load_u8 = intrinsic(_load(types.uint8, _i8, 1))
load_f32 = intrinsic(_load(types.float32, _f32, 4))
load_f64 = intrinsic(_load(types.float64, ir.DoubleType(), 8))
store_i64 = intrinsic(_store(types.int64, _i64, 8))
store_i32 = intrinsic(_store(types.int32, _i32, 4))
store_u16 = intrinsic(_store(types.uint16, _i16, 2))
store_u8 = intrinsic(_store(types.uint8, _i8, 1))
store_f32 = intrinsic(_store(types.float32, _f32, 4))
vload = intrinsic(_load(f32x16, _v_f32, 4))
vstore = intrinsic(_store(f32x16, _v_f32, 4))
vload_i32 = intrinsic(_load(i32x16, _v_i32, 4))
vstore_i32 = intrinsic(_store(i32x16, _v_i32, 4))


def _lanewise(emit: Callable[[Any, list[Any]], Any], arity: int, operand: Any = f32x16, result: Any = f32x16) -> Any:
    parameters = [operand] * arity

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, list(args))

    if arity == 1:
        return intrinsic(lambda typingctx, a: (result(*parameters), generate))
    if arity == 2:
        return intrinsic(lambda typingctx, a, b: (result(*parameters), generate))
    return intrinsic(lambda typingctx, a, b, c: (result(*parameters), generate))


def _call(name: str, arity: int) -> Callable[[Any, list[Any]], Any]:
    return lambda builder, args: builder.call(declare(builder, name, _v_f32, [_v_f32] * arity), args)


vadd = _lanewise(lambda builder, a: builder.fadd(a[0], a[1]), 2)
vsub = _lanewise(lambda builder, a: builder.fsub(a[0], a[1]), 2)
vmul = _lanewise(lambda builder, a: builder.fmul(a[0], a[1]), 2)
vdiv = _lanewise(lambda builder, a: builder.fdiv(a[0], a[1]), 2)
vfma = _lanewise(_call("llvm.fma.v16f32", 3), 3)  # a * b + c, one rounding
vmax = _lanewise(lambda builder, a: builder.select(builder.fcmp_ordered(">", a[0], a[1]), a[0], a[1]), 2)  # b where a lane is NaN
vneg = _lanewise(lambda builder, a: builder.fneg(a[0]), 1)
vsqrt = _lanewise(_call("llvm.sqrt.v16f32", 1), 1)


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A float32 in every lane."""
    return f32x16(types.float32), lambda context, builder, signature, args: splat_value(builder, args[0])


@intrinsic
def first_lane(typingctx: Any, vector: Any) -> Any:
    """Lane 0."""
    return types.float32(f32x16), lambda context, builder, signature, args: builder.extract_element(args[0], ir.Constant(_i32, 0))


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Scalar float32 a * b + c with one rounding."""
    f = types.float32
    return f(f, f, f), lambda context, builder, signature, args: builder.call(declare(builder, "llvm.fma.f32", _f32, [_f32] * 3), args)


def tree(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Reduce 16 lanes by the fixed tree: lane i with i + 8, then i + 4, i + 2, i + 1."""
    undefined = ir.Constant(_v_f32, ir.Undefined)
    for half in (8, 4, 2, 1):
        upper = builder.shuffle_vector(vector, undefined, ir.Constant(_v_i32, [(i + half) % LANES for i in range(LANES)]))
        vector = combine(builder, vector, upper)
    return builder.extract_element(vector, ir.Constant(_i32, 0))


@intrinsic
def reduce_add(typingctx: Any, vector: Any) -> Any:
    """Sum of the lanes, by the fixed tree."""
    return types.float32(f32x16), lambda context, builder, signature, args: tree(builder, args[0], lambda b, x, y: b.fadd(x, y))


@intrinsic
def reduce_max(typingctx: Any, vector: Any) -> Any:
    """Largest lane, by the fixed tree."""
    return types.float32(f32x16), lambda context, builder, signature, args: tree(
        builder, args[0], lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y)
    )


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """The bit pattern of a float32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _i32)


@intrinsic
def float_of(typingctx: Any, value: Any) -> Any:
    """The float32 with this bit pattern."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], _f32)
