import numpy as np
import pytest
from numba import cfunc, types

from interlock.kernels.cpu.simd import vload, vstore
from interlock.kernels.cpu.vector_math import vexp, vsigmoid, vsilu

SIGNATURE = types.void(types.int64, types.int64, types.int64)


def compiled(function):
    @cfunc(SIGNATURE, error_model="numpy")
    def apply(source, target, count):
        for i in range(0, count, 16):
            vstore(target + 4 * i, function(vload(source + 4 * i)))

    return apply


@pytest.fixture(scope="module")
def apply():
    kernels = {name: compiled(function) for name, function in (("exp", vexp), ("sigmoid", vsigmoid), ("silu", vsilu))}

    def run(name, x):
        padded = np.zeros(-(-x.size // 16) * 16, np.float32)
        padded[: x.size] = x
        out = np.empty_like(padded)
        kernels[name].ctypes(padded.ctypes.data, out.ctypes.data, padded.size)
        return out[: x.size]

    return run


def samples():
    x = np.concatenate([np.linspace(-87.3, 88.7, 2_000_003), np.linspace(-1, 1, 500_009), 2.0 ** -np.arange(1, 40), -(2.0 ** -np.arange(1, 40))])
    return x.astype(np.float32)


def ulps(result, exact):
    return np.max(np.abs(result.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64))


def test_exp_is_within_1_01_units_in_the_last_place(apply):
    x = samples()
    exact = np.exp(x.astype(np.float64))
    result = apply("exp", x)
    assert ulps(result, exact) <= 1.01
    assert np.max(np.abs(result.astype(np.float64) / exact - 1)) < 1.2e-7


def test_sigmoid_and_silu_are_within_four_units_in_the_last_place(apply):
    x = samples()
    x = x[x > -86]
    wide = x.astype(np.float64)
    assert ulps(apply("sigmoid", x), 1 / (1 + np.exp(-wide))) <= 4.0
    nonzero = x != 0
    assert ulps(apply("silu", x[nonzero]), wide[nonzero] / (1 + np.exp(-wide[nonzero]))) <= 4.0


def test_exp_at_the_ends_of_its_range(apply):
    x = np.array([0.0, -0.0, -np.inf, np.inf, np.nan, -1e30, 1e30, 88.72283, 88.73, -87.336, -87.34, 1e-45], np.float32)
    expected = np.array([1, 1, 0, np.inf, np.nan, 0, np.inf, np.exp(np.float64(np.float32(88.72283))), np.inf, np.exp(-87.336), 0, 1], np.float64)
    np.testing.assert_allclose(apply("exp", x), expected.astype(np.float32), rtol=2e-5)


def test_silu_of_large_arguments_is_finite_or_the_argument(apply):
    x = np.array([100.0, -100.0, 3e38, -3e38, np.nan, 0.0], np.float32)
    result = apply("silu", x)
    np.testing.assert_array_equal(result, np.array([100, 0, 3e38, 0, np.nan, 0], np.float32))
