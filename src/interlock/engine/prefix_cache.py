"""The prefix cache: KV blocks found again by what they hold.

A block's key is a chain: sha256 over the key of the block before it and its own tokens. The chain begins at a root that stands for
everything else that the KV depends on: the KV identity (weights, formats, layout, kernel version) and what separates users or
adapters. Every part is tagged and length-prefixed, so that no two lists of parts have one encoding.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

from interlock.engine.block_pool import BlockPool


def root_key(identity: str, **parts: str | bytes | None) -> bytes:
    """The key that a chain begins with, 32 bytes. `parts` (for example cache_salt="a") that are None are left out; an empty string is not."""
    digest = hashlib.sha256(b"interlock prefix chain 1")
    for tag, value in (("identity", identity), *sorted(parts.items())):
        if value is not None:
            data = value.encode() if isinstance(value, str) else value
            digest.update(struct.pack("<Q", len(tag)) + tag.encode() + struct.pack("<cQ", b"s" if isinstance(value, str) else b"b", len(data)) + data)
    return digest.digest()


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block with these tokens behind the block (or root) of `parent`, 32 bytes."""
    return hashlib.sha256(b"block" + parent + array("q", token_ids).tobytes()).digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the keys of the full blocks of `token_ids` that `keys` lacks."""
    for start in range(len(keys) * block_size, len(token_ids) - block_size + 1, block_size):
        keys.append(chain_key(keys[-1] if keys else root, token_ids[start : start + block_size]))


class PrefixCache:
    """Finds and publishes the content of a `BlockPool`'s blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def match(self, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        """The longest run of cached blocks for `keys` that leaves at least one of `num_tokens` tokens to compute."""
        blocks: list[int] = []
        if self._pool.enable_caching:
            for key in keys[: (num_tokens - 1) // self._pool.block_size]:
                block_id = self._pool.lookup(key)
                if block_id is None:
                    break
                blocks.append(block_id)
        return blocks

    def publish(self, keys: Sequence[bytes], block_ids: Sequence[int], start: int, stop: int) -> None:
        """Make blocks [start, stop) of a request findable. All their positions have KV, and the step that wrote it has retired."""
        for index in range(start, stop):
            self._pool.publish(block_ids[index], keys[index], keys[index - 1] if index else None)

    def invalidate(self, block_ids: Iterable[int]) -> None:
        """Forget the content of these blocks, and all content that was computed behind it."""
        wrong = [block_id for block_id in block_ids if self._pool.published_key(block_id) is not None]
        children = self._pool.published_children() if wrong else {}
        while wrong:
            block_id = wrong.pop()
            wrong += children.pop(self._pool.published_key(block_id), ())
            self._pool.unpublish(block_id)
