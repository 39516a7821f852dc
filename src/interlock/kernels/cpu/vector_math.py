"""exp, sigmoid and silu on 16 float32 lanes: the same bits on every instruction set, without libm.

`exp` has a relative error below 1.2e-7 (at most 1.01 units in the last place) where its result is a normal number; it is 0 below the smallest
normal number, infinite above the largest, and NaN for NaN. `sigmoid` and `silu` stay within 4 units in the last place where
their result is normal. The `*_value` functions emit IR; the others are the Numba intrinsics for them.
"""

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from interlock.kernels.cpu.simd import LANES, declare, f32x16

_v_f32 = ir.VectorType(ir.FloatType(), LANES)
_v_i32 = ir.VectorType(ir.IntType(32), LANES)

_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375  # 9 bits long, so that multiples up to 2**14 are exact
_LN2_LOW = -2.12194440e-4
_LOWEST = -87.33654022216796875  # exp of anything below is not a normal number
_HIGHEST = 89.0  # exp is infinite from 88.73 on
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_ROUND_BITS = 0x4B400000
# Minimax polynomial of (exp(r) - 1 - r) / r**2 for |r| <= ln(2) / 2, from Cephes expf (S. Moshier).
_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp_value(builder: Any, x: Any) -> Any:
    """exp of each lane."""
    bounded = builder.select(builder.fcmp_ordered(">", x, _constant(_HIGHEST)), _constant(_HIGHEST), x)
    shifted = _fma(builder, bounded, _constant(_LOG2_E), _constant(_ROUND))
    n = builder.fsub(shifted, _constant(_ROUND))
    power = builder.sub(builder.bitcast(shifted, _v_i32), _integer(_ROUND_BITS))
    p = _exp_of_rest(builder, bounded, n)
    half = builder.ashr(power, _integer(1))  # two steps, since 2**128 is not a float
    result = builder.fmul(builder.fmul(p, _two_to(builder, half)), _two_to(builder, builder.sub(power, half)))
    return builder.select(builder.fcmp_ordered("<", x, _constant(_LOWEST)), _constant(0.0), result)


def exp_nonpositive_value(builder: Any, x: Any) -> Any:
    """exp of each lane, where no lane is above 0: the bits of `exp_value`, in fewer steps."""
    shifted = _fma(builder, x, _constant(_LOG2_E), _constant(_ROUND))
    n = builder.fsub(shifted, _constant(_ROUND))
    power = builder.sub(builder.bitcast(shifted, _v_i32), _integer(_ROUND_BITS))
    result = builder.fmul(_exp_of_rest(builder, x, n), _two_to(builder, power))
    return builder.select(builder.fcmp_ordered("<", x, _constant(_LOWEST)), _constant(0.0), result)


def sigmoid_value(builder: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)) of each lane."""
    return builder.fdiv(_constant(1.0), _one_plus_exp_of_minus(builder, x))


def silu_value(builder: Any, x: Any) -> Any:
    """x / (1 + exp(-x)) of each lane."""
    return builder.fdiv(x, _one_plus_exp_of_minus(builder, x))


@intrinsic
def vexp(typingctx: Any, x: Any) -> Any:
    """exp of each lane."""
    return f32x16(f32x16), lambda context, builder, signature, args: exp_value(builder, args[0])


@intrinsic
def vexp_nonpositive(typingctx: Any, x: Any) -> Any:
    """exp of each lane, where no lane is above 0."""
    return f32x16(f32x16), lambda context, builder, signature, args: exp_nonpositive_value(builder, args[0])


@intrinsic
def vsigmoid(typingctx: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)) of each lane."""
    return f32x16(f32x16), lambda context, builder, signature, args: sigmoid_value(builder, args[0])


@intrinsic
def vsilu(typingctx: Any, x: Any) -> Any:
    """x / (1 + exp(-x)) of each lane."""
    return f32x16(f32x16), lambda context, builder, signature, args: silu_value(builder, args[0])


def _exp_of_rest(builder: Any, x: Any, n: Any) -> Any:
    """exp(x - n * log(2)), near 1."""
    r = _fma(builder, n, _constant(-_LN2_HIGH), x)
    r = _fma(builder, n, _constant(-_LN2_LOW), r)
    p = _constant(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        p = _fma(builder, p, r, _constant(coefficient))
    p = _fma(builder, p, builder.fmul(r, r), r)
    return builder.fadd(p, _constant(1.0))


def _one_plus_exp_of_minus(builder: Any, x: Any) -> Any:
    return builder.fadd(exp_value(builder, builder.fneg(x)), _constant(1.0))


def _two_to(builder: Any, power: Any) -> Any:
    return builder.bitcast(builder.shl(builder.add(power, _integer(127)), _integer(23)), _v_f32)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(declare(builder, "llvm.fma.v16f32", _v_f32, [_v_f32] * 3), [a, b, c])


def _constant(value: float) -> Any:
    return ir.Constant(_v_f32, [value] * LANES)


def _integer(value: int) -> Any:
    return ir.Constant(_v_i32, [value] * LANES)
