"""Which bytes to copy so that positions [start, stop) of one layer stand in our blocks as they stand in a peer's."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_NBYTES = 2


def copy_descriptors(
    start: int,
    stop: int,
    block_ids: Sequence[int],
    block_size: int,
    remote_block_ids: Sequence[int],
    remote_block_size: int,
    num_kv_heads: int,
    row_bytes: int,
) -> npt.NDArray[np.int64]:
    """Copies `[n, 3]` of (destination, source, bytes), as byte offsets in a layer of `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.

    block_ids: local blocks, the first of which holds position `start`; remote_block_ids: the peer's, from position 0 on;
    row_bytes: bytes of one head's vector at one position. Exactly the positions asked for are written: a partial block gives one
    copy for each of keys and values, head, and run of positions. The block sizes may differ. Neighbours are merged.
    """
    edges = {start, stop} | set(range(-(-start // block_size) * block_size, stop, block_size))
    edges |= set(range(-(-start // remote_block_size) * remote_block_size, stop, remote_block_size))
    bounds = np.array(sorted(edges), np.int64)
    begin, length = bounds[:-1], np.diff(bounds)
    local = np.asarray(block_ids, np.int64)[begin // block_size - start // block_size]
    remote = np.asarray(remote_block_ids, np.int64)[begin // remote_block_size]
    planes = 2 * num_kv_heads
    plane_bytes, remote_plane_bytes = block_size * row_bytes, remote_block_size * row_bytes
    destination = local * planes * plane_bytes + begin % block_size * row_bytes
    source = remote * planes * remote_plane_bytes + begin % remote_block_size * row_bytes

    whole = (length == block_size) & (length == remote_block_size)
    blocks = np.stack([destination[whole], source[whole], np.full(int(whole.sum()), planes * plane_bytes)], axis=1)
    plane = np.arange(planes, dtype=np.int64)
    runs = np.stack(
        [
            (destination[~whole, None] + plane * plane_bytes).ravel(),
            (source[~whole, None] + plane * remote_plane_bytes).ravel(),
            np.repeat(length[~whole] * row_bytes, planes),
        ],
        axis=1,
    )
    return merge(np.concatenate([blocks, runs]))


def merge(descriptors: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Join each descriptor to its predecessor where both its source and its destination follow on."""
    if len(descriptors) < 2:
        return descriptors
    ends = descriptors[:-1, :_NBYTES] + descriptors[:-1, _NBYTES:]
    firsts = np.flatnonzero(np.concatenate([[True], (ends != descriptors[1:, :_NBYTES]).any(axis=1)]))
    merged = descriptors[firsts].copy()
    merged[:, _NBYTES] = np.add.reduceat(descriptors[:, _NBYTES], firsts)
    return merged
