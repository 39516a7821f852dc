"""`kv_transfer_params` as they come with a request: checked for their types, and asked what they want."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from interlock.core.errors import RequestError


class _Fields(msgspec.Struct, kw_only=True):
    """What both legs of a hand-off may carry. Other fields are passed over here; a reference is read by `references`."""

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dcp_size: int | None = None
    remote_tp_size: int | None = None
    transfer_mode: Literal["pull", "push"] | None = None
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None


def read_transfer_params(extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `kv_transfer_params` of a request's `extra_args`, or None. Raises RequestError that names the field if they cannot be used."""
    params = (extra_args or {}).get("kv_transfer_params")
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise RequestError(f"kv_transfer_params is {params!r}, expected an object such as {{'do_remote_decode': true}}")
    read = _read(params)
    for name in ("tp_size", "pp_size", "dcp_size", "remote_tp_size"):
        size = getattr(read, name)
        if size not in (None, 1):
            raise RequestError(f"kv_transfer_params.{name} is {size}, expected 1: an engine keeps each prompt's KV whole")
    return dict(params)


def transfer_id_of(params: Mapping[str, Any] | None) -> str | None:
    """The `transfer_id` of a WRITE hand-off, or None. Raises RequestError for one that cannot be used."""
    return _read(params or {}).transfer_id


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether the request asks that its KV be kept for a decode engine."""
    return params is not None and params.get("do_remote_decode") is True


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether the request brings a reference to KV of a prefill engine."""
    return params is not None and params.get("do_remote_prefill") is True


def check_mode(params: Mapping[str, Any] | None, *, push: bool) -> None:
    """Raises RequestError for a hand-off of the other mode than this engine's. push: it is WRITE."""
    given, ours = _read(params or {}).transfer_mode, "push" if push else "pull"
    if given not in (None, ours):
        mode = "write" if push else "read"
        raise RequestError(
            f"kv_transfer_params.transfer_mode is {given!r}, expected {ours!r}: this engine's mode is {mode!r}; set both engines to one"
        )


def check_hand_off(params: Mapping[str, Any] | None, *, possible: bool) -> None:
    """Raises RequestError for a hand-off to an engine that can make none."""
    if possible:
        return
    for wanted, field in ((wants_remote_prefill, "do_remote_prefill"), (wants_remote_decode, "do_remote_decode")):
        if wanted(params):
            raise RequestError(
                f"kv_transfer_params.{field} is true, but this engine hands no KV over; start it with a kv_transfer_config whose "
                "kv_connector does, such as 'PeerConnector', or leave the field out"
            )


def _read(params: Mapping[str, Any]) -> _Fields:
    try:
        return msgspec.convert(dict(params), _Fields)
    except (msgspec.ValidationError, TypeError) as error:
        raise RequestError(f"kv_transfer_params cannot be used: {error}; see docs/kv-transfer.md for what its fields hold") from None
