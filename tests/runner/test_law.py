"""The numerical law as a matrix: tokens, and logits as integer bit patterns, do not depend on anything but the sequence itself."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from runner_driver import RunnerDriver

from checkpoints import make_tiny_llama, make_tiny_llama_gguf
from interlock.core.config import EngineConfig
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.sampling_params import SamplingParams
from interlock.runner.model_runner import ModelRunner

NUM_OUTPUTS = 6
REFERENCE: dict[str, Any] = {"threads": 1, "enforce_eager": True, "block_size": 16}
MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY]


@contextlib.contextmanager
def runner_of(model: str, **options: Any) -> Iterator[ModelRunner]:
    runner = ModelRunner(EngineConfig(**{"model": model, "max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20, **options}))
    try:
        yield runner
    finally:
        runner.shutdown()


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_1", "smollm2"])
def case(request, tmp_path_factory):
    """A model, a prompt, and what the reference makes of it: alone, eager, one thread, in one chunk."""
    if request.param == "smollm2":
        model, length = "smollm2", 301
    elif request.param.startswith("q"):
        model, length = make_tiny_llama_gguf(tmp_path_factory.mktemp("m") / "tiny.gguf", fmt=request.param), 301
    else:
        model, length = make_tiny_llama(tmp_path_factory.mktemp("m"), dtype=request.param), 301
    prompt = np.random.default_rng(5).integers(3, 250, length).tolist()
    with runner_of(model, **REFERENCE) as runner:
        driver = RunnerDriver(runner)
        driver.add("r", prompt)
        tokens, bits = driver.generate("r", NUM_OUTPUTS)
    return model, prompt, tokens, bits


def assert_same(case: Any, tokens: list[int], bits: Any) -> None:
    assert tokens == case[2]
    np.testing.assert_array_equal(bits, case[3])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("threads", "chunk"), [(2, 512), (3, 37)])
def test_modes_threads_and_chunks(case, mode, threads, chunk):
    with runner_of(case[0], cudagraph_mode=mode, threads=threads) as runner:
        driver = RunnerDriver(runner)
        driver.add("r", case[1])
        assert_same(case, *driver.generate("r", NUM_OUTPUTS, chunk=chunk))
        assert driver.outputs[-1].cudagraph_runtime_mode is mode.decode_mode()
        assert driver.outputs[0].cudagraph_runtime_mode is mode.mixed_mode()


@pytest.mark.parametrize("block_size", [1, 8, 64, 256])
def test_block_sizes(case, block_size):
    with runner_of(case[0], block_size=block_size, threads=2) as runner:
        driver = RunnerDriver(runner)
        driver.add("r", case[1])
        assert_same(case, *driver.generate("r", NUM_OUTPUTS, chunk=100))


def test_token_by_token(case):
    with runner_of(case[0], threads=2) as runner:
        driver = RunnerDriver(runner)
        driver.add("r", case[1])
        assert_same(case, *driver.generate("r", NUM_OUTPUTS, chunk=1))


def test_batch_companions_that_come_and_go(case):
    random = np.random.default_rng(7)
    with runner_of(case[0], threads=2) as runner:
        driver = RunnerDriver(runner)
        for name, length in (("a", 3), ("b", 70), ("c", 1)):
            driver.add(name, random.integers(3, 250, length).tolist())
        driver.step({"a": 3, "b": 70})
        driver.add("r", case[1])
        rows = []
        for counts in ({"a": 1, "r": 64, "b": 1}, {"c": 1, "r": 200, "a": 1}, {"r": 37, "c": 1, "b": 1}):
            rows += [bits for req_id, bits in driver.step(counts).items() if req_id == "r"]
        driver.finish("a")
        while len(rows) < NUM_OUTPUTS:
            rows.append(driver.step({"c": 1, "r": 1, "b": 1} if len(rows) % 2 else {"r": 1, "c": 1})["r"])
        assert_same(case, driver.tokens("r")[len(case[1]) :], np.stack(rows))


def test_kv_that_another_request_computed_is_as_good_as_its_own(case):
    """A prefix hit: the second request reads the blocks of the first, all but the last partial one."""
    with runner_of(case[0], threads=2) as runner:
        driver = RunnerDriver(runner)
        driver.add("first", case[1], room=0)
        driver.step({"first": len(case[1])})
        shared = len(case[1]) // 16 * 16
        driver.add("r", case[1], computed=shared)
        driver.share_blocks("first", "r", shared // 16)
        assert_same(case, *driver.generate("r", NUM_OUTPUTS))


def test_rows_of_a_step_that_are_not_live_change_nothing(case):
    """Padding: a program captured for 512 tokens and 16 requests replays with one row, over buffers full of other rows' leftovers."""
    with runner_of(case[0], cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=(512,), threads=2) as runner:
        driver = RunnerDriver(runner)
        driver.add("other", np.random.default_rng(9).integers(3, 250, 400).tolist())
        driver.step({"other": 400})
        driver.add("r", case[1])
        before = [layer.numpy().copy() for layer in runner.kv_cache.layers]
        assert_same(case, *driver.generate("r", NUM_OUTPUTS))
        for layer, old in zip(runner.kv_cache.layers, before, strict=True):
            np.testing.assert_array_equal(layer.numpy()[: 400 // 16], old[: 400 // 16])


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_other_kv_dtypes_keep_the_law(case, kv_dtype):
    results = []
    for options, chunk in ((REFERENCE, 512), ({"threads": 2, "block_size": 8}, 41)):
        with runner_of(case[0], kv_cache_dtype=kv_dtype, **options) as runner:
            driver = RunnerDriver(runner)
            driver.add("r", case[1])
            results.append(driver.generate("r", 3, chunk=chunk))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_a_seeded_draw_depends_on_its_request_alone(case):
    params = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)
    drawn = []
    for companions in (0, 3):
        with runner_of(case[0], threads=2) as runner:
            driver = RunnerDriver(runner)
            others = {f"o{i}": 1 for i in range(companions)}
            for i, name in enumerate(others):
                driver.add(name, [5 + i], params=SamplingParams(temperature=1.0), seed=i)
            driver.add("r", case[1], params=params, seed=11)
            driver.step({**others, "r": len(case[1])})
            for _ in range(NUM_OUTPUTS):
                driver.step({**others, "r": 1})
            drawn.append(driver.tokens("r")[len(case[1]) :])
    assert drawn[0] == drawn[1]
