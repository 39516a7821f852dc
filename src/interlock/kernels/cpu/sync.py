"""What threads need to agree: atomics, fences, futexes, clocks, the floating-point control register, and a kernel's way to report an error.

Addresses are int64. An atomic word is 64 bits and aligned; a futex is the low half of such a word, so machines are little-endian.
Functions here are Numba intrinsics, or functions that Numba inlines into kernels; none raises and none takes the GIL.
"""

import platform
import sys
import time
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from interlock.kernels.cpu.simd import declare, pointer
from interlock.kernels.slot import ERROR_NONE, STATUS, STATUS_ROW

_i8, _i32, _i64 = (ir.IntType(n) for n in (8, 32, 64))
_void = ir.VoidType()

_MACHINE: Final = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
_HAS_FUTEX: Final = sys.platform == "linux"
_SYS_FUTEX: Final = {"x86_64": 202}.get(_MACHINE, 98)
_FUTEX_WAIT_PRIVATE: Final = 128
_FUTEX_WAKE_PRIVATE: Final = 129
_EVERY_WAITER: Final = 2**31 - 1
_POLL_NANOSECONDS: Final = 50_000  # length of a wait where there is no futex
_MXCSR_DEFAULT: Final = 0x1F80  # all exceptions masked, round to nearest even, subnormals kept
_CLOCK_MONOTONIC: Final = getattr(time, "CLOCK_MONOTONIC", 1)


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """The word at `address`; nothing that follows moves before this load."""
    return types.int64(types.int64), lambda context, builder, signature, args: builder.load_atomic(pointer(builder, args[0], _i64), "acquire", 8)


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Set the word at `address`; nothing that precedes moves behind this store."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer(builder, args[0], _i64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the word at `address`, sequentially consistent; returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], _i64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Set the word at `address`, sequentially consistent; returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", pointer(builder, args[0], _i64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_and_swap(typingctx: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Set the word at `address` to `desired` if it is `expected`, sequentially consistent; returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = builder.cmpxchg(pointer(builder, args[0], _i64), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 0)

    return types.int64(types.int64, types.int64, types.int64), generate


def _fence(ordering: str) -> Any:
    def typed(typingctx: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence(ordering)
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(typed)


fence_acquire = _fence("acquire")
fence_release = _fence("release")
fence_full = _fence("seq_cst")


@intrinsic
def spin_hint(typingctx: Any) -> Any:
    """Tell the core that this thread spins: `pause` on x86, `yield` on ARM, nothing elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _MACHINE == "x86_64":
            builder.call(declare(builder, "llvm.x86.sse2.pause", _void, []), [])
        elif _MACHINE == "aarch64":
            builder.call(declare(builder, "llvm.aarch64.hint", _void, [_i32]), [ir.Constant(_i32, 1)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def set_float_control(typingctx: Any) -> Any:
    """Round to nearest even, keep subnormals, mask exceptions: half of the numerical law, for the calling thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _MACHINE == "x86_64":
            cell = cgutils.alloca_once_value(builder, ir.Constant(_i32, _MXCSR_DEFAULT))
            load = declare(builder, "llvm.x86.sse.ldmxcsr", _void, [_i8.as_pointer()])
            builder.call(load, [builder.bitcast(cell, _i8.as_pointer())])
        elif _MACHINE == "aarch64":
            builder.call(declare(builder, "llvm.aarch64.set.fpcr", _void, [_i64]), [ir.Constant(_i64, 0)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def monotonic_ns(typingctx: Any) -> Any:
    """Nanoseconds of the monotonic clock: those of Python's `time.monotonic_ns`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cell = cgutils.alloca_once(builder, ir.ArrayType(_i64, 2))
        words = builder.bitcast(cell, _i64.as_pointer())
        clock = declare(builder, "clock_gettime", _i32, [_i32, _i64.as_pointer()])
        builder.call(clock, [ir.Constant(_i32, _CLOCK_MONOTONIC), words])
        seconds = builder.mul(builder.load(words), ir.Constant(_i64, 1_000_000_000))
        return builder.add(seconds, builder.load(builder.gep(words, [ir.Constant(_i64, 1)])))

    return types.int64(), generate


@intrinsic
def current_cpu(typingctx: Any) -> Any:
    """The number of the CPU that this thread runs on, a moment ago; -1 where the system does not tell."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _HAS_FUTEX:
            return ir.Constant(_i64, -1)
        return builder.sext(builder.call(declare(builder, "sched_getcpu", _i32, []), []), _i64)

    return types.int64(), generate


def _timespec(builder: Any, nanoseconds: Any) -> Any:
    cell = cgutils.alloca_once(builder, ir.ArrayType(_i64, 2))
    words = builder.bitcast(cell, _i64.as_pointer())
    billion = ir.Constant(_i64, 1_000_000_000)
    builder.store(builder.udiv(nanoseconds, billion), words)
    builder.store(builder.urem(nanoseconds, billion), builder.gep(words, [ir.Constant(_i64, 1)]))
    return words


def _futex(builder: Any, address: Any, operation: int, value: Any, timeout: Any) -> Any:
    system_call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_i64, [_i64], var_arg=True), "syscall")
    number, command = ir.Constant(_i64, _SYS_FUTEX), ir.Constant(_i64, operation)
    return builder.call(system_call, [number, address, command, value, timeout])


@intrinsic
def futex_wait(typingctx: Any, address: Any, expected: Any, nanoseconds: Any) -> Any:
    """Sleep while the low 32 bits at `address` are those of `expected`, at most `nanoseconds`. Also returns at a signal, or for no reason.

    Where the system has no futex this is a short timed sleep, after which the caller looks again.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, expected, nanoseconds = args
        if _HAS_FUTEX:
            _futex(builder, address, _FUTEX_WAIT_PRIVATE, expected, builder.ptrtoint(_timespec(builder, nanoseconds), _i64))
        else:
            longest = ir.Constant(_i64, _POLL_NANOSECONDS)
            nanoseconds = builder.select(builder.icmp_unsigned("<", nanoseconds, longest), nanoseconds, longest)
            sleep = declare(builder, "nanosleep", _i32, [_i64.as_pointer(), _i64.as_pointer()])
            builder.call(sleep, [_timespec(builder, nanoseconds), ir.Constant(_i64.as_pointer(), None)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def futex_wake_all(typingctx: Any, address: Any) -> Any:
    """Wake every thread that sleeps on `address`. Change the word first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _HAS_FUTEX:
            _futex(builder, args[0], _FUTEX_WAKE_PRIVATE, ir.Constant(_i64, _EVERY_WAITER), ir.Constant(_i64, 0))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def report_error(typingctx: Any, slot: Any, code: Any, row: Any) -> Any:
    """Put an error into the slot's status block, unless there is one already. `row` is the row it was found in.

    The launch is filled in by the loop that called the kernel, which also skips what follows.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        slot, code, row = args
        header = pointer(builder, slot, _i64)
        status = pointer(builder, builder.load(builder.gep(header, [ir.Constant(_i64, STATUS)])), _i64)
        result = builder.cmpxchg(status, ir.Constant(_i64, ERROR_NONE), code, "seq_cst", "seq_cst")
        with builder.if_then(builder.extract_value(result, 1), likely=False):
            builder.store(row, builder.gep(status, [ir.Constant(_i64, STATUS_ROW)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
