"""What two engines tell each other before one reads the other's KV: typed messages, checked, never trusted.

A message that does not decode is refused by the receiver, which lives on.
"""

from typing import Annotated

import msgspec

from interlock.core.config import KVCacheConfig
from interlock.core.errors import KVTransferError, PeerMismatchError
from interlock.kv_transfer.references import MAX_EPOCH

PROTOCOL_VERSION = 1
LAYOUT = "LBKHSD"  # layer, block, key or value, head, slot, dimension
MAX_MESSAGE_BYTES = 1 << 20

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


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
    """A consumer introduces itself."""

    version: int
    engine_id: _Text
    pool: PoolDescription


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The producer agrees; two descriptors come with it: the pool, and its control page. layer_offsets: bytes from the pool's start."""

    version: int
    engine_id: _Text
    epoch: Annotated[int, msgspec.Meta(ge=1, le=MAX_EPOCH)]
    pool: PoolDescription
    pool_bytes: _Bytes
    layer_offsets: Annotated[list[_Bytes], msgspec.Meta(max_length=4096)]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The producer does not agree."""

    reason: Annotated[str, msgspec.Meta(max_length=4096)]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The consumer still wants the blocks of these leases (`remote_request_id`)."""

    request_ids: Annotated[list[_Text], msgspec.Meta(max_length=4096)]


class Leases(msgspec.Struct, frozen=True, kw_only=True, tag="leases"):
    """The answer to a heartbeat: end of each lease that exists, in seconds of the host's monotonic clock."""

    expiry: dict[str, float]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The consumer needs the blocks of this lease no longer. Not answered."""

    request_id: _Text


Message = Hello | Welcome | Refused | Heartbeat | Leases | Done

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
