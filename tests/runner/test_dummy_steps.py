"""A step without live rows, or with fewer than its program was captured for, writes nothing, whatever its slot held before."""

import hashlib

import numpy as np
import outside_connector
import pytest
from lockstep_ranks import FixedGroup, pool_bytes
from runner_driver import RunnerDriver

from checkpoints import make_tiny_llama
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.step import LoadPromise
from interlock.kernels import slot as words
from interlock.runner.model_runner import ModelRunner
from interlock.runner.step_slot import StepSlot

BLOCK, NUM_LAYERS = 4, 2
MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
FULL_INDEX = 2  # the other rank could run FULL
PROMPT = np.random.default_rng(3).integers(3, 250, 26).tolist()
COUNT = len(PROMPT) - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=NUM_LAYERS)


@pytest.fixture
def remote():
    outside_connector.REMOTE.append(outside_connector.Remote(NUM_LAYERS))
    yield outside_connector.REMOTE[-1]
    outside_connector.REMOTE.pop().land_all()


def make_runner(model, mode, connector="GatedConnector", group=None):
    transfer = KVTransferConfig(kv_connector=f"outside_connector:{connector}")
    sizes = {"block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20, "threads": 2}
    return ModelRunner(EngineConfig(model=model, cudagraph_mode=mode, kv_transfer_config=transfer, **sizes), group=group)


def digest(runner):
    return hashlib.sha256(pool_bytes(runner)).hexdigest()


def reuse_blocks(driver, remote):
    """'first' ends and its blocks go to 'second', whose load of the same prompt lands in them."""
    runner = driver.runner
    driver.add("first", PROMPT)
    driver.step({"first": len(PROMPT)})
    for _ in range(3):
        driver.step({"first": 1})
    blocks = driver.blocks("first")
    kv = [layer.numpy()[blocks].copy() for layer in runner.kv_cache.layers]
    driver.finish("first")
    driver.add("second", PROMPT, computed=COUNT)
    driver.share_blocks("first", "second", len(blocks))
    promised = blocks[: -(-COUNT // BLOCK)]
    for layer, pages, saved in zip(runner.kv_cache.layers, remote.pages, kv, strict=True):
        layer.numpy()[blocks] = 0x7FC0  # NaN
        for index, block in enumerate(promised):
            stop = min(BLOCK, COUNT - index * BLOCK)
            pages[block] = [(slice(0, stop), saved[index, :, :, :stop])]
    remote.land_all()
    driver.step({"second": 1}, promises=(LoadPromise("second", 0, COUNT, tuple(promised)),))


@pytest.mark.parametrize("mode", MODES)
def test_dummy_steps_leave_every_byte_of_the_pool_and_the_connectors_hooks_alone(model, remote, mode):
    group = FixedGroup([8, 1, FULL_INDEX])
    runner = make_runner(model, mode, "OutsideConnector", group)
    try:
        driver = RunnerDriver(runner)
        reuse_blocks(driver, remote)
        before, contexts = digest(runner), len(remote.modes)
        remote.calls.clear()
        for _ in range(10):
            driver.step({})
        assert digest(runner) == before
        assert remote.calls == [], "a layer hook was called for a dummy step"
        assert len(remote.modes) == contexts + 10, "the rank's own lifecycle runs in each of its steps"
        assert [output.cudagraph_runtime_mode for output in driver.outputs[-10:]] == [mode] * 10
        assert driver.outputs[-1].kv_connector_output is not None
        retired = runner.stream.team.retired
        driver.step({})
        assert runner.stream.team.retired > retired, "no dummy forward was run beside a rank that has tokens"
        group.row = [0, 1, FULL_INDEX]
        retired = runner.stream.team.retired
        driver.step({})
        assert runner.stream.team.retired == retired, "a forward was run although no rank has tokens"
        tokens = [driver.tokens("first")[len(PROMPT) :], driver.tokens("second")[len(PROMPT) :]]
        group.row = [8, 1, FULL_INDEX]
        while len(tokens[1]) < len(tokens[0]):
            driver.step({"second": 1})
            tokens[1] = driver.tokens("second")[len(PROMPT) :]
        assert tokens[1] == tokens[0]
        assert group.collectives == len(driver.outputs)
    finally:
        runner.shutdown()


def test_negative_control_a_stale_count_of_live_rows_reaches_live_kv(model, remote, monkeypatch):
    begin = StepSlot.begin

    def begin_with_stale_count(slot, *, step, num_tokens, num_reqs, num_logits):
        stale = int(slot.header[words.NUM_TOKENS]), int(slot.header[words.NUM_REQS])
        begin(slot, step=step, num_tokens=num_tokens, num_reqs=num_reqs, num_logits=num_logits)
        if num_tokens == 0:
            slot.header[words.NUM_TOKENS], slot.header[words.NUM_REQS] = stale

    runner = make_runner(model, CUDAGraphMode.FULL, group=FixedGroup([8, 1, FULL_INDEX]))
    try:
        driver = RunnerDriver(runner)
        reuse_blocks(driver, remote)
        # The slots that come next hold the last steps of 'first' and the load of 'second': their blocks get other bytes now.
        for layer in runner.kv_cache.layers:
            layer.numpy()[driver.blocks("first")] = 0x3F80
        before = digest(runner)
        monkeypatch.setattr(StepSlot, "begin", begin_with_stale_count)
        for _ in range(4):
            driver.step({})
        assert digest(runner) != before, "the test cannot tell a write from none"
    finally:
        runner.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_a_program_for_8_rows_with_3_live_ones_writes_3_rows(model, mode, remote):
    runner = make_runner(model, mode, "GatedConnector")
    try:
        driver = RunnerDriver(runner)
        requests = [f"r{index}" for index in range(8)]
        for index, name in enumerate(requests):
            driver.add(name, PROMPT[: 5 + index])
            driver.step({name: 5 + index})
        driver.step(dict.fromkeys(requests, 1))
        driver.step(dict.fromkeys(requests, 1))  # both slots of the ring now hold eight rows
        before = [layer.numpy().copy() for layer in runner.kv_cache.layers]
        live = requests[2:5]
        positions = {name: len(driver.tokens(name)) - driver.pending(name) for name in live}
        written = {(driver.blocks(name)[position // BLOCK], position % BLOCK) for name, position in positions.items()}
        driver.step(dict.fromkeys(live, 1))
        for layer, old in zip(runner.kv_cache.layers, before, strict=True):
            changed = np.argwhere((layer.numpy() != old).any(axis=(1, 2, 4)))
            assert {(int(block), int(offset)) for block, offset in changed} == written
    finally:
        runner.shutdown()
