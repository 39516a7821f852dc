"""The NIXL transport: one-sided reads and writes over UCX (shared memory between processes of one host, TCP, RDMA where it is set up).

Between two local processes UCX copies inside the post, so posts belong on a connector's own threads, never on a step's. Prepared lists
of all blocks of both pools are kept per peer; a transfer of scattered whole blocks then only names their numbers.
"""

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zmq

from interlock.core.buffer import Buffer
from interlock.core.errors import ConfigError, KVTransferError
from interlock.kv_transfer.handshake import Welcome
from interlock.kv_transfer.transports.nixl_memory import MEMORY, NixlMemory
from interlock.kv_transfer.transports.transport import Answerer, Connection, Notify, PeerAddress, Registration
from interlock.kv_transfer.transports.zmq_link import ZmqConnection, ZmqServer

logger = logging.getLogger(__name__)

SHARED_MEMORY_TLS: Final = "posix,sysv,cma,self"
_DRAIN_SECONDS: Final = 0.05  # what a lost peer had sent is taken in for so long before it counts as ended
_ACTIVE_SECONDS: Final = 0.0002  # between looks for notifications while a peer is at work with us
_IDLE_SECONDS: Final = 0.02
_STAYS_ACTIVE_SECONDS: Final = 1.0


class NixlTransport:
    """One agent. block_size, block_bytes: of one block of one layer of our pool, layers back to back in it.

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
        self.lock = threading.Lock()  # the agent is used by one thread at a time
        self._allowed = tuple(allowed_hosts)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.agent, self.reports_deaths = _make_agent(name, ucx_tls, error_handling)
        self._registered: list[Any] = []
        self._own: Registration | None = None
        self._prepared: Any = None
        self._notify: Notify | None = None
        self._scratch: dict[int, list[Buffer]] = {}
        self._touched = 0.0
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def register(self, memory: Registration, notify: Notify) -> None:
        """See `Transport.register`. Starts the thread that makes progress and takes notifications."""
        self._own, self._notify = memory, notify
        with self.lock:
            for segment in (memory.pool, memory.control):
                self._register(segment)
        self._thread = threading.Thread(target=self._progress, name="interlock-nixl", daemon=True)
        self._thread.start()

    def describe(self, welcome: Welcome) -> Welcome:
        """See `Transport.describe`."""
        assert self._own is not None
        with self.lock:
            agent = self.agent.get_agent_metadata()
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

    def serve(self, welcome: Welcome, rank: int, desk: Answerer) -> ZmqServer:
        """See `Transport.serve`; `port` is known from here on."""
        assert self.host is not None
        server = ZmqServer(self._context, self.host, self.port or 0, self._allowed, _Attentive(desk, self.touch))
        self.port = server.port
        return server

    def connect(self, peer: PeerAddress, timeout: float) -> ZmqConnection:
        """See `Transport.connect`."""
        self.touch()
        return ZmqConnection(self._context, peer, self._allowed)

    def open(self, connection: Connection, welcome: Welcome) -> "NixlMemory":
        """See `Transport.open`."""
        return NixlMemory(self, welcome, lambda: connection.alive)

    def close(self) -> None:
        """See `Transport.close`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self.lock:
            if self._prepared is not None:
                self._prepared.release()
                self._prepared = None
            while self._registered:
                self.agent.deregister_memory(self._registered.pop())
            self.agent = None
        self._context.destroy(linger=0)

    # ---- for the memories that are open

    def touch(self) -> None:
        """A peer is at work with us: look often for a while."""
        now = time.monotonic()
        active, self._touched = now - self._touched < _STAYS_ACTIVE_SECONDS, now
        if not active:
            with self._wake:
                self._wake.notify()

    def scratch(self, nbytes: int) -> Buffer:
        """Registered memory of our own, to be given back with `give_back`; called with the lock held."""
        kept = self._scratch.setdefault(nbytes, [])
        if kept:
            return kept.pop()
        memory = Buffer.zeros((nbytes,), "uint8")
        self._register(memory)
        return memory

    def give_back(self, memory: Buffer) -> None:
        """Called with the lock held."""
        self._scratch[memory.nbytes].append(memory)

    def prepared(self) -> Any:
        """The list of our own blocks; called with the lock held."""
        if self._prepared is None:
            assert self._own is not None
            self._prepared = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._strided(self._own.pool.address, self._own.pool.nbytes), MEMORY)
        return self._prepared

    def prepare_remote(self, agent_name: str, address: int, nbytes: int) -> Any:
        """The list of a peer's blocks, which are as large as ours; called with the lock held."""
        return self.agent.prep_xfer_dlist(agent_name, self._strided(address, nbytes), MEMORY)

    @property
    def pool(self) -> Buffer:
        """Our registered pool."""
        assert self._own is not None
        return self._own.pool

    def drain(self) -> None:
        """Take in what a peer that is lost had sent. RDMA needs no such thing: its queue pair ends with the peer."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline:
            self._take_notifications()

    def _strided(self, address: int, nbytes: int) -> npt.NDArray[np.uint64]:
        return np.array([[address, self.block_bytes, 0, self.block_bytes, nbytes // self.block_bytes]], np.uint64)

    def _register(self, memory: Buffer) -> None:
        try:
            self._registered.append(self.agent.register_memory([(memory.address, memory.nbytes, 0, "")], MEMORY))
        except Exception as error:
            raise KVTransferError(f"NIXL cannot register {memory.nbytes} bytes of memory: {error}") from error

    def _progress(self) -> None:
        while True:
            self._take_notifications()
            with self._wake:
                if self._stopping:
                    return
                active = time.monotonic() - self._touched < _STAYS_ACTIVE_SECONDS
                self._wake.wait(_ACTIVE_SECONDS if active else _IDLE_SECONDS)

    def _take_notifications(self) -> None:
        with self.lock:
            if self.agent is None:
                return
            try:
                arrived = self.agent.get_new_notifs()
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


def _make_agent(name: str, ucx_tls: str, error_handling: str | None) -> tuple[Any, bool]:
    """An agent with a UCX backend, and whether UCX reports that a peer has died."""
    if ucx_tls:
        os.environ.setdefault("UCX_TLS", ucx_tls)
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what goes wrong with a peer is reported as an error of its load
    chosen = os.environ.get("UCX_TLS", "")
    mode = error_handling or ("none" if "posix" in chosen or "sysv" in chosen or "shm" in chosen.split(",") else "peer")
    try:
        api: Any = importlib.import_module("nixl_cu12._api")
    except ImportError as error:
        raise ConfigError(f"transport is 'nixl', but NIXL cannot be imported ({error}); install interlock[nixl]") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[], enable_prog_thread=False))
    try:
        agent.create_backend("UCX", {"ucx_error_handling_mode": mode})
    except Exception as error:
        raise ConfigError(f"NIXL's UCX backend cannot start with UCX_TLS={chosen!r} and error handling {mode!r}: {error}") from error
    return agent, mode == "peer"
