"""A load starts only after whatever was queued before its step has run, so that no older write to its blocks lands after it."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import held_kernels
import numpy as np
import outside_connector
import pytest
import stand_in_drafter
from runner_driver import RunnerDriver

from checkpoints import make_tiny_llama
from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.forward_context import BatchDescriptor, CUDAGraphMode
from interlock.core.step import LoadPromise
from interlock.graphs.stream import Event
from interlock.runner.model_runner import ModelRunner

BLOCK, NUM_LAYERS = 4, 2
MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
PROMPT = np.random.default_rng(3).integers(3, 250, 26).tolist()
COUNT = len(PROMPT) - 1
GATED, OUTSIDE, FAILING = "outside_connector:GatedConnector", "outside_connector:OutsideConnector", "outside_connector:FailingGatedConnector"
SECONDS = 60  # the longest wait for anything here: a broken order fails a test, and never hangs it
GARBAGE = 0x4E804E804E804E80  # bfloat16: a large finite number, four times


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=NUM_LAYERS)


@pytest.fixture
def remote():
    outside_connector.REMOTE.append(outside_connector.Remote(NUM_LAYERS))
    outside_connector.REMOTE[-1].land_all()
    yield outside_connector.REMOTE[-1]
    outside_connector.REMOTE.pop()


class Decision(threading.Event):
    """Also sets `decided`, which is set when it is known whether a load has waited or has started."""

    def __init__(self, decided: threading.Event) -> None:
        super().__init__()
        self._decided = decided

    def set(self) -> None:
        super().set()
        self._decided.set()


class Held:
    """A runner with work on its stream that does not run before `release`. ordered: False removes what makes loads wait for it.

    waits: set when a step waits for that work.
    """

    def __init__(self, model: str, mode: CUDAGraphMode, connector: str, *, ordered: bool) -> None:
        transfer = KVTransferConfig(kv_connector=connector, kv_load_failure_policy="recompute")
        sizes = {"block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20, "threads": 2}
        self.runner = ModelRunner(EngineConfig(model=model, cudagraph_mode=mode, kv_transfer_config=transfer, **sizes))
        self.driver = RunnerDriver(self.runner)
        self.word = Buffer.zeros((1,), "int64")
        self.decided = threading.Event()
        self.waits = Decision(self.decided)
        self.steps: list[Future[Any]] = []
        driver: Any = self.runner._kv
        driver.record = self._record if ordered else None
        # A former request, whose last step wrote a position that the next owner of its blocks loads.
        self.driver.add("former", PROMPT[:20])
        self.driver.step({"former": 20})
        self.driver.step({"former": 1})
        self.former_blocks = self.driver.blocks("former")
        self.driver.finish("former")
        self.forget()

    def forget(self) -> None:
        """Nothing is known yet of the load that comes."""
        self.waits.clear()
        self.decided.clear()

    def submit(self, counts: dict[str, int], promises: tuple[LoadPromise, ...] = ()) -> "Future[Any]":
        """Make a step on a thread of its own."""
        step: Future[Any] = Future()

        def run() -> None:
            try:
                step.set_result(self.driver.step(counts, promises))
            except BaseException as error:
                step.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        self.steps.append(step)
        return step

    def load_waits(self) -> bool:
        """Whether the load waits for what was queued before it; False if it has started, or if neither is known in time."""
        return self.decided.wait(SECONDS) and self.waits.is_set()

    def end(self) -> None:
        """Let the steps that were submitted end, whatever has become of the test."""
        self.release()
        wait(self.steps, SECONDS)
        self.runner.shutdown()

    def hold(self) -> None:
        kernel = held_kernels.hold_kernel()
        self.runner.stream.launch(kernel, kernel.pack(word=self.word))

    def fill(self, blocks: list[int], value: int) -> None:
        kernel = held_kernels.fill_kernel()
        for layer in self.runner.kv_cache.layers:
            words = layer.nbytes // layer.shape[0] // 8
            for block in blocks:
                memory = Buffer(layer.address + 8 * words * block, (words,), "int64", layer)
                self.runner.stream.launch(kernel, kernel.pack(words=memory, count=words, value=value))

    def repeat_last_step(self) -> None:
        """The trailing write of the former request: its last step once more."""
        with self.runner._kv.disabled():
            self.runner._graphs.launch(BatchDescriptor(1, 1, self.mode is CUDAGraphMode.FULL, self.mode))

    @property
    def mode(self) -> CUDAGraphMode:
        return self.driver.outputs[-1].cudagraph_runtime_mode

    def release(self) -> None:
        self.word.numpy()[0] = 1

    def _record(self) -> Any:
        return NotingEvent(self.runner.stream.record(), self.waits)


class NotingEvent:
    """Sets `waits` when somebody waits for an event that has not come."""

    def __init__(self, event: Event, waits: threading.Event) -> None:
        self._event, self._waits = event, waits

    def wait(self) -> bool:
        if not self._event.done:
            self._waits.set()
        return self._event.wait()


@contextlib.contextmanager
def held(model: str, mode: CUDAGraphMode, connector: str, *, ordered: bool = True) -> Iterator[Held]:
    scene = Held(model, mode, connector, ordered=ordered)
    try:
        yield scene
    finally:
        scene.end()


@pytest.fixture(scope="module")
def alone(model):
    """KV of the prompt per layer `[blocks, ...]`, and the tokens and logits that follow it."""
    runner = ModelRunner(EngineConfig(model=model, enforce_eager=True, block_size=BLOCK, kv_cache_memory_bytes=1 << 20, threads=1))
    driver = RunnerDriver(runner)
    driver.add("r", PROMPT)
    _, bits = driver.generate("r", 1)
    kv = [layer.numpy()[driver.blocks("r")].copy() for layer in runner.kv_cache.layers]
    runner.shutdown()
    return kv, bits[0]


def prepare_load(scene: Held, kv: list[Any], remote: Any) -> LoadPromise:
    """The request 'r', in the blocks of the former one, loads all but the prompt's last position."""
    blocks = scene.former_blocks
    remote.started = Decision(scene.decided)
    scene.driver.add("r", PROMPT, computed=COUNT)
    scene.driver.share_blocks("former", "r", len(blocks))
    promised = blocks[: -(-COUNT // BLOCK)]
    for pages, layer in zip(remote.pages, kv, strict=True):
        for index, block in enumerate(promised):
            stop = min(BLOCK, COUNT - index * BLOCK)
            pages[block] = [(slice(0, stop), layer[index, :, :, :stop])]
    return LoadPromise("r", 0, COUNT, tuple(promised))


def queue_write(scene: Held, promise: LoadPromise, write: str) -> None:
    if write == "zeros":
        scene.fill(list(promise.block_ids), 0)
    elif write == "garbage":
        scene.fill(list(promise.block_ids), GARBAGE)
    else:
        scene.repeat_last_step()


def loaded_bytes(scene: Held, promise: LoadPromise) -> list[Any]:
    kv = [np.concatenate(list(layer.numpy()[list(promise.block_ids)]), axis=2) for layer in scene.runner.kv_cache.layers]
    return [layer[:, :, :COUNT] for layer in kv]


@pytest.mark.parametrize("write", ["zeros", "garbage", "trailing step"])
@pytest.mark.parametrize("connector", [GATED, OUTSIDE])
@pytest.mark.parametrize("mode", MODES)
def test_a_write_that_an_earlier_step_queued_does_not_land_after_a_load(model, alone, remote, mode, connector, write):
    kv, bits = alone
    with held(model, mode, connector) as scene:
        promise = prepare_load(scene, kv, remote)
        scene.hold()
        queue_write(scene, promise, write)
        step = scene.submit({"r": 1}, (promise,))
        assert scene.load_waits(), "the load did not wait for what was queued before it"
        assert not remote.started.is_set()
        scene.release()
        np.testing.assert_array_equal(step.result(SECONDS)["r"], bits)
        for ours, theirs in zip(loaded_bytes(scene, promise), kv, strict=True):
            np.testing.assert_array_equal(ours, np.concatenate(list(theirs), axis=2)[:, :, :COUNT])


@pytest.mark.parametrize("write", ["zeros", "garbage", "trailing step"])
def test_negative_control_a_load_that_does_not_wait_is_wiped(model, alone, remote, write):
    kv, bits = alone
    with held(model, CUDAGraphMode.FULL, GATED, ordered=False) as scene:
        promise = prepare_load(scene, kv, remote)
        scene.hold()
        queue_write(scene, promise, write)
        stamp = scene.driver.next_step
        step = scene.submit({"r": 1}, (promise,))
        for layer in range(NUM_LAYERS):
            assert scene.runner.timelines.landed.wait(layer, stamp, SECONDS)
        scene.release()
        assert (step.result(SECONDS)["r"] != bits).any(), "the test cannot tell a wiped load from one that holds"


def test_a_block_whose_load_failed_behind_a_queued_write_is_recomputed_bit_for_bit(model, alone, remote):
    kv, bits = alone
    with held(model, CUDAGraphMode.FULL, FAILING) as scene:
        promise = prepare_load(scene, kv, remote)
        scene.hold()
        queue_write(scene, promise, "garbage")
        step = scene.submit({"r": 1}, (promise,))
        assert scene.load_waits()
        scene.release()
        step.result(SECONDS)
        report = scene.driver.outputs[-1].kv_connector_output
        assert report is not None
        assert report.invalid_block_ids == frozenset(promise.block_ids)
        scene.driver.finish("r")
        scene.driver.add("again", PROMPT)
        scene.driver.share_blocks("former", "again", len(scene.former_blocks))
        np.testing.assert_array_equal(scene.driver.step({"again": len(PROMPT)})["again"], bits)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [{}, {"companion": 1}])
@pytest.mark.parametrize("ordered", [True, False])
def test_asynchronous_loads_wait_too_and_the_negative_control_does_not(model, mode, counts, ordered):
    """What the connector finds in the block when it may start to load: the queued write has been made, or it is still to come."""
    with held(model, mode, "stand_in_drafter:PublishingConnector", ordered=ordered) as scene:
        scene.driver.add("companion", PROMPT)
        scene.driver.step({"companion": len(PROMPT)})
        block, found, started = scene.former_blocks[0], [], Decision(scene.decided)
        layer = scene.runner.kv_cache.layers[0].numpy()

        def look(context: Any) -> None:
            found.append(layer[block].copy())
            started.set()

        stand_in_drafter.MADE[-1].on_load = look
        scene.forget()
        scene.hold()
        scene.fill([block], GARBAGE)
        step = scene.submit(counts)
        assert scene.load_waits() is ordered
        assert started.is_set() is not ordered
        scene.release()
        step.result(SECONDS)
        assert bool((found[0] == GARBAGE & 0xFFFF).all()) is ordered
