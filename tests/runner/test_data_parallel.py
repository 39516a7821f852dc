"""Two ranks in lockstep, as threads: one collective per step whatever they run, one agreed mode, and no rank that waits for ever."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import outside_connector
import pytest
from lockstep_ranks import ThreadGroup, thread_groups, together
from outside_connector import GatedConnector, OutsideConnector
from runner_driver import RunnerDriver, released

from checkpoints import make_tiny_llama
from interlock import LLM, SamplingParams
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.errors import ConfigError, KernelError
from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.core.step import LoadPromise
from interlock.runner.data_parallel import Lockstep
from interlock.runner.dispatch import Dispatcher
from interlock.runner.kv_step import supported_mode
from interlock.runner.model_runner import ModelRunner

BLOCK, NUM_LAYERS = 4, 2
NONE, PIECEWISE, FULL, BOTH = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE
PROMPTS = [np.random.default_rng(20 + i).integers(3, 250, 9 + 5 * i).tolist() for i in range(3)]


class NotingConnector(GatedConnector):
    """Keeps each step's forward context."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        CONTEXTS.append(forward_context)
        super().start_load_kv(forward_context, **kwargs)


class PiecewiseConnector(OutsideConnector):
    """Cannot serve a FULL replay."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Any) -> bool:
        return True


CONTEXTS: list[ForwardContext] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=NUM_LAYERS)


@pytest.fixture
def remote():
    CONTEXTS.clear()
    outside_connector.REMOTE.append(outside_connector.Remote(NUM_LAYERS))
    yield outside_connector.REMOTE[-1]
    outside_connector.REMOTE.pop().land_all()


def config_of(model: str, mode: CUDAGraphMode, connector: str | None = None, **options: Any) -> EngineConfig:
    transfer = KVTransferConfig(kv_connector=f"{connector}", kv_load_failure_policy="recompute") if connector else None
    sizes = {"block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20, "threads": 1}
    return EngineConfig(model=model, cudagraph_mode=mode, kv_transfer_config=transfer, **{**sizes, **options})


@contextlib.contextmanager
def ranks(configs: Sequence[EngineConfig], watchdog: float = 60.0) -> Iterator[tuple[list[RunnerDriver], list[ThreadGroup]]]:
    groups = thread_groups(len(configs), watchdog)
    runners = [ModelRunner(config, group=group) for config, group in zip(configs, groups, strict=True)]
    try:
        yield [RunnerDriver(runner) for runner in runners], groups
    finally:
        for runner in runners:
            runner.shutdown()


def step_both(drivers: list[RunnerDriver], groups: list[ThreadGroup], first: dict[str, int], second: dict[str, int], **options: Any) -> None:
    """One step of both ranks, in which each makes exactly one collective."""
    before = [group.collectives for group in groups]
    together(lambda: drivers[0].step(first), lambda: drivers[1].step(second, **options))
    made = [group.collectives - count for group, count in zip(groups, before, strict=True)]
    assert made == [1, 1], f"the ranks made {made} collectives in one step"


def uneven_steps(drivers: list[RunnerDriver], groups: list[ThreadGroup]) -> None:
    """Prefill beside decode, chunks, idle ranks, a step in which nobody has a token, a batch above the largest captured size."""
    for driver in drivers:
        for index, prompt in enumerate(PROMPTS):
            driver.add(f"r{index}", prompt)
    step_both(drivers, groups, {"r0": 9}, {"r0": 9, "r1": 14})
    step_both(drivers, groups, {"r0": 1}, {})
    step_both(drivers, groups, {}, {"r0": 1, "r1": 1})
    step_both(drivers, groups, {}, {})
    step_both(drivers, groups, {"r0": 1, "r1": 7}, {"r0": 1})
    step_both(drivers, groups, {"r1": 7}, {"r2": 19, "r0": 1})
    step_both(drivers, groups, {"r0": 1, "r1": 1}, {"r0": 1, "r1": 1, "r2": 1})
    step_both(drivers, groups, {}, {"r2": 1})


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_each_step_makes_one_collective_in_every_mode_and_gives_the_tokens_of_a_lone_rank(model, mode):
    config = config_of(model, mode, cudagraph_capture_sizes=(1, 2, 4, 8, 16))
    with ranks([config, config]) as (drivers, groups):
        uneven_steps(drivers, groups)
        modes = [[output.cudagraph_runtime_mode for output in driver.outputs] for driver in drivers]
        assert modes[0] == modes[1]
    runner = ModelRunner(config_of(model, NONE))
    try:
        for number, driver in enumerate(drivers):
            alone = RunnerDriver(runner, first_block=number * 100)
            for index, prompt in enumerate(PROMPTS):
                tokens = driver.tokens(f"r{index}")[len(prompt) :]
                alone.add(f"{number}{index}", prompt, room=16)
                assert alone.generate(f"{number}{index}", max(1, len(tokens)))[0][: len(tokens)] == tokens
    finally:
        runner.shutdown()


@pytest.mark.parametrize("mode", [NONE, PIECEWISE, FULL, BOTH])
def test_a_lone_rank_makes_no_collective(model, mode):
    with ranks([config_of(model, mode)]) as (drivers, groups):
        drivers[0].add("r", PROMPTS[0])
        drivers[0].step({"r": 9})
        drivers[0].step({"r": 1})
        drivers[0].step({})
        assert groups[0].collectives == 0


def test_negative_control_a_collective_that_somebody_adds_is_noticed(model, monkeypatch):
    original = Dispatcher.dispatch

    def twice(dispatcher: Dispatcher, num_tokens: int, uniform: bool) -> Any:
        original(dispatcher, num_tokens, uniform)
        return original(dispatcher, num_tokens, uniform)

    config = config_of(model, FULL)
    with ranks([config, config]) as (drivers, groups):
        monkeypatch.setattr(Dispatcher, "dispatch", twice)
        with pytest.raises(AssertionError, match=r"made \[2, 2\] collectives"):
            uneven_steps(drivers, groups)


def test_negative_control_a_rank_that_skips_the_collective_when_it_has_no_tokens_is_noticed(model, monkeypatch):
    original = Dispatcher.dispatch

    def only_with_tokens(dispatcher: Dispatcher, num_tokens: int, uniform: bool) -> Any:
        return original(dispatcher, num_tokens, uniform) if num_tokens else (dispatcher._local(num_tokens, uniform), None)

    config = config_of(model, FULL)
    with ranks([config, config], watchdog=0.2) as (drivers, groups):
        monkeypatch.setattr(Dispatcher, "dispatch", only_with_tokens)
        with pytest.raises(threading.BrokenBarrierError):
            uneven_steps(drivers, groups)


def test_the_context_of_a_full_replay_carries_the_agreed_token_counts(model, remote):
    config = config_of(model, FULL, "test_data_parallel:NotingConnector")
    with ranks([config_of(model, FULL), config]) as (drivers, groups):
        for driver, prompt in zip(drivers, PROMPTS, strict=False):
            driver.add("r", prompt)
        step_both(drivers, groups, {"r": 9}, {"r": 14})
        step_both(drivers, groups, {}, {"r": 1})
        step_both(drivers, groups, {"r": 1}, {})
        step_both(drivers, groups, {}, {})
    assert [context.cudagraph_runtime_mode for context in CONTEXTS] == [FULL] * 4
    assert [context.dp_metadata and context.dp_metadata.num_tokens_across_dp for context in CONTEXTS] == [(9, 14), (0, 1), (1, 0), (0, 0)]
    assert [context.batch_descriptor and context.batch_descriptor.num_tokens for context in CONTEXTS] == [16, 1, 1, 1]


# Modes: all ranks run under the most conservative one.


class Loader:
    """A rank that holds no KV yet and loads that of a prompt, in a step that computes the prompt's last token."""

    def __init__(self, driver: RunnerDriver, source: RunnerDriver) -> None:
        """`source`: a rank that has computed the prompt as its request 'p'."""
        count = len(PROMPTS[2]) - 1
        driver.add("loaded", PROMPTS[2], computed=count)
        blocks = driver.blocks("loaded")[: -(-count // BLOCK)]
        self.promise = LoadPromise("loaded", 0, count, tuple(blocks))
        for pages, layer, mine in zip(outside_connector.REMOTE[-1].pages, source.runner.kv_cache.layers, driver.runner.kv_cache.layers, strict=True):
            mine.numpy()[blocks] = 0x7FC0  # NaN
            for index, (block, theirs) in enumerate(zip(blocks, source.blocks("p"), strict=False)):
                stop = min(BLOCK, count - index * BLOCK)
                pages[block] = [(slice(0, stop), layer.numpy()[theirs, :, :, :stop])]


@pytest.mark.parametrize(
    ("connector", "options", "expected"),
    [("PiecewiseConnector", {}, PIECEWISE), ("NotingConnector", {"kv_load_wait": "hook"}, PIECEWISE), ("NotingConnector", {}, FULL)],
)
@pytest.mark.parametrize("mode", [FULL, BOTH])
def test_a_rank_whose_load_needs_hooks_takes_the_others_out_of_full(model, remote, mode, connector, options, expected):
    configs = [config_of(model, mode), config_of(model, mode, f"test_data_parallel:{connector}", **options)]
    with ranks(configs) as (drivers, groups):
        drivers[0].add("p", PROMPTS[2])
        step_both(drivers, groups, {"p": len(PROMPTS[2])}, {})
        loader = Loader(drivers[1], drivers[0])
        landing = threading.Thread(target=lambda: (remote.started.wait(60), remote.land_all()))
        landing.start()
        step_both(drivers, groups, {"p": 1}, {"loaded": 1}, promises=(loader.promise,))
        landing.join()
        step_both(drivers, groups, {"p": 1}, {})
        step_both(drivers, groups, {}, {"loaded": 1})
        step_both(drivers, groups, {}, {"loaded": 1})
        assert drivers[1].tokens("loaded") == drivers[0].tokens("p")
        assert [output.cudagraph_runtime_mode for output in drivers[0].outputs[1:]] == [expected] * 4
        assert [output.cudagraph_runtime_mode for output in drivers[1].outputs[1:]] == [expected] * 4


def test_gates_cannot_be_forced_on_a_connector_that_needs_hooks(model):
    with pytest.raises(ConfigError, match=r"kv_load_wait is 'gate', but the connector 'test_data_parallel:PiecewiseConnector' needs hooks"):
        supported_mode(config_of(model, BOTH, "test_data_parallel:PiecewiseConnector", kv_load_wait="gate"))


def test_a_rank_that_waits_at_a_gate_gets_on_while_the_other_stands_in_the_next_collective(model, remote):
    configs = [config_of(model, FULL), config_of(model, FULL, "test_data_parallel:NotingConnector")]
    with ranks(configs) as (drivers, groups):
        drivers[0].add("p", PROMPTS[2])
        step_both(drivers, groups, {"p": len(PROMPTS[2])}, {})
        loader = Loader(drivers[1], drivers[0])
        waits = threading.Event()

        def note_wait(values: Sequence[int]) -> list[list[int]]:
            waits.set()
            return ThreadGroup.all_gather(groups[0], values)

        with released(remote.land_all, 2) as pool:
            gated = pool.submit(drivers[1].step, {"loaded": 1}, (loader.promise,))
            drivers[0].step({"p": 1})
            groups[0].all_gather = note_wait  # type: ignore[method-assign]
            ahead = pool.submit(drivers[0].step, {"p": 1})
            assert waits.wait(60)
            assert not gated.done(), "the step did not wait for its load"
            remote.land_all()
            gated.result(60)
            drivers[1].step({"loaded": 1})
            ahead.result(60)
        assert drivers[1].tokens("loaded") == drivers[0].tokens("p")[:-1]
        assert groups[0].collectives == groups[1].collectives


def test_a_rank_whose_load_never_lands_gets_on_at_its_deadline(model, remote):
    configs = [config_of(model, FULL), config_of(model, FULL, "test_data_parallel:NotingConnector", kv_load_timeout=0.1)]
    with ranks(configs) as (drivers, groups):
        drivers[0].add("p", PROMPTS[2])
        step_both(drivers, groups, {"p": len(PROMPTS[2])}, {})
        loader = Loader(drivers[1], drivers[0])
        step_both(drivers, groups, {"p": 1}, {"loaded": 1}, promises=(loader.promise,))
        report = drivers[1].outputs[-1].kv_connector_output
        assert report is not None
        assert report.invalid_block_ids == frozenset(loader.promise.block_ids)
        step_both(drivers, groups, {"p": 1}, {})


# Engines: what the ranks agree about the steps to come.


def lockstep_engines(model: str, monkeypatch: Any, mode: CUDAGraphMode = BOTH) -> tuple[list[LLM], list[ThreadGroup]]:
    groups = thread_groups(2)
    monkeypatch.setattr("interlock.engine.core.join_lockstep", lambda config: Lockstep(groups[config.data_parallel_rank]))
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20, "threads": 1, "cudagraph_mode": mode.name}
    return [LLM(model, data_parallel_size=2, data_parallel_rank=rank, data_parallel_lockstep=True, **options) for rank in range(2)], groups


def outputs_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("mode", [NONE, PIECEWISE, FULL, BOTH])
def test_uneven_ranks_end_after_the_same_step_with_the_tokens_of_a_lone_engine(model, monkeypatch, mode):
    random = np.random.default_rng(4)
    prompts = [random.integers(3, 250, length).tolist() for length in random.integers(1, 65, 128)]
    params = [SamplingParams(temperature=0.0, max_tokens=int(count), ignore_eos=True) for count in random.integers(1, 8, 128)]
    with LLM(model, threads=1, enforce_eager=True, kv_cache_memory_bytes=1 << 22) as alone:
        expected = outputs_of(alone, prompts, params)
    engines, groups = lockstep_engines(model, monkeypatch, mode)
    first, second = engines
    try:
        halves = together(lambda: outputs_of(first, prompts[:100], params[:100]), lambda: outputs_of(second, prompts[100:], params[100:]))
        assert halves[0] + halves[1] == expected
        assert together(lambda: outputs_of(first, [], []), lambda: outputs_of(second, prompts[:3], params[:3])) == [[], expected[:3]]
        assert together(lambda: outputs_of(first, [], []), lambda: outputs_of(second, [], [])) == [[], []]
        assert first.core.lockstep is not None
        assert second.core.lockstep is not None
        assert groups[0].collectives == groups[1].collectives == first.core.lockstep.num_steps == second.core.lockstep.num_steps
        for engine in engines:
            assert not engine.core.has_work
            assert engine.audit().all_free
    finally:
        for engine in engines:
            engine.close()


def test_a_step_that_fails_on_one_rank_leaves_the_ranks_in_step(model, monkeypatch):
    engines, groups = lockstep_engines(model, monkeypatch)
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)]
    failing = engines[0].core.runner
    original = failing.execute_model

    def fail_once(output: Any) -> Any:
        result = original(output)
        if output.step == 3:
            raise KernelError("the test says so")
        return result

    monkeypatch.setattr(failing, "execute_model", fail_once)
    try:
        answers = together(*[lambda engine=engine: engine.generate([PROMPTS[0]], params)[0].outputs[0] for engine in engines])
        assert answers[0].finish_reason == "error"
        assert len(answers[1].token_ids) == 6
        assert groups[0].collectives == groups[1].collectives
    finally:
        for engine in engines:
            engine.close()
