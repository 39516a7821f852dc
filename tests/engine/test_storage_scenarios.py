"""What goes wrong with files in the field, seen from the engine: a doubt is a miss, a miss is recomputed, and nobody else notices."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tier_engine import BLOCK_BYTES, GREEDY, MODES, bits, drain, forget_local, open_engine, run_alone, step_until
from tier_puppets import Faults, FaultyStorage

from checkpoints import make_tiny_llama

BLOCK = 8
A = [(7 * position) % 240 + 3 for position in range(4 * BLOCK + 3)]
B = [(11 * position) % 240 + 5 for position in range(2 * BLOCK + 2)]
NUM_COMPUTED = len(A) + GREEDY.max_tokens - 1


@pytest.fixture(scope="module")
def alone(model):
    return run_alone(model, [A, B], [GREEDY, GREEDY])


@pytest.fixture(autouse=True)
def no_faults():
    Faults.reset()


def open_files(model, path, connector="FaultyStorage", async_load_bytes=0, **options):
    return open_engine(model, f"tier_puppets:{connector}", {"path": str(path), "async_load_bytes": async_load_bytes}, **options)


def files_of(llm):
    return llm.core.runner._kv.connector.worker_half._files


def fill(llm):
    """Store A; returns the path of its second block's file."""
    request = start(llm, A)
    step_until(llm, lambda: request.finished)
    flush(llm, request.block_hashes[:4])
    return str(files_of(llm).path(request.block_hashes[1]))


def flush(llm, keys):
    """Wait until these are files, and the engine knows of nothing else."""
    forget_local(llm)
    files = files_of(llm)
    step_until(llm, lambda: all(files.contains(key) for key in keys))


def start(llm, prompt):
    request = llm.core.make_request(f"r{len(llm.core.scheduler.requests)}", {"prompt_token_ids": prompt}, GREEDY)
    llm.core.add_request(request)
    return request


def run(llm, prompt):
    (output,) = llm.generate([prompt], GREEDY)
    return bits(output)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize(
    ("async_load_bytes", "layer"), [(0, None), (1 << 30, None), (1 << 30, 1)], ids=["asynchronous", "synchronous", "synchronous, second layer"]
)
@pytest.mark.parametrize("kind", ["deleted", "truncated", "flipped", "EIO"])
def test_a_read_that_fails_costs_one_recompute_and_makes_its_key_a_miss(model, alone, tmp_path, kind, async_load_bytes, layer, cudagraph_mode):
    with open_files(model, tmp_path, async_load_bytes=async_load_bytes, cudagraph_mode=cudagraph_mode) as llm:
        Faults.path, Faults.kind = fill(llm), kind
        if layer is not None:
            files = files_of(llm)
            Faults.start = files.header_bytes + layer * files.layer_bytes
        computed = llm.metrics()["num_computed_tokens"]
        request = start(llm, A)
        step_until(llm, lambda: request.finished)
        assert request.output_token_ids == alone[0][0][0]
        assert Faults.path is None
        assert llm.metrics()["num_failed_loads"] == 1
        thrown_away = len(A) - 4 * BLOCK if async_load_bytes else 0
        assert llm.metrics()["num_computed_tokens"] - computed == NUM_COMPUTED - BLOCK + thrown_away, "the first block stays used"
        flush(llm, request.block_hashes[:4])
        step_until(llm, lambda: not llm.core._connector.scheduler_half.index._distrusted)
        computed = llm.metrics()["num_computed_tokens"]
        assert run(llm, A) == alone[0]
        assert llm.metrics()["num_computed_tokens"] - computed == NUM_COMPUTED - 4 * BLOCK, "what was recomputed has been saved anew"
        assert llm.metrics()["num_failed_loads"] == 1
        drain(llm)


def test_without_the_digest_a_flipped_bit_reaches_the_answer(model, alone, tmp_path):
    with open_files(model, tmp_path, connector="TrustingStorage") as llm:
        Faults.path, Faults.kind = fill(llm), "flipped"
        assert run(llm, A) != alone[0]
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
def test_a_read_that_hangs_ends_at_its_deadline_and_stalls_nobody_else(model, alone, tmp_path, cudagraph_mode):
    with open_files(model, tmp_path, cudagraph_mode=cudagraph_mode) as llm:
        Faults.path, Faults.kind = fill(llm), "hangs"
        hung = start(llm, A)
        step_until(llm, Faults.hanging.is_set)
        other = start(llm, B)
        step_until(llm, lambda: other.finished)
        assert other.output_token_ids == alone[1][0][0]
        assert not hung.finished
        computed = llm.metrics()["num_computed_tokens"]
        FaultyStorage.clock.advance(6)
        step_until(llm, lambda: hung.finished)
        assert hung.output_token_ids == alone[0][0][0]
        assert llm.metrics()["num_failed_loads"] == 1
        assert llm.metrics()["num_computed_tokens"] - computed == NUM_COMPUTED - BLOCK
        drain(llm)
        Faults.go_on.set()
        flush(llm, hung.block_hashes[:4])
        assert run(llm, A) == alone[0]
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
def test_a_synchronous_read_that_hangs_ends_with_the_deadline_of_the_step(model, alone, tmp_path, cudagraph_mode):
    with open_files(model, tmp_path, async_load_bytes=1 << 30, cudagraph_mode=cudagraph_mode, kv_load_timeout=0.5) as llm:
        Faults.path, Faults.kind = fill(llm), "hangs"
        assert run(llm, A) == alone[0]
        assert Faults.hanging.is_set()
        assert llm.metrics()["num_failed_loads"] == 1
        drain(llm)
        Faults.go_on.set()
        assert run(llm, B) == alone[1]
        drain(llm)


def test_a_lookup_that_hangs_is_a_miss_at_its_deadline_for_everybody(model, alone, tmp_path, monkeypatch):
    with open_files(model, tmp_path) as llm:
        fill(llm)
        index = llm.core._connector.scheduler_half.index
        contains, asked = index._files.contains, []

        def hang(key):
            asked.append(key)
            Faults.hanging.set()
            Faults.go_on.wait(60)
            return contains(key)

        monkeypatch.setattr(index._files, "contains", hang)
        first = start(llm, A)
        step_until(llm, Faults.hanging.is_set)
        for _ in range(5):
            llm.core.step()
        assert not first.finished
        FaultyStorage.clock.advance(6)
        second = start(llm, B)
        step_until(llm, lambda: first.finished and second.finished)
        assert [first.output_token_ids, second.output_token_ids] == [alone[0][0][0], alone[1][0][0]]
        assert len(asked) == 1, "while one lookup hangs, no other is begun"
        Faults.go_on.set()
        drain(llm)


@pytest.mark.parametrize("async_load_bytes", [0, 1 << 30], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("kind", ["swapped", "a pipe", "a directory", "a link", "gone with its directory"])
def test_what_somebody_puts_in_the_place_of_a_file_is_a_miss(model, alone, tmp_path, kind, async_load_bytes):
    with open_files(model, tmp_path, async_load_bytes=async_load_bytes) as llm:
        Faults.path, Faults.kind = fill(llm), kind
        assert run(llm, A) == alone[0]
        assert Faults.path is None
        assert llm.metrics()["num_failed_loads"] == 1
        forget_local(llm)
        assert run(llm, A) == alone[0]
        assert run(llm, B) == alone[1]
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("in_its_place", [None, Path.mkdir, Path.touch], ids=["nothing", "an empty one", "a file"])
def test_a_directory_that_is_removed_while_it_is_used_is_a_miss_and_is_made_again_where_that_is_possible(
    model, alone, tmp_path, in_its_place, cudagraph_mode
):
    directory = tmp_path / "tier"
    with open_files(model, directory, cudagraph_mode=cudagraph_mode) as llm:
        fill(llm)
        shutil.rmtree(directory)
        if in_its_place is not None:
            in_its_place(directory)
        computed = llm.metrics()["num_computed_tokens"]
        assert run(llm, A) == alone[0]
        assert llm.metrics()["num_computed_tokens"] - computed == NUM_COMPUTED
        request = start(llm, B)
        step_until(llm, lambda: request.finished)
        assert request.output_token_ids == alone[1][0][0]
        drain(llm)
        if in_its_place is not Path.touch:
            flush(llm, request.block_hashes[:2])
            computed = llm.metrics()["num_computed_tokens"]
            assert run(llm, B) == alone[1]
            assert llm.metrics()["num_computed_tokens"] - computed == len(B) + GREEDY.max_tokens - 1 - 2 * BLOCK
            drain(llm)


def full_at_once(files, fd, data):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_half_way(files, fd, data):
    os.write(fd, data[: len(data) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*arguments, **options):
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(
    ("step", "fails"),
    [("write_bytes", full_at_once), ("write_bytes", full_half_way), ("publish", read_only), ("write", read_only), ("_make_room", read_only)],
)
def test_a_save_that_fails_changes_no_answer_and_leaves_nothing(model, alone, tmp_path, monkeypatch, step, fails):
    with open_files(model, tmp_path) as llm:
        files = files_of(llm)
        with monkeypatch.context() as trouble:
            trouble.setattr(files, step, partial(fails, files))
            request = start(llm, A)
            step_until(llm, lambda: request.finished)
            assert request.output_token_ids == alone[0][0][0]
            step_until(llm, lambda: not llm.core._connector.scheduler_half._saves)
            assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        forget_local(llm)
        assert run(llm, A) == alone[0]
        flush(llm, request.block_hashes[:4])
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) == 4
    assert all(path.suffix == ".kv" for path in stored)


@pytest.mark.parametrize("bound", [1 << 30, 6 * 4400], ids=["roomy", "evicting"])
@pytest.mark.parametrize("async_load_bytes", [0, 1 << 30], ids=["asynchronous", "synchronous"])
def test_two_engines_that_work_in_one_directory_change_no_bit_of_each_others_answers(
    model, prompts, params, outputs_alone, tmp_path, async_load_bytes, bound
):
    extra = {"path": str(tmp_path), "async_load_bytes": async_load_bytes, "max_bytes": bound}
    with open_engine(model, "StorageConnector", extra) as one, open_engine(model, "StorageConnector", extra) as other:
        for life in range(3):
            requests = []
            for llm, numbers in ((one, range(len(prompts))), (other, reversed(range(len(prompts))))):
                for number in numbers:
                    request = llm.core.make_request(f"{life}-{number}", {"prompt_token_ids": prompts[number]}, params[number])
                    llm.core.add_request(request)
                    requests.append((number, request))
            while any(not request.finished for _, request in requests):
                one.core.step()
                other.core.step()
            for number, request in requests:
                assert request.output_token_ids == outputs_alone[number][0][0]
            forget_local(one)
            forget_local(other)
        assert one.metrics()["num_external_tokens"] > 0 or bound < 1 << 30
        drain(one)
        drain(other)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= bound


def test_the_directory_keeps_its_bound(model, alone, tmp_path):
    bound = 6 * (BLOCK_BYTES + 128)
    extra = {"path": str(tmp_path), "max_bytes": bound}
    with open_engine(model, "StorageConnector", extra) as llm:
        for _ in range(3):
            for prompt, expected in zip([A, B], alone, strict=True):
                assert run(llm, prompt) == expected
                forget_local(llm)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.kv")]
    assert 0 < sum(sizes) <= bound


OTHER_PROCESS = """
import sys
sys.path[:0] = [sys.argv[1]]
from tier_engine import GREEDY, open_engine
with open_engine(sys.argv[2], "StorageConnector", {"path": sys.argv[3]}) as llm:
    llm.generate([eval(sys.argv[4])], GREEDY)
"""


def test_another_process_with_another_hash_seed_finds_the_blocks(model, alone, tmp_path):
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    arguments = [str(Path(__file__).parent), model, str(tmp_path), repr(A)]
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, *arguments], env=environment, check=True, timeout=120)
    with open_engine(model, "StorageConnector", {"path": str(tmp_path)}) as llm:
        assert run(llm, A) == alone[0]
        assert llm.metrics()["num_external_tokens"] == 4 * BLOCK
        drain(llm)


KILLED_PROCESS = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
from tier_engine import GREEDY, open_engine
from interlock.kv_transfer.connectors.block_files import BlockFiles
write, written = BlockFiles.write_bytes, []
def write_or_die(fd, data):
    written.append(data)
    if len(written) == 6:  # headers and payloads in turn: the third block
        write(fd, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(fd, data)
BlockFiles.write_bytes = staticmethod(write_or_die)
with open_engine(sys.argv[2], "StorageConnector", {"path": sys.argv[3]}) as llm:
    llm.generate([eval(sys.argv[4])], GREEDY)
"""


@pytest.fixture(scope="module")
def half_written(model, tmp_path_factory):
    """The directory of an engine that was killed in the middle of its third file."""
    directory = tmp_path_factory.mktemp("killed")
    arguments = [str(Path(__file__).parent), model, str(directory), repr(A)]
    process = subprocess.run([sys.executable, "-c", KILLED_PROCESS, *arguments], check=False, timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert sorted(path.suffix for path in directory.rglob("*") if path.is_file()) == [".kv", ".kv", ".tmp"]
    return directory


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [0, 1 << 30], ids=["asynchronous", "synchronous"])
def test_of_an_engine_that_was_killed_in_mid_write_the_whole_blocks_are_found_and_no_other(
    model, alone, half_written, tmp_path, async_load_bytes, cudagraph_mode
):
    directory = shutil.copytree(half_written, tmp_path / "tier")
    with open_files(model, directory, async_load_bytes=async_load_bytes, cudagraph_mode=cudagraph_mode) as llm:
        assert list(directory.rglob("*.tmp")) == [], "its rest is cleaned up at the start"
        request = start(llm, A)
        step_until(llm, lambda: request.finished)
        assert request.output_token_ids == alone[0][0][0]
        assert request.metrics.num_external_tokens == 2 * BLOCK
        assert llm.metrics()["num_failed_loads"] == 0
        flush(llm, request.block_hashes[:4])
        drain(llm)


def test_another_model_or_kv_dtype_or_block_size_finds_nothing(model, alone, tmp_path, tmp_path_factory):
    with open_engine(model, "StorageConnector", {"path": str(tmp_path)}) as llm:
        assert run(llm, A) == alone[0]
        drain(llm)
    other = make_tiny_llama(tmp_path_factory.mktemp("other"), dtype="bfloat16", seed=1)
    for name, options in ((other, {}), (model, {"kv_cache_dtype": "float16"}), (model, {"block_size": 16, "num_blocks": 40})):
        with open_engine(name, "StorageConnector", {"path": str(tmp_path)}, **options) as llm:
            run(llm, A)
            assert llm.metrics()["num_external_tokens"] == 0
            drain(llm)


def test_an_engine_with_another_pool_or_max_model_len_finds_the_blocks(model, alone, tmp_path):
    for life, options in enumerate(({}, {"num_blocks": 12}, {"num_blocks": 70, "max_model_len": 512}, {"max_model_len": None})):
        with open_engine(model, "StorageConnector", {"path": str(tmp_path)}, **options) as llm:
            assert run(llm, A) == alone[0]
            assert (llm.metrics()["num_external_tokens"] > 0) == (life > 0)
            drain(llm)


def test_files_of_others_in_the_directory_survive_start_and_eviction_and_leftovers_do_not(model, alone, tmp_path):
    bound = 6 * (BLOCK_BYTES + 128)
    extra = {"path": str(tmp_path), "max_bytes": bound}
    with open_engine(model, "StorageConnector", extra) as llm:
        assert run(llm, A) == alone[0]
        drain(llm)
    entry = next(tmp_path.rglob("*.kv"))
    leftover = entry.with_name(f".{entry.name}.1.{'0' * 32}.tmp")
    foreign = [place / name for place in (tmp_path, *list(entry.parents)[:3]) for name in ("thesis.tmp", "x.kv")]
    for path in [leftover, *foreign]:
        path.write_bytes(b"x" * bound)
        os.utime(path, (1, 1))
    with open_engine(model, "StorageConnector", extra) as llm:
        assert not leftover.exists()
        for prompt, expected in zip([A, B], alone, strict=True):
            assert run(llm, prompt) == expected
            forget_local(llm)
    assert all(path.stat().st_size == bound for path in foreign)
    assert 0 < sum(path.stat().st_size for path in tmp_path.rglob("*.kv") if path not in foreign) <= bound
