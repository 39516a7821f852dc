"""References to KV that another engine holds, and how they travel in `kv_transfer_params` (vLLM's NIXL shape).

Those parameters pass through clients and proxies, so everything in them is checked before it is used. What binds a reference together is
its signature, made with a key that the producer draws for its life and tells peers, never clients: nothing is read, kept or given back
for a reference that was altered.
"""

import hashlib
import hmac
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from interlock.core.errors import KVTransferError, RequestError

MAX_EPOCH = 2**53 - 1  # JSON readers keep integers exact up to here
KEY_BYTES = 32
_ENGINE_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Stamp = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class RemoteReference(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of a finished request of another engine: positions [0, num_tokens), in `block_ids` of `block_size` positions each.

    epoch: the life of the producer that gave it; generations: of each block, when it was given; token_digest: of the tokens at these
    positions; expiry: end of the lease in seconds of the producer's monotonic clock, if it is not extended; request_id: the producer's
    name for the lease; host, port: where its side channel listens, None for an engine of this host that is found by its id.

    push: the producer writes these positions into our blocks, under the transfer id `request_id`; there are no blocks to read then
    (they may not be computed yet), `num_tokens` is the length of the producer's prompt, `token_digest` that of all of it, and `epoch` is 0.

    signature: see `sign`; "" if the client sent both requests at once, so that the producer had not answered yet. key: what makes the
    reference the same one when it comes twice; two that differ in anything are two.
    """

    engine_id: str
    rank: int
    epoch: int
    request_id: str
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    block_size: int
    num_tokens: int
    token_digest: str
    expiry: float
    host: str | None = None
    port: int | None = None
    push: bool = False
    signature: str = ""
    key: str = ""


class TransferName(NamedTuple):
    """A WRITE hand-off: the id that the client gave both requests, and the prompt (its length and digest) that both engines were sent.
    So a transfer id that somebody guessed meets nobody else's prompt."""

    transfer_id: str
    num_tokens: int
    token_digest: str


class _ProducerParams(msgspec.Struct, kw_only=True):
    """The fields of `kv_transfer_params` that a consumer reads; others are passed over."""

    remote_engine_id: _Text
    remote_request_id: _Text
    remote_block_ids: list[list[_Count]]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    remote_token_digest: _Text
    remote_blocks_expiry_time: float
    remote_block_generations: list[_Stamp]
    remote_block_size: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    remote_epoch: Annotated[int, msgspec.Meta(ge=1, le=MAX_EPOCH)]
    remote_signature: _Text
    remote_rank: _Count = 0
    remote_host: _Text | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class _PushParams(msgspec.Struct, kw_only=True):
    """The fields that a consumer reads in WRITE mode; both legs may be sent at once, so nothing is known of the producer's blocks."""

    transfer_id: _Text
    remote_engine_id: _Text
    remote_rank: _Count = 0
    remote_host: _Text | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    remote_token_digest: _Text | None = None
    remote_signature: _Text | None = None


def to_params(reference: RemoteReference) -> dict[str, Any]:
    """The `kv_transfer_params` with which the producer answers; `from_params` reads them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": reference.engine_id,
        "remote_request_id": reference.request_id,
        "remote_block_ids": [list(reference.block_ids)],
        "remote_host": reference.host,
        "remote_port": reference.port,
        "tp_size": 1,
        "remote_num_tokens": reference.num_tokens,
        "remote_blocks_expiry_time": reference.expiry,
        "transfer_mode": "push" if reference.push else "pull",
        **({"transfer_id": reference.request_id} if reference.push else {}),
        "remote_token_digest": reference.token_digest,
        "remote_rank": reference.rank,
        "remote_epoch": reference.epoch,
        "remote_block_generations": list(reference.generations),
        "remote_block_size": reference.block_size,
        "remote_signature": reference.signature,
    }


def from_params(params: Mapping[str, Any]) -> RemoteReference:
    """The reference in `params`. Raises RequestError that names the field, its value, and what was expected."""
    try:
        fields = msgspec.convert(dict(params), _ProducerParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"kv_transfer_params cannot be used: {error}; pass the object that the prefill engine returned unchanged") from None
    if not valid_engine_id(fields.remote_engine_id):
        raise RequestError(f"kv_transfer_params.remote_engine_id is {fields.remote_engine_id!r}, expected up to 64 letters, digits, '_', '.', '-'")
    if len(fields.remote_block_ids) != 1:
        raise RequestError(f"kv_transfer_params.remote_block_ids has {len(fields.remote_block_ids)} KV-cache groups, expected 1")
    block_ids = fields.remote_block_ids[0]
    needed = -(-fields.remote_num_tokens // fields.remote_block_size)
    if len(block_ids) != needed:
        raise RequestError(
            f"kv_transfer_params.remote_block_ids names {len(block_ids)} blocks, expected {needed}: "
            f"remote_num_tokens is {fields.remote_num_tokens}, remote_block_size is {fields.remote_block_size}"
        )
    if len(fields.remote_block_generations) != len(block_ids):
        raise RequestError(
            f"kv_transfer_params.remote_block_generations has {len(fields.remote_block_generations)} entries, expected {len(block_ids)}"
        )
    if not math.isfinite(fields.remote_blocks_expiry_time):
        raise RequestError(f"kv_transfer_params.remote_blocks_expiry_time is {fields.remote_blocks_expiry_time}, expected a finite number of seconds")
    return _with_key(
        engine_id=fields.remote_engine_id,
        rank=fields.remote_rank,
        epoch=fields.remote_epoch,
        request_id=fields.remote_request_id,
        block_ids=tuple(block_ids),
        generations=tuple(fields.remote_block_generations),
        block_size=fields.remote_block_size,
        num_tokens=fields.remote_num_tokens,
        token_digest=fields.remote_token_digest,
        expiry=fields.remote_blocks_expiry_time,
        host=fields.remote_host,
        port=fields.remote_port,
        signature=fields.remote_signature,
    )


def push_from_params(params: Mapping[str, Any], token_ids: Sequence[int]) -> RemoteReference:
    """The reference of a WRITE hand-off, for a request whose prompt is `token_ids`. Raises RequestError as `from_params`."""
    try:
        fields = msgspec.convert(dict(params), _PushParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"kv_transfer_params cannot be used: {error}; mode 'write' needs transfer_id and remote_engine_id") from None
    if not valid_engine_id(fields.remote_engine_id):
        raise RequestError(f"kv_transfer_params.remote_engine_id is {fields.remote_engine_id!r}, expected up to 64 letters, digits, '_', '.', '-'")
    if fields.remote_num_tokens is not None and fields.remote_num_tokens > len(token_ids):
        raise RequestError(
            f"kv_transfer_params.remote_num_tokens is {fields.remote_num_tokens}, but the request has {len(token_ids)} tokens; "
            "send the decode engine the prompt that the prefill engine got"
        )
    num_tokens = fields.remote_num_tokens or len(token_ids)
    digest = token_digest(token_ids[:num_tokens])
    if fields.remote_token_digest not in (None, digest):
        raise _other_prompt(fields.remote_token_digest, num_tokens, digest)
    return _with_key(
        engine_id=fields.remote_engine_id,
        rank=fields.remote_rank,
        epoch=0,
        request_id=fields.transfer_id,
        block_ids=(),
        generations=(),
        block_size=0,
        num_tokens=num_tokens,
        token_digest=digest,
        expiry=math.inf,
        host=fields.remote_host,
        port=fields.remote_port,
        push=True,
        signature=fields.remote_signature or "",
    )


def check_tokens(reference: RemoteReference, token_ids: Sequence[int]) -> None:
    """Raises RequestError unless a request with these tokens may read what `reference` stands for."""
    if len(token_ids) < reference.num_tokens:
        raise RequestError(
            f"kv_transfer_params.remote_num_tokens is {reference.num_tokens}, but the request has {len(token_ids)} tokens; "
            "send the decode engine the prompt that the prefill engine got"
        )
    digest = token_digest(token_ids[: reference.num_tokens])
    if digest != reference.token_digest:
        raise _other_prompt(reference.token_digest, reference.num_tokens, digest)


def sign(key: bytes, reference: RemoteReference) -> str:
    """HMAC-SHA256, in hex, of all that a reference says (of a push: of what both engines know before it begins). It also names the lease.

    key: the producer's, `KEY_BYTES` of them.
    """
    said = msgspec.structs.replace(reference, signature="", key="")
    if said.push:
        said = msgspec.structs.replace(said, epoch=0, block_ids=(), generations=(), block_size=0, expiry=0.0, host=None, port=None)
    return hmac.new(key, b"interlock reference|" + msgspec.msgpack.encode(said), hashlib.sha256).hexdigest()


def verify(key: bytes, reference: RemoteReference) -> str:
    """The name of the reference's lease. Raises KVTransferError unless the reference is what the owner of `key` has signed."""
    signature = sign(key, reference)
    if len(key) != KEY_BYTES:
        raise KVTransferError(f"engine {reference.engine_id!r} gave a key of {len(key)} bytes, expected {KEY_BYTES}")
    if reference.push and not reference.signature:
        return signature
    if not hmac.compare_digest(reference.signature.encode(), signature.encode()):
        raise KVTransferError(
            f"the kv_transfer_params of request {reference.request_id!r} were altered: remote_signature is not what engine "
            f"{reference.engine_id!r} gives for the other fields; pass the object that the prefill engine returned unchanged"
        )
    return signature


def token_digest(token_ids: Sequence[int]) -> str:
    """A digest of a token sequence."""
    return hashlib.sha256(np.asarray(token_ids, np.int64).tobytes()).hexdigest()[:32]


def valid_engine_id(engine_id: str) -> bool:
    """Whether `engine_id` may name an engine: it becomes part of an address."""
    return _ENGINE_ID.fullmatch(engine_id) is not None


def _with_key(**fields: Any) -> RemoteReference:
    reference = RemoteReference(**fields)
    return msgspec.structs.replace(reference, key=hashlib.sha256(msgspec.msgpack.encode(reference)).hexdigest())


def _other_prompt(given: str | None, num_tokens: int, digest: str) -> RequestError:
    return RequestError(
        f"kv_transfer_params.remote_token_digest is {given!r}, that of the request's first {num_tokens} tokens is {digest!r}; "
        "send the decode engine the prompt that the prefill engine got"
    )
