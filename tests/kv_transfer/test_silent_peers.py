"""Peers that stand still, alive: whom they hold up, for how long, and what they write when they go on."""

import os
import signal
import threading

import numpy as np
import pytest
from kv_support import run_in_thread
from push_support import BLOCKS, OURS, TOKENS, Prefill, assert_handed_over, decode_params, park, wait_for, wait_received

from interlock.core.forward_context import CUDAGraphMode
from interlock.kv_transfer.connectors import peer_worker, push_sender
from interlock.kv_transfer.references import from_params
from interlock.kv_transfer.transports.nixl_memory import NixlTransfer
from interlock.kv_transfer.transports.peer_client import peer_of

over_tcp = pytest.mark.parametrize("transport", ["tcp"], indirect=True)
over_nixl = pytest.mark.parametrize("transport", ["nixl", "tcp"], indirect=True)
over_all = pytest.mark.parametrize("transport", ["shared_memory", "nixl", "tcp"], indirect=True)


def stop(process):
    os.kill(process.process.pid, signal.SIGSTOP)


def go_on(process):
    os.kill(process.process.pid, signal.SIGCONT)


@over_all
def test_a_producer_that_stands_still_costs_its_own_load_and_no_other_of_the_same_step(engines, producer_process):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", timeout=3.0, handshake_timeout=30)
    producer.fill(1)
    still = producer_process.ask("prefill", "still", TOKENS[:12], [5, 2, 7])
    sound = producer.prefill("sound", TOKENS[:12], [5, 2, 7])
    _, first = consumer.admit("first", TOKENS[:12], still, [1, 2, 3])
    _, second = consumer.admit("second", TOKENS[:12], sound, [4, 5, 6])
    stop(producer_process)
    try:
        output = consumer.step(CUDAGraphMode.FULL, first + second)
        assert set(output.load_errors) == {"first"}
        assert output.invalid_block_ids == {1, 2, 3}
        assert np.array_equal(consumer.positions([4, 5, 6], 0, 11), producer.positions([5, 2, 7], 0, 11))
    finally:
        go_on(producer_process)


class TestReadsOverTcp:
    """A read that waits for a producer that stands still comes to life with the producer: until then its blocks are nobody else's."""

    def read(self, engines, producer_process, monkeypatch):
        """A consumer whose read of blocks 4, 5, 6 is held up by a producer that stands still, and has failed."""
        monkeypatch.setattr(peer_worker, "ABORT_SECONDS", 0.1)
        consumer = engines("kv_consumer", timeout=3.0)
        consumer.fill(2)
        for request_id, blocks in (("warm", [1, 2, 3]), ("held", [4, 5, 6])):
            params = producer_process.ask("prefill", request_id, TOKENS[:12], [5, 2, 7])
            _, promises = consumer.admit(request_id, TOKENS[:12], params, blocks)
            if request_id == "held":
                stop(producer_process)
            output = consumer.step(CUDAGraphMode.FULL, promises)
            assert bool(output.load_errors) == (request_id == "held")
        return consumer, output.pending_block_ids

    @over_tcp
    def test_its_blocks_are_kept_until_it_has_ended(self, engines, producer_process, monkeypatch):
        producer = engines("kv_producer")
        consumer, pending = self.read(engines, producer_process, monkeypatch)
        assert pending == {4, 5, 6}
        _, promises = consumer.admit("other", TOKENS[:12], producer.prefill("p", TOKENS[:12], [5, 2, 7]), [1, 2, 3])
        output = consumer.step(CUDAGraphMode.FULL, promises)
        assert not output.load_errors
        assert not output.finished_recving
        go_on(producer_process)
        reported = frozenset()
        while "held" not in reported:
            reported = consumer.step().finished_recving
        before = consumer.positions([4, 5, 6], 0, 12)
        producer_process.ask("step")
        params = producer_process.ask("prefill", "again", TOKENS[:12], [5, 2, 7])
        _, promises = consumer.admit("again", TOKENS[:12], params, [1, 2, 3])
        assert not consumer.step(CUDAGraphMode.FULL, promises).load_errors
        assert np.array_equal(consumer.positions([4, 5, 6], 0, 12), before)

    @over_tcp
    def test_later_loads_from_it_fail_at_once(self, engines, producer_process, monkeypatch):
        params = producer_process.ask("prefill", "later", TOKENS[:12], [5, 2, 7])
        consumer, _ = self.read(engines, producer_process, monkeypatch)
        peer = peer_of(from_params(params))
        wait_for(lambda: consumer.worker._worker_half.pools.is_silent(peer))
        consumer.driver.load_timeout = 3600.0
        _, promises = consumer.admit("later", TOKENS[:12], params, [1, 2, 3])
        output = consumer.step(CUDAGraphMode.FULL, promises)
        assert "no sign of life" in output.load_errors["later"]
        assert not output.pending_block_ids

    @over_tcp
    def test_a_producer_that_dies_ends_it(self, engines, producer_process, monkeypatch):
        consumer, pending = self.read(engines, producer_process, monkeypatch)
        assert pending == {4, 5, 6}
        producer_process.kill()
        reported = frozenset()
        while "held" not in reported:
            reported = consumer.step().finished_recving


class HeldWrites:
    """The writes to one consumer do not end before the test lets them: as if it stood still."""

    def __init__(self, monkeypatch):
        self.release, self.arrived = threading.Event(), threading.Event()
        self.address = None
        wait = NixlTransfer.wait

        def held(transfer, aborted):
            if transfer._operation == "write" and transfer._memory.address == self.address:
                self.arrived.set()
                self.release.wait()
            wait(transfer, aborted)

        monkeypatch.setattr(NixlTransfer, "wait", held)

    def hold(self, consumer):
        self.address = consumer.pool.buffer.address


@over_nixl
class TestPushes:
    def test_a_consumer_that_holds_up_its_push_delays_no_other_consumers(self, push_pair, engines, monkeypatch):
        held = HeldWrites(monkeypatch)
        producer, slow = push_pair()
        sound = engines("kv_consumer", mode="write", num_blocks=16)
        producer.fill(1)
        held.hold(slow)
        park(slow, decode_params(producer, "tx-slow"))
        slow.step()
        first = Prefill(producer, "tx-slow")
        first.chunk(13)
        held.arrived.wait()
        park(sound, decode_params(producer, "tx-sound"))
        second = Prefill(producer, "tx-sound")
        second.chunk(13)
        assert not wait_received(sound).failed_recving
        assert_handed_over(producer, sound)
        held.release.set()
        assert not wait_received(slow).failed_recving
        assert_handed_over(producer, slow)

    def hold_up_and_preempt(self, push_pair, monkeypatch):
        """A push is under way; its blocks are given to another request, which overwrites them; then the push goes on."""
        monkeypatch.setattr(push_sender, "_QUIESCENT_SECONDS", 0.01)
        held = HeldWrites(monkeypatch)
        producer, consumer = push_pair()
        producer.fill(1)
        expected = producer.positions(BLOCKS, 0, 12)
        held.hold(consumer)
        park(consumer, decode_params(producer))
        consumer.step()
        prefill = Prefill(producer)
        prefill.chunk(5)
        held.arrived.wait()
        producer.scheduler.request_preempted(prefill.request)
        prefill.request.num_computed_tokens, prefill.request.block_ids = 0, []
        producer.step()
        producer.pool.buffer.numpy()[:] = 0xEE
        held.address = None
        held.release.set()
        return producer, consumer, prefill, expected

    def test_what_is_read_of_blocks_that_were_given_up_counts_as_nothing(self, push_pair, monkeypatch):
        producer, consumer, prefill, expected = self.hold_up_and_preempt(push_pair, monkeypatch)
        wait_for(lambda: not producer.worker._worker_half.sender._busy)
        assert all(not landed for incoming in consumer.worker._worker_half.receiver._incoming.values() for landed in incoming.landed)
        producer.fill(1)
        prefill.request.block_ids = list(BLOCKS)
        prefill.chunk(13)
        assert not wait_received(consumer).failed_recving
        assert np.array_equal(consumer.positions(OURS, 0, 12), expected)

    def test_without_the_withdrawal_it_would_count(self, push_pair, monkeypatch):
        monkeypatch.setattr(push_sender.PushSender, "withdraw", lambda sender, transfers: None)
        _, consumer, _, _ = self.hold_up_and_preempt(push_pair, monkeypatch)
        incoming = next(iter(consumer.worker._worker_half.receiver._incoming.values()))
        wait_for(lambda: incoming.landed[0])

    def test_an_abort_does_not_wait_for_it_and_the_blocks_are_kept_until_it_has_ended(self, push_pair, monkeypatch):
        held = HeldWrites(monkeypatch)
        producer, consumer = push_pair()
        held.hold(consumer)
        park(consumer, decode_params(producer))
        consumer.step()
        prefill = Prefill(producer)
        prefill.chunk(5)
        held.arrived.wait()
        prefill.request.finish_reason = "abort"
        assert producer.scheduler.request_finished(prefill.request, BLOCKS) == (True, None)
        for _ in range(3):
            assert not producer.step().finished_sending
            assert producer.scheduler.has_pending_push_work()
        held.release.set()
        prefill.wait_end()
        assert wait_received(consumer).failed_recving == {"d"}

    def test_a_cancel_is_answered_at_once_and_the_load_has_failed_only_when_the_push_has_ended(self, push_pair, monkeypatch):
        held = HeldWrites(monkeypatch)
        producer, consumer = push_pair()
        held.hold(consumer)
        request = park(consumer, decode_params(producer))
        consumer.step()
        prefill = Prefill(producer)
        prefill.chunk(13)
        held.arrived.wait()
        request.finish_reason = "abort"
        consumer.scheduler.request_finished(request, OURS)
        receiver = consumer.worker._worker_half.receiver
        consumer.step()
        (incoming,) = receiver._incoming.values()
        for _ in range(3):  # asked, answered, and asked again
            wait_for(lambda: incoming.cancelling)
            wait_for(lambda: not incoming.cancelling)
        assert not incoming.quiescent.is_set()
        assert not consumer.step().finished_recving
        held.release.set()
        assert wait_received(consumer).failed_recving == {"d"}


@over_nixl
def test_an_engine_closes_although_a_peer_holds_its_transfers_up(engines, producer_process):
    consumer = engines("kv_consumer", timeout=30.0)
    params = producer_process.ask("prefill", "warm", TOKENS[:12], [5, 2, 7])
    _, promises = consumer.admit("warm", TOKENS[:12], params, [1, 2, 3])
    assert not consumer.step(CUDAGraphMode.FULL, promises).load_errors
    params = producer_process.ask("prefill", "held", TOKENS[:12], [5, 2, 7])
    stop(producer_process)
    try:
        _, promises = consumer.admit("held", TOKENS[:12], params, [4, 5, 6])
        kv = consumer.begin_step(CUDAGraphMode.NONE, promises)
        closing, _ = run_in_thread(kv.abort)
        consumer.worker.shutdown()
        closing.join()
    finally:
        go_on(producer_process)
