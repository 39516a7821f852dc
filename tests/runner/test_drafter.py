"""Drafting in a step: its KV is part of what the step hands over, and its loads are awaited like the model's."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import outside_connector
import pytest
import stand_in_drafter
from runner_driver import RunnerDriver, released
from stand_in_drafter import GARBAGE, StandInDrafter

from checkpoints import make_tiny_llama
from interlock import LLM, SamplingParams
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.step import LoadPromise
from interlock.kv_transfer.lifecycle import KVStep
from interlock.runner.drafter import DraftStage
from interlock.runner.model_runner import ModelRunner

BLOCK, NUM_LAYERS = 4, 3  # the last one is the drafter's
DRAFT_LAYER = NUM_LAYERS - 1
MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
PROMPT = np.random.default_rng(3).integers(3, 250, 26).tolist()
COUNT = len(PROMPT) - 1
PUBLISHING, GATED, OUTSIDE = "stand_in_drafter:PublishingConnector", "outside_connector:GatedConnector", "outside_connector:OutsideConnector"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=NUM_LAYERS - 1)


@pytest.fixture
def remote():
    outside_connector.REMOTE.append(outside_connector.Remote(NUM_LAYERS))
    yield outside_connector.REMOTE[-1]
    outside_connector.REMOTE.pop().land_all()


def config_of(model: str, mode: CUDAGraphMode, connector: str) -> EngineConfig:
    transfer = KVTransferConfig(kv_connector=connector, kv_load_failure_policy="recompute")
    sizes = {"block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20, "threads": 2}
    return EngineConfig(model=model, cudagraph_mode=mode, kv_transfer_config=transfer, **sizes)


@contextlib.contextmanager
def drafting_runner(model: str, mode: CUDAGraphMode, connector: str, *, held: bool = False) -> Iterator[tuple[ModelRunner, StandInDrafter]]:
    drafter = StandInDrafter(held=held)
    runner = ModelRunner(config_of(model, mode, connector), drafter=drafter)
    try:
        yield runner, drafter
    finally:
        drafter.release()
        runner.shutdown()


@pytest.fixture(scope="module")
def alone(model):
    """What a lone runner without drafter and connector makes of the prompt."""
    runner = ModelRunner(EngineConfig(model=model, enforce_eager=True, block_size=BLOCK, kv_cache_memory_bytes=1 << 20, threads=1))
    driver = RunnerDriver(runner)
    driver.add("r", PROMPT)
    result = driver.generate("r", 3)
    runner.shutdown()
    return result


def publish(model: str, mode: CUDAGraphMode) -> tuple[list[Any], Any]:
    """A producer whose drafter is slow: what it has published of the prompt, per layer and position, and its step's report.

    A send of another request ends while it drafts.
    """
    with drafting_runner(model, mode, PUBLISHING, held=True) as (runner, drafter), released(drafter.release) as pool:
        connector = stand_in_drafter.MADE[-1]
        driver = RunnerDriver(runner)
        driver.add("r", PROMPT)
        step = pool.submit(driver.step, {"r": len(PROMPT)})
        assert drafter.drafting.wait(60)
        connector.sent.add("another")
        assert not step.done()
        assert "wait_for_save" not in connector.calls, "published before the drafter had written"
        drafter.release()
        step.result(60)
        blocks = driver.blocks("r")
        pages = [np.concatenate([layer[block] for block in blocks if block in layer], axis=2)[:, :, : len(PROMPT)] for layer in connector.published]
        return pages, driver.outputs[-1].kv_connector_output


def load(model: str, mode: CUDAGraphMode, pages: list[Any], remote: Any, connector: str = GATED) -> tuple[Any, list[Any], StandInDrafter]:
    """A consumer that loads all but the last position: its tokens and logits, its KV per layer and position, its drafter."""
    remote.land_all()
    with drafting_runner(model, mode, connector) as (runner, drafter):
        driver, promise = prepare_load(runner, pages, remote)
        rows = [driver.step({"r": 1}, promises=(promise,))["r"]]
        kv = [np.concatenate(list(layer.numpy()[driver.blocks("r")]), axis=2)[:, :, : len(PROMPT)] for layer in runner.kv_cache.layers]
        rows += [driver.step({"r": 1})["r"] for _ in range(2)]
        return (driver.tokens("r")[len(PROMPT) :], np.stack(rows)), kv, drafter


def prepare_load(runner: ModelRunner, pages: list[Any], remote: Any) -> tuple[RunnerDriver, LoadPromise]:
    driver = RunnerDriver(runner, first_block=5)
    driver.add("r", PROMPT, computed=COUNT)
    blocks = driver.blocks("r")[: -(-COUNT // BLOCK)]
    for layer, wanted, page in zip(runner.kv_cache.layers, remote.pages, pages, strict=True):
        layer.numpy()[blocks] = 0x7FC0  # NaN
        for index, block in enumerate(blocks):
            start, stop = index * BLOCK, min((index + 1) * BLOCK, COUNT)
            wanted[block] = [(slice(0, stop - start), page[:, :, start:stop])]
    return driver, LoadPromise("r", 0, COUNT, tuple(blocks))


@pytest.mark.parametrize("connector", [GATED, OUTSIDE])
@pytest.mark.parametrize("mode", MODES)
def test_target_and_draft_layers_are_equal_on_both_sides_of_a_hand_off(model, alone, remote, mode, connector):
    pages, report = publish(model, mode)
    assert report.finished_sending == {"another"}, "a send that ends while the step drafts is in that step's report"
    result, kv, _ = load(model, mode, pages, remote, connector)
    assert result[0] == alone[0]
    np.testing.assert_array_equal(result[1], alone[1])
    for ours, theirs in zip(kv, pages, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(kv[DRAFT_LAYER][0, 0, :, 0], PROMPT)


@pytest.mark.parametrize("mode", MODES)
def test_negative_control_without_waiting_for_the_drafter_its_layer_is_published_unwritten(model, remote, mode, monkeypatch):
    monkeypatch.setattr(DraftStage, "run", lambda stage, kv, batch, sampled: stage._drafter.propose(batch, sampled))
    with drafting_runner(model, mode, PUBLISHING, held=True) as (runner, _):
        connector = stand_in_drafter.MADE[-1]
        driver = RunnerDriver(runner)
        driver.add("r", PROMPT)
        driver.step({"r": len(PROMPT)})
        published = connector.published[DRAFT_LAYER][driver.blocks("r")[0]]
        assert not published.any(), "the test cannot tell a draft layer that was written from one that was not"


@pytest.mark.parametrize("connector", [GATED, OUTSIDE])
@pytest.mark.parametrize("mode", MODES)
def test_the_drafter_starts_only_after_its_own_layer_has_landed(model, remote, mode, connector):
    pages, _ = publish(model, mode)
    with drafting_runner(model, mode, connector) as (runner, drafter), released(remote.land_all) as pool:
        driver, promise = prepare_load(runner, pages, remote)
        step = pool.submit(driver.step, {"r": 1}, (promise,))
        remote.land(*range(DRAFT_LAYER))
        assert remote.started.wait(60)
        assert not drafter.drafting.is_set()
        remote.land(DRAFT_LAYER)
        step.result(60)
        report = driver.outputs[-1].kv_connector_output
        assert drafter.landed == [True] * len(drafter.landed)
        assert report is not None
        assert not report.invalid_block_ids
        assert runner.timelines.written.value(DRAFT_LAYER) == driver.next_step - 1


def test_negative_control_a_drafter_that_does_not_wait_for_its_layer_starts_before_it_has_landed(model, remote, monkeypatch):
    pages, _ = publish(model, CUDAGraphMode.FULL)
    monkeypatch.setattr(KVStep, "wait_layers", lambda step, layers: None)
    with drafting_runner(model, CUDAGraphMode.FULL, GATED) as (runner, drafter), released(remote.land_all) as pool:
        driver, promise = prepare_load(runner, pages, remote)
        remote.land(*range(DRAFT_LAYER))
        step = pool.submit(driver.step, {"r": 1}, (promise,))
        assert drafter.drafting.wait(60)
        remote.land(DRAFT_LAYER)
        step.result(60)
        assert False in drafter.landed


# Only positions with KV are published.


def test_a_request_that_ends_on_a_block_boundary_publishes_no_block_whose_last_slot_was_never_computed(model):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(model, enforce_eager=True, block_size=BLOCK, kv_cache_memory_bytes=1 << 20, threads=1) as lone:
        first = lone.generate([PROMPT[:4]], params)[0].outputs[0].token_ids
        second_prompt = PROMPT[:4] + first + PROMPT[10:13]
        second = lone.generate([second_prompt], params)[0].outputs[0].token_ids
    config = config_of(model, CUDAGraphMode.FULL, PUBLISHING)
    runner = ModelRunner(config, drafter=StandInDrafter())
    options = {name: getattr(config, name) for name in ("block_size", "kv_cache_memory_bytes", "kv_transfer_config", "cudagraph_mode")}
    with LLM(model, runner=runner, **options) as llm:
        scheduler_half = stand_in_drafter.MADE[-1]
        assert llm.generate([PROMPT[:4]], params)[0].outputs[0].token_ids == first
        assert scheduler_half.ended == [(7, 1)], "positions with KV, and full blocks that may be published"
        assert llm.metrics()["num_blocks_cached"] == 1
        layer = runner.kv_cache.layers[DRAFT_LAYER].numpy()
        assert (layer == GARBAGE).any(), "the drafter was to leave rejected drafts behind the last position"
        output = llm.generate([second_prompt], params)[0]
        assert output.outputs[0].token_ids == second
        assert llm.metrics()["num_cached_tokens"] == BLOCK
        assert llm.audit().all_free
