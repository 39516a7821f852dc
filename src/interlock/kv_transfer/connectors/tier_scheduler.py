"""The scheduler half of a tier: which blocks it has, which are to be saved, which are being loaded.

A block is saved once its KV is complete and the step or load that wrote it has retired (`num_published_blocks`), under the key that the
prefix cache gives it. While a save reads a block, the block is quarantined in the pool. What a request was promised is pinned in the
tier until its load has ended. Content that turns out wrong after it was published is forgotten here too, with all behind it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from interlock.core.step import SchedulerOutput
from interlock.kv_transfer.connector import ConnectorRequest
from interlock.kv_transfer.connectors.tier_messages import TierLoad, TierMetadata, TierSave, TierWorkerMeta

_owner_numbers = itertools.count()  # several tiers of one engine hold blocks under names of their own


class TierIndex(Protocol):
    """What a tier knows of its content. A place is a number that the worker half understands."""

    def count_present(self, keys: Sequence[bytes]) -> int | None:
        """How many of the first `keys` can be loaded now; None if that is not known yet."""

    def pin(self, keys: Sequence[bytes]) -> None:
        """These are about to be loaded: keep them until `unpin`."""

    def unpin(self, keys: Sequence[bytes]) -> None:
        """End one `pin`."""

    def places(self, keys: Sequence[bytes]) -> list[int | None]:
        """Where they are."""

    def wants(self, key: bytes) -> bool:
        """Whether saving this content would add something."""

    def reserve(self, key: bytes) -> int | None:
        """A place for content that `wants` was true for; None if there is no room."""

    def commit(self, key: bytes, place: int, stored: bool) -> None:
        """The save into a reserved place has ended."""

    def touch(self, keys: Iterable[bytes]) -> None:
        """These have been used, the most valuable last."""

    def distrust(self, key: bytes) -> None:
        """It could not be loaded: it is a miss until it is saved anew."""

    def forget(self, key: bytes) -> None:
        """Its content is wrong: it is a miss for everybody until it is saved anew."""

    def close(self) -> None:
        """Stop what threads there are. May be called twice."""


class BlockHolder(Protocol):
    """What a tier needs of the block pool."""

    def quarantine(self, block_ids: Sequence[int], owner: str) -> None:
        """Hold blocks that somebody still holds, for `owner`."""

    def release_quarantine(self, block_ids: Sequence[int], owner: str) -> None:
        """End it."""

    def published_key(self, block_id: int) -> bytes | None:
        """The key of the block's content."""

    def published_children(self) -> dict[bytes | None, list[int]]:
        """The published blocks by the key of the content that they were computed behind."""


@dataclass(slots=True, eq=False)
class _Tracked:
    request: ConnectorRequest
    num_seen: int = 0  # its first published blocks that were looked at


@dataclass(frozen=True, slots=True)
class _HeldSave:
    key: bytes
    block_id: int
    owner: str
    place: int = -1


class TierSchedulerHalf:
    """What a tier connector does with role SCHEDULER. block_bytes: of one block over all layers. async_load_bytes: loads of at least
    this size let their request wait, smaller ones are made by the step that consumes them, unless they are predicted to take longer than
    max_sync_load_seconds. saves, loads: whether it does these."""

    def __init__(
        self,
        name: str,
        index: TierIndex,
        block_size: int,
        block_bytes: int,
        async_load_bytes: int,
        max_sync_load_seconds: float | None,
        *,
        saves: bool,
        loads: bool,
    ) -> None:
        self.index = index
        self.num_skipped_saves = 0
        self._name = name
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._async_load_bytes = async_load_bytes
        self._max_sync_load_seconds = max_sync_load_seconds
        self._bytes_per_second: float | None = None
        self._does_save = saves
        self._does_load = loads
        self._pool: BlockHolder | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._noted: dict[bytes, _HeldSave] = {}
        self._saves: dict[int, _HeldSave] = {}
        self._reading: set[int] = set()
        self._wrong: set[bytes] = set()
        self._ordered: dict[int, TierLoad] = {}
        self._loads: dict[int, TierLoad] = {}
        self._ids = itertools.count(1)

    def bind_block_pool(self, pool: BlockHolder) -> None:
        """Where blocks are held while they are saved."""
        self._pool = pool

    def num_matched(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnector.get_num_new_matched_tokens`. Whole blocks, and never the request's last token."""
        size = self._block_size
        if not self._does_load or num_computed_tokens % size:
            return 0, False
        keys = request.block_hashes[num_computed_tokens // size : (request.num_tokens - 1) // size]
        count = self.index.count_present(keys) if keys else 0
        return (None, False) if count is None else (count * size, self._is_async(count))

    def allocated(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """See `KVConnector.update_state_after_alloc`."""
        self._tracked.setdefault(request.request_id, _Tracked(request))
        if not num_external_tokens:
            return
        first, count = request.num_computed_tokens // self._block_size, num_external_tokens // self._block_size
        assert count * self._block_size == num_external_tokens, f"{num_external_tokens} positions are to be loaded, expected whole blocks"
        keys = tuple(request.block_hashes[first : first + count])
        start = request.num_computed_tokens
        blocks = tuple(block_ids[first : first + count])
        load = TierLoad(next(self._ids), request.request_id, start, start + num_external_tokens, blocks, keys, (), synchronous=False)
        self.index.pin(keys)
        self.index.touch(reversed(request.block_hashes[: first + count]))
        self._ordered[load.load_id] = load

    def preempted(self, request: ConnectorRequest) -> None:
        """Its blocks are about to be given up; what is worth it is held."""
        self._note_saves(self._tracked.get(request.request_id))

    def finished(self, request: ConnectorRequest) -> None:
        """It has ended; its blocks are about to be given up."""
        self._note_saves(self._tracked.pop(request.request_id, None))

    def build_meta(self, scheduler_output: SchedulerOutput) -> TierMetadata:
        """See `KVConnector.build_connector_meta`."""
        for tracked in self._tracked.values():
            self._note_saves(tracked)
        promised = {promise.req_id for promise in scheduler_output.load_promises}
        loads = tuple(
            dataclasses.replace(load, places=tuple(self.index.places(load.keys)), synchronous=load.req_id in promised)
            for load in self._ordered.values()
        )
        self._loads.update(self._ordered)
        self._ordered = {}
        noted, self._noted = self._noted, {}
        return TierMetadata(loads, tuple(save for held in noted.values() if (save := self._order(held)) is not None))

    def update(self, meta: TierWorkerMeta) -> None:
        """Take the worker half's report in."""
        for save_id in meta.released:
            held = self._saves[save_id]
            self._reading.discard(save_id)
            self._release(held)
        for save_id, stored in sorted(meta.stored, reverse=True):  # the head of a prefix last: it is worth more than its tail
            held = self._saves.pop(save_id)
            self.index.commit(held.key, held.place, stored and held.key not in self._wrong)
            if held.key in self._wrong:
                self._wrong.discard(held.key)
                self.index.forget(held.key)
        if meta.bytes_per_second is not None:
            self._bytes_per_second = meta.bytes_per_second
        for ended in meta.loads:
            load = self._loads.pop(ended.load.load_id)
            self.index.unpin(load.keys)
            for key in ended.bad_keys:
                self.index.distrust(key)

    def invalidate(self, block_ids: Iterable[int]) -> None:
        """These blocks do not hold what they should; if that comes after they were published, the tier may have taken it over."""
        for key in self._wrong_keys(set(block_ids)):
            held = self._noted.pop(key, None)
            if held is not None:
                self._release(held)
            if any(save.key == key for save in self._saves.values()):
                self._wrong.add(key)
            self.index.forget(key)

    @property
    def has_news(self) -> bool:
        """Whether steps are needed even if no request runs: blocks are held for saves, or a load has not ended."""
        return bool(self._noted or self._reading or self._ordered or self._loads)

    def _is_async(self, num_blocks: int) -> bool:
        nbytes = num_blocks * self._block_bytes
        if (
            self._max_sync_load_seconds is not None
            and self._bytes_per_second is not None
            and nbytes / self._bytes_per_second > self._max_sync_load_seconds
        ):
            return True
        return num_blocks > 0 and nbytes >= self._async_load_bytes

    def _wrong_keys(self, block_ids: set[int]) -> set[bytes]:
        """The keys of published content in these blocks, and of what was computed behind it."""
        keys: set[bytes] = set()
        for tracked in self._tracked.values():
            published = tracked.request.block_ids[: tracked.request.num_published_blocks]
            first = next((index for index, block_id in enumerate(published) if block_id in block_ids), len(published))
            keys.update(tracked.request.block_hashes[first : len(published)])
            tracked.num_seen = min(tracked.num_seen, first)
        if self._pool is not None:
            wrong = [block_id for block_id in block_ids if self._pool.published_key(block_id) is not None]
            children = self._pool.published_children() if wrong else {}
            while wrong:
                key = self._pool.published_key(wrong.pop())
                assert key is not None
                keys.add(key)
                wrong += children.pop(key, ())
        return keys

    def _note_saves(self, tracked: _Tracked | None) -> None:
        """Hold the blocks that were completed since the last look and that the tier lacks. Nothing is evicted for them yet: a lookup
        that has not been followed by its allocation may rely on what is there."""
        if tracked is None or not self._does_save:
            return
        request, published = tracked.request, tracked.request.num_published_blocks
        first, tracked.num_seen = min(tracked.num_seen, published), published
        for key, block_id in zip(request.block_hashes[first:published], request.block_ids[first:published], strict=True):
            if key not in self._noted and self.index.wants(key):
                held = _HeldSave(key, block_id, f"{self._name} save {next(_owner_numbers)}")
                if self._pool is not None:
                    self._pool.quarantine([block_id], held.owner)
                self._noted[key] = held
        if first < published:
            self.index.touch(reversed(request.block_hashes[:published]))

    def _order(self, held: _HeldSave) -> TierSave | None:
        place = self.index.reserve(held.key)
        if place is None:
            self.num_skipped_saves += 1
            self._release(held)
            return None
        save = TierSave(next(self._ids), held.key, held.block_id, place)
        self._saves[save.save_id] = _HeldSave(held.key, held.block_id, held.owner, place)
        self._reading.add(save.save_id)
        return save

    def _release(self, held: _HeldSave) -> None:
        if self._pool is not None:
            self._pool.release_quarantine([held.block_id], held.owner)
