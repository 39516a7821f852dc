import threading

import numpy as np
import pytest
from kv_support import LAYERS, run_in_thread
from peer_support import resigned

from interlock.core.forward_context import CUDAGraphMode
from interlock.graphs.copy import copy_list
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connectors.peer import PeerConnector
from interlock.kv_transfer.transports.local import MappedMemory
from interlock.kv_transfer.transports.nixl import NixlMemory

MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
TOKENS = list(range(100, 113))

over_both_transports = pytest.mark.parametrize("transport", ["shared_memory", "nixl"], indirect=True)
over_all_transports = pytest.mark.parametrize("transport", ["shared_memory", "nixl", "tcp"], indirect=True)


@over_all_transports
@pytest.mark.parametrize("mode", MODES)
def test_exactly_the_promised_positions_are_read(engines, mode):
    producer, consumer = engines(), engines()
    producer.fill(1)
    consumer.fill(2)
    params = producer.prefill("p", TOKENS[:12], [5, 2, 7])
    before = consumer.snapshot()
    _, promises = consumer.admit("d", TOKENS[:12], params, [1, 6, 3])
    assert (promises[0].start, promises[0].stop) == (0, 11)
    output = consumer.step(mode, promises)
    assert not output.load_errors
    assert output.loaded_bytes == 11 * consumer.kv.bytes_per_token
    assert np.array_equal(consumer.positions([1, 6, 3], 0, 11), producer.positions([5, 2, 7], 0, 11))
    consumer.positions([1, 6, 3], 0, 12)
    changed = int((consumer.snapshot() != before).sum())
    assert changed <= 11 * consumer.kv.bytes_per_token
    kept = consumer.positions([1, 6, 3], 11, 12)
    consumer.pool.buffer.numpy()[:] = before
    assert np.array_equal(kept, consumer.positions([1, 6, 3], 11, 12))


@over_both_transports
@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8), (2, 8), (16, 4)])
@pytest.mark.parametrize("local_hit", [0, 1, 2])
def test_remote_blocks_are_matched_by_position_whatever_the_block_sizes_and_the_local_hit(engines, sizes, local_hit):
    remote_size, size = sizes
    producer, consumer = engines(block_size=remote_size, num_blocks=16), engines(block_size=size, num_blocks=16)
    producer.fill(1)
    consumer.fill(2)
    remote_blocks, blocks = [9, 4, 5, 1, 11, 3, 2][: -(-12 // remote_size)], [6, 7, 1, 3, 12, 2, 9][: -(-13 // size)]
    start = min(local_hit * size, 8)
    before = consumer.positions(blocks, 0, start)
    params = producer.prefill("p", TOKENS[:12], remote_blocks)
    _, promises = consumer.admit("d", TOKENS, params, blocks, start)
    assert (promises[0].start, promises[0].stop) == (start, 12)
    assert not consumer.step(CUDAGraphMode.FULL, promises).load_errors
    assert np.array_equal(consumer.positions(blocks, start, 12), producer.positions(remote_blocks, start, 12))
    assert np.array_equal(consumer.positions(blocks, 0, start), before)


@over_both_transports
def test_a_lease_ends_with_the_consumers_notice_and_the_blocks_get_new_generations(engines):
    producer, consumer = engines(), engines()
    params = producer.prefill("p", TOKENS[:8], [1, 2])
    assert producer.step().finished_sending == frozenset()
    assert producer.scheduler.has_pending_push_work()
    _, promises = consumer.admit("d", TOKENS[:8], params, [1, 2])
    consumer.step(CUDAGraphMode.FULL, promises)
    assert consumer.scheduler.has_pending_push_work()
    consumer.step()
    assert not consumer.scheduler.has_pending_push_work()
    wait_for_end_of_lease(producer, "p")
    producer.step()
    assert not producer.scheduler.has_pending_push_work()
    assert producer.prefill("q", TOKENS[:8], [2, 3])["remote_block_generations"] == [1, 0]


def wait_for_end_of_lease(producer, request_id):
    """Steps, as an idle engine makes them, until the producer reports the end."""
    ended = frozenset()
    while request_id not in ended:
        ended = producer.step().finished_sending


def test_a_repeated_notice_does_not_end_the_lease_of_a_later_request_of_the_same_id(engines):
    producer = engines()
    leases, first = producer.worker._worker_half.leases, None
    for expected in ({"p"}, frozenset()):
        lease = producer.prefill("p", TOKENS[:8], [1, 2])["remote_signature"]
        leases.done(first := first or lease)
        leases.done(first)
        assert producer.step().finished_sending == expected


@over_both_transports
def test_a_full_local_hit_reads_nothing_and_gives_the_reference_back(engines):
    producer, consumer = engines(), engines()
    params = producer.prefill("p", TOKENS[:8], [1, 2])
    _, promises = consumer.admit("d", TOKENS[:8], params, [1, 2], num_computed=7)
    assert promises == ()
    consumer.step()
    wait_for_end_of_lease(producer, "p")


def test_an_abort_before_the_load_gives_the_reference_back(engines):
    producer, consumer = engines(), engines()
    params = producer.prefill("p", TOKENS[:8], [1, 2])
    request, _ = consumer.admit("d", TOKENS[:8], params, [1, 2])
    request.finish_reason = "abort"
    assert consumer.scheduler.request_finished(request, [1, 2]) == (False, None)
    consumer.step()
    wait_for_end_of_lease(producer, "p")


def test_a_request_that_has_been_read_does_not_ask_again(engines):
    producer, consumer = engines(), engines()
    request, promises = consumer.admit("d", TOKENS[:8], producer.prefill("p", TOKENS[:8], [1, 2]), [1, 2])
    consumer.step(CUDAGraphMode.FULL, promises)
    assert consumer.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


@over_all_transports
def test_several_requests_may_read_one_reference_at_once_and_none_afterwards(engines):
    producer, consumer = engines(), engines()
    producer.fill(1)
    params = producer.prefill("p", TOKENS[:8], [1, 2])
    promises = [consumer.admit(name, TOKENS[:8], params, blocks)[1] for name, blocks in (("a", [1, 2]), ("b", [3, 4]))]
    assert not consumer.step(CUDAGraphMode.FULL, promises[0] + promises[1]).load_errors
    assert np.array_equal(consumer.positions([3, 4], 0, 7), producer.positions([1, 2], 0, 7))
    _, again = consumer.admit("c", TOKENS[:8], params, [5, 6])
    output = consumer.step(CUDAGraphMode.FULL, again)
    assert "used before" in output.load_errors["c"]
    assert output.invalid_block_ids == {5, 6}


@over_both_transports
class TestFailures:
    def load_error(self, consumer, params, mode=CUDAGraphMode.FULL, blocks=(1, 2)):
        _, promises = consumer.admit("d", TOKENS[:8], params, list(blocks))
        output = consumer.step(mode, promises)
        assert output.invalid_block_ids == set(blocks)
        assert not output.pending_block_ids
        return output.load_errors["d"]

    @pytest.mark.parametrize("mode", MODES)
    def test_nobody_there(self, engines, mode):
        producer, consumer = engines(), engines()
        params = producer.prefill("p", TOKENS[:8], [1, 2])
        producer.close()
        assert "cannot be reached" in self.load_error(consumer, params, mode)

    def test_blocks_out_of_range(self, engines):
        producer, consumer = engines(), engines()
        params = producer.prefill("p", TOKENS[:8], [1, 2])
        params["remote_block_ids"] = [[1, 8]]
        assert "names block 8" in self.load_error(consumer, params)

    def test_another_epoch(self, engines):
        producer, consumer = engines(), engines()
        params = producer.prefill("p", TOKENS[:8], [1, 2])
        params["remote_epoch"] += 1
        assert "epoch" in self.load_error(consumer, params)

    def test_another_block_size_than_the_producer_has(self, engines):
        producer, consumer = engines(), engines()
        params = producer.prefill("p", TOKENS[:8], [1, 2])
        params |= {"remote_block_size": 8, "remote_block_ids": [[1]], "remote_block_generations": [0]}
        assert "blocks of 8" in self.load_error(consumer, params)

    def test_kv_of_another_identity_is_refused_with_both_values(self, engines):
        producer, consumer = engines(identity="kv-of-one"), engines(identity="kv-of-two")
        message = self.load_error(consumer, producer.prefill("p", TOKENS[:8], [1, 2]))
        assert "kv-of-one" in message
        assert "kv-of-two" in message
        assert producer.step().kv_connector_stats["peers_refused"] >= 1

    def test_a_lease_that_has_expired(self, engines):
        producer, consumer = engines(), engines()
        params = producer.prefill("p", TOKENS[:8], [1, 2])
        params = resigned(producer, params, remote_blocks_expiry_time=0.0)
        assert "lease" in self.load_error(consumer, params)

    def test_a_reference_whose_blocks_went_to_another_prompt(self, engines):
        producer, consumer = engines(), engines()
        params = producer.prefill("p", TOKENS[:8], [1, 2])
        producer.step()
        producer.worker._worker_half.leases.done(params["remote_signature"])
        producer.step()
        producer.step()
        assert "generation" in self.load_error(consumer, params)


class HeldCopy(PeerConnector):
    """A connector whose copies of layer 1 and on wait for the test, as a slow producer would make them."""

    clock = VirtualClock()
    arrived: threading.Semaphore
    release: threading.Event
    calls: int

    @classmethod
    def reset(cls):
        cls.clock = VirtualClock()
        cls.arrived = threading.Semaphore(0)
        cls.release = threading.Event()
        cls.calls = 0

    @staticmethod
    def copy(descriptors, abort):
        HeldCopy.calls += 1
        done = copy_list(descriptors, abort)
        if HeldCopy.calls > 1:
            HeldCopy.arrived.release()
            while not HeldCopy.release.wait(0.001):
                if abort.numpy()[0]:
                    return 0
        return done


@pytest.fixture
def held():
    HeldCopy.reset()
    return HeldCopy


def test_in_eager_mode_layer_0_runs_while_layer_1_is_in_flight(engines, held):
    producer, consumer = engines(connector=held), engines(connector=held)
    _, promises = consumer.admit("d", TOKENS[:8], producer.prefill("p", TOKENS[:8], [1, 2]), [1, 2])
    kv = consumer.begin_step(CUDAGraphMode.NONE, promises)
    consumer.driver.before_layer(0)
    held.arrived.acquire()
    assert consumer.ledger.unfinished_block_ids(1) == {1, 2}
    held.release.set()
    assert not consumer.end_step(kv).load_errors


@pytest.mark.parametrize("mode", MODES)
def test_a_read_past_its_deadline_is_stopped_before_its_blocks_are_reported(engines, held, mode):
    producer, consumer = engines(connector=held), engines(connector=held, timeout=5.0)
    _, promises = consumer.admit("d", TOKENS[:8], producer.prefill("p", TOKENS[:8], [1, 2]), [1, 2])
    thread, result = run_in_thread(lambda: consumer.step(mode, promises))
    held.arrived.acquire()
    assert not result
    held.clock.advance(5.0)
    thread.join()
    assert result[0].invalid_block_ids == {1, 2}
    assert result[0].pending_block_ids == frozenset()
    assert "kv_load_timeout" in result[0].load_errors["d"]
    assert consumer.ledger.unfinished_block_ids.__self__.counters.late == 2
    before = consumer.snapshot()
    held.release.set()
    assert not consumer.step().load_errors
    assert np.array_equal(consumer.snapshot(), before)


def give_blocks_away(producer, params):
    """The lease ends, and another prompt overwrites the blocks."""
    producer.worker._worker_half.leases.done(params["remote_signature"])
    producer.step()
    producer.step()
    producer.fill(99)


def read_while_the_blocks_are_given_away(engines, held):
    producer, consumer = engines(connector=held), engines(connector=held)
    producer.fill(1)
    expected = producer.positions([1, 2], 0, 7)
    params = producer.prefill("p", TOKENS[:8], [1, 2])
    producer.step()
    _, promises = consumer.admit("d", TOKENS[:8], params, [1, 2])
    thread, result = run_in_thread(lambda: consumer.step(CUDAGraphMode.FULL, promises))
    held.arrived.acquire()
    give_blocks_away(producer, params)
    held.release.set()
    thread.join()
    return result[0], expected, consumer.positions([1, 2], 0, 7)


def test_blocks_given_away_in_mid_read_are_a_failure(engines, held):
    output, _, _ = read_while_the_blocks_are_given_away(engines, held)
    assert "generation" in output.load_errors["d"]
    assert output.invalid_block_ids == {1, 2}


def test_without_the_generation_another_prompts_kv_would_be_accepted(engines, held, monkeypatch):
    monkeypatch.setattr("interlock.kv_transfer.transports.peer_client.PeerPool.confirm", lambda *_args: None)
    output, expected, read = read_while_the_blocks_are_given_away(engines, held)
    assert not output.load_errors
    assert not np.array_equal(read, expected)


def test_a_lease_that_expires_in_mid_read_is_a_failure(engines, held):
    producer, consumer = engines(connector=held), engines(connector=held, timeout=29.0, lease_seconds=86400)
    params = producer.prefill("p", TOKENS[:8], [1, 2])
    params = resigned(producer, params, remote_blocks_expiry_time=20.0)
    _, promises = consumer.admit("d", TOKENS[:8], params, [1, 2])
    consumer.scheduler._scheduler_half.consumer.take_kept()
    thread, result = run_in_thread(lambda: consumer.step(CUDAGraphMode.FULL, promises))
    held.arrived.acquire()
    held.clock.advance(21.0)
    held.release.set()
    thread.join()
    assert "lease" in result[0].load_errors["d"]


@pytest.mark.parametrize("start", [-1e6, 1e6])
@over_all_transports
def test_a_lease_counts_in_its_producers_seconds_whatever_the_consumers_clock_shows(engines, start):
    class OtherHost(PeerConnector):
        clock = VirtualClock(start)

    class Here(PeerConnector):
        clock = VirtualClock()

    producer, consumer = engines(connector=Here), engines(connector=OtherHost)
    producer.fill(1)
    params = producer.prefill("p", TOKENS[:12], [5, 2, 7])
    _, promises = consumer.admit("d", TOKENS[:12], params, [1, 6, 3])
    assert not consumer.step(CUDAGraphMode.FULL, promises).load_errors
    assert np.array_equal(consumer.positions([1, 6, 3], 0, 11), producer.positions([5, 2, 7], 0, 11))
    params = resigned(producer, producer.prefill("q", TOKENS[:8], [1, 4]), remote_blocks_expiry_time=0.0)
    _, promises = consumer.admit("e", TOKENS[:8], params, [2, 4])
    consumer.scheduler._scheduler_half.consumer.take_kept()
    assert "lease" in consumer.step(CUDAGraphMode.FULL, promises).load_errors["e"]


def test_heartbeats_extend_a_lease_and_without_them_it_expires(engines, held):
    producer, consumer = engines(connector=held), engines(connector=held)
    params = producer.prefill("p", TOKENS[:8], [1, 2])
    producer.step()
    leases = producer.worker._worker_half.leases
    for _ in range(20):
        held.clock.advance(6.0)
        assert leases.extend([params["remote_signature"]])
    assert producer.step().finished_sending == frozenset()
    held.clock.advance(31.0)
    assert not leases.extend([params["remote_signature"]])
    assert producer.step().finished_sending == {"p"}
    _, promises = consumer.admit("d", TOKENS[:8], params, [1, 2])
    assert consumer.step(CUDAGraphMode.FULL, promises).load_errors
    assert leases.expired == 1


class TestProcesses:
    @over_all_transports
    @pytest.mark.parametrize("mode", MODES)
    def test_reads_between_two_processes(self, engines, producer_process, mode):
        consumer = engines()
        params = producer_process.ask("prefill", "p", TOKENS[:12], [5, 2, 7])
        _, promises = consumer.admit("d", TOKENS[:12], params, [1, 6, 3])
        assert not consumer.step(mode, promises).load_errors
        assert np.array_equal(consumer.positions([1, 6, 3], 0, 11), producer_process.ask("expected", [5, 2, 7], 0, 11))
        consumer.step()
        ended = frozenset()
        while not ended:
            ended = producer_process.ask("step")
        assert ended == {"p"}

    def test_a_producer_killed_in_mid_read_is_a_failure(self, engines, producer_process, held):
        consumer = engines(connector=held)
        params = producer_process.ask("prefill", "p", TOKENS[:12], [5, 2, 7])
        params = producer_process.ask("resign", params, {"remote_blocks_expiry_time": 1e12})
        _, promises = consumer.admit("d", TOKENS[:12], params, [1, 6, 3])
        thread, result = run_in_thread(lambda: consumer.step(CUDAGraphMode.FULL, promises))
        held.arrived.acquire()
        producer_process.kill()
        held.release.set()
        thread.join()
        assert "connection" in result[0].load_errors["d"]
        assert result[0].invalid_block_ids == {1, 6, 3}

    @over_all_transports
    def test_a_producer_killed_before_the_read_is_a_failure(self, engines, producer_process):
        consumer = engines()
        params = producer_process.ask("prefill", "p", TOKENS[:12], [5, 2, 7])
        producer_process.kill()
        _, promises = consumer.admit("d", TOKENS[:12], params, [1, 6, 3])
        assert "cannot be reached" in consumer.step(CUDAGraphMode.FULL, promises).load_errors["d"]


class TestGenerationsOverBothTransports:
    """The blocks go to another prompt between the reads of two layers."""

    def read(self, engines, transport, monkeypatch):
        memory = {"shared_memory": MappedMemory, "nixl": NixlMemory}[transport]
        producer, consumer = engines(), engines()
        producer.fill(1)
        expected = producer.positions([1, 2], 0, 7)
        params = producer.prefill("p", TOKENS[:8], [1, 2])
        producer.step()
        third = consumer.caches[LAYERS[2]]
        post = memory.post
        arrived, go_on = threading.Event(), threading.Event()

        def held(self, operation, descriptors, *rest):
            if third.address <= descriptors[0, 0] < third.address + third.nbytes:
                arrived.set()
                go_on.wait()
            return post(self, operation, descriptors, *rest)

        monkeypatch.setattr(memory, "post", held)
        _, promises = consumer.admit("d", TOKENS[:8], params, [1, 2])
        thread, result = run_in_thread(lambda: consumer.step(CUDAGraphMode.FULL, promises))
        arrived.wait()
        give_blocks_away(producer, params)
        go_on.set()
        thread.join()
        return result[0], expected, consumer.positions([1, 2], 0, 7)

    @over_all_transports
    def test_it_is_noticed(self, engines, transport, monkeypatch):
        output, _, _ = self.read(engines, transport, monkeypatch)
        assert "generation" in output.load_errors["d"]
        assert output.invalid_block_ids == {1, 2}

    @over_all_transports
    def test_without_the_generations_it_would_be_accepted(self, engines, transport, monkeypatch):
        monkeypatch.setattr("interlock.kv_transfer.transports.peer_client.PeerPool.confirm", lambda *_args: None)
        output, expected, read = self.read(engines, transport, monkeypatch)
        assert not output.load_errors
        assert not np.array_equal(read, expected)
