"""The consumer's side of the shared-memory transport: connections to producers, their pools mapped read-only, notices and heartbeats."""

import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import ITEM_SIZES
from interlock.core.errors import KVTransferError, PeerMismatchError
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.handshake import (
    PROTOCOL_VERSION,
    Done,
    Heartbeat,
    Hello,
    Leases,
    PoolDescription,
    Refused,
    Welcome,
    check_pool,
    check_version,
)
from interlock.kv_transfer.references import RemoteReference
from interlock.kv_transfer.transports.channel import Channel
from interlock.kv_transfer.transports.shared_memory import ControlView, ReadOnlyMapping

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 0.05  # how late an abort may be noticed


class PeerPool:
    """A producer's pool as seen from here. Raises KVTransferError (PeerMismatchError for a peer that does not match) when it is made."""

    def __init__(self, engine_id: str, rank: int, our_engine_id: str, ours: PoolDescription, timeout: float, aborted: Callable[[], bool]) -> None:
        self.channel = Channel.connect(engine_id, rank)
        self._prefaulted = False
        self.lock = threading.Lock()  # one exchange of messages at a time
        try:
            self.channel.send(Hello(version=PROTOCOL_VERSION, engine_id=our_engine_id, pool=ours), timeout=timeout)
            answer = self.channel.receive(timeout, aborted)
            if isinstance(answer, Refused):
                raise PeerMismatchError(answer.reason)
            if not isinstance(answer, Welcome):
                raise KVTransferError(f"engine {engine_id!r} answered with {type(answer).__name__}, expected Welcome")
            check_version(answer.version, engine_id)
            check_pool(ours, answer.pool, engine_id)
            self.epoch = answer.epoch
            self.description = answer.pool
            self.layer_offsets = answer.layer_offsets
            _check_offsets(answer)
            pool_fd, control_fd = self.channel.take_descriptors(2)
            try:
                self._pool = ReadOnlyMapping(pool_fd, answer.pool_bytes)
            except KVTransferError:
                os.close(control_fd)
                raise
            self._control = ControlView(control_fd, answer.pool.num_blocks)
        except BaseException:
            self.channel.close()
            raise

    def prefault(self) -> None:
        """Make the first reads as fast as later ones; done once."""
        if not self._prefaulted:
            self._prefaulted = True
            self._pool.prefault()

    def layer_address(self, layer: int) -> int:
        """Where the layer's `[num_blocks, 2, num_kv_heads, block_size, head_dim]` begins in this process."""
        return self._pool.buffer.address + self.layer_offsets[layer]

    def check_reference(self, reference: RemoteReference) -> None:
        """Raises KVTransferError when the reference cannot be one to this pool."""
        if reference.epoch != self.epoch:
            raise KVTransferError(
                f"the reference is of epoch {reference.epoch} of engine {reference.engine_id!r}, which is in epoch {self.epoch} now"
            )
        if reference.block_size != self.description.block_size:
            raise KVTransferError(
                f"the reference has blocks of {reference.block_size}, engine {reference.engine_id!r} has {self.description.block_size}"
            )
        beyond = [block for block in reference.block_ids if block >= self.description.num_blocks]
        if beyond:
            raise KVTransferError(f"the reference names block {beyond[0]}, engine {reference.engine_id!r} has {self.description.num_blocks}")

    def confirm(self, epoch: int, block_ids: npt.NDArray[np.int64], generations: npt.NDArray[np.int64]) -> str | None:
        """Asked after the last byte: why what was read may not be what was referenced, or None.

        A table that is one behind the reference is right too: the producer writes a generation with its next step, and always
        before it gives the block to anyone else. block_ids, generations: int64 [n].
        """
        ages = self._control.generations[block_ids].astype(np.int64) - generations
        if ages.max() > 0 or ages.min() < -1:
            changed = np.flatnonzero((ages > 0) | (ages < -1))
            return f"the producer gave block {block_ids[int(changed[0])]} away before the read was confirmed (its generation changed)"
        if self._control.epoch != epoch:
            return f"the producer left epoch {epoch} before the read was confirmed"
        if not self.channel.alive:
            return "the connection to the producer was lost before the read was confirmed"
        return None

    def close(self) -> None:
        """Close the connection; the mapping goes with the last copy that uses it."""
        self.channel.close()


class PeerPools:
    """All producers that this engine reads from, and a thread that keeps leases alive and sends notices.

    handshake_timeout, heartbeat_interval: seconds.
    """

    def __init__(self, our_engine_id: str, ours: PoolDescription, clock: Clock, handshake_timeout: float, heartbeat_interval: float) -> None:
        self.failed_notices = 0
        self._our_engine_id = our_engine_id
        self._ours = ours
        self._clock = clock
        self._handshake_timeout = handshake_timeout
        self._heartbeat_interval = heartbeat_interval
        self._pools: dict[tuple[str, int], PeerPool] = {}
        self._peer_locks: dict[tuple[str, int], threading.Lock] = {}
        self._pools_lock = threading.Lock()
        self._condition = threading.Condition()
        self._kept: dict[tuple[str, int, str], RemoteReference] = {}
        self._lease_ends: dict[tuple[str, int, str], float] = {}
        self._notices: list[RemoteReference] = []
        self._new = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="interlock-peer-notices", daemon=True)
        self._thread.start()

    def get(self, reference: RemoteReference, aborted: Callable[[], bool]) -> PeerPool:
        """The pool that a reference is about, connected. Raises KVTransferError."""
        key = _peer(reference)
        with self._pools_lock:
            peer_lock = self._peer_locks.setdefault(key, threading.Lock())
        while not peer_lock.acquire(timeout=_SLICE_SECONDS):
            if aborted():
                raise KVTransferError("the exchange with the peer was given up")
        try:
            pool = self._pools.get(key)
            if pool is not None and (pool.epoch != reference.epoch or not pool.channel.alive):
                pool.close()
                del self._pools[key]
                pool = None
            if pool is None:
                pool = PeerPool(*key, self._our_engine_id, self._ours, self._handshake_timeout, aborted)
                self._pools[key] = pool
        finally:
            peer_lock.release()
        pool.check_reference(reference)
        return pool

    def lease_end(self, reference: RemoteReference) -> float:
        """Until when (the clock's seconds) the producer keeps the blocks, as far as is known here."""
        with self._condition:
            return self._lease_ends.get(reference.key, reference.expiry)

    def keep(self, reference: RemoteReference) -> None:
        """Connect, and extend the lease from now on until `done`."""
        with self._condition:
            self._kept[reference.key] = reference
            self._new = True
            self._condition.notify()

    def done(self, reference: RemoteReference) -> None:
        """Tell the producer that its blocks are needed no longer. Its lease ends them if the notice does not arrive."""
        with self._condition:
            self._kept.pop(reference.key, None)
            self._lease_ends.pop(reference.key, None)
            self._notices.append(reference)
            self._condition.notify()

    def close(self) -> None:
        """Send the notices that are waiting, stop the thread, close all connections. May be called twice."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()
        while self._pools:
            self._pools.popitem()[1].close()

    def _run(self) -> None:
        next_beat = self._clock.now() + self._heartbeat_interval
        while True:
            with self._condition:
                while not (self._stopping or self._notices or self._new) and self._clock.now() < next_beat:
                    self._clock.wait_until(self._condition, next_beat)
                stopping, notices, self._notices = self._stopping, self._notices, []
                due = self._new or self._clock.now() >= next_beat
                kept = sorted(self._kept.values(), key=_peer)
                self._new = False
            for reference in notices:
                self._exchange(reference, functools.partial(_send_done, reference))
            if stopping:
                return
            if due:
                for _, group in itertools.groupby(kept, key=_peer):
                    references = list(group)
                    self._exchange(references[0], functools.partial(self._beat, references))
                next_beat = self._clock.now() + self._heartbeat_interval

    def _exchange(self, reference: RemoteReference, talk: Callable[[PeerPool], None]) -> None:
        try:
            pool = self.get(reference, lambda: self._stopping)
            with pool.lock:
                talk(pool)
        except KVTransferError as error:
            self.failed_notices += 1
            logger.warning("engine %r could not be told about request %r: %s", reference.engine_id, reference.request_id, str(error))

    def _beat(self, references: Sequence[RemoteReference], pool: PeerPool) -> None:
        pool.channel.send(Heartbeat(request_ids=[reference.request_id for reference in references]))
        answer = pool.channel.receive(self._handshake_timeout, lambda: self._stopping)
        if not isinstance(answer, Leases):
            raise KVTransferError(f"a heartbeat was answered with {type(answer).__name__}, expected Leases")
        with self._condition:
            for reference in references:
                if reference.key in self._kept and reference.request_id in answer.expiry:
                    self._lease_ends[reference.key] = answer.expiry[reference.request_id]


def _peer(reference: RemoteReference) -> tuple[str, int]:
    return reference.engine_id, reference.rank


def _send_done(reference: RemoteReference, pool: PeerPool) -> None:
    pool.channel.send(Done(request_id=reference.request_id))
    pool.prefault()  # here, since earlier it would compete with the first read


def _check_offsets(welcome: Welcome) -> None:
    pool = welcome.pool
    if pool.dtype not in ITEM_SIZES:
        raise KVTransferError(f"engine {welcome.engine_id!r} holds KV of dtype {pool.dtype!r}, expected one of {sorted(ITEM_SIZES)}")
    layer_bytes = 2 * pool.num_blocks * pool.num_kv_heads * pool.block_size * pool.head_dim * ITEM_SIZES[pool.dtype]
    if len(welcome.layer_offsets) != pool.num_layers:
        raise KVTransferError(f"engine {welcome.engine_id!r} announces {len(welcome.layer_offsets)} layer offsets for {pool.num_layers} layers")
    if max(welcome.layer_offsets) + layer_bytes > welcome.pool_bytes:
        raise KVTransferError(f"engine {welcome.engine_id!r} announces layers that end beyond its pool of {welcome.pool_bytes} bytes")
