"""The offload connector: a tier in host memory behind the block pool, for blocks that the pool has no room to keep."""

from typing import Any, ClassVar

from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.errors import ConfigError
from interlock.core.memory import available_memory
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.connectors.host_tier import HostIndex, HostTierWorker
from interlock.kv_transfer.connectors.tier import TierConnector, TierWorker, check_all_taken, take_bytes
from interlock.kv_transfer.connectors.tier_scheduler import TierIndex


class OffloadConnector(TierConnector):
    """Keeps full blocks in host memory, the least recently used out first. `kv_connector_extra_config`: cpu_bytes, the size of the
    memory (required), and async_load_bytes (16 MiB)."""

    default_async_load_bytes = 16 * 2**20
    index_class: ClassVar[type[HostIndex]] = HostIndex
    worker_class: ClassVar[type[HostTierWorker]] = HostTierWorker

    @classmethod
    def check_options(cls, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        """See `KVConnector.check_options`. The memory must be there to be had."""
        super().check_options(config, kv_cache_config)
        assert config.kv_transfer_config is not None
        cpu_bytes, available = config.kv_transfer_config.kv_connector_extra_config["cpu_bytes"], available_memory()
        if available is not None and cpu_bytes > available:
            raise ConfigError(f"cpu_bytes is {cpu_bytes}, but this machine has {available} bytes of memory available; lower it")

    @classmethod
    def parse_options(cls, extra: dict[str, Any], kv_cache_config: KVCacheConfig) -> int:
        """How many blocks the memory holds. See `TierConnector.parse_options`."""
        cpu_bytes = take_bytes(extra, "cpu_bytes", None)
        check_all_taken(extra, ("cpu_bytes", "async_load_bytes"))
        block_bytes = kv_cache_config.num_layers * kv_cache_config.block_bytes
        num_slots = cpu_bytes // block_bytes
        if num_slots < 1:
            raise ConfigError(f"cpu_bytes is {cpu_bytes}, expected at least {block_bytes}, the size of one block of all layers")
        return num_slots

    def make_half(self, options: int) -> tuple[TierIndex | None, TierWorker | None]:
        """See `TierConnector.make_half`."""
        try:
            if self.role is KVConnectorRole.SCHEDULER:
                return self.index_class(options), None
            return None, self.worker_class(self.kv_cache_config, options)
        except MemoryError as error:
            cpu_bytes = self.kv_transfer_config.kv_connector_extra_config["cpu_bytes"]
            raise ConfigError(f"cpu_bytes is {cpu_bytes}, which could not be had ({str(error) or 'out of memory'}); lower it") from error
