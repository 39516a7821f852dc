"""The peers of an engine, over whatever transport: connections, their pools, exchanges of messages, notices and heartbeats.

A peer that stands still delays nobody but those who want something from it.
"""

import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from interlock.core.errors import KVTransferError
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.handshake import ANSWERS, Done, Heartbeat, Hello, Leases, Message, Welcome, check_pool, check_welcome
from interlock.kv_transfer.references import RemoteReference, verify
from interlock.kv_transfer.transports.desk import introduce
from interlock.kv_transfer.transports.lanes import Lanes
from interlock.kv_transfer.transports.repeats import FirstWarnings
from interlock.kv_transfer.transports.transport import Connection, PeerAddress, PeerGoneError, Transport

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 0.05  # how late an abort may be noticed

_Key = tuple[str, int, str | None, int | None]


class PeerPool:
    """A peer's pool as seen from here. Raises KVTransferError (PeerMismatchError for a peer that does not match) when it is made."""

    def __init__(
        self,
        transport: Transport,
        peer: PeerAddress,
        ours: Hello,
        secret: bytes | None,
        clock: Clock,
        timeout: float,
        aborted: Callable[[], bool],
    ) -> None:
        self.lock = threading.Lock()  # one exchange of messages at a time
        asked = clock.now()
        self.connection, welcome = _meet(transport, peer, ours, secret, timeout, aborted)
        self._ahead = welcome.now - asked
        try:
            check_pool(ours.pool, welcome.pool, peer.engine_id)
            check_welcome(welcome)
            self.engine_id = peer.engine_id
            self.epoch = welcome.epoch
            self.key = welcome.key
            self.description = welcome.pool
            self.layer_offsets = welcome.layer_offsets
            self.memory = transport.open(self.connection, welcome)
        except BaseException:
            self.connection.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the peer was there, as far as is known at this moment."""
        return self.connection.alive

    def our_seconds(self, theirs: float) -> float:
        """When, by our clock, the peer's clock will show `theirs`, or a little earlier: by as much as the introduction took."""
        return theirs - self._ahead

    def layer_address(self, layer: int) -> int:
        """Where the layer's `[num_blocks, 2, num_kv_heads, block_size, head_dim]` begins, as descriptors name it."""
        return self.memory.address + self.layer_offsets[layer]

    def check_reference(self, reference: RemoteReference) -> None:
        """Raises KVTransferError when the reference is not one to this pool, exactly as the peer gave it."""
        self.check_epoch(reference.epoch)
        if reference.block_size != self.description.block_size:
            raise KVTransferError(
                f"the reference has blocks of {reference.block_size}, engine {reference.engine_id!r} has {self.description.block_size}"
            )
        self.check_blocks(reference.block_ids)
        verify(self.key, reference)

    def check_epoch(self, epoch: int) -> None:
        """Raises KVTransferError when another life of the peer is meant."""
        if epoch != self.epoch:
            raise KVTransferError(f"epoch {epoch} of engine {self.engine_id!r} is meant, which is in epoch {self.epoch} now")

    def lease_of(self, reference: RemoteReference) -> str:
        """What the peer calls the reference's lease. Raises KVTransferError for a reference that it has not given."""
        if not reference.push:
            self.check_epoch(reference.epoch)
        return verify(self.key, reference)

    def check_blocks(self, block_ids: Sequence[int]) -> None:
        """Raises KVTransferError for blocks that the peer does not have."""
        beyond = [block for block in block_ids if block >= self.description.num_blocks]
        if beyond:
            raise KVTransferError(f"the reference names block {beyond[0]}, engine {self.engine_id!r} has {self.description.num_blocks}")

    def confirm(self, epoch: int, block_ids: npt.NDArray[np.int64], generations: npt.NDArray[np.int64]) -> str | None:
        """Asked after the last byte: why what was read may not be what was referenced, or None.

        A table that is one behind the reference is right too: the producer writes a generation with its next step, and always
        before it gives the block to anyone else. block_ids, generations: int64 [n].
        """
        now_epoch, now = self.memory.control(block_ids)
        ages = now - generations
        if ages.max() > 0 or ages.min() < -1:
            changed = np.flatnonzero((ages > 0) | (ages < -1))
            return f"the producer gave block {block_ids[int(changed[0])]} away before the read was confirmed (its generation changed)"
        if now_epoch != epoch:
            return f"the producer left epoch {epoch} before the read was confirmed"
        if not self.alive:
            return "the connection to the producer was lost before the read was confirmed"
        return None

    def close(self) -> None:
        """Close the connection, and let go of the memory."""
        self.connection.close()
        self.memory.close()


class PeerPools:
    """All peers that this engine reaches, and a thread that keeps leases alive and sends notices.

    ours: our introduction; secret: shared with the peers, or None; handshake_timeout, heartbeat_interval: seconds.
    """

    def __init__(
        self, transport: Transport, ours: Hello, secret: bytes | None, clock: Clock, handshake_timeout: float, heartbeat_interval: float
    ) -> None:
        self.failed_notices = 0
        self._transport = transport
        self._ours = ours
        self._secret = secret
        self._clock = clock
        self._handshake_timeout = handshake_timeout
        self._heartbeat_interval = heartbeat_interval
        self._lanes: Lanes[Callable[[], None]] = Lanes("interlock-peer-notices", lambda talk: talk())
        self._beating: set[_Key] = set()
        self._pools: dict[_Key, PeerPool] = {}
        self._silent: set[_Key] = set()
        self._peer_locks: dict[_Key, threading.Lock] = {}
        self._pools_lock = threading.Lock()
        self._condition = threading.Condition()
        self._kept: dict[str, RemoteReference] = {}
        self._lease_ends: dict[str, float] = {}
        self._warnings = FirstWarnings(logger)
        self._notices: list[RemoteReference] = []
        self._new = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="interlock-peer-heartbeats", daemon=True)
        self._thread.start()

    def get(self, peer: PeerAddress, aborted: Callable[[], bool]) -> PeerPool:
        """The pool of a peer, connected; in the life that the peer is in now, whichever was asked for. Raises KVTransferError."""
        peer = self._at(peer)
        key = peer.key
        peer_lock = self._lock_peer(key, aborted)
        try:
            pool = self._pools.get(key)
            if pool is not None and (not pool.alive or self._has_restarted(pool, peer, aborted)):
                self._let_go(key, pool)
                pool = None
            if pool is None:
                pool = PeerPool(self._transport, peer, self._ours, self._secret, self._clock, self._handshake_timeout, aborted)
                self._pools[key] = pool
                self._silent.discard(key)
        except PeerGoneError:
            self._silent.discard(key)
            raise
        finally:
            peer_lock.release()
        return pool

    def is_alive(self, peer: PeerAddress) -> bool:
        """Whether the connection to a peer stands. Does not connect."""
        pool = self._pools.get(self._at(peer).key)
        return pool is not None and pool.alive

    def is_silent(self, peer: PeerAddress) -> bool:
        """Whether a peer that was there stands still, as far as is known at this moment."""
        key = self._at(peer).key
        pool = self._pools.get(key)
        return key in self._silent or (pool is not None and pool.connection.silent)

    def ask(self, peer: PeerAddress, message: Message, aborted: Callable[[], bool]) -> Message:
        """Send a message and return its answer, of the type that belongs to it. Raises KVTransferError; a connection whose answer did not
        come, or that brought one too many, is not used again."""
        pool, answer, expected = self.get(peer, aborted), None, ANSWERS[type(message)]
        with pool.lock:
            try:
                if not pool.connection.has_unasked():
                    pool.connection.send(message, self._handshake_timeout)
                    answer = pool.connection.receive(self._handshake_timeout, aborted)
            except KVTransferError:
                if pool.alive and not aborted():
                    self._silent.add(self._at(peer).key)
                pool.connection.close()
                raise
            if isinstance(answer, expected):
                return answer
            pool.connection.close()
            said = "sent a message unasked" if answer is None else f"answered {type(message).__name__} with {type(answer).__name__}"
            raise KVTransferError(f"engine {peer.engine_id!r} {said}, expected {expected.__name__} and only that; the connection was closed")

    def tell(self, peer: PeerAddress, message: Message) -> None:
        """Send a message that has no answer. Raises KVTransferError."""
        pool = self.get(peer, lambda: self._stopping)
        with pool.lock:
            pool.connection.send(message, self._handshake_timeout)

    def lease_end(self, reference: RemoteReference) -> float:
        """Until when (seconds of the producer's clock) it keeps the blocks, as far as is known here."""
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
        self._lanes.close()
        while self._pools:
            self._pools.popitem()[1].close()

    def _at(self, peer: PeerAddress) -> PeerAddress:
        """Where peers are found by their id alone, a host that a request names makes no other peer."""
        return peer if self._transport.host is not None else dataclasses.replace(peer, host=None, port=None)

    def _lock_peer(self, key: _Key, aborted: Callable[[], bool]) -> threading.Lock:
        """The peer's lock, held. Raises KVTransferError when it was given up."""
        while True:
            with self._pools_lock:
                peer_lock = self._peer_locks.setdefault(key, threading.Lock())
            while not peer_lock.acquire(timeout=_SLICE_SECONDS):
                if aborted():
                    raise KVTransferError("the exchange with the peer was given up")
            if self._peer_locks.get(key) is peer_lock:
                return peer_lock
            peer_lock.release()  # it went with a pool that is gone

    def _let_go(self, key: _Key, pool: PeerPool) -> None:
        """Called with the peer's lock held. Who still uses the pool meets errors, never memory that is another's."""
        if pool.connection.silent:
            self._silent.add(key)
        del self._pools[key]
        pool.close()

    def _sweep(self) -> None:
        """Let go of peers that are gone, each on its own lane."""
        for key in list(self._peer_locks):
            pool = self._pools.get(key)
            if pool is None:
                self._forget(key)
            elif not pool.alive and not self._lanes.is_busy(key):
                self._lanes.put(key, functools.partial(self._forget, key))

    def _forget(self, key: _Key) -> None:
        """Nothing happens where somebody is at the peer just now: the next heartbeat comes."""
        peer_lock = self._peer_locks.get(key)
        if peer_lock is None or not peer_lock.acquire(blocking=False):
            return
        try:
            pool = self._pools.get(key)
            if self._peer_locks.get(key) is not peer_lock or (pool is not None and pool.alive):
                return
            if pool is not None:
                if not pool.lock.acquire(blocking=False):
                    return
                self._let_go(key, pool)
                pool.lock.release()
            del self._peer_locks[key]
        finally:
            peer_lock.release()

    def _has_restarted(self, pool: PeerPool, peer: PeerAddress, aborted: Callable[[], bool]) -> bool:
        """Whether a peer that seems alive is in another life. A reference may say so wrongly, and others use the connection: so the peer
        is asked, over another one."""
        if peer.epoch in (0, pool.epoch):
            return False
        connection, welcome = _meet(self._transport, peer, self._ours, self._secret, self._handshake_timeout, aborted)
        connection.close()
        return welcome.epoch != pool.epoch

    def _run(self) -> None:
        next_beat = self._clock.now() + self._heartbeat_interval
        while True:
            with self._condition:
                while not (self._stopping or self._notices or self._new) and self._clock.now() < next_beat:
                    self._clock.wait_until(self._condition, next_beat)
                stopping, notices, self._notices = self._stopping, self._notices, []
                due = self._new or self._clock.now() >= next_beat
                kept = sorted(self._kept.values(), key=lambda reference: str(_order(reference)))
                self._new = False
            for reference in notices:
                self._lanes.put(peer_of(reference).key, functools.partial(self._exchange, reference, functools.partial(self._send_done, reference)))
            if stopping:
                return
            if due:
                self._sweep()
                for peer, group in itertools.groupby(kept, key=_order):
                    if peer not in self._beating:
                        self._beating.add(peer)
                        self._lanes.put(peer, functools.partial(self._beat_all, peer, list(group)))
                next_beat = self._clock.now() + self._heartbeat_interval

    def _beat_all(self, key: _Key, references: Sequence[RemoteReference]) -> None:
        try:
            self._exchange(references[0], functools.partial(self._beat, references))
        finally:
            self._beating.discard(key)

    def _exchange(self, reference: RemoteReference, talk: Callable[[PeerAddress], None]) -> None:
        try:
            talk(peer_of(reference))
        except KVTransferError as error:
            self.failed_notices += 1
            self._warnings.warn(f"engine {reference.engine_id!r} could not be told about its leases: {error}")

    def _send_done(self, reference: RemoteReference, peer: PeerAddress) -> None:
        lease = self._lease(self.get(peer, lambda: self._stopping), reference)
        if lease is None:
            return
        self.tell(peer, Done(signature=lease))
        if not reference.push:
            self.get(peer, lambda: self._stopping).memory.prefault()  # here, since earlier it would compete with the first read

    def _beat(self, references: Sequence[RemoteReference], peer: PeerAddress) -> None:
        pool = self.get(peer, lambda: self._stopping)
        leases = {reference.key: lease for reference in references if (lease := self._lease(pool, reference)) is not None}
        if not leases:
            return
        answer = self.ask(peer, Heartbeat(signatures=list(leases.values())), lambda: self._stopping)
        assert isinstance(answer, Leases)
        with self._condition:
            for key, lease in leases.items():
                if key in self._kept and lease in answer.expiry:
                    self._lease_ends[key] = answer.expiry[lease]

    def _lease(self, pool: PeerPool, reference: RemoteReference) -> str | None:
        """None, and the reference is not kept any longer, if the peer has not given it."""
        try:
            return pool.lease_of(reference)
        except KVTransferError as error:
            self._warnings.warn(str(error), f"not given by {reference.engine_id}")
            with self._condition:
                self._kept.pop(reference.key, None)
            return None


def peer_of(reference: RemoteReference) -> PeerAddress:
    """Where the engine of a reference is."""
    return PeerAddress(reference.engine_id, reference.rank, reference.host, reference.port, reference.epoch)


def _meet(
    transport: Transport, peer: PeerAddress, ours: Hello, secret: bytes | None, timeout: float, aborted: Callable[[], bool]
) -> tuple[Connection, Welcome]:
    """A connection on which both sides have introduced themselves. Raises KVTransferError."""
    connection = transport.connect(peer, timeout, aborted)
    try:
        welcome = introduce(
            lambda message: connection.send(message, timeout), lambda: connection.receive(timeout, aborted), peer.engine_id, ours, secret
        )
    except BaseException:
        connection.close()
        raise
    return connection, welcome


def _order(reference: RemoteReference) -> _Key:
    return peer_of(reference).key
