"""Native functions written in Python: declared cheaply, compiled once by Numba, cached on disk as checked object files.

A declaration names the factory that makes the Python function; the factory's module (and Numba with it) is imported only
when the function has to be compiled. What is cached is the object file that LLVM made, so a warm start needs llvmlite alone.
"""

import ctypes
import importlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer

KERNEL_SIGNATURE = ("void", "i64", "i64", "i32", "i32")

_CTYPES: dict[str, Any] = {"void": None, "i32": ctypes.c_int32, "i64": ctypes.c_int64}

_addresses: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class NativeFunction:
    """A native function: result and argument types are `void`, `i32` or `i64`. `source` is 'package.module:factory'; the factory,
    called with `arguments` (strings and integers), returns the Python function to compile. `name` is unique in the program."""

    name: str
    signature: tuple[str, ...]
    source: str
    arguments: tuple[str | int, ...] = ()

    @property
    def address(self) -> int:
        """The entry address; compiled or loaded on first use (`load` does many at once)."""
        if self.name not in _addresses:
            load([self])
        return _addresses[self.name]

    def build(self) -> Callable[..., Any]:
        """The Python function, from its factory. Imports Numba."""
        module, factory = self.source.split(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), factory)(*self.arguments)
        return function

    def callable(self) -> Callable[..., Any]:
        """A Python callable that calls the function without the GIL."""
        result, *parameters = (_CTYPES[name] for name in self.signature)
        return ctypes.CFUNCTYPE(result, *parameters)(self.address)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A packed argument block: one 64-bit word per field, the first at `address`. Keeps alive all that its addresses point into."""

    words: npt.NDArray[np.int64]
    owners: tuple[object, ...]
    address: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel `void(args, slot, thread_id, num_threads)`: every thread of the team calls it and does its share.

    `fields` names the 64-bit words of the argument block in order.
    """

    function: NativeFunction
    fields: tuple[str, ...]
    index: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {name: i for i, name in enumerate(self.fields)})

    @property
    def name(self) -> str:
        """The kernel's unique name."""
        return self.function.name

    @property
    def address(self) -> int:
        """The entry address."""
        return self.function.address

    def pack(self, **values: int | float | Buffer) -> Arguments:
        """An argument block with each field set exactly once: a Buffer gives its address, a float its 64-bit pattern, an int itself."""
        if values.keys() != self.index.keys():
            raise TypeError(f"kernel {self.name} takes the fields {self.fields}, got {tuple(values)}")
        words = np.empty(len(self.fields), np.int64)
        owners = []
        for name, value in values.items():
            if isinstance(value, Buffer):
                words[self.index[name]] = value.address
                owners.append(value.owner)
            elif isinstance(value, float):
                words[self.index[name]] = struct.unpack("<q", struct.pack("<d", value))[0]
            else:
                words[self.index[name]] = value
        address = ctypes.addressof(ctypes.c_char.from_buffer(cast("Any", words))) if self.fields else 0  # faster than `words.ctypes.data`
        return Arguments(words, tuple(owners), address)


def kernel(name: str, source: str, fields: Sequence[str], arguments: Sequence[str | int] = ()) -> Kernel:
    """Declare a kernel."""
    return Kernel(NativeFunction(name, KERNEL_SIGNATURE, source, tuple(arguments)), tuple(fields))


def function_name(address: int) -> str | None:
    """The name of the loaded function at this entry address."""
    return next((name for name, entry in _addresses.items() if entry == address), None)


def load(functions: Iterable[NativeFunction], progress: Callable[[str, int, int], None] | None = None) -> None:
    """Make sure that all `functions` have an address: from the disk cache, or compiled now.

    `progress(name, done, total)` is called as functions are compiled. Raises CompileError.
    """
    from interlock.kernels import compile_cache

    missing = {f.name: f for f in functions if f.name not in _addresses}
    if missing:
        _addresses.update(compile_cache.load(list(missing.values()), progress))
