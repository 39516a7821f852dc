"""The blocks of requests: found in the prefix cache, allocated, published, shortened, leased, quarantined, given back."""

from collections.abc import Collection, Iterable

from interlock.core.config import KVCacheConfig
from interlock.engine.block_pool import BlockPool
from interlock.engine.prefix_cache import PrefixCache, extend_keys, root_key
from interlock.engine.request import Request


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
        self._overdue: set[str] = set()
        self._fences: dict[int, list[tuple[str, list[int]]]] = {}

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
        return True

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

    def is_starved(self, request: Request) -> bool:
        """Whether every block that is neither free nor the request's own is held by a load that is overdue, so that none may ever come back."""
        lost = {block_id for req_id in self._overdue for block_id in self._transfers[req_id]}
        return bool(lost) and self.pool.num_free_blocks + len(lost.union(request.block_ids)) >= self.pool.num_blocks

    def retire(self, step: int) -> None:
        """The step, and with it every earlier one, has ended on the device: it reads and writes nothing any more."""
        while self._fences and min(self._fences) <= step:
            for owner, block_ids in self._fences.pop(min(self._fences)):
                self.pool.release_quarantine(block_ids, owner)

    @property
    def has_pending(self) -> bool:
        """Whether blocks wait for the outside: for a consumer to finish, or for a load to end that is not overdue."""
        return bool(self._leases) or len(self._transfers) > len(self._overdue)

    def knows(self, req_id: str) -> bool:
        """Whether blocks are still held for a request of this id that has ended."""
        return req_id in self._leases or req_id in self._transfers

    def _fence(self, request: Request, block_ids: list[int]) -> None:
        step = request.in_flight_step
        if step is not None and block_ids:
            fences = self._fences.setdefault(step, [])
            owner = f"step {step} #{len(fences)}"
            self.pool.quarantine(block_ids, owner)
            fences.append((owner, list(block_ids)))
