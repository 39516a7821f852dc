"""WRITE mode: layers leave as they are written, land where they were announced, and nowhere else."""

import numpy as np
import pytest
from kv_support import LAYERS, Request, run_in_thread
from push_support import (
    BLOCKS,
    GATED,
    OURS,
    TOKENS,
    OnVirtualTime,
    Prefill,
    assert_handed_over,
    decode_params,
    park,
    wait_for,
    wait_received,
)

from interlock.core.errors import RequestError
from interlock.core.forward_context import CUDAGraphMode
from interlock.kv_transfer.clock import VirtualClock

pytestmark = pytest.mark.parametrize("transport", ["shared_memory", "nixl", "tcp"], indirect=True)


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8), (2, 4)])
@pytest.mark.parametrize("order", ["decode first", "prefill first"])
def test_both_legs_meet_whichever_comes_first_and_whatever_the_block_sizes(push_pair, sizes, order):
    producer, consumer = push_pair({"block_size": sizes[0]}, block_size=sizes[1])
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


def test_a_layer_lands_while_later_layers_are_being_computed(push_pair):
    producer, consumer = push_pair(max_sync_load_seconds=GATED)
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


def test_only_positions_with_kv_leave_with_a_chunk(push_pair):
    producer, consumer = push_pair()
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


@pytest.mark.parametrize("num_computed", [4, 8])
def test_positions_that_the_consumer_has_are_not_pushed(push_pair, num_computed):
    producer, consumer = push_pair()
    producer.fill(1)
    consumer.fill(2)
    before = consumer.positions(OURS, 0, num_computed)
    park(consumer, decode_params(producer), num_computed=num_computed)
    prefill = Prefill(producer)
    prefill.chunk(13)
    wait_received(consumer)
    assert_handed_over(producer, consumer, num_computed)
    assert np.array_equal(consumer.positions(OURS, 0, num_computed), before)


def test_a_full_local_hit_announces_nothing_and_releases_the_producer(push_pair):
    producer, consumer = push_pair()
    prefill = Prefill(producer)
    prefill.chunk(13)
    _, params = prefill.finish()
    request = Request("d", TOKENS, 13, 12, params, None, OURS)
    consumer.scheduler.on_new_request(request)
    assert consumer.scheduler.get_num_new_matched_tokens(request, 12) == (0, False)
    consumer.scheduler.update_state_after_alloc(request, OURS, 0)
    consumer.step()
    prefill.wait_end()


def test_a_prefill_preempted_in_its_last_step_pushes_again_from_other_blocks(push_pair):
    producer, consumer = push_pair()
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
def test_a_prefill_that_ends_badly_fails_the_load(push_pair, reason):
    producer, consumer = push_pair()
    park(consumer, decode_params(producer))
    consumer.step()
    prefill = Prefill(producer)
    prefill.chunk(5)
    prefill.request.finish_reason = reason
    assert producer.scheduler.request_finished(prefill.request, BLOCKS) == (True, None)  # they may be being read
    assert producer.scheduler.has_pending_push_work()
    prefill.wait_end()
    assert not producer.scheduler.has_pending_push_work()
    assert wait_received(consumer).failed_recving == {"d"}
    assert not consumer.worker._worker_half.receiver._incoming


def test_an_abort_stops_the_producer_before_the_blocks_are_reported(push_pair):
    producer, consumer = push_pair()
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


def test_nobody_there(push_pair):
    producer, consumer = push_pair()
    params = decode_params(producer)
    producer.close()
    park(consumer, params)
    assert wait_received(consumer).failed_recving == {"d"}


def test_a_producer_that_goes_away_fails_the_load(push_pair):
    producer, consumer = push_pair()
    park(consumer, decode_params(producer))
    consumer.step()
    Prefill(producer).chunk(5)
    producer.close()
    assert wait_received(consumer).failed_recving == {"d"}


def test_a_transfer_id_in_use_is_refused(push_pair):
    producer, _ = push_pair()
    Prefill(producer)
    with pytest.raises(RequestError, match="uses already"):
        Prefill(producer)


def test_told_of_a_layer_before_its_last_byte_the_consumer_would_take_what_is_not_there(push_pair, monkeypatch):
    """The negative control: without the wait for the layer's KV write, what lands is not what was computed."""
    producer, consumer = push_pair()
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


def test_pushes_under_full_load_in_random_order_of_both_legs_land_whole(push_pair):
    producer, consumer = push_pair()
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


def test_a_push_that_never_begins_is_given_up_and_the_producer_forgets_it(push_pair, monkeypatch):
    monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())
    producer, consumer = push_pair({"connector": OnVirtualTime}, connector=OnVirtualTime)
    producer.step()
    park(consumer, decode_params(producer))
    assert not consumer.step().finished_recving
    sender = producer.worker._worker_half.sender
    wait_for(lambda: bool(sender._early))
    OnVirtualTime.clock.advance(31.0)
    assert wait_received(consumer).failed_recving == {"d"}
    wait_for(lambda: not sender._early)


@pytest.mark.parametrize("lands", [True, False])
def test_who_gives_a_push_up_while_its_end_is_told_still_finds_it(push_pair, lands):
    """A load that has transfers open is either waited for or reported later; else its blocks would be kept for ever."""
    producer, consumer = push_pair(max_sync_load_seconds=GATED)
    receiver, end, found = consumer.worker._worker_half.receiver, consumer.ledger.end_transfer, []

    def end_transfer(transfer, error=None):
        found.append([incoming.quiescent.is_set() for incoming in receiver._incoming.values()])
        end(transfer, error)

    consumer.ledger.end_transfer = end_transfer
    _, promises = consumer.admit("d", TOKENS, decode_params(producer), OURS)
    thread, results = run_in_thread(lambda: consumer.step(CUDAGraphMode.FULL, promises))
    prefill = Prefill(producer)
    prefill.chunk(13 if lands else 8)
    if not lands:
        prefill.finish("abort")
    thread.join()
    assert (results[0].invalid_block_ids == frozenset()) == lands
    assert found == [[False]] * len(LAYERS)


def test_a_push_that_stalls_past_the_deadline_of_its_step_is_stopped_at_the_producer(push_pair, monkeypatch):
    monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())
    producer, consumer = push_pair({"connector": OnVirtualTime}, connector=OnVirtualTime, max_sync_load_seconds=GATED, timeout=5.0)
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
    wait_for(lambda: not consumer.worker._worker_half.receiver._incoming)  # at once, or soon after the step: it is stopped
    before = consumer.snapshot()
    for layer in (1, 2):
        prefill.write(layer)
    prefill.end()
    prefill.finish()
    consumer.step()
    prefill.wait_end()
    assert np.array_equal(consumer.snapshot(), before)


def test_an_announcement_for_another_prompt_gets_nothing_of_a_transfer_of_the_same_id(push_pair, monkeypatch):
    monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())
    producer, consumer = push_pair({"connector": OnVirtualTime}, connector=OnVirtualTime)
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


def test_a_lease_that_ends_while_its_blocks_are_being_pushed_keeps_them_until_they_are_not(push_pair, monkeypatch):
    monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())
    producer, _ = push_pair({"connector": OnVirtualTime})
    half = producer.worker._worker_half
    prefill = Prefill(producer)
    prefill.chunk(13)
    assert prefill.finish()[0]
    OnVirtualTime.clock.advance(3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(half.sender, "end", lambda transfer, reason: False)
        for _ in range(3):
            assert not producer.step().finished_sending
    assert producer.step().finished_sending == {"p-tx"}
    assert not producer.step().finished_sending


def test_what_reads_blocks_that_are_given_up_has_stopped_before_they_have_another_generation(push_pair, monkeypatch):
    producer, _ = push_pair()
    half = producer.worker._worker_half
    prefill = Prefill(producer)
    prefill.chunk(5)
    before, seen = half._control.generations[BLOCKS].tolist(), []
    monkeypatch.setattr(half.sender, "withdraw", lambda transfers: seen.append((len(transfers), half._control.generations[BLOCKS].tolist())))
    producer.scheduler.request_preempted(prefill.request)
    prefill.request.num_computed_tokens, prefill.request.block_ids = 0, []
    producer.step()
    assert seen == [(1, before)]
    assert half._control.generations[BLOCKS].tolist() != before
