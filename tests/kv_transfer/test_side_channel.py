"""The ZeroMQ side channel: what strangers can send, and what it gets them."""

import contextlib
import secrets
import uuid

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_support import kv_cache_config

from interlock.core.errors import ConfigError, KVTransferError, PeerMismatchError
from interlock.kv_transfer.clock import MonotonicClock
from interlock.kv_transfer.handshake import (
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Challenge,
    Done,
    Heartbeat,
    Hello,
    Leases,
    Proof,
    Pushed,
    Refused,
    Welcome,
    decode,
    describe_pool,
    encode,
    prove,
)
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.transports.desk import PeerDesk, introduce
from interlock.kv_transfer.transports.pool_server import make_welcome
from interlock.kv_transfer.transports.transport import PeerAddress
from interlock.kv_transfer.transports.zmq_link import LOOPBACK, ZmqConnection, ZmqServer

POOL = describe_pool(kv_cache_config())
SECRET = b"between us"


class Side:
    """A served side channel, and ways to reach it."""

    def __init__(self, secret=None, allowed=LOOPBACK):
        self.context = zmq.Context()
        self.engine_id = f"test-{uuid.uuid4().hex}"
        self.leases = LeaseTable(MonotonicClock(), 30.0)
        self.desk = PeerDesk(make_welcome(self.engine_id, 5, POOL, 1 << 20, [0, 1, 2]), "nixl", self.leases, secret=secret)
        self.server = ZmqServer(self.context, "127.0.0.1", 0, allowed, self.desk)
        self.address = PeerAddress(self.engine_id, 0, "127.0.0.1", self.server.port)
        self.connections = []

    def connect(self, address=None, allowed=LOOPBACK):
        self.connections.append(ZmqConnection(self.context, address or self.address, allowed))
        return self.connections[-1]

    def introduce(self, secret=None, pool=POOL, engine_id=None):
        connection = self.connect()
        hello = Hello(version=PROTOCOL_VERSION, engine_id="consumer", pool=pool, transport="nixl")
        welcome = introduce(connection.send, lambda: connection.receive(10.0, lambda: False), engine_id or self.engine_id, hello, secret)
        return welcome, connection

    def raw(self):
        """A socket that sends whatever the test likes."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{self.server.port}")
        self.connections.append(dealer)
        return dealer

    def close(self):
        for connection in self.connections:
            connection.close()
        self.server.close()
        self.server.close()
        self.context.destroy(linger=0)


@pytest.fixture
def side():
    made = Side()
    yield made
    made.close()


@pytest.fixture
def guarded():
    made = Side(secret=SECRET)
    yield made
    made.close()


def ask(dealer, data):
    dealer.send(data)
    assert dealer.poll(10_000)
    return decode(dealer.recv())


@given(frames=st.lists(st.binary(max_size=64), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_no_message_are_refused_and_the_channel_lives_on(side, frames):
    before = side.desk.malformed
    dealer = side.raw()
    dealer.send_multipart(frames)
    assert isinstance(ask(dealer, encode(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL, transport="nixl"))), Welcome)
    assert side.desk.malformed == before + 1
    dealer.close()


@pytest.mark.parametrize("message", [Heartbeat(signatures=["x"]), Done(signature="x"), Leases(expiry={}), Cancel(transfer_id="t", nonce=1)])
def test_a_message_before_the_introduction_is_refused(side, message):
    dealer = side.raw()
    dealer.send(encode(message))
    assert isinstance(ask(dealer, encode(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL, transport="nixl"))), Welcome)
    assert side.desk.malformed == 1


def test_a_message_for_another_mode_is_refused_and_asks_for_a_new_introduction(side):
    _, connection = side.introduce()
    connection.send(Pushed(transfer_id="t", nonce=1, layer=0, start=0, stop=4))
    connection.send(Heartbeat(signatures=["x"]))
    with pytest.raises(KVTransferError, match="in time"):
        connection.receive(0.2, lambda: False)
    assert side.desk.malformed == 2


def test_a_message_beyond_the_limit_costs_the_peer_its_connection(side):
    dealer = side.raw()
    dealer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    side.introduce()
    assert not dealer.poll(0)


def test_heartbeats_and_notices_reach_the_leases(side):
    side.leases.grant("kept", "a request")
    _, connection = side.introduce()
    connection.send(Heartbeat(signatures=["kept", "never"]))
    answer = connection.receive(10.0, lambda: False)
    assert set(answer.expiry) == {"kept"}
    connection.send(Done(signature="kept"))
    connection.send(Heartbeat(signatures=["kept"]))
    assert connection.receive(10.0, lambda: False) == Leases(expiry={})


def test_hosts_that_are_not_allowed_are_not_heard():
    side = Side(allowed=("192.0.2.1",))
    try:
        connection = side.connect()
        connection.send(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL, transport="nixl"))
        with pytest.raises(KVTransferError, match="in time"):
            connection.receive(0.2, lambda: False)
        assert side.desk.foreign == 1
    finally:
        side.close()


def test_hosts_that_are_not_allowed_are_not_called(side):
    with pytest.raises(KVTransferError, match="allowed_hosts"):
        side.connect(PeerAddress(side.engine_id, 0, "192.0.2.1", 4000))
    with pytest.raises(KVTransferError, match="remote_host and remote_port"):
        side.connect(PeerAddress(side.engine_id))


def test_it_listens_on_loopback_only(side):
    assert side.server._socket.getsockopt_string(zmq.LAST_ENDPOINT) == f"tcp://127.0.0.1:{side.server.port}"


def test_a_port_in_use_is_a_config_error(side):
    with pytest.raises(ConfigError, match="another 'port'"):
        ZmqServer(side.context, "127.0.0.1", side.server.port, LOOPBACK, side.desk)


def test_nobody_there_is_noticed_at_once(side):
    connection = side.connect(PeerAddress(side.engine_id, 0, "127.0.0.1", 1))
    with pytest.raises(KVTransferError, match="cannot be reached"):
        connection.send(Done(signature="x"), timeout=30.0)


def test_a_peer_that_ends_is_noticed(side):
    _, connection = side.introduce()
    assert connection.alive
    side.server.close()
    with pytest.raises(KVTransferError, match="cannot be reached"):
        connection.receive(30.0, lambda: False)
    assert not connection.alive


class TestSecret:
    def test_both_know_it(self, guarded):
        assert guarded.introduce(SECRET)[0].engine_id == guarded.engine_id

    @pytest.mark.parametrize("ours", [None, b"another"])
    def test_who_does_not_know_it_is_refused(self, guarded, ours):
        with pytest.raises(PeerMismatchError, match="secret"):
            guarded.introduce(ours)

    def test_who_asks_for_no_proof_is_refused(self, side):
        with pytest.raises(PeerMismatchError, match="asks for no proof"):
            side.introduce(SECRET)

    def test_a_recorded_proof_fits_no_other_challenge(self, guarded):
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = encode(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL, transport="nixl", nonce=nonce))
        dealer = guarded.raw()
        first = ask(dealer, hello)
        assert isinstance(first, Challenge)
        proof = Proof(proof=prove(SECRET, "client", first.nonce, nonce, "x"))
        assert isinstance(ask(dealer, encode(proof)), Welcome)
        again = guarded.raw()
        assert ask(again, hello).nonce != first.nonce
        assert isinstance(ask(again, encode(proof)), Refused)

    def test_our_own_proof_sent_back_is_refused(self, guarded):
        nonce = secrets.token_bytes(NONCE_BYTES)
        dealer = guarded.raw()
        challenge = ask(dealer, encode(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL, transport="nixl", nonce=nonce)))
        assert isinstance(ask(dealer, encode(Proof(proof=challenge.proof))), Refused)

    def test_a_proof_that_nobody_asked_for_is_refused(self, guarded):
        dealer = guarded.raw()
        dealer.send(encode(Proof(proof=b"x")))
        assert isinstance(ask(dealer, encode(Hello(version=1, engine_id="x", pool=POOL, transport="nixl"))), Refused)
        assert guarded.desk.malformed == 1


def test_another_transport_is_refused_with_both_names(side):
    dealer = side.raw()
    answer = ask(dealer, encode(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL)))
    assert "'nixl'" in answer.reason
    assert "'shared_memory'" in answer.reason


def test_a_pool_that_differs_is_refused_with_both_values(side):
    with pytest.raises(PeerMismatchError) as error:
        side.introduce(pool=msgspec.structs.replace(POOL, dtype="float32"))
    assert "'float32'" in str(error.value)
    assert "'bfloat16'" in str(error.value)


def test_an_answer_by_another_engine_is_refused(side):
    with pytest.raises(PeerMismatchError, match="was expected"):
        side.introduce(engine_id="another")


def test_many_sessions_are_forgotten_oldest_first(side, monkeypatch):
    monkeypatch.setattr("interlock.kv_transfer.transports.zmq_link._MAX_SESSIONS", 3)
    connections = [side.introduce()[1] for _ in range(5)]
    assert len(side.desk._introduced) == 3
    connections[0].send(Heartbeat(signatures=[]))
    with contextlib.suppress(KVTransferError):
        connections[0].receive(0.1, lambda: False)
    assert side.desk.malformed == 1
