"""The scale of RMSNorm, for the kernels that normalise (B. Zhang, R. Sennrich, 2019)."""

import math

import numpy as np
from numba import njit

from interlock.kernels.cpu.simd import fma, load_f32, reduce_add, splat, vadd, vfma, vload

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


@njit(error_model="numpy")
def rms_scale(source, n, eps):
    """1 / sqrt(mean square of the n elements at `source` + eps). The mean square is four 16-lane FMA chains over the whole vectors,
    added pairwise, then the fixed tree, then one FMA per element of the tail."""
    return _ONE / math.sqrt(_sum_of_squares(source, n) / np.float32(n) + eps)


@njit(error_model="numpy")
def _sum_of_squares(source, n):
    a = b = c = d = splat(_ZERO)
    i = 0
    while i + 64 <= n:
        p, q, r, s = vload(source + 4 * i), vload(source + 4 * i + 64), vload(source + 4 * i + 128), vload(source + 4 * i + 192)
        a, b, c, d = vfma(p, p, a), vfma(q, q, b), vfma(r, r, c), vfma(s, s, d)
        i += 64
    while i + 16 <= n:
        p = vload(source + 4 * i)
        a = vfma(p, p, a)
        i += 16
    total = reduce_add(vadd(vadd(a, b), vadd(c, d)))
    while i < n:
        total = fma(load_f32(source + 4 * i), load_f32(source + 4 * i), total)
        i += 1
    return total
