"""The scheduler half of the peer connector: who holds which reference, which of our blocks are leased, and their generations."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from interlock.core.config import KVCacheConfig, KVTransferConfig
from interlock.core.errors import RequestError
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.kv_transfer.connector import ConnectorRequest
from interlock.kv_transfer.connectors.peer_messages import PeerLoad, PeerMetadata, PeerWorkerMeta
from interlock.kv_transfer.references import (
    RemoteReference,
    check_tokens,
    from_params,
    to_params,
    token_digest,
    wants_remote_decode,
    wants_remote_prefill,
)

logger = logging.getLogger(__name__)

_REMEMBERED_REFERENCES = 65536
_MAX_ID = 200  # characters of a request id that go into a lease id


class PeerConsumer:
    """References that our requests brought. A reference is released when no request of ours can still want it, and then is void."""

    def __init__(self) -> None:
        self._references: dict[str, RemoteReference] = {}
        self._users: Counter[tuple[str, int, str]] = Counter()
        self._used: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        self._wanted: dict[str, RemoteReference] = {}
        self._kept: list[RemoteReference] = []
        self._released: list[RemoteReference] = []

    def add(self, request: ConnectorRequest) -> None:
        """Raises RequestError for a reference that cannot be used."""
        reference = from_params(request.kv_transfer_params or {})
        check_tokens(reference, request.all_token_ids)
        self._references[request.request_id] = reference
        self._users[reference.key] += 1
        if reference.key not in self._used:
            self._kept.append(reference)

    def num_matched(self, request: ConnectorRequest, num_computed_tokens: int) -> int:
        """Positions beyond `num_computed_tokens` that can be read; the last token of a request is always computed here."""
        reference = self._references.get(request.request_id)
        if reference is None:
            return 0
        return max(0, min(reference.num_tokens, request.num_tokens - 1) - num_computed_tokens)

    def allocated(self, request_id: str, num_external_tokens: int) -> None:
        """Read in the next step, or, with everything cached here, not at all."""
        reference = self._references.get(request_id)
        if reference is None:
            return
        if num_external_tokens:
            self._wanted[request_id] = reference
        else:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """The request wants its reference no longer: it has been read, or is not going to be."""
        reference = self._references.pop(request_id, None)
        self._wanted.pop(request_id, None)
        if reference is None:
            return
        self._users[reference.key] -= 1
        if self._users[reference.key] == 0:
            del self._users[reference.key]
            if reference.key not in self._used:
                self._used[reference.key] = None
                self._released.append(reference)
            while len(self._used) > _REMEMBERED_REFERENCES:
                self._used.popitem(last=False)

    def take_loads(self, scheduler_output: SchedulerOutput) -> tuple[PeerLoad, ...]:
        """The promises of the step that are ours to keep."""
        loads = []
        for promise in scheduler_output.load_promises:
            reference = self._wanted.get(promise.req_id)
            if reference is not None:
                void = f"the reference to request {reference.request_id!r} was used before" if reference.key in self._used else None
                loads.append(PeerLoad(promise, reference, void))
        return tuple(loads)

    def take_kept(self) -> tuple[RemoteReference, ...]:
        """New references since the last call."""
        kept, self._kept = tuple(self._kept), []
        return kept

    def take_released(self) -> tuple[RemoteReference, ...]:
        """References to be given back since the last call."""
        released, self._released = tuple(self._released), []
        return released

    @property
    def has_news(self) -> bool:
        """Whether the worker half must hear something even if no request runs."""
        return bool(self._kept or self._released)


class PeerProducer:
    """Blocks of our finished requests, kept for others. A block's generation changes when its last lease ends, before it is free."""

    def __init__(self, engine_id: str, config: KVCacheConfig, lease_seconds: float) -> None:
        self._engine_id = engine_id
        self._block_size = config.block_size
        self._lease_seconds = lease_seconds
        self._epoch: int | None = None
        self._leases: dict[str, tuple[int, ...]] = {}
        self._holders = np.zeros(config.num_blocks, np.int64)
        self._generations = np.zeros(config.num_blocks, np.int64)
        self._granted: list[tuple[str, str]] = []
        self._num_leases = 0
        self._changed: dict[int, int] = {}

    def learn(self, epoch: int | None) -> None:
        """The worker half has registered the pool."""
        self._epoch = epoch

    def grant(self, request: ConnectorRequest, block_ids: Sequence[int], now: float) -> dict[str, Any] | None:
        """Keep the request's blocks, and the parameters that say so; None if there is nothing to keep."""
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = tuple(block_ids[: -(-num_tokens // self._block_size)])
        if not num_tokens or self._epoch is None or request.request_id in self._leases:
            logger.warning(
                "request %r is not handed over: %d computed tokens, epoch %s, leased already: %s",
                request.request_id,
                num_tokens,
                self._epoch,
                request.request_id in self._leases,
            )
            return None
        # Not the request id alone: a notice that comes late or twice must not end the lease of a later request of the same id.
        self._num_leases += 1
        lease_id = f"{request.request_id[:_MAX_ID]}:{self._num_leases}"
        self._leases[request.request_id] = blocks
        self._holders[list(blocks)] += 1
        self._granted.append((lease_id, request.request_id))
        return to_params(
            RemoteReference(
                engine_id=self._engine_id,
                rank=0,
                epoch=self._epoch,
                request_id=lease_id,
                block_ids=blocks,
                generations=tuple(self._generations[list(blocks)].tolist()),
                block_size=self._block_size,
                num_tokens=num_tokens,
                token_digest=token_digest(request.all_token_ids[:num_tokens]),
                expiry=now + self._lease_seconds,
            )
        )

    def end(self, request_id: str) -> None:
        """A lease has ended; reports for unknown requests are ignored."""
        blocks = self._leases.pop(request_id, ())
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._generations[block] += 1
                self._changed[block] = int(self._generations[block])

    def take_granted(self) -> tuple[tuple[str, str], ...]:
        """Leases that began since the last call: their ids, and our requests."""
        granted, self._granted = tuple(self._granted), []
        return granted

    def take_changed(self) -> tuple[tuple[int, int], ...]:
        """Generations that changed since the last call, by block."""
        changed, self._changed = tuple(self._changed.items()), {}
        return changed

    @property
    def has_news(self) -> bool:
        """Whether steps are needed even if no request runs: a lease must be granted or watched, or a generation published."""
        return bool(self._leases or self._changed)


class PeerSchedulerHalf:
    """What `PeerConnector` does with role SCHEDULER."""

    def __init__(self, transfer: KVTransferConfig, config: KVCacheConfig, lease_seconds: float) -> None:
        self.consumer = PeerConsumer()
        self.producer = PeerProducer(transfer.engine_id, config, lease_seconds)
        self._transfer = transfer

    def on_new_request(self, request: ConnectorRequest) -> None:
        """Raises RequestError for hand-off parameters that cannot be used."""
        params = request.kv_transfer_params
        if wants_remote_prefill(params):
            if not self._transfer.is_consumer:
                raise RequestError(f"kv_transfer_params asks for a remote prefill, but this engine's kv_role is {self._transfer.kv_role!r}")
            self.consumer.add(request)
        if wants_remote_decode(params) and not self._transfer.is_producer:
            raise RequestError(f"kv_transfer_params asks for a remote decode, but this engine's kv_role is {self._transfer.kv_role!r}")

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PeerMetadata:
        """See `KVConnector.build_connector_meta`."""
        return PeerMetadata(
            loads=self.consumer.take_loads(scheduler_output),
            leases=self.producer.take_granted(),
            generations=self.producer.take_changed(),
            kept=self.consumer.take_kept(),
            released=self.consumer.take_released(),
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See `KVConnector.update_connector_output`."""
        if isinstance(output.kv_connector_worker_meta, PeerWorkerMeta):
            self.producer.learn(output.kv_connector_worker_meta.epoch)
            for request_id in output.kv_connector_worker_meta.ended_loads:
                self.consumer.release(request_id)
        for request_id in output.finished_sending:
            self.producer.end(request_id)

    def request_finished(self, request: ConnectorRequest, block_ids: Sequence[int], now: float) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnector.request_finished`."""
        self.consumer.release(request.request_id)
        if not wants_remote_decode(request.kv_transfer_params) or request.finish_reason not in ("stop", "length"):
            return False, None
        params = self.producer.grant(request, block_ids, now)
        return params is not None, params
