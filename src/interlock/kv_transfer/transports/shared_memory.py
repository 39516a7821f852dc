"""Memory that several processes map: the KV pool, and the control page with the epoch and the generations of its blocks.

On Linux a segment is a sealed `memfd`; elsewhere an unnamed temporary file. Either has no name that could be left behind: when the
last process that holds it is gone, so is the memory.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import tempfile

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.errors import KVTransferError

PAGE = mmap.PAGESIZE

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since 5.1; not in the fcntl module of Python 3.11
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since 5.14
_MADV_HUGEPAGE = 14

_MAGIC = 0x4B4C524554_4E49  # identifies a control segment
_MAGIC_WORD, _EPOCH_WORD, _BLOCKS_WORD, _HEADER_WORDS = 0, 1, 2, 8


class KVPool:
    """Shared memory that this process writes and others map read-only. buffer: uint8 [nbytes]; fd: what is passed to readers."""

    def __init__(self, nbytes: int, name: str = "interlock-kv") -> None:
        if nbytes < 1:
            raise KVTransferError(f"a shared segment of {nbytes} bytes was asked for, expected at least 1")
        size = -(-nbytes // PAGE) * PAGE
        with contextlib.ExitStack() as undo:
            try:
                self.fd = _create_file(name)
                undo.callback(os.close, self.fd)
                os.ftruncate(self.fd, size)
                self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                _prefault(self._map)
                _seal(self.fd)
            except OSError as error:
                raise KVTransferError(f"{nbytes} bytes of shared memory could not be had ({error}); lower kv_cache_memory_bytes") from error
            undo.pop_all()
        view = np.frombuffer(self._map, np.uint8)
        self.buffer = Buffer(view.ctypes.data, (nbytes,), "uint8", self._map)

    def close(self) -> None:
        """Give the descriptor back. The memory itself goes when the last Buffer on it, here or in a reader, is gone. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def allocate_pool(nbytes: int) -> KVPool:
    """Shared memory of `nbytes`, page-aligned and prefaulted. Raises KVTransferError."""
    return KVPool(nbytes)


class ReadOnlyMapping:
    """A segment of another process, mapped read-only. Takes ownership of `fd`. buffer: uint8 [nbytes]."""

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            size = os.fstat(fd).st_size
            if nbytes > size:
                raise KVTransferError(f"the peer's segment has {size} bytes, expected at least the {nbytes} that it announced")
            self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise KVTransferError(f"the peer's segment of {nbytes} bytes cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        view = np.frombuffer(self._map, np.uint8)
        self.buffer = Buffer(view.ctypes.data, (nbytes,), "uint8", self._map)

    def prefault(self) -> None:
        """Enter all pages into this process's page table, without the GIL, so that the first reads do not pay for it."""
        if sys.platform == "linux":
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self.buffer.address), ctypes.c_size_t(self.buffer.nbytes), _MADV_POPULATE_READ)


class ControlSegment:
    """The producer's side of the control page: its epoch, and one generation per block (uint64 [num_blocks]).

    A block's generation changes before the block may be given to anyone else, so a reader that finds it unchanged after its last
    byte has read what its reference meant.
    """

    def __init__(self, num_blocks: int, epoch: int) -> None:
        self.nbytes = control_bytes(num_blocks)
        self._pool = KVPool(self.nbytes, "interlock-control")
        self._words: npt.NDArray[np.uint64] = self._pool.buffer.numpy().view(np.uint64)
        self._words[_BLOCKS_WORD] = num_blocks
        self._words[_EPOCH_WORD] = epoch
        self._words[_MAGIC_WORD] = _MAGIC
        self.generations = self._words[_HEADER_WORDS : _HEADER_WORDS + num_blocks]

    @property
    def fd(self) -> int:
        """What is passed to readers."""
        return self._pool.fd

    @property
    def buffer(self) -> Buffer:
        """The words, uint8 [nbytes]."""
        return self._pool.buffer

    def close(self) -> None:
        """Give the descriptor back; readers see epoch 0, which no reference carries."""
        if self._pool.fd >= 0:
            self._words[_EPOCH_WORD] = 0
            self._pool.close()


class ControlView:
    """A reader's side of a control page. Raises KVTransferError if it is not one."""

    def __init__(self, fd: int, num_blocks: int) -> None:
        self._mapping = ReadOnlyMapping(fd, control_bytes(num_blocks))
        self._words: npt.NDArray[np.uint64] = self._mapping.buffer.numpy().view(np.uint64)
        if int(self._words[_MAGIC_WORD]) != _MAGIC or int(self._words[_BLOCKS_WORD]) != num_blocks:
            raise KVTransferError(f"the peer's control page does not describe {num_blocks} blocks")
        self.generations = self._words[_HEADER_WORDS : _HEADER_WORDS + num_blocks]

    @property
    def epoch(self) -> int:
        """The producer's epoch now; 0 after it has shut down."""
        return int(self._words[_EPOCH_WORD])


def control_words(memory: Buffer, num_blocks: int) -> tuple[int, npt.NDArray[np.uint64]]:
    """Epoch and generations (uint64 [num_blocks]) in a copy of a control segment. Raises KVTransferError if it is not one."""
    words: npt.NDArray[np.uint64] = memory.numpy().view(np.uint64)
    if int(words[_MAGIC_WORD]) != _MAGIC or int(words[_BLOCKS_WORD]) != num_blocks:
        raise KVTransferError(f"the peer's control page does not describe {num_blocks} blocks")
    return int(words[_EPOCH_WORD]), words[_HEADER_WORDS : _HEADER_WORDS + num_blocks]


def control_bytes(num_blocks: int) -> int:
    """Size of a control segment in bytes."""
    return 8 * (_HEADER_WORDS + num_blocks)


def _create_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _seal(fd: int) -> None:
    """No reader may map it writable, and nobody may shrink it under a reader (a SIGBUS there)."""
    if hasattr(fcntl, "F_ADD_SEALS"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with contextlib.suppress(OSError):  # older kernels do not know it; readers map read-only all the same
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def _prefault(memory: mmap.mmap) -> None:
    """Touch every page now, so that no step pays for it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            memory.madvise(_MADV_HUGEPAGE)
        with contextlib.suppress(OSError):
            memory.madvise(_MADV_POPULATE_WRITE)
            return
    np.frombuffer(memory, np.uint8)[::PAGE] = 0
