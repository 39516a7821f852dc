"""A peer that does not fit asks again with every request and heartbeat; the log says so once."""

import logging

import pytest
from kv_support import kv_cache_config
from peer_support import MINE, load, two_hand_offs
from push_support import wait_for

from interlock.kv_transfer.clock import MonotonicClock
from interlock.kv_transfer.handshake import Refused, describe_pool, encode
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.transports.desk import PeerDesk, hello
from interlock.kv_transfer.transports.pool_server import make_welcome
from interlock.kv_transfer.transports.repeats import FirstWarnings

POOL = describe_pool(kv_cache_config())


def warnings(caplog, text):
    return [record for record in caplog.records if record.levelno == logging.WARNING and text in record.getMessage()]


def test_a_refused_peer_is_warned_of_once_and_counted_each_time(caplog):
    desk = PeerDesk(make_welcome("server", 5, POOL, 1 << 20, [0, 1, 2]), "shared_memory", LeaseTable(MonotonicClock(), 30.0))
    other = describe_pool(kv_cache_config(identity="kv-other"))
    for session in range(5):
        assert isinstance(desk.answer(session, encode(hello("client", other, "shared_memory"))), Refused)
    assert desk.refused == 5
    assert len(warnings(caplog, "a peer was refused")) == 1
    desk.answer("another", encode(hello("another", other, "shared_memory")))
    assert len(warnings(caplog, "a peer was refused")) == 2


@pytest.mark.parametrize("transport", ["shared_memory", "nixl"], indirect=True)
def test_the_refused_side_warns_once_whatever_the_number_of_its_requests(engines, caplog):
    producer, consumer = engines(identity="kv-of-one"), engines(identity="kv-of-two")
    for number in range(4):
        params = producer.prefill(f"p{number}", MINE[:8], [1, 2])
        assert load(consumer, params, MINE[:8], [1, 2], f"d{number}") is not None
        consumer.step()
    wait_for(lambda: consumer.worker._worker_half.pools.failed_notices >= 4)
    assert len(warnings(caplog, "could not be told")) == 1
    assert len(warnings(caplog, "a peer was refused")) == 1


def test_altered_references_are_warned_of_once_for_each_engine(engines, caplog):
    producer, [consumer], mine, _ = two_hand_offs(engines)
    for number in range(4):
        assert load(consumer, mine | {"remote_request_id": f"x{number}"}, MINE, request_id=f"d{number}") is not None
        consumer.step()
    consumer.worker.shutdown()
    assert len(warnings(caplog, "were altered")) == 1
    assert producer.worker._worker_half.leases.held == 2


def test_a_warning_comes_again_when_it_was_forgotten(caplog):
    first = FirstWarnings(logging.getLogger("interlock.test"))
    for number in (*range(1025), 0):
        first.warn(f"warning {number}")
    assert len(warnings(caplog, "warning 0")) == 2
