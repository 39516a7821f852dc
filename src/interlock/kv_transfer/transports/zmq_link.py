"""The side channel of transports that leave the host: ZeroMQ over TCP, for peers from an allowlist.

It listens on loopback unless told otherwise. Nothing is unpickled: a frame is one msgspec message, bounded in size. Messages are not
encrypted; a shared secret keeps strangers out, a private network keeps them from listening.
"""

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from interlock.core.errors import ConfigError, KVTransferError
from interlock.kv_transfer.handshake import MAX_MESSAGE_BYTES, Message, decode, encode
from interlock.kv_transfer.transports.repeats import FirstWarnings
from interlock.kv_transfer.transports.transport import Answerer, PeerAddress, PeerGoneError

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")

_SLICE_MILLISECONDS = 50  # how late an abort may be noticed
_MAX_SESSIONS = 4096
_PING_MILLISECONDS = 1000
_DEAD_MILLISECONDS = 3000
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class ZmqServer:
    """One thread behind a ROUTER socket. allowed_hosts: numeric addresses of peers that may speak."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int, allowed_hosts: Collection[str], desk: Answerer) -> None:
        self._desk = desk
        self._warnings = FirstWarnings(logger)
        self._allowed = resolve_hosts(allowed_hosts)
        self._socket = context.socket(zmq.ROUTER)
        _limit(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if port:
                self._socket.bind(_endpoint(host, port))
                self.port = port
            else:
                self.port = self._socket.bind_to_random_port(_endpoint(host, None))
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"the KV side channel cannot listen on host {host!r}, port {port}: {error}; set another 'port' or 'host'") from error
        self._sessions: OrderedDict[bytes, None] = OrderedDict()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="interlock-kv-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and the socket. May be called twice."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._wake.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                self._socket.close()
                self._woken.close()
                return
            self._read()

    def _read(self) -> None:
        frames: list[Any] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        session = frames[0].bytes
        try:
            sender = str(frames[-1].get("Peer-Address"))
            if sender.removeprefix("::ffff:") not in self._allowed:
                self._desk.foreign += 1
                self._warnings.warn(f"a message from {sender} was dropped, expected one from {sorted(self._allowed)} ('allowed_hosts')")
                return
            if len(frames) != 2:
                raise KVTransferError(f"a peer sent a message of {len(frames) - 1} frames, expected 1")
            self._remember(session)
            answer = self._desk.answer(session, frames[1].bytes)
            if answer is not None:
                self._socket.send_multipart([session, encode(answer)], zmq.NOBLOCK)
        except (KVTransferError, zmq.ZMQError) as error:
            self._refuse(session)
            self._warnings.warn(f"a message was refused: {error}")
        except Exception:
            self._refuse(session)
            logger.exception("a message was refused")

    def _remember(self, session: bytes) -> None:
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        while len(self._sessions) > _MAX_SESSIONS:
            self._desk.forget(self._sessions.popitem(last=False)[0])

    def _refuse(self, session: bytes) -> None:
        self._desk.malformed += 1
        self._desk.forget(session)


class ZmqConnection:
    """A DEALER socket to one peer, which is not reconnected: a peer that was lost once is another peer when it is back."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", peer: PeerAddress, allowed_hosts: Collection[str]) -> None:
        if peer.host is None or peer.port is None:
            raise KVTransferError(f"engine {peer.engine_id!r} is given without remote_host and remote_port, which this transport needs to reach it")
        if peer.host not in allowed_hosts and peer.host not in resolve_hosts(allowed_hosts):
            raise KVTransferError(f"remote_host is {peer.host!r}, expected one of {sorted(allowed_hosts)}; add it to 'allowed_hosts' to trust it")
        self._what = f"engine {peer.engine_id!r} at {peer.host}:{peer.port}"
        self._lost = False
        self._lock = threading.Lock()  # of the monitor
        self._socket = context.socket(zmq.DEALER)
        _limit(self._socket)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor: Any = self._socket.get_monitor_socket(_LOST)
        self._socket.connect(_endpoint(peer.host, peer.port))

    def send(self, message: Message, timeout: float = 1.0) -> None:
        """See `Connection.send`."""
        self._wait(zmq.POLLOUT, timeout, lambda: False)
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise KVTransferError(f"the connection was lost: {self._what}: {error}") from error

    def receive(self, timeout: float, aborted: Callable[[], bool]) -> Message:
        """See `Connection.receive`."""
        self._wait(zmq.POLLIN, timeout, aborted)
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 1:
            raise KVTransferError(f"{self._what} sent a message of {len(frames)} frames, expected 1")
        return decode(frames[0])

    @property
    def alive(self) -> bool:
        """See `Connection.alive`."""
        with self._lock:
            while not self._lost and self._monitor is not None and self._monitor.poll(0):
                self._lost = bool(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"] & _LOST)
            return not self._lost and self._monitor is not None

    def close(self) -> None:
        """See `Connection.close`."""
        with self._lock:
            if self._monitor is not None:
                self._monitor = None
                self._socket.disable_monitor()
                self._socket.close()

    def _wait(self, event: int, timeout: float, aborted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                if self._socket.poll(_SLICE_MILLISECONDS, event):
                    return
            except zmq.ZMQError as error:
                raise KVTransferError(f"the connection was lost: {self._what}: {error}") from error
            if not self.alive:
                raise PeerGoneError(f"{self._what} cannot be reached: the connection was lost or refused")
            if aborted():
                raise KVTransferError("the exchange with the peer was given up")
            if time.monotonic() > deadline:
                raise KVTransferError(f"{self._what} did not answer in time")


def resolve_hosts(hosts: Collection[str]) -> frozenset[str]:
    """The numeric addresses of hosts; names that are not known are left out."""
    found: set[str] = set()
    for host in hosts:
        try:
            found.update(str(entry[4][0]) for entry in socket.getaddrinfo(host, None))
        except OSError as error:
            logger.warning("allowed host %r is not known: %s", host, error)
    return frozenset(found)


def _limit(side: "zmq.Socket[bytes]") -> None:
    side.setsockopt(zmq.LINGER, 0)
    side.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    side.setsockopt(zmq.RCVHWM, 1024)
    side.setsockopt(zmq.HEARTBEAT_IVL, _PING_MILLISECONDS)
    side.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MILLISECONDS)


def _endpoint(host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}" if port is None else f"tcp://{name}:{port}"
