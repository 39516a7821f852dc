"""The consumer's reading threads, one for each producer: they post reads layer by layer, confirm each, and report its end."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.errors import KVTransferError
from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.references import RemoteReference
from interlock.kv_transfer.transfers import copy_descriptors
from interlock.kv_transfer.transports.lanes import Lanes
from interlock.kv_transfer.transports.peer_client import PeerPool, PeerPools, peer_of
from interlock.kv_transfer.transports.transport import Descriptors, PeerAddress, Transfer

logger = logging.getLogger(__name__)

_POSTED_AHEAD = 4  # layers in flight, where a post does not wait for its end
_SMOOTHING = 0.3  # weight of the newest sample of the speed


class LoadTarget(Protocol):
    """Who is told how a load goes. Each layer ends once."""

    def end_layer(self, layer: int, error: str | None = None) -> None:
        """All promised positions of a layer have landed and are confirmed, or the cause why they have not."""


class LedgerTarget:
    """A load that a step consumes: one transfer of the ledger per layer."""

    def __init__(self, ledger: Ledger, step: int, promise: LoadPromise) -> None:
        self._ledger = ledger
        layers = range(ledger.num_layers)
        self._transfers = [ledger.begin_transfer(step, promise.req_id, layer, promise.start, promise.stop) for layer in layers]

    def end_layer(self, layer: int, error: str | None = None) -> None:
        """See `LoadTarget.end_layer`."""
        self._ledger.end_transfer(self._transfers[layer], error)


class ParkedTarget:
    """A load that a request waits for outside the steps. on_end(error) is called once, when all layers have ended."""

    def __init__(self, num_layers: int, on_end: Callable[[str | None], None]) -> None:
        self._open = set(range(num_layers))
        self._error: str | None = None
        self._on_end = on_end
        self._lock = threading.Lock()

    def end_layer(self, layer: int, error: str | None = None) -> None:
        """See `LoadTarget.end_layer`."""
        with self._lock:
            if layer not in self._open:
                return
            self._open.discard(layer)
            self._error = self._error or error
            if self._open:
                return
        self._on_end(self._error)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Our pool, as transfers see it. layer_addresses: where each layer begins; row_bytes: one head's vector at one position."""

    layer_addresses: Sequence[int]
    block_size: int
    num_kv_heads: int
    row_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        return 2 * len(self.layer_addresses) * self.num_kv_heads * self.row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One promise to be read from one reference."""

    promise: LoadPromise
    reference: RemoteReference
    target: LoadTarget


@dataclass(slots=True, eq=False)
class ReadJob:
    """Reads that are given up together. `abort` is seen between any two copies; `quiescent` says that no byte will be written any more.
    parts: producers whose reads have not ended."""

    key: int | str
    reads: Sequence[Read]
    parts: "set[_Part]" = field(default_factory=set)
    abort: Buffer = field(default_factory=lambda: Buffer.zeros((1,), "int64"))
    quiescent: threading.Event = field(default_factory=threading.Event)
    on_late: Callable[[Sequence[str]], None] | None = None

    @property
    def aborted(self) -> bool:
        """Whether the reads were given up."""
        return bool(self.abort.numpy()[0])

    def give_up(self) -> None:
        """Set the abort word."""
        self.abort.numpy()[0] = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """A read whose producer is connected. offsets `[n, 3]`: the same in every layer; block_ids, generations: int64, of the blocks read."""

    read: Read
    pool: PeerPool
    offsets: Descriptors
    block_ids: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    opened: _Opened
    layer: int
    transfer: Transfer


@dataclass(slots=True, eq=False)
class _Part:
    """What a job reads from one producer."""

    job: ReadJob
    reads: Sequence[Read]
    begun: bool = False


class CopyWorker:
    """Makes the reads of jobs: those from one producer in order of their submission, those from different ones side by side."""

    def __init__(self, pools: PeerPools, clock: Clock, shape: PoolShape, name: str) -> None:
        self.bytes_per_second: float | None = None
        self._pools = pools
        self._clock = clock
        self._shape = shape
        self._lock = threading.Lock()
        self._jobs: dict[int | str, ReadJob] = {}
        self._lanes = Lanes(name, self._run)

    def submit(self, job: ReadJob) -> None:
        """Have reads made; returns at once. Those from a producer that stands still, and holds earlier ones up, fail."""
        groups: dict[PeerAddress, list[Read]] = {}
        for read in job.reads:
            groups.setdefault(peer_of(read.reference), []).append(read)
        parts = {peer: _Part(job, reads) for peer, reads in groups.items()}
        job.parts.update(parts.values())
        with self._lock:
            self._jobs[job.key] = job
        for peer, part in parts.items():
            if self._lanes.is_busy(peer.key) and self._pools.is_silent(peer):
                self._drop(part, f"engine {peer.engine_id!r} gives no sign of life, and holds up what was read before")
            else:
                self._lanes.put(peer.key, part)

    def abort(self, key: int | str, timeout: float, on_late: Callable[[Sequence[str]], None]) -> None:
        """Stop a job's reads, and return when none of them can write any more. Nothing happens if they have ended.

        A transport that cannot stop what a peer holds up may take longer than `timeout` seconds; `on_late` is then called at its end, with
        the ids of its requests.
        """
        with self._lock:
            job = self._jobs.get(key)
        if job is None:
            return
        job.give_up()
        for part in list(job.parts):
            self._drop(part, "the read was stopped before it began")
        if not job.quiescent.wait(timeout):
            with self._lock:
                if not job.quiescent.is_set():
                    job.on_late = on_late

    def give_up(self, key: int | str) -> None:
        """Stop a job's reads without waiting for it."""
        with self._lock:
            job = self._jobs.get(key)
        if job is not None:
            job.give_up()

    def close(self) -> None:
        """Stop all reads and the threads. May be called twice."""
        with self._lock:
            for job in self._jobs.values():
                job.give_up()
        self._lanes.close()

    def _run(self, part: _Part) -> None:
        job = part.job
        with self._lock:
            if part.begun:
                return
            part.begun = True
        try:
            self._execute(job, part.reads)
        except Exception as error:
            logger.exception("the reads of %s failed", job.key)
            for read in part.reads:
                self._end(read, 0, f"the copy thread raised {type(error).__name__}: {error}")
        finally:
            self._over(part)

    def _drop(self, part: _Part, cause: str) -> None:
        """End what has not begun."""
        with self._lock:
            if part.begun:
                return
            part.begun = True
        for read in part.reads:
            self._end(read, 0, cause)
        self._over(part)

    def _over(self, part: _Part) -> None:
        job = part.job
        with self._lock:
            job.parts.discard(part)
            on_late = job.on_late if not job.parts else None
            if not job.parts:
                del self._jobs[job.key]
                job.quiescent.set()
        if on_late is not None:
            on_late([read.promise.req_id for read in job.reads])

    def _execute(self, job: ReadJob, reads: Sequence[Read]) -> None:
        began = self._clock.now()
        live = [opened for read in reads if (opened := self._open(job, read)) is not None]
        in_flight: deque[_InFlight] = deque()
        try:
            self._read_layers(job, live, in_flight)
        finally:
            for item in in_flight:  # something unforeseen was raised: these must not write any more when that is told
                with contextlib.suppress(Exception):
                    item.transfer.wait(lambda: True)
        if live:
            self._measure(sum(int(opened.offsets[:, 2].sum()) for opened in live) * len(self._shape.layer_addresses), began)

    def _read_layers(self, job: ReadJob, live: list[_Opened], in_flight: deque[_InFlight]) -> None:
        """Read all layers of what is live; what fails is taken out of `live`."""
        for layer, local_address in enumerate(self._shape.layer_addresses):
            for opened in list(live):
                descriptors = opened.offsets + np.array([local_address, opened.pool.layer_address(layer), 0], np.int64)
                try:
                    if job.aborted:
                        raise KVTransferError("the read was stopped")
                    in_flight.append(_InFlight(opened, layer, opened.pool.memory.post("read", descriptors, job.abort)))
                except KVTransferError as error:
                    self._settle(job, live, in_flight, 0)
                    if opened in live:
                        live.remove(opened)
                        self._end(opened.read, layer, str(error))
                self._settle(job, live, in_flight, _POSTED_AHEAD * len(live))
        self._settle(job, live, in_flight, 0)

    def _settle(self, job: ReadJob, live: list[_Opened], in_flight: deque[_InFlight], ahead: int) -> None:
        """Confirm, in order, what has ended; wait for what exceeds `ahead`."""
        while in_flight and (len(in_flight) > ahead or in_flight[0].transfer.done):
            item = in_flight.popleft()
            error = self._confirm(job, item)
            if item.opened not in live:
                continue
            if error is None:
                item.opened.read.target.end_layer(item.layer)
            else:
                live.remove(item.opened)
                self._settle(job, live, in_flight, 0)  # its later layers must not write any more when its end is told
                self._end(item.opened.read, item.layer, error)

    def _confirm(self, job: ReadJob, item: _InFlight) -> str | None:
        """Wait for the last byte, then ask whether it is what the reference meant. Returns the cause of a failure."""
        reference = item.opened.read.reference
        try:
            item.transfer.wait(lambda: job.aborted)
            if self._clock.now() >= item.opened.pool.our_seconds(self._pools.lease_end(reference)):
                return "the producer's lease of the blocks ended before the read was confirmed"
            return item.opened.pool.confirm(reference.epoch, item.opened.block_ids, item.opened.generations)
        except KVTransferError as error:
            return str(error)

    def _open(self, job: ReadJob, read: Read) -> _Opened | None:
        promise, reference = read.promise, read.reference
        try:
            if job.aborted:
                raise KVTransferError("the read was given up before it began")
            if promise.stop > reference.num_tokens:
                raise KVTransferError(f"the reference holds {reference.num_tokens} positions, [{promise.start}, {promise.stop}) were asked for")
            pool = self._pools.get(peer_of(reference), lambda: job.aborted)
            pool.check_reference(reference)
        except KVTransferError as error:
            self._end(read, 0, str(error))
            return None
        remote_size = pool.description.block_size
        shape = self._shape
        offsets = copy_descriptors(
            promise.start,
            promise.stop,
            promise.block_ids,
            shape.block_size,
            reference.block_ids,
            remote_size,
            shape.num_kv_heads,
            shape.row_bytes,
        )
        used = slice(promise.start // remote_size, -(-promise.stop // remote_size))
        return _Opened(read, pool, offsets, np.array(reference.block_ids[used]), np.array(reference.generations[used]))

    def _end(self, read: Read, first_layer: int, error: str) -> None:
        for layer in range(first_layer, len(self._shape.layer_addresses)):
            read.target.end_layer(layer, error)

    def _measure(self, nbytes: int, began: float) -> None:
        seconds = self._clock.now() - began
        if seconds > 0:
            speed = nbytes / seconds
            self.bytes_per_second = speed if self.bytes_per_second is None else _SMOOTHING * speed + (1 - _SMOOTHING) * self.bytes_per_second
