"""The side channel of transports that leave the host: TCP, for peers from an allowlist.

It listens on loopback unless told otherwise. Nothing is unpickled: a frame is one msgspec message, bounded in size. Messages are not
encrypted; a shared secret keeps strangers out, a private network keeps them from listening.
"""

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Collection

from interlock.core.errors import ConfigError, KVTransferError
from interlock.kv_transfer.transports.channel import Channel
from interlock.kv_transfer.transports.transport import PeerAddress, PeerGoneError

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")

_SLICE_MILLISECONDS = 50  # how late an abort may be noticed
_BACKLOG = 256


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at a host, IPv4 or IPv6 (port 0: any). Raises ConfigError."""
    listener = None
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except (OSError, ValueError) as error:  # ValueError: no host name at all
        if listener is not None:
            listener.close()
        raise ConfigError(f"the KV side channel cannot listen on host {host!r}, port {port}: {error}; set another 'port' or 'host'") from error
    return listener


def admit_from(allowed_hosts: Collection[str]) -> Callable[[socket.socket], None]:
    """What raises KVTransferError for a connection from any other host. Raises ConfigError for what cannot be a host's name."""
    allowed = resolve_hosts(allowed_hosts)

    def admit(connection: socket.socket) -> None:
        sender = str(connection.getpeername()[0]).removeprefix("::ffff:")
        if sender not in allowed:
            raise KVTransferError(f"it came from {sender}, expected one of {sorted(allowed)} ('allowed_hosts')")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    return admit


def connect(peer: PeerAddress, allowed_hosts: Collection[str], timeout: float, aborted: Callable[[], bool]) -> Channel:
    """To a peer's side channel. Raises KVTransferError; PeerGoneError when nobody listens there."""
    if peer.host is None or peer.port is None:
        raise KVTransferError(f"engine {peer.engine_id!r} is given without remote_host and remote_port, which this transport needs to reach it")
    try:
        is_allowed = peer.host in allowed_hosts or peer.host in resolve_hosts(allowed_hosts)
    except ConfigError as error:
        raise KVTransferError(f"{peer.host!r} cannot be told from the hosts that are trusted: {error}") from error
    if not is_allowed:
        raise KVTransferError(f"remote_host is {peer.host!r}, expected one of {sorted(allowed_hosts)}; add it to 'allowed_hosts' to trust it")
    what = f"engine {peer.engine_id!r} at {peer.host}:{peer.port}"
    connection = None
    try:
        family, _, _, _, where = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = connection.connect_ex(where)
        if code == errno.EINPROGRESS:
            _wait_connected(connection, what, timeout, aborted)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == errno.ECONNREFUSED:
            raise PeerGoneError(f"{what} cannot be reached: {os.strerror(code)}")
        if code:
            raise KVTransferError(f"{what} cannot be reached: {os.strerror(code)}")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, OSError | ValueError):
            raise KVTransferError(f"{what} cannot be reached: {error}") from error
        raise
    return Channel(connection, what)


def resolve_hosts(hosts: Collection[str]) -> frozenset[str]:
    """The numeric addresses of hosts; names that are not known are left out. Raises ConfigError for what cannot be a name."""
    found: set[str] = set()
    for host in hosts:
        try:
            found.update(str(entry[4][0]) for entry in socket.getaddrinfo(host, None))
        except OSError as error:
            logger.warning("allowed host %r is not known: %s", host, error)
        except ValueError as error:
            raise ConfigError(f"'allowed_hosts' holds {host!r}, expected host names or addresses ({error}); correct or remove it") from error
    return frozenset(found)


def _wait_connected(connection: socket.socket, what: str, timeout: float, aborted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while not poll.poll(_SLICE_MILLISECONDS):
        if aborted():
            raise KVTransferError("the exchange with the peer was given up")
        if time.monotonic() > deadline:
            raise KVTransferError(f"{what} cannot be reached: no answer within {timeout:g} s")
