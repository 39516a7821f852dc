"""Helpers for tests of products: random weights in every format, and kernels called as a team of any size would call them."""

import numpy as np
from gguf import GGMLQuantizationType, quants

from interlock.core.buffer import Buffer
from interlock.kernels import catalog, slot
from interlock.kernels.formats import ELEMENT_BYTES

GGUF_TYPES = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0, "q4_1": GGMLQuantizationType.Q4_1}


def random_weight(fmt, n, k, seed=0):
    """Raw rows as a checkpoint holds them, and their values as float32 [n, k]."""
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    if fmt in GGUF_TYPES:
        raw = quants.quantize(w, GGUF_TYPES[fmt])
        return raw, quants.dequantize(raw, GGUF_TYPES[fmt])
    if fmt == "bfloat16":
        raw = (w.view(np.uint32) >> 16).astype(np.uint16)
        return raw, (raw.astype(np.uint32) << 16).view(np.float32)
    raw = w.astype(fmt)
    return raw, raw.astype(np.float32)


def inputs_of(fmt):
    """A number of inputs that ends in the middle of a group where the format allows it."""
    return 70 if fmt in ELEMENT_BYTES else 160


def run_product(packed, x, *, num_threads=1, residual=None, out=None, rows=None, rows_word=slot.NUM_TOKENS, norm=None, eps=1e-5, indices=None):
    """out [len(x), n] (or the given out, whose rows may be longer); every thread of the team runs in turn, which is a legal schedule."""
    kernel = (catalog.matmul_silu if packed.gate_up else catalog.matmul)(packed.fmt)
    if out is None:
        out = np.full((len(x) if indices is None else len(indices), packed.n), np.nan, np.float32)
    header = np.zeros(slot.NUM_WORDS, np.int64)
    if indices is not None:
        header[slot.LOGITS_INDICES] = indices.ctypes.data
    header[rows_word] = len(out) if rows is None else rows
    stride = catalog.matmul_scratch_bytes(packed.k)
    scratch = Buffer.zeros((num_threads * stride,), "uint8")
    scratch.numpy()[:] = 0xFF
    arguments = kernel.pack(
        x=x.ctypes.data,
        x_stride=x.strides[0],
        weight=packed.buffer,
        out=out.ctypes.data,
        out_stride=out.strides[0],
        residual=0 if residual is None else residual.ctypes.data,
        rows=rows_word,
        n=packed.n,
        k=packed.k,
        scratch=scratch,
        scratch_stride=stride,
        norm=0 if norm is None else norm.ctypes.data,
        norm_eps=eps,
        gather=int(indices is not None),
    )
    call = kernel.function.callable()
    for thread_id in range(num_threads):
        call(arguments.address, header.ctypes.data, thread_id, num_threads)
    return out


def bits(array):
    """The bit patterns of a float32 array: equality of floats would hide -0 and fail on NaN."""
    return array.view(np.int32)
