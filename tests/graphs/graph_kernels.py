"""Tiny kernels for the tests of streams, programs and timelines. Arrays are float32 unless said otherwise."""

from interlock.core.buffer import Buffer
from interlock.kernels.native import Kernel, kernel

MODULE = "graph_kernels"


def affine_kernel() -> Kernel:
    """x[i] = x[i] * factor + term: launches of it do not commute."""
    return kernel("test_affine", f"{MODULE}:affine", ("x", "n", "factor", "term"))


def copy_token_kernel() -> Kernel:
    """out[0] = the slot's number of tokens (int64)."""
    return kernel("test_copy_token", f"{MODULE}:copy_token", ("out",))


def report_kernel() -> Kernel:
    """Report `code` at `row`, from every thread."""
    return kernel("test_report", f"{MODULE}:report", ("code", "row"))


def count_kernel() -> Kernel:
    """Add 1 to the int64 counter, once per thread."""
    return kernel("test_count", f"{MODULE}:count", ("counter",))


def expect_kernel() -> Kernel:
    """Report ERROR_SLOT_MAPPING if the int64 counter is below `least`; row: what it was."""
    return kernel("test_expect", f"{MODULE}:expect", ("counter", "least"))


def last_thread_waits_kernel() -> Kernel:
    """The last thread of the team waits until the int64 word is not 0, then adds 1 to it; the others do nothing."""
    return kernel("test_last_thread_waits", f"{MODULE}:last_thread_waits", ("word",))


def first_thread_sets_kernel() -> Kernel:
    """The first thread sets the int64 word to 1."""
    return kernel("test_first_thread_sets", f"{MODULE}:first_thread_sets", ("word",))


def subnormal_kernel() -> Kernel:
    """out[thread] = in[0] * 0.5."""
    return kernel("test_subnormal", f"{MODULE}:subnormal", ("x", "out"))


def step_slot() -> tuple[Buffer, Buffer]:
    """An empty step slot and its status block."""
    from interlock.kernels import slot

    header = Buffer.zeros((slot.NUM_WORDS,), "int64")
    status = Buffer.zeros((4,), "int64")
    header.numpy()[slot.STATUS] = status.address
    return header, status


def affine():
    from numba import float32

    from interlock.kernels.cpu.simd import fma, load_f32, load_f64, load_i64, store_f32

    def k(args, slot, thread_id, num_threads):
        x = load_i64(args)
        n = load_i64(args + 8)
        factor = float32(load_f64(args + 16))
        term = float32(load_f64(args + 24))
        for i in range(n * thread_id // num_threads, n * (thread_id + 1) // num_threads):
            store_f32(x + 4 * i, fma(load_f32(x + 4 * i), factor, term))

    return k


def copy_token():
    from interlock.kernels.cpu.simd import load_i64, store_i64
    from interlock.kernels.slot import NUM_TOKENS

    def k(args, slot, thread_id, num_threads):
        if thread_id == 0:
            store_i64(load_i64(args), load_i64(slot + 8 * NUM_TOKENS))

    return k


def report():
    from interlock.kernels.cpu.simd import load_i64
    from interlock.kernels.cpu.sync import report_error

    def k(args, slot, thread_id, num_threads):
        report_error(slot, load_i64(args), load_i64(args + 8))

    return k


def count():
    from interlock.kernels.cpu.simd import load_i64
    from interlock.kernels.cpu.sync import atomic_add

    def k(args, slot, thread_id, num_threads):
        atomic_add(load_i64(args), 1)

    return k


def expect():
    from interlock.kernels.cpu.simd import load_i64
    from interlock.kernels.cpu.sync import load_acquire, report_error
    from interlock.kernels.slot import ERROR_SLOT_MAPPING

    def k(args, slot, thread_id, num_threads):
        found = load_acquire(load_i64(args))
        if found < load_i64(args + 8):
            report_error(slot, ERROR_SLOT_MAPPING, found)

    return k


def last_thread_waits():
    from interlock.kernels.cpu.simd import load_i64
    from interlock.kernels.cpu.sync import atomic_add, futex_wait, load_acquire

    def k(args, slot, thread_id, num_threads):
        if thread_id == num_threads - 1:
            word = load_i64(args)
            while load_acquire(word) == 0:
                futex_wait(word, 0, 100_000)
            atomic_add(word, 1)

    return k


def first_thread_sets():
    from interlock.kernels.cpu.simd import load_i64
    from interlock.kernels.cpu.sync import atomic_add

    def k(args, slot, thread_id, num_threads):
        if thread_id == 0:
            atomic_add(load_i64(args), 1)

    return k


def subnormal():
    from numba import float32

    from interlock.kernels.cpu.simd import load_f32, load_i64, store_f32

    def k(args, slot, thread_id, num_threads):
        store_f32(load_i64(args + 8) + 4 * thread_id, load_f32(load_i64(args)) * float32(0.5))

    return k
