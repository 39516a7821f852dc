"""The scheduler half of the peer connector: who holds which reference, which of our blocks are leased or pushed."""

from collections.abc import Sequence
from typing import Any

from interlock.core.config import KVCacheConfig, KVTransferConfig
from interlock.core.errors import RequestError
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.kv_transfer.connector import ConnectorRequest
from interlock.kv_transfer.connectors.peer_consumer import PeerConsumer
from interlock.kv_transfer.connectors.peer_messages import PeerMetadata, PeerWorkerMeta
from interlock.kv_transfer.connectors.peer_producer import PeerProducer
from interlock.kv_transfer.transfer_params import check_mode, wants_remote_decode, wants_remote_prefill


class PeerSchedulerHalf:
    """What `PeerConnector` does with role SCHEDULER. push: WRITE mode."""

    def __init__(
        self, transfer: KVTransferConfig, config: KVCacheConfig, lease_seconds: float, max_sync_load_seconds: float | None, push: bool
    ) -> None:
        self.consumer = PeerConsumer(config, max_sync_load_seconds, push)
        self.producer = PeerProducer(transfer.engine_id, config, lease_seconds, push)
        self._transfer = transfer
        self._push = push

    def on_new_request(self, request: ConnectorRequest) -> None:
        """Raises RequestError for hand-off parameters that cannot be used."""
        params = request.kv_transfer_params
        prefill, decode = wants_remote_prefill(params), wants_remote_decode(params)
        if prefill and not self._transfer.is_consumer:
            raise RequestError(f"kv_transfer_params asks for a remote prefill, but this engine's kv_role is {self._transfer.kv_role!r}")
        if decode and not self._transfer.is_producer:
            raise RequestError(f"kv_transfer_params asks for a remote decode, but this engine's kv_role is {self._transfer.kv_role!r}")
        if prefill or decode:
            check_mode(params, push=self._push)
        if decode:
            self.producer.add(request)
        if prefill:
            try:
                self.consumer.add(request)
            except RequestError:
                self.producer.refuse(request, "the request was refused")
                raise

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PeerMetadata:
        """See `KVConnector.build_connector_meta`."""
        self.producer.plan(scheduler_output)
        return PeerMetadata(
            loads=self.consumer.take_loads(scheduler_output),
            leases=self.producer.take_granted(),
            generations=self.producer.take_changed(),
            kept=self.consumer.take_kept(),
            released=self.consumer.take_released(),
            cancelled=self.consumer.take_cancelled(),
            chunks=self.producer.take_chunks(),
            withdrawn=self.producer.take_withdrawn(),
            ended=self.producer.take_refused(),
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See `KVConnector.update_connector_output`."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, PeerWorkerMeta):
            self.producer.learn(meta.epoch, meta.key, meta.host, meta.port)
            if meta.bytes_per_second is not None:
                self.consumer.bytes_per_second = meta.bytes_per_second
            for request_id in meta.ended_loads:
                self.consumer.release(request_id)
        for request_id in output.finished_sending:
            self.producer.end(request_id)

    def request_finished(self, request: ConnectorRequest, block_ids: Sequence[int], now: float) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnector.request_finished`."""
        self.consumer.finished(request.request_id)
        if not wants_remote_decode(request.kv_transfer_params):
            return False, None
        if request.finish_reason not in ("stop", "length"):
            return self.producer.refuse_running(request, f"the prefill request ended with {request.finish_reason!r}"), None
        params = self.producer.grant(request, block_ids, now)
        return params is not None, params
