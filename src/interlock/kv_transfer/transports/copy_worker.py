"""The consumer's copy thread: executes reads layer by layer, without the GIL while bytes move, and reports each end to the ledger."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.errors import KVTransferError
from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.references import RemoteReference
from interlock.kv_transfer.transfers import copy_descriptors
from interlock.kv_transfer.transports.peer_client import PeerPool, PeerPools

logger = logging.getLogger(__name__)

Copy = Callable[[npt.NDArray[np.int64], Buffer], int]
"""`copy(descriptors, abort)`: copies `[n, 3]` of (destination address, source address, bytes) in order, without the GIL, until the
word `abort` (int64 [1]) is not 0. Returns how many were copied."""


@dataclass(frozen=True, slots=True)
class Read:
    """One promise to be read from one reference. transfer_ids: of the ledger, one per layer."""

    promise: LoadPromise
    reference: RemoteReference
    transfer_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class ReadJob:
    """The reads of one step. `abort` is seen between any two copies; `quiescent` says that no byte will be written any more."""

    step: int
    ledger: Ledger
    reads: Sequence[Read]
    abort: Buffer = field(default_factory=lambda: Buffer.zeros((1,), "int64"))
    quiescent: threading.Event = field(default_factory=threading.Event)

    @property
    def aborted(self) -> bool:
        """Whether the step has given its loads up."""
        return bool(self.abort.numpy()[0])

    def give_up(self) -> None:
        """Set the abort word."""
        self.abort.numpy()[0] = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """A read whose producer is connected. offsets `[n, 3]`: the same in every layer; block_ids, generations: int64, of the blocks read."""

    read: Read
    pool: PeerPool
    offsets: npt.NDArray[np.int64]
    block_ids: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]


class CopyWorker:
    """One thread. layer_addresses: where each layer of our pool begins; block_size, num_kv_heads, row_bytes (one head's vector at one
    position): of our pool."""

    def __init__(
        self,
        pools: PeerPools,
        clock: Clock,
        layer_addresses: Sequence[int],
        block_size: int,
        num_kv_heads: int,
        row_bytes: int,
        copy: Copy,
    ) -> None:
        self._pools = pools
        self._clock = clock
        self._layer_addresses = layer_addresses
        self._block_size = block_size
        self._num_kv_heads = num_kv_heads
        self._row_bytes = row_bytes
        self._copy = copy
        self._lock = threading.Lock()
        self._jobs: dict[int, ReadJob] = {}
        self._queue: queue.SimpleQueue[ReadJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="interlock-kv-copy", daemon=True)
        self._thread.start()

    def submit(self, job: ReadJob) -> None:
        """Have a step's reads made; returns at once."""
        with self._lock:
            self._jobs[job.step] = job
        self._queue.put(job)

    def abort(self, step: int) -> None:
        """Stop a step's reads, and return when none of them can write any more. Nothing happens if they have ended."""
        with self._lock:
            job = self._jobs.get(step)
        if job is not None:
            job.give_up()
            job.quiescent.wait()

    def close(self) -> None:
        """Stop all reads and the thread. May be called twice."""
        with self._lock:
            for job in self._jobs.values():
                job.give_up()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._execute(job)
            except Exception as error:
                logger.exception("the reads of step %d failed", job.step)
                for read in job.reads:
                    _end(job, read, range(len(read.transfer_ids)), f"the copy thread raised {type(error).__name__}: {error}")
            finally:
                with self._lock:
                    del self._jobs[job.step]
                job.quiescent.set()

    def _execute(self, job: ReadJob) -> None:
        live = [opened for read in job.reads if (opened := self._open(job, read)) is not None]
        for layer, local_address in enumerate(self._layer_addresses):
            for opened in list(live):
                error = self._read_layer(job, opened, layer, local_address)
                if error is None:
                    job.ledger.end_transfer(opened.read.transfer_ids[layer])
                else:
                    live.remove(opened)
                    _end(job, opened.read, range(layer, len(self._layer_addresses)), error)

    def _open(self, job: ReadJob, read: Read) -> _Opened | None:
        promise, reference = read.promise, read.reference
        try:
            if job.aborted:
                raise KVTransferError("the read was given up before it began")
            if promise.stop > reference.num_tokens:
                raise KVTransferError(f"the reference holds {reference.num_tokens} positions, [{promise.start}, {promise.stop}) were asked for")
            pool = self._pools.get(reference, lambda: job.aborted)
        except KVTransferError as error:
            _end(job, read, range(len(read.transfer_ids)), str(error))
            return None
        remote_size = pool.description.block_size
        offsets = copy_descriptors(
            promise.start,
            promise.stop,
            promise.block_ids,
            self._block_size,
            reference.block_ids,
            remote_size,
            self._num_kv_heads,
            self._row_bytes,
        )
        used = slice(promise.start // remote_size, -(-promise.stop // remote_size))
        return _Opened(read, pool, offsets, np.array(reference.block_ids[used]), np.array(reference.generations[used]))

    def _read_layer(self, job: ReadJob, opened: _Opened, layer: int, local_address: int) -> str | None:
        """Copy, then confirm. Returns the cause of a failure."""
        descriptors = opened.offsets + np.array([local_address, opened.pool.layer_address(layer), 0], np.int64)
        if self._copy(descriptors, job.abort) < len(descriptors):
            return "the read was stopped"
        if self._clock.now() >= self._pools.lease_end(opened.read.reference):
            return "the producer's lease of the blocks ended before the read was confirmed"
        return opened.pool.confirm(opened.read.reference.epoch, opened.block_ids, opened.generations)


def begin_reads(step: int, ledger: Ledger, reads: Mapping[str, tuple[LoadPromise, RemoteReference]], num_layers: int) -> ReadJob:
    """Enter reads, by request id, into the ledger: one transfer per promise and layer."""
    return ReadJob(
        step,
        ledger,
        [
            Read(promise, reference, [ledger.begin_transfer(step, req_id, layer, promise.start, promise.stop) for layer in range(num_layers)])
            for req_id, (promise, reference) in reads.items()
        ],
    )


def _end(job: ReadJob, read: Read, layers: range, error: str) -> None:
    for layer in layers:
        job.ledger.end_transfer(read.transfer_ids[layer], error)
