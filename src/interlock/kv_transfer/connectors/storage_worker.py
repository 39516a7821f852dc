"""The worker half of the storage connector: reads files on threads that may hang, and writes copies of blocks.

A file is read and verified in memory of our own and copied into the pool only while its load still counts, so a load that was given up
writes nothing, however late its read returns. A save takes a copy of the block at once, within a bound, so that a slow disk never holds
blocks of the pool.
"""

import logging
import queue
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.config import KVCacheConfig
from interlock.core.errors import KVTransferError
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.connectors.block_files import BlockFiles
from interlock.kv_transfer.connectors.host_tier import CopyThread
from interlock.kv_transfer.connectors.tier_messages import EndedLoad, TierLoad, TierSave
from interlock.kv_transfer.connectors.tier_reports import TierReports
from interlock.kv_transfer.ledger import Ledger

logger = logging.getLogger(__name__)

_READERS = 2
_MAX_STUCK_READERS = 16  # threads that hang in a read and have been replaced; beyond that, loads wait for their deadline
_FLUSH_SECONDS = 10.0


class _Read:
    """A load from files. One that a step consumes goes layer by layer, and the ledger hears of each block of a layer; any other goes block
    by block. The lock is held while bytes go into the pool, and when the load ends.

    count: its first blocks that can still land; problem: why the others cannot; num_landed: those that have, in all layers; layer, digests:
    where the next reader goes on; reading: the block whose file is being read; seconds: spent in reading.
    """

    def __init__(self, load: TierLoad, step: int, ledger: Ledger, num_layers: int, deadline: float) -> None:
        self.load = load
        self.step = step
        self.ledger = ledger
        self.deadline = deadline
        self.lock = threading.Lock()
        self.over = False
        self.replaced = False
        self.reading: int | None = None
        self.count = len(load.block_ids)
        self.problem: str | None = None
        self.num_landed = 0
        self.bad_keys: tuple[bytes, ...] = ()
        self.layer = 0
        self.digests: list[list[bytes]] = []  # per block, per layer
        self.seconds = 0.0
        size = (load.stop - load.start) // self.count
        starts = range(load.start, load.stop, size) if load.synchronous else ()
        self.transfers = {
            (index, layer): ledger.begin_transfer(step, load.req_id, layer, start, start + size)
            for index, start in enumerate(starts)
            for layer in range(num_layers)
        }

    def landed(self, index: int) -> None:
        """The layer of a block stands in the pool. The lock is held."""
        self.reading = None
        self.ledger.end_transfer(self.transfers.pop((index, self.layer)))

    def end_transfers(self, error: str | None) -> None:
        """What has not landed has failed. The lock is held."""
        while self.transfers:
            self.ledger.end_transfer(self.transfers.popitem()[1], error)


class StorageWorker:
    """`TierWorker` over `files`. read_timeout: seconds after which an asynchronous load is given up; staging_bytes: of blocks that are
    to be written; what does not fit is not saved."""

    def __init__(self, config: KVCacheConfig, files: BlockFiles, clock: Clock, read_timeout: float, staging_bytes: int) -> None:
        self.reports = TierReports()
        self._files = files
        self._clock = clock
        self._read_timeout = read_timeout
        self._staging_bytes = staging_bytes
        self._num_layers = config.num_layers
        self._block_bytes = config.block_bytes
        self._layers: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        self._reads: dict[int, _Read] = {}
        self._staged = 0
        self._stuck = 0
        self._queue: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._writer: CopyThread | None = None

    def register(self, layers: Sequence[Buffer]) -> None:
        """See `TierWorker`. Also removes what dead writers have left."""
        self._layers = [layer.numpy().view(np.uint8).reshape(layer.shape[0], self._block_bytes) for layer in layers]
        try:
            self._files.clean()
        except OSError as error:
            logger.warning("what dead writers may have left in %s is not removed: %s", self._files.root, error)
        self._writer = CopyThread("interlock-storage-write")
        for _ in range(_READERS):
            self._add_reader()

    def load(self, load: TierLoad, step: int, ledger: Ledger) -> None:
        """See `TierWorker`."""
        read = _Read(load, step, ledger, self._num_layers, self._clock.now() + self._read_timeout)
        with self._lock:
            self._reads[load.load_id] = read
        self._queue.put(read)

    def save(self, saves: Sequence[TierSave]) -> None:
        """Copy the blocks, and have the copies written."""
        assert self._writer is not None, "the tier is used before register"
        for save in saves:
            size = self._files.payload_bytes
            with self._lock:
                room = self._staged + size <= self._staging_bytes
                self._staged += size if room else 0
            if room:
                payload = np.concatenate([layer[save.block_id] for layer in self._layers])
                self._writer.submit(lambda save=save, payload=payload: self._write(save, payload), urgent=False)  # type: ignore[misc]
                self.reports.release_saves([save.save_id])
            else:
                self.reports.end_saves([save.save_id], stored=False)

    def abort(self, step: int) -> None:
        """See `TierWorker`."""
        for read in self._open_reads():
            if read.load.synchronous and read.step == step:
                self._give_up(read, "the load was given up")

    def poll(self) -> None:
        """Give up what is past its deadline."""
        reads = self._open_reads()
        now = self._clock.now() if reads else 0.0
        for read in reads:
            if not read.load.synchronous and now >= read.deadline:
                self._give_up(read, f"it was not read within {self._read_timeout:g} s (read_timeout)")

    def close(self) -> None:
        """Write what is staged, for a bounded time, and stop. A thread that hangs is left behind. May be called twice."""
        for read in self._open_reads():
            self._give_up(read, "the engine shuts down")
        for _ in self._readers:
            self._queue.put(None)
        if self._writer is not None:
            self._writer.close(_FLUSH_SECONDS)
        for reader in self._readers:
            reader.join(0.1)

    # ---- readers

    def _add_reader(self) -> None:
        self._readers = [reader for reader in self._readers if reader.is_alive()]
        self._readers.append(threading.Thread(target=self._run_reader, name="interlock-storage-read", daemon=True))
        self._readers[-1].start()

    def _run_reader(self) -> None:
        while (read := self._queue.get()) is not None:
            try:
                if read.load.synchronous:
                    self._read_layer(read)
                else:
                    self._read_blocks(read)
            except Exception as error:
                logger.exception("the load of request %s from storage failed", read.load.req_id)
                self._end(read, read.num_landed, f"the read thread raised {type(error).__name__}: {error}")
            if read.replaced:
                with self._lock:
                    self._stuck -= 1
                return

    def _read_layer(self, read: _Read) -> None:
        """The next layer of all blocks; then the load goes to the end of the queue, behind the same layer of other loads."""
        began = self._clock.now()
        for index in range(read.count):
            if not self._begin_read(read, index):
                return
            key, block_id = read.load.keys[index], read.load.block_ids[index]
            try:
                if read.layer == 0:
                    read.digests.append(self._files.read_digests(key))
                data = self._files.read_layer(key, read.layer, read.digests[index][read.layer])
            except (OSError, KVTransferError) as error:
                self._miss(read, index, error)
                break
            with read.lock:
                if read.over:
                    return
                self._layers[read.layer][block_id] = np.frombuffer(data, np.uint8)
                read.landed(index)
        read.seconds += self._clock.now() - began
        read.layer += 1
        if read.count and read.layer < self._num_layers:
            self._queue.put(read)
        else:
            self._end(read, read.count, None)

    def _read_blocks(self, read: _Read) -> None:
        """All blocks, each with all its layers."""
        began = self._clock.now()
        for index, (key, block_id) in enumerate(zip(read.load.keys, read.load.block_ids, strict=True)):
            if not self._begin_read(read, index):
                return
            try:
                payload = np.frombuffer(self._files.read(key), np.uint8).reshape(self._num_layers, self._block_bytes)
            except (OSError, KVTransferError) as error:
                self._miss(read, index, error)
                break
            with read.lock:
                if read.over:
                    return
                for layer, part in zip(self._layers, payload, strict=True):
                    layer[block_id] = part
                read.reading, read.num_landed = None, index + 1
        read.seconds += self._clock.now() - began
        self._end(read, read.count, None)

    def _begin_read(self, read: _Read, index: int) -> bool:
        """A file is about to be read; False if the load has been given up."""
        with read.lock:
            read.reading = index
            return not read.over

    def _miss(self, read: _Read, index: int, error: Exception) -> None:
        """A block cannot be read: those before it still land."""
        logger.warning("a block of request %s is not loaded: %s", read.load.req_id, error)
        with read.lock:
            read.reading = None
            if not read.over:
                read.bad_keys = (read.load.keys[index],)
                read.count, read.problem = index, str(error)

    def _end(self, read: _Read, num_landed: int, error: str | None) -> None:
        with read.lock:
            if read.over:
                return
            read.num_landed = num_landed
            if num_landed:
                self.reports.note_speed(num_landed * self._files.payload_bytes, read.seconds)
            self._report(read, error)

    def _give_up(self, read: _Read, error: str) -> None:
        """End a load whatever its read does; returns when it writes nothing any more. A read that hangs makes its key a miss."""
        with read.lock:
            if read.over:
                return
            hangs = read.reading is not None
            with self._lock:
                read.replaced = hangs and self._stuck < _MAX_STUCK_READERS
                self._stuck += read.replaced
            if read.reading is not None:
                read.bad_keys = (read.load.keys[read.reading],)
            self._report(read, error)
        logger.warning("the load of request %s from storage was given up: %s", read.load.req_id, error)
        if read.replaced:
            self._add_reader()

    def _report(self, read: _Read, error: str | None) -> None:
        """The load is over. The step that waits for it hears of its bad keys as well: they are a miss before it is made again. Who gives it up
        meanwhile waits for the lock, so that no transfer is open then."""
        read.over = True
        self.reports.end_load(EndedLoad(read.load, read.num_landed, read.bad_keys))
        read.end_transfers(read.problem if error is None else error)
        with self._lock:
            del self._reads[read.load.load_id]

    def _open_reads(self) -> list[_Read]:
        with self._lock:
            return list(self._reads.values())

    # ---- writer

    def _write(self, save: TierSave, payload: npt.NDArray[np.uint8]) -> None:
        stored = False
        try:
            self._files.write(save.key, payload.data, replace=bool(save.place))
            stored = True
        except OSError as error:
            logger.warning("a block could not be saved to %s: %s", self._files.root, error)
        except Exception:
            logger.exception("a block could not be saved to %s", self._files.root)
        finally:
            with self._lock:
                self._staged -= len(payload)
            self.reports.store_save(save.save_id, stored)
