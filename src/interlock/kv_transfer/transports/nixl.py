"""The NIXL transport: one-sided reads and writes over UCX (shared memory between processes of one host, TCP, RDMA where it is set up).

Between two local processes UCX copies inside the post, so posts belong on a connector's own threads, never on a step's. One agent is
reached by peers; each peer that we reach has another one (`nixl_memory`), so that no peer waits for another.
"""

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from interlock.core.buffer import Buffer
from interlock.core.errors import ConfigError, KVTransferError
from interlock.kv_transfer.handshake import Welcome
from interlock.kv_transfer.transports.channel import Channel
from interlock.kv_transfer.transports.interfaces import interface_of
from interlock.kv_transfer.transports.nixl_memory import MEMORY, NixlMemory
from interlock.kv_transfer.transports.pool_server import PoolServer
from interlock.kv_transfer.transports.pulse import Pulse
from interlock.kv_transfer.transports.tcp_link import admit_from, connect, listen
from interlock.kv_transfer.transports.transport import Answerer, Connection, Notify, PeerAddress, Registration

logger = logging.getLogger(__name__)

SHARED_MEMORY_TLS: Final = "posix,sysv,cma,self"
_DRAIN_SECONDS: Final = 0.05  # what a peer had sent that writes no more is taken in for so long before it counts as ended,
_TCP_DRAIN_SECONDS: Final = 0.25  # or for so long, where a kernel may hold some of it,
_DRAIN_LOOKS: Final = 100  # and so many times at least
_ACTIVE_SECONDS: Final = 0.0002  # between looks for notifications while a peer is at work with us
_IDLE_SECONDS: Final = 0.02
_STAYS_ACTIVE_SECONDS: Final = 1.0
_WITHOUT_OTHER_DEVICES: Final = frozenset(("tcp", "self", "posix", "sysv", "shm", "sm", "cma", "xpmem", "knem"))

_making = threading.Lock()  # UCX takes its options from the environment


class NixlTransport:
    """block_size, block_bytes: of one block of one layer of our pool, layers back to back in it.

    host, port: where the side channel listens (port 0: any); allowed_hosts: of peers; ucx_tls: UCX_TLS of this process, unless it is set
    already ('' leaves UCX its choice); error_handling: 'none' where UCX's shared memory is to be used, 'peer' for TCP and RDMA.
    Raises ConfigError where NIXL is not installed.
    """

    kind = "nixl"
    progresses_by_itself = True
    writes = True

    def __init__(
        self,
        *,
        name: str,
        block_size: int,
        block_bytes: int,
        host: str,
        port: int,
        allowed_hosts: Sequence[str],
        ucx_tls: str,
        error_handling: str | None,
    ) -> None:
        self.host: str | None = host
        self.port: int | None = port
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.stopping = False
        self._lock = threading.Lock()  # of the agent that peers reach
        self._allowed = tuple(allowed_hosts)
        self._factory = _AgentFactory(name, host, ucx_tls, error_handling)
        self._agent: Any = self._factory.make()
        self._own: Registration | None = None
        self._notify: Notify | None = None
        self._pulse = Pulse()
        self._memories: set[NixlMemory] = set()
        self._touched = 0.0
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    def register(self, memory: Registration, notify: Notify) -> None:
        """See `Transport.register`. Starts the thread that makes progress and takes notifications."""
        self._own, self._notify = memory, notify
        with self._lock:
            for segment in (memory.pool, memory.control):
                try:
                    self._agent.register_memory([(segment.address, segment.nbytes, 0, "")], MEMORY)
                except Exception as error:
                    raise KVTransferError(f"NIXL cannot register {segment.nbytes} bytes of memory: {error}") from error
        self._thread = threading.Thread(target=self._progress, name="interlock-nixl", daemon=True)
        self._thread.start()

    def describe(self, welcome: Welcome) -> Welcome:
        """See `Transport.describe`."""
        assert self._own is not None
        with self._lock:
            agent = self._agent.get_agent_metadata()
        return Welcome(
            version=welcome.version,
            engine_id=welcome.engine_id,
            epoch=welcome.epoch,
            pool=welcome.pool,
            pool_bytes=welcome.pool_bytes,
            layer_offsets=welcome.layer_offsets,
            agent=agent,
            pool_address=self._own.pool.address,
            control_address=self._own.control.address,
        )

    def serve(self, welcome: Welcome, rank: int, desk: Answerer) -> PoolServer:
        """See `Transport.serve`; `port` is known from here on."""
        assert self.host is not None
        admit = admit_from(self._allowed)
        listener = listen(self.host, self.port or 0)
        self.port = int(listener.getsockname()[1])
        return PoolServer(listener, admit, _Attentive(desk, self.touch))

    def connect(self, peer: PeerAddress, timeout: float, aborted: Callable[[], bool]) -> Channel:
        """See `Transport.connect`."""
        self.touch()
        return connect(peer, self._allowed, timeout, aborted)

    def open(self, connection: Connection, welcome: Welcome) -> NixlMemory:
        """See `Transport.open`."""
        assert isinstance(connection, Channel)
        memory = NixlMemory(self, welcome, connection.socket)
        with self._wake:
            self._memories.add(memory)
        self._pulse.watch(connection)
        return memory

    def drain(self) -> None:
        """Take in what a peer had sent that writes no more. RDMA needs no such thing: its queue pair ends with the peer."""
        deadline = time.monotonic() + (_TCP_DRAIN_SECONDS if self._factory.handles_errors else _DRAIN_SECONDS)
        looks = 0
        while time.monotonic() < deadline or looks < _DRAIN_LOOKS:
            self._take_notifications()
            looks += 1

    def stop(self) -> None:
        """See `Transport.stop`."""
        self.stopping = True

    def close(self) -> None:
        """See `Transport.close`."""
        with self._wake:
            self.stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._pulse.close()
        for memory in list(self._memories):
            memory.bury()
        with self._lock:
            self._agent = None

    # ---- for the memories that are open

    def touch(self) -> None:
        """A peer is at work with us: look often for a while."""
        now = time.monotonic()
        active, self._touched = now - self._touched < _STAYS_ACTIVE_SECONDS, now
        if not active:
            with self._wake:
                self._wake.notify()

    def make_agent(self) -> Any:
        """Another agent, for one peer. Raises KVTransferError."""
        try:
            return self._factory.make()
        except ConfigError as error:
            raise KVTransferError(str(error)) from error

    def forget(self, memory: NixlMemory) -> None:
        """A memory was closed."""
        with self._wake:
            self._memories.discard(memory)

    @property
    def pool(self) -> Buffer:
        """Our registered pool."""
        assert self._own is not None
        return self._own.pool

    def _progress(self) -> None:
        while True:
            self._take_notifications()
            with self._wake:
                if self.stopping:
                    return
                memories = list(self._memories)
            for memory in memories:
                memory.progress(time.monotonic() - _STAYS_ACTIVE_SECONDS)
            with self._wake:
                if self.stopping:
                    return
                active = time.monotonic() - self._touched < _STAYS_ACTIVE_SECONDS
                self._wake.wait(_ACTIVE_SECONDS if active else _IDLE_SECONDS)

    def _take_notifications(self) -> None:
        with self._lock:
            if self._agent is None:
                return
            try:
                arrived = self._agent.get_new_notifs()
            except Exception:
                logger.exception("NIXL's notifications could not be taken")
                return
        for messages in arrived.values():
            for message in messages:
                self.touch()
                assert self._notify is not None
                self._notify(bytes(message))


class _Attentive:
    """A desk that tells the transport of every message: a peer that speaks is about to move bytes."""

    def __init__(self, desk: Answerer, touch: Callable[[], None]) -> None:
        self._desk = desk
        self._touch = touch

    @property
    def malformed(self) -> int:
        return self._desk.malformed

    @malformed.setter
    def malformed(self, count: int) -> None:
        self._desk.malformed = count

    @property
    def foreign(self) -> int:
        return self._desk.foreign

    @foreign.setter
    def foreign(self, count: int) -> None:
        self._desk.foreign = count

    def answer(self, session: object, body: bytes) -> Any:
        self._touch()
        return self._desk.answer(session, body)

    def forget(self, session: object) -> None:
        self._desk.forget(session)


class _AgentFactory:
    """Makes agents with a UCX backend, all alike. handles_errors: UCX says when a peer has died."""

    def __init__(self, name: str, host: str, ucx_tls: str, error_handling: str | None) -> None:
        if ucx_tls:
            os.environ.setdefault("UCX_TLS", ucx_tls)
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what goes wrong with a peer is reported as an error of its load
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        self._tls = os.environ.get("UCX_TLS", "")
        self._mode = error_handling or ("none" if {"posix", "sysv", "shm", "sm"} & set(self._tls.split(",")) else "peer")
        self._devices = None if "UCX_NET_DEVICES" in os.environ else net_devices(self._tls, host)
        self._name = name
        self._count = 0
        self.handles_errors = self._mode == "peer"
        try:
            self._api: Any = importlib.import_module("nixl_cu12._api")
        except ImportError as error:
            raise ConfigError(f"transport is 'nixl', but NIXL cannot be imported ({error}); install interlock[nixl]") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)

    def make(self) -> Any:
        """Raises ConfigError."""
        with _making:
            self._count += 1
            if self._devices is not None:
                os.environ["UCX_NET_DEVICES"] = self._devices
            try:
                agent = self._api.nixl_agent(f"{self._name}-{self._count}", self._api.nixl_agent_config(backends=[], enable_prog_thread=False))
                agent.create_backend("UCX", {"ucx_error_handling_mode": self._mode})
            except Exception as error:
                raise ConfigError(f"NIXL's UCX backend cannot start with UCX_TLS={self._tls!r} and error handling {self._mode!r}: {error}") from error
            finally:
                if self._devices is not None:
                    del os.environ["UCX_NET_DEVICES"]
        return agent


def net_devices(tls: str, host: str) -> str | None:
    """UCX_NET_DEVICES, so that UCX listens where the side channel does and nowhere else: the interface of `host`. None where this cannot
    be said: a choice of UCX transports with other network devices than TCP's, or a host that is no interface's address."""
    chosen = set(tls.split(","))
    return interface_of(host) if "tcp" in chosen and chosen <= _WITHOUT_OTHER_DEVICES else None
