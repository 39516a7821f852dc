"""The runner's side of the connector lifecycle: the driver that every step goes through, with a connector or without."""

from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.forward_context import CUDAGraphMode
from interlock.graphs.stream import Stream
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.lifecycle import InertKVStepDriver, KVStepDriver
from interlock.kv_transfer.registry import connector_class, create_connector
from interlock.runner.kv_cache import KVCache


def supported_mode(config: EngineConfig) -> CUDAGraphMode:
    """The configured graph mode, lowered to PIECEWISE where it is FULL if the connector declares that it cannot serve a FULL replay."""
    mode, transfer = config.graph_mode, config.kv_transfer_config
    if transfer is None or not mode.has_full_cudagraphs():
        return mode
    needs_piecewise = connector_class(transfer).requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config)
    return CUDAGraphMode.PIECEWISE if needs_piecewise else mode


def create_kv_driver(
    config: EngineConfig, shape: KVCacheConfig, kv_cache: KVCache, stream: Stream, clock: Clock | None = None
) -> KVStepDriver | InertKVStepDriver:
    """The worker half of the configured connector, with its memory registered; or a driver that does nothing. clock: of the deadlines."""
    if config.kv_transfer_config is None:
        return InertKVStepDriver()
    connector = create_connector(config, KVConnectorRole.WORKER, shape)
    caches = dict(zip(shape.layer_names, kv_cache.layers, strict=True))
    assert kv_cache.shared is not None
    connector.register_pool(kv_cache.shared)
    connector.register_kv_caches(caches)
    mode = supported_mode(config)
    return KVStepDriver(
        connector,
        Ledger(shape.num_layers, shape.block_size, clock),
        shape,
        caches,
        load_timeout=config.kv_load_timeout,
        kv_load_wait=config.kv_load_wait,
        modes={mode.decode_mode(), mode.mixed_mode()},
        synchronize=stream.synchronize,
    )
