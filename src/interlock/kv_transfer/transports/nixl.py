"""The NIXL transport: one-sided reads and writes over UCX (shared memory between processes of one host, TCP, RDMA where it is set up).

Between two local processes UCX copies inside the post, so posts belong on a connector's own threads, never on a step's. Prepared lists
of all blocks of both pools are kept per peer; a transfer of scattered whole blocks then only names their numbers.
"""

import contextlib
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
from interlock.kv_transfer.transports.shared_memory import control_bytes, control_words
from interlock.kv_transfer.transports.transport import Answerer, Connection, Descriptors, Notify, Operation, PeerAddress, Registration
from interlock.kv_transfer.transports.zmq_link import ZmqConnection, ZmqServer

logger = logging.getLogger(__name__)

SHARED_MEMORY_TLS: Final = "posix,sysv,cma,self"
_MEMORY: Final = "DRAM"
_DRAIN_SECONDS: Final = 0.05  # what a lost peer had sent is taken in for so long before it counts as ended
_ACTIVE_SECONDS: Final = 0.0002  # between looks for notifications while a peer is at work with us
_IDLE_SECONDS: Final = 0.02
_STAYS_ACTIVE_SECONDS: Final = 1.0
_WATCH_SECONDS: Final = 0.02  # how often a peer that keeps a transfer waiting is looked at


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
            self._prepared = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._strided(self._own.pool.address, self._own.pool.nbytes), _MEMORY)
        return self._prepared

    def prepare_remote(self, agent_name: str, address: int, nbytes: int) -> Any:
        """The list of a peer's blocks, which are as large as ours; called with the lock held."""
        return self.agent.prep_xfer_dlist(agent_name, self._strided(address, nbytes), _MEMORY)

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
            self._registered.append(self.agent.register_memory([(memory.address, memory.nbytes, 0, "")], _MEMORY))
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


class NixlMemory:
    """A peer's pool and control page, as NIXL reaches them. alive: whether the peer's side channel stands."""

    def __init__(self, transport: NixlTransport, welcome: Welcome, alive: Callable[[], bool]) -> None:
        self._transport = transport
        self._alive = alive
        self._address = welcome.pool_address
        self._control_address = welcome.control_address
        pool = welcome.pool
        self._num_blocks = pool.num_blocks
        self._pool_bytes = welcome.pool_bytes
        self._control_lock = threading.Lock()
        with transport.lock:
            try:
                self._name = _text(transport.agent.add_remote_agent(welcome.agent))
                self._words = transport.scratch(control_bytes(pool.num_blocks))
                self._prepared = None
                if welcome.pool_bytes % transport.block_bytes == 0 and pool.block_size == transport.block_size:
                    self._prepared = transport.prepare_remote(self._name, self._address, welcome.pool_bytes)
            except KVTransferError:
                raise
            except Exception as error:
                raise KVTransferError(f"NIXL cannot reach engine {welcome.engine_id!r}: {error}") from error

    @property
    def address(self) -> int:
        """See `RemoteMemory.address`."""
        return self._address

    def post(self, operation: Operation, descriptors: Descriptors, abort: Buffer, notification: bytes = b"") -> "NixlTransfer":
        """See `RemoteMemory.post`. A list of single whole blocks names prepared ones; another one is built, with neighbours merged."""
        destinations, sources, sizes = descriptors.T
        local, remote = (destinations, sources) if operation == "read" else (sources, destinations)
        transport, handle = self._transport, None
        transport.touch()
        with transport.lock:
            try:
                handle = self._make_prepared(operation, local, remote, sizes, notification) or self._make(
                    operation, local, remote, sizes, notification
                )
                state = transport.agent.transfer(handle)
            except Exception as error:
                if handle is not None:
                    with contextlib.suppress(Exception):
                        transport.agent.release_xfer_handle(handle)
                raise KVTransferError(f"NIXL could not {operation}: {_named(error)}") from error
            transfer = NixlTransfer(transport, handle, operation, self._alive)
            transfer.take(state)
        return transfer

    def control(self, block_ids: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int64]]:
        """Reads the peer's words: the header and the span of generations that holds `block_ids`. See `RemoteMemory.control`."""
        header = control_bytes(0)
        first, last = int(block_ids.min()), int(block_ids.max())
        span = np.array([header + 8 * first, 8 * (last - first + 1)], np.int64)
        offsets = np.array([0, span[0]], np.int64)
        sizes = np.array([header, span[1]], np.int64)
        abort = Buffer.zeros((1,), "int64")
        local, remote = self._words.address + offsets, self._control_address + offsets
        with self._control_lock:
            self.post("read", np.stack([local, remote, sizes], axis=1), abort).wait(lambda: False)
            epoch, generations = control_words(self._words, self._num_blocks)
            return epoch, generations[block_ids].astype(np.int64)

    def prefault(self) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        """See `RemoteMemory.close`."""
        transport = self._transport
        transport.drain()
        with transport.lock:
            if transport.agent is not None and self._name:
                with contextlib.suppress(Exception):
                    if self._prepared is not None:
                        self._prepared.release()
                    transport.agent.remove_remote_agent(self._name)
                transport.give_back(self._words)
            self._name = ""

    def _make_prepared(self, operation: str, local: Any, remote: Any, sizes: Any, notification: bytes) -> Any:
        """None if the list is not one of single whole blocks of both pools."""
        size, pool = self._transport.block_bytes, self._transport.pool
        if self._prepared is None or len(sizes) == 1 or (sizes != size).any():
            return None
        ours, our_rest = np.divmod(local - pool.address, size)
        theirs, their_rest = np.divmod(remote - self._address, size)
        if our_rest.any() or their_rest.any():
            return None
        side = self._transport.prepared()
        return self._transport.agent.make_prepped_xfer(
            operation.upper(), side, ours.astype(np.int32), self._prepared, theirs.astype(np.int32), notification
        )

    def _make(self, operation: str, local: Any, remote: Any, sizes: Any, notification: bytes) -> Any:
        agent = self._transport.agent
        ours, theirs = np.zeros((2, len(sizes), 3), np.uint64)
        ours[:, 0], theirs[:, 0] = local, remote
        ours[:, 1] = theirs[:, 1] = sizes
        ours, theirs = agent.get_xfer_descs(ours, _MEMORY), agent.get_xfer_descs(theirs, _MEMORY)
        return agent.initialize_xfer(operation.upper(), ours, theirs, self._name, notification)


class NixlTransfer:
    """See `Transfer`. What UCX was given cannot be taken back, so an abort waits for it: it is one layer.

    With error handling 'none' UCX says nothing of a peer that has died, and what was queued for it never ends; its side channel tells.
    """

    def __init__(self, transport: NixlTransport, handle: Any, operation: str, alive: Callable[[], bool]) -> None:
        self._transport = transport
        self._alive = alive
        self._handle = handle
        self._operation = operation
        self._error: str | None = None
        self._ended = False

    @property
    def done(self) -> bool:
        """See `Transfer.done`."""
        return self._look()

    def wait(self, aborted: Callable[[], bool]) -> None:
        """See `Transfer.wait`."""
        pause, next_look = 0.0, time.monotonic() + _WATCH_SECONDS
        while not self._look():
            time.sleep(pause)
            pause = min(pause + 1e-5, _ACTIVE_SECONDS)
            if time.monotonic() > next_look and not self._transport.reports_deaths:
                next_look = time.monotonic() + _WATCH_SECONDS
                if not self._alive():
                    self._bury()
        if self._error is not None:
            raise KVTransferError(f"NIXL could not {self._operation}: {self._error}")
        if aborted():
            raise KVTransferError(f"the {self._operation} was stopped")

    def _look(self) -> bool:
        if self._ended:
            return True
        with self._transport.lock:
            try:
                state = self._transport.agent.check_xfer_state(self._handle)
            except Exception as error:
                state, self._error = "ERR", _named(error)
            self.take(state)
        return self._ended

    def _bury(self) -> None:
        """The peer is dead: what it had sent is taken in, and nothing else can come."""
        self._transport.drain()
        if not self._look():
            with self._transport.lock:
                self.take("ERR")

    def take(self, state: str) -> None:
        """What NIXL says of it; called with the lock held."""
        if state == "PROC":
            return
        with contextlib.suppress(Exception):
            self._transport.agent.release_xfer_handle(self._handle)
        if state == "ERR":
            self._error = self._error or "the connection to the peer was lost"
        self._ended = True


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


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _named(error: Exception) -> str:
    return f"the connection to the peer was lost ({error})" if "DISCONNECT" in str(error) else f"{type(error).__name__}: {error}"
