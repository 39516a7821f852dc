"""The transfer benchmark on a small pool: every way moves exactly the other process's bytes, and one that does not is found out."""

import contextlib

import numpy as np
import pytest

from interlock.bench import transfer
from interlock.bench.transfer import MEMCPY, NIXL, SHARED_MEMORY, SIZES, Ways, measure, segment_lists
from interlock.bench.transfer_peer import RAW_NIXL, PoolSize
from interlock.core.errors import InterlockError

NAMES = (SHARED_MEMORY, MEMCPY, NIXL, RAW_NIXL)
SMALL = PoolSize(num_layers=2, num_blocks=8)


@pytest.fixture(scope="module")
def ways():
    with contextlib.closing(Ways(SMALL, NAMES)) as opened:
        yield opened


LISTS = segment_lists(SMALL, sizes=(1024, 8192), blocks=3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("segments", LISTS, ids=lambda segments: segments.name)
def test_each_way_moves_the_bytes_of_the_other_process(ways, segments, name):
    move = ways.prepare(name, segments)
    for _ in range(2):
        ways.check(segments, move, name)


def test_negative_control_a_way_that_moves_too_little_is_found_out(ways):
    blocks = LISTS[-2]
    shorter = transfer.SegmentList("shorter", blocks.offsets[:-1], False)
    with pytest.raises(InterlockError, match=r"memcpy: .*is not what the other process holds"):
        ways.check(blocks, ways.prepare(MEMCPY, shorter), MEMCPY)


def test_nothing_beside_the_list_is_written(ways):
    ours = ways.pool.buffer.numpy()
    for segments in LISTS:
        ours[:] = 0
        ways.prepare(SHARED_MEMORY, segments)()
        written = np.zeros(ours.size, bool)
        for destination, _, nbytes in segments.offsets:
            written[destination : destination + nbytes] = True
        assert not ours[~written].any()


def test_figures_are_of_each_transport_against_what_it_is_made_of(ways, monkeypatch):
    monkeypatch.setattr(transfer, "_TURNS", 1)
    monkeypatch.setattr(transfer, "_SAMPLE_TRANSFERS", 2)
    figures = measure(ways, LISTS, 1, lambda what: None)
    names = [segments.name for segments in LISTS]
    assert [figure.name for figure in figures] == [
        f"{label}: {name}" for label in ("shared memory", "NIXL") for name in (*names, "a transfer of 1 KiB")
    ]
    assert [figure.peer for figure in figures] == ["memcpy"] * 5 + ["raw NIXL"] * 5
    assert [figure.bound for figure in figures] == [None, None, 0.85, None, None, None, None, 0.9, None, None]
    assert all(figure.value > 0 for figure in figures)


def test_the_lists_go_from_1_kib_to_64_mib_and_to_scattered_blocks_of_all_layers():
    *sizes, blocks, layers = segment_lists(PoolSize())
    assert [segments.nbytes for segments in sizes] == list(SIZES)
    assert (SIZES[0], SIZES[-1]) == (1024, 64 * 2**20)
    assert [segments.name for segments in sizes if segments.promised] == ["4 MiB", "16 MiB", "64 MiB"]
    assert blocks.name == "30 layers of 16 blocks of 6 KiB"
    assert (layers.offsets is blocks.offsets, blocks.posts, layers.posts) == (True, 1, 30)
    assert blocks.offsets.shape == (30 * 16, 3)
    assert set(blocks.offsets[:, 2]) == {6144}
    assert all(len(set(blocks.offsets[:, column])) == 480 for column in (0, 1))
    assert max(int((segments.offsets[:, :2].max(axis=1) + segments.offsets[:, 2]).max()) for segments in (*sizes, blocks)) <= PoolSize().nbytes
