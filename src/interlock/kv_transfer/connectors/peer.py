"""The peer connector: a prompt's KV goes from the pool of a prefill engine into that of a decode engine, layer by layer.

READ mode: a request with `do_remote_decode` leaves its blocks under a lease when it ends, and its answer carries `kv_transfer_params`. A
request that brings these (`do_remote_prefill`) to another engine has its KV read, one-sided, into the promised positions and no others.

WRITE mode: both requests carry a `transfer_id` and may be sent at once (or one after the other, as in READ mode). The decode engine
announces the blocks that it has allocated; the prefill engine fills them, each layer as soon as the running step has written it.
Shared memory is the exception in how, not in when: there the decode engine copies what it is told of.

A load is consumed by the step that schedules its request (the step waits on the rung that its mode has), or, where that would stall the
batch longer than `max_sync_load_seconds`, the request waits for it outside the steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.errors import ConfigError, LifecycleError
from interlock.core.forward_context import ForwardContext
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.graphs.copy import COPY_LIST, copy_list
from interlock.graphs.timeline import Timelines
from interlock.kernels import native
from interlock.kv_transfer.clock import Clock, MonotonicClock
from interlock.kv_transfer.connector import ConnectorRequest, KVConnector, KVConnectorRole, KVConnectorTransferResults
from interlock.kv_transfer.connectors.peer_messages import PeerMetadata
from interlock.kv_transfer.connectors.peer_options import PeerOptions
from interlock.kv_transfer.connectors.peer_scheduler import PeerSchedulerHalf
from interlock.kv_transfer.connectors.peer_worker import PeerWorkerHalf
from interlock.kv_transfer.references import valid_engine_id
from interlock.kv_transfer.transports.shared_memory import KVPool


class PeerConnector(KVConnector):
    """See the module; `kv_connector_extra_config` holds `PeerOptions`."""

    supports_timelines = True
    saves_layers = False
    hands_over = True
    clock: ClassVar[Clock] = MonotonicClock()

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        options = PeerOptions.parse(self.kv_transfer_config.kv_connector_extra_config)
        lease = options.lease_seconds
        self._scheduler: PeerSchedulerHalf | None = None
        self._worker: PeerWorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = PeerSchedulerHalf(self.kv_transfer_config, kv_cache_config, lease, config.max_sync_load_seconds, options.push)
        else:
            self._worker = PeerWorkerHalf(self.kv_transfer_config, kv_cache_config, self.clock, options, config.kv_load_timeout, self.copy)
            self.progresses_by_itself = self._worker.progresses_by_itself

    @classmethod
    def check_options(cls, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        """See `KVConnector.check_options`."""
        transfer = config.kv_transfer_config
        assert transfer is not None
        lease = PeerOptions.parse(transfer.kv_connector_extra_config).lease_seconds
        if not config.kv_load_timeout < lease:
            raise ConfigError(f"kv_load_timeout is {config.kv_load_timeout:g} s, expected less than lease_seconds, which is {lease:g} s")
        if not isinstance(transfer.engine_id, str) or not valid_engine_id(transfer.engine_id):
            raise ConfigError(f"engine_id is {transfer.engine_id!r}, expected up to 64 letters, digits, '_', '.', '-'")

    # ---- scheduler half

    def on_new_request(self, request: ConnectorRequest) -> None:
        """Take the request's reference in. Raises RequestError."""
        self._scheduler_half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What the reference holds beyond the local hit."""
        return self._scheduler_half.consumer.num_matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Load from this step on, or give the reference back."""
        self._scheduler_half.consumer.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PeerMetadata:
        """See `KVConnector.build_connector_meta`."""
        return self._scheduler_half.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `KVConnector.update_connector_output`."""
        self._scheduler_half.update_connector_output(connector_output)

    def request_finished(self, request: ConnectorRequest, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Lease the blocks of a request with `do_remote_decode` that has ended well."""
        return self._scheduler_half.request_finished(request, block_ids, self.clock.now())

    def request_preempted(self, request: ConnectorRequest) -> None:
        """What was pushed stays pushed; the rest comes when it has been computed again."""
        self._scheduler_half.producer.preempted(request)

    def has_pending_push_work(self) -> bool:
        """Leases run, or the worker half has something to be told."""
        return self._scheduler_half.producer.has_news or self._scheduler_half.consumer.has_news

    # ---- worker half

    @staticmethod
    def copy(descriptors: npt.NDArray[np.int64], abort: Buffer) -> int:
        """How bytes of mapped pools are moved: see `Copy`."""
        return copy_list(descriptors, abort)

    def register_pool(self, pool: KVPool) -> None:
        """See `KVConnector.register_pool`."""
        self._worker_half.register_pool(pool)

    def register_timelines(self, written: Timelines) -> None:
        """See `KVConnector.register_timelines`."""
        self._worker_half.register_timelines(written)

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        """Starts serving and reading. Raises KVTransferError."""
        native.load([COPY_LIST])
        self._worker_half.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: PeerMetadata) -> None:
        """Publish generations, grant leases, pass notices on: before anything of the step is launched."""
        super().bind_connector_metadata(connector_metadata)
        self._worker_half.bind(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit the step's reads; their ends go to `ledger`."""
        self._worker_half.start(forward_context, self._get_connector_metadata(), kwargs["ledger"])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The ledger knows."""

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None:
        """The `written` timelines say it."""

    def wait_for_save(self) -> None:
        """Pushes go on by themselves, from blocks that are held for them."""

    def abort_loads(self, step: int) -> None:
        """Returns when nothing writes the step's blocks any more."""
        if self._worker_half.consumer is not None:
            self._worker_half.consumer.abort(step)

    def get_transfer_results(self, finished_req_ids: frozenset[str]) -> KVConnectorTransferResults:
        """`finished_sending`: leases that have ended; `finished_recving`: loads that were waited for outside the steps."""
        return self._worker_half.results()

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """See `KVConnector.get_kv_connector_stats`."""
        return self._worker_half.stats()

    def build_connector_worker_meta(self) -> Any:
        """See `PeerWorkerMeta`."""
        return self._worker_half.worker_meta()

    def shutdown(self) -> None:
        """See `KVConnector.shutdown`."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _scheduler_half(self) -> PeerSchedulerHalf:
        if self._scheduler is None:
            raise LifecycleError("a scheduler-side method was called on the worker half of PeerConnector")
        return self._scheduler

    @property
    def _worker_half(self) -> PeerWorkerHalf:
        if self._worker is None:
            raise LifecycleError("a worker-side method was called on the scheduler half of PeerConnector")
        return self._worker
