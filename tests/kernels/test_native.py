import subprocess
import sys
from pathlib import Path

import compiled_functions
import numpy as np
import pytest

from interlock.core.buffer import Buffer
from interlock.core.errors import CompileError
from interlock.graphs import NATIVE_FUNCTIONS
from interlock.kernels import native
from interlock.kernels.compiler import compile_object
from interlock.kernels.native import kernel


def test_a_function_is_compiled_and_called():
    f = compiled_functions.function("test_native_add", "add_scaled", 3).callable()
    assert f(4, 5) == 19
    assert f(2**40, -1) == 2**40 - 3


def test_the_name_of_a_loaded_function_is_found_by_its_address():
    f = compiled_functions.function("test_native_named", "add_scaled", 4)
    assert native.function_name(f.address) == "test_native_named"
    assert native.function_name(1) is None


def test_arguments_are_words_in_the_order_of_the_fields():
    k = kernel("test_pack", "nowhere:nothing", ("x", "n", "scale"))
    x = Buffer.zeros((4,), "float32")
    args = k.pack(scale=0.5, x=x, n=7)
    assert args.words.tolist() == [x.address, 7, int(np.float64(0.5).view(np.int64))]
    assert args.address == args.words.ctypes.data
    assert any(owner is x.owner for owner in args.owners)


def test_a_field_that_is_missing_or_unknown_is_an_error():
    k = kernel("test_pack", "nowhere:nothing", ("x", "n"))
    for values in ({"x": 1}, {"x": 1, "n": 2, "m": 3}):
        with pytest.raises(TypeError, match="takes the fields"):
            k.pack(**values)


@pytest.mark.parametrize("factory", ["raises", "allocates"])
def test_code_that_may_raise_or_that_needs_python_is_refused(factory):
    with pytest.raises(CompileError, match=rf"kernel test_native_{factory} .* refers to .*"):
        compile_object(compiled_functions.function(f"test_native_{factory}", factory))


def test_code_that_does_not_compile_is_an_error_with_the_name_of_the_kernel():
    with pytest.raises(CompileError, match=r"kernel test_native_not_code .* could not be compiled"):
        compile_object(compiled_functions.function("test_native_not_code", "not_code"))


def test_a_function_with_helpers_refers_to_nothing_of_python():
    """Numba's own object would name the GIL and the error state, for a branch that is never taken."""
    from numba import cfunc, types

    f = compiled_functions.function("test_native_helper", "sum_with_helper")
    plain = cfunc(types.int64(types.int64, types.int64), error_model="numpy")(f.build())
    assert b"numba_gil_ensure" in plain._library._get_compiled_object()
    assert b"numba_gil_ensure" not in compile_object(f)[1]
    assert f.callable()(4, 7) == plain.ctypes(4, 7)


def test_a_warm_start_does_not_import_numba():
    native.load(NATIVE_FUNCTIONS)
    script = "from interlock.graphs import *; import sys; team = ThreadTeam(2); Timelines(1).advance(0, 1); print('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, cwd=Path(__file__).parent)
    assert result.stdout == "False\n"
