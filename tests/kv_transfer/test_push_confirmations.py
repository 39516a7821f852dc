"""WRITE mode: what counts as pushed, of which life of the producer, and when it has ended."""

import threading

import numpy as np
import pytest
from kv_support import LAYERS
from peer_support import PeerEngine
from push_support import BLOCKS, OURS, OnVirtualTime, Prefill, assert_handed_over, decode_params, park, wait_for, wait_received

from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connectors import push_receiver, push_sender
from interlock.kv_transfer.connectors.push_receiver import PushReceiver
from interlock.kv_transfer.handshake import Pushed, encode
from interlock.kv_transfer.transports.nixl_memory import NixlMemory, NixlTransfer
from interlock.kv_transfer.transports.peer_client import PeerPool, peer_of

over_nixl = pytest.mark.parametrize("transport", ["nixl", "tcp"], indirect=True)
over_all = pytest.mark.parametrize("transport", ["shared_memory", "nixl", "tcp"], indirect=True)


def hold_watch(consumer):
    """An event: whether a producer is alive is not known before it."""
    pools, known = consumer.worker._worker_half.receiver._pools, threading.Event()
    is_alive = pools.is_alive
    pools.is_alive = lambda peer: known.wait() and is_alive(peer)
    return known


@pytest.fixture
def restart(push_pair):
    """`restart(producer)`: it ends, and begins another life under its id."""
    lives = []

    def again(producer):
        producer.close()
        lives.append(PeerEngine(producer.worker.kv_transfer_config.engine_id, "kv_producer", mode="write", num_blocks=16))
        lives[-1].fill(9)
        lives[-1].step()
        return lives[-1]

    yield again
    while lives:
        lives.pop().close()


class HeldCopies:
    """All layers have been pushed, and the consumer copies none of them before the test lets it."""

    def __init__(self, producer, consumer):
        self.release, arrived, pushed = threading.Event(), threading.Event(), []
        receiver = consumer.worker._worker_half.receiver
        copy, take = receiver._copy, receiver.pushed

        def held(incoming, message):
            arrived.set()
            self.release.wait()
            copy(incoming, message)

        def taken(message):
            take(message)
            pushed.append(message)

        receiver._copy, receiver.pushed = held, taken
        park(consumer, decode_params(producer))
        consumer.step()
        self.prefill = Prefill(producer)
        self.prefill.chunk(13)
        arrived.wait()
        wait_for(lambda: len(pushed) == len(LAYERS))


class TestAnotherLife:
    def restart_under_copies(self, push_pair, restart, monkeypatch):
        """The consumer reaches the new life with its first copy."""
        monkeypatch.setattr(push_receiver, "_WATCH_SECONDS", 3600.0)  # nobody else notices that the old one is gone
        producer, consumer = push_pair()
        producer.fill(1)
        copies = HeldCopies(producer, consumer)
        before, now = consumer.snapshot(), restart(producer)
        copies.release.set()
        return before, now, consumer, wait_received(consumer)

    def test_kv_of_another_life_of_the_producer_is_not_what_was_promised(self, push_pair, restart, monkeypatch):
        before, _, consumer, output = self.restart_under_copies(push_pair, restart, monkeypatch)
        assert output.failed_recving == {"d"}
        assert np.array_equal(consumer.snapshot(), before)

    def test_without_the_life_in_which_it_was_announced_it_would_be_taken(self, push_pair, restart, monkeypatch):
        """The negative control: whichever life answers is taken to be the one that was told."""

        def meet_any(receiver, incoming):
            incoming.pool = receiver._pools.get(peer_of(incoming.reference), lambda: False)
            return incoming.pool

        monkeypatch.setattr(PushReceiver, "_meet", meet_any)
        _, now, consumer, output = self.restart_under_copies(push_pair, restart, monkeypatch)
        assert not output.failed_recving
        assert_handed_over(now, consumer)

    def test_what_was_announced_to_an_earlier_life_ends_although_others_have_met_the_new_one(self, push_pair, restart, monkeypatch):
        monkeypatch.setattr(OnVirtualTime, "clock", VirtualClock())  # it never comes to its deadline
        producer, consumer = push_pair(connector=OnVirtualTime)
        producer.step()
        met = hold_watch(consumer)
        park(consumer, decode_params(producer))
        consumer.step()
        wait_for(lambda: producer.worker._worker_half.sender._early)
        now = restart(producer)
        park(consumer, decode_params(now, "tx-new"), blocks=[9, 10, 11, 12], request_id="new")
        consumer.step()
        wait_for(lambda: now.worker._worker_half.sender._early)
        met.set()
        assert wait_received(consumer).failed_recving == {"d"}
        Prefill(now, "tx-new").chunk(13)
        assert not wait_received(consumer, "new").failed_recving
        assert np.array_equal(consumer.positions([9, 10, 11, 12], 0, 12), now.positions(BLOCKS, 0, 12))

    def test_what_was_announced_over_a_connection_that_was_replaced_lands(self, push_pair):
        producer, consumer = push_pair()
        producer.fill(1)
        producer.step()
        receiver, met = consumer.worker._worker_half.receiver, hold_watch(consumer)
        park(consumer, decode_params(producer))
        consumer.step()
        wait_for(lambda: producer.worker._worker_half.sender._early and not receiver._lanes._num_tasks)  # the announcement is answered
        (incoming,) = receiver._incoming.values()
        first = incoming.pool
        first.connection.close()
        receiver._pools.get(peer_of(incoming.reference), lambda: False)
        met.set()
        wait_for(lambda: incoming.pool is not first)
        Prefill(producer).chunk(13)
        assert not wait_received(consumer).failed_recving
        assert_handed_over(producer, consumer)


class TestBlocksGivenAway:
    def give_away_under_copies(self, push_pair):
        """The prefill is preempted, others write its blocks, and it is computed again in other ones; then the copies go on."""
        producer, consumer = push_pair()
        producer.fill(1)
        expected = producer.positions(BLOCKS, 0, 12)
        kept = producer.snapshot()
        copies = HeldCopies(producer, consumer)
        request = copies.prefill.request
        producer.scheduler.request_preempted(request)
        request.num_computed_tokens, request.block_ids = 0, []
        producer.step()
        producer.pool.buffer.numpy()[:] = 0xEE
        copies.release.set()
        wait_for(lambda: not consumer.worker._worker_half.receiver._lanes.is_busy(self.peer(producer)))
        return producer, consumer, copies.prefill, kept, expected

    def peer(self, producer):
        return (producer.worker.kv_transfer_config.engine_id, 0, None, None)

    def test_what_is_copied_of_blocks_that_were_given_away_comes_again(self, push_pair):
        producer, consumer, prefill, kept, expected = self.give_away_under_copies(push_pair)
        assert not consumer.step().finished_recving
        producer.pool.buffer.numpy()[:] = kept
        prefill.request.block_ids = list(BLOCKS)
        prefill.chunk(13)
        assert not wait_received(consumer).failed_recving
        assert np.array_equal(consumer.positions(OURS, 0, 12), expected)

    def test_without_asking_for_the_generations_it_would_count(self, push_pair, monkeypatch):
        monkeypatch.setattr(PeerPool, "confirm", lambda *asked: None)
        _, consumer, _, _, expected = self.give_away_under_copies(push_pair)
        assert not wait_received(consumer).failed_recving
        assert not np.array_equal(consumer.positions(OURS, 0, 12), expected)

    def test_what_was_given_away_before_word_of_it_left_is_pushed_again(self, push_pair, monkeypatch):
        monkeypatch.setattr(push_sender, "_QUIESCENT_SECONDS", 0.01)
        producer, consumer = push_pair()
        producer.fill(1)
        kept, expected = producer.snapshot(), producer.positions(BLOCKS, 0, 12)
        pools = producer.worker._worker_half.pools
        tell, arrived, release = pools.tell, threading.Event(), threading.Event()

        def held(peer, message):
            arrived.set()
            release.wait()
            tell(peer, message)

        pools.tell = held
        park(consumer, decode_params(producer))
        consumer.step()
        prefill = Prefill(producer)
        prefill.chunk(13)
        arrived.wait()
        producer.scheduler.request_preempted(prefill.request)
        prefill.request.num_computed_tokens, prefill.request.block_ids = 0, []
        producer.step()
        producer.pool.buffer.numpy()[:] = 0xEE
        release.set()
        wait_for(lambda: not producer.worker._worker_half.sender._busy)
        producer.pool.buffer.numpy()[:] = kept
        prefill.request.block_ids = list(BLOCKS)
        prefill.chunk(13)
        assert not wait_received(consumer).failed_recving
        assert np.array_equal(consumer.positions(OURS, 0, 12), expected)


@over_all
def test_who_announces_after_another_gave_up_gets_what_had_been_pushed_before_too(push_pair, engines):
    producer, first = push_pair()
    second = engines("kv_consumer", mode="write", num_blocks=16)
    producer.fill(1)
    request = park(first, decode_params(producer))
    first.step()
    prefill = Prefill(producer)
    prefill.chunk(5)
    wait_for(lambda: np.array_equal(first.positions(OURS, 0, 5), producer.positions(BLOCKS, 0, 5)))
    request.finish_reason = "abort"
    first.scheduler.request_finished(request, OURS)
    assert wait_received(first).failed_recving == {"d"}
    (push,) = producer.worker._worker_half.sender._pushes.values()
    wait_for(lambda: push.announcement is None)
    park(second, decode_params(producer))
    second.step()
    wait_for(lambda: push.announcement is not None)
    prefill.chunk(8)
    assert not wait_received(second).failed_recving
    assert_handed_over(producer, second)


@over_all
def test_giving_one_announcement_up_costs_no_other_load_its_connection(push_pair):
    producer, consumer = push_pair()
    producer.fill(1)
    producer.step()
    sender, pools = producer.worker._worker_half.sender, consumer.worker._worker_half.pools
    announce, ask = sender.announce, pools.ask
    arrived, release, noticed = threading.Event(), threading.Event(), threading.Event()

    def slow(message):
        if message.transfer_id == "tx-given-up":
            arrived.set()
            release.wait()
        return announce(message)

    def asking(peer, message, aborted):
        def is_aborted():
            given_up = any(incoming.cause is not None for incoming in list(consumer.worker._worker_half.receiver._incoming.values()))
            answer = aborted()
            if given_up:
                noticed.set()
            return answer

        return ask(peer, message, is_aborted)

    park(consumer, decode_params(producer))
    consumer.step()
    wait_for(lambda: len(sender._early) == 1)
    sender.announce, pools.ask = slow, asking
    request = park(consumer, decode_params(producer, "tx-given-up"), blocks=[9, 10, 11, 12], request_id="given-up")
    consumer.step()
    arrived.wait()
    request.finish_reason = "abort"
    consumer.scheduler.request_finished(request, [9, 10, 11, 12])
    consumer.step()
    noticed.wait()
    release.set()
    assert wait_received(consumer, "given-up").failed_recving == {"given-up"}
    wait_for(lambda: [name.transfer_id for name in sender._early] == ["tx"])
    Prefill(producer).chunk(13)
    assert not wait_received(consumer).failed_recving
    assert_handed_over(producer, consumer)


@over_nixl
def test_word_of_a_layer_leaves_behind_its_last_byte(push_pair, monkeypatch):
    events, wait, tell = [], NixlTransfer.wait, NixlMemory.tell

    def waited(transfer, aborted):
        wait(transfer, aborted)
        if transfer._operation == "write":
            events.append("written")

    def told(memory, notification):
        events.append("told")
        tell(memory, notification)

    monkeypatch.setattr(NixlTransfer, "wait", waited)
    monkeypatch.setattr(NixlMemory, "tell", told)
    producer, consumer = push_pair()
    producer.fill(1)
    park(consumer, decode_params(producer))
    Prefill(producer).chunk(13)
    assert not wait_received(consumer).failed_recving
    assert events == ["written", "told"] * len(LAYERS)
    assert_handed_over(producer, consumer)


@over_nixl
def test_told_of_bytes_that_have_not_been_moved_the_consumer_would_take_what_is_not_there(push_pair, monkeypatch):
    """The negative control: nothing is posted before the notification leaves."""

    class Unmoved:
        def wait(self, aborted):
            pass

    post = NixlMemory.post
    monkeypatch.setattr(NixlMemory, "post", lambda memory, operation, *rest: Unmoved() if operation == "write" else post(memory, operation, *rest))
    producer, consumer = push_pair()
    producer.fill(1)
    park(consumer, decode_params(producer))
    Prefill(producer).chunk(13)
    assert not wait_received(consumer).failed_recving
    assert not np.array_equal(consumer.positions(OURS, 0, 12), producer.positions(BLOCKS, 0, 12))


@over_nixl
def test_a_producer_that_does_not_answer_a_cancel_may_still_push(push_pair):
    producer, consumer = push_pair()
    producer.step()
    sender, pools, receiver = producer.worker._worker_half.sender, consumer.worker._worker_half.pools, consumer.worker._worker_half.receiver
    cancel, release = sender.cancel, threading.Event()
    sender.cancel = lambda message: release.wait() and cancel(message)
    request = park(consumer, decode_params(producer))
    consumer.step()
    wait_for(lambda: sender._early)
    (incoming,) = receiver._incoming.values()
    patience, pools._handshake_timeout = pools._handshake_timeout, 0.05
    request.finish_reason = "abort"
    consumer.scheduler.request_finished(request, OURS)
    try:
        consumer.step()
        for _ in range(3):  # asked, not answered, and asked again
            wait_for(lambda: incoming.cancelling or incoming.quiescent.is_set())
            wait_for(lambda: not incoming.cancelling)
        for layer in range(len(LAYERS)):  # what still comes counts as nothing
            receiver.notified(encode(Pushed(transfer_id="tx", nonce=incoming.nonce, layer=layer, start=0, stop=12)))
        assert not incoming.quiescent.is_set()
        assert not consumer.step().finished_recving
    finally:
        pools._handshake_timeout = patience
        release.set()
    assert wait_received(consumer).failed_recving == {"d"}
    assert not sender._early


@pytest.mark.parametrize("transport", ["shared_memory", "nixl"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [{"start": 0}, {"stop": 13}, {"start": 8, "stop": 8}, {"start": 8, "stop": 4}, {"layer": len(LAYERS)}, {"transfer_id": "other"}, {"nonce": 1}],
    ids=str,
)
def test_word_of_what_is_not_awaited_is_dropped_and_counted(push_pair, change):
    producer, consumer = push_pair()
    producer.fill(1)
    producer.step()
    receiver = consumer.worker._worker_half.receiver
    park(consumer, decode_params(producer), num_computed=4)
    consumer.step()
    wait_for(lambda: producer.worker._worker_half.sender._early)
    (incoming,) = receiver._incoming.values()
    awaited = {"transfer_id": "tx", "nonce": incoming.nonce, "layer": 0, "start": 4, "stop": 12}
    receiver.notified(encode(Pushed(**(awaited | change))))
    assert receiver.dropped == 1
    assert incoming.landed == [[] for _ in LAYERS]
    Prefill(producer).chunk(13)
    assert not wait_received(consumer).failed_recving
    assert_handed_over(producer, consumer, 4)
    assert receiver.dropped == 1
