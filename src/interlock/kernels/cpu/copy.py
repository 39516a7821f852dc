"""The copy worker: a list of memory copies, done natively so that Python's other threads run meanwhile."""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from interlock.kernels.cpu.simd import load_i64, pointer
from interlock.kernels.cpu.sync import fence_full, load_acquire

_CHUNK: Final = 1 << 20  # bytes between two looks at the abort word

_i1, _i8, _i64 = ir.IntType(1), ir.IntType(8), ir.IntType(64)


@intrinsic
def copy_memory(typingctx: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    """Copy `nbytes` bytes between ranges that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_ = _i8.as_pointer()
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [bytes_, bytes_, _i64])
        builder.call(memcpy, [pointer(builder, args[0], _i8), pointer(builder, args[1], _i8), args[2], ir.Constant(_i1, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def copy_list():
    """Copy entries (destination, source, nbytes) in order until the word at `abort` is not 0; returns how many were copied in full."""

    def copy(entries, count, abort):
        copied = 0
        going = True
        while going and copied < count:
            destination = load_i64(entries + 24 * copied)
            source = load_i64(entries + 24 * copied + 8)
            nbytes = load_i64(entries + 24 * copied + 16)
            offset = 0
            while going and offset < nbytes:
                if load_acquire(abort) != 0:
                    going = False
                else:
                    part = min(nbytes - offset, _CHUNK)
                    copy_memory(destination + offset, source + offset, part)
                    offset += part
            if offset >= nbytes:
                copied += 1
        fence_full()
        return copied

    return copy
