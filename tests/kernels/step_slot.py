"""A step slot for tests of single kernels, and a way to run a kernel as a team of threads would."""

import numpy as np

from interlock.kernels import slot as words


class StepSlot:
    def __init__(self, **entries):
        self.header = np.zeros(words.NUM_WORDS, np.int64)
        self.arrays = {}
        self.status = np.zeros(8, np.int64)
        self.set(STATUS=self.status, **entries)

    def set(self, **entries):
        for name, value in entries.items():
            if isinstance(value, np.ndarray):
                assert value.flags.c_contiguous
                self.arrays[name] = value
            self.header[getattr(words, name)] = value.ctypes.data if isinstance(value, np.ndarray) else value

    @property
    def error(self):
        """(code, row), or None."""
        return (int(self.status[0]), int(self.status[words.STATUS_ROW])) if self.status[0] else None


def run(kernel, arguments, slot, num_threads=1):
    """Call the kernel for every thread id in turn: kernels hold no barrier, so this is one order that a team could run in."""
    function = kernel.function.callable()
    for thread_id in range(num_threads):
        function(arguments.address, slot.header.ctypes.data, thread_id, num_threads)


def to_kv_dtype(values, dtype):
    """float32 rounded to a KV dtype, as stored (bfloat16 as uint16)."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def from_kv_dtype(stored, dtype):
    return (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else stored.astype(np.float32)


def stored_nan(dtype):
    """An array element of the KV dtype that is NaN."""
    return {"bfloat16": np.uint16(0x7FC0), "float16": np.float16(np.nan), "float32": np.float32(np.nan)}[dtype]


def bits(values):
    return values.view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def pool_of_nan(num_blocks, num_kv_heads, block_size, head_dim, dtype):
    return np.full((num_blocks, 2, num_kv_heads, block_size, head_dim), stored_nan(dtype))
