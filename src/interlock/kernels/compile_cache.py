"""The on-disk cache of compiled functions: checked object files, written atomically, in a private directory named by what they depend on.

Layout: `<cache>/<toolchain>/<function>-<sources>.o`. `toolchain` is a digest of the Numba and llvmlite versions and of the CPU with its
features; `sources` is a digest of the function's factory, its arguments and every kernel module that its module imports, so an entry is
never stale. A file is magic, sha256 of the rest, symbol length, symbol, object; anything that does not check
out is dropped and compiled again, with a warning. Nothing here is ever unpickled.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import platformdirs

from interlock.core.errors import CompileError
from interlock.kernels.native import NativeFunction

logger = logging.getLogger(__name__)

MAGIC = b"ILKOBJ01"
CACHE_DIR_VARIABLE = "INTERLOCK_CACHE_DIR"

Progress = Callable[[str, int, int], None]

_engines: list[Any] = []  # loaded code lives as long as the process


def load(functions: Sequence[NativeFunction], progress: Progress | None = None) -> dict[str, int]:
    """Addresses of `functions` by name; compiles those that the cache does not hold."""
    _initialize_llvm()
    directory = _cache_directory()
    objects = {}
    missing = []
    for function in functions:
        entry = _read_entry(_entry_path(directory, function))
        if entry is None:
            missing.append(function)
        else:
            objects[function.name] = entry
    if missing:
        objects.update(_compile_all(missing, directory, progress))
    return _link(objects)


def compile_object(function: NativeFunction) -> tuple[str, bytes]:
    """Compile one function with Numba: (symbol, object file)."""
    from numba import cfunc, types

    names = {"void": types.void, "i32": types.int32, "i64": types.int64}
    result, *parameters = (names[name] for name in function.signature)
    compiled: Any = cfunc(result(*parameters), error_model="numpy")(function.build())
    return compiled._wrapper_name, compiled._library._get_compiled_object()


def _compile_all(functions: Sequence[NativeFunction], directory: Path, progress: Progress | None) -> dict[str, tuple[str, bytes]]:
    """Compile in as many worker processes as there are CPUs (at most 4); in this process when it is only one function."""
    objects: dict[str, tuple[str, bytes]] = {}
    done = 0

    def finished(function: NativeFunction, entry: tuple[str, bytes]) -> None:
        nonlocal done
        done += 1
        objects[function.name] = entry
        _write_entry(_entry_path(directory, function), *entry)
        if progress is not None:
            progress(function.name, done, len(functions))

    workers = min(4, os.cpu_count() or 1, len(functions))
    if workers == 1:
        for function in functions:
            finished(function, compile_object(function))
        return objects
    queue = list(reversed(functions))

    def drive(_: int) -> None:
        with _Worker() as worker:
            while True:
                try:
                    function = queue.pop()
                except IndexError:
                    return
                finished(function, worker.compile(function))

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(drive, i) for i in range(workers)]:
            future.result()
    return objects


class _Worker:
    """A process that compiles: one JSON line in, one header line and the object out."""

    def __enter__(self) -> "_Worker":
        command = [sys.executable, "-m", "interlock.kernels.compile_worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def compile(self, function: NativeFunction) -> tuple[str, bytes]:
        """The compiled object. Raises CompileError with the worker's message."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [function.name, function.signature, function.source, function.arguments]
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        header = self._process.stdout.readline()
        if not header:
            raise CompileError(f"the compiler process for kernel {function.name} ended with status {self._process.wait()}; see its output above")
        reply = json.loads(header)
        if "error" in reply:
            raise CompileError(f"kernel {function.name} could not be compiled: {reply['error']}")
        return reply["symbol"], self._process.stdout.read(reply["size"])


def _link(objects: dict[str, tuple[str, bytes]]) -> dict[str, int]:
    addresses = {}
    for name, (symbol, code) in objects.items():
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        addresses[name] = engine.get_function_address(symbol)
        if not addresses[name]:
            raise CompileError(f"the object file of kernel {name} has no symbol {symbol}")
        _engines.append(engine)
    return addresses


def _read_entry(path: Path) -> tuple[str, bytes] | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("kernel cache entry %s cannot be read (%s); compiling again", path, error)
        return None
    body = data[len(MAGIC) + 32 :]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != data[len(MAGIC) : len(MAGIC) + 32]:
        logger.warning("kernel cache entry %s is corrupt; compiling again", path)
        return None
    (size,) = struct.unpack_from("<I", body)
    return body[4 : 4 + size].decode(), body[4 + size :]


def _write_entry(path: Path, symbol: str, code: bytes) -> None:
    body = struct.pack("<I", len(symbol)) + symbol.encode() + code
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            file.write(MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("kernel cache entry %s cannot be written (%s); it will be compiled again next time", path, error)


@functools.cache
def _cache_directory() -> Path:
    root = Path(os.environ.get(CACHE_DIR_VARIABLE) or platformdirs.user_cache_path("interlock")) / "kernels"
    directory = root / toolchain_digest()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("kernel cache %s cannot be created (%s); kernels are compiled for this process only", directory, error)
    return directory


def _entry_path(directory: Path, function: NativeFunction) -> Path:
    module, factory = function.source.split(":")
    hasher = hashlib.sha256(repr((factory, function.arguments, function.signature)).encode())
    for path, source in _sources(module).items():
        hasher.update(path.encode() + b"\0" + source + b"\0")
    return directory / f"{function.name}-{hasher.hexdigest()[:24]}.o"


@functools.cache
def _sources(module: str) -> dict[str, bytes]:
    """The sources of `module` and of the modules of its package's top level that it imports, directly or not, by module name."""
    found: dict[str, bytes] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        spec = importlib.util.find_spec(name)
        if name in found or spec is None or spec.origin is None:
            continue
        found[name] = Path(spec.origin).read_bytes()
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".", 1)[0] == module.split(".", 1)[0]:
                pending += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names if _is_module(f"{node.module}.{alias.name}")]
    return dict(sorted(found.items()))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def toolchain_digest() -> str:
    """The compiler and the machine that compiled code depends on, as 32 hex digits."""
    _initialize_llvm()
    versions = [f"{package}={importlib.metadata.version(package)}" for package in ("numba", "llvmlite")]
    machine = [llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    return hashlib.sha256("\n".join([MAGIC.decode(), *versions, *machine]).encode()).hexdigest()[:32]


@functools.cache
def _initialize_llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
