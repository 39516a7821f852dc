"""What two engines tell each other before, and while, KV moves between them: typed messages, checked, never trusted.

A message that does not decode is refused by the receiver, which lives on. With a shared secret both sides prove that they know it
before anything else is said: `prove` over the nonces of both, which no recorded answer fits twice.
"""

import hashlib
import hmac
import math
from typing import Annotated

import msgspec

from interlock.core.buffer import ITEM_SIZES
from interlock.core.config import KVCacheConfig
from interlock.core.errors import KVTransferError, PeerMismatchError
from interlock.kv_transfer.references import KEY_BYTES, MAX_EPOCH

PROTOCOL_VERSION = 5
LAYOUT = "LBKHSD"  # layer, block, key or value, head, slot, dimension
MAX_MESSAGE_BYTES = 1 << 20
MAX_BLOCKS = 1 << 16  # of one announcement
NONCE_BYTES = 32

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Stamp = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
_Position = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Blocks = Annotated[list[_Position], msgspec.Meta(max_length=MAX_BLOCKS)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Proof = Annotated[bytes, msgspec.Meta(max_length=NONCE_BYTES)]
_Key = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]


class PoolDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What must agree for the bytes of one pool to mean the same in another; `block_size` and `num_blocks` may differ."""

    identity: _Text
    layout: _Text
    dtype: _Text
    num_layers: _Size
    num_kv_heads: _Size
    head_dim: _Size
    kernel_fingerprint: _Text
    block_size: _Size
    num_blocks: _Size


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An engine introduces itself. nonce: fresh random bytes, for the proof of a shared secret."""

    version: int
    engine_id: _Text
    pool: PoolDescription
    transport: _Text = "shared_memory"
    nonce: _Proof = b""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """Prove first that you know the secret, as `proof` shows that we do."""

    nonce: _Proof
    proof: _Proof


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag="proof"):
    """The answer to a challenge."""

    proof: _Proof


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The engine agrees. layer_offsets: bytes from the pool's start; key: which it signs the references of this life with; now: what
    the clock shows whose seconds it counts leases in.

    Shared memory: two descriptors come with it, the pool and its control page. NIXL: `agent` is the agent's metadata, and the two
    segments stand at these addresses of the engine.
    """

    version: int
    engine_id: _Text
    epoch: Annotated[int, msgspec.Meta(ge=1, le=MAX_EPOCH)]
    pool: PoolDescription
    pool_bytes: _Bytes
    layer_offsets: Annotated[list[_Bytes], msgspec.Meta(max_length=4096)]
    agent: Annotated[bytes, msgspec.Meta(max_length=1 << 19)] = b""
    pool_address: _Address = 0
    control_address: _Address = 0
    key: _Key = b""
    now: float = 0.0


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The producer does not agree."""

    reason: Annotated[str, msgspec.Meta(max_length=4096)]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The consumer still wants the blocks of these leases. Their references' signatures name them, so only who holds a reference can."""

    signatures: Annotated[list[_Text], msgspec.Meta(max_length=4096)]


class Leases(msgspec.Struct, frozen=True, kw_only=True, tag="leases"):
    """The answer to a heartbeat: end of each lease that exists, in seconds of the producer's clock."""

    expiry: dict[str, float]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The consumer needs the blocks of this lease (its reference's signature) no longer. Not answered."""

    signature: _Text


class Announce(msgspec.Struct, frozen=True, kw_only=True, tag="announce"):
    """WRITE mode: a consumer has allocated blocks for positions [start, stop) of `transfer_id` and wants them filled.

    nonce: names this announcement, never used again; what is pushed carries it. engine_id, rank, epoch, host, port: where the blocks
    are. block_ids: the first holds position `start`. num_tokens, token_digest: of the whole prompt that the producer computes.
    """

    transfer_id: _Text
    nonce: _Stamp
    engine_id: _Text
    rank: _Position
    epoch: _Stamp
    host: _Text | None
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None
    start: _Position
    stop: _Position
    block_ids: _Blocks
    num_tokens: _Size
    token_digest: _Text


class Announced(msgspec.Struct, frozen=True, kw_only=True, tag="announced"):
    """The producer will push, now or when it has computed the prompt; or the reason why it will not."""

    refusal: Annotated[str, msgspec.Meta(max_length=4096)] | None = None


class Pushed(msgspec.Struct, frozen=True, kw_only=True, tag="pushed"):
    """Positions [start, stop) of a layer are written. NIXL: into the announced blocks, and this arrives behind the last byte.
    Shared memory: in the producer's blocks (the first holds position `start`), from where the consumer copies them. Not answered."""

    transfer_id: _Text
    nonce: _Stamp
    layer: _Position
    start: _Position
    stop: _Position
    block_ids: _Blocks = []
    generations: Annotated[list[_Stamp], msgspec.Meta(max_length=MAX_BLOCKS)] = []


class PushEnded(msgspec.Struct, frozen=True, kw_only=True, tag="push_ended"):
    """The producer will push no more of it, and nothing that it has posted can write any more. Not answered."""

    transfer_id: _Text
    nonce: _Stamp
    reason: Annotated[str, msgspec.Meta(max_length=4096)]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The consumer gives an announcement up."""

    transfer_id: _Text
    nonce: _Stamp


class Cancelled(msgspec.Struct, frozen=True, kw_only=True, tag="cancelled"):
    """Nothing more is pushed for the announcement. ended: nothing that was posted for it can write any more; until then, ask again."""

    nonce: _Stamp
    ended: bool = True


Message = Hello | Challenge | Proof | Welcome | Refused | Heartbeat | Leases | Done | Announce | Announced | Pushed | PushEnded | Cancel | Cancelled

ANSWERS: dict[type[Message], type[Message]] = {Heartbeat: Leases, Announce: Announced, Cancel: Cancelled}
"""What a message is answered with after the introduction; the others are not answered."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message in `data`. Raises KVTransferError for anything that is not exactly one."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KVTransferError(f"a peer sent {len(data)} bytes that are no message: {error}") from None


def prove(secret: bytes, role: str, first_nonce: bytes, second_nonce: bytes, engine_id: str) -> bytes:
    """HMAC-SHA256 that shows knowledge of `secret`; role: 'client' or 'server', so that neither side's proof serves as the other's."""
    return hmac.new(secret, b"|".join((b"interlock", role.encode(), first_nonce, second_nonce, engine_id.encode())), hashlib.sha256).digest()


def check_proof(theirs: bytes, secret: bytes, role: str, first_nonce: bytes, second_nonce: bytes, engine_id: str) -> None:
    """Raises PeerMismatchError unless `theirs` is what `prove` gives. Takes the same time for every wrong proof."""
    if len(first_nonce) != NONCE_BYTES or not hmac.compare_digest(theirs, prove(secret, role, first_nonce, second_nonce, engine_id)):
        raise PeerMismatchError(f"engine {engine_id!r} does not prove that it knows our secret; give both engines the same 'secret'")


def describe_pool(config: KVCacheConfig) -> PoolDescription:
    """The description of our own pool."""
    return PoolDescription(
        identity=config.identity,
        layout=LAYOUT,
        dtype=config.dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kernel_fingerprint=config.kernel_fingerprint,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
    )


def check_version(theirs: int, engine_id: str) -> None:
    """Raises PeerMismatchError when the peer speaks another version of this protocol."""
    if theirs != PROTOCOL_VERSION:
        raise PeerMismatchError(
            f"engine {engine_id!r} speaks version {theirs} of the KV hand-off, we speak {PROTOCOL_VERSION}; run the same release on both"
        )


def check_pool(ours: PoolDescription, theirs: PoolDescription, engine_id: str) -> None:
    """Raises PeerMismatchError, with the two values, when the peer's KV would not be bit for bit what we would have computed."""
    for name in ("identity", "layout", "dtype", "num_layers", "num_kv_heads", "head_dim", "kernel_fingerprint"):
        our_value, their_value = getattr(ours, name), getattr(theirs, name)
        if our_value != their_value:
            raise PeerMismatchError(
                f"KV {name} differs: ours is {our_value!r}, that of engine {engine_id!r} is {their_value!r}; "
                "both engines must run the same model, options and release"
            )


def check_welcome(welcome: Welcome) -> None:
    """Raises KVTransferError when what a peer says of its pool and clock cannot be."""
    pool = welcome.pool
    if not math.isfinite(welcome.now):
        raise KVTransferError(f"engine {welcome.engine_id!r} says that its clock shows {welcome.now}, expected a finite number of seconds")
    if pool.dtype not in ITEM_SIZES:
        raise KVTransferError(f"engine {welcome.engine_id!r} holds KV of dtype {pool.dtype!r}, expected one of {sorted(ITEM_SIZES)}")
    layer_bytes = 2 * pool.num_blocks * pool.num_kv_heads * pool.block_size * pool.head_dim * ITEM_SIZES[pool.dtype]
    if len(welcome.layer_offsets) != pool.num_layers:
        raise KVTransferError(f"engine {welcome.engine_id!r} announces {len(welcome.layer_offsets)} layer offsets for {pool.num_layers} layers")
    if max(welcome.layer_offsets) + layer_bytes > welcome.pool_bytes:
        raise KVTransferError(f"engine {welcome.engine_id!r} announces layers that end beyond its pool of {welcome.pool_bytes} bytes")
