"""Connectors by name, or by import path."""

import importlib
import inspect
from typing import Final

from interlock.core.config import EngineConfig, KVCacheConfig, KVTransferConfig
from interlock.core.errors import ConfigError
from interlock.kv_transfer.connector import KVConnector, KVConnectorRole

CONNECTORS: Final = {
    "MultiConnector": "interlock.kv_transfer.connectors.multi:MultiConnector",
    "OffloadConnector": "interlock.kv_transfer.connectors.offload:OffloadConnector",
    "PeerConnector": "interlock.kv_transfer.connectors.peer:PeerConnector",
    "StorageConnector": "interlock.kv_transfer.connectors.storage:StorageConnector",
}


def connector_class(transfer: KVTransferConfig) -> type[KVConnector]:
    """The class that the configuration means: `kv_connector` in `kv_connector_module_path` if that is set, else a registered name,
    else 'package.module:Class'. Raises ConfigError."""
    name = transfer.kv_connector
    module_path = transfer.kv_connector_module_path
    path = CONNECTORS.get(name, name) if module_path is None else f"{module_path}:{name}"
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ConfigError(f"kv_connector is {name!r}, expected one of {sorted(CONNECTORS)}, or 'package.module:Class'")
    if module_name.startswith("."):
        raise ConfigError(f"kv_connector {path!r} is relative, expected the whole name of the module, such as 'package.module:Class'")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"kv_connector {path!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        raise ConfigError(f"kv_connector {path!r} is {found!r}, expected a subclass of interlock.kv_transfer.connector.KVConnector")
    if inspect.isabstract(found):
        raise ConfigError(f"kv_connector {path!r} is abstract, expected a class that has all methods; it lacks {sorted(found.__abstractmethods__)}")
    return found


def check_connector(config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError if the configured connector, if there is one, would refuse its options for a pool of this shape. Allocates nothing."""
    if config.kv_transfer_config is not None:
        connector_class(config.kv_transfer_config).check_options(config, kv_cache_config)


def create_connector(config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> KVConnector:
    """One half of the connector that `config.kv_transfer_config` names. Raises ConfigError."""
    if config.kv_transfer_config is None:
        raise ConfigError("kv_transfer_config is not set, expected the connector to create")
    return connector_class(config.kv_transfer_config)(config, role, kv_cache_config)
