"""The producer's side of the shared-memory transport: a thread that hands the pool to peers that match, and keeps their leases.

Reads are one-sided: nothing here runs per read.
"""

import logging
import selectors
import socket
import threading

from interlock.core.errors import KVTransferError, PeerMismatchError
from interlock.kv_transfer.handshake import (
    PROTOCOL_VERSION,
    Done,
    Heartbeat,
    Hello,
    Leases,
    PoolDescription,
    Refused,
    Welcome,
    check_pool,
    check_version,
    decode,
)
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.transports.channel import Channel, check_same_user, listen

logger = logging.getLogger(__name__)


class PoolServer:
    """Serves one rank's pool. `welcome` is what a matching peer is told; `descriptors`: of the pool and of its control page.

    refused, malformed, foreign: connections that were turned away for a mismatch, for bytes that are no message, for another user.
    """

    def __init__(self, rank: int, welcome: Welcome, descriptors: tuple[int, int], leases: LeaseTable) -> None:
        self.refused = 0
        self.malformed = 0
        self.foreign = 0
        self._welcome = welcome
        self._descriptors = descriptors
        self._leases = leases
        self._listener = listen(welcome.engine_id, rank)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._introduced: set[Channel] = set()
        self._thread = threading.Thread(target=self._serve, name="interlock-pool-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close every connection. May be called twice."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._wake.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._close_all()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            logger.warning("a peer could not be accepted: %s", str(error))
            return
        try:
            check_same_user(connection)
        except (KVTransferError, OSError) as error:
            self.foreign += 1
            logger.warning("a connection was refused: %s", str(error))
            connection.close()
            return
        channel = Channel(connection)
        self._selector.register(connection, selectors.EVENT_READ, channel)

    def _read(self, channel: Channel) -> None:
        """Whatever a peer sends can cost it its connection, and nothing else."""
        try:
            open_still = channel.fill()
            while (body := channel.next_frame()) is not None:
                self._answer(channel, body)
            channel.take_descriptors(0)
        except KVTransferError as error:
            self.malformed += 1
            logger.warning("a connection was closed: %s", str(error))
            open_still = False
        except Exception:
            self.malformed += 1
            logger.exception("a connection was closed")
            open_still = False
        if not open_still:
            self._drop(channel)

    def _answer(self, channel: Channel, body: bytes) -> None:
        message = decode(body)
        if isinstance(message, Hello):
            try:
                check_version(message.version, message.engine_id)
                check_pool(self._welcome.pool, message.pool, message.engine_id)
            except PeerMismatchError as error:
                self.refused += 1
                logger.warning("a peer was refused: %s", str(error))
                channel.send(Refused(reason=f"refused by engine {self._welcome.engine_id!r}: {error}"))
                return
            channel.send(self._welcome, self._descriptors)
            self._introduced.add(channel)
        elif channel not in self._introduced:
            raise KVTransferError(f"a peer sent {type(message).__name__} before it introduced itself")
        elif isinstance(message, Heartbeat):
            channel.send(Leases(expiry=self._leases.extend(message.request_ids)))
        elif isinstance(message, Done):
            self._leases.done(message.request_id)
        else:
            raise KVTransferError(f"a consumer sent {type(message).__name__}, which only producers send")

    def _drop(self, channel: Channel) -> None:
        self._introduced.discard(channel)
        self._selector.unregister(channel.socket)
        channel.close()

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Channel):
                self._drop(key.data)
        self._selector.close()
        self._listener.close()
        self._woken.close()


def make_welcome(engine_id: str, epoch: int, pool: PoolDescription, pool_bytes: int, layer_offsets: list[int]) -> Welcome:
    """What matching peers are told of a pool; layer_offsets: where each layer begins, in bytes."""
    return Welcome(version=PROTOCOL_VERSION, engine_id=engine_id, epoch=epoch, pool=pool, pool_bytes=pool_bytes, layer_offsets=layer_offsets)
