"""The runner's side of the connector lifecycle: the driver that every step goes through, with a connector or without."""

from contextlib import ExitStack
from dataclasses import dataclass

from interlock.core import interrupts
from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.errors import ConfigError
from interlock.core.forward_context import CUDAGraphMode
from interlock.graphs.stream import Stream
from interlock.graphs.timeline import Timelines
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.inert_lifecycle import InertKVStepDriver
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.lifecycle import KVStepDriver
from interlock.kv_transfer.registry import create_connector, discard_connector, named_faults, requires_piecewise
from interlock.runner.kv_cache import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class StepTimelines:
    """Per layer: `landed` reaches a step's stamp when all that the step was promised has ended, `written` when the step has written its KV."""

    landed: Timelines
    written: Timelines

    @classmethod
    def create(cls, num_layers: int) -> "StepTimelines":
        """Both at stamp 0."""
        return cls(Timelines(num_layers), Timelines(num_layers))

    def layer_landed(self, layer: int, step: int, error: bool) -> None:
        """The ledger's callback: opens the layer's gate for the step, with the error bit if something did not land."""
        self.landed.advance(layer, step, error=error)


def supported_mode(config: EngineConfig) -> CUDAGraphMode:
    """The configured graph mode, lowered to PIECEWISE where it is FULL where hooks between layers
    are needed: the connector declares that it cannot serve a FULL replay, or `kv_load_wait` is 'hook'. Raises ConfigError for gates then."""
    mode, transfer = config.graph_mode, config.kv_transfer_config
    if transfer is None or not mode.has_full_cudagraphs():
        return mode
    declared = requires_piecewise(transfer)
    if declared and config.kv_load_wait == "gate":
        raise ConfigError(
            f"kv_load_wait is 'gate', but the connector {transfer.kv_connector!r} needs hooks between the layers "
            "(requires_piecewise_for_cudagraph), so no step is a FULL replay; use 'auto' or 'barrier'"
        )
    return CUDAGraphMode.PIECEWISE if declared or config.kv_load_wait == "hook" else mode


def create_kv_driver(
    config: EngineConfig, shape: KVCacheConfig, kv_cache: KVCache, stream: Stream, timelines: StepTimelines, clock: Clock | None = None
) -> KVStepDriver | InertKVStepDriver:
    """The worker half of the configured connector, with its memory registered; or a driver that does nothing. clock: of the deadlines.

    On any error the connector is shut down again.
    """
    transfer = config.kv_transfer_config
    if transfer is None:
        return InertKVStepDriver()
    with ExitStack() as undo:
        connector = create_connector(config, KVConnectorRole.WORKER, shape)
        undo.callback(discard_connector, connector)
        interrupts.deliver()
        caches = dict(zip(shape.layer_names, kv_cache.layers, strict=True))
        assert kv_cache.shared is not None
        with named_faults(transfer, "cannot register the KV cache"):
            connector.register_pool(kv_cache.shared)
            connector.register_timelines(timelines.written)
            connector.register_kv_caches(caches)
        mode = supported_mode(config)
        driver = KVStepDriver(
            connector,
            Ledger(shape.num_layers, shape.block_size, clock, timelines.layer_landed),
            shape,
            caches,
            load_timeout=config.kv_load_timeout,
            kv_load_wait=config.kv_load_wait,
            modes={mode.decode_mode(), mode.mixed_mode()},
            synchronize=stream.synchronize,
            record=stream.record,
        )
        undo.pop_all()
    return driver
