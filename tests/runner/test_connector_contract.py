"""What a connector may count on: it sees the mode of the step, FULL above all, and no step reads what has not landed."""

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import outside_connector
import pytest
from runner_driver import RunnerDriver, released

from checkpoints import make_tiny_llama
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.errors import ConfigError
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.step import KVConnectorOutput, LoadPromise
from interlock.graphs.program import Piece
from interlock.kv_transfer.clock import VirtualClock
from interlock.runner.input_batch import PreparedBatch
from interlock.runner.model_runner import ModelRunner

BLOCK, NUM_LAYERS, OUTPUTS = 4, 3, 4
MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
POISON = [0x7FC0, 0x4E80]  # bfloat16 NaN, and a large finite number
RECEIVED = {"scheduler_output", "request_ids", "num_tokens", "attn_metadata", "ledger"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=NUM_LAYERS)


def options(model: str, mode: CUDAGraphMode, connector: str | None, kv_load_wait: str) -> dict[str, Any]:
    transfer = connector and KVTransferConfig(kv_connector=f"outside_connector:{connector}", kv_load_failure_policy="recompute")
    return {
        "model": model,
        "cudagraph_mode": mode,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 20,
        "threads": 2,
        "kv_transfer_config": transfer or None,
        "kv_load_wait": kv_load_wait,
    }


@contextlib.contextmanager
def open_runner(
    model: str, mode: CUDAGraphMode, connector: str | None = None, clock: VirtualClock | None = None, *, kv_load_wait: str = "auto"
) -> Iterator[ModelRunner]:
    runner = ModelRunner(EngineConfig(**options(model, mode, connector, kv_load_wait)), clock=clock)
    try:
        yield runner
    finally:
        runner.shutdown()


@pytest.mark.parametrize(("mode", "num_calls"), [(CUDAGraphMode.FULL, 0), (CUDAGraphMode.PIECEWISE, 2 * NUM_LAYERS)])
def test_no_python_stands_between_the_layers_of_a_full_graph(model, mode, num_calls):
    with open_runner(model, mode) as runner:
        programs = [runner.program(descriptor) for descriptor in runner._dispatcher.descriptors()]
        calls = [sum(not isinstance(piece, Piece) for piece in program.pieces) for program in programs]
        assert calls == [num_calls] * len(programs) != []


PROMPT = np.random.default_rng(3).integers(3, 250, 26).tolist()
COMPANIONS = {f"c{i}": np.random.default_rng(10 + i).integers(3, 250, 5 + i).tolist() for i in range(3)}


@pytest.fixture(scope="module")
def producer(model):
    """What a single process makes of the prompt, and the KV of all but its last token, per layer: `[blocks, 2, heads, BLOCK, dim]`."""
    with open_runner(model, CUDAGraphMode.NONE) as runner:
        driver = RunnerDriver(runner)
        driver.add("r", PROMPT, room=OUTPUTS)
        result = driver.generate("r", OUTPUTS)
        blocks = -(-(len(PROMPT) - 1) // BLOCK)
        return result, [layer.numpy()[:blocks].copy() for layer in runner.kv_cache.layers]


class Consumer:
    """A runner with three requests that decode already, and a step that loads the prompt's KV and decodes all four."""

    def __init__(self, runner: ModelRunner, kv: list[Any], poison: int) -> None:
        self.driver = RunnerDriver(runner)
        self.runner = runner
        for name, prompt in COMPANIONS.items():
            self.driver.add(name, prompt)
        for name in COMPANIONS:
            self.driver.step({name: self.driver.pending(name)})
        self.driver.add("r", PROMPT, room=OUTPUTS, computed=len(PROMPT) - 1)
        self.blocks = self.driver.blocks("r")
        self.load_stamp = self.driver.next_step
        for layer in runner.kv_cache.layers:
            layer.numpy()[self.blocks] = poison
        self.promise = LoadPromise("r", 0, len(PROMPT) - 1, tuple(self.blocks[: len(kv[0])]))
        remote = outside_connector.REMOTE[-1]
        for pages, layer in zip(remote.pages, kv, strict=True):
            for index, block in enumerate(self.promise.block_ids):
                count = min(BLOCK, len(PROMPT) - 1 - index * BLOCK)
                pages[block] = [(slice(0, count), layer[index, :, :, :count])]

    def load_step(self) -> Any:
        return self.load_rows()["r"]

    def load_rows(self) -> dict[str, Any]:
        return self.driver.step({**dict.fromkeys(COMPANIONS, 1), "r": 1}, promises=(self.promise,))

    def generate(self) -> tuple[list[int], Any]:
        rows = [self.load_step()]
        while len(rows) < OUTPUTS:
            rows.append(self.driver.step({**dict.fromkeys(COMPANIONS, 1), "r": 1})["r"])
        return self.driver.tokens("r")[len(PROMPT) :], np.stack(rows)

    @property
    def report(self) -> KVConnectorOutput:
        report = self.driver.outputs[-1].kv_connector_output
        assert report is not None
        return report


@pytest.fixture
def remote():
    outside_connector.REMOTE.append(outside_connector.Remote(NUM_LAYERS))
    yield outside_connector.REMOTE[-1]
    outside_connector.REMOTE.pop().land_all()


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("mode", MODES)
def test_a_connector_of_an_outside_author_is_correct_in_all_modes(model, producer, remote, mode, poison):
    remote.land_all()
    with open_runner(model, mode, "OutsideConnector") as runner:
        consumer = Consumer(runner, producer[1], poison)
        tokens, bits = consumer.generate()
    assert tokens == producer[0][0]
    np.testing.assert_array_equal(bits, producer[0][1])


@pytest.mark.parametrize("mode", MODES)
def test_the_context_shows_the_mode_of_the_step_and_the_arguments_are_the_same_in_all(model, producer, remote, mode):
    remote.land_all()
    with open_runner(model, mode, "OutsideConnector") as runner:
        assert remote.modes == [], "warm-up and capture reached the connector"
        assert remote.calls == []
        Consumer(runner, producer[1], POISON[0]).generate()
    assert set(remote.modes) == {mode}
    assert set(remote.arguments) == {frozenset(RECEIVED)}
    assert bool(remote.calls) is (mode is not CUDAGraphMode.FULL), "layer hooks run in eager and piecewise steps, and in no replay"


def test_negative_control_without_the_context_a_full_replay_reads_what_has_not_landed(model, producer, remote):
    with open_runner(model, CUDAGraphMode.FULL, "BlindConnector") as runner:
        consumer = Consumer(runner, producer[1], POISON[1])
        bits = consumer.load_step()
    assert (bits != producer[0][1][0]).any(), "the test cannot tell a lost race from a won one"


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_layer_0_runs_while_the_last_layer_is_in_flight(model, producer, remote, mode):
    """The step's own token appears in layer 0's block, written by the step, before the last layer was allowed to land."""
    last = NUM_LAYERS - 1
    with open_runner(model, mode, "OutsideConnector") as runner, ThreadPoolExecutor(1) as pool:
        consumer = Consumer(runner, producer[1], POISON[0])
        step = pool.submit(consumer.load_step)
        try:
            remote.land(*range(last))
            assert remote.reached[last].wait(60)
            wait_until_written(runner, consumer, layer=0)
            assert not remote.may_land[last].is_set()
            assert not step.done()
        finally:
            remote.land(last)
        np.testing.assert_array_equal(step.result(60), producer[0][1][0])


def test_a_full_replay_is_launched_only_after_the_last_layer_has_landed(model, producer, remote):
    """A uniform decode batch in which one row's whole prompt comes from outside."""
    with open_runner(model, CUDAGraphMode.FULL, "OutsideConnector") as runner, ThreadPoolExecutor(1) as pool:
        consumer = Consumer(runner, producer[1], POISON[0])
        retired = runner.stream.team.retired
        step = pool.submit(consumer.load_step)
        try:
            assert remote.started.wait(60)
            remote.land(0)
            assert runner.stream.team.submitted == retired, "something was launched while layers were in flight"
            remote.land(1)
            assert runner.stream.team.submitted == retired
            assert not step.done()
        finally:
            remote.land_all()
        np.testing.assert_array_equal(step.result(60), producer[0][1][0])
        consumer.driver.step(dict.fromkeys(COMPANIONS, 1))
        assert remote.modes[-1] is CUDAGraphMode.FULL


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("connector", ["ForgetfulConnector", "StallingConnector"])
def test_a_read_that_was_never_issued_or_never_ends_is_a_failure_at_its_deadline(model, producer, remote, mode, connector):
    clock = VirtualClock()
    with open_runner(model, mode, connector, clock) as runner, released(lambda: clock.advance(runner.config.kv_load_timeout)) as pool:
        consumer = Consumer(runner, producer[1], POISON[0])
        step = pool.submit(consumer.load_rows)
        assert remote.started.wait(60)
        assert not step.done()
        clock.advance(runner.config.kv_load_timeout)
        assert "r" not in step.result(60), "a token was sampled from logits that are NaN"
        report, output = consumer.report, consumer.driver.outputs[-1]
    assert set(output.sampled_token_ids) == set(COMPANIONS)
    assert set(output.failed_requests) == {"r"}
    assert report.invalid_block_ids == frozenset(consumer.promise.block_ids)
    assert set(report.load_errors) == {"r"}


def step_rows(runner: ModelRunner, blocks: list[int], layer: int) -> Any:
    position = len(PROMPT) - 1
    return runner.kv_cache.layers[layer].numpy()[blocks[position // BLOCK], :, :, position % BLOCK]


def is_unwritten(runner: ModelRunner, blocks: list[int], layer: int) -> bool:
    """Whether the step has not yet written the prompt's last position into `layer`."""
    return bool((step_rows(runner, blocks, layer) == POISON[0]).all())


def wait_until_written(runner: ModelRunner, consumer: Consumer, layer: int) -> None:
    """Return when the step that loads has written the prompt's last position into `layer`."""
    assert runner.timelines.written.wait(layer, consumer.load_stamp, 60), "the layer did not run while a later one was in flight"
    assert not is_unwritten(runner, consumer.blocks, layer)


# Gates: the replay is launched at once, and waits inside, layer by layer.


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("mode", "kv_load_wait"), [*itertools.product(MODES, ["auto", "barrier"]), (CUDAGraphMode.FULL, "gate")])
def test_a_connector_with_timelines_gives_the_same_bits_on_every_rung(model, producer, remote, mode, kv_load_wait, poison):
    remote.land_all()
    with open_runner(model, mode, "GatedConnector", kv_load_wait=kv_load_wait) as runner:
        tokens, bits = Consumer(runner, producer[1], poison).generate()
    assert tokens == producer[0][0]
    np.testing.assert_array_equal(bits, producer[0][1])


def test_at_a_gate_a_full_replay_runs_layer_0_while_the_last_layer_is_in_flight(model, producer, remote):
    last = NUM_LAYERS - 1
    with open_runner(model, CUDAGraphMode.FULL, "GatedConnector") as runner, ThreadPoolExecutor(1) as pool:
        consumer = Consumer(runner, producer[1], POISON[0])
        step = pool.submit(consumer.load_step)
        try:
            remote.land(0)
            wait_until_written(runner, consumer, layer=0)
            for layer in range(1, NUM_LAYERS):
                assert is_unwritten(runner, consumer.blocks, layer), "a layer ran before it had landed"
            remote.land(*range(last))
            wait_until_written(runner, consumer, layer=last - 1)
            assert is_unwritten(runner, consumer.blocks, last)
            assert not step.done()
        finally:
            remote.land_all()
        np.testing.assert_array_equal(step.result(60), producer[0][1][0])
        assert remote.modes[-1] is CUDAGraphMode.FULL
        assert consumer.report.load_wait_seconds > 0


def test_negative_control_gates_that_are_not_armed_let_a_replay_read_what_has_not_landed(model, producer, remote, monkeypatch):
    monkeypatch.setattr(PreparedBatch, "arm_gates", lambda batch: None)
    with open_runner(model, CUDAGraphMode.FULL, "GatedConnector") as runner:
        consumer = Consumer(runner, producer[1], POISON[1])
        remote.land(*range(NUM_LAYERS - 1))
        launched = runner.stream.record
        monkeypatch.setattr(runner.stream, "record", lambda: land_after(launched(), remote))
        bits = consumer.load_step()
    assert (bits != producer[0][1][0]).any(), "the test cannot tell a lost race from a won one"


def land_after(event: Any, remote: Any) -> Any:
    """Let the last layer land only when the replay has ended, so that the step itself still ends well."""
    event.wait()
    remote.land_all()
    return event


def test_a_step_without_loads_never_waits_at_a_gate(model, producer, remote):
    """The timelines lag behind: nothing has landed for many steps, and gates that were not armed are open."""
    with open_runner(model, CUDAGraphMode.FULL, "GatedConnector") as runner:
        driver = RunnerDriver(runner)
        driver.add("r", PROMPT)
        tokens, bits = driver.generate("r", OUTPUTS)
    assert tokens == producer[0][0]
    np.testing.assert_array_equal(bits, producer[0][1])


def test_a_load_that_fails_opens_its_gate_and_names_the_blocks(model, producer, remote):
    remote.land_all()
    with open_runner(model, CUDAGraphMode.FULL, "FailingGatedConnector") as runner:
        consumer = Consumer(runner, producer[1], POISON[1])
        rows = consumer.load_rows()
        report = consumer.report
        assert runner.timelines.landed.failed(NUM_LAYERS - 1)
        assert not runner.timelines.landed.failed(0)
    assert report.invalid_block_ids == frozenset(consumer.promise.block_ids)
    assert "the peer is gone" in report.load_errors["r"]
    assert set(rows) >= set(COMPANIONS)


def test_a_load_that_stalls_at_a_gate_fails_at_its_deadline_and_the_replay_runs_to_its_end(model, producer, remote):
    clock = VirtualClock()
    with open_runner(model, CUDAGraphMode.FULL, "GatedConnector", clock) as runner, released(remote.land_all) as pool:
        consumer = Consumer(runner, producer[1], POISON[1])
        step = pool.submit(consumer.load_rows)
        remote.land(0)
        wait_until_written(runner, consumer, layer=0)
        assert not step.done()
        clock.advance(runner.config.kv_load_timeout)
        assert set(step.result(60)) >= set(COMPANIONS)
        assert consumer.report.invalid_block_ids == frozenset(consumer.promise.block_ids)


def test_a_gate_cannot_be_forced_on_a_connector_that_does_not_report(model, remote):
    with (
        pytest.raises(ConfigError, match=r"kv_load_wait is 'gate'.*OutsideConnector"),
        open_runner(model, CUDAGraphMode.FULL, "OutsideConnector", kv_load_wait="gate"),
    ):
        pass


def test_forcing_hooks_turns_full_replays_into_piecewise_ones(model, producer, remote):
    remote.land_all()
    with open_runner(model, CUDAGraphMode.FULL, "GatedConnector", kv_load_wait="hook") as runner:
        tokens, _ = Consumer(runner, producer[1], POISON[0]).generate()
    assert tokens == producer[0][0]
    assert set(remote.modes) == {CUDAGraphMode.PIECEWISE}
