"""What NIXL reaches of a peer: its pool and control page; and the transfers to and from them.

Each peer has an agent of ours to itself. NIXL can neither cancel what it was given nor close a connection under it: released or removed,
it goes on when the peer does, into memory that may be another's by then. An agent that ends takes all of it along; but UCX ends a process
that, over TCP, is about to answer several reads of such an agent. So an agent ends only when its peer has ended, or we do; of one that
merely stands still, what it holds up has not ended.
"""

import contextlib
import select
import socket
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
_LATE_SECONDS: Final = 0.05  # what a peer had sent that has ended is taken in for so long
_LOST: Final = "the connection to the peer was lost"


class NixlMemory:
    """A peer's pool and control page, as NIXL reaches them. connection: to the peer's side channel, which the peer closes when it ends."""

    def __init__(self, transport: "NixlTransport", welcome: Welcome, connection: socket.socket) -> None:
        self.lock = threading.Lock()  # an agent is used by one thread at a time
        self._transport = transport
        self._closing = False
        self._gone_at: float | None = None
        self._address = welcome.pool_address
        self._control_address = welcome.control_address
        pool = welcome.pool
        self._num_blocks = pool.num_blocks
        self._words = Buffer.zeros((control_bytes(pool.num_blocks),), "uint8")
        self._control_lock = threading.Lock()
        self._transfers: set[NixlTransfer] = set()
        self._told = 0.0
        self._sides: tuple[Any, Any] | None = None  # prepared lists of the blocks of both pools, where they are of one size
        self._agent: Any = transport.make_agent()
        self._watched = connection.dup()  # it outlives the connection
        try:
            for memory in (transport.pool, self._words):
                self._agent.register_memory([(memory.address, memory.nbytes, 0, "")], MEMORY)
            name = self._agent.add_remote_agent(welcome.agent)
            self._name = name.decode() if isinstance(name, bytes) else str(name)
            if welcome.pool_bytes % transport.block_bytes == 0 and pool.block_size == transport.block_size:
                ours = self._strided(transport.pool.address, transport.pool.nbytes)
                theirs = self._strided(self._address, welcome.pool_bytes)
                self._sides = (
                    self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, MEMORY),
                    self._agent.prep_xfer_dlist(self._name, theirs, MEMORY),
                )
        except Exception as error:
            self.bury()
            raise KVTransferError(f"NIXL cannot reach engine {welcome.engine_id!r}: {error}") from error

    @property
    def address(self) -> int:
        """See `RemoteMemory.address`."""
        return self._address

    def post(self, operation: Operation, descriptors: Descriptors, abort: Buffer) -> "NixlTransfer":
        """See `RemoteMemory.post`. A list of single whole blocks names prepared ones; another one is built, with neighbours merged."""
        destinations, sources, sizes = descriptors.T
        local, remote = (destinations, sources) if operation == "read" else (sources, destinations)
        self._transport.touch()
        with self.lock:
            if self._closing:
                raise KVTransferError(f"NIXL could not {operation}: {_LOST}")
            try:
                handle = self._make_prepared(operation, local, remote, sizes) or self._make(operation, local, remote, sizes)
                state = self._agent.transfer(handle)
            except Exception as error:
                raise KVTransferError(f"NIXL could not {operation}: {_named(error)}") from error
            transfer = NixlTransfer(self, handle, operation)
            self._transfers.add(transfer)
            self.take(transfer, state)
        return transfer

    def tell(self, notification: bytes) -> None:
        """See `RemoteMemory.tell`."""
        with self.lock:
            if self._closing:
                raise KVTransferError(f"NIXL could not notify: {_LOST}")
            self._told = time.monotonic()
            try:
                self._agent.send_notif(self._name, notification)
            except Exception as error:
                raise KVTransferError(f"NIXL could not notify: {_named(error)}") from error

    def progress(self, since: float) -> None:
        """Send on what was told after `since`, unless a transfer does so just now."""
        if self._told > since and self.lock.acquire(blocking=False):
            try:
                if self._agent is not None:
                    self._agent.get_new_notifs()
            finally:
                self.lock.release()

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
        """See `RemoteMemory.close`. The agent ends with the last transfer that is under way."""
        with self.lock:
            self._closing = True
            if not self._transfers:
                self._end_agent()

    def bury(self) -> None:
        """The peer has ended, or we do: what is under way ends with it, and writes and reads nothing any more."""
        with self.lock:
            self._closing = True
            for transfer in list(self._transfers):
                self.take(transfer, "ERR")
            self._end_agent()

    # ---- for transfers

    def watch(self) -> None:
        """To be called often by whoever waits: notices that the peer has ended, and buries it. One that only stands still is waited for."""
        if self._transport.stopping:
            self.bury()
            return
        with self.lock:
            if self._agent is None:
                return
            poll = select.poll()
            poll.register(self._watched, select.POLLRDHUP)
            if not poll.poll(0):
                return
        self._gone_at = self._gone_at or time.monotonic()
        if time.monotonic() > self._gone_at + _LATE_SECONDS:
            self.bury()

    def look(self, transfer: "NixlTransfer") -> None:
        """Take in how a transfer stands, and let it go on."""
        with self.lock:
            if transfer.ended:
                return
            try:
                state = self._agent.check_xfer_state(transfer.handle)
            except Exception as error:
                state, transfer.error = "ERR", _named(error)
            self.take(transfer, state)

    def take(self, transfer: "NixlTransfer", state: str) -> None:
        """What NIXL says of a transfer; called with the lock held."""
        if state == "PROC":
            return
        if state == "ERR":
            transfer.error = transfer.error or _LOST
        else:
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(transfer.handle)
        transfer.handle, transfer.ended = None, True
        self._transfers.discard(transfer)
        if self._closing and not self._transfers:
            self._end_agent()

    def _end_agent(self) -> None:
        """Called with the lock held."""
        if self._agent is not None:
            self._sides = self._agent = None
            self._watched.close()
            self._transport.forget(self)

    def _strided(self, address: int, nbytes: int) -> npt.NDArray[np.uint64]:
        size = self._transport.block_bytes
        return np.array([[address, size, 0, size, nbytes // size]], np.uint64)

    def _make_prepared(self, operation: str, local: Any, remote: Any, sizes: Any) -> Any:
        """None if the list is not one of single whole blocks of both pools."""
        size, pool = self._transport.block_bytes, self._transport.pool
        if self._sides is None or len(sizes) == 1 or (sizes != size).any():
            return None
        ours, our_rest = np.divmod(local - pool.address, size)
        theirs, their_rest = np.divmod(remote - self._address, size)
        if our_rest.any() or their_rest.any():
            return None
        our_side, their_side = self._sides
        return self._agent.make_prepped_xfer(operation.upper(), our_side, ours.astype(np.int32), their_side, theirs.astype(np.int32))

    def _make(self, operation: str, local: Any, remote: Any, sizes: Any) -> Any:
        ours, theirs = np.zeros((2, len(sizes), 3), np.uint64)
        ours[:, 0], theirs[:, 0] = local, remote
        ours[:, 1] = theirs[:, 1] = sizes
        ours, theirs = self._agent.get_xfer_descs(ours, MEMORY), self._agent.get_xfer_descs(theirs, MEMORY)
        return self._agent.initialize_xfer(operation.upper(), ours, theirs, self._name)


class NixlTransfer:
    """See `Transfer`. What UCX was given cannot be taken back, so an abort waits for it: it is one layer."""

    def __init__(self, memory: NixlMemory, handle: Any, operation: str) -> None:
        self.handle = handle
        self.error: str | None = None
        self.ended = False
        self._memory = memory
        self._operation = operation

    @property
    def done(self) -> bool:
        """See `Transfer.done`."""
        if not self.ended:
            self._memory.look(self)
        return self.ended

    def wait(self, aborted: Callable[[], bool]) -> None:
        """See `Transfer.wait`."""
        pause, next_look = 0.0, time.monotonic() + _WATCH_SECONDS
        while not self.done:
            time.sleep(pause)
            pause = min(pause + 1e-5, _POLL_SECONDS)
            if time.monotonic() > next_look:
                next_look = time.monotonic() + _WATCH_SECONDS
                self._memory.watch()
        if self.error is not None:
            raise KVTransferError(f"NIXL could not {self._operation}: {self.error}")
        if aborted():
            raise KVTransferError(f"the {self._operation} was stopped")


def _named(error: Exception) -> str:
    return f"{_LOST} ({error})" if "DISCONNECT" in str(error) else f"{type(error).__name__}: {error}"
