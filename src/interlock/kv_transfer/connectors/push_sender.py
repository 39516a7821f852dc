"""The producer's pushing threads (WRITE mode), one for each consumer: each layer leaves as soon as the running step has written it.

They wait on the `written` timelines, which signal nodes advance inside a FULL replay too, so no Python of a step is involved. A consumer is
told of a layer's positions only after their last byte, and only if they were not withdrawn meanwhile: so what a consumer that stands still
holds up, and then reads of blocks that have gone to others, counts as nothing, and no step has to wait for it.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from interlock.core.buffer import Buffer
from interlock.core.errors import KVTransferError
from interlock.graphs.timeline import Timelines
from interlock.kv_transfer.connectors.peer_messages import PushChunk
from interlock.kv_transfer.handshake import Announce, Cancel, Pushed, PushEnded, encode
from interlock.kv_transfer.references import TransferName
from interlock.kv_transfer.transfers import copy_descriptors
from interlock.kv_transfer.transports.copy_worker import PoolShape
from interlock.kv_transfer.transports.lanes import Lanes
from interlock.kv_transfer.transports.peer_client import PeerPool, PeerPools
from interlock.kv_transfer.transports.repeats import FirstWarnings
from interlock.kv_transfer.transports.transport import PeerAddress, PeerGoneError, Transport

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 0.02  # how late a withdrawal may be noticed while a layer is waited for
_QUIESCENT_SECONDS = 2.0  # how long blocks are kept from others for what was posted and does not end
_MAX_EARLY = 4096  # announcements of transfers that we have not heard of yet
_REMEMBERED_ENDS = 4096  # of transfers whose announcement may still come


@dataclass(slots=True, eq=False)
class _Push:
    """One transfer. sent: per layer, the positions [announced start, sent) are in place; abort: its posts are to stop; busy: a thread
    is at it; stale: what it is at was withdrawn; cancelled: nobody wants it any more; ending: since when it is to end."""

    name: TransferName
    announcement: Announce | None = None
    chunks: list[PushChunk] = field(default_factory=list)
    kept: list[PushChunk] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    abort: Buffer = field(default_factory=lambda: Buffer.zeros((1,), "int64"))
    busy: bool = False
    stale: bool = False
    cancelled: bool = False
    ending: float | None = None

    @property
    def stopped(self) -> bool:
        return bool(self.abort.numpy()[0])

    def stop(self, stopped: bool) -> None:
        self.abort.numpy()[0] = int(stopped)


@dataclass(slots=True, eq=False)
class _Job:
    push: _Push
    announcement: Announce
    chunks: Sequence[PushChunk]
    over: bool = False


class PushSender:
    """The transfers that we push. written: reached a step's stamp when the step has written the layer."""

    def __init__(self, pools: PeerPools, transport: Transport, written: Timelines, shape: PoolShape) -> None:
        self.failed = 0
        self._pools = pools
        self._transport = transport
        self._written = written
        self._shape = shape
        self._num_layers = len(shape.layer_addresses)
        self._condition = threading.Condition()
        self._warnings = FirstWarnings(logger)
        self._pushes: dict[TransferName, _Push] = {}
        self._early: OrderedDict[TransferName, Announce] = OrderedDict()
        self._over: OrderedDict[TransferName, str] = OrderedDict()
        self._busy: set[int] = set()  # nonces of announcements for which something may be under way
        self._ends: dict[PeerAddress, deque[tuple[Announce, str]]] = {}
        self._stopping = False
        self._lanes = Lanes("interlock-kv-push", self._attend)

    # ---- the step's side

    def withdraw(self, transfers: Sequence[TransferName]) -> None:
        """The blocks of these transfers are about to be given up: nothing of what is read of them from here on counts. They will come
        again. Returns when nothing reads them any more, or, if a consumer holds that up, after `_QUIESCENT_SECONDS`."""
        with self._condition:
            pushes = [self._pushes[name] for name in transfers if name in self._pushes]
            for push in pushes:
                push.stop(True)
            self._wait_idle(pushes)
            for push in pushes:
                push.stale = push.busy
                push.stop(push.busy)
                push.chunks, push.kept = [], []
                if not self._transport.writes:
                    push.sent = []  # what the consumer had not copied yet is gone; what it had, it will not copy again

    def add(self, chunks: Sequence[PushChunk]) -> None:
        """Positions that have KV, or will have it at their stamp."""
        with self._condition:
            for chunk in chunks:
                push = self._pushes.get(chunk.transfer)
                if push is None:
                    self._over.pop(chunk.transfer, None)
                    push = self._pushes[chunk.transfer] = _Push(chunk.transfer)
                    early = self._early.pop(chunk.transfer, None)
                    refusal = self._accept(push, early) if early is not None else None
                    if early is not None and refusal is not None:
                        self._say_end(early, refusal)
                push.chunks.append(chunk)
                self._wake(push)

    def end(self, transfer: TransferName, reason: str) -> bool:
        """A transfer is over; reason: why it is not complete, if it is not. False: something of it is under way, which is told to stop; a
        consumer that stands still can hold that up only for `_QUIESCENT_SECONDS`, and nothing of it counts any more."""
        with self._condition:
            push = self._pushes.get(transfer)
            if push is not None:
                push.stop(True)
                push.stale = False
                push.ending = push.ending or time.monotonic()
                if push.busy and time.monotonic() < push.ending + _QUIESCENT_SECONDS:
                    return False
                del self._pushes[transfer]
            self._over[transfer] = reason
            while len(self._over) > _REMEMBERED_ENDS:
                self._over.popitem(last=False)
            announcement = self._early.pop(transfer, None) if push is None else push.announcement
            if announcement is not None and not (push is not None and self._is_complete(push, announcement)):
                self._say_end(announcement, reason)
            return True

    # ---- the peers' side (`PushBook`)

    def announce(self, message: Announce) -> str | None:
        """See `PushBook.announce`."""
        name = _name(message)
        with self._condition:
            if self._stopping:
                return "the producer is shutting down"
            push = self._pushes.get(name)
            if push is not None:
                return self._accept(push, message)
            if name in self._over:
                return self._over[name]
            if name in self._early:
                return f"transfer {name.transfer_id!r} was announced before"
            if any(other.transfer_id == name.transfer_id for other in self._pushes):
                # Not refused: whoever chose the same id must not keep its owner from meeting the request that is still to come.
                self._warnings.warn(
                    f"transfer {name.transfer_id!r} is announced for another prompt than the one computed here; it waits for its own",
                    "another prompt",
                )
            self._early[name] = message
            while len(self._early) > _MAX_EARLY:
                self._say_end(self._early.popitem(last=False)[1], "too many announcements of transfers that nobody has asked this engine for")
            return None

    def cancel(self, message: Cancel) -> bool:
        """See `PushBook.cancel`."""
        with self._condition:
            for name in [name for name, early in self._early.items() if early.nonce == message.nonce]:
                del self._early[name]
            for push in self._pushes.values():
                if push.announcement is not None and push.announcement.nonce == message.nonce:
                    push.stop(True)
                    push.cancelled = push.busy
                    if not push.busy:
                        push.announcement = None
            return message.nonce not in self._busy and not self._stopping

    def close(self) -> None:
        """Stop pushing. May be called twice."""
        with self._condition:
            self._stopping = True
            for push in self._pushes.values():
                push.stop(True)
        self._lanes.close()

    # ---- the threads, except where the lock is held

    def _is_complete(self, push: _Push, announcement: Announce) -> bool:
        """Whether everything is in the consumer's blocks; it has been told so. Of what it copies for itself nobody here knows."""
        return self._transport.writes and bool(push.sent) and min(push.sent) >= announcement.stop

    def _accept(self, push: _Push, message: Announce) -> str | None:
        if push.announcement is not None:
            return f"transfer {push.name.transfer_id!r} was announced before"
        if message.stop > push.name.num_tokens:
            return f"positions up to {message.stop} of transfer {push.name.transfer_id!r} were announced, its prompt has {push.name.num_tokens}"
        push.announcement = message
        push.stop(False)
        push.chunks = push.kept + push.chunks
        push.kept = []
        push.sent = []
        self._wake(push)
        return None

    def _wait_idle(self, pushes: Sequence[_Push]) -> None:
        if not self._condition.wait_for(lambda: not any(push.busy for push in pushes), _QUIESCENT_SECONDS):
            held = next(push for push in pushes if push.busy)
            self._warnings.warn(
                f"a push of transfer {held.name.transfer_id!r} has not stopped within {_QUIESCENT_SECONDS:g} s: its consumer holds it up",
                "held up",
            )

    def _wake(self, push: _Push) -> None:
        if push.announcement is not None and push.chunks:
            address = _address(push.announcement)
            self._lanes.put(address.key, address)

    def _say_end(self, announcement: Announce, reason: str) -> None:
        address = _address(announcement)
        self._ends.setdefault(address, deque()).append((announcement, reason))
        self._lanes.put(address.key, address)

    def _attend(self, address: PeerAddress) -> None:
        """Whatever there is to do for a consumer."""
        while True:
            with self._condition:
                if self._stopping:
                    return
                jobs = self._take_jobs(address)
                ends = self._ends.pop(address, ())
            if not (jobs or ends):
                return
            for announcement, reason in ends:
                self._tell_end(announcement, reason)
            for layer in range(self._num_layers):
                for job in jobs:
                    if not job.over:
                        self._push_layer(job, layer)
            for job in jobs:
                self._release(job)

    def _take_jobs(self, address: PeerAddress) -> list[_Job]:
        jobs = []
        for push in self._pushes.values():
            announcement = push.announcement
            if announcement is None or not push.chunks or push.stopped or _address(announcement) != address:
                continue
            push.sent = push.sent or [announcement.start] * self._num_layers
            push.busy = True
            self._busy.add(announcement.nonce)
            jobs.append(_Job(push, announcement, push.chunks))
            push.kept += push.chunks
            push.chunks = []
        return jobs

    def _release(self, job: _Job) -> None:
        with self._condition:
            if job.over:
                return
            push, job.over, job.push.busy = job.push, True, False
            self._busy.discard(job.announcement.nonce)
            if push.cancelled:
                push.announcement, push.cancelled = None, False
            elif push.stale:
                push.stop(False)
            push.stale = False
            self._condition.notify_all()

    def _push_layer(self, job: _Job, layer: int) -> None:
        push, announcement = job.push, job.announcement
        try:
            pool = self._pools.get(_address(announcement), lambda: push.stopped)
            pool.check_epoch(announcement.epoch)
            for chunk in job.chunks:
                with self._condition:
                    if push.stopped:
                        break
                    start, stop = max(push.sent[layer], chunk.start), min(chunk.stop, announcement.stop)
                if start < stop and self._wait_written(push, layer, chunk.stamp):
                    self._move(pool, push, announcement, chunk, layer, start, stop)
                    with self._condition:
                        if not push.stopped:
                            push.sent[layer] = stop
        except KVTransferError as error:
            stopped = push.stopped
            push.stop(True)
            if not stopped:
                self.failed += 1
                logger.warning("transfer %r could not be pushed to engine %r: %s", push.name.transfer_id, announcement.engine_id, str(error))
                self._tell_end(announcement, f"the producer could not push: {error}")
        if push.stopped:
            self._release(job)

    def _wait_written(self, push: _Push, layer: int, stamp: int) -> bool:
        while not push.stopped:
            if self._written.wait(layer, stamp, _SLICE_SECONDS):
                return True
        return False

    def _move(self, pool: PeerPool, push: _Push, announcement: Announce, chunk: PushChunk, layer: int, start: int, stop: int) -> None:
        """Positions [start, stop) of a layer, and word of it behind the last byte."""
        shape = self._shape
        if not self._transport.writes:
            blocks = slice(start // shape.block_size, -(-stop // shape.block_size))
            message = Pushed(
                transfer_id=push.name.transfer_id,
                nonce=announcement.nonce,
                layer=layer,
                start=start,
                stop=stop,
                block_ids=list(chunk.block_ids[blocks]),
                generations=list(chunk.generations[blocks]),
            )
            self._pools.tell(_address(announcement), message)
            return
        size = pool.description.block_size
        if len(announcement.block_ids) != -(-announcement.stop // size) - announcement.start // size:
            raise KVTransferError(f"{len(announcement.block_ids)} blocks were announced for positions [{announcement.start}, {announcement.stop})")
        pool.check_blocks(announcement.block_ids)
        offsets = copy_descriptors(
            start,
            stop,
            announcement.block_ids[start // size - announcement.start // size :],
            size,
            chunk.block_ids,
            shape.block_size,
            shape.num_kv_heads,
            shape.row_bytes,
        )
        message = Pushed(transfer_id=push.name.transfer_id, nonce=announcement.nonce, layer=layer, start=start, stop=stop)
        descriptors = offsets + np.array([pool.layer_address(layer), shape.layer_addresses[layer], 0], np.int64)
        pool.memory.post("write", descriptors, push.abort).wait(lambda: push.stopped)
        with self._condition:
            if push.stopped:
                raise KVTransferError("the push was withdrawn")
            pool.memory.tell(encode(message))

    def _tell_end(self, announcement: Announce, reason: str) -> None:
        try:
            self._pools.tell(_address(announcement), PushEnded(transfer_id=announcement.transfer_id, nonce=announcement.nonce, reason=reason[:4000]))
        except PeerGoneError:
            logger.info("engine %r is gone; transfer %r has ended here", announcement.engine_id, announcement.transfer_id)
        except KVTransferError as error:
            logger.warning("engine %r could not be told of the end of transfer %r: %s", announcement.engine_id, announcement.transfer_id, str(error))


def _name(announcement: Announce) -> TransferName:
    return TransferName(announcement.transfer_id, announcement.num_tokens, announcement.token_digest)


def _address(announcement: Announce) -> PeerAddress:
    return PeerAddress(announcement.engine_id, announcement.rank, announcement.host, announcement.port, announcement.epoch)
