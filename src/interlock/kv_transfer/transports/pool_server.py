"""The shared-memory transport's side channel: a thread that answers peers on a Unix socket and passes them our segments' descriptors.

Reads are one-sided: nothing here runs per read.
"""

import logging
import selectors
import socket
import threading

from interlock.core.errors import KVTransferError
from interlock.kv_transfer.handshake import PROTOCOL_VERSION, PoolDescription, Welcome
from interlock.kv_transfer.transports.channel import Channel, check_same_user, listen
from interlock.kv_transfer.transports.repeats import FirstWarnings
from interlock.kv_transfer.transports.transport import Answerer

logger = logging.getLogger(__name__)


class PoolServer:
    """Serves one rank. `descriptors`: of the pool and of its control page; they travel with a Welcome."""

    def __init__(self, engine_id: str, rank: int, descriptors: tuple[int, int], desk: Answerer) -> None:
        self._descriptors = descriptors
        self._desk = desk
        self._warnings = FirstWarnings(logger)
        self._listener = listen(engine_id, rank)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
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
            self._desk.foreign += 1
            self._warnings.warn(f"a connection was refused: {error}")
            connection.close()
            return
        channel = Channel(connection)
        self._selector.register(connection, selectors.EVENT_READ, channel)

    def _read(self, channel: Channel) -> None:
        try:
            open_still = channel.fill()
            while (body := channel.next_frame()) is not None:
                answer = self._desk.answer(channel, body)
                if answer is not None:
                    channel.send(answer, descriptors=self._descriptors if isinstance(answer, Welcome) else ())
            channel.take_descriptors(0)
        except KVTransferError as error:
            self._desk.malformed += 1
            self._warnings.warn(f"a connection was closed: {error}")
            open_still = False
        except Exception:
            self._desk.malformed += 1
            logger.exception("a connection was closed")
            open_still = False
        if not open_still:
            self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        self._desk.forget(channel)
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
