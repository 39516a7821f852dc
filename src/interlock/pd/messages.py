"""The messages between the parent and its engine processes, and the channel that carries them (a Unix socket, length-prefixed msgpack)."""

import socket
import struct
import threading
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, tag=True, frozen=True):
    """Parent: build an engine. `engine` holds engine options by name, as plain JSON values."""

    engine: dict[str, Any]


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Parent: run one request. `prompt` is text, token ids, or an object with one of them, as `LLM.generate` takes it; `chat` puts text
    through the chat template (None: if there is one).

    kv_transfer_params: what prefill answered, for decode; {"do_remote_decode": true} for prefill; None for neither.
    """

    request_id: str
    prompt: str | list[int] | dict[str, Any]
    sampling: dict[str, Any]
    chat: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Parent: forget cached prefixes, so that the next request computes all of its prompt."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Parent: shut the engine down and end."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Engine process: where a long start is. `total` 0 means unknown."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Engine process: requests may come."""


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Engine process: a request is being worked on; now and then, so that a slow engine is told from one that does nothing any more."""


class Text(msgspec.Struct, tag=True, frozen=True):
    """Engine process: the next piece of a request's text."""

    request_id: str
    text: str


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Engine process: a request has ended.

    logprobs: per output token the float64 values of the sampled token and of the most likely ones, in the engine's order, with their
    token ids. modes: steps by graph mode, first appearance first. ttft_seconds: from the request's arrival in this process to its first token.
    load_parked: whether it waited for a load outside the steps.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[list[tuple[int, float]]]
    modes: dict[str, int]
    ttft_seconds: float
    kv_bytes_loaded: int
    load_wait_seconds: float
    num_failed_loads: int
    kv_transfer_params: dict[str, Any] | None = None
    load_parked: bool = False


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Engine process: one request could not be served; others go on."""

    request_id: str
    error: str


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """Engine process: it cannot go on and ends. `user_error` tells an error that the user can mend from a fault of ours."""

    error: str
    user_error: bool


ToEngine = Start | Generate | ResetPrefixCache | Stop
FromEngine = Progress | Ready | Heartbeat | Text | Finished | Failed | Fatal


class Channel:
    """Whole messages over a stream socket. Any thread may send; one receives. Timeouts are seconds, None for ever."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self._socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, for select."""
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, timeout: float | None = None) -> None:
        """Send one message. Raises OSError when the other side is gone, TimeoutError (an OSError too) when it takes nothing in."""
        with self._sending:
            body = self._encoder.encode(message)
            self._socket.settimeout(timeout)
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message. Raises EOFError when the other side has ended, TimeoutError when it sends no further byte."""
        self._socket.settimeout(timeout)
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._decoder.decode(self._read(size))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._socket.recv(size - len(data))
            except ConnectionError:
                piece = b""
            if not piece:
                raise EOFError("the other end of the channel is closed")
            data += piece
        return bytes(data)
