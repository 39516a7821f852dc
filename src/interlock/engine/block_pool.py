"""The KV blocks of one rank: who holds which, which hold reusable content, and which may be taken."""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class Hold(enum.IntEnum):
    """How an owner holds a block. A block with several holders is counted under its strongest hold, the largest value."""

    LEASED = 1
    REFERENCED = 2
    QUARANTINED = 3


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """Counts of blocks in each state, and every broken rule that was found. `cached` blocks are a part of the `free` ones."""

    num_blocks: int
    free: int
    cached: int
    referenced: int
    leased: int
    quarantined: int
    violations: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether free + referenced + leased + quarantined = total, and no rule is broken."""
        return not self.violations and self.free + self.referenced + self.leased + self.quarantined == self.num_blocks

    @property
    def all_free(self) -> bool:
        """Whether nobody holds anything."""
        return self.clean and self.free == self.num_blocks


class BlockPool:
    """`num_blocks` blocks of `block_size` token positions. A block is free exactly when its owner record is empty.

    The record maps each owner (a request; a step or a transfer that may still touch the block) to one `Hold`. Free blocks stand in the order in
    which they are taken: blocks without content first, then blocks with content, least recently used first. Content is known by an
    opaque key and stays findable while the block is free, until the block is taken for something else. `generations` counts, per
    block, how often it was taken for new content: a reader of another process that sees the same number before and after its copy
    has read one content. Misuse (double free, unknown owner) is an AssertionError: it is our fault, never a user's.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._generations: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        self._owners: list[dict[str, Hold]] = [{} for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._keys: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes | None] = [None] * num_blocks
        self._block_of_key: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that may be taken now (those with cached content included)."""
        return len(self._free)

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        """uint64 [num_blocks]: how often each block was taken for new content. Readers must not write it."""
        return self._generations

    def bind_generations(self, array: npt.NDArray[np.uint64]) -> None:
        """Keep the generations in `array` (uint64 [num_blocks], for example in memory that other processes map) from now on."""
        if array.dtype != np.uint64 or array.shape != (self.num_blocks,):
            raise ValueError(f"generations are {array.dtype} {array.shape}, expected uint64 ({self.num_blocks},)")
        array[:] = self._generations
        self._generations = array

    # Taking and giving back

    def allocate(self, count: int, owner: str) -> list[int]:
        """Take `count` free blocks for new content, referenced by `owner`. The caller has checked `num_free_blocks`."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} are free"
        taken = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self.unpublish(block_id)
            self._generations[block_id] += np.uint64(1)
            self._owners[block_id][owner] = Hold.REFERENCED
            taken.append(block_id)
        return taken

    def reference(self, block_ids: Sequence[int], owner: str) -> None:
        """Let `owner` share blocks whose content it found in the cache."""
        for block_id in block_ids:
            assert self._keys[block_id] is not None, f"block {block_id} is shared but holds no published content"
            assert owner not in self._owners[block_id], f"{owner} already holds block {block_id}"
            self._owners[block_id][owner] = Hold.REFERENCED
            self._free.pop(block_id, None)

    def free(self, block_ids: Sequence[int], owner: str) -> None:
        """Give up `owner`'s references. The last blocks of a request are reused first, since a prefix is worth more than its tail."""
        self._drop(reversed(block_ids), owner, Hold.REFERENCED)

    def lease(self, block_ids: Sequence[int], owner: str) -> None:
        """Turn `owner`'s references into leases: a finished request's blocks that a peer may still read."""
        for block_id in block_ids:
            held = self._owners[block_id].get(owner)
            assert held is Hold.REFERENCED, f"{owner} holds block {block_id} as {held}, not as a reference"
            self._owners[block_id][owner] = Hold.LEASED

    def release_lease(self, block_ids: Sequence[int], owner: str) -> None:
        """End `owner`'s leases."""
        self._drop(reversed(block_ids), owner, Hold.LEASED)

    def quarantine(self, block_ids: Sequence[int], owner: str) -> None:
        """Hold blocks that somebody still holds for `owner`, a step or a transfer that may still touch them, whatever becomes of the others."""
        for block_id in block_ids:
            owners = self._owners[block_id]
            assert owners, f"block {block_id}, to be quarantined for {owner}, is held by nobody"
            assert owner not in owners, f"block {block_id}, to be quarantined for {owner}, is held by it already: {owners}"
            owners[owner] = Hold.QUARANTINED

    def release_quarantine(self, block_ids: Sequence[int], owner: str) -> None:
        """End `owner`'s quarantine: that reader or writer has ended."""
        self._drop(reversed(block_ids), owner, Hold.QUARANTINED)

    def assert_writable(self, block_id: int, owner: str) -> None:
        """Check that `owner` alone references the block, and that its content is not published."""
        owners = self._owners[block_id]
        assert len(owners) == 1, f"{owner} would write block {block_id}, which is held by {owners}"
        assert owners.get(owner) is Hold.REFERENCED, f"{owner} would write block {block_id}, which is held by {owners}"
        assert self._keys[block_id] is None, f"{owner} would write block {block_id}, whose content is published"

    def owners(self, block_id: int) -> dict[str, Hold]:
        """A copy of the block's owner record."""
        return dict(self._owners[block_id])

    # Content

    def publish(self, block_id: int, key: bytes, parent: bytes | None) -> None:
        """Make the block's content findable under `key`, as computed behind the content of `parent`. The first block of a key keeps it."""
        if self.enable_caching and self._keys[block_id] is None and key not in self._block_of_key:
            self._keys[block_id] = key
            self._parents[block_id] = parent
            self._block_of_key[key] = block_id

    def lookup(self, key: bytes) -> int | None:
        """The block that holds the content of `key`."""
        return self._block_of_key.get(key)

    def unpublish(self, block_id: int) -> None:
        """Forget the block's content, if it has any."""
        key = self._keys[block_id]
        if key is not None:
            self._keys[block_id] = None
            del self._block_of_key[key]

    def published_key(self, block_id: int) -> bytes | None:
        """The key of the block's content, or None if it is not findable."""
        return self._keys[block_id]

    def published_children(self) -> dict[bytes | None, list[int]]:
        """The published blocks by the key of the content that they were computed behind; O(published blocks)."""
        children: dict[bytes | None, list[int]] = {}
        for block_id in self._block_of_key.values():
            children.setdefault(self._parents[block_id], []).append(block_id)
        return children

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of the given blocks are free now."""
        return sum(block_id in self._free for block_id in block_ids)

    def audit(self) -> PoolAudit:
        """Count every block and check every rule of the pool; O(num_blocks)."""
        counts = dict.fromkeys(Hold, 0)
        violations = []
        for block_id, owners in enumerate(self._owners):
            if owners:
                counts[max(owners.values())] += 1
            if (block_id in self._free) == bool(owners):
                violations.append(f"block {block_id} is {'in' if owners else 'missing from'} the free list and held by {owners}")
            key = self._keys[block_id]
            if key is not None and self._block_of_key.get(key) != block_id:
                violations.append(f"block {block_id} is published under a key that leads to {self._block_of_key.get(key)}")
        if len(self._block_of_key) != sum(key is not None for key in self._keys):
            violations.append(f"{len(self._block_of_key)} keys for {sum(key is not None for key in self._keys)} published blocks")
        return PoolAudit(
            num_blocks=self.num_blocks,
            free=len(self._free),
            cached=sum(self._keys[block_id] is not None for block_id in self._free),
            referenced=counts[Hold.REFERENCED],
            leased=counts[Hold.LEASED],
            quarantined=counts[Hold.QUARANTINED],
            violations=tuple(violations),
        )

    def _drop(self, block_ids: Iterable[int], owner: str, hold: Hold) -> None:
        for block_id in block_ids:
            held = self._owners[block_id].pop(owner, None)
            assert held is hold, f"{owner} gives up block {block_id}, which it holds as {held}, not as {hold.name}"
            if not self._owners[block_id]:
                self._free[block_id] = None
                if self._keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
