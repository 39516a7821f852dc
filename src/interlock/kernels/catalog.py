"""All kernels: names, argument fields, and the sizes of the workspaces that they need. Importing this never imports Numba.

A field holds one 64-bit word: an address, a count, a stride in bytes, or (eps, scale) the bit pattern of a float64. `rows` is the
index of the slot header word with the live row count (NUM_TOKENS or NUM_LOGITS). `scratch` is per thread: thread t uses
`scratch + t * scratch_stride`. KV pools are, per layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of the KV dtype.
"""

import functools

from interlock.core.buffer import ALIGNMENT, DType
from interlock.core.sampling_params import MAX_MASKED_TOKENS
from interlock.kernels.cpu import attention_layout
from interlock.kernels.formats import INPUT_BLOCK_BYTES, MAX_TILE_ROWS, TOTALS_BYTES, WeightFormat
from interlock.kernels.native import Kernel, kernel

_MATMUL_FIELDS = (
    *("x", "x_stride", "weight", "out", "out_stride", "residual", "rows", "n", "k", "scratch", "scratch_stride"),
    *("norm", "norm_eps", "gather"),
)

# Products


@functools.cache
def matmul(fmt: WeightFormat) -> Kernel:
    """out[r, :n] = (residual[r, :n] or 0) + x[r, :k] @ W.T for the live rows; `weight` holds W [n, k] as packed panels.

    x, out: float32, strides in bytes; residual: 0, or an address with out's stride (may be out itself). norm: 0, or the float32 weight [k]
    of an RMSNorm that x goes through first, bit-equal to `rms_norm`; gather: 1 takes the input rows LOGITS_INDICES in place of 0, 1, 2, ….
    """
    return kernel(f"matmul_{fmt}", "interlock.kernels.cpu.matmul:matmul", _MATMUL_FIELDS, (fmt,))


@functools.cache
def matmul_silu(fmt: WeightFormat) -> Kernel:
    """out[r, :n] = silu(x @ Wg.T) * (x @ Wu.T), bit-equal to `matmul` and `silu_mul`; `weight` holds the panels of Wg and Wu
    interleaved (`formats.pack_gate_up`); residual must be 0."""
    return kernel(f"matmul_silu_{fmt}", "interlock.kernels.cpu.matmul:matmul_silu", _MATMUL_FIELDS, (fmt,))


@functools.cache
def embedding(fmt: WeightFormat) -> Kernel:
    """out[t, :n] = row token_ids[t] of the packed table [vocab_size, n], as float32; ERROR_TOKEN_ID for an id outside of it."""
    return kernel(f"embedding_{fmt}", "interlock.kernels.cpu.embedding:embedding", ("weight", "out", "rows", "vocab_size", "n"), (fmt,))


def matmul_scratch_bytes(k: int) -> int:
    """`scratch_stride` of matmul and matmul_silu for products over up to `k` inputs; the scratch is aligned to 64 bytes."""
    one_tile = -(-k // 32) * (MAX_TILE_ROWS * 32 * 4 + ALIGNMENT)
    return TOTALS_BYTES + max(INPUT_BLOCK_BYTES, one_tile)


# Elementwise


@functools.cache
def rms_norm() -> Kernel:
    """out[r] = x[i] * rsqrt(mean(x[i]**2) + eps) * weight, float32 rows of n, where i is r, or LOGITS_INDICES[r] if gather is 1.

    The stand-alone form of what products do on the way in, and their oracle.
    """
    return kernel("rms_norm", "interlock.kernels.cpu.elementwise:rms_norm", ("x", "weight", "out", "n", "eps", "rows", "gather"))


@functools.cache
def silu_mul() -> Kernel:
    """out[r, :n] = silu(gate_up[r, :n]) * gate_up[r, n:]."""
    return kernel("silu_mul", "interlock.kernels.cpu.elementwise:silu_mul", ("gate_up", "out", "n", "rows"))


@functools.cache
def rope_kv_write(kv_dtype: DType) -> Kernel:
    """Rotate q in place (half split); write rotated k, and v, rounded to nearest even, into the pool at SLOT_MAPPING.

    qkv: float32 [tokens, (H + 2 KV) * D]; rope_table: float32 [max_pos, rotary_dim], a row is cosines, then sines.
    """
    fields = ("qkv", "rope_table", "kv_layer", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size", "num_blocks")
    return kernel(f"rope_kv_write_{kv_dtype}", "interlock.kernels.cpu.elementwise:rope_kv_write", fields, (kv_dtype,))


# Attention


@functools.cache
def attention(kv_dtype: DType, head_dim: int) -> Kernel:
    """Paged attention for decode, prefill and mixed batches, with grouped heads; out: float32 [tokens, H * D].

    Splits of decode rows are left in `partials` for `attention_merge`. partials, and each thread's scratch, begin on a cache line. A
    request's query rows are the last ones of its SEQ_LENS positions.
    """
    fields = ("qkv", "kv_layer", "out", "num_heads", "num_kv_heads", "head_dim", "block_size", "num_blocks", "scale")
    workspaces = ("partials", "max_splits", "scratch", "scratch_stride")
    return kernel(f"attention_{kv_dtype}_{head_dim}", "interlock.kernels.cpu.attention:attention", fields + workspaces, (kv_dtype, head_dim))


@functools.cache
def attention_merge(head_dim: int) -> Kernel:
    """Merge the partials of decode rows, in ascending split order, into out."""
    fields = ("out", "num_heads", "head_dim", "partials", "max_splits")
    return kernel(f"attention_merge_{head_dim}", "interlock.kernels.cpu.attention:attention_merge", fields, (head_dim,))


def attention_scratch_bytes(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """`scratch_stride` of attention."""
    return _aligned(attention_layout.scratch_bytes(num_heads, num_kv_heads, head_dim))


def attention_max_splits(max_model_len: int) -> int:
    """`max_splits` of attention and attention_merge."""
    return attention_layout.num_splits(max_model_len)


def attention_partials_bytes(max_num_seqs: int, num_heads: int, head_dim: int, max_model_len: int) -> int:
    """Bytes of the buffer `partials`, which must begin on a cache line: a state per request, head and split."""
    return max_num_seqs * num_heads * attention_max_splits(max_model_len) * attention_layout.state_bytes(head_dim)


# Sampling


@functools.cache
def sample() -> Kernel:
    """Draw one token per logits row by the slot's sampling arrays; writes SAMPLED, its log-probability and rank, and the top tokens.

    A row's logits change while its masked tokens are kept from being drawn, and are put back.
    """
    return kernel("sample", "interlock.kernels.cpu.sampling:sample", ("logits", "vocab_size", "scratch", "scratch_stride"))


def sample_scratch_bytes(vocab_size: int) -> int:
    """`scratch_stride` of sample: logits of masked tokens, weights, candidates twice, a histogram."""
    return _aligned(4 * MAX_MASKED_TOKENS + 4 * (vocab_size + 16) + 16 * vocab_size + 8 * 256)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
