"""What the scheduler half of the storage connector knows of a directory that others write and clean up as well: nothing for long.

Each lookup asks the file system again, on a thread, because a file system may hang.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.connectors.block_files import BlockFiles

_FIRST_WAIT_SECONDS = 0.002  # a healthy file system answers sooner, and the request is then planned in this step
_RECONFIRM_SECONDS = 60.0  # what we have saved may have been evicted by others; then it is saved again
_REMEMBERED_KEYS = 1 << 20
_CLOSE_SECONDS = 1.0

Value = TypeVar("Value")


class _Lookup:
    def __init__(self, keys: tuple[bytes, ...], asked_at: float) -> None:
        self.keys = keys
        self.asked_at = asked_at
        self.count = 0
        self.done = threading.Event()


class StorageIndex:
    """`TierIndex` over `files`. timeout: seconds after which a lookup without an answer, and all others until it has one, are misses.
    A place is 1 where an entry is to be replaced, else 0."""

    def __init__(self, files: BlockFiles, clock: Clock, timeout: float) -> None:
        self._files = files
        self._clock = clock
        self._timeout = timeout
        self._open: OrderedDict[tuple[bytes, ...], _Lookup] = OrderedDict()
        self._saved: OrderedDict[bytes, float] = OrderedDict()
        self._distrusted: OrderedDict[bytes, None] = OrderedDict()
        self._queue: queue.SimpleQueue[_Lookup | bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def count_present(self, keys: Sequence[bytes]) -> int | None:
        """See `TierIndex`."""
        asked, now = tuple(keys), self._clock.now()
        lookup = self._open.get(asked)
        if lookup is None:
            if self._hangs(now):
                return 0
            lookup = self._open[asked] = _Lookup(asked, now)
            self._submit(lookup)
            lookup.done.wait(_FIRST_WAIT_SECONDS)
        if not lookup.done.is_set():
            return 0 if self._hangs(now) else None
        del self._open[asked]
        return next((index for index, key in enumerate(asked[: lookup.count]) if key in self._distrusted), lookup.count)

    def pin(self, keys: Sequence[bytes]) -> None:
        """Others may evict what they like; a load that comes too late fails."""

    def unpin(self, keys: Sequence[bytes]) -> None:
        """See `pin`."""

    def places(self, keys: Sequence[bytes]) -> list[int | None]:
        """See `TierIndex`."""
        return [0] * len(keys)

    def wants(self, key: bytes) -> bool:
        """See `TierIndex`."""
        saved_at = self._saved.get(key)
        return saved_at is None or self._clock.now() - saved_at > _RECONFIRM_SECONDS

    def reserve(self, key: bytes) -> int:
        """See `TierIndex`."""
        _remember(self._saved, key, self._clock.now())
        return 1 if key in self._distrusted else 0

    def commit(self, key: bytes, place: int, stored: bool) -> None:
        """See `TierIndex`."""
        if stored:
            self._distrusted.pop(key, None)
        else:
            self._saved.pop(key, None)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Readers and writers mark the files."""

    def distrust(self, key: bytes) -> None:
        """See `TierIndex`."""
        self._saved.pop(key, None)
        _remember(self._distrusted, key, None)

    def forget(self, key: bytes) -> None:
        """See `TierIndex`. The file goes too, for the sake of others."""
        self.distrust(key)
        self._submit(key)

    def close(self) -> None:
        """See `TierIndex`."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _hangs(self, now: float) -> bool:
        """Whether the file system has left a lookup without an answer for too long."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if now - oldest.asked_at <= self._timeout:
                return False
            if not oldest.done.is_set():
                return True
            del self._open[oldest.keys]  # its request has gone
        return False

    def _submit(self, order: _Lookup | bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="interlock-storage-lookup", daemon=True)
            self._thread.start()
        self._queue.put(order)

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            if isinstance(order, bytes):
                self._files.remove(order)
            else:
                self._look_up(order)

    def _look_up(self, lookup: _Lookup) -> None:
        for key in lookup.keys:
            if not self._files.contains(key):
                break
            lookup.count += 1
        lookup.done.set()


def _remember(memory: "OrderedDict[bytes, Value]", key: bytes, value: Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED_KEYS:
        memory.popitem(last=False)
