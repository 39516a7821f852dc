"""The worker half of the peer connector: serves our pool to peers, and loads from theirs."""

import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from interlock.core.buffer import ITEM_SIZES, Buffer
from interlock.core.config import KVCacheConfig, KVTransferConfig
from interlock.core.errors import KVTransferError
from interlock.core.forward_context import ForwardContext
from interlock.graphs.timeline import Timelines
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.connector import KVConnectorTransferResults
from interlock.kv_transfer.connectors.peer_messages import Lease, PeerLoad, PeerMetadata, PeerWorkerMeta, RefusedPush
from interlock.kv_transfer.connectors.peer_options import PeerOptions
from interlock.kv_transfer.connectors.push_receiver import PushReceiver
from interlock.kv_transfer.connectors.push_sender import PushSender
from interlock.kv_transfer.handshake import Pushed, PushEnded, describe_pool
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.references import KEY_BYTES
from interlock.kv_transfer.transports.copy_worker import CopyWorker, LedgerTarget, LoadTarget, ParkedTarget, PoolShape, Read, ReadJob
from interlock.kv_transfer.transports.desk import PeerDesk, hello
from interlock.kv_transfer.transports.peer_client import PeerPools
from interlock.kv_transfer.transports.pool_server import make_welcome
from interlock.kv_transfer.transports.shared_memory import ControlSegment, KVPool
from interlock.kv_transfer.transports.transport import Copy, PeerAddress, Registration

HEARTBEATS_PER_LEASE = 6
ABORT_SECONDS = 2.0  # how long a step waits for what a transport cannot stop at once; after that its blocks are quarantined


class ConsumerWorker:
    """Loads of promised positions, for steps and for requests that wait outside them. load_timeout: seconds, of the latter."""

    def __init__(self, pools: PeerPools, receiver: PushReceiver | None, clock: Clock, shape: PoolShape, load_timeout: float) -> None:
        self._num_layers = len(shape.layer_addresses)
        self._pools = pools
        self._receiver = receiver
        self._clock = clock
        self._load_timeout = load_timeout
        self._worker = CopyWorker(pools, clock, shape, "interlock-kv-copy")
        self._parked_worker = CopyWorker(pools, clock, shape, "interlock-kv-copy-parked")
        self._lock = threading.Lock()
        self._parked: dict[str, float] = {}
        self._ended: set[str] = set()
        self._finished: dict[str, str | None] = {}
        self._late: set[str] = set()

    def bind(self, metadata: PeerMetadata) -> None:
        """Keep and release references; stop what nobody waits for, and what waits too long."""
        for reference in metadata.kept:
            self._pools.keep(reference)
        for reference in metadata.released:
            self._pools.done(reference)
        now = self._clock.now()
        with self._lock:
            overdue = [req_id for req_id, deadline in self._parked.items() if now >= deadline]
        for req_id in (*metadata.cancelled, *overdue):
            self._parked_worker.give_up(req_id)
            if self._receiver is not None:
                self._receiver.give_up(req_id)

    def start(self, step: int, loads: Sequence[PeerLoad], ledger: Ledger) -> None:
        """Submit the loads that begin with a step."""
        for load in loads:
            if load.void is not None and not load.parked:
                ledger.fail_promise(step, load.promise.req_id, load.void)
        with self._lock:
            self._ended.update(load.promise.req_id for load in loads if not load.parked)
        reads = [self._target(step, load, ledger) for load in loads if load.parked or load.void is None]
        pulled = [Read(load.promise, load.reference, target) for load, target in reads if not load.reference.push and not load.parked]
        if pulled:
            self._worker.submit(ReadJob(step, pulled))
        for load, target in reads:
            key = load.promise.req_id if load.parked else step
            if load.void is not None:
                for layer in range(self._num_layers):
                    target.end_layer(layer, load.void)
            elif load.reference.push:
                if self._receiver is not None:
                    self._receiver.submit(key, load.promise, load.reference, target)
            elif load.parked:
                self._parked_worker.submit(ReadJob(key, [Read(load.promise, load.reference, target)]))

    def abort(self, step: int) -> None:
        """Returns when no load of the step can write any more; or after `ABORT_SECONDS`, and the requests are reported later."""
        self._worker.abort(step, ABORT_SECONDS, self._late_ended)
        if self._receiver is not None:
            self._receiver.abort(step, ABORT_SECONDS, self._late_ended)

    def take_results(self) -> KVConnectorTransferResults:
        """Ends of loads that requests wait for, and of those that a step could not wait for."""
        with self._lock:
            finished, self._finished = self._finished, {}
            late, self._late = self._late, set()
            for req_id in finished:
                del self._parked[req_id]
                self._ended.add(req_id)
        errors = {req_id: error for req_id, error in finished.items() if error is not None}
        return KVConnectorTransferResults(finished_recving=frozenset(finished) | late, failed_recving=frozenset(errors), recving_errors=errors)

    def take_ended(self) -> frozenset[str]:
        """Requests whose loads have ended since the last call; called when the step's loads have ended."""
        with self._lock:
            ended, self._ended = frozenset(self._ended), set()
            return ended

    @property
    def bytes_per_second(self) -> float | None:
        """Of reads, as measured."""
        return self._worker.bytes_per_second or self._parked_worker.bytes_per_second

    def close(self) -> None:
        """Stop the threads."""
        self._worker.close()
        self._parked_worker.close()
        if self._receiver is not None:
            self._receiver.close()

    def _late_ended(self, req_ids: Sequence[str]) -> None:
        with self._lock:
            self._late.update(req_ids)

    def _target(self, step: int, load: PeerLoad, ledger: Ledger) -> tuple[PeerLoad, LoadTarget]:
        if not load.parked:
            return load, LedgerTarget(ledger, step, load.promise)
        req_id = load.promise.req_id

        def ended(error: str | None) -> None:
            with self._lock:
                if error is not None and self._clock.now() >= self._parked[req_id]:
                    error = f"it had not landed within {self._load_timeout:g} s (kv_load_timeout, or lease_seconds of what is pushed): {error}"
                self._finished[req_id] = error

        with self._lock:
            self._parked[req_id] = self._clock.now() + self._load_timeout
        return load, ParkedTarget(self._num_layers, ended)


class PeerWorkerHalf:
    """What `PeerConnector` does with role WORKER. load_timeout: seconds, of loads that requests wait for."""

    def __init__(
        self, transfer: KVTransferConfig, config: KVCacheConfig, clock: Clock, options: PeerOptions, load_timeout: float, copy: Copy
    ) -> None:
        self.consumer: ConsumerWorker | None = None
        self.leases = LeaseTable(clock, options.lease_seconds)
        self.epoch = 1 + secrets.randbelow(2**52)
        self.key = secrets.token_bytes(KEY_BYTES)
        self.desk: PeerDesk | None = None
        self.pools: PeerPools | None = None
        self.sender: PushSender | None = None
        self.receiver: PushReceiver | None = None
        self._transfer = transfer
        self._config = config
        self._clock = clock
        self._options = options
        self._load_timeout = max(load_timeout, options.lease_seconds) if options.push else load_timeout
        self._transport = options.make_transport(f"{transfer.engine_id}-{self.epoch}", config.block_size, config.block_bytes, copy)
        self._pool: KVPool | None = None
        self._written: Timelines | None = None
        self._control: ControlSegment | None = None
        self._closers: list[Callable[[], None]] = []
        self._leased: dict[str, Lease] = {}
        self._ending: set[str] = set()
        self._refused: list[RefusedPush] = []
        self._reported: dict[str, int] = {}

    @property
    def progresses_by_itself(self) -> bool:
        """Whether bytes move without a call from the step's thread."""
        return self._transport.progresses_by_itself

    def register_pool(self, pool: KVPool) -> None:
        """See `KVConnector.register_pool`."""
        self._pool = pool

    def register_timelines(self, written: Timelines) -> None:
        """See `KVConnector.register_timelines`."""
        self._written = written

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        """See `KVConnector.register_kv_caches`. Starts the threads; stops them again if it fails."""
        try:
            self._start(kv_caches)
        except BaseException:
            self.close()
            raise

    def bind(self, metadata: PeerMetadata) -> None:
        """Before the step's launch: nothing reads blocks that were given up, and a block's new generation is out before anything
        overwrites the block."""
        if self.sender is not None:
            self.sender.withdraw(metadata.withdrawn)
            self._refused += metadata.ended
        if self._control is not None:
            for block, generation in metadata.generations:
                self._control.generations[block] = generation
        for lease in metadata.leases:
            self._leased[lease.signature] = lease
            self.leases.grant(lease.signature, lease.request_id)
        if self.consumer is not None:
            self.consumer.bind(metadata)
        if self.sender is not None:
            self.sender.add(metadata.chunks)

    def start(self, context: ForwardContext, metadata: PeerMetadata, ledger: Ledger) -> None:
        """Submit the loads that begin with the step."""
        if metadata.loads:
            assert self.consumer is not None, "loads in an engine that reads nothing"
            self.consumer.start(context.step, metadata.loads, ledger)

    def results(self) -> KVConnectorTransferResults:
        """See `KVConnector.get_transfer_results`. finished_sending: requests whose lease has ended."""
        received = self.consumer.take_results() if self.consumer is not None else KVConnectorTransferResults()
        ended = self._end_pushes()
        self._ending |= self.leases.take_ended()
        for signature in sorted(self._ending):
            lease = self._leased[signature]
            cause = "the producer gave the blocks up before all were pushed"
            if self.sender is not None and lease.transfer is not None and not self.sender.end(lease.transfer, cause):
                continue  # its blocks are kept for as long as they are read
            self._ending.discard(signature)
            del self._leased[signature]
            ended.append(lease.request_id)
        return dataclasses.replace(received, finished_sending=frozenset(ended))

    def _end_pushes(self) -> list[str]:
        """End the pushes that will never be complete, as soon as nothing reads their blocks; whose blocks were kept for it."""
        refused, self._refused = self._refused, []
        ended = []
        for push in refused:
            if self.sender is not None and not self.sender.end(push.transfer, push.cause):
                self._refused.append(push)
            elif push.request_id is not None:
                ended.append(push.request_id)
        return ended

    def worker_meta(self) -> PeerWorkerMeta:
        """See `KVConnector.build_connector_worker_meta`."""
        epoch = self.epoch if self._transfer.is_producer and self.desk is not None else None
        ended, speed = (self.consumer.take_ended(), self.consumer.bytes_per_second) if self.consumer is not None else (frozenset[str](), None)
        return PeerWorkerMeta(epoch, ended, self._transport.host, self._transport.port, self.key, speed)

    def stats(self) -> dict[str, float]:
        """What was counted since the last call."""
        totals = {"peer_leases_expired": self.leases.expired, "peer_notices_unknown": self.leases.unknown_notices}
        if self.desk is not None:
            totals |= {"peers_refused": self.desk.refused, "peers_malformed": self.desk.malformed, "peers_foreign": self.desk.foreign}
        if self.pools is not None:
            totals["peer_notices_failed"] = self.pools.failed_notices
        if self.sender is not None:
            totals["peer_pushes_failed"] = self.sender.failed
        if self.receiver is not None:
            totals["peer_pushes_dropped"] = self.receiver.dropped
        news = {name: float(total - self._reported.get(name, 0)) for name, total in totals.items() if total != self._reported.get(name, 0)}
        self._reported = totals
        return news

    def close(self) -> None:
        """See `KVConnector.shutdown`. Readers that are still there find the epoch gone."""
        self._transport.stop()
        while self._closers:
            self._closers.pop()()
        self._transport.close()

    def _start(self, kv_caches: Mapping[str, Buffer]) -> None:
        missing = [name for name in self._config.layer_names if name not in kv_caches]
        if missing:
            raise KVTransferError(f"register_kv_caches lacks the layers {missing}, expected all of {list(self._config.layer_names)}")
        offsets, pool = self._layer_offsets(kv_caches)
        config, options, transport = self._config, self._options, self._transport
        addresses = [kv_caches[name].address for name in config.layer_names]
        shape = PoolShape(addresses, config.block_size, config.num_kv_heads, config.head_dim * ITEM_SIZES[config.dtype])
        self._control = ControlSegment(config.num_blocks, self.epoch)
        self._closers += [self._control.close, transport.close]
        transport.register(Registration(pool.buffer, self._control.buffer, (pool.fd, self._control.fd)), self._notified)
        secret = options.secret.encode() if options.secret is not None else None
        serves, reaches = self._transfer.is_producer or options.push, self._transfer.is_consumer or options.push
        if reaches:
            ours = hello(self._transfer.engine_id, describe_pool(config), transport.kind)
            interval = options.lease_seconds / HEARTBEATS_PER_LEASE
            self.pools = PeerPools(transport, ours, secret, self._clock, options.handshake_timeout, interval)
            self._closers.append(self.pools.close)
        if options.push and self._transfer.is_producer and self.pools is not None:
            if self._written is None:
                raise KVTransferError("mode is 'write', but no timelines are registered; call register_timelines before register_kv_caches")
            self.sender = PushSender(self.pools, transport, self._written, shape)
            self._closers.append(self.sender.close)
        if serves:
            welcome = make_welcome(self._transfer.engine_id, self.epoch, describe_pool(config), pool.buffer.nbytes, offsets)
            welcome = msgspec.structs.replace(transport.describe(welcome), key=self.key)
            pushed = self._pushed if options.push and self._transfer.is_consumer else None
            self.desk = PeerDesk(welcome, transport.kind, self.leases, secret=secret, pushes=self.sender, pushed=pushed)
            # Closed when nothing of ours can write at a peer any more: a peer that finds nobody listening takes it that way.
            self._closers.insert(1, transport.serve(welcome, 0, self.desk).close)
        if self._transfer.is_consumer and self.pools is not None:
            if options.push:
                here = PeerAddress(self._transfer.engine_id, 0, transport.host, transport.port, self.epoch)
                self.receiver = PushReceiver(self.pools, transport, here, shape)
            self.consumer = ConsumerWorker(self.pools, self.receiver, self._clock, shape, self._load_timeout)
            self._closers.append(self.consumer.close)

    def _notified(self, data: bytes) -> None:
        if self.receiver is not None:
            self.receiver.notified(data)

    def _pushed(self, message: Pushed | PushEnded) -> None:
        if self.receiver is not None:
            self.receiver.pushed(message)

    def _layer_offsets(self, kv_caches: Mapping[str, Buffer]) -> tuple[list[int], KVPool]:
        if self._pool is None or self._pool.fd < 0:
            raise KVTransferError("the KV pool is not shared memory; call register_pool with the result of allocate_pool before register_kv_caches")
        start, nbytes = self._pool.buffer.address, self._pool.buffer.nbytes
        offsets = [kv_caches[name].address - start for name in self._config.layer_names]
        for name, offset in zip(self._config.layer_names, offsets, strict=True):
            if not 0 <= offset <= nbytes - self._config.layer_bytes:
                raise KVTransferError(f"layer {name!r} does not lie in the registered pool of {nbytes} bytes (offset {offset})")
        return offsets, self._pool
