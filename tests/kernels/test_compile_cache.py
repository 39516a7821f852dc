import ctypes
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import compiled_functions
import pytest

from children import as_a_child
from interlock.core.errors import CompileError
from interlock.kernels import compile_cache, compile_pool
from interlock.kernels.compile_cache import CACHE_DIR_VARIABLE

HERE = Path(__file__).parent
LOAD = f"""
import json, logging, sys
logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
sys.path.insert(0, {str(HERE)!r})
import compiled_functions
from interlock.kernels import native
names = json.loads(sys.argv[1])
functions = [compiled_functions.function(name, "add_scaled", 2) for name in names]
native.load(functions, lambda name, done, total: print("compiled", name, flush=True))
print([f.callable()(1, 2) for f in functions])
"""

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def some():
    return compiled_functions.function("test_cache_some", "add_scaled", 2)


@pytest.fixture
def compiled(monkeypatch):
    """The names of the functions that were compiled in this process, in order."""
    names = []
    original = compile_cache.compile_object

    def compile_object(function):
        names.append(function.name)
        return original(function)

    monkeypatch.setattr(compile_cache, "compile_object", compile_object)
    return names


def only_entry(cache):
    (entry,) = cache.glob("kernels/*/*.o")
    return entry


def start(script, *arguments, **options):
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(as_a_child(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_entry_is_written_once_and_read_afterwards(cache, some, compiled, caplog):
    for _ in range(2):
        assert compile_cache.load([some])[some.name] > 0
    assert compiled == [some.name]
    assert stat.S_IMODE(only_entry(cache).parent.stat().st_mode) == 0o700
    assert warnings_of(caplog) == []


def test_an_entry_depends_on_arguments_and_on_the_sources_that_its_module_imports(cache, tmp_path, monkeypatch):
    package = tmp_path / "some_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a module that is looked at is not run')")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    paths = []
    for constant in (1, 2):
        (package / "constants.py").write_text(f"VALUE = {constant}\n")
        (package / "main.py").write_text("from some_kernels import constants\nfrom interlock.kernels.slot import STEP\nraise RuntimeError\n")
        for cached in (
            compile_cache.read_sources,
            *(getattr(sys.modules["interlock.kernels.sources"], n) for n in ("_source_path", "_imported_names")),
        ):
            cached.cache_clear()
        for argument in (1, 2):
            function = compile_cache.NativeFunction("f", ("i64",), "some_kernels.main:f", (argument,))
            paths.append(compile_cache.entry_path(tmp_path, function))
    assert len(set(paths)) == 4
    assert {"some_kernels.constants", "interlock.kernels.slot"} <= set(compile_cache.read_sources("some_kernels.main"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "longer"])
def test_a_damaged_entry_costs_a_warning_and_a_recompile(cache, some, compiled, caplog, damage):
    compile_cache.load([some])
    entry = only_entry(cache)
    good = entry.read_bytes()
    flipped = bytearray(good)
    flipped[-7] ^= 1
    entry.write_bytes({"truncated": good[: len(good) // 2], "flipped": bytes(flipped), "empty": b"", "longer": good + b"x"}[damage])
    compile_cache.load([some])
    assert compiled == [some.name] * 2
    assert len(warnings_of(caplog)) == 1
    assert "corrupt" in warnings_of(caplog)[0]
    compile_cache.load([some])
    assert compiled == [some.name] * 2


MOVES = {
    "swapped": lambda one, other: other.rename(one.with_suffix(".kept")) and one.rename(other) and one.with_suffix(".kept").rename(one),
    "renamed": lambda one, other: one.replace(other),
    "copied": lambda one, other: other.write_bytes(one.read_bytes()),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("names", [("test_one", "test_other"), ("test_one", "test_one")], ids=["other function", "other arguments"])
def test_a_whole_entry_in_the_place_of_another_is_compiled_again_and_replaced(cache, compiled, caplog, names, move):
    one, other = (compiled_functions.function(name, "add_scaled", factor) for name, factor in zip(names, (2, 3), strict=True))
    for function in (one, other):
        compile_cache.load([function])
    directory = next(cache.glob("kernels/*/*.o")).parent
    move(compile_cache.entry_path(directory, one), compile_cache.entry_path(directory, other))
    compiled.clear()
    for _ in range(2):
        address = compile_cache.load([other])[other.name]
        assert ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 2)(address)(1, 2) == 7
    assert compiled == [other.name]
    assert len(warnings_of(caplog)) == 1
    assert "does not belong there" in warnings_of(caplog)[0]


def test_an_entry_of_another_toolchain_under_the_same_directory_name_is_compiled_again(cache, some, compiled, caplog, monkeypatch):
    digest = compile_cache.toolchain_digest()
    compile_cache.load([some])
    monkeypatch.setattr(compile_cache, "toolchain_digest", lambda: digest[:32] + digest[:32])
    compile_cache.load([some])
    assert compiled == [some.name] * 2
    assert "does not belong there" in warnings_of(caplog)[0]


def test_an_entry_that_was_compiled_under_other_settings_of_numba_is_left_alone(cache):
    names = ["test_cache_some"]
    others = [{}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, {"NUMBA_LOOP_VECTORIZE": "0"}]
    for settings in others:
        assert outputs_of(names, settings) == "compiled test_cache_some\n[5]\n"
    for settings in others:
        assert outputs_of(names, settings) == "[5]\n"
    assert len(list(cache.glob("kernels/*/*.o"))) == len(others)


def outputs_of(names, settings):
    """What a process prints that loads these functions in an environment with `settings`."""
    process = start(LOAD, json.dumps(names), env=os.environ | settings)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    return out


def test_an_entry_that_cannot_be_read_or_replaced_costs_warnings(cache, some, compiled, caplog):
    compile_cache.load([some])
    entry = only_entry(cache)
    entry.unlink()
    entry.mkdir()
    assert compile_cache.load([some])[some.name] > 0
    assert compiled == [some.name] * 2
    assert ["cannot be read" in warnings_of(caplog)[0], "cannot be written" in warnings_of(caplog)[1]] == [True, True]
    assert list(entry.parent.glob("*.tmp")) == []


def test_a_cache_that_cannot_be_created_costs_a_warning(cache, some, compiled, caplog):
    cache.write_text("a file where the cache should be")
    assert compile_cache.load([some])[some.name] > 0
    assert compiled == [some.name]
    assert len(warnings_of(caplog)) == 1
    assert "for this process only" in warnings_of(caplog)[0]


@pytest.mark.parametrize("which", ["kernels", "toolchain"])
def test_a_directory_that_others_may_write_to_is_not_used(cache, some, compiled, caplog, which):
    compile_cache.load([some])
    directory = only_entry(cache).parent
    (directory if which == "toolchain" else directory.parent).chmod(0o777)
    compile_cache._usable_directory.cache_clear()
    compile_cache.load([some])
    assert compiled == [some.name] * 2
    assert "others may write to it" in warnings_of(caplog)[0]


def test_a_directory_of_another_user_is_not_used(cache, some, compiled, caplog, monkeypatch):
    compile_cache.load([some])
    compile_cache._usable_directory.cache_clear()
    owner = only_entry(cache).parent.stat().st_uid
    if owner == 0:
        os.chown(only_entry(cache).parent, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    compile_cache.load([some])
    assert compiled == [some.name] * 2
    assert "belongs to user" in warnings_of(caplog)[0]


def test_the_temporary_directory_in_place_of_an_unusable_one_is_removed_at_exit(cache, tmp_path):
    cache.write_text("a file where the cache should be")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start(LOAD, json.dumps(["test_cache_a"]), env={**os.environ, "TMPDIR": str(temporary)})
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.endswith("[5]\n")
    assert "for this process only" in err
    assert list(temporary.iterdir()) == []


def test_unused_entries_and_leftovers_are_removed_and_used_ones_are_touched(cache, some):
    compile_cache.load([some])
    entry = only_entry(cache)
    long_ago = time.time() - 40 * 86_400
    same_function = entry.with_name(f"{some.name}-0123.o")
    other_toolchain = entry.parent.with_name("0" * 32) / same_function.name
    other_toolchain.parent.mkdir()
    other_function = entry.with_name("test_other-0123.o")
    leftover, fresh_leftover = entry.with_name("x.tmp"), entry.with_name("y.tmp")
    for path in (same_function, other_toolchain, other_function, leftover, fresh_leftover):
        path.write_bytes(b"")
    for path in (entry, same_function, other_toolchain, other_function, leftover):
        os.utime(path, (long_ago, long_ago))
    compile_cache.load([some])
    assert entry.stat().st_mtime > long_ago + 86_400
    compile_cache.load([compiled_functions.function(some.name, "add_scaled", 9)])
    kept = {path.name for path in entry.parent.iterdir()} - {"lock"}
    assert {entry.name, other_function.name, fresh_leftover.name} < kept
    assert len(kept) == 4
    assert not other_toolchain.exists()


def test_two_processes_at_once_compile_each_function_once(cache):
    names = json.dumps(["test_cache_a", "test_cache_b", "test_cache_c"])
    processes = [start(LOAD, names) for _ in range(2)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [line for out, _ in outputs for line in out.splitlines()]
    assert sorted(line for line in lines if line.startswith("compiled")) == [f"compiled test_cache_{c}" for c in "abc"]
    assert lines.count("[5, 5, 5]") == 2
    assert all(err == "" for _, err in outputs)
    assert len(list(cache.glob("kernels/*/*.o"))) == 3
    assert list(cache.glob("kernels/*/*.tmp")) == []


def test_workers_compile_what_prints_and_report_each_function(cache, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    functions = [compiled_functions.function(f"test_pool_{i}", "prints", i) for i in range(3)]
    progress = []
    addresses = compile_cache.load(functions, lambda *call: progress.append(call))
    assert sorted(addresses) == [f.name for f in functions]
    assert [call[1:] for call in progress] == [(1, 3), (2, 3), (3, 3)]
    assert sorted(call[0] for call in progress) == [f.name for f in functions]


def test_a_failure_in_one_worker_names_its_kernel_and_the_others_end_cleanly(cache):
    functions = [compiled_functions.function("test_pool_bad", "not_code"), compiled_functions.function("test_pool_good", "add_scaled", 1)]
    finished = []
    with pytest.raises(CompileError, match="test_pool_bad"):
        compile_pool.compile_in_workers(functions, 2, lambda function, symbol, code: finished.append(function.name))
    assert finished == ["test_pool_good"]


def test_a_worker_that_dies_is_an_error_that_names_its_kernel(cache):
    functions = [compiled_functions.function("test_pool_dies", "kills_its_process"), compiled_functions.function("test_pool_good", "add_scaled", 1)]
    with pytest.raises(CompileError, match="compiler process for kernel test_pool_dies ended with status 3"):
        compile_pool.compile_in_workers(functions, 2, lambda *_: None)


def test_workers_run_no_module_that_lies_in_the_working_directory(cache, tmp_path, monkeypatch):
    for name in ("json", "numba"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the {name}.py of the working directory was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    functions = [compiled_functions.function(f"test_pool_{i}", "add_scaled", i) for i in range(2)]
    finished = []
    compile_pool.compile_in_workers(functions, 2, lambda function, symbol, code: finished.append(function.name))
    assert sorted(finished) == ["test_pool_0", "test_pool_1"]


FOREVER = f"""
import os, subprocess, sys
sys.path.insert(0, {str(HERE)!r})
import compiled_functions
from interlock.kernels import compile_pool
started = []
original = subprocess.Popen
class Popen(original):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        started.append(self.pid)
compile_pool.subprocess.Popen = Popen
class Worker(compile_pool._Worker):
    def send(self, function):
        super().send(function)
        print(self._process.pid, flush=True)
compile_pool._Worker = Worker
functions = [compiled_functions.function(f"test_pool_{{i}}", "add_scaled", i) for i in range(100_000)]
try:
    compile_pool.compile_in_workers(functions, 2, lambda *_: None)
except KeyboardInterrupt:
    print("interrupted", started, flush=True)
"""


def is_running(pid):
    """Whether the process exists and is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_is_left_behind_by_ctrl_c_or_by_the_death_of_its_parent(cache, end):
    process = start(FOREVER, start_new_session=True)
    workers = {int(process.stdout.readline()) for _ in range(2)}
    assert all(is_running(worker) for worker in workers)
    os.killpg(process.pid, end)
    out, err = process.communicate(timeout=60)
    if end is signal.SIGINT:
        assert "interrupted" in out
        assert err == ""
    deadline = time.monotonic() + 60
    while any(is_running(worker) for worker in workers) and time.monotonic() < deadline:
        os.sched_yield()
    assert not any(is_running(worker) for worker in workers)
