"""Connectors by name, or by import path."""

import importlib
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from interlock.core import interrupts
from interlock.core.config import EngineConfig, KVCacheConfig, KVTransferConfig
from interlock.core.errors import ConfigError, InterlockError
from interlock.kv_transfer.connector import KVConnector, KVConnectorRole

logger = logging.getLogger(__name__)

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
    path = _import_path(transfer)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ConfigError(f"kv_connector is {name!r}, expected one of {sorted(CONNECTORS)}, or 'package.module:Class'")
    if module_name.startswith("."):
        raise ConfigError(f"kv_connector {path!r} is relative, expected the whole name of the module, such as 'package.module:Class'")
    with named_faults(transfer, "cannot be imported"):
        found = getattr(importlib.import_module(module_name), class_name)
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        raise ConfigError(f"kv_connector {path!r} is {found!r}, expected a subclass of interlock.kv_transfer.connector.KVConnector")
    if inspect.isabstract(found):
        raise ConfigError(f"kv_connector {path!r} is abstract, expected a class that has all methods; it lacks {sorted(found.__abstractmethods__)}")
    return found


@contextmanager
def named_faults(transfer: KVTransferConfig, fault: str) -> Iterator[None]:
    """Whatever the code of a connector from outside raises here becomes a ConfigError that names the connector, its `fault` and the cause, with
    the traceback in the log at level DEBUG. Interlock's own errors, lack of memory and interrupts pass."""
    try:
        yield
    except (InterlockError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if interrupts.caused(error) or _import_path(transfer) in CONNECTORS.values():
            raise  # no fault, or one of ours
        logger.debug("kv_connector %r %s", _import_path(transfer), fault, exc_info=True)
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"kv_connector {_import_path(transfer)!r} {fault}: {cause:.1000}") from error


def requires_piecewise(transfer: KVTransferConfig) -> bool:
    """Whether the configured connector cannot serve a FULL replay. Raises ConfigError."""
    found = connector_class(transfer)
    with named_faults(transfer, "cannot say whether it requires_piecewise_for_cudagraph"):
        return found.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config)


def check_connector(config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError if the configured connector, if there is one, would refuse its options for a pool of this shape. Allocates nothing."""
    transfer = config.kv_transfer_config
    if transfer is not None:
        found = connector_class(transfer)
        with named_faults(transfer, "cannot check its options"):
            found.check_options(config, kv_cache_config)


def create_connector(config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> KVConnector:
    """One half of the connector that `config.kv_transfer_config` names. Raises ConfigError."""
    transfer = config.kv_transfer_config
    if transfer is None:
        raise ConfigError("kv_transfer_config is not set, expected the connector to create")
    found = connector_class(transfer)
    with named_faults(transfer, f"cannot be made as {role.name}"):
        connector = found(config, role, kv_cache_config)
        if getattr(connector, "kv_transfer_config", None) is None:
            raise ConfigError(f"kv_connector {_import_path(transfer)!r} has no kv_transfer_config, expected that its __init__ calls super().__init__")
    return connector


def bind_block_pool(connector: KVConnector, block_pool: Any) -> None:
    """Give the scheduler half its pool. Raises ConfigError."""
    with named_faults(connector.kv_transfer_config, "cannot bind the block pool"):
        connector.bind_block_pool(block_pool)


def discard_connector(connector: KVConnector) -> None:
    """Shut down a connector of an engine that could not be made: what it raises is logged, since the fault before it is the one to tell."""
    try:
        connector.shutdown()
    except Exception as error:
        logger.warning("kv_connector %r cannot be shut down: %s: %s", _import_path(connector.kv_transfer_config), type(error).__name__, error)
        logger.debug("it was raised here", exc_info=True)


def _import_path(transfer: KVTransferConfig) -> str:
    """'package.module:Class', or what was given instead of it."""
    name, module_path = transfer.kv_connector, transfer.kv_connector_module_path
    return CONNECTORS.get(name, name) if module_path is None else f"{module_path}:{name}"
