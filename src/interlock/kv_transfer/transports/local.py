"""The shared-memory transport: peers of one user on one host map each other's pools read-only and copy for themselves.

Nobody maps a pool of another engine writable: the pool is sealed against it. So in WRITE mode the producer tells the consumer of each
layer as it is written, and the consumer copies; the bytes move once, as in a push, but by the consumer's own thread.
"""

import contextlib
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.errors import KVTransferError
from interlock.kv_transfer.handshake import Welcome
from interlock.kv_transfer.transports.channel import Channel, check_same_user, listen
from interlock.kv_transfer.transports.pool_server import PoolServer
from interlock.kv_transfer.transports.pulse import Pulse
from interlock.kv_transfer.transports.shared_memory import ControlView, ReadOnlyMapping
from interlock.kv_transfer.transports.transport import (
    Answerer,
    Connection,
    Copy,
    Descriptors,
    DoneTransfer,
    Notify,
    Operation,
    PeerAddress,
    Registration,
)


class SharedMemoryTransport:
    """See the module. copy: how bytes are moved."""

    kind = "shared_memory"
    progresses_by_itself = True
    writes = False
    host: str | None = None
    port: int | None = None

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._descriptors: tuple[int, int] | None = None
        self._pulse = Pulse()

    def register(self, memory: Registration, notify: Notify) -> None:
        """See `Transport.register`. There are no notifications: what peers have to say comes over the side channel."""
        self._descriptors = memory.descriptors

    def describe(self, welcome: Welcome) -> Welcome:
        """The descriptors say all."""
        return welcome

    def serve(self, welcome: Welcome, rank: int, desk: Answerer) -> PoolServer:
        """See `Transport.serve`."""
        assert self._descriptors is not None
        return PoolServer(listen(welcome.engine_id, rank), check_same_user, desk, self._descriptors)

    def connect(self, peer: PeerAddress, timeout: float, aborted: Callable[[], bool]) -> Channel:
        """See `Transport.connect`; the engine's id is its address."""
        return Channel.connect(peer.engine_id, peer.rank)

    def open(self, connection: Connection, welcome: Welcome) -> "MappedMemory":
        """See `Transport.open`."""
        assert isinstance(connection, Channel)
        pool_fd, control_fd = connection.take_descriptors(2)
        memory = MappedMemory(pool_fd, control_fd, welcome, self._copy)
        self._pulse.watch(connection)
        return memory

    def drain(self) -> None:
        """Nothing of a peer's is on its way."""

    def stop(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """See `Transport.close`."""
        self._pulse.close()


class MappedMemory:
    """A peer's pool and control page, mapped read-only. Takes ownership of the descriptors."""

    def __init__(self, pool_fd: int, control_fd: int, welcome: Welcome, copy: Copy) -> None:
        try:
            self._pool = ReadOnlyMapping(pool_fd, welcome.pool_bytes)
        except KVTransferError:
            with contextlib.suppress(OSError):
                os.close(control_fd)
            raise
        self._control = ControlView(control_fd, welcome.pool.num_blocks)
        self._copy = copy
        self._prefaulted = False

    @property
    def address(self) -> int:
        """See `RemoteMemory.address`."""
        return self._pool.buffer.address

    def post(self, operation: Operation, descriptors: Descriptors, abort: Buffer) -> DoneTransfer:
        """Copies before it returns. See `RemoteMemory.post`."""
        if operation != "read":
            raise KVTransferError("a mapped pool was to be written, expected a read: pools of other engines are mapped read-only")
        if self._copy(descriptors, abort) < len(descriptors):
            raise KVTransferError("the read was stopped")
        return DoneTransfer()

    def tell(self, notification: bytes) -> None:
        """There is no way: the side channel says it."""
        raise KVTransferError("a peer that maps our pool is told over the side channel, not by a notification")

    def control(self, block_ids: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int64]]:
        """See `RemoteMemory.control`."""
        generations: npt.NDArray[np.int64] = self._control.generations[block_ids].astype(np.int64)
        return self._control.epoch, generations

    def prefault(self) -> None:
        """Done once."""
        if not self._prefaulted:
            self._prefaulted = True
            self._pool.prefault()

    def close(self) -> None:
        """The mapping goes with the last copy that uses it."""
