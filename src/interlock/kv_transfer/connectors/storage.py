"""The storage connector: a tier of files behind the block pool, shared by engines and kept between runs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from interlock.core.config import KVCacheConfig
from interlock.core.errors import ConfigError
from interlock.kv_transfer.clock import Clock, MonotonicClock
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.connectors.block_files import BlockFiles
from interlock.kv_transfer.connectors.storage_index import StorageIndex
from interlock.kv_transfer.connectors.storage_worker import StorageWorker
from interlock.kv_transfer.connectors.tier import TierConnector, TierWorker, check_all_taken, take_bytes
from interlock.kv_transfer.connectors.tier_scheduler import TierIndex

_MAX_SECONDS = 86400  # of read_timeout
_OPTIONS = ("path", "max_bytes", "read_timeout", "staging_bytes", "async_load_bytes")


@dataclass(frozen=True, slots=True, eq=False)
class StorageOptions:
    """The connector's options, checked. read_timeout: seconds."""

    files: BlockFiles
    read_timeout: float
    staging_bytes: int


class StorageConnector(TierConnector):
    """Keeps full blocks in files. `kv_connector_extra_config`: path, the directory in which they have one of their own (required; made if it
    is missing); max_bytes, of all these files (16 GiB); read_timeout, seconds, at most a day, after which a lookup or a load counts as a miss
    (5); staging_bytes, of blocks that wait to be written (64 MiB); async_load_bytes (0: all loads let their request wait)."""

    default_async_load_bytes = 0
    clock: ClassVar[Clock] = MonotonicClock()
    files_class: ClassVar[type[BlockFiles]] = BlockFiles

    @classmethod
    def parse_options(cls, extra: dict[str, Any], kv_cache_config: KVCacheConfig) -> StorageOptions:
        """See `TierConnector.parse_options`. The directory is made."""
        root = _directory(extra.pop("path", None))
        max_bytes = take_bytes(extra, "max_bytes", 16 * 2**30)
        staging_bytes = take_bytes(extra, "staging_bytes", 64 * 2**20)
        timeout = extra.pop("read_timeout", 5.0)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _MAX_SECONDS:
            expected = f"a number of seconds above 0, at most {_MAX_SECONDS}"
            raise ConfigError(f"kv_connector_extra_config['read_timeout'] is {timeout!r}, expected {expected}")
        check_all_taken(extra, _OPTIONS)
        files = cls.files_class(root, kv_cache_config, max_bytes)
        if files.root.is_symlink():
            raise ConfigError(f"{str(files.root)!r} is a symbolic link, expected a directory; remove it or choose another path")
        _make(files.root)
        for name, value, least in (("max_bytes", max_bytes, files.file_bytes), ("staging_bytes", staging_bytes, files.payload_bytes)):
            if value < least:
                raise ConfigError(f"{name} is {value}, expected at least {least}, the size of one block of all layers")
        return StorageOptions(files, float(timeout), staging_bytes)

    def make_half(self, options: StorageOptions) -> tuple[TierIndex | None, TierWorker | None]:
        """See `TierConnector.make_half`."""
        if self.role is KVConnectorRole.SCHEDULER:
            return StorageIndex(options.files, self.clock, options.read_timeout), None
        return None, StorageWorker(self.kv_cache_config, options.files, self.clock, options.read_timeout, options.staging_bytes)


def _directory(path: Any) -> Path:
    if not isinstance(path, str) or not path:
        raise ConfigError(f"kv_connector_extra_config['path'] is {path!r}, expected a directory for the files")
    root = Path(path)
    _make(root)
    return root


def _make(root: Path) -> None:
    path = str(root)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no file name, such as one with a NUL byte
        raise ConfigError(f"the directory {path!r} (kv_connector_extra_config['path']) cannot be made: {error}") from error
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"the directory {path!r} (kv_connector_extra_config['path']) cannot be read and written by this user")
