import numpy as np
import pytest
from products import GGUF_TYPES, bits, inputs_of, random_weight

from interlock.core.buffer import Buffer
from interlock.kernels.formats import (
    ELEMENT_BYTES,
    GROUP,
    LANES,
    PANEL,
    WEIGHT_FORMATS,
    dequantize_rows,
    group_nbytes,
    pack,
    pack_gate_up,
    packed_nbytes,
    row_nbytes,
    unpack_reference,
)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("n", [1, 16, 33, 64])
def test_packed_values_are_those_of_the_checkpoint_bit_for_bit(fmt, n):
    k = inputs_of(fmt)
    raw, values = random_weight(fmt, n, k)
    packed = pack(fmt, n, k, raw)
    assert packed.buffer.nbytes == packed_nbytes(fmt, n, k)
    assert np.array_equal(bits(unpack_reference(packed)), bits(values))


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_gate_and_up_alternate_by_half_panels(fmt):
    n, k = 40, inputs_of(fmt)
    gate, gate_values = random_weight(fmt, n, k, seed=1)
    up, up_values = random_weight(fmt, n, k, seed=2)
    packed = pack_gate_up(fmt, n, k, gate, up)
    assert np.array_equal(bits(unpack_reference(packed)), bits(np.concatenate([gate_values, up_values])))
    plain = pack(fmt, PANEL, k, [gate[:LANES], up[:LANES]])
    assert bytes(packed.buffer.numpy()[: plain.buffer.nbytes]) == bytes(plain.buffer.numpy())


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_outputs_and_inputs_past_the_end_are_zero(fmt):
    n, k = 5, inputs_of(fmt)
    packed = pack(fmt, n, k, random_weight(fmt, n, k)[0])
    whole = type(packed)(packed.buffer, fmt, PANEL, -(-k // GROUP) * GROUP)
    values = unpack_reference(whole)
    assert not np.any(values[n:])
    assert not np.any(values[:, k:])


def test_stacked_sources_and_a_row_order():
    first, first_values = random_weight("q4_1", 20, 64, seed=1)
    second, second_values = random_weight("q4_1", 30, 64, seed=2)
    order = np.random.default_rng(3).permutation(50)
    packed = pack("q4_1", 50, 64, [memoryview(first.tobytes()), second], row_order=order)
    assert np.array_equal(unpack_reference(packed), np.concatenate([first_values, second_values])[order])
    assert np.array_equal(dequantize_rows(packed, np.array([49, 0, 7])), np.concatenate([first_values, second_values])[order][[49, 0, 7]])


def test_packing_into_a_part_of_an_arena():
    raw, values = random_weight("q8_0", 32, 64)
    nbytes = packed_nbytes("q8_0", 32, 64)
    arena = Buffer.zeros((3 * nbytes,), "uint8")
    packed = pack("q8_0", 32, 64, raw, buffer=Buffer(arena.address + nbytes, (nbytes,), "uint8", arena.owner))
    assert np.array_equal(unpack_reference(packed), values)
    assert not np.any(arena.numpy()[:nbytes])
    assert not np.any(arena.numpy()[2 * nbytes :])


def test_sizes_are_those_of_the_file_apart_from_padding():
    for fmt in GGUF_TYPES:
        assert group_nbytes(fmt) == PANEL * row_nbytes(fmt, GROUP)
    for fmt, size in ELEMENT_BYTES.items():
        assert group_nbytes(fmt) == PANEL * GROUP * size


def test_sizes_that_do_not_fit_are_refused():
    raw, _ = random_weight("q4_1", 32, 64)
    with pytest.raises(ValueError, match="has 32 rows, expected 33"):
        pack("q4_1", 33, 64, raw)
    with pytest.raises(ValueError, match="expected a multiple of 32"):
        pack("q4_1", 32, 70, raw)
    with pytest.raises(ValueError, match="the size of a row of 96 inputs"):
        pack("q4_1", 32, 96, raw[:, :-1].copy())
    with pytest.raises(ValueError, match="C-contiguous"):
        pack("q4_1", 16, 64, raw[::2])
    with pytest.raises(ValueError, match="the up weight has 16 rows"):
        pack_gate_up("q4_1", 32, 64, raw, raw[:16])
    with pytest.raises(ValueError, match="the buffer has 64 bytes"):
        pack("q4_1", 32, 64, raw, buffer=Buffer.zeros((64,), "uint8"))
