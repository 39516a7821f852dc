"""The worker half of the peer connector: serves our pool to consumers, and reads from the pools of producers."""

import secrets
from collections.abc import Mapping

from interlock.core.buffer import ITEM_SIZES, Buffer
from interlock.core.config import KVCacheConfig, KVTransferConfig
from interlock.core.errors import KVTransferError
from interlock.core.forward_context import ForwardContext
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.connectors.peer_messages import PeerLoad, PeerMetadata, PeerWorkerMeta
from interlock.kv_transfer.handshake import describe_pool
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.transports.copy_worker import Copy, CopyWorker, begin_reads
from interlock.kv_transfer.transports.peer_client import PeerPools
from interlock.kv_transfer.transports.pool_server import PoolServer, make_welcome
from interlock.kv_transfer.transports.shared_memory import ControlSegment, KVPool

HEARTBEATS_PER_LEASE = 6


class ProducerWorker:
    """Our pool as others see it."""

    def __init__(self, transfer: KVTransferConfig, config: KVCacheConfig, pool: KVPool, layer_offsets: list[int], clock: Clock, lease: float) -> None:
        self.epoch = 1 + secrets.randbelow(2**52)
        self.leases = LeaseTable(clock, lease)
        self._control = ControlSegment(config.num_blocks, self.epoch)
        self._leased: dict[str, str] = {}
        welcome = make_welcome(transfer.engine_id, self.epoch, describe_pool(config), pool.buffer.nbytes, layer_offsets)
        try:
            self.server = PoolServer(0, welcome, (pool.fd, self._control.fd), self.leases)
        except KVTransferError:
            self._control.close()
            raise

    def bind(self, metadata: PeerMetadata) -> None:
        """Before the step's launch: a block's new generation is out before anything overwrites the block."""
        for block, generation in metadata.generations:
            self._control.generations[block] = generation
        for lease_id, request_id in metadata.leases:
            self._leased[lease_id] = request_id
            self.leases.grant(lease_id)

    def take_ended(self) -> frozenset[str]:
        """Our requests whose lease has ended since the last call."""
        return frozenset(self._leased.pop(lease_id) for lease_id in self.leases.take_ended())

    def close(self) -> None:
        """Readers that are still there find the epoch gone."""
        self._control.close()
        self.server.close()


class ConsumerWorker:
    """Reads of promised positions from other pools."""

    def __init__(
        self,
        transfer: KVTransferConfig,
        config: KVCacheConfig,
        kv_caches: Mapping[str, Buffer],
        clock: Clock,
        handshake_timeout: float,
        lease: float,
        copy: Copy,
    ) -> None:
        self._num_layers = config.num_layers
        self.pools = PeerPools(transfer.engine_id, describe_pool(config), clock, handshake_timeout, lease / HEARTBEATS_PER_LEASE)
        addresses = [kv_caches[name].address for name in config.layer_names]
        row_bytes = config.head_dim * ITEM_SIZES[config.dtype]
        self._worker = CopyWorker(self.pools, clock, addresses, config.block_size, config.num_kv_heads, row_bytes, copy)
        self._ended: set[str] = set()

    def bind(self, metadata: PeerMetadata) -> None:
        """Keep and release references."""
        for reference in metadata.kept:
            self.pools.keep(reference)
        for reference in metadata.released:
            self.pools.done(reference)

    def start(self, context: ForwardContext, loads: tuple[PeerLoad, ...], ledger: Ledger) -> None:
        """Submit the step's reads."""
        for load in loads:
            self._ended.add(load.promise.req_id)
            if load.void is not None:
                ledger.fail_promise(context.step, load.promise.req_id, load.void)
        reads = {load.promise.req_id: (load.promise, load.reference) for load in loads if load.void is None}
        if reads:
            self._worker.submit(begin_reads(context.step, ledger, reads, self._num_layers))

    def abort(self, step: int) -> None:
        """Returns when no read of the step can write any more."""
        self._worker.abort(step)

    def take_ended(self) -> frozenset[str]:
        """Requests whose reads were submitted since the last call; called when the step's loads have ended."""
        ended, self._ended = frozenset(self._ended), set()
        return ended

    def close(self) -> None:
        """Stop the threads."""
        self._worker.close()
        self.pools.close()


class PeerWorkerHalf:
    """What `PeerConnector` does with role WORKER."""

    def __init__(self, transfer: KVTransferConfig, config: KVCacheConfig, clock: Clock, lease: float, handshake_timeout: float, copy: Copy) -> None:
        self.producer: ProducerWorker | None = None
        self.consumer: ConsumerWorker | None = None
        self._transfer = transfer
        self._config = config
        self._clock = clock
        self._lease = lease
        self._handshake_timeout = handshake_timeout
        self._copy = copy
        self._pool: KVPool | None = None
        self._reported: dict[str, int] = {}

    def register_pool(self, pool: KVPool) -> None:
        """See `KVConnector.register_pool`."""
        self._pool = pool

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        """See `KVConnector.register_kv_caches`. Starts the threads."""
        missing = [name for name in self._config.layer_names if name not in kv_caches]
        if missing:
            raise KVTransferError(f"register_kv_caches lacks the layers {missing}, expected all of {list(self._config.layer_names)}")
        if self._transfer.is_producer:
            offsets = self._layer_offsets(kv_caches)
            assert self._pool is not None
            self.producer = ProducerWorker(self._transfer, self._config, self._pool, offsets, self._clock, self._lease)
        if self._transfer.is_consumer:
            self.consumer = ConsumerWorker(self._transfer, self._config, kv_caches, self._clock, self._handshake_timeout, self._lease, self._copy)

    def bind(self, metadata: PeerMetadata) -> None:
        """See `KVConnector.bind_connector_metadata`."""
        if self.producer is not None:
            self.producer.bind(metadata)
        if self.consumer is not None:
            self.consumer.bind(metadata)

    def finished_sending(self) -> frozenset[str]:
        """Requests whose lease has ended since the last call."""
        return self.producer.take_ended() if self.producer is not None else frozenset()

    def worker_meta(self) -> PeerWorkerMeta:
        """See `KVConnector.build_connector_worker_meta`."""
        epoch = self.producer.epoch if self.producer is not None else None
        return PeerWorkerMeta(epoch, self.consumer.take_ended() if self.consumer is not None else frozenset())

    def stats(self) -> dict[str, float]:
        """What was counted since the last call."""
        totals: dict[str, int] = {}
        if self.producer is not None:
            server, leases = self.producer.server, self.producer.leases
            totals |= {"peer_leases_expired": leases.expired, "peer_notices_unknown": leases.unknown_notices}
            totals |= {"peers_refused": server.refused, "peers_malformed": server.malformed, "peers_foreign": server.foreign}
        if self.consumer is not None:
            totals["peer_notices_failed"] = self.consumer.pools.failed_notices
        news = {name: float(total - self._reported.get(name, 0)) for name, total in totals.items() if total != self._reported.get(name, 0)}
        self._reported = totals
        return news

    def close(self) -> None:
        """See `KVConnector.shutdown`."""
        if self.consumer is not None:
            self.consumer.close()
        if self.producer is not None:
            self.producer.close()

    def _layer_offsets(self, kv_caches: Mapping[str, Buffer]) -> list[int]:
        if self._pool is None or self._pool.fd < 0:
            raise KVTransferError("the KV pool is not shared memory; call register_pool with the result of allocate_pool before register_kv_caches")
        start, nbytes = self._pool.buffer.address, self._pool.buffer.nbytes
        offsets = [kv_caches[name].address - start for name in self._config.layer_names]
        for name, offset in zip(self._config.layer_names, offsets, strict=True):
            if not 0 <= offset <= nbytes - self._config.layer_bytes:
                raise KVTransferError(f"layer {name!r} does not lie in the registered pool of {nbytes} bytes (offset {offset})")
        return offsets
