"""Copying lists of memory ranges without the GIL, for transports that move bytes in this process's own threads."""

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.kernels.native import NativeFunction

COPY_LIST: Final = NativeFunction("copy_list", ("i64", "i64", "i64", "i64"), "interlock.kernels.cpu.copy:copy_list")


def copy_list(entries: npt.NDArray[np.int64], abort: Buffer) -> int:
    """Copy each entry (destination address, source address, nbytes) of int64 [n, 3] in order; from any thread, without the GIL.

    Stops when `abort` (int64 [1]) becomes non-zero, which is looked at between entries and every MiB. Returns how many entries were
    copied in full. The ranges of an entry must not overlap. Raises ValueError if `entries` has another shape or layout.
    """
    if entries.dtype != np.int64 or entries.ndim != 2 or entries.shape[1] != 3 or not entries.flags.c_contiguous:
        raise ValueError(f"copy_list takes C-contiguous int64 entries of shape [n, 3], got {entries.dtype} {entries.shape}")
    copied: int = _copy_list()(entries.ctypes.data, len(entries), abort.address)
    return copied


@functools.cache
def _copy_list() -> Callable[..., Any]:
    return COPY_LIST.callable()
