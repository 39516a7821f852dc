"""The consumer's side of WRITE mode: announces blocks to producers, and takes in what they push, layer by layer.

Where the transport writes, a notification behind the last byte says that positions are in place. Where it does not (shared memory), the
producer says that they are written in its own blocks, and they are copied from there and confirmed by the blocks' generations.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from interlock.core.buffer import Buffer
from interlock.core.errors import KVTransferError
from interlock.core.step import LoadPromise
from interlock.kv_transfer.handshake import Announce, Announced, Cancel, Cancelled, Pushed, PushEnded, decode
from interlock.kv_transfer.references import MAX_EPOCH, RemoteReference
from interlock.kv_transfer.transfers import copy_descriptors
from interlock.kv_transfer.transports.copy_worker import LoadTarget, PoolShape
from interlock.kv_transfer.transports.lanes import Lanes
from interlock.kv_transfer.transports.peer_client import PeerPool, PeerPools, peer_of
from interlock.kv_transfer.transports.repeats import FirstWarnings
from interlock.kv_transfer.transports.transport import PeerAddress, PeerGoneError, Transport

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.1  # how often a producer's connection is looked at while something is awaited from it


@dataclass(slots=True, eq=False)
class Incoming:
    """One promise that a producer fills. landed: per layer, the ranges that are in place; cause: why it was given up; announced: the
    producer, reached as pool, may know of it, in that life and no other; ended: it has said that it pushes no more; meeting: it is being
    met again, over another connection; cancelling: it is being asked to stop."""

    key: int | str
    promise: LoadPromise
    reference: RemoteReference
    target: LoadTarget
    landed: list[list[tuple[int, int]]]
    nonce: int = field(default_factory=lambda: secrets.randbelow(MAX_EPOCH))
    announced: bool = False
    pool: PeerPool | None = None
    ended: bool = False
    meeting: bool = False
    cancelling: bool = False
    cause: str | None = None
    abort: Buffer = field(default_factory=lambda: Buffer.zeros((1,), "int64"))
    quiescent: threading.Event = field(default_factory=threading.Event)
    on_late: Callable[[Sequence[str]], None] | None = None

    @property
    def epoch(self) -> int:
        """The life of the producer in which it was told of this; 0, which is none, if it was not."""
        return self.pool.epoch if self.pool is not None else 0

    def is_missing(self, layer: int) -> bool:
        """Whether promised positions of the layer have not landed."""
        position = self.promise.start
        for start, stop in sorted(self.landed[layer]):
            if start > position:
                return True
            position = max(position, stop)
        return position < self.promise.stop


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    incoming: Incoming
    message: Pushed


class PushReceiver:
    """What is awaited from producers. ours: where our blocks are."""

    def __init__(self, pools: PeerPools, transport: Transport, ours: PeerAddress, shape: PoolShape) -> None:
        self.dropped = 0
        self._pools = pools
        self._transport = transport
        self._ours = ours
        self._shape = shape
        self._num_layers = len(shape.layer_addresses)
        self._lock = threading.RLock()
        self._incoming: dict[int, Incoming] = {}
        self._warnings = FirstWarnings(logger)
        self._lanes: Lanes[Incoming | _Copy] = Lanes("interlock-kv-receive", self._run)
        self._awaits = threading.Condition(self._lock)
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="interlock-kv-receive-watch", daemon=True)
        self._thread.start()

    def submit(self, key: int | str, promise: LoadPromise, reference: RemoteReference, target: LoadTarget) -> None:
        """Have a promise filled; returns at once."""
        incoming = Incoming(key, promise, reference, target, [[] for _ in range(self._num_layers)])
        with self._lock:
            self._incoming[incoming.nonce] = incoming
            self._awaits.notify()
        peer = peer_of(reference)
        if self._lanes.is_busy(peer.key) and self._pools.is_silent(peer):
            self._fail(incoming, f"engine {peer.engine_id!r} gives no sign of life, and holds up what was asked of it before")
        else:
            self._put(incoming, incoming)

    def notified(self, data: bytes) -> None:
        """A transport's notification; what is no message is dropped."""
        try:
            message = decode(data)
        except KVTransferError as error:
            logger.warning("a notification was dropped: %s", str(error))
            return
        if isinstance(message, Pushed):
            self.pushed(message)

    def pushed(self, message: Pushed | PushEnded) -> None:
        """What a producer says. Anything that does not fit what is awaited is counted and dropped."""
        with self._lock:
            incoming = self._incoming.get(message.nonce)
            if incoming is None or incoming.reference.request_id != message.transfer_id:
                self.dropped += 1
                return
            if isinstance(message, PushEnded):
                incoming.ended = True
                self._give_up(incoming, message.reason)
                return
            promise = incoming.promise
            if not (message.layer < self._num_layers and promise.start <= message.start < message.stop <= promise.stop):
                self.dropped += 1
                logger.warning(
                    "layer %d [%d, %d) was pushed for transfer %r, which awaits other positions",
                    message.layer,
                    message.start,
                    message.stop,
                    message.transfer_id,
                )
                return
            if self._transport.writes:
                self._land(incoming, message)
                return
        self._put(incoming, _Copy(incoming, message))

    def abort(self, key: int | str, timeout: float, on_late: Callable[[Sequence[str]], None]) -> None:
        """Give up what belongs to `key`, and return when none of it can be written any more. See `CopyWorker.abort`."""
        given_up, deadline = self._of(key), time.monotonic() + timeout
        for incoming in given_up:
            self._give_up(incoming, "the load was given up")
        for incoming in given_up:
            if not incoming.quiescent.wait(max(0.0, deadline - time.monotonic())):
                with self._lock:
                    if not incoming.quiescent.is_set():
                        incoming.on_late = on_late

    def give_up(self, key: int | str) -> None:
        """As `abort`, without waiting."""
        for incoming in self._of(key):
            self._give_up(incoming, "the load was given up")

    def close(self) -> None:
        """Stop the threads. May be called twice."""
        with self._lock:
            self._stopping = True
            self._awaits.notify()
            for incoming in self._incoming.values():
                incoming.cause = incoming.cause or "the engine shuts down"
                incoming.abort.numpy()[0] = 1
        self._thread.join()
        self._lanes.close()

    # ---- below: the threads, except where the lock is held

    def _of(self, key: int | str) -> list[Incoming]:
        with self._lock:
            return [incoming for incoming in self._incoming.values() if incoming.key == key]

    def _put(self, incoming: Incoming, task: Incoming | _Copy) -> None:
        self._lanes.put(peer_of(incoming.reference).key, task)

    def _run(self, task: Incoming | _Copy) -> None:
        incoming = task.incoming if isinstance(task, _Copy) else task
        try:
            if isinstance(task, _Copy):
                self._copy(incoming, task.message)
            elif incoming.cause is not None:
                if incoming.nonce in self._incoming:
                    self._cancel(incoming)
            elif not incoming.announced:
                self._announce(incoming)
            else:
                self._meet_again(incoming)
        except Exception as error:
            logger.exception("transfer %r failed", incoming.reference.request_id)
            self._give_up(incoming, f"the receiving thread raised {type(error).__name__}: {error}")

    def _announce(self, incoming: Incoming) -> None:
        promise = incoming.promise
        message = Announce(
            transfer_id=incoming.reference.request_id,
            nonce=incoming.nonce,
            engine_id=self._ours.engine_id,
            rank=self._ours.rank,
            epoch=self._ours.epoch,
            host=self._ours.host,
            port=self._ours.port,
            start=promise.start,
            stop=promise.stop,
            block_ids=list(promise.block_ids),
            num_tokens=incoming.reference.num_tokens,
            token_digest=incoming.reference.token_digest,
        )
        try:
            peer = peer_of(incoming.reference)
            incoming.pool = self._pools.get(peer, lambda: incoming.cause is not None)
            incoming.pool.lease_of(incoming.reference)
        except KVTransferError as error:
            self._fail(incoming, str(error))
            return
        with self._lock:
            if incoming.nonce not in self._incoming:
                return
            incoming.announced = True
        try:
            answer = self._pools.ask(peer, message, lambda: self._stopping)  # others use the connection: giving this one up must not close it
        except KVTransferError as error:
            self._give_up(incoming, str(error))
            return
        assert isinstance(answer, Announced)
        if answer.refusal is not None:
            self._fail(incoming, answer.refusal)

    def _meet_again(self, incoming: Incoming) -> None:
        """The connection that it was announced over is gone, and others have made another one, perhaps to another life of the producer."""
        try:
            incoming.pool = self._meet(incoming)
        except KVTransferError as error:
            self._give_up(incoming, str(error))
        incoming.meeting = False

    def _meet(self, incoming: Incoming) -> PeerPool:
        """The producer's pool as it is now. Raises KVTransferError when the producer is in another life than the one that was told."""
        pool = self._pools.get(peer_of(incoming.reference), lambda: incoming.cause is not None)
        pool.check_epoch(incoming.epoch)
        return pool

    def _copy(self, incoming: Incoming, message: Pushed) -> None:
        """Copy positions out of the producer's blocks. Blocks that it had to give up meanwhile it fills again, and says so."""
        shape, promise = self._shape, incoming.promise
        if incoming.cause is not None or not incoming.is_missing(message.layer):
            return
        try:
            pool = self._meet(incoming)
            size = pool.description.block_size
            if not len(message.block_ids) == len(message.generations) == -(-message.stop // size) - message.start // size:
                raise KVTransferError(f"{len(message.block_ids)} blocks were named for positions [{message.start}, {message.stop})")
            pool.check_blocks(message.block_ids)
            offsets = copy_descriptors(
                message.start,
                message.stop,
                promise.block_ids[message.start // shape.block_size - promise.start // shape.block_size :],
                shape.block_size,
                [0] * (message.start // size) + message.block_ids,
                size,
                shape.num_kv_heads,
                shape.row_bytes,
            )
            descriptors = offsets + np.array([shape.layer_addresses[message.layer], pool.layer_address(message.layer), 0], np.int64)
            pool.memory.post("read", descriptors, incoming.abort).wait(lambda: incoming.cause is not None)
            void = pool.confirm(incoming.epoch, np.array(message.block_ids), np.array(message.generations))
        except KVTransferError as error:
            self._give_up(incoming, str(error))
            return
        if void is None:
            with self._lock:
                self._land(incoming, message)
        elif not pool.alive:
            self._give_up(incoming, void)
        else:
            logger.info("transfer %r, layer %d: %s; it comes again", incoming.reference.request_id, message.layer, void)

    def _land(self, incoming: Incoming, message: Pushed) -> None:
        if incoming.cause is not None or not incoming.is_missing(message.layer):
            return
        incoming.landed[message.layer].append((message.start, message.stop))
        if not incoming.is_missing(message.layer):
            incoming.target.end_layer(message.layer)
            if not any(incoming.is_missing(layer) for layer in range(self._num_layers)):
                self._forget(incoming)

    def _give_up(self, incoming: Incoming, cause: str) -> None:
        """The producer is to stop first; the load has failed when it has."""
        with self._lock:
            if incoming.cause is None and incoming.nonce in self._incoming:
                if not incoming.announced:
                    self._fail(incoming, cause)
                    return
                incoming.cause = cause
                incoming.abort.numpy()[0] = 1
                incoming.cancelling = True
                self._put(incoming, incoming)

    def _cancel(self, incoming: Incoming) -> None:
        """Until the producer says that it has stopped, or is gone: one that is only silent may still write. Where only we write our blocks,
        its answer does not matter."""
        if not self._transport.writes:
            self._fail(incoming, incoming.cause or "")
        ended = not incoming.announced
        if incoming.ended:
            ended = self._drained()
        elif not ended and not self._stopping:
            ended = self._ask_to_stop(incoming)
        incoming.cancelling = False
        if ended:
            self._fail(incoming, incoming.cause or "")

    def _ask_to_stop(self, incoming: Incoming) -> bool:
        """Whether nothing of the producer's can come any more."""
        peer = peer_of(incoming.reference)
        try:
            answer = self._pools.ask(peer, Cancel(transfer_id=incoming.reference.request_id, nonce=incoming.nonce), lambda: self._stopping)
        except PeerGoneError:
            return self._drained()
        except KVTransferError as error:
            self._warnings.warn(
                f"transfer {incoming.reference.request_id!r} could not be cancelled yet, and may still be pushed: {error}", str(peer.key)
            )
            return False
        if not (isinstance(answer, Cancelled) and answer.nonce == incoming.nonce and answer.ended):
            return False
        lost = incoming.pool is None or not incoming.pool.alive  # asked now: the answer may have come over another connection
        return self._drained() if lost else True

    def _drained(self) -> bool:
        """Take in what a producer that sends no more had sent."""
        if self._transport.writes:
            self._transport.drain()
        return True

    def _watch(self) -> None:
        """While something is awaited: ask those who were told to stop and have not, and notice who is lost."""
        while True:
            with self._lock:
                self._awaits.wait_for(lambda: self._stopping or self._incoming)
                self._awaits.wait_for(lambda: self._stopping, _WATCH_SECONDS)
                if self._stopping:
                    return
                awaited = list(self._incoming.values())
            for incoming in awaited:
                if incoming.cause is not None:
                    if not incoming.cancelling:
                        incoming.cancelling = True
                        self._put(incoming, incoming)
                elif not incoming.announced or (incoming.pool is not None and incoming.pool.alive):
                    continue
                elif not self._pools.is_alive(peer_of(incoming.reference)):
                    self._give_up(incoming, "the connection to the producer was lost before it had pushed everything")
                elif not incoming.meeting:
                    incoming.meeting = True
                    self._put(incoming, incoming)

    def _fail(self, incoming: Incoming, cause: str) -> None:
        """Nothing can write its blocks any more."""
        with self._lock:
            if incoming.nonce not in self._incoming:
                return
            incoming.cause = incoming.cause or cause
            incoming.abort.numpy()[0] = 1
            for layer in range(self._num_layers):
                if incoming.is_missing(layer):
                    incoming.target.end_layer(layer, incoming.cause)
            self._forget(incoming)

    def _forget(self, incoming: Incoming) -> None:
        """Its layers have ended: who gives it up meanwhile waits for that, or hears of it."""
        del self._incoming[incoming.nonce]
        incoming.quiescent.set()
        if incoming.on_late is not None:
            incoming.on_late([incoming.promise.req_id])
