"""What all tiers behind the block pool have in common: a connector that saves blocks by content and loads them back.

A tier says what it knows (`TierIndex`, scheduler half) and how it moves bytes (`TierWorker`, worker half); the rest is here.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.errors import ConfigError, LifecycleError
from interlock.core.forward_context import ForwardContext
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.graphs.copy import COPY_LIST
from interlock.kernels import native
from interlock.kv_transfer.connector import ConnectorRequest, KVConnector, KVConnectorRole, KVConnectorTransferResults
from interlock.kv_transfer.connectors.tier_messages import EndedLoad, TierLoad, TierMetadata, TierSave, TierWorkerMeta
from interlock.kv_transfer.connectors.tier_reports import TierReports
from interlock.kv_transfer.connectors.tier_scheduler import TierIndex, TierSchedulerHalf
from interlock.kv_transfer.ledger import Ledger


class TierWorker(Protocol):
    """How a tier moves bytes, on threads of its own. Every load and save that it takes is reported as ended, once."""

    reports: TierReports

    def register(self, layers: Sequence[Buffer]) -> None:
        """The pool's layers, each `[num_blocks, 2, num_kv_heads, block_size, head_dim]`; before anything else."""

    def load(self, load: TierLoad, step: int, ledger: Ledger) -> None:
        """Begin a load. A synchronous one is entered into `ledger` as transfers of `step`, and its ends are reported there."""

    def save(self, saves: Sequence[TierSave]) -> None:
        """Begin to save blocks."""

    def abort(self, step: int) -> None:
        """Give the step's synchronous loads up; return when none of them writes any more."""

    def poll(self) -> None:
        """Once per step: look at deadlines."""

    def close(self) -> None:
        """Stop the threads. May be called twice."""


class TierConnector(KVConnector):
    """See the module. `kv_role`: a producer saves, a consumer loads. `kv_connector_extra_config` has the option `async_load_bytes`:
    loads of at least this size let their request wait, smaller ones are consumed by the step that makes them (unless they are predicted to
    take longer than `max_sync_load_seconds`)."""

    supports_timelines = True
    load_is_repeatable = True
    recomputes_failed_loads = True
    saves_layers = False

    default_async_load_bytes: int
    """`async_load_bytes` where the configuration has none."""

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        self._scheduler: TierSchedulerHalf | None = None
        self._worker: TierWorker | None = None
        self._loads: list[TierLoad] = []
        self._saves: list[TierSave] = []
        async_load_bytes, options = self._parse(config, kv_cache_config)
        index, worker = self.make_half(options)
        if index is not None:
            block_bytes = kv_cache_config.num_layers * kv_cache_config.block_bytes
            self._scheduler = TierSchedulerHalf(
                type(self).__name__,
                index,
                kv_cache_config.block_size,
                block_bytes,
                async_load_bytes,
                config.max_sync_load_seconds,
                saves=self.kv_transfer_config.is_producer,
                loads=self.kv_transfer_config.is_consumer,
            )
        self._worker = worker

    @classmethod
    def check_options(cls, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        """See `KVConnector.check_options`."""
        cls._parse(config, kv_cache_config)

    @classmethod
    @abstractmethod
    def parse_options(cls, extra: dict[str, Any], kv_cache_config: KVCacheConfig) -> Any:
        """The tier's own options, checked; `extra` are those that remain. Raises ConfigError. Starts nothing."""

    @abstractmethod
    def make_half(self, options: Any) -> tuple[TierIndex | None, TierWorker | None]:
        """The index (role SCHEDULER) or the worker (role WORKER) of the tier. options: of `parse_options`."""

    @classmethod
    def _parse(cls, config: EngineConfig, kv_cache_config: KVCacheConfig) -> tuple[int, Any]:
        assert config.kv_transfer_config is not None
        extra = dict(config.kv_transfer_config.kv_connector_extra_config)
        async_load_bytes = take_bytes(extra, "async_load_bytes", cls.default_async_load_bytes, low=0)
        return async_load_bytes, cls.parse_options(extra, kv_cache_config)

    # ---- scheduler half

    def bind_block_pool(self, block_pool: Any) -> None:
        """See `KVConnector.bind_block_pool`."""
        self.scheduler_half.bind_block_pool(block_pool)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Whole blocks that the tier has behind the local prefix."""
        return self.scheduler_half.num_matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """See `KVConnector.update_state_after_alloc`."""
        self.scheduler_half.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TierMetadata:
        """See `KVConnector.build_connector_meta`."""
        return self.scheduler_half.build_meta(scheduler_output)

    def request_preempted(self, request: ConnectorRequest) -> None:
        """See `KVConnector.request_preempted`."""
        self.scheduler_half.preempted(request)

    def request_finished(self, request: ConnectorRequest, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks need not be kept: those that are still to be saved are held one by one."""
        self.scheduler_half.finished(request)
        return False, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Also: what turns out not to have landed must not stay in the tier."""
        if connector_output.invalid_block_ids:
            self.scheduler_half.invalidate(connector_output.invalid_block_ids)
        if isinstance(connector_output.kv_connector_worker_meta, TierWorkerMeta):
            self.scheduler_half.update(connector_output.kv_connector_worker_meta)

    def has_pending_push_work(self) -> bool:
        """Saves or loads have not ended."""
        return self.scheduler_half.has_news

    # ---- worker half

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        """See `KVConnector.register_kv_caches`."""
        native.load([COPY_LIST])
        self.worker_half.register(list(kv_caches.values()))

    def bind_connector_metadata(self, connector_metadata: TierMetadata) -> None:
        """What is ordered stays ordered, also if the step fails before it is begun."""
        super().bind_connector_metadata(connector_metadata)
        self._loads += connector_metadata.loads
        self._saves += connector_metadata.saves

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the loads that were ordered; those of this step report to `ledger`."""
        loads, self._loads = self._loads, []
        for load in loads:
            self.worker_half.load(load, forward_context.step, kwargs["ledger"])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The ledger knows."""

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved when they are full and their step has retired."""

    def wait_for_save(self) -> None:
        """Begin the saves that were ordered."""
        saves, self._saves = self._saves, []
        if saves:
            self.worker_half.save(saves)

    def clear_connector_metadata(self) -> None:
        """The step is over. A load that it was to consume, and that it failed to begin, has ended."""
        super().clear_connector_metadata()
        for load in self._loads:
            if load.synchronous:
                self.worker_half.reports.end_load(EndedLoad(load, 0))
        self._loads = [load for load in self._loads if not load.synchronous]

    def abort_loads(self, step: int) -> None:
        """See `KVConnector.abort_loads`."""
        self.worker_half.abort(step)

    def get_transfer_results(self, finished_req_ids: frozenset[str]) -> KVConnectorTransferResults:
        """Asynchronous loads that have ended."""
        self.worker_half.poll()
        return self.worker_half.reports.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of these loads, the blocks that have not landed."""
        return self.worker_half.reports.bad_blocks()

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """Blocks loaded and saved, loads and saves failed."""
        return self.worker_half.reports.take_counters()

    def build_connector_worker_meta(self) -> TierWorkerMeta:
        """See `TierWorkerMeta`."""
        return self.worker_half.reports.worker_meta()

    def shutdown(self) -> None:
        """See `KVConnector.shutdown`."""
        if self._scheduler is not None:
            self._scheduler.index.close()
        if self._worker is not None:
            self._worker.close()

    @property
    def scheduler_half(self) -> TierSchedulerHalf:
        """Raises LifecycleError on the worker half."""
        if self._scheduler is None:
            raise LifecycleError(f"a scheduler-side method was called on the worker half of {type(self).__name__}")
        return self._scheduler

    @property
    def worker_half(self) -> TierWorker:
        """Raises LifecycleError on the scheduler half."""
        if self._worker is None:
            raise LifecycleError(f"a worker-side method was called on the scheduler half of {type(self).__name__}")
        return self._worker


def take_bytes(extra: dict[str, Any], name: str, default: int | None, *, low: int = 1) -> int:
    """Take the option `name`, a number of bytes, out of `extra`. Raises ConfigError if it is missing (without a default) or no such number."""
    value = extra.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"kv_connector_extra_config[{name!r}] is {value!r}, expected a number of bytes, at least {low}")
    return value


def check_all_taken(extra: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ConfigError if an option remains that nobody knows."""
    if extra:
        raise ConfigError(f"kv_connector_extra_config has unknown keys {sorted(extra)}, expected some of {sorted(known)}")
