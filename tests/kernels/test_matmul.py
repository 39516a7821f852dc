import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from products import bits, inputs_of, random_weight, run_product

from interlock.kernels import catalog, slot
from interlock.kernels.compile_cache import cache_directory, entry_path
from interlock.kernels.cpu import emit
from interlock.kernels.cpu.simd import fma
from interlock.kernels.cpu.tiles import tile_shapes
from interlock.kernels.formats import ELEMENT_BYTES, GROUP, LANES, MAX_TILE_ROWS, WEIGHT_FORMATS, pack, pack_gate_up, unpack_reference
from interlock.kernels.native import load

FUNCTIONS = [make(fmt).function for make in (catalog.matmul, catalog.matmul_silu, catalog.embedding) for fmt in WEIGHT_FORMATS]


@pytest.fixture(scope="module", autouse=True)
def _compiled_side_by_side():
    load(FUNCTIONS)


def packed_weight(fmt, n, k=None, seed=0):
    k = inputs_of(fmt) if k is None else k
    return pack(fmt, n, k, random_weight(fmt, n, k, seed)[0])


def packed_gate_up(fmt, n, k=None):
    k = inputs_of(fmt) if k is None else k
    return pack_gate_up(fmt, n, k, random_weight(fmt, n, k, 1)[0], random_weight(fmt, n, k, 2)[0])


def random_inputs(rows, k, seed=9):
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("packed_by", [packed_weight, packed_gate_up])
def test_a_row_has_the_same_bits_in_every_batch(fmt, packed_by):
    packed = packed_by(fmt, 83)
    x = random_inputs(130, packed.k)
    expected = bits(run_product(packed, x))
    for rows in range(1, 41):
        start = 3 * rows % 90
        assert np.array_equal(bits(run_product(packed, x[start : start + rows])), expected[start : start + rows]), rows


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("packed_by", [packed_weight, packed_gate_up])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_row_has_the_same_bits_for_every_number_of_threads(fmt, packed_by, rows):
    packed = packed_by(fmt, 83)
    x = random_inputs(rows, packed.k)
    expected = bits(run_product(packed, x))
    for num_threads in (2, 3, 5):
        assert np.array_equal(bits(run_product(packed, x, num_threads=num_threads)), expected), num_threads


def test_blocks_of_input_rows_that_do_not_fit_the_scratch_at_once():
    packed = packed_weight("q4_1", 32, k=4096)
    x = random_inputs(70, packed.k)
    expected = bits(run_product(packed, x))
    for row in (0, 11, 12, 35, 36, 69):
        assert np.array_equal(bits(run_product(packed, x[row : row + 1])), expected[row : row + 1])


@njit
def law(values, scales, minima, x, sums, grouped_scale):
    """One output, by the law: values [groups, 32] are integers where the format is quantised."""
    total = np.float32(0)
    for group in range(values.shape[0]):
        acc = np.float32(0)
        for i in range(values.shape[1]):
            acc = fma(values[group, i], x[group, i], acc)
        total = fma(minima[group], sums[group], fma(acc, scales[group], total)) if grouped_scale else total + acc
    return total


def group_sums(x):
    """By the fixed tree: inputs i and i + 16, then lanes 8, 4, 2, 1 apart."""
    lanes = x[:, :LANES] + x[:, LANES:]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    return lanes[:, 0]


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_every_output_is_the_canonical_expression(fmt):
    n, k = 37, inputs_of(fmt)
    raw, values = random_weight(fmt, n, k)
    groups = -(-k // GROUP)
    if fmt in ELEMENT_BYTES:
        values = np.pad(values, ((0, 0), (0, groups * GROUP - k))).reshape(n, groups, GROUP)
        scales = minima = np.zeros((n, groups), np.float32)
    else:
        blocks = raw.reshape(n, groups, -1)
        scales = blocks[:, :, :2].copy().view(np.float16)[..., 0].astype(np.float32)
        minima = blocks[:, :, 2:4].copy().view(np.float16)[..., 0].astype(np.float32) if fmt == "q4_1" else np.zeros_like(scales)
        values = np.rint((values.reshape(n, groups, GROUP) - minima[..., None]) / scales[..., None]).astype(np.float32)
    x = random_inputs(14, k)
    result = run_product(pack(fmt, n, k, raw), x)
    for row in range(len(x)):
        grouped = np.pad(x[row], (0, groups * GROUP - k)).reshape(groups, GROUP)
        sums = group_sums(grouped) if fmt == "q4_1" else np.zeros(groups, np.float32)
        expected = [law(values[i], scales[i], minima[i], grouped, sums, fmt not in ELEMENT_BYTES) for i in range(n)]
        assert np.array_equal(bits(np.array(expected, np.float32)), bits(result[row]))


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_products_are_close_to_those_in_double_precision(fmt):
    packed = packed_weight(fmt, 64, k=608)
    weight = unpack_reference(packed).astype(np.float64)
    x = random_inputs(20, 608)
    error = np.abs(run_product(packed, x) - x @ weight.T)
    assert np.max(error / (np.abs(x) @ np.abs(weight).T)) < 2e-7


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("n", [1, 16, 31, 251])
def test_only_live_rows_and_columns_are_written(fmt, n):
    packed = packed_weight(fmt, n)
    x = random_inputs(9, packed.k + 5)[:, : packed.k]
    out = np.full((9, n + 7), 42, np.float32)
    expected = run_product(packed, np.ascontiguousarray(x[:6]))
    run_product(packed, x, out=out, rows=6, num_threads=2, rows_word=slot.NUM_LOGITS)
    assert np.array_equal(bits(out[:6, :n].copy()), bits(expected))
    assert np.all(out[:6, n:] == 42)
    assert np.all(out[6:] == 42)


@pytest.mark.parametrize("fmt", sorted(ELEMENT_BYTES))
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (33, 31), (20, 33), (100, 100)])
def test_outputs_and_inputs_of_any_number_count(fmt, n, k):
    x = random_inputs(6, k)
    for packed_by in (packed_weight, packed_gate_up):
        packed = packed_by(fmt, n, k)
        expected = x.astype(np.float64) @ unpack_reference(packed).astype(np.float64).T
        if packed.gate_up:
            gate, up = np.split(expected, 2, axis=1)
            expected = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(run_product(packed, x, num_threads=2), expected, rtol=1e-5, atol=1e-5)


def test_no_rows_is_no_work():
    packed = packed_weight("q8_0", 32)
    out = run_product(packed, random_inputs(2, packed.k), rows=0)
    assert np.all(np.isnan(out))


@pytest.mark.parametrize("fmt", ["float16", "q4_1"])
@pytest.mark.parametrize("n", [64, 83])
def test_the_residual_is_added_to_the_finished_product(fmt, n):
    packed = packed_weight(fmt, n)
    x = random_inputs(14, packed.k)
    residual = random_inputs(14, n, seed=5)
    expected = residual + run_product(packed, x)
    assert np.array_equal(bits(run_product(packed, x, residual=residual, num_threads=2)), bits(expected))
    assert np.array_equal(bits(run_product(packed, x, residual=residual, out=residual)), bits(expected))


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("n", [48, 83])
def test_the_gated_product_has_the_bits_of_the_separate_kernels(fmt, n):
    k = inputs_of(fmt)
    gate, up = random_weight(fmt, n, k, 1)[0], random_weight(fmt, n, k, 2)[0]
    x = random_inputs(14, k)
    gate_up = np.ascontiguousarray(run_product(pack(fmt, 2 * n, k, [gate, up]), x))
    expected = np.full((len(x), n), np.nan, np.float32)
    header = np.zeros(slot.NUM_WORDS, np.int64)
    header[slot.NUM_TOKENS] = len(x)
    arguments = catalog.silu_mul().pack(gate_up=gate_up.ctypes.data, out=expected.ctypes.data, n=n, rows=slot.NUM_TOKENS)
    catalog.silu_mul().function.callable()(arguments.address, header.ctypes.data, 0, 1)
    assert np.array_equal(bits(run_product(pack_gate_up(fmt, n, k, gate, up), x, num_threads=2)), bits(expected))


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_tiles_fit_the_sizes_that_the_scratch_is_laid_out_for(fmt):
    heights = [shape.rows for shape in tile_shapes(fmt)]
    assert heights == sorted(heights)
    assert heights[0] == 1
    assert heights[-1] <= MAX_TILE_ROWS


def probe():
    """Bits of a few products, as JSON-able numbers; run by this process and by one that compiles for another instruction set."""
    results = []
    for packed in (packed_gate_up("q4_1", 48), packed_weight("float16", 48), packed_weight("q8_0", 48)):
        results += bits(run_product(packed, random_inputs(7, packed.k))).reshape(-1).tolist()
    return results


def test_avx2_and_the_host_give_the_same_bits(tmp_path):
    environment = dict(os.environ, INTERLOCK_CACHE_DIR=str(tmp_path))
    if platform.machine().lower() in ("x86_64", "amd64"):
        features = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,+cx16,+sahf,+sse3,+ssse3,+sse4.1,+sse4.2,+64bit"
        environment.update(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features)
    script = "import json, test_matmul; print(json.dumps(test_matmul.probe()))"
    other = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, env=environment, check=True, capture_output=True, text=True)
    assert json.loads(other.stdout) == probe()


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-darwin24.1.0"])
def test_an_arm_cpu_has_neon_although_its_system_lists_no_features(monkeypatch, triple):
    monkeypatch.setattr(emit.llvm, "get_process_triple", lambda: triple)
    monkeypatch.setattr(emit.config, "CPU_FEATURES", "-sve")
    assert "neon" in emit.target_features()
    assert tile_shapes("q4_1")[0].rows == 1


@pytest.mark.parametrize("function", FUNCTIONS, ids=[function.name for function in FUNCTIONS])
def test_compiled_code_calls_nothing(function):
    """No libm, no conversion helper, no Python: neither bits that depend on a library nor code that raises."""
    load([function])
    entry = entry_path(cache_directory(), function).read_bytes()
    assert undefined_symbols(entry[entry.index(b"\x7fELF") :]) <= {"", "_GLOBAL_OFFSET_TABLE_"}


def undefined_symbols(elf):
    """Names of the undefined symbols of a 64-bit ELF object file."""
    word = lambda offset, size: int.from_bytes(elf[offset : offset + size], "little")  # noqa: E731
    assert elf[:5] == b"\x7fELF\x02"
    table, count = word(0x28, 8), word(0x3C, 2)
    sections = [table + i * word(0x3A, 2) for i in range(count)]
    names = set()
    for section in sections:
        if word(section + 4, 4) == 2:  # symbol table
            strings = word(sections[word(section + 40, 4)] + 24, 8)
            start = word(section + 24, 8)
            for symbol in range(start, start + word(section + 32, 8), 24):
                if word(symbol + 6, 2) == 0:
                    name = strings + word(symbol, 4)
                    names.add(elf[name : elf.index(b"\0", name)].decode())
    return names


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("packed_by", [packed_weight, packed_gate_up])
def test_a_product_with_a_norm_is_the_norm_and_then_the_product(fmt, packed_by):
    packed = packed_by(fmt, 83)
    x, norm = random_inputs(29, packed.k), random_inputs(1, packed.k, seed=4)[0]
    normed = normalise(x, norm)
    for num_threads in (1, 3):
        assert np.array_equal(bits(run_product(packed, x, norm=norm, num_threads=num_threads)), bits(run_product(packed, normed)))


def test_a_product_takes_the_rows_whose_logits_are_wanted():
    packed = packed_weight("q8_0", 83)
    x, norm = random_inputs(9, packed.k), random_inputs(1, packed.k, seed=4)[0]
    indices = np.array([8, 0, 3, 3], np.int32)
    expected = run_product(packed, x[indices], norm=norm)
    assert np.array_equal(bits(run_product(packed, x, norm=norm, indices=indices, rows_word=slot.NUM_LOGITS)), bits(expected))


def normalise(x, weight, eps=1e-5):
    """What the stand-alone kernel makes of x."""
    kernel, out = catalog.rms_norm(), np.empty_like(x)
    header = np.zeros(slot.NUM_WORDS, np.int64)
    header[slot.NUM_TOKENS] = len(x)
    addresses = {"x": x.ctypes.data, "weight": weight.ctypes.data, "out": out.ctypes.data}
    arguments = kernel.pack(**addresses, n=x.shape[1], eps=eps, rows=slot.NUM_TOKENS, gather=0)
    kernel.function.callable()(arguments.address, header.ctypes.data, 0, 1)
    return out
