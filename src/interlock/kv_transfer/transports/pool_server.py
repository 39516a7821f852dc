"""The side channel's server: a thread that answers peers, on a Unix socket or over TCP; on the former it passes our segments' descriptors.

Reads are one-sided: nothing here runs per read. What anybody sends is held within bounds: strangers are turned away when they connect, a
peer that has not introduced itself may send only what an introduction takes, and no connection waits for another.
"""

import logging
import selectors
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from interlock.core.errors import KVTransferError
from interlock.kv_transfer.handshake import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, PoolDescription, Welcome, encode
from interlock.kv_transfer.transports.channel import Channel
from interlock.kv_transfer.transports.repeats import FirstWarnings
from interlock.kv_transfer.transports.transport import Answerer

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_STRANGER_BYTES = 1 << 14  # of a message before the introduction
_MAX_STRANGERS = 64  # connections without an introduction
_MAX_CONNECTIONS = 4096
_MAX_BUFFERED_BYTES = 64 << 20  # of messages that have not arrived whole, and of answers, all peers together
_NO_DESCRIPTOR_SECONDS = 0.05
_MAX_UNSENT_BYTES = 4 << 20  # of answers that a peer does not take


class _Session:
    """One connection, and the answers that its peer has not taken yet."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.unsent = bytearray()
        self.descriptors: Sequence[int] = ()

    @property
    def held(self) -> int:
        """Bytes that are kept for it."""
        return self.channel.buffered + len(self.unsent)


class PoolServer:
    """Serves one rank on `listener`. admit: raises KVTransferError for a connection that is not to be heard; descriptors: of the pool and
    of its control page, which travel with a Welcome."""

    def __init__(self, listener: socket.socket, admit: Callable[[socket.socket], None], desk: Answerer, descriptors: tuple[int, ...] = ()) -> None:
        self._descriptors = descriptors
        self._desk = desk
        self._admit = admit
        self._warnings = FirstWarnings(logger)
        self._listener = listener
        self._sessions: OrderedDict[_Session, None] = OrderedDict()  # least recently heard first
        self._strangers: OrderedDict[_Session, None] = OrderedDict()
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
            for key, events in self._selector.select():
                if key.fileobj is self._woken:
                    self._close_all()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._sessions:  # it may have been dropped for another one
                    self._attend(key.data, events)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._warnings.warn(f"a peer could not be accepted: {error}")
            if self._strangers:
                self._drop(next(iter(self._strangers)))
            else:
                time.sleep(_NO_DESCRIPTOR_SECONDS)
            return
        try:
            self._admit(connection)
        except (KVTransferError, OSError) as error:
            self._desk.foreign += 1
            self._warnings.warn(f"a connection was refused: {error}")
            connection.close()
            return
        session = _Session(Channel(connection))
        self._sessions[session] = self._strangers[session] = None
        self._selector.register(connection, selectors.EVENT_READ, session)
        if len(self._strangers) > _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        if len(self._sessions) > _MAX_CONNECTIONS:
            self._drop(next(iter(self._sessions)))

    def _attend(self, session: _Session, events: int) -> None:
        try:
            open_still = True
            if events & selectors.EVENT_READ:
                open_still = self._read(session)
            self._flush(session)
        except KVTransferError as error:
            self._desk.malformed += 1
            self._warnings.warn(f"a connection was closed: {error}")
            open_still = False
        except OSError:
            open_still = False  # the peer has gone
        except Exception:
            self._desk.malformed += 1
            logger.exception("a connection was closed")
            open_still = False
        if not open_still:
            self._drop(session)

    def _read(self, session: _Session) -> bool:
        channel = session.channel
        self._sessions.move_to_end(session)
        try:
            open_still = channel.fill()
        except KVTransferError:
            return False  # the peer has gone
        while (body := channel.next_frame(_STRANGER_BYTES if session in self._strangers else MAX_MESSAGE_BYTES)) is not None:
            if not body and session not in self._strangers:
                session.unsent += _LENGTH.pack(0)
                continue
            answer = self._desk.answer(channel, body)
            if answer is not None:
                data = encode(answer)
                session.unsent += _LENGTH.pack(len(data)) + data
            if isinstance(answer, Welcome):
                self._strangers.pop(session, None)
                session.descriptors = self._descriptors
            self._check_unsent(session)
        self._check_unsent(session)
        channel.take_descriptors(0)
        if session.held and sum(other.held for other in self._sessions) > _MAX_BUFFERED_BYTES:
            self._warnings.warn("peers send more of messages that do not end, or take fewer answers, than there is room for; the worst was dropped")
            self._drop(max(self._sessions, key=lambda other: other.held))
            return True
        return open_still

    @staticmethod
    def _check_unsent(session: _Session) -> None:
        if len(session.unsent) > _MAX_UNSENT_BYTES:
            raise KVTransferError("a peer does not take its answers")

    def _flush(self, session: _Session) -> None:
        if session not in self._sessions:
            return
        connection = session.channel.socket
        while session.unsent:
            try:
                if session.descriptors:
                    sent = socket.send_fds(connection, [session.unsent], session.descriptors)
                    session.descriptors = ()
                else:
                    sent = connection.send(session.unsent)
            except BlockingIOError:
                break
            del session.unsent[:sent]
        waits = selectors.EVENT_WRITE if session.unsent else 0
        self._selector.modify(connection, selectors.EVENT_READ | waits, session)

    def _drop(self, session: _Session) -> None:
        if session in self._sessions:
            del self._sessions[session]
            self._strangers.pop(session, None)
            self._desk.forget(session.channel)
            self._selector.unregister(session.channel.socket)
            session.channel.close()

    def _close_all(self) -> None:
        for session in list(self._sessions):
            self._drop(session)
        self._selector.close()
        self._listener.close()
        self._woken.close()


def make_welcome(engine_id: str, epoch: int, pool: PoolDescription, pool_bytes: int, layer_offsets: list[int]) -> Welcome:
    """What matching peers are told of a pool; layer_offsets: where each layer begins, in bytes."""
    return Welcome(version=PROTOCOL_VERSION, engine_id=engine_id, epoch=epoch, pool=pool, pool_bytes=pool_bytes, layer_offsets=layer_offsets)
