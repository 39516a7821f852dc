"""The multi connector: several connectors as one. All save; the first that has the longest hit makes a request's load."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVCacheConfig, KVTransferConfig
from interlock.core.errors import ConfigError, LifecycleError
from interlock.core.forward_context import ForwardContext
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.graphs.timeline import Timelines
from interlock.kv_transfer.connector import ConnectorRequest, KVConnector, KVConnectorRole, KVConnectorTransferResults, may_wait
from interlock.kv_transfer.connectors.multi_calls import call_all
from interlock.kv_transfer.connectors.multi_messages import LostMetadata, MultiMetadata, MultiWorkerMeta
from interlock.kv_transfer.connectors.multi_scheduler import MultiSchedulerHalf
from interlock.kv_transfer.connectors.multi_worker import MultiWorkerHalf
from interlock.kv_transfer.registry import (
    bind_block_pool,
    check_connector,
    connector_class,
    create_connector,
    discard_connector,
    named_faults,
    requires_piecewise,
)
from interlock.kv_transfer.transports.shared_memory import KVPool


class MultiConnector(KVConnector):
    """See the module. `kv_connector_extra_config`: connectors, a list of `{"kv_connector": …, "kv_connector_extra_config": {…}, …}`
    in order of preference; a child has the engine's `kv_role` and `engine_id` unless it names its own (to which a data-parallel rank adds
    `_dp<rank>`)."""

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        with ExitStack() as undo:
            self.children: list[KVConnector] = []
            for child in _child_engine_configs(config):
                self.children.append(create_connector(child, role, kv_cache_config))
                undo.callback(discard_connector, self.children[-1])
            undo.pop_all()
        with_timelines = [child for child in self.children if child.supports_timelines]
        self.supports_timelines = bool(with_timelines)
        self.progresses_by_itself = all(child.progresses_by_itself for child in with_timelines)
        self.hands_over = any(child.hands_over for child in self.children)
        self.saves_layers = any(child.saves_layers for child in self.children)
        self.load_is_repeatable = any(child.load_is_repeatable for child in self.children)
        self.recomputes_failed_loads = all(child.recomputes_failed_loads for child in self.children)
        self._scheduler: MultiSchedulerHalf | None = None
        self._worker: MultiWorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = MultiSchedulerHalf(self.children, kv_cache_config.block_size)
        else:
            self._worker = MultiWorkerHalf(self.children, kv_cache_config.layer_names, uses_ledger=self.supports_timelines)

    @classmethod
    def check_options(cls, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        """The children's, in order. Two that hand over to other engines need an `engine_id` each, under which these reach them."""
        names: set[tuple[str, str]] = set()
        for child in _child_engine_configs(config):
            check_connector(child, kv_cache_config)
            assert child.kv_transfer_config is not None
            found, engine_id = connector_class(child.kv_transfer_config), child.kv_transfer_config.engine_id
            if found.hands_over and (found.__name__, engine_id) in names:
                raise ConfigError(
                    f"kv_connector_extra_config['connectors'] has two {found.__name__}s with the same engine_id {engine_id!r}, and other "
                    f"engines could not tell them apart; list one {found.__name__}, or give each child an 'engine_id' of its own"
                )
            names.add((found.__name__, engine_id))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Whether any child does."""
        children = _child_configs(extra_config, None)
        return any(requires_piecewise(child) for child in children)

    # ---- scheduler half

    def bind_block_pool(self, block_pool: Any) -> None:
        """See `KVConnector.bind_block_pool`."""
        for child in self.children:
            bind_block_pool(child, block_pool)

    def on_new_request(self, request: ConnectorRequest) -> None:
        """See `MultiSchedulerHalf.new_request`."""
        self.scheduler_half.new_request(request)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `MultiSchedulerHalf.num_matched`."""
        return self.scheduler_half.num_matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """See `MultiSchedulerHalf.allocated`."""
        self.scheduler_half.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata:
        """See `MultiSchedulerHalf.build_meta`."""
        return self.scheduler_half.build_meta(scheduler_output)

    def request_preempted(self, request: ConnectorRequest) -> None:
        """See `KVConnector.request_preempted`."""
        self.scheduler_half.preempted(request)

    def request_finished(self, request: ConnectorRequest, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `MultiSchedulerHalf.finished`."""
        return self.scheduler_half.finished(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `MultiSchedulerHalf.update`."""
        self.scheduler_half.update(connector_output)

    def recomputes_load(self, req_id: str) -> bool:
        """As its owner says."""
        return self.scheduler_half.recomputes_load(req_id)

    def has_pending_push_work(self) -> bool:
        """Any child has work, or the worker half has something to be told."""
        return self.scheduler_half.has_news

    # ---- worker half

    def register_pool(self, pool: KVPool) -> None:
        """See `KVConnector.register_pool`."""
        self._register(lambda child: child.register_pool(pool))

    def register_timelines(self, written: Timelines) -> None:
        """See `KVConnector.register_timelines`."""
        self._register(lambda child: child.register_timelines(written))

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        """See `KVConnector.register_kv_caches`."""
        self._register(lambda child: child.register_kv_caches(kv_caches))

    def get_handshake_metadata(self) -> Any:
        """The children's, in order."""
        return tuple(child.get_handshake_metadata() for child in self.children)

    def handle_preemptions(self, connector_metadata: MultiMetadata) -> None:
        """See `KVConnector.handle_preemptions`."""
        metas = {child: meta for child, meta in zip(self.children, connector_metadata.children, strict=True) if not isinstance(meta, LostMetadata)}
        call_all(metas, lambda child: child.handle_preemptions(metas[child]))

    def bind_connector_metadata(self, connector_metadata: MultiMetadata) -> None:
        """See `MultiWorkerHalf.bind`."""
        super().bind_connector_metadata(connector_metadata)
        self.worker_half.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """See `KVConnector.clear_connector_metadata`."""
        super().clear_connector_metadata()
        self.worker_half.clear()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See `MultiWorkerHalf.start_loads`."""
        self.worker_half.start_loads(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `MultiWorkerHalf.wait_for_layer_load`."""
        self.worker_half.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None:
        """All children save."""

        def save(child: KVConnector) -> None:
            with may_wait(child):
                child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

        self.worker_half.for_each(save)

    def wait_for_save(self) -> None:
        """All children save."""
        self.worker_half.for_each(_wait_for_save)

    def abort_loads(self, step: int) -> None:
        """See `KVConnector.abort_loads`."""

        def abort(child: KVConnector) -> None:
            with may_wait(child):
                child.abort_loads(step)

        self.worker_half.for_each(abort)

    def finish_forward(self) -> None:
        """See `KVConnector.finish_forward`."""
        self.worker_half.for_each(lambda child: child.finish_forward())

    def reset_capture_state(self) -> None:
        """See `KVConnector.reset_capture_state`."""
        self.worker_half.for_each(lambda child: child.reset_capture_state())

    def get_transfer_results(self, finished_req_ids: frozenset[str]) -> KVConnectorTransferResults:
        """See `MultiWorkerHalf.results`."""
        return self.worker_half.results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `MultiWorkerHalf.bad_blocks`."""
        return self.worker_half.bad_blocks()

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """See `MultiWorkerHalf.stats`."""
        return self.worker_half.stats()

    def build_connector_worker_meta(self) -> MultiWorkerMeta:
        """See `MultiWorkerMeta`."""
        return self.worker_half.worker_meta()

    def shutdown(self) -> None:
        """See `KVConnector.shutdown`."""
        call_all(self.children, lambda child: child.shutdown())

    def _register(self, call: Callable[[KVConnector], None]) -> None:
        for child in self.children:
            with named_faults(child.kv_transfer_config, "cannot register the KV cache"):
                call(child)

    @property
    def scheduler_half(self) -> MultiSchedulerHalf:
        """Raises LifecycleError on the worker half."""
        if self._scheduler is None:
            raise LifecycleError("a scheduler-side method was called on the worker half of MultiConnector")
        return self._scheduler

    @property
    def worker_half(self) -> MultiWorkerHalf:
        """Raises LifecycleError on the scheduler half."""
        if self._worker is None:
            raise LifecycleError("a worker-side method was called on the scheduler half of MultiConnector")
        return self._worker


def _wait_for_save(child: KVConnector) -> None:
    with may_wait(child):
        child.wait_for_save()


def _child_engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """The engine's options as each child sees them. A name of its own is one name per rank, as the engine's is."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    children = _child_configs(transfer.kv_connector_extra_config, transfer)
    if config.data_parallel_size > 1:
        suffix = f"_dp{config.data_parallel_rank}"
        children = [
            child if child.engine_id == transfer.engine_id else dataclasses.replace(child, engine_id=child.engine_id + suffix) for child in children
        ]
    return [dataclasses.replace(config, kv_transfer_config=child) for child in children]


def _child_configs(extra: Mapping[str, Any], parent: KVTransferConfig | None) -> list[KVTransferConfig]:
    unknown = sorted(set(extra) - {"connectors"})
    if unknown:
        raise ConfigError(f"kv_connector_extra_config has unknown keys {unknown}, expected ['connectors']")
    listed = extra.get("connectors")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed or not all(isinstance(child, Mapping) for child in listed):
        raise ConfigError(f"kv_connector_extra_config['connectors'] is {listed!r}, expected a list of objects, each with 'kv_connector'")
    inherited = {} if parent is None else {"kv_role": parent.kv_role, "engine_id": parent.engine_id}
    for child in listed:
        if "kv_load_failure_policy" in child:
            raise ConfigError("a child in kv_connector_extra_config['connectors'] has kv_load_failure_policy; set it once, beside 'connectors'")
    policy = {} if parent is None else {"kv_load_failure_policy": parent.kv_load_failure_policy}
    return [KVTransferConfig.from_mapping({**inherited, **child, **policy}) for child in listed]
