"""What a transport is: it moves bytes between the registered memory of two engines, one-sided, and brings them together first.

An engine makes one transport. It registers its pool and its control page, serves a side channel that peers introduce themselves on, and
opens the pools of others. Moving bytes is `RemoteMemory.post`; nothing of ours runs in the peer for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.errors import KVTransferError
from interlock.kv_transfer.handshake import Message, Welcome

Operation = Literal["read", "write"]
Descriptors = npt.NDArray[np.int64]
"""`[n, 3]` of (destination address, source address, bytes); a peer's addresses begin at `RemoteMemory.address`."""

Copy = Callable[[Descriptors, Buffer], int]
"""`copy(descriptors, abort)`: copies the list in order, without the GIL, until the word `abort` (int64 [1]) is not 0. Returns how many
were copied."""

Notify = Callable[[bytes], None]


class PeerGoneError(KVTransferError):
    """Nobody is there any more: the peer's process has ended. Not said of a peer that is only silent, which may still write."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where an engine is: by its id on this host, or at host and port. epoch: the life of it that is meant; 0 is any."""

    engine_id: str
    rank: int = 0
    host: str | None = None
    port: int | None = None
    epoch: int = 0

    @property
    def key(self) -> tuple[str, int, str | None, int | None]:
        """What tells peers apart."""
        return self.engine_id, self.rank, self.host, self.port


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """The memory that an engine shares. pool: uint8; control: the words of its control page; descriptors: of both, where they are files."""

    pool: Buffer
    control: Buffer
    descriptors: tuple[int, int]


class Transfer(Protocol):
    """A list that was posted."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; looks without waiting."""

    def wait(self, aborted: Callable[[], bool]) -> None:
        """Return when the last byte is in place, where it was posted to. Raises KVTransferError if it failed, or when `aborted` says
        so. Either way nothing of it writes any more."""


class RemoteMemory(Protocol):
    """The memory of one peer. `address`: where its pool begins, as descriptors name it."""

    @property
    def address(self) -> int:
        """Start of the peer's pool."""

    def post(self, operation: Operation, descriptors: Descriptors, abort: Buffer) -> Transfer:
        """Begin to move a list; `abort` (int64 [1]) may stop it between entries. May move everything before it returns, so never call
        it from a step's thread. Raises KVTransferError."""

    def tell(self, notification: bytes) -> None:
        """Have the peer's `notify` called, after all that was written and has ended. Raises KVTransferError."""

    def control(self, block_ids: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int64]]:
        """The peer's epoch (0: it has shut down) and the generations of its blocks now, read after everything posted before has ended."""

    def prefault(self) -> None:
        """Make the first read as fast as later ones."""

    def close(self) -> None:
        """Let go of the memory. May be called twice."""


class Connection(Protocol):
    """Messages with one peer's side channel. One thread at a time; `alive` and `close` from any."""

    def send(self, message: Message, timeout: float = 1.0) -> None:
        """Raises KVTransferError when the peer is gone, or has not taken it within `timeout` seconds."""

    def receive(self, timeout: float, aborted: Callable[[], bool]) -> Message:
        """The next message. Raises KVTransferError when the peer is gone, or sends something else; when no whole message is there within
        `timeout` seconds, or `aborted` says so, whatever else the peer sends meanwhile."""

    def has_unasked(self) -> bool:
        """Whether the peer has begun to send a message; without waiting. Raises KVTransferError when the connection is broken."""

    @property
    def alive(self) -> bool:
        """Whether the peer was there, as far as is known at this moment. A peer that stands still is missed after about three seconds."""

    @property
    def silent(self) -> bool:
        """Whether it has been missed."""

    def close(self) -> None:
        """May be called twice."""


class Server(Protocol):
    """The thread behind our side channel."""

    def close(self) -> None:
        """Stop it and close every connection. May be called twice."""


class Answerer(Protocol):
    """What a server asks for each message: see `PeerDesk`."""

    malformed: int
    foreign: int

    def answer(self, session: object, body: bytes) -> Message | None:
        """The answer to a message of a session. Raises KVTransferError for one that costs the peer its connection."""

    def forget(self, session: object) -> None:
        """A session is over."""


class Transport(Protocol):
    """One way of moving bytes. kind: its name in the handshake, which must be the same on both sides.

    progresses_by_itself: bytes move without a call from the step's thread. writes: `post("write", …)` works; where it does not, a
    consumer in WRITE mode copies for itself as soon as it is told.
    """

    kind: str
    progresses_by_itself: bool
    writes: bool

    @property
    def host(self) -> str | None:
        """Where our side channel listens; None: peers find it by engine id."""

    @property
    def port(self) -> int | None:
        """Its port."""

    def register(self, memory: Registration, notify: Notify) -> None:
        """Once: our memory; `notify` is called with notifications, on a thread of the transport. Raises KVTransferError."""

    def describe(self, welcome: Welcome) -> Welcome:
        """`welcome` with what a peer needs to reach our memory."""

    def serve(self, welcome: Welcome, rank: int, desk: Answerer) -> Server:
        """Start answering peers."""

    def connect(self, peer: PeerAddress, timeout: float, aborted: Callable[[], bool]) -> Connection:
        """A new connection to a peer's side channel. Raises KVTransferError; PeerGoneError when the peer has ended."""

    def open(self, connection: Connection, welcome: Welcome) -> RemoteMemory:
        """The memory of the peer that answered with `welcome`; from here on the peer has to give signs of life. Raises KVTransferError."""

    def drain(self) -> None:
        """A peer writes no more: what it had sent is taken in before this returns, so that nothing of it is written later."""

    def stop(self) -> None:
        """We are about to close: whatever waits for a peer ends soon, with an error."""

    def close(self) -> None:
        """Give everything back. May be called twice."""


class DoneTransfer:
    """A transfer that was over when it was posted."""

    done = True

    def wait(self, aborted: Callable[[], bool]) -> None:
        """Nothing to wait for."""
