"""The blocks of requests: found in the prefix cache, allocated, published, shortened, leased, quarantined, given back."""

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from interlock.core.config import KVCacheConfig
from interlock.engine.block_pool import BlockPool
from interlock.engine.prefix_cache import PrefixCache, extend_keys, root_key
from interlock.engine.request import Request

_SOUND_STEP_WITHIN = 3  # steps are made only for this; the first may meet what the connector was told for the one that failed


@dataclass(slots=True, eq=False)
class _Doubt:
    """See `BlockManager.hold_in_doubt`. is_expected: a step is wanted to end it."""

    step: int
    owner: str
    block_ids: list[int]
    is_expected: bool = True


class BlockManager:
    """Moves blocks between the pool and the requests. Whoever may still touch a block holds it in its own name in the pool:
    a request by reference or lease, a running step by a fence, a transfer by a quarantine that ends when the transfer ends."""

    def __init__(self, kv_cache_config: KVCacheConfig, enable_caching: bool) -> None:
        self.block_size = kv_cache_config.block_size
        self.pool = BlockPool(kv_cache_config.num_blocks, self.block_size, enable_caching)
        self._identity = kv_cache_config.identity
        self._prefix_cache = PrefixCache(self.pool)
        self._leases: dict[str, list[int]] = {}
        self._transfers: dict[str, list[int]] = {}
        self._doubtful_leases: set[str] = set()
        self._overdue: set[str] = set()
        self._fences: dict[int, list[tuple[str, list[int]]]] = {}
        self._doubts: list[_Doubt] = []
        self._doubt_numbers = itertools.count()
        self._is_in_doubt = False

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def adopt(self, request: Request) -> None:
        """Begin the chain of a new request's keys."""
        request.block_root = root_key(self._identity, cache_salt=request.cache_salt)

    def match(self, request: Request) -> list[int]:
        """The cached blocks of the request's longest known prefix, which leaves at least one token to compute."""
        extend_keys(request.block_keys, request.block_root, request.token_ids, self.block_size)
        return self._prefix_cache.match(request.block_keys, request.num_tokens)

    def fits(self, num_tokens: int, held: Collection[int] = (), matched: list[int] | None = None) -> bool:
        """Whether `num_tokens` positions fit, of which `held` blocks are there already and `matched` ones are cached."""
        matched = matched or []
        needed = self.num_blocks_for(num_tokens) - len(held) - len(matched)
        return needed <= self.pool.num_free_blocks - self.pool.count_free(matched)

    def start(self, request: Request, matched: list[int], num_tokens: int) -> None:
        """Give a request without blocks its cached blocks, and fresh ones up to `num_tokens` positions. They fit."""
        assert not request.block_ids, f"{request.request_id} starts with blocks {request.block_ids}"
        self.pool.reference(matched, request.request_id)
        request.block_ids = list(matched)
        request.num_published_blocks = len(matched)
        request.num_computed_tokens = len(matched) * self.block_size
        self.grow(request, num_tokens)

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request lacks for `num_tokens` positions."""
        return -(-num_tokens // self.block_size) - len(request.block_ids)

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Allocate the fresh blocks that the request lacks for `num_tokens` positions. They fit."""
        missing = self.missing(request, num_tokens)
        if missing <= 0:
            return []
        fresh = self.pool.allocate(missing, request.request_id)
        request.block_ids += fresh
        return fresh

    def assert_writable(self, request: Request, num_tokens: int) -> None:
        """Check that the request's next `num_tokens` positions lie in blocks that it alone holds."""
        start = request.num_computed_tokens
        for index in range(start // self.block_size, (start + num_tokens - 1) // self.block_size + 1):
            self.pool.assert_writable(request.block_ids[index], request.request_id)

    def publish(self, request: Request) -> None:
        """Make the request's full blocks findable, as far as it has KV. The steps and loads that wrote it have retired."""
        stop = request.num_computed_tokens // self.block_size
        if stop > request.num_published_blocks:
            extend_keys(request.block_keys, request.block_root, request.token_ids, self.block_size)
            self._prefix_cache.publish(request.block_keys, request.block_ids, request.num_published_blocks, stop)
            request.num_published_blocks = stop

    def invalidate(self, block_ids: Iterable[int]) -> None:
        """Forget cached content that turned out wrong, with everything that was computed behind it."""
        self._prefix_cache.invalidate(block_ids)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content."""
        for block_id in range(self.pool.num_blocks):
            self.pool.unpublish(block_id)

    def truncate(self, request: Request, num_blocks: int) -> None:
        """Keep only the request's first `num_blocks` blocks; its next positions come into fresh ones."""
        dropped = request.block_ids[num_blocks:]
        del request.block_ids[num_blocks:]
        self._fence(request, dropped)
        self.pool.free(dropped, request.request_id)
        request.num_published_blocks = min(request.num_published_blocks, num_blocks)
        request.num_computed_tokens = min(request.num_computed_tokens, num_blocks * self.block_size)

    def lease(self, request: Request) -> None:
        """Keep all blocks of a finished request until `end_lease`."""
        if request.block_ids:
            self._fence(request, request.block_ids)
            self.pool.lease(request.block_ids, request.request_id)
        self._leases[request.request_id] = request.block_ids
        request.block_ids = []

    def end_lease(self, req_id: str) -> bool:
        """Free what was leased for `req_id`; False if nothing was."""
        if req_id not in self._leases:
            return False
        self.pool.release_lease(self._leases.pop(req_id), req_id)
        self._doubtful_leases.discard(req_id)
        return True

    def doubt_leases(self) -> None:
        """The ends of the leases of now may have been in a report that is lost."""
        self._doubtful_leases.update(self._leases)

    def quarantine_transfer(self, req_id: str, block_ids: Collection[int]) -> None:
        """Hold blocks that a load of `req_id` may still write, until `end_transfer`."""
        held = self._transfers.setdefault(req_id, [])
        fresh = [block_id for block_id in block_ids if block_id not in held]
        self.pool.quarantine(fresh, f"load {req_id}")
        held += fresh

    def end_transfer(self, req_id: str) -> bool:
        """Every writer of `req_id`'s load has ended; False if none was known."""
        if req_id not in self._transfers:
            return False
        self.pool.release_quarantine(self._transfers.pop(req_id), f"load {req_id}")
        self._overdue.discard(req_id)
        return True

    def stop_expecting(self, req_id: str) -> None:
        """Nobody steps any more for the end of `req_id`'s load, if it is known; its blocks stay quarantined until `end_transfer`."""
        if req_id in self._transfers:
            self._overdue.add(req_id)

    def hold_in_doubt(self, step: int, block_ids: Collection[int]) -> None:
        """Hold blocks that somebody still holds and that the connector, which has raised, may still touch with what it was told up to
        `step`: until a later step gives it everything that it was told (`end_doubt`)."""
        owner = f"doubt of step {step} #{next(self._doubt_numbers)}"
        self.pool.quarantine(list(block_ids), owner)
        self._doubts.append(_Doubt(step, owner, list(block_ids)))

    def begin_doubt(self) -> None:
        """What a step ordered may not have begun, and may still begin: no load is asked for until `end_doubt`."""
        self._is_in_doubt = True

    def end_doubt(self, step: int) -> None:
        """All that the connector was told has begun with `step`, which has ended."""
        self._is_in_doubt = False
        for doubt in self._doubts:
            if doubt.step < step:
                self.pool.release_quarantine(doubt.block_ids, doubt.owner)
        self._doubts = [doubt for doubt in self._doubts if doubt.step >= step]

    def stop_expecting_sound_step(self, step: int) -> None:
        """`step` was none: nobody steps any more only to end the doubts that were long before it."""
        for doubt in self._doubts:
            doubt.is_expected &= step - doubt.step < _SOUND_STEP_WITHIN

    @property
    def may_load(self) -> bool:
        """Whether loads may be asked for: not while what was ordered may not have begun, nor when half of the pool waits for ends of loads
        that no request waits for."""
        return not self._is_in_doubt and 2 * len(self._lost(self._transfers)) <= self.pool.num_blocks

    def is_starved(self, request: Request, *, beside_leases: bool = False) -> bool:
        """Whether every block that is neither free nor the request's own is held by a load that is overdue, so that none may ever come back.
        beside_leases: or by a lease whose end may have been lost."""
        lost = self._lost(self._overdue)
        if beside_leases:
            lost.update(block_id for req_id in self._doubtful_leases for block_id in self._leases[req_id])
        return bool(lost) and self.pool.num_free_blocks + len(lost.union(request.block_ids)) >= self.pool.num_blocks

    def retire(self, step: int) -> None:
        """The step, and with it every earlier one, has ended on the device: it reads and writes nothing any more."""
        while self._fences and min(self._fences) <= step:
            for owner, block_ids in self._fences.pop(min(self._fences)):
                self.pool.release_quarantine(block_ids, owner)

    @property
    def has_pending(self) -> bool:
        """Whether blocks wait for the outside: for a consumer to finish, or for a load to end that is not overdue."""
        return bool(self._leases) or len(self._transfers) > len(self._overdue) or any(doubt.is_expected for doubt in self._doubts)

    def knows(self, req_id: str) -> bool:
        """Whether blocks are still held for a request of this id that has ended."""
        return req_id in self._leases or req_id in self._transfers

    def _lost(self, req_ids: Iterable[str]) -> set[int]:
        """The blocks that these loads, and connectors in doubt, may still touch."""
        lost = {block_id for req_id in req_ids for block_id in self._transfers[req_id]}
        return lost.union(*(doubt.block_ids for doubt in self._doubts if not doubt.is_expected))

    def _fence(self, request: Request, block_ids: list[int]) -> None:
        step = request.in_flight_step
        if step is not None and block_ids:
            fences = self._fences.setdefault(step, [])
            owner = f"step {step} #{len(fences)}"
            self.pool.quarantine(block_ids, owner)
            fences.append((owner, list(block_ids)))
