"""WRITE mode: layers leave as they are written, land where they were announced, and nowhere else."""

import threading

import numpy as np
import pytest
from kv_support import LAYERS, Request, run_in_thread
from peer_support import PeerEngine

from interlock.core.errors import RequestError
from interlock.core.forward_context import CUDAGraphMode
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connectors.peer import PeerConnector

TOKENS = list(range(100, 113))
BLOCKS, OURS = [5, 2, 7, 4], [1, 6, 3, 8]
GATED = float("inf")  # as max_sync_load_seconds: pushes are consumed by the step, at its gates

pytestmark = pytest.mark.parametrize("transport", ["shared_memory", "nixl"], indirect=True)


@pytest.fixture
def make(engines):
    """`make(consumer options)`: a producer and a consumer."""

    def pair(producer=None, **options):
        wanted = {"mode": "write", "num_blocks": 16}
        return engines("kv_producer", **(wanted | (producer or {}))), engines("kv_consumer", **(wanted | options))

    return pair


class Prefill:
    """A request that the producer computes, step by step, with its KV written layer by layer by the test."""

    def __init__(self, engine: PeerEngine, transfer_id: str = "tx", tokens=TOKENS, blocks=BLOCKS):
        if not engine.steps:
            engine.step()
        self.engine, self.transfer_id = engine, transfer_id
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        self.request = Request(f"p-{transfer_id}", list(tokens), len(tokens), 0, params, None, list(blocks))
        engine.scheduler.on_new_request(self.request)
        self.kv = None

    def begin(self, count):
        """A step that computes `count` tokens is launched; nothing of it is written yet."""
        self.kv = self.engine.begin_step(CUDAGraphMode.NONE, scheduled={self.request.request_id: (self.request.num_computed_tokens, count)})
        self.count = count

    def write(self, layer):
        """The running step has written a layer."""
        self.engine.written.advance(layer, self.engine.steps)

    def end(self):
        output = self.engine.end_step(self.kv)
        self.engine.scheduler.update_connector_output(output)
        self.request.num_computed_tokens += self.count
        return output

    def chunk(self, count):
        self.begin(count)
        for layer in range(len(LAYERS)):
            self.write(layer)
        return self.end()

    def finish(self, reason="length"):
        self.request.finish_reason = reason
        keep, params = self.engine.scheduler.request_finished(self.request, self.request.block_ids)
        self.engine.step()
        return keep, params

    def wait_end(self):
        """The consumer has said that it needs the blocks no longer."""
        ended = frozenset()
        while self.request.request_id not in ended:
            ended = self.engine.step().finished_sending


def decode_params(producer, transfer_id="tx"):
    host, port = producer.worker._worker_half._transport.host, producer.worker._worker_half._transport.port
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": producer.worker.kv_transfer_config.engine_id,
        "remote_host": host,
        "remote_port": port,
    }


def wait_received(consumer, request_id="d"):
    """Steps, as an engine makes them while a request waits for its KV; the results."""
    while True:
        output = consumer.step()
        if request_id in output.finished_recving:
            return output


def park(consumer, params, tokens=TOKENS, num_computed=0, blocks=OURS, request_id="d"):
    request = Request(request_id, list(tokens), len(tokens), num_computed, params, None, list(blocks))
    consumer.scheduler.on_new_request(request)
    matched, is_async = consumer.scheduler.get_num_new_matched_tokens(request, num_computed)
    assert is_async
    consumer.scheduler.update_state_after_alloc(request, blocks, matched)
    return request


def assert_handed_over(producer, consumer, start=0, stop=12):
    assert np.array_equal(consumer.positions(OURS, start, stop), producer.positions(BLOCKS, start, stop))


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8), (2, 4)])
@pytest.mark.parametrize("order", ["decode first", "prefill first"])
def test_both_legs_meet_whichever_comes_first_and_whatever_the_block_sizes(make, sizes, order):
    producer, consumer = make({"block_size": sizes[0]}, block_size=sizes[1])
    producer.fill(1)
    consumer.fill(2)
    before = consumer.snapshot()
    blocks = [9, 4, 5, 1, 11, 3, 2][: -(-13 // sizes[0])]
    ours = [6, 7, 1, 3, 12][: -(-13 // sizes[1])]
    if order == "decode first":
        request = park(consumer, decode_params(producer), blocks=ours)
        consumer.step()
    prefill = Prefill(producer, blocks=blocks)
    prefill.chunk(5)
    prefill.chunk(8)
    keep, params = prefill.finish()
    assert keep
    assert params["transfer_mode"] == "push"
    if order == "prefill first":
        request = park(consumer, params, blocks=ours)
    output = wait_received(consumer)
    assert not output.failed_recving
    assert np.array_equal(consumer.positions(ours, 0, 12), producer.positions(blocks, 0, 12))
    assert int((consumer.snapshot() != before).sum()) <= 12 * consumer.kv.bytes_per_token
    assert not consumer.scheduler.get_num_new_matched_tokens(request, 0)[0]
    consumer.step()
    prefill.wait_end()


def test_a_layer_lands_while_later_layers_are_being_computed(make):
    producer, consumer = make(max_sync_load_seconds=GATED)
    producer.fill(1)
    _, promises = consumer.admit("d", TOKENS, decode_params(producer), OURS)
    kv = consumer.begin_step(CUDAGraphMode.NONE, promises)
    prefill = Prefill(producer)
    prefill.begin(13)
    prefill.write(0)
    consumer.driver.before_layer(0)
    assert_handed_over_layer(producer, consumer, 0)
    assert producer.written.value(1) == 0
    waiting, _ = run_in_thread(lambda: consumer.driver.before_layer(1))
    assert consumer.ledger.unfinished_block_ids(kv.context.step) == set(OURS[:3])
    assert waiting.is_alive()
    for layer in (1, 2):
        prefill.write(layer)
    waiting.join()
    assert not consumer.end_step(kv).load_errors
    prefill.end()
    assert_handed_over(producer, consumer)


def assert_handed_over_layer(producer, consumer, layer):
    ours, theirs = consumer.positions(OURS, 0, 12), producer.positions(BLOCKS, 0, 12)
    assert np.array_equal(ours[layer], theirs[layer])


def test_only_positions_with_kv_leave_with_a_chunk(make):
    producer, consumer = make()
    producer.fill(1)
    consumer.fill(2)
    before = consumer.positions(OURS, 0, 12)
    park(consumer, decode_params(producer))
    consumer.step()
    prefill = Prefill(producer)
    prefill.chunk(5)
    wait_for(lambda: np.array_equal(consumer.positions(OURS, 0, 5), producer.positions(BLOCKS, 0, 5)))
    assert np.array_equal(consumer.positions(OURS, 5, 12), before[:, :, :, 5:])
    assert not consumer.step().finished_recving
    prefill.chunk(8)
    wait_received(consumer)
    assert_handed_over(producer, consumer)


def wait_for(condition):
    done = threading.Event()
    while not condition():
        done.wait(0.001)


@pytest.mark.parametrize("num_computed", [4, 8])
def test_positions_that_the_consumer_has_are_not_pushed(make, num_computed):
    producer, consumer = make()
    producer.fill(1)
    consumer.fill(2)
    before = consumer.positions(OURS, 0, num_computed)
    park(consumer, decode_params(producer), num_computed=num_computed)
    prefill = Prefill(producer)
    prefill.chunk(13)
    wait_received(consumer)
    assert_handed_over(producer, consumer, num_computed)
    assert np.array_equal(consumer.positions(OURS, 0, num_computed), before)


def test_a_full_local_hit_announces_nothing_and_releases_the_producer(make):
    producer, consumer = make()
    prefill = Prefill(producer)
    prefill.chunk(13)
    _, params = prefill.finish()
    request = Request("d", TOKENS, 13, 12, params, None, OURS)
    consumer.scheduler.on_new_request(request)
    assert consumer.scheduler.get_num_new_matched_tokens(request, 12) == (0, False)
    consumer.scheduler.update_state_after_alloc(request, OURS, 0)
    consumer.step()
    prefill.wait_end()


def test_a_prefill_preempted_in_its_last_step_pushes_again_from_other_blocks(make):
    producer, consumer = make()
    producer.fill(1)
    park(consumer, decode_params(producer))
    consumer.step()
    prefill = Prefill(producer)
    prefill.chunk(5)
    prefill.begin(8)
    prefill.write(0)
    prefill.end()
    producer.scheduler.request_preempted(prefill.request)
    prefill.request.num_computed_tokens, prefill.request.block_ids = 0, []
    producer.step()
    producer.pool.buffer.numpy()[:] = 0xEE  # the old blocks are another's now
    producer.fill(1)
    moved = [11, 12, 13, 14]
    for layer in LAYERS:
        view = producer.caches[layer].numpy()
        view[moved] = view[BLOCKS]
        view[BLOCKS] = 0
    expected = producer.positions(moved, 0, 12)
    prefill.request.block_ids = moved
    prefill.chunk(13)
    assert not wait_received(consumer).failed_recving
    assert np.array_equal(consumer.positions(OURS, 0, 12), expected)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_prefill_that_ends_badly_fails_the_load(make, reason):
    producer, consumer = make()
    park(consumer, decode_params(producer))
    consumer.step()
    prefill = Prefill(producer)
    prefill.chunk(5)
    assert prefill.finish(reason) == (False, None)
    assert wait_received(consumer).failed_recving == {"d"}
    assert not consumer.worker._worker_half.receiver._incoming


def test_an_abort_stops_the_producer_before_the_blocks_are_reported(make):
    producer, consumer = make()
    producer.fill(1)
    request = park(consumer, decode_params(producer))
    prefill = Prefill(producer)
    prefill.chunk(5)
    consumer.step()
    request.finish_reason = "abort"
    consumer.scheduler.request_finished(request, OURS)
    assert wait_received(consumer).failed_recving == {"d"}
    after = consumer.snapshot()
    prefill.chunk(8)
    prefill.finish()
    consumer.step()
    prefill.wait_end()
    assert np.array_equal(consumer.snapshot(), after)


def test_nobody_there(make):
    producer, consumer = make()
    params = decode_params(producer)
    producer.close()
    park(consumer, params)
    assert wait_received(consumer).failed_recving == {"d"}


def test_a_producer_that_goes_away_fails_the_load(make):
    producer, consumer = make()
    park(consumer, decode_params(producer))
    consumer.step()
    Prefill(producer).chunk(5)
    producer.close()
    assert wait_received(consumer).failed_recving == {"d"}


def test_a_transfer_id_in_use_is_refused(make):
    producer, _ = make()
    Prefill(producer)
    with pytest.raises(RequestError, match="uses already"):
        Prefill(producer)


def test_told_of_a_layer_before_its_last_byte_the_consumer_would_take_what_is_not_there(make, monkeypatch):
    """The negative control: without the wait for the layer's KV write, what lands is not what was computed."""
    producer, consumer = make()
    producer.fill(1)
    monkeypatch.setattr(producer.worker._worker_half.sender, "_wait_written", lambda push, layer, stamp: True)
    park(consumer, decode_params(producer))
    consumer.step()
    prefill = Prefill(producer)
    prefill.begin(13)
    assert not wait_received(consumer).failed_recving
    producer.fill(9)  # the step writes its KV only now
    prefill.end()
    assert not np.array_equal(consumer.positions(OURS, 0, 12), producer.positions(BLOCKS, 0, 12))


def test_pushes_under_full_load_in_random_order_of_both_legs_land_whole(make):
    producer, consumer = make()
    producer.fill(1)
    rng = np.random.default_rng(3)
    for round_number in range(10):
        transfer_id = f"tx-{round_number}"
        decode_first = bool(rng.integers(2))
        if decode_first:
            park(consumer, decode_params(producer, transfer_id), request_id=transfer_id)
            consumer.step()
        prefill = Prefill(producer, transfer_id)
        for count in (4, 4, 5):
            prefill.chunk(count)
        prefill.finish()
        if not decode_first:
            park(consumer, decode_params(producer, transfer_id), request_id=transfer_id)
        assert not wait_received(consumer, transfer_id).failed_recving
        assert_handed_over(producer, consumer)
        consumer.step()
        prefill.wait_end()
        consumer.fill(2 + round_number)


class OnVirtualTime(PeerConnector):
    """A connector whose clock the test moves."""


def test_a_push_that_never_begins_is_given_up_and_the_producer_forgets_it(make, monkeypatch):
    monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())
    producer, consumer = make({"connector": OnVirtualTime}, connector=OnVirtualTime)
    producer.step()
    park(consumer, decode_params(producer))
    assert not consumer.step().finished_recving
    sender = producer.worker._worker_half.sender
    wait_for(lambda: bool(sender._early))
    OnVirtualTime.clock.advance(31.0)
    assert wait_received(consumer).failed_recving == {"d"}
    assert not sender._early


def test_a_push_that_stalls_past_the_deadline_of_its_step_is_stopped_at_the_producer(make, monkeypatch):
    monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())
    producer, consumer = make({"connector": OnVirtualTime}, connector=OnVirtualTime, max_sync_load_seconds=GATED, timeout=5.0)
    producer.fill(1)
    _, promises = consumer.admit("d", TOKENS, decode_params(producer), OURS)
    thread, results = run_in_thread(lambda: consumer.step(CUDAGraphMode.FULL, promises))
    prefill = Prefill(producer)
    prefill.begin(13)
    prefill.write(0)
    wait_for(lambda: np.array_equal(consumer.positions(OURS, 0, 12)[0], producer.positions(BLOCKS, 0, 12)[0]))
    OnVirtualTime.clock.advance(5.0)
    thread.join()
    assert results[0].invalid_block_ids == set(OURS[:3])
    assert not results[0].pending_block_ids
    before = consumer.snapshot()
    for layer in (1, 2):
        prefill.write(layer)
    prefill.end()
    prefill.finish()
    consumer.step()
    prefill.wait_end()
    assert np.array_equal(consumer.snapshot(), before)


def test_an_announcement_for_another_prompt_gets_nothing_of_a_transfer_of_the_same_id(make, monkeypatch):
    monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())
    producer, consumer = make({"connector": OnVirtualTime}, connector=OnVirtualTime)
    producer.fill(1)
    consumer.fill(2)
    before = consumer.snapshot()
    park(consumer, decode_params(producer))
    assert not consumer.step().finished_recving
    wait_for(lambda: producer.worker._worker_half.sender._early)
    prefill = Prefill(producer, tokens=[7] * 13)
    prefill.chunk(13)
    assert prefill.finish()[0]
    OnVirtualTime.clock.advance(29.0)
    OnVirtualTime.clock.advance(2.0)
    assert wait_received(consumer).failed_recving == {"d"}
    assert np.array_equal(consumer.snapshot(), before)
