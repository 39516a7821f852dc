"""The pools of peers: let go of when the peer is gone, and not while somebody is at them."""

import gc
import os
import uuid

import pytest
from kv_support import run_in_thread
from peer_support import MINE, MY_BLOCKS, PeerEngine, load
from push_support import Prefill, decode_params, park, wait_for, wait_received

from interlock.kv_transfer.connectors import peer_worker

over_all = pytest.mark.parametrize("transport", ["shared_memory", "nixl"], indirect=True)


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch):
    monkeypatch.setattr(peer_worker, "HEARTBEATS_PER_LEASE", 3000)


def pools_of(engine):
    return engine.worker._worker_half.pools


def num_mapped():
    """Mappings of shared segments that this process holds."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:interlock" in line for line in maps)


def num_open():
    return len(os.listdir("/proc/self/fd"))


def wait_forgotten(engine):
    pools = pools_of(engine)
    wait_for(lambda: not (pools._pools or pools._peer_locks))


def hand_off(consumer, name, transport="shared_memory"):
    """A producer whose KV the consumer has read. The caller closes it: nobody else may hold what it shares."""
    producer = PeerEngine(f"test-{uuid.uuid4().hex}", "kv_producer", transport=transport)
    producer.fill(1)
    params = producer.prefill(name, MINE, MY_BLOCKS)
    producer.step()
    assert load(consumer, params, MINE, request_id=name) is None
    while not producer.step().finished_sending:
        consumer.step()
    return producer


@over_all
def test_what_is_held_of_producers_that_have_ended_is_let_go(engines, transport):
    consumer = engines("kv_consumer")
    before = None
    for number in range(4):
        producer = hand_off(consumer, f"p{number}", transport)
        assert len(pools_of(consumer)._pools) == 1
        producer.close()
        producer = None
        wait_forgotten(consumer)
        gc.collect()
        before = before or (num_open(), num_mapped())
    wait_for(lambda: num_open() <= before[0] and num_mapped() <= before[1])
    assert not getattr(consumer.worker._worker_half._transport, "_memories", ())


@over_all
def test_what_is_held_of_a_producer_that_was_killed_is_let_go(engines, producer_process):
    consumer = engines("kv_consumer")
    mapped = num_mapped()
    params = producer_process.ask("prefill", "mine", MINE, MY_BLOCKS)
    producer_process.ask("step")
    assert load(consumer, params, MINE) is None
    while not producer_process.ask("step"):
        consumer.step()
    assert pools_of(consumer)._pools
    producer_process.kill()
    wait_forgotten(consumer)
    wait_for(lambda: num_mapped() == mapped)


@over_all
def test_what_is_held_of_consumers_that_were_pushed_to_is_let_go(push_pair, engines):
    producer, consumer = push_pair()
    producer.fill(1)
    park(consumer, decode_params(producer))
    consumer.step()
    prefill = Prefill(producer)
    prefill.chunk(13)
    prefill.finish()
    assert not wait_received(consumer).failed_recving
    consumer.step()
    prefill.wait_end()
    assert pools_of(producer)._pools
    consumer.close()
    wait_forgotten(producer)


def test_a_pool_is_kept_while_an_exchange_with_its_peer_is_under_way(engines, monkeypatch):
    consumer = engines("kv_consumer")
    producer = hand_off(consumer, "first")
    pools = pools_of(consumer)
    (pool,) = pools._pools.values()
    looks = []
    forget = pools._forget
    monkeypatch.setattr(pools, "_forget", lambda key: (forget(key), looks.append(key)))
    with pool.lock:
        producer.close()
        wait_for(lambda: len(looks) >= 2)
        assert list(pools._pools.values()) == [pool]
    wait_forgotten(consumer)


def test_a_peer_that_lives_is_kept(engines):
    consumer = engines("kv_consumer")
    lives, ends = hand_off(consumer, "lives"), hand_off(consumer, "ends")
    pools = pools_of(consumer)
    ends.close()
    wait_for(lambda: len(pools._pools) == 1)
    (pool,) = pools._pools.values()
    assert pool.alive
    assert load(consumer, lives.prefill("again", MINE, MY_BLOCKS), MINE, request_id="again") is None
    assert list(pools._pools.values()) == [pool]
    lives.close()


def test_who_waits_for_a_lock_that_was_let_go_meanwhile_takes_the_one_that_counts(engines):
    pools = pools_of(engines("kv_consumer"))
    key, taken = ("peer", 0, None, None), []
    first = pools._lock_peer(key, lambda: False)
    waiting, _ = run_in_thread(lambda: taken.append(pools._lock_peer(key, lambda: False)))
    del pools._peer_locks[key]
    first.release()
    waiting.join()
    assert taken == [pools._peer_locks[key]]
    assert taken[0] is not first
    taken[0].release()
