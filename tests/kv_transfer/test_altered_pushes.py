"""WRITE mode: a transfer id that somebody guessed, or an answer that somebody altered, captures nothing and disturbs nobody."""

import numpy as np
import pytest
from kv_support import LAYERS, Request
from push_support import BLOCKS, OURS, TOKENS, OnVirtualTime, Prefill, decode_params, park, wait_for, wait_received

from interlock.core.errors import RequestError
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.handshake import PROTOCOL_VERSION, Announce, Announced, Hello, describe_pool
from interlock.kv_transfer.references import TransferName, token_digest
from interlock.kv_transfer.transports.channel import Channel
from interlock.kv_transfer.transports.desk import introduce
from interlock.kv_transfer.transports.transport import PeerAddress

OTHERS = [7] * 13
OTHER_BLOCKS, THEIR_BLOCKS = [9, 10, 11, 12], [2, 4, 5, 7]

over_both_transports = pytest.mark.parametrize("transport", ["shared_memory", "nixl"], indirect=True)


def announced(producer):
    return list(producer.worker._worker_half.sender._early)


@over_both_transports
@pytest.mark.parametrize("prompt", [OTHERS, TOKENS[:5], [*TOKENS, 1]], ids=["another", "the beginning", "a longer one"])
def test_a_guessed_transfer_id_does_not_capture_the_push_of_its_owner(push_pair, monkeypatch, prompt):
    monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())
    producer, consumer = push_pair({"connector": OnVirtualTime}, connector=OnVirtualTime)
    producer.fill(1)
    consumer.fill(2)
    before = consumer.positions(THEIR_BLOCKS, 0, 12)
    park(consumer, decode_params(producer), tokens=prompt, blocks=THEIR_BLOCKS, request_id="guesser")
    consumer.step()
    wait_for(lambda: len(announced(producer)) == 1)
    park(consumer, decode_params(producer))
    consumer.step()
    wait_for(lambda: len(announced(producer)) == 2)
    prefill = Prefill(producer)
    prefill.chunk(13)
    assert prefill.finish()[0]
    assert not wait_received(consumer).failed_recving
    assert np.array_equal(consumer.positions(OURS, 0, 12), producer.positions(BLOCKS, 0, 12))
    consumer.step()
    prefill.wait_end()
    OnVirtualTime.clock.advance(31.0)
    assert wait_received(consumer, "guesser").failed_recving == {"guesser"}
    assert np.array_equal(consumer.positions(THEIR_BLOCKS, 0, 12), before)


@over_both_transports
def test_a_request_that_guessed_a_transfer_id_does_not_end_its_lease(push_pair):
    producer, consumer = push_pair()
    prefill = Prefill(producer)
    prefill.chunk(13)
    assert prefill.finish()[0]
    request = park(consumer, decode_params(producer), tokens=OTHERS, request_id="guesser")
    consumer.step()
    wait_for(lambda: announced(producer))
    request.finish_reason = "abort"
    consumer.scheduler.request_finished(request, OURS)
    wait_received(consumer, "guesser")
    consumer.step()
    consumer.worker.shutdown()  # returns when every notice has been sent
    for _ in range(3):
        assert not producer.step().finished_sending
    assert producer.worker._worker_half.leases.held == 1


@over_both_transports
def test_a_prefill_of_the_same_transfer_id_and_another_prompt_is_another_transfer(push_pair):
    producer, consumer = push_pair()
    producer.fill(1)
    guesser = Prefill(producer, tokens=OTHERS, blocks=OTHER_BLOCKS, request_id="guesser")
    guesser.chunk(13)
    park(consumer, decode_params(producer))
    consumer.step()
    wait_for(lambda: announced(producer))
    prefill = Prefill(producer)
    prefill.chunk(13)
    assert prefill.finish()[0]
    assert guesser.finish()[0]
    assert not wait_received(consumer).failed_recving
    assert np.array_equal(consumer.positions(OURS, 0, 12), producer.positions(BLOCKS, 0, 12))
    consumer.step()
    prefill.wait_end()
    assert producer.worker._worker_half.leases.held == 1


@over_both_transports
def test_without_the_prompt_in_its_name_a_push_would_go_to_whoever_names_its_id(push_pair, monkeypatch):
    """The negative control: names are ids alone, as if nothing bound them to a prompt."""
    producer, consumer = push_pair()
    producer.fill(1)
    monkeypatch.setattr(
        "interlock.kv_transfer.connectors.push_sender._name",
        lambda announcement: TransferName(announcement.transfer_id, len(TOKENS), token_digest(TOKENS)),
    )
    park(consumer, decode_params(producer), tokens=OTHERS)
    consumer.step()
    wait_for(lambda: announced(producer))
    Prefill(producer).chunk(13)
    assert not wait_received(consumer).failed_recving
    assert np.array_equal(consumer.positions(OURS, 0, 12), producer.positions(BLOCKS, 0, 12))


@over_both_transports
@pytest.mark.parametrize("change", [{"transfer_id": "other"}, {"remote_signature": "0" * 64}])
def test_an_altered_answer_is_refused_before_anything_is_announced(push_pair, change):
    producer, consumer = push_pair()
    prefill = Prefill(producer)
    prefill.chunk(13)
    _, params = prefill.finish()
    park(consumer, params | change)
    output = wait_received(consumer)
    assert output.failed_recving == {"d"}
    assert not announced(producer)
    assert producer.worker._worker_half.leases.held == 1
    park(consumer, params, request_id="true")
    assert not wait_received(consumer, "true").failed_recving


def test_an_answer_for_another_prompt_is_refused(push_pair):
    producer, consumer = push_pair()
    prefill = Prefill(producer)
    prefill.chunk(13)
    _, params = prefill.finish()
    with pytest.raises(RequestError, match="token_digest"):
        park(consumer, params, tokens=OTHERS)


def test_a_transfer_id_is_not_taken_again_before_its_blocks_are_given_back(push_pair):
    producer, _ = push_pair()
    prefill = Prefill(producer)
    prefill.chunk(13)
    assert prefill.finish()[0]
    again = Request("p-again", TOKENS, len(TOKENS), 0, prefill.request.kv_transfer_params, None, OTHER_BLOCKS)
    with pytest.raises(RequestError, match="uses already"):
        producer.scheduler.on_new_request(again)


def announcement(consumer, **changes):
    """For the blocks of a consumer, as it would make it."""
    worker = consumer.worker._worker_half
    fields = {
        "transfer_id": "tx",
        "nonce": 1,
        "engine_id": consumer.worker.kv_transfer_config.engine_id,
        "rank": 0,
        "epoch": worker.epoch,
        "host": worker._transport.host,
        "port": worker._transport.port,
        "start": 0,
        "stop": 12,
        "block_ids": OURS[:3],
        "num_tokens": len(TOKENS),
        "token_digest": token_digest(TOKENS),
    }
    return Announce(**(fields | changes))


@over_both_transports
@pytest.mark.parametrize("is_of_this_life", [True, False])
def test_blocks_that_were_announced_in_another_life_of_the_consumer_are_not_written(push_pair, is_of_this_life):
    producer, consumer = push_pair()
    producer.fill(1)
    params, worker = decode_params(producer), consumer.worker._worker_half
    where = PeerAddress(params["remote_engine_id"], 0, params["remote_host"], params["remote_port"])
    assert worker.pools.ask(where, announcement(consumer, epoch=worker.epoch + (not is_of_this_life)), lambda: False) == Announced()
    told = []
    worker.receiver.notified = worker.receiver.pushed = told.append
    before = consumer.snapshot()
    Prefill(producer).chunk(13)
    sender = producer.worker._worker_half.sender
    wait_for(lambda: len(told) == len(LAYERS) if is_of_this_life else sender.failed)
    written = not np.array_equal(consumer.snapshot(), before)
    assert written == (is_of_this_life and producer.worker._worker_half._transport.writes)


def test_a_peer_announces_no_blocks_but_its_own(push_pair):
    producer, consumer = push_pair()
    engine_id = producer.worker.kv_transfer_config.engine_id
    hello = Hello(version=PROTOCOL_VERSION, engine_id="me", pool=describe_pool(producer.kv))
    channel = Channel.connect(engine_id, 0)
    introduce(channel.send, lambda: channel.receive(5.0, lambda: False), engine_id, hello, None)
    channel.send(announcement(consumer))
    wait_for(lambda: not channel.alive)
    channel.close()
    assert not announced(producer)
    assert producer.worker._worker_half.desk.malformed == 1
