"""Compiling one native function with Numba into an object file that needs nothing of Python."""

import ctypes
from typing import Any

import llvmlite.binding as llvm

from interlock.core.errors import CompileError
from interlock.kernels.native import NativeFunction

_PYTHON_PREFIXES = ("Py", "_Py", "numba_", "NRT_")


def compile_object(function: NativeFunction) -> tuple[str, bytes]:
    """Compile one function with Numba: (symbol, object file).

    Raises CompileError if it cannot be compiled, or if the code may raise an exception or calls into Python: nothing could catch the
    exception, and an object file that refers to Python cannot be linked in a process that has not loaded Numba.
    """
    from numba import cfunc, types

    names = {"void": types.void, "i32": types.int32, "i64": types.int64}
    result, *parameters = (names[name] for name in function.signature)
    try:
        compiled: Any = cfunc(result(*parameters), error_model="numpy")(function.build())
    except Exception as error:
        raise CompileError(f"kernel {function.name} ({function.source}) could not be compiled: {type(error).__name__}: {error}") from error
    symbol: str = compiled._wrapper_name
    machine = compiled._library.codegen._tm
    module = llvm.parse_bitcode(compiled._library._final_module.as_bitcode())
    _drop_unreachable(module, symbol, machine)
    _check_externals(function, module)
    return symbol, machine.emit_object(module)


def _drop_unreachable(module: Any, symbol: str, machine: Any) -> None:
    """Remove the branches in which the Python function has failed, once it is known within the module that it cannot."""
    for definition in module.functions:
        if not definition.is_declaration and definition.name != symbol:
            definition.linkage = llvm.Linkage.internal
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3)))


def _check_externals(function: NativeFunction, module: Any) -> None:
    externals = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    externals += [g.name for g in module.global_variables if g.is_declaration]
    process = ctypes.CDLL(None)
    refused = sorted(name for name in externals if name.startswith(_PYTHON_PREFIXES) or not hasattr(process, name))
    if refused:
        raise CompileError(
            f"kernel {function.name} ({function.source}) refers to {', '.join(refused)}: it may raise an exception, or it needs Python or a library "
            "at run time; use integer and float operations on addresses only, and intrinsics of kernels.cpu"
        )
