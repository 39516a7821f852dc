import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.core.buffer import Buffer
from interlock.graphs import copy_list

SIZE = 5000


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, SIZE)), max_size=20))
def test_entries_are_copied_in_order(triples):
    source = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    target, expected = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    entries = []
    for destination, start, length in triples:
        nbytes = min(length, SIZE - destination, SIZE - start)
        entries.append((target.ctypes.data + destination, source.ctypes.data + start, nbytes))
        expected[destination : destination + nbytes] = source[start : start + nbytes]
    assert copy_list(np.array(entries, np.int64).reshape(-1, 3), Buffer.zeros((1,), "int64")) == len(entries)
    assert target.tobytes() == expected.tobytes()


def test_a_copy_longer_than_a_chunk_is_whole():
    source = np.random.default_rng(1).integers(0, 256, 3 * 2**20 + 17, dtype=np.uint8)
    target = np.zeros_like(source)
    entries = np.array([[target.ctypes.data, source.ctypes.data, source.nbytes]], np.int64)
    assert copy_list(entries, Buffer.zeros((1,), "int64")) == 1
    assert target.tobytes() == source.tobytes()


def test_the_abort_word_stops_the_list_while_it_runs():
    """Also shows that the GIL is not held: with it, the other thread could not set the word before the end."""
    source, target = np.ones(2**16, np.uint8), np.zeros(2**16, np.uint8)
    entries = np.tile(np.array([[target.ctypes.data, source.ctypes.data, 2**16]], np.int64), (1_000_000, 1))
    abort = Buffer.zeros((1,), "int64")

    def stop():
        abort.numpy()[0] = 1

    thread = threading.Thread(target=stop)
    thread.start()
    assert copy_list(entries, abort) < len(entries)
    thread.join()
    assert copy_list(entries, abort) == 0


def test_entries_of_another_shape_are_refused():
    for wrong in (np.zeros((2, 2), np.int64), np.zeros((2, 3), np.int32), np.zeros(3, np.int64), np.zeros((4, 6), np.int64)[:, ::2]):
        with pytest.raises(ValueError, match="shape"):
            copy_list(wrong, Buffer.zeros((1,), "int64"))
