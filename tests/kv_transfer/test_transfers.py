import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.kv_transfer.transfers import copy_descriptors, merge

HEADS, DIM, BLOCKS = 2, 3, 40


@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(0, 20), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_exactly_the_positions_asked_for_are_copied(data, size, remote_size, start, length):
    stop = start + length
    local = data.draw(st.permutations(range(BLOCKS)))[: (stop - 1) // size - start // size + 1]
    remote = data.draw(st.permutations(range(BLOCKS)))[: -(-stop // remote_size)]
    source = np.arange(BLOCKS * 2 * HEADS * remote_size * DIM, dtype=np.uint16).reshape(BLOCKS, 2, HEADS, remote_size, DIM)
    destination = np.full((BLOCKS, 2, HEADS, size, DIM), 65535, np.uint16)
    expected = destination.copy()
    for position in range(start, stop):
        block = local[position // size - start // size]
        expected[block, :, :, position % size] = source[remote[position // remote_size], :, :, position % remote_size]
    source_bytes, destination_bytes = source.reshape(-1).view(np.uint8), destination.reshape(-1).view(np.uint8)
    for to, frm, nbytes in copy_descriptors(start, stop, local, size, remote, remote_size, HEADS, DIM * 2).tolist():
        destination_bytes[to : to + nbytes] = source_bytes[frm : frm + nbytes]
    assert np.array_equal(destination, expected)


def test_neighbouring_blocks_are_one_copy():
    assert copy_descriptors(0, 16, [3, 4, 5, 9], 4, [6, 7, 8, 1], 4, HEADS, 2).tolist() == [[96, 192, 96], [288, 32, 32]]


def test_a_partial_block_is_one_copy_per_plane():
    assert len(copy_descriptors(0, 7, [0, 1], 4, [0, 1], 4, HEADS, 2)) == 2 * HEADS  # the first plane of the second block follows on the first block


def test_only_followers_in_both_source_and_destination_are_merged():
    descriptors = np.array([[0, 0, 8], [8, 8, 8], [16, 24, 8], [32, 32, 8]], np.int64)
    assert merge(descriptors).tolist() == [[0, 0, 16], [16, 24, 8], [32, 32, 8]]
