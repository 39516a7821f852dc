"""The peer connector's `kv_connector_extra_config`, checked."""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from interlock.core.errors import ConfigError
from interlock.kv_transfer.transports.transport import Copy, Transport

_MAX_SECONDS = 86400
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """mode: who moves the bytes, the decode engine ('read') or the prefill engine ('write'). transport: 'shared_memory' (one host, one user)
    or 'nixl'. lease_seconds: how long blocks are kept for a consumer that says nothing; handshake_timeout: of one exchange. Both in seconds,
    at most a day.

    NIXL only: host, port (0: any free one): where the side channel listens; allowed_hosts: of peers; secret: that peers must know;
    ucx_tls, ucx_error_handling: how UCX is set up (README). An unknown or unusable option is a ConfigError.
    """

    mode: Literal["read", "write"] = "read"
    transport: Literal["shared_memory", "nixl"] = "shared_memory"
    lease_seconds: float = 30.0
    handshake_timeout: float = 2.0
    host: str = "127.0.0.1"
    port: int = 0
    allowed_hosts: tuple[str, ...] = LOOPBACK
    secret: str | None = None
    ucx_tls: str | None = None
    ucx_error_handling: Literal["none", "peer"] | None = None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "PeerOptions":
        """Raises ConfigError."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ConfigError(f"kv_connector_extra_config has unknown keys {unknown}, expected some of {sorted(known)}")
        for name in ("lease_seconds", "handshake_timeout"):
            value = extra.get(name, 1)
            _expect(name, value, _is_number(value) and 0 < value <= _MAX_SECONDS, f"a number of seconds above 0, at most {_MAX_SECONDS}")
        _expect_choice(extra, "mode", ("read", "write"))
        _expect_choice(extra, "transport", ("shared_memory", "nixl"))
        _expect_choice(extra, "ucx_error_handling", (None, "none", "peer"))
        for name in ("host", "secret", "ucx_tls"):
            value = extra.get(name, "x")
            _expect(name, value, isinstance(value, str) and (bool(value) or name == "ucx_tls"), "a text")
        host = extra.get("host", "127.0.0.1")
        _expect("host", host, not _is_wildcard(host), "an address at which peers reach this host, since it is told to them")
        port = extra.get("port", 0)
        _expect("port", port, isinstance(port, int) and not isinstance(port, bool) and 0 <= port < 65536, "a port number, or 0 for any")
        hosts = extra.get("allowed_hosts", LOOPBACK)
        _expect("allowed_hosts", hosts, isinstance(hosts, list | tuple) and all(isinstance(host, str) for host in hosts), "a list of host names")
        values: dict[str, Any] = {**extra, "allowed_hosts": tuple(hosts)}
        for name in {"lease_seconds", "handshake_timeout"} & set(values):
            values[name] = float(values[name])
        return cls(**values)

    @property
    def push(self) -> bool:
        """Whether the prefill engine moves the bytes."""
        return self.mode == "write"

    def make_transport(self, name: str, block_size: int, block_bytes: int, copy: Copy) -> Transport:
        """The transport of one rank; name: of this life of the engine. Raises ConfigError."""
        if self.transport == "shared_memory":
            from interlock.kv_transfer.transports.local import SharedMemoryTransport

            return SharedMemoryTransport(copy)
        try:
            from interlock.kv_transfer.transports.nixl import SHARED_MEMORY_TLS, NixlTransport
        except ImportError as error:
            raise ConfigError(f"transport is 'nixl', but {error.name} is not installed; install interlock[nixl]") from error
        return NixlTransport(
            name=name,
            block_size=block_size,
            block_bytes=block_bytes,
            host=self.host,
            port=self.port,
            allowed_hosts=self.allowed_hosts,
            ucx_tls=SHARED_MEMORY_TLS if self.ucx_tls is None else self.ucx_tls,
            error_handling=self.ucx_error_handling,
        )


def _is_wildcard(host: str) -> bool:
    try:
        return any(ipaddress.ip_address(str(entry[4][0])).is_unspecified for entry in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expect_choice(extra: Mapping[str, Any], name: str, choices: tuple[str | None, ...]) -> None:
    if name in extra:
        _expect(name, extra[name], extra[name] in choices, f"one of {list(choices)}")


def _expect(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"kv_connector_extra_config[{name!r}] is {value!r}, expected {expected}")
