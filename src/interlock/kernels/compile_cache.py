"""The on-disk cache of compiled functions: checked object files, written atomically, in a private directory named by what they depend on.

Layout: `<cache>/kernels/<toolchain>/<function>-<sources>.o`. `toolchain` is a digest of the Numba and llvmlite versions, of the CPU with
its features, and of the environment's `NUMBA_*` variables, which may ask for code for another CPU; `sources` is a digest of the
function's factory, its arguments and every module of ours that its module imports, so an entry is never stale. A file is magic, sha256 of
the rest, key length, key, symbol length, symbol, object. The key says in full what the file's place says in short (function, sources,
toolchain), so that a file which came to lie in another's place is not run as it. Anything that does not check out is dropped and compiled
again, with a warning. Nothing here is ever unpickled. Since loading an entry is running it, a directory that somebody else owns or may
write to is not used. Whatever is wrong with the cache costs a recompile and a warning, never a failure.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm
import platformdirs

from interlock.core.errors import CompileError
from interlock.kernels.compile_pool import MAX_WORKERS, compile_in_workers
from interlock.kernels.compiler import compile_object
from interlock.kernels.native import NativeFunction
from interlock.kernels.sources import read_sources

logger = logging.getLogger(__name__)

MAGIC: Final = b"ILKOBJ03"
CACHE_DIR_VARIABLE: Final = "INTERLOCK_CACHE_DIR"

_DAY: Final = 86_400.0  # seconds
_UNUSED_SECONDS: Final = 30 * _DAY
_LOCK_SECONDS: Final = 300.0  # how long to wait for another process that compiles; afterwards this one compiles too
_LOCK_POLL_SECONDS: Final = 0.05

Progress = Callable[[str, int, int], None]
_Entry = tuple[str, bytes]

_engines: list[Any] = []  # loaded code lives as long as the process


def load(functions: Sequence[NativeFunction], progress: Progress | None = None) -> dict[str, int]:
    """Addresses of `functions` by name; compiles those that the cache does not hold. Raises CompileError."""
    _initialize_llvm()
    directory = cache_directory()
    objects = _read_all(functions, directory, logging.WARNING)
    if len(objects) < len(functions):
        with _compile_lock(directory):
            # Another process may have compiled them while this one waited. What is damaged has been reported above.
            objects |= _read_all([f for f in functions if f.name not in objects], directory, logging.DEBUG)
            objects |= _compile_all([f for f in functions if f.name not in objects], directory, progress)
    return _link(objects)


def cache_directory() -> Path | None:
    """The directory of entries; a temporary one that is removed at exit if the right one is not private to this user; None if there is none."""
    base = Path(os.environ.get(CACHE_DIR_VARIABLE) or platformdirs.user_cache_path("interlock"))
    return _usable_directory(base / "kernels")


def entry_path(directory: Path, function: NativeFunction) -> Path:
    """Where the entry of `function` lies."""
    return directory / f"{function.name}-{source_digest(function)[:24]}.o"


def source_digest(function: NativeFunction) -> str:
    """What the code of `function` is made from, as 64 hex digits."""
    module, factory = function.source.split(":")
    hasher = hashlib.sha256(repr((factory, function.arguments, function.signature)).encode())
    for path, source in read_sources(module).items():
        hasher.update(path.encode() + b"\0" + source + b"\0")
    return hasher.hexdigest()


@functools.cache
def toolchain_digest() -> str:
    """The compiler, its settings, and the machine that compiled code depends on, as 64 hex digits."""
    _initialize_llvm()
    versions = [f"{package}={importlib.metadata.version(package)}" for package in ("numba", "llvmlite")]
    machine = [llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("NUMBA_"))
    return hashlib.sha256("\n".join([MAGIC.decode(), *versions, *machine, *settings]).encode()).hexdigest()


def _entry_key(function: NativeFunction) -> bytes:
    return f"{function.name} {source_digest(function)} {toolchain_digest()}".encode()


def _compile_all(functions: Sequence[NativeFunction], directory: Path | None, progress: Progress | None) -> dict[str, _Entry]:
    """Compile in as many worker processes as there are CPUs; in this process when it is only one function."""
    objects: dict[str, _Entry] = {}

    def finished(function: NativeFunction, symbol: str, code: bytes) -> None:
        objects[function.name] = symbol, code
        if directory is not None:
            _write_entry(directory, function, symbol, code)
            _prune(directory, function)
        if progress is not None:
            progress(function.name, len(objects), len(functions))

    num_workers = min(MAX_WORKERS, os.cpu_count() or 1, len(functions))
    if num_workers > 1:
        compile_in_workers(functions, num_workers, finished)
    else:
        for function in functions:
            finished(function, *compile_object(function))
    return objects


def _link(objects: dict[str, _Entry]) -> dict[str, int]:
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


def _read_all(functions: Sequence[NativeFunction], directory: Path | None, level: int) -> dict[str, _Entry]:
    """The entries that there are; what cannot be used is logged at `level`."""
    entries = {}
    if directory is not None:
        for function in functions:
            if (entry := _read_entry(directory, function, level)) is not None:
                entries[function.name] = entry
    return entries


def _read_entry(directory: Path, function: NativeFunction, level: int) -> _Entry | None:
    path = entry_path(directory, function)
    try:
        data = path.read_bytes()
        if time.time() - path.stat().st_mtime > _DAY:
            with contextlib.suppress(OSError):  # a read-only cache is as good
                os.utime(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.log(level, "kernel cache entry %s cannot be read (%s); compiling again", path, error)
        return None
    body = data[len(MAGIC) + 32 :]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != data[len(MAGIC) : len(MAGIC) + 32]:
        logger.log(level, "kernel cache entry %s is corrupt; compiling again", path)
        return None
    key, rest = _split(body)
    if key != _entry_key(function):
        logger.log(
            level,
            "kernel cache entry %s does not belong there (it holds %s, of these or other sources); compiling %s again",
            path,
            key.partition(b" ")[0].decode(errors="replace"),
            function.name,
        )
        return None
    symbol, code = _split(rest)
    return symbol.decode(), code


def _split(data: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack_from("<I", data)
    return data[4 : 4 + size], data[4 + size :]


def _write_entry(directory: Path, function: NativeFunction, symbol: str, code: bytes) -> None:
    path = entry_path(directory, function)
    body = b"".join(struct.pack("<I", len(part)) + part for part in (_entry_key(function), symbol.encode())) + code
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("kernel cache entry %s cannot be written (%s); it will be compiled again next time", path, error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _prune(directory: Path, function: NativeFunction) -> None:
    """Remove entries of `function` that nobody has used for a month, of whatever toolchain, and what a killed process left half written."""
    limits = {f"*/{function.name}-*.o": _UNUSED_SECONDS, "*/*.tmp": _DAY}
    for pattern, limit in limits.items():
        for path in directory.parent.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > limit:
                    path.unlink()


@functools.cache
def _usable_directory(root: Path) -> Path | None:
    directory = root / toolchain_digest()[:32]
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for path in (root, directory):
            path.mkdir(mode=0o700, exist_ok=True)
            _check_private(path)
        return directory
    except OSError as error:
        logger.warning("kernel cache %s cannot be used (%s); kernels are compiled for this process only", directory, error)
    try:
        temporary = Path(tempfile.mkdtemp(prefix="interlock-kernels-"))
        private = temporary / "kernels"
        private.mkdir(mode=0o700)
    except OSError:
        return None
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return private


def _check_private(path: Path) -> None:
    """Raise PermissionError unless only this user, or root, may put files into `path`."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):o}: others may write to it; chmod 700 it or choose {CACHE_DIR_VARIABLE}"
        )


@contextlib.contextmanager
def _compile_lock(directory: Path | None) -> Iterator[None]:
    """Hold the cache's lock, so that processes that start together compile each function once. Goes on without it if it cannot be had."""
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            if directory is not None:
                file = stack.enter_context(open(directory / "lock", "wb"))
                give_up = time.monotonic() + _LOCK_SECONDS
                while time.monotonic() < give_up:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(_LOCK_POLL_SECONDS)
        except (ImportError, OSError):
            pass  # no locks here, or a read-only cache: writing an entry is atomic all the same
        yield


@functools.cache
def _initialize_llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
