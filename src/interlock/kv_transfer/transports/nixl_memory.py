"""What NIXL reaches of a peer: its pool and control page; and the transfers to and from them."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.errors import KVTransferError
from interlock.kv_transfer.handshake import Welcome
from interlock.kv_transfer.transports.shared_memory import control_bytes, control_words
from interlock.kv_transfer.transports.transport import Descriptors, Operation

if TYPE_CHECKING:
    from interlock.kv_transfer.transports.nixl import NixlTransport

MEMORY: Final = "DRAM"
_POLL_SECONDS: Final = 0.0002  # at most, between two looks at a transfer
_WATCH_SECONDS: Final = 0.02  # how often a peer that keeps a transfer waiting is looked at


class NixlMemory:
    """A peer's pool and control page, as NIXL reaches them. alive: whether the peer's side channel stands."""

    def __init__(self, transport: "NixlTransport", welcome: Welcome, alive: Callable[[], bool]) -> None:
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
                name = transport.agent.add_remote_agent(welcome.agent)
                self._name = name.decode() if isinstance(name, bytes) else str(name)
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
        ours, theirs = agent.get_xfer_descs(ours, MEMORY), agent.get_xfer_descs(theirs, MEMORY)
        return agent.initialize_xfer(operation.upper(), ours, theirs, self._name, notification)


class NixlTransfer:
    """See `Transfer`. What UCX was given cannot be taken back, so an abort waits for it: it is one layer.

    With error handling 'none' UCX says nothing of a peer that has died, and what was queued for it never ends; its side channel tells.
    """

    def __init__(self, transport: "NixlTransport", handle: Any, operation: str, alive: Callable[[], bool]) -> None:
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
            pause = min(pause + 1e-5, _POLL_SECONDS)
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


def _named(error: Exception) -> str:
    return f"the connection to the peer was lost ({error})" if "DISCONNECT" in str(error) else f"{type(error).__name__}: {error}"
