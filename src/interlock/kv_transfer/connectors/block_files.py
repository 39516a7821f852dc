"""A directory of KV blocks, one file each, shared by any number of processes.

A file is written under a name that nobody else uses and then renamed, so an entry is whole or absent. Its header says what it holds: the
content key, the namespace (KV identity, layout, kernel version) and a digest of each layer. Whatever does not agree is a miss.

All lie at `<directory>/interlock-kv/<namespace>/<first two digits of the key>/`. Nothing is touched or counted that is not a regular file of
such a place and name, and no symbolic link below `<directory>` is followed.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from interlock.core.config import KVCacheConfig
from interlock.core.errors import KVTransferError

logger = logging.getLogger(__name__)

Payload = bytes | bytearray | memoryview

_MAGIC = b"ILKVBLK\x02"
_HEADER = struct.Struct("<8sQ32s32s")  # magic, payload bytes, key, namespace; the layers' digests follow, then the layers
_DIGEST_BYTES = 32
_SUBDIRECTORY = "interlock-kv"
_SUFFIX, _TEMPORARY = ".kv", ".tmp"
_NAMESPACE_NAME, _GROUP_NAME = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{2}")
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.kv|\.[0-9a-f]{64}\.kv\.[0-9]+\.[0-9a-f]{32}\.tmp")
_RESCAN_FRACTION = 16  # other writers' bytes are looked at after we have written this part of the bound
_KEEP_FRACTION = 8  # an eviction frees this part of the bound more than it must


def namespace_of(config: KVCacheConfig) -> bytes:
    """32 bytes that differ whenever a block of one pool must not be read into another: identity, layout and kernels."""
    parts = (
        config.identity,
        config.kernel_fingerprint,
        config.dtype,
        *(str(size) for size in (config.block_size, config.num_layers, config.num_kv_heads, config.head_dim)),
    )
    digest = hashlib.sha256(b"interlock block files 2")
    for part in parts:
        digest.update(struct.pack("<Q", len(part.encode())) + part.encode())
    return digest.digest()


class BlockFiles:
    """The files of one namespace in `root`, a subdirectory of `directory`. max_bytes: of the files of all namespaces; the least recently
    used go first, whichever engine wrote them. Each process keeps the bound by what it last saw of the others. All methods may be called
    from any thread; they may take as long as the file system does."""

    def __init__(self, directory: Path, config: KVCacheConfig, max_bytes: int) -> None:
        self.root = directory / _SUBDIRECTORY
        self.namespace = namespace_of(config)
        self._directory = str(self.root / self.namespace.hex()[:32])
        self.num_layers, self.layer_bytes = config.num_layers, config.block_bytes
        self.payload_bytes = self.num_layers * self.layer_bytes
        self.header_bytes = _HEADER.size + self.num_layers * _DIGEST_BYTES
        self.file_bytes = self.header_bytes + self.payload_bytes
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._used: int | None = None
        self._unseen = 0

    def path(self, key: bytes) -> Path:
        """Where the content of `key` lies."""
        name = key.hex()
        return Path(f"{self._directory}/{name[:2]}/{name}{_SUFFIX}")

    def contains(self, key: bytes) -> bool:
        """Whether there is an entry of the right size."""
        path = self.path(key)
        try:
            self._refuse_links(path)
            status = path.lstat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self.file_bytes

    def read(self, key: bytes) -> memoryview:
        """The payload, uint8 [payload_bytes], verified. Raises OSError, or KVTransferError for a bad entry, which is removed."""
        path = self.path(key)
        self._refuse_links(path)
        data = memoryview(self.read_bytes(path, 0, self.file_bytes))
        digests, payload = self._digests(data, key), data[self.header_bytes :]
        if digests is None or not all(map(self._is_layer, self._layers(payload), digests)):
            raise self._bad(key)
        self._mark_used(path)
        return payload

    def read_digests(self, key: bytes) -> list[bytes]:
        """The digests of the layers of an entry, for `read_layer`. Raises as `read` does."""
        path = self.path(key)
        self._refuse_links(path)
        digests = self._digests(self.read_bytes(path, 0, self.header_bytes), key)
        if digests is None:
            raise self._bad(key)
        self._mark_used(path)
        return digests

    def read_layer(self, key: bytes, layer: int, digest: bytes) -> memoryview:
        """One layer, uint8 [layer_bytes], verified by what `read_digests` said of it. Raises as `read` does."""
        data = memoryview(self.read_bytes(self.path(key), self.header_bytes + layer * self.layer_bytes, self.layer_bytes))
        if not self._is_layer(data, digest):
            raise self._bad(key)
        return data

    def write(self, key: bytes, payload: Payload, *, replace: bool = False) -> None:
        """Add an entry. One that is there is only marked as used, unless it is to be replaced. Raises OSError, with nothing changed."""
        path = self.path(key)
        if not replace and self.contains(key):
            with contextlib.suppress(FileNotFoundError):  # evicted by another process since
                os.utime(path)
                return
        self._make_room()
        for directory in (self.root, path.parent.parent, path.parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._refuse_links(path)
        temporary = self.temporary_path(path)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # tells `clean` in other processes that its writer lives
            self.write_bytes(fd, self._header(key) + b"".join(map(_digest, self._layers(payload))))
            self.write_bytes(fd, payload)
            self.publish(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(fd)
        with self._lock:
            self._used = (self._used or 0) + self.file_bytes
            self._unseen += self.file_bytes

    def remove(self, key: bytes) -> None:
        """Remove an entry, if it is there and can be removed."""
        path = self.path(key)
        with contextlib.suppress(OSError):
            self._refuse_links(path)
            path.unlink()

    def clean(self) -> None:
        """Remove what writers that are gone have left half-written."""
        for path, _ in self._entries():
            if path.suffix != _TEMPORARY:
                continue
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(fd)

    def used_bytes(self) -> int:
        """Bytes of the files of all namespaces, as they are now, half-written ones included."""
        return sum(status.st_size for _, status in self._entries())

    # ---- single steps of the above, where faults are injected

    @staticmethod
    def temporary_path(path: Path) -> Path:
        """A name in the same directory that no other writer uses."""
        return path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}{_TEMPORARY}")

    def read_bytes(self, path: Path, start: int, size: int) -> bytearray:
        """`size` bytes of a file from `start` on, or fewer: none, unless it is a regular file as long as a whole one."""
        data, filled = bytearray(size), 0
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place must not hold up the open
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_size == self.file_bytes:
                while filled < size and (count := os.preadv(fd, [memoryview(data)[filled:]], start + filled)):
                    filled += count
        finally:
            os.close(fd)
        del data[filled:]
        return data

    @staticmethod
    def write_bytes(fd: int, data: Payload) -> None:
        """Append all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]

    @staticmethod
    def publish(temporary: Path, path: Path) -> None:
        """Make a whole file visible."""
        temporary.replace(path)

    # ---- below

    def _header(self, key: bytes) -> bytes:
        return _HEADER.pack(_MAGIC, self.payload_bytes, key, self.namespace)

    def _digests(self, data: Payload, key: bytes) -> list[bytes] | None:
        """The digests in the header of an entry; None if it is not the header of this key."""
        if len(data) < self.header_bytes or data[: _HEADER.size] != self._header(key):
            return None
        return [bytes(data[start : start + _DIGEST_BYTES]) for start in range(_HEADER.size, self.header_bytes, _DIGEST_BYTES)]

    def _layers(self, payload: Payload) -> list[memoryview]:
        whole = memoryview(payload)
        return [whole[start : start + self.layer_bytes] for start in range(0, self.payload_bytes, self.layer_bytes)]

    def _is_layer(self, data: Payload, digest: bytes) -> bool:
        return len(data) == self.layer_bytes and _digest(data) == digest

    def _bad(self, key: bytes) -> KVTransferError:
        self.remove(key)
        return KVTransferError(f"{self.path(key)} is not a whole block with this key, a file of {self.file_bytes} bytes; removed")

    @staticmethod
    def _mark_used(path: Path) -> None:
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)

    def _make_room(self) -> None:
        """Evict until one more file fits."""
        with self._lock:
            if self._used is None or self._used + self.file_bytes > self.max_bytes or self._unseen > self.max_bytes // _RESCAN_FRACTION:
                entries = list(self._entries())
                self._used, self._unseen = sum(status.st_size for _, status in entries), 0
                if self._used + self.file_bytes > self.max_bytes:
                    self._evict([entry for entry in entries if entry[0].suffix == _SUFFIX])

    def _evict(self, entries: list[tuple[Path, os.stat_result]]) -> None:
        assert self._used is not None
        entries.sort(key=lambda entry: entry[1].st_mtime_ns)
        for path, status in entries:
            if self._used + self.file_bytes <= self.max_bytes - self.max_bytes // _KEEP_FRACTION:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            self._used -= status.st_size

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The files of all namespaces, whole and half-written."""
        if self.root.is_symlink():
            return
        for namespace, _ in _named(self.root, _NAMESPACE_NAME, stat.S_ISDIR):
            for group, _ in _named(namespace, _GROUP_NAME, stat.S_ISDIR):
                for path, status in _named(group, _FILE_NAME, stat.S_ISREG):
                    if path.name.removeprefix(".").startswith(group.name):
                        yield path, status

    def _refuse_links(self, path: Path) -> None:
        """Raises OSError if a directory on the way from `root` to `path` is a symbolic link."""
        for directory in (self.root, path.parent.parent, path.parent):
            if directory.is_symlink():
                raise OSError(errno.ELOOP, "a symbolic link in the place of a directory of ours", str(directory))


def _named(directory: Path, name: re.Pattern[str], is_kind: Callable[[int], bool]) -> Iterator[tuple[Path, os.stat_result]]:
    """What lies in `directory` and has such a name and is of the kind itself, not through a symbolic link."""
    try:
        found = os.listdir(directory)
    except OSError:
        return
    for path in (directory / entry for entry in found if name.fullmatch(entry)):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if is_kind(status.st_mode):
                yield path, status


def _digest(payload: Payload) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
