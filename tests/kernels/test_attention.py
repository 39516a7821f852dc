from dataclasses import dataclass

import numpy as np
import pytest
from numba import cfunc, types
from step_slot import StepSlot, bits, from_kv_dtype, pool_of_nan, run, to_kv_dtype

from interlock.core.buffer import Buffer
from interlock.kernels import catalog
from interlock.kernels.cpu.simd import vload, vstore
from interlock.kernels.cpu.vector_math import vexp, vexp_nonpositive
from interlock.kernels.slot import ERROR_BLOCK_TABLE

SENTINEL = np.float32(-77.0)


@dataclass
class Sequence:
    """q: [length, heads, head_dim]; k, v: [length, kv heads, head_dim], as stored."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dtype: str

    @classmethod
    def random(cls, length, num_heads=9, num_kv_heads=3, head_dim=64, dtype="bfloat16", seed=0):
        rng = np.random.default_rng([seed, length])
        q, k, v = (rng.standard_normal((length, heads, head_dim), dtype=np.float32) for heads in (num_heads, num_kv_heads, num_kv_heads))
        return cls(q, to_kv_dtype(k, dtype), to_kv_dtype(v, dtype), dtype)

    def expected(self, start, stop):
        """float64 reference of the rows [start, stop)."""
        k, v = (from_kv_dtype(a, self.dtype).astype(np.float64) for a in (self.k, self.v))
        group = self.q.shape[1] // k.shape[1]
        rows = []
        for position in range(start, stop):
            keys, values = (np.repeat(a[: position + 1], group, axis=1) for a in (k, v))
            scores = np.einsum("hd,thd->ht", self.q[position], keys) / np.sqrt(self.q.shape[2])
            weights = np.exp(scores - scores.max(1, keepdims=True))
            rows.append(np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values))
        return np.array(rows)


def attend(batch, *, block_size=16, num_threads=1, seed=0, spoil=None):
    """Attention of one step. batch: [(sequence, start, stop)]: the query rows [start, stop) of a sequence whose KV ends at stop.

    Whatever a kernel must not read holds NaN: unused slots, k and v in qkv, workspaces; unused block table entries are out of range.
    """
    rng = np.random.default_rng(seed)
    first = batch[0][0]
    dtype = first.dtype
    num_heads, num_kv_heads, head_dim = first.q.shape[1], first.k.shape[1], first.q.shape[2]
    counts = [stop - start for _, start, stop in batch]
    columns = max(-(-stop // block_size) for _, _, stop in batch) + 1
    num_blocks = len(batch) * columns
    pool = pool_of_nan(num_blocks, num_kv_heads, block_size, head_dim, dtype)
    table = rng.permutation(num_blocks).reshape(len(batch), columns).astype(np.int32)
    qkv = np.full((sum(counts) + 2, num_heads + 2 * num_kv_heads, head_dim), np.nan, np.float32)
    row = 0
    for r, (sequence, start, stop) in enumerate(batch):
        for position in range(stop):
            block = pool[table[r, position // block_size]]
            block[0, :, position % block_size], block[1, :, position % block_size] = sequence.k[position], sequence.v[position]
        qkv[row : row + stop - start, :num_heads] = sequence.q[start:stop]
        row += stop - start
        table[r, -(-stop // block_size) :] = 10**9
    if spoil is not None:
        table[spoil] = num_blocks
    slot = StepSlot(
        NUM_TOKENS=row,
        NUM_REQS=len(batch),
        QUERY_START_LOC=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        SEQ_LENS=np.array([stop for _, _, stop in batch], np.int32),
        BLOCK_TABLE=table,
        BLOCK_TABLE_STRIDE=columns,
    )
    longest = max(stop for _, _, stop in batch)
    stride = catalog.attention_scratch_bytes(num_heads, num_kv_heads, head_dim)
    scratch = Buffer.zeros((stride * num_threads + 64,), "uint8")
    partials = Buffer.zeros((catalog.attention_partials_bytes(len(batch), num_heads, head_dim, longest) + 64,), "uint8")
    scratch.numpy()[:] = partials.numpy()[:] = 0xFF
    out = np.full((row + 2, num_heads, head_dim), SENTINEL)
    common = {
        "out": Buffer.from_numpy(out),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "partials": partials,
        "max_splits": catalog.attention_max_splits(longest),
    }
    kernel = catalog.attention(dtype, head_dim)
    arguments = kernel.pack(
        qkv=Buffer.from_numpy(qkv),
        kv_layer=pool.ctypes.data,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        num_blocks=num_blocks,
        scale=head_dim**-0.5,
        scratch=scratch,
        scratch_stride=stride,
        **common,
    )
    run(kernel, arguments, slot, num_threads)
    if slot.error is None:
        merge = catalog.attention_merge(head_dim)
        run(merge, merge.pack(**common), slot, num_threads)
    assert (out[row:] == SENTINEL).all()
    assert (scratch.numpy()[-64:] == 0xFF).all()
    assert (partials.numpy()[-64:] == 0xFF).all()
    if spoil is not None:
        return slot.error
    assert slot.error is None
    return np.split(out[:row], np.cumsum(counts)[:-1])


@pytest.fixture(scope="module")
def prompt():
    """A prompt of three splits, and its attention output computed in one go."""
    sequence = Sequence.random(600)
    (whole,) = attend([(sequence, 0, 600)])
    return sequence, whole


@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "head_dim"),
    [
        *(("bfloat16", 9, 3, 64), ("float16", 8, 1, 24), ("float32", 4, 4, 80), ("bfloat16", 10, 2, 16), ("float32", 2, 1, 8)),
        *(("float16", 4, 1, 128), ("bfloat16", 5, 1, 4), ("float32", 4, 1, 20), ("float16", 6, 2, 34), ("bfloat16", 3, 1, 100)),
    ],
)
def test_agrees_with_float64(dtype, num_heads, num_kv_heads, head_dim):
    batch = [
        (Sequence.random(length, num_heads, num_kv_heads, head_dim, dtype, seed=i), start, length)
        for i, (start, length) in enumerate([(0, 1), (36, 37), (256, 257), (0, 70), (500, 530), (700, 701)])
    ]
    for (sequence, start, stop), out in zip(batch, attend(batch, num_threads=2), strict=True):
        np.testing.assert_allclose(out, sequence.expected(start, stop), rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("chunk", [1, 7, 64, 256, 333])
def test_bits_do_not_depend_on_how_a_prompt_is_chunked(prompt, chunk):
    sequence, whole = prompt
    parts = [attend([(sequence, start, min(start + chunk, 600))])[0] for start in range(0, 600, chunk) if chunk > 1 or start % 13 < 2 or start > 590]
    expected = whole if chunk > 1 else whole[[i for i in range(600) if i % 13 < 2 or i > 590]]
    assert (bits(np.concatenate(parts)) == bits(expected)).all()


@pytest.mark.parametrize("block_size", [1, 2, 8, 64, 256])
def test_bits_do_not_depend_on_the_block_size(prompt, block_size):
    sequence, whole = prompt
    prefill, decode = attend([(sequence, 0, 600), (sequence, 599, 600)], block_size=block_size)
    assert (bits(prefill) == bits(whole)).all()
    assert (bits(decode) == bits(whole[599:])).all()


@pytest.mark.parametrize("num_threads", [2, 3, 5, 16])
def test_bits_do_not_depend_on_the_number_of_threads(prompt, num_threads):
    sequence, whole = prompt
    prefill, chunk, decode = attend([(sequence, 0, 600), (sequence, 100, 301), (sequence, 599, 600)], num_threads=num_threads)
    assert (bits(prefill) == bits(whole)).all()
    assert (bits(chunk) == bits(whole[100:301])).all()
    assert (bits(decode) == bits(whole[599:])).all()


def test_bits_do_not_depend_on_batch_companions(prompt):
    sequence, whole = prompt
    others = [Sequence.random(length, seed=5) for length in (3, 300, 1000)]
    batch = [(others[0], 2, 3), (sequence, 511, 512), (others[1], 0, 300), (sequence, 40, 97), (others[2], 999, 1000), (sequence, 256, 257)]
    results = attend(batch, num_threads=2, seed=9)
    for (member, start, stop), out in zip(batch, results, strict=True):
        if member is sequence:
            assert (bits(out) == bits(whole[start:stop])).all()
        assert np.isfinite(out).all()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_decode_rows_of_any_group_size_have_the_bits_of_a_prefill(num_kv_heads):
    sequence = Sequence.random(300, num_heads=8, num_kv_heads=num_kv_heads)
    (whole,) = attend([(sequence, 0, 300)])
    for position in (0, 255, 299):
        (row,) = attend([(sequence, position, position + 1)], num_threads=2)
        assert (bits(row) == bits(whole[position : position + 1])).all()


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 20), ("float16", 34), ("bfloat16", 100)])
def test_bits_of_heads_that_are_no_multiple_of_a_vector_do_not_depend_on_chunks_threads_or_blocks(dtype, head_dim):
    sequence = Sequence.random(300, num_heads=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    (whole,) = attend([(sequence, 0, 300)])
    batch = [(sequence, 0, 1), (sequence, 255, 256), (sequence, 299, 300), (sequence, 1, 38), (sequence, 200, 300)]
    for (_, start, stop), part in zip(batch, attend(batch, num_threads=3, block_size=8), strict=True):
        assert (bits(part) == bits(whole[start:stop])).all()


def test_many_heads_that_share_one_kv_head_fit_the_workspaces():
    sequence = Sequence.random(70, num_heads=71, num_kv_heads=1, head_dim=16, dtype="bfloat16")
    (whole,) = attend([(sequence, 0, 70)])
    (row,) = attend([(sequence, 69, 70)])
    np.testing.assert_allclose(whole, sequence.expected(0, 70), rtol=1e-5, atol=4e-6)
    assert (bits(row) == bits(whole[69:])).all()


def test_exp_of_nonpositive_numbers_has_the_bits_of_exp():
    @cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy")
    def both(source, target, count):
        for i in range(0, count, 16):
            vstore(target + 4 * i, vexp(vload(source + 4 * i)))
            vstore(target + 4 * (count + i), vexp_nonpositive(vload(source + 4 * i)))

    x = -np.concatenate([np.linspace(0, 105, 2**20), np.geomspace(1e-40, 1, 2**16 - 16), [0.0, -0.0, np.inf, np.nan] * 4]).astype(np.float32)
    out = np.empty((2, x.size), np.float32)
    both.ctypes(x.ctypes.data, out.ctypes.data, x.size)
    assert (bits(out[0]) == bits(out[1])).all()


def test_one_wrong_bit_in_the_pool_is_seen():
    """Negative control: the comparisons above do notice a single stale value."""
    sequence = Sequence.random(300)
    (before,) = attend([(sequence, 299, 300)])
    sequence.v[17, 0, 5] ^= 1
    (after,) = attend([(sequence, 299, 300)])
    assert (bits(before) != bits(after)).any()


@pytest.mark.parametrize("queries", [1, 40])
def test_a_block_outside_the_pool_is_an_error_that_names_the_request(queries):
    batch = [(Sequence.random(20), 19, 20), (Sequence.random(100), 100 - queries, 100)]
    assert attend(batch, spoil=(1, 4)) == (ERROR_BLOCK_TABLE, 1)
