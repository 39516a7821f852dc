"""The connector's lifecycle as the runner drives it: the order of calls in a step, and what happens to a step that is driven wrongly or fails."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import stand_in_drafter
from lockstep_ranks import FixedGroup
from runner_driver import RunnerDriver
from stand_in_drafter import PublishingConnector

from checkpoints import make_tiny_llama
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.errors import KernelError, LifecycleError
from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.core.step import LoadPromise, SchedulerOutput
from interlock.runner.model_runner import ModelRunner

MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
PROMPT = list(range(3, 12))
STEP = ["handle_preemptions, metadata False", "start_load_kv, metadata True", "finish_forward", "wait_for_save", "clear"]
DEFERRED_BEHIND_HOOKS = [STEP[0], "wait 0", "wait 1", *STEP[1:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"))


@contextlib.contextmanager
def open_runner(model: str, mode: CUDAGraphMode, group: Any = None) -> Iterator[tuple[ModelRunner, PublishingConnector]]:
    transfer = KVTransferConfig(kv_connector="stand_in_drafter:PublishingConnector", kv_load_failure_policy="recompute")
    sizes = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20, "threads": 1}
    runner = ModelRunner(EngineConfig(model=model, cudagraph_mode=mode, kv_transfer_config=transfer, **sizes), group=group)
    try:
        yield runner, stand_in_drafter.MADE[-1]
    finally:
        runner.shutdown()


def calls_of(connector: PublishingConnector) -> list[str]:
    calls, connector.calls = connector.calls, []
    return calls


@pytest.mark.parametrize("mode", MODES)
def test_warm_up_and_capture_reach_a_connector_only_to_say_that_they_are_over(model, mode):
    with open_runner(model, mode) as (_, connector):
        assert connector.calls == ["reset_capture_state"]


@pytest.mark.parametrize("mode", MODES)
def test_loads_that_the_step_does_not_consume_start_right_after_the_launch_in_its_context(model, mode):
    with open_runner(model, mode) as (runner, connector):
        driver = RunnerDriver(runner)
        driver.add("r", PROMPT)
        submitted, seen = runner.stream.team.submitted, []
        connector.on_load = lambda context: seen.append((context, runner.stream.team.submitted))
        calls_of(connector)
        driver.step({"r": len(PROMPT)})
        assert calls_of(connector) == (STEP if mode is CUDAGraphMode.FULL else DEFERRED_BEHIND_HOOKS)
        [(context, then)] = seen
        assert then > submitted, "they were started before the launch"
        assert then < runner.stream.team.submitted, "they were started after sampling"
        assert (context.step, context.cudagraph_runtime_mode, context.attn_metadata.num_actual_tokens) == (1, mode, len(PROMPT))


@pytest.mark.parametrize("mode", MODES)
def test_loads_that_the_step_consumes_start_before_the_launch(model, mode):
    with open_runner(model, mode) as (runner, connector):
        driver = RunnerDriver(runner)
        driver.add("r", PROMPT, computed=8)
        submitted, seen = runner.stream.team.submitted, []
        connector.on_load = lambda context: seen.append(runner.stream.team.submitted)
        calls_of(connector)
        driver.step({"r": 1}, promises=(LoadPromise("r", 0, 8, tuple(driver.blocks("r")[:2])),))
        assert calls_of(connector)[:2] == STEP[:2]
        assert seen == [submitted]


@pytest.mark.parametrize("group", [None, FixedGroup([8, 1, 2])])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_tokens_has_the_whole_lifecycle_and_no_layer_hooks(model, mode, group):
    with open_runner(model, mode, group) as (runner, connector):
        calls_of(connector)
        connector.sent.add("r")
        driver = RunnerDriver(runner)
        driver.step({})
        assert calls_of(connector) == STEP
        report = driver.outputs[-1].kv_connector_output
        assert report is not None
        assert report.finished_sending == {"r"}


def test_a_step_that_fails_in_a_kernel_is_aborted_and_the_next_one_runs(model):
    with open_runner(model, CUDAGraphMode.FULL) as (runner, connector):
        driver = RunnerDriver(runner)
        driver.add("bad", [100_000])
        driver.add("good", PROMPT)
        calls_of(connector)
        with pytest.raises(KernelError, match="token id"):
            driver.step({"bad": 1})
        assert calls_of(connector) == [*STEP[:3], "clear"], "a step that failed publishes nothing"
        driver.step({"good": len(PROMPT)})
        assert calls_of(connector) == STEP


def context_of(step: int) -> ForwardContext:
    return ForwardContext(step, None, CUDAGraphMode.NONE, None)


def test_a_step_that_was_leaked_is_named_by_the_next(model):
    with open_runner(model, CUDAGraphMode.FULL) as (runner, _):
        driver = RunnerDriver(runner)
        driver.add("r", PROMPT)
        leaked = runner._kv.begin(context_of(1))
        with pytest.raises(LifecycleError, match="step 1 was begun while step 1 is CREATED"):
            driver.step({"r": len(PROMPT)})
        leaked.abort()
        driver.step({"r": 1})


def test_a_step_that_is_finished_twice_says_so(model):
    with open_runner(model, CUDAGraphMode.FULL) as (runner, _):
        driver = RunnerDriver(runner)
        batch = runner._input_batch.prepare(SchedulerOutput(1, [], [], {}, 0))
        step = runner._kv.begin(context_of(1))
        with pytest.raises(LifecycleError, match="finish_forward of step 1, which is CREATED"):
            step.finish_forward()
        step.pre_forward(SchedulerOutput(1, [], [], {}, 0), batch, None)
        step.finish_forward()
        step.post_forward(frozenset())
        with pytest.raises(LifecycleError, match="post_forward of step 1, which is FINISHED"):
            step.post_forward(frozenset())
        with pytest.raises(LifecycleError, match="abort of step 1, which is FINISHED"):
            step.abort()
        driver._step = 1
        driver.add("r", PROMPT)
        driver.step({"r": len(PROMPT)})


def test_hooks_outside_a_step_are_an_error_unless_the_connector_is_disabled(model):
    with open_runner(model, CUDAGraphMode.NONE) as (runner, connector):
        calls_of(connector)
        with pytest.raises(LifecycleError, match="before_layer was called outside a step"):
            runner._kv.before_layer(0)
        with runner._kv.disabled():
            runner._kv.before_layer(0)
            with pytest.raises(LifecycleError, match="while the connector is disabled"):
                runner._kv.begin(context_of(1))
        assert calls_of(connector) == []
