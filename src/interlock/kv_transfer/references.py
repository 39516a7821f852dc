"""References to KV that another engine holds, and how they travel in `kv_transfer_params` (vLLM's NIXL shape).

Those parameters pass through clients and proxies, so everything in them is checked before it is used.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from interlock.core.errors import RequestError

MAX_EPOCH = 2**53 - 1  # JSON readers keep integers exact up to here
_ENGINE_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Stamp = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class RemoteReference(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of a finished request of another engine: positions [0, num_tokens), in `block_ids` of `block_size` positions each.

    epoch: the life of the producer that gave it; generations: of each block, when it was given; token_digest: of the tokens at these
    positions; expiry: end of the lease in seconds of the host's monotonic clock, if it is not extended; request_id: the producer's
    name for the lease; host, port: where its side channel listens, None for an engine of this host that is found by its id.

    push: the producer writes these positions into our blocks, under the transfer id `request_id`; there are no blocks to read then
    (they may not be computed yet), `num_tokens` is the prompt's length, and `epoch` is 0.
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

    @property
    def key(self) -> tuple[str, int, str]:
        """What makes the reference the same one when it comes twice."""
        return self.engine_id, self.epoch, self.request_id


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


class _TransferId(msgspec.Struct, kw_only=True):
    transfer_id: _Text | None = None


def transfer_id_of(params: Mapping[str, Any] | None) -> str | None:
    """The `transfer_id` of a WRITE hand-off, or None. Raises RequestError for one that cannot be used."""
    try:
        return msgspec.convert(dict(params or {}), _TransferId).transfer_id
    except msgspec.ValidationError as error:
        raise RequestError(f"kv_transfer_params cannot be used: {error}; transfer_id is a text of up to 256 characters") from None


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether the request asks that its KV be kept for a decode engine."""
    return params is not None and params.get("do_remote_decode") is True


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether the request brings a reference to KV of a prefill engine."""
    return params is not None and params.get("do_remote_prefill") is True


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
    return RemoteReference(
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
    return RemoteReference(
        engine_id=fields.remote_engine_id,
        rank=fields.remote_rank,
        epoch=0,
        request_id=fields.transfer_id,
        block_ids=(),
        generations=(),
        block_size=0,
        num_tokens=fields.remote_num_tokens or len(token_ids),
        token_digest="",
        expiry=math.inf,
        host=fields.remote_host,
        port=fields.remote_port,
        push=True,
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
        raise RequestError(
            f"kv_transfer_params.remote_token_digest is {reference.token_digest!r}, that of the request's first {reference.num_tokens} tokens is "
            f"{digest!r}; send the decode engine the prompt that the prefill engine got"
        )


def token_digest(token_ids: Sequence[int]) -> str:
    """A digest of a token sequence."""
    return hashlib.sha256(np.asarray(token_ids, np.int64).tobytes()).hexdigest()[:32]


def valid_engine_id(engine_id: str) -> bool:
    """Whether `engine_id` may name an engine: it becomes part of an address."""
    return _ENGINE_ID.fullmatch(engine_id) is not None
