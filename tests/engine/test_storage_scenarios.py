"""What goes wrong with files in the field, seen from the engine: a doubt is a miss, a miss is recomputed, and nobody else notices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tier_engine import BLOCK_BYTES, GREEDY, MODES, bits, drain, forget_local, open_engine, run_alone
from tier_puppets import Faults, FaultyStorage

from checkpoints import make_tiny_llama

BLOCK = 8
A = [(7 * position) % 240 + 3 for position in range(4 * BLOCK + 3)]
B = [(11 * position) % 240 + 5 for position in range(2 * BLOCK + 2)]
NUM_COMPUTED = len(A) + GREEDY.max_tokens - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("storage_scenarios"), dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(model):
    return run_alone(model, [A, B], [GREEDY, GREEDY])


@pytest.fixture(autouse=True)
def no_faults():
    Faults.reset()


def open_files(model, path, connector="FaultyStorage", async_load_bytes=0, **options):
    return open_engine(model, f"tier_puppets:{connector}", {"path": str(path), "async_load_bytes": async_load_bytes}, **options)


def fill(llm):
    """Store A; returns the path of its second block's file."""
    request = start(llm, A)
    step_until(llm, lambda: request.finished)
    flush(llm, request.block_hashes[:4])
    files = llm.core.runner._kv.connector.worker_half._files
    return str(files.path(request.block_hashes[1]))


def flush(llm, keys):
    """Wait until these are files, and the engine knows of nothing else."""
    forget_local(llm)
    files = llm.core.runner._kv.connector.worker_half._files
    step_until(llm, lambda: all(files.contains(key) for key in keys))


def start(llm, prompt):
    request = llm.core.make_request(f"r{len(llm.core.scheduler.requests)}", {"prompt_token_ids": prompt}, GREEDY)
    llm.core.add_request(request)
    return request


def step_until(llm, condition, limit=100_000):
    for _ in range(limit):
        if condition():
            return
        llm.core.step()
    raise AssertionError(f"still waiting after {limit} steps")


def run(llm, prompt):
    (output,) = llm.generate([prompt], GREEDY)
    return bits(output)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [0, 1 << 30], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("kind", ["deleted", "truncated", "flipped", "EIO"])
def test_a_read_that_fails_costs_one_recompute_and_makes_its_key_a_miss(model, alone, tmp_path, kind, async_load_bytes, cudagraph_mode):
    with open_files(model, tmp_path, async_load_bytes=async_load_bytes, cudagraph_mode=cudagraph_mode) as llm:
        Faults.path, Faults.kind = fill(llm), kind
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


def test_a_save_that_fails_changes_no_answer_and_leaves_nothing(model, alone, tmp_path, monkeypatch):
    with open_files(model, tmp_path) as llm:
        files = llm.core.runner._kv.connector.worker_half._files

        def full(fd, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "write_bytes", full)
        assert run(llm, A) == alone[0]
        forget_local(llm)
        monkeypatch.undo()
        assert run(llm, A) == alone[0]
        drain(llm)
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) == 4
    assert all(path.suffix == ".kv" for path in stored)


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
