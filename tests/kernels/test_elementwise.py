import numpy as np
import pytest
from step_slot import StepSlot, bits, from_kv_dtype, pool_of_nan, run, to_kv_dtype

from interlock.core.buffer import Buffer
from interlock.kernels import catalog
from interlock.kernels.slot import ERROR_SLOT_MAPPING, NUM_LOGITS, NUM_TOKENS

SENTINEL = np.float32(-77.0)


def normals(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def rms_norm(x, weight, *, live, indices=None, num_threads=1):
    out = np.full_like(x, SENTINEL)
    slot = StepSlot(NUM_TOKENS=live, NUM_LOGITS=live)
    if indices is not None:
        slot.set(LOGITS_INDICES=np.array(indices, np.int32))
    kernel = catalog.rms_norm()
    rows = NUM_TOKENS if indices is None else NUM_LOGITS
    buffers = {"x": Buffer.from_numpy(x), "weight": Buffer.from_numpy(weight), "out": Buffer.from_numpy(out)}
    run(kernel, kernel.pack(**buffers, n=x.shape[1], eps=1e-5, rows=rows, gather=int(indices is not None)), slot, num_threads)
    assert (out[live:] == SENTINEL).all()
    return out[:live]


@pytest.mark.parametrize("n", [1, 15, 16, 40, 64, 576, 1000])
def test_rms_norm_agrees_with_float64(n):
    x, weight = normals(5, n), normals(n, seed=1)
    x[4] = np.nan  # a padded row
    wide = x[:4].astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(x, weight, live=4), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_of_a_row_does_not_depend_on_the_batch_or_the_threads():
    x, weight = normals(7, 576), normals(576, seed=1)
    alone = np.concatenate([rms_norm(x[i : i + 1].copy(), weight, live=1) for i in range(7)])
    for num_threads in (1, 2, 3, 16):
        assert (bits(rms_norm(x, weight, live=7, num_threads=num_threads)) == bits(alone)).all()


def test_rms_norm_gathers_the_rows_whose_logits_are_wanted():
    x, weight = normals(6, 64), normals(64, seed=1)
    assert (bits(rms_norm(x, weight, live=3, indices=[5, 0, 5])) == bits(rms_norm(x, weight, live=6)[[5, 0, 5]])).all()


@pytest.mark.parametrize("n", [5, 16, 40, 1536])
def test_silu_mul_agrees_with_float64_and_does_not_depend_on_the_threads(n):
    gate_up = normals(4, 2 * n) * 4
    gate_up[3] = np.nan
    results = []
    for num_threads in (1, 2, 3, 7):
        out = np.full((4, n), SENTINEL)
        kernel = catalog.silu_mul()
        arguments = kernel.pack(gate_up=Buffer.from_numpy(gate_up), out=Buffer.from_numpy(out), n=n, rows=NUM_TOKENS)
        run(kernel, arguments, StepSlot(NUM_TOKENS=3), num_threads)
        assert (out[3] == SENTINEL).all()
        results.append(out[:3])
    gate, up = np.split(gate_up[:3].astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(results[0], gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-9)
    for other in results[1:]:
        assert (bits(other) == bits(results[0])).all()


def test_silu_mul_has_the_same_bits_in_vectors_and_in_their_tails():
    gate_up = normals(1, 64) * 4
    kernel = catalog.silu_mul()

    def apply(values):
        out = np.zeros(values.shape[1] // 2, np.float32)
        run(kernel, kernel.pack(gate_up=Buffer.from_numpy(values), out=Buffer.from_numpy(out), n=out.size, rows=NUM_TOKENS), StepSlot(NUM_TOKENS=1))
        return out

    whole = apply(gate_up)
    for n in (3, 15, 17, 31):
        assert (bits(apply(np.concatenate([gate_up[:, :n], gate_up[:, 32 : 32 + n]], axis=1))) == bits(whole[:n])).all()


def rope_table(positions, rotary_dim):
    angles = np.outer(np.arange(positions), 10000.0 ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2)))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotated(x, rows):
    """float64 reference: x [tokens, heads, head_dim] by the rows of the table."""
    half = rows.shape[1] // 2
    cosines, sines = rows[:, None, :half].astype(np.float64), rows[:, None, half:].astype(np.float64)
    low, high = x[..., :half].astype(np.float64), x[..., half : 2 * half].astype(np.float64)
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines, x[..., 2 * half :]], axis=-1)


class RopeCase:
    """A step of rope_kv_write; the last row is padding and must not be touched."""

    def __init__(self, head_dim, rotary_dim, dtype, slots, block_size=4, num_blocks=3):
        self.heads, self.kv_heads, self.head_dim, self.dtype = 3, 2, head_dim, dtype
        tokens = len(slots)
        self.input = normals(tokens + 1, 7, head_dim)
        self.qkv = self.input.copy()
        self.table = rope_table(50, rotary_dim)
        self.positions = np.random.default_rng(3).integers(0, 50, tokens + 1).astype(np.int32)
        self.pool = pool_of_nan(num_blocks, self.kv_heads, block_size, head_dim, dtype)
        self.slot = StepSlot(NUM_TOKENS=tokens, POSITIONS=self.positions, SLOT_MAPPING=np.array([*slots, 0], np.int64))
        self.kernel = catalog.rope_kv_write(dtype)
        self.arguments = self.kernel.pack(
            qkv=Buffer.from_numpy(self.qkv),
            rope_table=Buffer.from_numpy(self.table),
            kv_layer=self.pool.ctypes.data,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            block_size=block_size,
            num_blocks=num_blocks,
        )

    def run(self, num_threads=1):
        run(self.kernel, self.arguments, self.slot, num_threads)
        return self


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (24, 24), (80, 80), (64, 16), (8, 8), (40, 36), (2, 2), (100, 100)])
def test_rope_rotates_queries_and_writes_rounded_keys_and_values(dtype, head_dim, rotary_dim):
    slots = [5, 0, 11, 6]
    case = RopeCase(head_dim, rotary_dim, dtype, slots).run()
    expected = rotated(case.input[:4, :5], case.table[case.positions[:4]])
    np.testing.assert_allclose(case.qkv[:4, :3], expected[:, :3], rtol=1e-6, atol=1e-6)
    assert (bits(case.qkv[4]) == bits(case.input[4])).all()
    cells = case.pool.transpose(0, 3, 1, 2, 4).reshape(12, 2, 2, head_dim)  # [slot, k or v, kv head, head_dim]
    for token, kv_slot in enumerate(slots):
        assert (bits(cells[kv_slot, 1]) == bits(to_kv_dtype(case.input[token, 5:], dtype))).all()
        keys = cells[kv_slot, 0]
        wide = from_kv_dtype(keys, dtype)
        unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}[dtype]
        assert (np.abs(wide - expected[token, 3:]) <= np.abs(expected[token, 3:]) * unit * 1.01 + 2e-7).all()
    untouched = [s for s in range(12) if s not in slots]
    assert np.isnan(from_kv_dtype(cells[untouched], dtype)).all()
    assert case.slot.error is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kv_is_rounded_to_nearest_even_and_special_values_stay_special(dtype):
    values = np.concatenate([normals(8192, seed=2) * np.float32(2.0) ** np.linspace(-30, 15, 8192).astype(np.float32), normals(8184, seed=4)])
    halfway = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -0.0, np.inf, -np.inf, np.nan], np.float32)
    values = np.concatenate([values, halfway]).astype(np.float32)
    case = RopeCase(64, 64, dtype, list(range(128)), block_size=32, num_blocks=4)
    case.qkv[:128, 5:] = values.reshape(128, 2, 64)
    case.run(2)
    stored = case.pool[:, 1].transpose(0, 2, 1, 3).reshape(-1)
    expected = to_kv_dtype(values, dtype)
    nan = np.isnan(values)
    assert (bits(stored)[~nan] == bits(expected)[~nan]).all()
    assert (
        np.isnan(case.pool[:, 1].astype(np.float32) if dtype == "float16" else (stored.astype(np.uint32) << 16).view(np.float32)).sum() == nan.sum()
    )


def test_rope_does_not_depend_on_the_batch_or_the_threads():
    whole = RopeCase(64, 64, "bfloat16", [1, 2, 3, 8, 9])
    whole.run(3)
    for num_threads in (1, 2, 16):
        other = RopeCase(64, 64, "bfloat16", [1, 2, 3, 8, 9]).run(num_threads)
        assert (bits(other.qkv) == bits(whole.qkv)).all()
        assert (bits(other.pool) == bits(whole.pool)).all()


def test_rope_leaves_out_tokens_with_slot_minus_one():
    case = RopeCase(64, 64, "bfloat16", [-1, 7]).run()
    assert case.slot.error is None
    written = (case.pool != 0x7FC0).any(axis=(1, 2, 4))
    assert np.argwhere(written).tolist() == [[1, 3]]


@pytest.mark.parametrize("bad", [12, -2, 2**40])
def test_a_slot_outside_the_pool_is_an_error_that_names_the_row(bad):
    case = RopeCase(64, 64, "bfloat16", [0, 1, bad]).run(2)
    assert case.slot.error == (ERROR_SLOT_MAPPING, 2)
