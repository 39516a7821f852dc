"""Blocks of ours that others read: the leases of finished requests, the pushes of running ones, and the generations of blocks."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from interlock.core.config import KVCacheConfig
from interlock.core.errors import RequestError
from interlock.core.step import SchedulerOutput
from interlock.kv_transfer.connector import ConnectorRequest
from interlock.kv_transfer.connectors.peer_messages import Lease, PushChunk, RefusedPush
from interlock.kv_transfer.references import RemoteReference, TransferName, sign, to_params, token_digest
from interlock.kv_transfer.transfer_params import transfer_id_of

logger = logging.getLogger(__name__)

_MAX_ID = 200  # characters of a request id that go into a lease id


@dataclass(slots=True, eq=False)
class _Push:
    """A request whose KV is pushed. blocks: that others may be reading; stop: positions announced to the worker half so far."""

    name: TransferName
    request: ConnectorRequest
    blocks: tuple[int, ...] = ()
    stop: int = 0


class PeerProducer:
    """A block's generation changes when the last that may be reading it has to stop, before the block is free."""

    def __init__(self, engine_id: str, config: KVCacheConfig, lease_seconds: float, push: bool) -> None:
        self._engine_id = engine_id
        self._block_size = config.block_size
        self._lease_seconds = lease_seconds
        self._push = push
        self._epoch: int | None = None
        self._key = b""
        self._host: str | None = None
        self._port: int | None = None
        self._leases: dict[str, tuple[int, ...]] = {}
        self._leased_names: dict[str, TransferName] = {}
        self._pushes: dict[str, _Push] = {}
        self._holders = np.zeros(config.num_blocks, np.int64)
        self._generations = np.zeros(config.num_blocks, np.int64)
        self._granted: list[Lease] = []
        self._num_leases = 0
        self._changed: dict[int, int] = {}
        self._chunks: list[PushChunk] = []
        self._withdrawn: list[TransferName] = []
        self._ended: list[RefusedPush] = []
        self._kept: set[str] = set()

    def learn(self, epoch: int | None, key: bytes, host: str | None, port: int | None) -> None:
        """The worker half has registered the pool."""
        self._epoch, self._key, self._host, self._port = epoch, key, host, port

    def add(self, request: ConnectorRequest) -> None:
        """A request whose KV another engine wants. Raises RequestError for a transfer id that is in use for this prompt."""
        transfer_id = transfer_id_of(request.kv_transfer_params)
        if not self._push:
            return
        digest = token_digest(request.all_token_ids[: request.num_prompt_tokens])
        name = TransferName(transfer_id or self._new_id(request), request.num_prompt_tokens, digest)
        used = {push.name for push in self._pushes.values()} | set(self._leased_names.values())
        while name in used and transfer_id is None:
            name = name._replace(transfer_id=self._new_id(request))
        if name in used:
            raise RequestError(
                f"kv_transfer_params.transfer_id is {transfer_id!r}, which a request of the same prompt uses already, whose KV is not handed over yet"
            )
        self._pushes[request.request_id] = _Push(name, request)

    def plan(self, output: SchedulerOutput) -> None:
        """Note what the step computes of the requests that are pushed. What the step itself loads is pushed later, once it has landed."""
        promised = {promise.req_id: promise.start for promise in output.load_promises}
        computed = {entry.req_id: entry.num_computed_tokens for entry in output.scheduled_new_reqs}
        computed |= {entry.req_id: entry.num_computed_tokens for entry in output.scheduled_cached_reqs}
        for req_id, count in output.num_scheduled_tokens.items():
            push = self._pushes.get(req_id)
            if push is not None:
                self._note(push, promised.get(req_id, computed[req_id] + count), output.step)

    def preempted(self, request: ConnectorRequest) -> None:
        """The request gives its blocks up; it will be computed again."""
        push = self._pushes.get(request.request_id)
        if push is not None and push.stop:
            self._withdrawn.append(push.name)
            self._chunks = [chunk for chunk in self._chunks if chunk.transfer != push.name]
            self._let_go(push.blocks)
            push.blocks, push.stop = (), 0

    def grant(self, request: ConnectorRequest, block_ids: Sequence[int], now: float) -> dict[str, Any] | None:
        """Keep the request's blocks, and the parameters that say so; None if there is nothing to keep."""
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = tuple(block_ids[: -(-num_tokens // self._block_size)])
        if not num_tokens or self._epoch is None or request.request_id in self._leases:
            logger.warning(
                "request %r is not handed over: %d computed tokens, epoch %s, leased already: %s",
                request.request_id,
                num_tokens,
                self._epoch,
                request.request_id in self._leases,
            )
            self.refuse(request, "the prompt was not handed over")
            return None
        push = self._pushes.pop(request.request_id, None)
        self._leases[request.request_id] = blocks
        self._holders[list(blocks)] += 1
        if push is not None:
            self._leased_names[request.request_id] = push.name
            self._note(push, num_tokens, 0)
            self._let_go(push.blocks)
        reference = RemoteReference(
            engine_id=self._engine_id,
            rank=0,
            epoch=self._epoch,
            request_id=push.name.transfer_id if push is not None else self._new_id(request),
            block_ids=blocks,
            generations=tuple(self._generations[list(blocks)].tolist()),
            block_size=self._block_size,
            num_tokens=num_tokens,
            token_digest=token_digest(request.all_token_ids[:num_tokens]),
            expiry=now + self._lease_seconds,
            host=self._host,
            port=self._port,
            push=self._push,
        )
        reference = msgspec.structs.replace(reference, signature=sign(self._key, reference))
        self._granted.append(Lease(reference.signature, request.request_id, push.name if push is not None else None))
        return to_params(reference)

    def refuse(self, request: ConnectorRequest, cause: str) -> None:
        """The request has ended otherwise: nothing more of it is pushed."""
        self._refuse(request, cause, None)

    def refuse_running(self, request: ConnectorRequest, cause: str) -> bool:
        """As `refuse`; whether its blocks have to be kept, since they may be being read: until the worker half reports the request."""
        push = self._pushes.get(request.request_id)
        held = push is not None and bool(push.blocks)
        if held:
            self._kept.add(request.request_id)
        self._refuse(request, cause, request.request_id if held else None)
        return held

    def end(self, request_id: str) -> None:
        """A lease has ended, or what was kept is not read any more; reports for unknown requests are ignored."""
        self._kept.discard(request_id)
        self._leased_names.pop(request_id, None)
        self._let_go(self._leases.pop(request_id, ()))

    def take_granted(self) -> tuple[Lease, ...]:
        """Leases that began since the last call."""
        granted, self._granted = tuple(self._granted), []
        return granted

    def take_changed(self) -> tuple[tuple[int, int], ...]:
        """Generations that changed since the last call, by block."""
        changed, self._changed = tuple(self._changed.items()), {}
        return changed

    def take_chunks(self) -> tuple[PushChunk, ...]:
        """What is to be pushed, since the last call."""
        chunks, self._chunks = tuple(self._chunks), []
        return chunks

    def take_withdrawn(self) -> tuple[TransferName, ...]:
        """Transfers whose blocks are given up for now, since the last call."""
        withdrawn, self._withdrawn = tuple(self._withdrawn), []
        return withdrawn

    def take_refused(self) -> tuple[RefusedPush, ...]:
        """Transfers that will never be complete, since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    @property
    def has_news(self) -> bool:
        """Whether steps are needed even if no request runs: a lease must be granted or watched, or something told."""
        return bool(self._leases or self._kept or self._changed or self._chunks or self._withdrawn or self._ended)

    def _new_id(self, request: ConnectorRequest) -> str:
        """Not the request id alone: a notice that comes late or twice must not end the lease of a later request of the same id."""
        self._num_leases += 1
        return f"{request.request_id[:_MAX_ID]}:{self._num_leases}"

    def _refuse(self, request: ConnectorRequest, cause: str, kept: str | None) -> None:
        push = self._pushes.pop(request.request_id, None)
        if push is not None:
            self._chunks = [chunk for chunk in self._chunks if chunk.transfer != push.name]
            self._ended.append(RefusedPush(push.name, cause, kept))
            self._let_go(push.blocks)

    def _note(self, push: _Push, num_computed: int, stamp: int) -> None:
        stop = min(num_computed, push.request.num_prompt_tokens)
        if stop <= push.stop:
            return
        blocks = tuple(push.request.block_ids[: -(-stop // self._block_size)])
        self._holders[list(set(blocks) - set(push.blocks))] += 1
        self._let_go(tuple(set(push.blocks) - set(blocks)))
        generations = tuple(self._generations[list(blocks)].tolist())
        self._chunks.append(PushChunk(push.name, push.stop, stop, stamp, blocks, generations))
        push.blocks, push.stop = blocks, stop

    def _let_go(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._generations[block] += 1
                self._changed[block] = int(self._generations[block])
