"""Who may speak to us and what we answer: one desk behind every kind of side channel.

Whatever a peer sends can cost it its connection, and nothing else.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from interlock.core.errors import KVTransferError, PeerMismatchError
from interlock.kv_transfer.handshake import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Announce,
    Announced,
    Cancel,
    Cancelled,
    Challenge,
    Done,
    Heartbeat,
    Hello,
    Leases,
    Message,
    PoolDescription,
    Proof,
    Pushed,
    PushEnded,
    Refused,
    Welcome,
    check_pool,
    check_proof,
    check_version,
    decode,
    prove,
)
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.transports.repeats import FirstWarnings

logger = logging.getLogger(__name__)

PROOF_REQUIRED = "a 'secret' is set here, and the peer sent none"


class PushBook(Protocol):
    """What a producer in WRITE mode does with announcements."""

    def announce(self, message: Announce) -> str | None:
        """Take an announcement in; the reason if it cannot be kept."""

    def cancel(self, message: Cancel) -> bool:
        """Push no more of it; whether nothing of it can write any more. Returns at once: others wait for their answers."""


@dataclass(slots=True)
class _Challenged:
    hello: Hello
    nonce: bytes


class PeerDesk:
    """Answers peers. `welcome` is what a matching peer is told; pushes: announcements, where we produce in WRITE mode; pushed: what is
    told of pushes, where we consume in it.

    refused, malformed, foreign: peers that were turned away for a mismatch, for bytes that are no message, for where they come from.
    """

    def __init__(
        self,
        welcome: Welcome,
        kind: str,
        leases: LeaseTable,
        *,
        secret: bytes | None = None,
        pushes: PushBook | None = None,
        pushed: Callable[[Pushed | PushEnded], None] | None = None,
    ) -> None:
        self.refused = 0
        self.malformed = 0
        self.foreign = 0
        self._welcome = welcome
        self._kind = kind
        self._leases = leases
        self._secret = secret
        self._pushes = pushes
        self._pushed = pushed
        self._introduced: dict[object, str] = {}
        self._warnings = FirstWarnings(logger)
        self._challenged: dict[object, _Challenged] = {}

    def answer(self, session: object, body: bytes) -> Message | None:
        """The answer to a message of a session, if it wants one. Raises KVTransferError for what is refused with the connection."""
        message = decode(body)
        if isinstance(message, Hello | Proof):
            try:
                return self._introduce(session, message)
            except PeerMismatchError as error:
                self.refused += 1
                self._warnings.warn(f"a peer was refused: {error}")
                return Refused(reason=f"refused by engine {self._welcome.engine_id!r}: {error}")
        engine_id = self._introduced.get(session)
        if engine_id is None:
            raise KVTransferError(f"a peer sent {type(message).__name__} before it introduced itself")
        return self._serve(engine_id, message)

    def forget(self, session: object) -> None:
        """The session is over."""
        self._introduced.pop(session, None)
        self._challenged.pop(session, None)

    def _introduce(self, session: object, message: Hello | Proof) -> Message:
        if isinstance(message, Hello):
            check_version(message.version, message.engine_id)
            if message.transport != self._kind:
                raise PeerMismatchError(
                    f"KV transport differs: ours is {self._kind!r}, that of engine {message.engine_id!r} is {message.transport!r}"
                )
            check_pool(self._welcome.pool, message.pool, message.engine_id)
            if self._secret is not None:
                if len(message.nonce) != NONCE_BYTES:
                    raise PeerMismatchError(PROOF_REQUIRED)
                nonce = secrets.token_bytes(NONCE_BYTES)
                self._challenged[session] = _Challenged(message, nonce)
                return Challenge(nonce=nonce, proof=prove(self._secret, "server", message.nonce, nonce, self._welcome.engine_id))
            introduced = message
        else:
            asked = self._challenged.pop(session, None)
            if asked is None or self._secret is None:
                raise KVTransferError("a peer sent a proof that nobody asked for")
            check_proof(message.proof, self._secret, "client", asked.nonce, asked.hello.nonce, asked.hello.engine_id)
            introduced = asked.hello
        self._introduced[session] = introduced.engine_id
        return msgspec.structs.replace(self._welcome, now=self._leases.now())

    def _serve(self, engine_id: str, message: Message) -> Message | None:
        if isinstance(message, Heartbeat):
            return Leases(expiry=self._leases.extend(message.signatures))
        if isinstance(message, Done):
            self._leases.done(message.signature)
        elif isinstance(message, Announce) and self._pushes is not None:
            if message.engine_id != engine_id:
                raise KVTransferError(f"engine {engine_id!r} announced blocks of engine {message.engine_id!r}, expected its own")
            return Announced(refusal=self._pushes.announce(message))
        elif isinstance(message, Cancel) and self._pushes is not None:
            return Cancelled(nonce=message.nonce, ended=self._pushes.cancel(message))
        elif isinstance(message, Pushed | PushEnded) and self._pushed is not None:
            self._pushed(message)
        else:
            raise KVTransferError(f"a peer sent {type(message).__name__}, which is not for us (mode, or role)")
        return None


def introduce(
    send: Callable[[Message], None],
    receive: Callable[[], Message],
    engine_id: str,
    ours: Hello,
    secret: bytes | None,
) -> Welcome:
    """The client's side of the introduction to `engine_id`. `ours` is complete but for the nonce. Raises PeerMismatchError, KVTransferError."""
    nonce = secrets.token_bytes(NONCE_BYTES) if secret is not None else b""
    send(Hello(version=ours.version, engine_id=ours.engine_id, pool=ours.pool, transport=ours.transport, nonce=nonce))
    answer = receive()
    if secret is not None and not isinstance(answer, Refused):
        if not isinstance(answer, Challenge):
            raise PeerMismatchError(f"engine {engine_id!r} asks for no proof, but a 'secret' is set here; give both engines the same one")
        check_proof(answer.proof, secret, "server", nonce, answer.nonce, engine_id)
        send(Proof(proof=prove(secret, "client", answer.nonce, nonce, ours.engine_id)))
        answer = receive()
    if isinstance(answer, Challenge):
        raise PeerMismatchError(f"engine {engine_id!r} asks for a proof of its 'secret', and none is set here")
    if isinstance(answer, Refused):
        raise PeerMismatchError(answer.reason)
    if not isinstance(answer, Welcome):
        raise KVTransferError(f"engine {engine_id!r} answered with {type(answer).__name__}, expected Welcome")
    check_version(answer.version, engine_id)
    if answer.engine_id != engine_id:
        raise PeerMismatchError(f"engine {answer.engine_id!r} answered where {engine_id!r} was expected")
    return answer


def hello(engine_id: str, pool: PoolDescription, kind: str) -> Hello:
    """Our introduction, but for the nonce."""
    return Hello(version=PROTOCOL_VERSION, engine_id=engine_id, pool=pool, transport=kind)
