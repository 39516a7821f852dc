"""Loads that requests wait for outside the steps, because they would stall the batch too long."""

import numpy as np
import pytest
from kv_support import Request
from test_peer_write import OURS, decode_params, park, wait_received

from interlock.core.forward_context import CUDAGraphMode
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connectors.peer import PeerConnector

TOKENS = list(range(100, 113))
BLOCKS = [5, 2, 7]
ALWAYS = 1e-9  # seconds: no load is predicted to be that short

pytestmark = pytest.mark.parametrize("transport", ["shared_memory", "nixl"], indirect=True)


def test_a_parked_load_lands_between_steps(engines):
    producer, consumer = engines(), engines(max_sync_load_seconds=ALWAYS)
    producer.fill(1)
    consumer.fill(2)
    before = consumer.snapshot()
    request = park(consumer, producer.prefill("p", TOKENS[:12], BLOCKS))
    output = wait_received(consumer)
    assert not output.failed_recving
    assert np.array_equal(consumer.positions(OURS, 0, 12), producer.positions(BLOCKS, 0, 12))
    assert int((consumer.snapshot() != before).sum()) <= 12 * consumer.kv.bytes_per_token
    assert consumer.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    consumer.scheduler.update_state_after_alloc(request, OURS, 0)
    ended = frozenset()
    while not ended:
        consumer.step()
        ended = producer.step().finished_sending


def test_a_load_that_is_predicted_to_be_short_is_not_parked(engines):
    producer, consumer = engines(), engines(max_sync_load_seconds=10.0)
    request = Request("d", TOKENS, 13, 0, producer.prefill("p", TOKENS[:12], BLOCKS))
    consumer.scheduler.on_new_request(request)
    assert consumer.scheduler.get_num_new_matched_tokens(request, 0) == (12, False)


def test_the_prediction_follows_what_was_measured(engines):
    producer, consumer = engines(), engines(max_sync_load_seconds=10.0)
    _, promises = consumer.admit("d", TOKENS, producer.prefill("p", TOKENS[:12], BLOCKS), OURS)
    assert not consumer.step(CUDAGraphMode.FULL, promises).load_errors
    consumer.step()
    speed = consumer.worker._worker_half.consumer.bytes_per_second
    assert speed is not None
    assert consumer.scheduler._scheduler_half.consumer.bytes_per_second == speed


def test_a_partial_local_hit_parks_the_rest(engines):
    producer, consumer = engines(), engines(max_sync_load_seconds=ALWAYS)
    producer.fill(1)
    consumer.fill(2)
    before = consumer.positions(OURS, 0, 4)
    park(consumer, producer.prefill("p", TOKENS[:12], BLOCKS), num_computed=4)
    wait_received(consumer)
    assert np.array_equal(consumer.positions(OURS, 4, 12), producer.positions(BLOCKS, 4, 12))
    assert np.array_equal(consumer.positions(OURS, 0, 4), before)


def test_a_parked_load_that_fails_says_so(engines):
    producer, consumer = engines(), engines(max_sync_load_seconds=ALWAYS)
    params = producer.prefill("p", TOKENS[:12], BLOCKS)
    producer.close()
    park(consumer, params)
    output = wait_received(consumer)
    assert output.failed_recving == {"d"}
    assert "cannot be reached" in output.load_errors["d"]


def test_a_push_that_never_comes_fails_with_the_time_that_it_had(push_pair):
    class OnTime(PeerConnector):
        clock = VirtualClock()

    producer, consumer = push_pair(connector=OnTime, lease_seconds=20.0)
    park(consumer, decode_params(producer))
    consumer.step()
    OnTime.clock.advance(20.0)
    output = wait_received(consumer)
    assert output.failed_recving == {"d"}
    assert "had not landed within 20 s (kv_load_timeout, or lease_seconds of what is pushed)" in output.load_errors["d"]


def test_an_abort_of_a_parked_load_ends_it_and_gives_the_reference_back(engines):
    producer, consumer = engines(), engines(max_sync_load_seconds=ALWAYS)
    request = park(consumer, producer.prefill("p", TOKENS[:12], BLOCKS))
    consumer.step()
    request.finish_reason = "abort"
    consumer.scheduler.request_finished(request, OURS)
    if request.request_id in consumer.worker._worker_half.consumer._parked:
        wait_received(consumer)
    ended = frozenset()
    while not ended:
        consumer.step()
        ended = producer.step().finished_sending


def test_a_reference_that_was_used_fails_at_once(engines):
    producer, consumer = engines(), engines(max_sync_load_seconds=ALWAYS)
    params = producer.prefill("p", TOKENS[:12], BLOCKS)
    park(consumer, params)
    wait_received(consumer)
    consumer.step()
    park(consumer, params, request_id="again")
    assert wait_received(consumer, "again").failed_recving == {"again"}


def test_kv_of_another_dtype_is_refused_at_the_handshake(engines, caplog):
    producer, consumer = engines(), engines(dtype="float32")
    _, promises = consumer.admit("d", TOKENS, producer.prefill("p", TOKENS[:12], BLOCKS), OURS)
    message = consumer.step(CUDAGraphMode.FULL, promises).load_errors["d"]
    assert "'float32'" in message
    assert "'bfloat16'" in message
