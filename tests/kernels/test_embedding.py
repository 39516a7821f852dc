import numpy as np
import pytest
from products import bits, inputs_of, random_weight

from interlock.kernels import catalog, slot
from interlock.kernels.formats import WEIGHT_FORMATS, pack


def look_up(packed, token_ids, out, num_threads=1):
    """Returns the status block."""
    header, status = np.zeros(slot.NUM_WORDS, np.int64), np.zeros(4, np.int64)
    header[slot.NUM_TOKENS], header[slot.TOKEN_IDS], header[slot.STATUS] = len(token_ids), token_ids.ctypes.data, status.ctypes.data
    kernel = catalog.embedding(packed.fmt)
    arguments = kernel.pack(weight=packed.buffer, out=out.ctypes.data, rows=slot.NUM_TOKENS, vocab_size=packed.n, n=packed.k)
    for thread_id in range(num_threads):
        kernel.function.callable()(arguments.address, header.ctypes.data, thread_id, num_threads)
    return status


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_those_of_the_checkpoint_bit_for_bit(fmt, num_threads):
    raw, values = random_weight(fmt, 75, inputs_of(fmt))
    token_ids = np.array([74, 0, 31, 32, 32, 15, 16], np.int32)
    out = np.full((len(token_ids) + 1, inputs_of(fmt)), 42, np.float32)
    status = look_up(pack(fmt, 75, inputs_of(fmt), raw), token_ids, out, num_threads)
    assert not np.any(status)
    assert np.array_equal(bits(out[:-1].copy()), bits(values[token_ids]))
    assert np.all(out[-1] == 42)


@pytest.mark.parametrize("bad", [75, -1, 2**31 - 1])
def test_an_id_outside_the_table_is_an_error_of_its_row_and_reads_nothing(bad):
    raw, values = random_weight("q8_0", 75, 64)
    out = np.full((3, 64), 42, np.float32)
    status = look_up(pack("q8_0", 75, 64, raw), np.array([3, bad, 5], np.int32), out)
    assert status[0] == slot.ERROR_TOKEN_ID
    assert status[slot.STATUS_ROW] == 1
    assert np.all(out[1] == 42)
    assert np.array_equal(out[2], values[5])
