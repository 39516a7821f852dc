"""Kernels with which a test keeps a stream busy, and a stand-in for a drafter's KV write."""

from interlock.kernels.native import Kernel, kernel

MODULE = "held_kernels"


def hold_kernel() -> Kernel:
    """Every thread waits until the int64 word is not 0."""
    return kernel("test_hold", f"{MODULE}:hold", ("word",))


def fill_kernel() -> Kernel:
    """The first thread stores the int64 `value` into the first `count` words."""
    return kernel("test_fill", f"{MODULE}:fill", ("words", "count", "value"))


def draft_write_kernel() -> Kernel:
    """The first thread writes, for each token row, its token id into every 16-bit element of the KV of its slot.

    planes: 2 * num_kv_heads; page_words: 64-bit words of one head at one position.
    """
    return kernel("test_draft_write", f"{MODULE}:draft_write", ("kv_layer", "planes", "block_size", "page_words"))


def hold():
    from interlock.kernels.cpu.simd import load_i64
    from interlock.kernels.cpu.sync import futex_wait, load_acquire

    def k(args, slot, thread_id, num_threads):
        word = load_i64(args)
        while load_acquire(word) == 0:
            futex_wait(word, 0, 100_000)

    return k


def fill():
    from interlock.kernels.cpu.simd import load_i64, store_i64

    def k(args, slot, thread_id, num_threads):
        if thread_id == 0:
            for i in range(load_i64(args + 8)):
                store_i64(load_i64(args) + 8 * i, load_i64(args + 16))

    return k


def draft_write():
    import numpy as np

    from interlock.kernels.cpu.simd import load_i32, load_i64, store_i64
    from interlock.kernels.slot import NUM_TOKENS, SLOT_MAPPING, TOKEN_IDS

    def k(args, slot, thread_id, num_threads):
        if thread_id == 0:
            layer = load_i64(args)
            planes = load_i64(args + 8)
            block_size = load_i64(args + 16)
            page_words = load_i64(args + 24)
            for token in range(load_i64(slot + 8 * NUM_TOKENS)):
                value = np.int64(load_i32(load_i64(slot + 8 * TOKEN_IDS) + 4 * token)) * 0x0001000100010001
                kv_slot = load_i64(load_i64(slot + 8 * SLOT_MAPPING) + 8 * token)
                block = kv_slot // block_size
                for plane in range(planes):
                    page = ((block * planes + plane) * block_size + kv_slot - block * block_size) * page_words
                    for word in range(page_words):
                        store_i64(layer + 8 * (page + word), value)

    return k
