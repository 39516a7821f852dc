"""Messages between two engines over a socket; and the sockets of engines of one user on one host, which pass file descriptors too.

A frame is a 32-bit length and one message. A frame without a message asks for a sign of life, and is answered with another one. On Linux
the Unix socket has an abstract name, which vanishes with its owner; elsewhere it lies in a directory that only its user may enter.
"""

import contextlib
import os
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from interlock.core.errors import KVTransferError
from interlock.kv_transfer.handshake import MAX_MESSAGE_BYTES, Message, decode, encode
from interlock.kv_transfer.references import valid_engine_id
from interlock.kv_transfer.transports.transport import PeerGoneError

_LENGTH = struct.Struct("<I")
_CHUNK = 65536
_MAX_DESCRIPTORS = 4
_SLICE_SECONDS = 0.05  # how late an abort may be noticed
_PING_SECONDS = 0.5  # between two signs of life that are asked for
_SILENT_SECONDS = 2.5  # after which one that has not come is missed
_CLOSED = getattr(select, "POLLRDHUP", 0)  # beside what poll always reports; seen although there is something left to read
_SIGN_OF_LIFE = _LENGTH.pack(0)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def address(engine_id: str, rank: int) -> str:
    """Where engine `engine_id` of this user listens. It follows from the id alone, so no path is ever taken from a request."""
    if not valid_engine_id(engine_id):
        raise KVTransferError(f"engine_id is {engine_id!r}, expected up to 64 letters, digits, '_', '.', '-'")
    name = f"interlock-kv-{os.getuid()}-{engine_id}-{rank}"
    if sys.platform == "linux":
        return "\0" + name
    return str(Path(tempfile.gettempdir()) / f"interlock-{os.getuid()}" / name)


def listen(engine_id: str, rank: int) -> socket.socket:
    """The producer's listening socket. Raises KVTransferError when another live engine has this id."""
    where = address(engine_id, rank)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not where.startswith("\0"):
            _private_directory(Path(where).parent)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(where)
        listener.bind(where)
        listener.listen()
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise KVTransferError(f"engine_id {engine_id!r} cannot be listened for ({error}); give each engine of a host its own engine_id") from error
    return listener


def check_same_user(connection: socket.socket) -> None:
    """Raises KVTransferError when the other end belongs to another user."""
    if hasattr(socket, "SO_PEERCRED"):
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", credentials)[1]
        if uid != os.getuid():
            raise KVTransferError(f"the peer runs as user {uid}, expected {os.getuid()}; both engines must run as the same user")


class Channel:
    """One connection. Messages are framed by a 32-bit length; descriptors travel in front of the bytes of their message.

    One thread at a time sends and receives; `beat`, `alive` and `close` may be called from any. what: the peer, in errors.
    """

    def __init__(self, connection: socket.socket, what: str = "the peer") -> None:
        connection.setblocking(False)
        self.socket = connection
        self._what = what
        self._received = bytearray()
        self._descriptors: list[int] = []
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._asked: float | None = None
        self._next_ping = 0.0
        self._silent = False
        self._broken: str | None = None

    @classmethod
    def connect(cls, engine_id: str, rank: int) -> "Channel":
        """To the engine `engine_id` of this user. Raises KVTransferError; PeerGoneError when there is no such engine."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)  # a full backlog is a refusal, not a wait
            connection.connect(address(engine_id, rank))
            check_same_user(connection)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            connection.close()
            raise PeerGoneError(f"engine {engine_id!r} cannot be reached: {error}") from error
        except OSError as error:
            connection.close()
            raise KVTransferError(f"engine {engine_id!r} cannot be reached: {error}") from error
        except KVTransferError:
            connection.close()
            raise
        return cls(connection, f"engine {engine_id!r}")

    @property
    def buffered(self) -> int:
        """Bytes received and not taken yet."""
        return len(self._received)

    def send(self, message: Message, timeout: float = 1.0) -> None:
        """Send all of it. Raises KVTransferError when the peer is gone, or has not taken it within `timeout` seconds."""
        body = encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        deadline = time.monotonic() + timeout
        with self._writing:
            try:
                while True:
                    with contextlib.suppress(BlockingIOError):
                        data = data[self.socket.send(data[:_CHUNK]) :]
                    if not data:
                        return
                    self._check(deadline, lambda: False)
                    self._wait(select.POLLOUT)
            except OSError as error:
                raise self._lost(error) from error
            finally:
                if 0 < len(data) < _LENGTH.size + len(body):
                    self._broken = "a message was sent to it in part"

    def receive(self, timeout: float, aborted: Callable[[], bool]) -> Message:
        """The next message. Raises KVTransferError when the peer is gone, or sends something else; when no whole message is there within
        `timeout` seconds, or `aborted` says so, whatever else the peer sends meanwhile. A peer that answers at once is heard out: what an
        engine says while it closes arrives."""
        begun = time.monotonic()
        while True:
            with self._reading:
                if (message := self._next_message()) is not None:
                    return message
                is_open = self.fill()
                if (message := self._next_message()) is not None:
                    return message
            if not is_open:
                raise self._lost("the peer closed it")
            self._check(begun + timeout, lambda: time.monotonic() > begun + _SLICE_SECONDS and aborted())
            self._wait(select.POLLIN)

    def has_unasked(self) -> bool:
        """Whether the peer has begun to send a message; without waiting. Raises KVTransferError when the connection is broken."""
        with self._reading:
            self.fill()
            self._drop_signs_of_life()
            return any(self._received[: _LENGTH.size])  # the first bytes of another sign of life would be zeros

    def beat(self) -> None:
        """To be called several times a second: takes in what has come, and asks for a sign of life. A peer that gives none for
        `_SILENT_SECONDS` counts as lost from then on, and so does one that sends more than any message takes, and that nobody asked for."""
        if self._reading.acquire(blocking=False):
            try:
                if len(self._received) > MAX_MESSAGE_BYTES + _LENGTH.size:
                    self._broken = f"it sent more than {MAX_MESSAGE_BYTES} bytes that nobody asked for"
                if self._broken is None:
                    with contextlib.suppress(KVTransferError):
                        self.fill()
                    self._drop_signs_of_life()
            finally:
                self._reading.release()
        now, asked = time.monotonic(), self._asked
        if asked is not None:
            self._silent |= now - asked > _SILENT_SECONDS
        elif now >= self._next_ping and self._writing.acquire(blocking=False):
            try:
                self._asked, self._next_ping = now, now + _PING_SECONDS
                if self.socket.send(_SIGN_OF_LIFE) < len(_SIGN_OF_LIFE):
                    self._broken = "a sign of life was asked for in part"
            except OSError:
                pass  # a full buffer is a peer that does not read: it will be missed
            finally:
                self._writing.release()

    def fill(self) -> bool:
        """Read what is there without waiting. False: the peer has closed. Raises KVTransferError when the connection is broken."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, _CHUNK, _MAX_DESCRIPTORS, _CLOEXEC)
        except BlockingIOError:
            return True
        except OSError as error:
            raise self._lost(error) from error
        if data:
            self._asked = None
        self._descriptors += descriptors
        self._received += data
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            self._broken = "it passed file descriptors that nobody asked for"
            raise self._lost(self._broken)
        return bool(data)

    def next_frame(self, limit: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """The body of the next whole message received, empty for a sign of life. Raises KVTransferError for a length above `limit`."""
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > limit:
            raise KVTransferError(f"a peer announces a message of {length} bytes, expected at most {limit}")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return body

    def take_descriptors(self, count: int) -> list[int]:
        """The descriptors received so far, which now belong to the caller. Raises KVTransferError if there are not exactly `count`."""
        if len(self._descriptors) != count:
            raise KVTransferError(f"a peer passed {len(self._descriptors)} file descriptors, expected {count}")
        taken, self._descriptors = self._descriptors, []
        return taken

    @property
    def silent(self) -> bool:
        """Whether the peer has been missed: it gave no sign of life for `_SILENT_SECONDS`."""
        return self._silent

    @property
    def alive(self) -> bool:
        """Whether the peer holds its end open, has given signs of life and kept within bounds, as far as is known at this moment."""
        poll = select.poll()
        try:
            poll.register(self.socket, _CLOSED)
        except ValueError:  # closed here
            return False
        return not self._silent and self._broken is None and not poll.poll(0)

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took. May be called twice."""
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _next_message(self) -> Message | None:
        while (body := self.next_frame()) is not None:
            if body:
                return decode(body)
        return None

    def _drop_signs_of_life(self) -> None:
        while self._received[: _LENGTH.size] == _SIGN_OF_LIFE:
            del self._received[: _LENGTH.size]

    def _check(self, deadline: float, aborted: Callable[[], bool]) -> None:
        if self._silent:
            raise self._lost(f"no sign of life for {_SILENT_SECONDS:g} s")
        if self._broken is not None:
            raise self._lost(self._broken)
        if aborted():
            raise KVTransferError("the exchange with the peer was given up")
        if time.monotonic() > deadline:
            raise KVTransferError(f"{self._what} did not answer in time")

    def _wait(self, event: int) -> None:
        """For one slice at most."""
        poll = select.poll()
        try:
            poll.register(self.socket, event)
        except ValueError:
            raise self._lost("it was closed here") from None
        poll.poll(1000 * _SLICE_SECONDS)

    def _lost(self, cause: object) -> KVTransferError:
        return KVTransferError(f"the connection to {self._what} was lost: {cause}")


def _private_directory(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise KVTransferError(f"{path} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}, expected ours with 700; remove it")
